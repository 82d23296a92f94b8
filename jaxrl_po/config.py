"""Config records: frozen dataclasses with numbers as pytree leaves and shapes and switches static.

A number can therefore be vmapped and changed without recompilation; a shape or a switch is part of
the program. Each field declares its unit and range once, for the range check, the command line and
the documentation.

The same conversion rule holds for every record, every factory and `run.Experiment`. A NumPy scalar
or a 0-d array counts as the Python number that it holds. Text is not a number, a bool is not a
number, and 1 is not a bool: each such value is refused with the name of its field. A traced size,
switch or name is refused too.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Number = float | jax.Array
Json = dict[str, Any]
"""Contents of a JSON object."""
Values = Mapping[str, Any]
"""Map from the name of a setting to its value."""
Record = TypeVar("Record")
Value = TypeVar("Value")


class ConfigError(ValueError):
    """Error for an invalid setting, shown as `<field>: <message>`.

    Args:
      field: name of the invalid setting.
      message: sentence without a subject that states the valid values, as in `must be off`.
    """

    def __init__(self, field: str, message: str):
        super().__init__(field, message)
        self.field, self.message = field, message

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


class NoEffectError(ConfigError):
    """Error for a setting that has no effect because of another setting.

    Args:
      field: name of the setting without effect.
      when: condition, in words, under which the setting has an effect.
    """

    def __init__(self, field: str, when: str):
        super().__init__(field, when)
        self.message = f"has no effect unless {when}"


class PythonObject(str):
    """Text `file.py:name` or `python:name` of a setting that stands for a Python object.

    The object is compared, hashed and written to files as its text.

    Attributes:
      value: Python object that the text stands for.
    """

    value: Any

    @classmethod
    def of(cls, text: str, value: object) -> Self:
        """Makes the text that carries a Python object, or a list of names and objects."""
        made = cls(text)
        made.value = value
        return made

    def __reduce__(self) -> str | tuple[Any, ...]:
        # Another process imports the file itself and may give the file's module another name.
        in_files = all(".py:" in each for each in self.split(","))
        return (str, (str(self),)) if in_files else super().__reduce__()

    def __deepcopy__(self, memo: object) -> Self:
        return self


@dataclasses.dataclass(frozen=True)
class Interval:
    """Valid values of a field: finite numbers from `low` to `high`, without an end that is open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, x: float) -> bool:
        above = x > self.low if self.open_low else x >= self.low
        below = x < self.high if self.open_high else x <= self.high
        return above and below and math.isfinite(x)

    def __str__(self) -> str:
        left, right = (
            "(" if self.open_low or self.low == -math.inf else "[",
            ")" if self.open_high or self.high == math.inf else "]",
        )
        return f"{left}{self.low:.10g}, {self.high:.10g}{right}"


UNIT = Interval(0.0, 1.0)
POSITIVE = Interval(0.0, open_low=True)
NON_NEGATIVE = Interval(0.0)
COUNT = Interval(1)
SEED = Interval(0, 2**32 - 1)  # number of bits of a seed that a PRNG key uses
SETTING = "setting"  # name of the entry in a dataclass field's metadata
GIVEN = object()  # in `Setting.when`: any text except the empty text


