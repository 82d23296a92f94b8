"""Records of settings: frozen dataclasses whose numbers are pytree leaves and whose shapes and switches are static.

A number can so be vmapped, and changing it does not recompile; a shape or a switch is part of the
program. Every field states its unit and range once, here, and the check, the command line and the
documentation read the same statement.
"""

import dataclasses
import math
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Number = float | jax.Array
Record = TypeVar("Record")


class ConfigError(ValueError):
    """A setting that cannot work; the message names the field and what would be right."""


class NoEffectError(ConfigError):
    """A setting that changes nothing, because of another one.

    Args:
      field: which has no effect.
      when: what would give it one, in words.
    """

    def __init__(self, field: str, when: str):
        super().__init__(field, when)
        self.field = field

    def __str__(self) -> str:
        return "{} has no effect unless {}".format(*self.args)


@dataclasses.dataclass(frozen=True)
class Interval:
    """The values that a field admits: from `low` to `high`; an open end is excluded itself."""

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
        return f"{left}{self.low:g}, {self.high:g}{right}"


UNIT = Interval(0.0, 1.0)
POSITIVE = Interval(0.0, open_low=True)
NON_NEGATIVE = Interval(0.0)
COUNT = Interval(1)


def number(default: float, doc: str, *, unit: str = "", within: Interval = Interval()) -> Any:
    """A numeric field: a pytree leaf, so that it vmaps and changing it does not recompile.

    Args:
      default: the value when none is given.
      doc: one line for readers and for `--help`.
      unit: the unit, e.g. `nats`.
      within: the admitted values.
    """
    return dataclasses.field(
        default=default, metadata={"doc": doc, "unit": unit, "within": within, "static": False}
    )


def static(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    within: Interval | None = None,
    choices: tuple[Any, ...] = (),
) -> Any:
    """A static field: a size, a switch or a name; another value is another program.

    Args:
      default: the value when none is given; it sets the type on the command line.
      doc: one line for readers and for `--help`.
      unit: the unit, e.g. `steps`.
      within: the admitted values of a number.
      choices: the admitted values of a name.
    """
    metadata = {"doc": doc, "unit": unit, "within": within, "choices": choices, "static": True}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def record(cls: type[Record]) -> type[Record]:
    """Class decorator: a frozen dataclass of `number` and `static` fields, registered as a pytree."""
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    jax.tree_util.register_dataclass(
        cls,
        data_fields=[f.name for f in fields if not f.metadata["static"]],
        meta_fields=[f.name for f in fields if f.metadata["static"]],
    )
    return cls


def check(config: Any) -> None:
    """Checks every field against its range; traced values are let through (they were checked at the entry).

    Args:
      config: a record; numeric leaves may be arrays (stacked hyperparameters), each element is
        checked.

    Raises:
      ConfigError: names the first field out of its range, its value and the range.
    """
    for field in dataclasses.fields(config):
        value, within, choices = (
            getattr(config, field.name),
            field.metadata["within"],
            field.metadata.get("choices"),
        )
        if isinstance(value, jax.core.Tracer):
            continue
        if choices and value not in choices:
            raise ConfigError(
                f"{field.name} must be one of {', '.join(map(str, choices))}, got {value!r}"
            )
        if (
            field.metadata["static"]
            and field.default is not None
            and not isinstance(value, type(field.default))
        ):
            raise ConfigError(
                f"{field.name} must be of type {type(field.default).__name__}, got {value!r}"
            )
        if within is None:
            continue
        try:
            elements = np.asarray(value, dtype=np.float64).ravel().tolist()
        except (TypeError, ValueError):
            raise ConfigError(f"{field.name} must be a number, got {value!r}") from None
        for element in elements:
            if element not in within:
                unit = f" {field.metadata['unit']}" if field.metadata["unit"] else ""
                raise ConfigError(f"{field.name} must lie in {within}{unit}, got {element:g}")


def require_effect(config: Any, name: str, condition: bool, when: str) -> None:
    """Refuses a field that was set although it has no effect.

    Args:
      config: a record.
      name: of the field.
      condition: whether it has an effect.
      when: what would give it one, in words.

    Raises:
      NoEffectError: the field holds another value than its default, and `condition` is False.
    """
    if not condition and changed(config, name):
        raise NoEffectError(name, when)


def require_unset(config: Any, name: str, when: str) -> None:
    """Refuses a field that was set where another argument takes its place; see `require_effect`."""
    require_effect(config, name, False, when)


def require_order(low: Number, high: Number, low_name: str, high_name: str) -> None:
    """Refuses two fields in the wrong order; traced values are let through.

    Raises:
      ConfigError: `high` is below `low` somewhere.
    """
    if not any(isinstance(value, jax.core.Tracer) for value in (low, high)) and np.any(
        np.asarray(high) < np.asarray(low)
    ):
        raise ConfigError(f"{high_name} must be at least {low_name} = {low}, got {high}")


def changed(config: Any, name: str) -> bool:
    """Whether a field holds another value than its default; a traced value counts as unchanged.

    For the check that a field which has no effect was not set.
    """
    value, default = getattr(config, name), getattr(type(config), name)
    if isinstance(value, jax.core.Tracer):
        return False
    return (
        value != default
        if isinstance(default, str)
        else bool(np.any(np.float32(value) != np.float32(default)))
    )


def as_arrays(config: Record) -> Record:
    """Numeric leaves as float32 arrays, so that an `int` or a `np.float32` in place of a `float` does not recompile."""
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), config)