When = tuple[Any, ...]
"""Name of a field of the same record, and the values of this field that give another field an
effect."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """Metadata of a setting; type and default are stored in the field itself.

    Attributes:
      doc: Description in one line, also shown by `--help`.
      unit: Unit of the value, such as `nats`; empty if it has none.
      within: Valid values of a number; None if any number is valid.
      choices: Valid values of a name, or a table with these names as keys; empty if any name is
        valid. A `PythonObject` is valid too.
      static: True if a changed value compiles a new program.
      when: `(field, *values)`: the setting has an effect if this field of the record has one of the
        values; an `Interval` means any number in the interval, `GIVEN` any text but the empty text,
        () always.
      common: True if `--help` shows the field; `--help=all` shows all fields.
      resume: Difference that is allowed when a run is resumed: `same`, `grows` or `any`.
      sweep: Use of the field in a sweep: `varies`, `same` in all runs, or `absent`.
      stored: True if `config.json` stores the value; False for a setting of a single start.
      compared: True if the processes of a run must agree on the value.
      was: Former names of the field, accepted in JSON files only.
      were: Pairs of a former and a present value of the field, accepted in JSON files only.
    """

    doc: str
    unit: str = ""
    within: Interval | None = None
    choices: tuple[Any, ...] | dict[str, Any] = ()
    static: bool = True
    when: When = ()
    common: bool = False
    resume: Literal["same", "grows", "any"] = "same"
    sweep: Literal["varies", "same", "absent"] = "varies"
    stored: bool = True
    compared: bool = True
    was: tuple[str, ...] = ()
    were: tuple[tuple[str, Any], ...] = ()


class FieldKeywords(TypedDict, total=False):
    """Optional keywords of `number` and `static`; `Setting` documents them."""

    unit: str
    when: When
    common: bool
    resume: Literal["same", "grows", "any"]
    sweep: Literal["varies", "same", "absent"]
    stored: bool
    compared: bool
    was: tuple[str, ...]
    were: tuple[tuple[str, Any], ...]


def number(
    default: float, doc: str, *, within: Interval = Interval(), **about: Unpack[FieldKeywords]
) -> float:
    """Declares a numeric field, a pytree leaf that can be vmapped and changed without recompiling.

    Args:
      default: Default value of the field.
      doc: Description in one line, also shown by `--help`.
      within: Valid values of the field.
      about: Further fields of `Setting`.
    """
    setting = Setting(doc, within=within, static=False, **about)
    return dataclasses.field(default=default, metadata={SETTING: setting})


def static(
    default: Value,
    doc: str,
    *,
    within: Interval | None = None,
    choices: tuple[Any, ...] | dict[str, Any] = (),
    **about: Unpack[FieldKeywords],
) -> Value:
    """Declares a static field: a size, a switch or a name; another value compiles another program.

    Args:
      default: Default value of the field; its type is the flag's type on the command line.
      doc: Description in one line, also shown by `--help`.
      within: Valid values of a numeric field.
      choices: Valid values of a name, or a table with these names as keys.
      about: Further fields of `Setting`.
    """
    setting = Setting(doc, within=within, choices=choices, **about)
    return dataclasses.field(default=default, metadata={SETTING: setting})


class common:  # the name reads as a prefix of the functions
    """Variants of `number` and `static` for fields that `--help` shows."""

    number = functools.partial(number, common=True)
    static = functools.partial(static, common=True)


def setting_of(field: dataclasses.Field[Any]) -> Setting:
    """Returns the metadata of a field of a record."""
    setting: Setting = field.metadata[SETTING]
    return setting


def is_record(value: object) -> bool:
    """Returns whether a value is a class that the decorator `record` has made."""
    if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
        return False
    return all(SETTING in field.metadata for field in dataclasses.fields(value))


def with_field_docs(cls: type[Record]) -> type[Record]:
    """Gives each field of a NamedTuple its entry under `Attributes`, as `help` then shows.

    Example:
      >>> from typing import NamedTuple
      >>> @with_field_docs
      ... class Point(NamedTuple):
      ...     '''Point.
      ...
      ...     Attributes:
      ...       x: First coordinate.
      ...     '''
      ...     x: float
      >>> Point.x.__doc__
      'First coordinate.'
    """
    entries = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")[2]
    for name, text in re.findall(r"^  (\w+): (.*(?:\n    .*)*)", entries, re.MULTILINE):
        getattr(cls, name).__doc__ = " ".join(text.split())
    return cls


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[Record]) -> type[Record]:
    """Makes a class a frozen dataclass of `number` and `static` fields, and a pytree.

    The class docstring gets a line on each field, including inherited fields, for `help(cls)`.

    Example:
      >>> @record
      ... class Settings:
      ...     '''Sizes of a problem.'''
      ...     num_steps: int = static(8, "length of a rollout", unit="steps", within=COUNT)
      >>> print(Settings.__doc__)
      Sizes of a problem.
      <BLANKLINE>
      Attributes:
        num_steps: length of a rollout (steps; in [1, inf); default 8)
    """
    summary = inspect.cleandoc(cls.__doc__ or "")
    own = cls.__dict__.get("__post_init__", lambda config: None)

    def convert(config: Record) -> None:
        _convert_statics(config)
        own(config)

    cls.__post_init__ = convert  # type: ignore[attr-defined]
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    lines = (f"  {each.name}: {describe_field(each, default=True)}" for each in fields)
    cls.__doc__ = "\n".join([summary, "", "Attributes:", *lines]).strip()
    jax.tree_util.register_dataclass(
        cls,
        data_fields=[f.name for f in fields if not setting_of(f).static],
        meta_fields=[f.name for f in fields if setting_of(f).static],
    )
    return cls


def _convert_statics(config: Any) -> None:
    """Converts the static fields of a new record; see `static_value`."""
    for field in dataclasses.fields(config):
        if setting_of(field).static:
            kind = object if field.default is None else type(field.default)
            value = static_value(field.name, getattr(config, field.name), kind)
            object.__setattr__(config, field.name, value)


def static_value(name: str, value: Any, kind: type = object) -> Any:
    """Returns the Python number in a NumPy scalar or a 0-d array, and any other value unchanged.

    Args:
      name: name of the static field or argument, for the message.
      value: value to convert.
      kind: expected type; `float` also accepts a whole number and a traced number.

    Raises:
      ConfigError: the value is traced and the type is not `float`, or the value has another type.

    Example:
      >>> static_value("width", np.int64(8)), static_value("discount", jnp.float32(0.9))
      (8, 0.9)
    """
    if isinstance(value, jax.core.Tracer):
        # A traced number is, for example, a temperature that is vmapped over problems.
        if kind is float:
            return value
        raise ConfigError(name, "is static: build one program for each value")
    if isinstance(value, np.generic | np.ndarray | jax.Array) and not value.ndim:
        if jnp.issubdtype(value.dtype, np.floating):
            value = float(str(value))  # gives 0.9 for a float32, whose double is 0.8999999761581421
        elif _is_number(value) or value.dtype == bool:
            value = value.item()
    value = float(value) if kind is float and _is_number(value) and not np.ndim(value) else value
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(name, f"must be of type {kind.__name__}, got {value!r}")
    return value


def _is_number(value: Any) -> bool:
    """Returns whether a value is a real number or an array of real numbers, but not a bool."""
    if isinstance(value, numbers.Real):
        return not isinstance(value, bool)
    if not isinstance(value, jax.Array):
        value = np.asarray(value) if hasattr(value, "__array__") else np.bool_()
    return any(jnp.issubdtype(value.dtype, kind) for kind in (np.integer, np.floating))


def describe_field(field: dataclasses.Field[Any], *, default: bool = False) -> str:
    """Returns one line about a field: description, unit, valid values and, if asked, default."""
    setting = setting_of(field)
    notes = [setting.unit]
    if setting.within is not None and setting.within != Interval():
        notes.append(f"in {setting.within}")
    elif setting.choices:
        notes.append(f"one of {', '.join(map(str, setting.choices))}")
    if default:
        notes.append(f"default {field.default!r}")
    shown = "; ".join(filter(None, notes))
    return setting.doc + (f" ({shown})" if shown else "")


def check(config: Any) -> None:
    """Checks the range and the effect of every field; traced numbers are skipped.

    Traced numbers were checked before tracing started. A field without effect must have its default
    value.

    Args:
      config: record to check; if a numeric leaf is an array (stacked hyperparameters), every
        element of the array is checked.

    Raises:
      ConfigError: names the first field out of range, its value and the range.
      NoEffectError: names the first field that was set although it has no effect.
    """
    fields = [(field.name, setting_of(field)) for field in dataclasses.fields(config)]
    for name, setting in fields:
        value = getattr(config, name)
        if isinstance(value, jax.core.Tracer):
            continue
        named = setting.choices and not isinstance(value, PythonObject)
        if named and value not in setting.choices:
            choices = ", ".join(map(str, setting.choices))
            raise ConfigError(name, f"must be one of {choices}, got {value!r}")
        if setting.within is not None:
            check_number(name, value, setting.within, setting.unit)
    for name, setting in fields:
        if setting.when:
            other, *values = setting.when
            met = any(_matches(getattr(config, other), value) for value in values)
            require_effect(config, name, met, _in_words(other, values))


def _matches(value: Any, wanted: Any) -> bool:
    """Returns whether a value equals the wanted value or lies in the wanted interval.

    True if traced.
    """
    if isinstance(value, jax.core.Tracer):
        return True
    if wanted is GIVEN:
        return bool(value)
    return bool(value in wanted if isinstance(wanted, Interval) else value == wanted)


def _in_words(name: str, values: Sequence[Any]) -> str:
    """Returns the condition, in words, that a field has one of several values.

    Example:
      >>> _in_words("early_stop", [True]), _in_words("scale", ["std", "batch"])
      ('early_stop is on', 'scale is std or batch')
    """
    words = {True: "on", False: "off", POSITIVE: "above 0", COUNT: "above 0", GIVEN: "given"}
    return f"{name} is {' or '.join(words.get(value, str(value)) for value in values)}"


def check_number(name: str, value: Any, within: Interval = Interval(), unit: str = "") -> None:
    """Checks a number, or every element of an array of numbers.

    Raises:
      ConfigError: the value is text, a bool or another object, or not in `within`.
    """
    if not _is_number(value):
        raise ConfigError(name, f"must be a number, got {value!r}")
    for element in np.asarray(value, np.float64).ravel().tolist():
        if element not in within:
            shown = f"{within} {unit}".rstrip()
            raise ConfigError(name, f"must lie in {shown}, got {element:.10g}")


def check_size(name: str, value: Any, within: Interval = COUNT, *, part: str = "") -> int:
    """Returns an integer of Python, NumPy or JAX as an `int`.

    Args:
      name: name of the setting or argument.
      value: any value.
      within: valid range.
      part: name of the part of the setting that the value is, for the message; empty for a complete
        setting.

    Raises:
      ConfigError: the value is traced, or is not an integer in `within`.
    """
    value = static_value(name, value)
    try:
        size = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        size = None
    if size is None or size not in within:
        subject = f"{part} " if part else ""
        raise ConfigError(name, f"{subject}must be a whole number in {within}, got {value!r}")
    return size


def require_effect(config: Any, name: str, condition: bool, when: str) -> None:
    """Rejects a field that was set although it has no effect.

    Args:
      config: record that holds the field.
      name: name of the field.
      condition: whether the field has an effect.
      when: condition in words, for the message.

    Raises:
      NoEffectError: the field differs from its default, and `condition` is False.
    """
    if not condition and changed(config, name):
        raise NoEffectError(name, when)


def require_unset(config: Any, name: str, when: str) -> None:
    """Rejects a field that was set although another argument replaces the field.

    See `require_effect`.
    """
    require_effect(config, name, False, when)


def require_order(low: Number, high: Number, low_name: str, high_name: str) -> None:
    """Rejects two fields in the wrong order; skips traced values.

    Raises:
      ConfigError: an element of `high` is below the element of `low`.
    """
    if not any(isinstance(value, jax.core.Tracer) for value in (low, high)) and np.any(
        np.asarray(high) < np.asarray(low)
    ):
        raise ConfigError(high_name, f"must be at least {low_name} = {low}, got {high}")


def changed(config: Any, name: str) -> bool:
    """Returns whether a field differs from its default; a traced value counts as unchanged."""
    value, default = getattr(config, name), getattr(type(config), name)
    if isinstance(value, jax.core.Tracer):
        return False
    if isinstance(default, str):
        return bool(value != default)
    # The comparison is in float32, the type of a leaf after `as_arrays`.
    return bool(np.any(np.float32(value) != np.float32(default)))


def as_arrays(config: Record) -> Record:
    """Converts numeric leaves to float32 arrays.

    An `int` or a `np.float32` in place of a `float` then does not recompile the program.
    """
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), config)
