"""Records of settings as command-line flags, with one-line errors that name the flag.

A record with the prefix `config` gives `--config.<field>`; the empty prefix gives `--<field>`.
Type, unit, range and default are read from the record, so that the check, `--help` and the
documentation cannot disagree. A field whose default is None (such as a device axis) is set by code
and has no flag.
"""

import contextlib
import dataclasses
import difflib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from jaxrl_po import config
from jaxrl_po.config import ConfigError, Json, NoEffectError, Values
from jaxrl_po.run.errors import RunError, UsageError, UserCodeError, format_error, spell, wrapped
from jaxrl_po.run.experiment import user_code
from jaxrl_po.run.loop import signals
from jaxrl_po.run.store.sources import DIGESTS, READ

Field = dataclasses.Field[Any]
Sections = Mapping[str, type]
EVERYTHING = "--help=all"
HELP = ("--help", "-help", "-h", EVERYTHING)
FORMER_SECTIONS = {"tools": "environment"}  # former prefix by present prefix
FLAG = re.compile(r"--?[a-zA-Z]")
ORIGINS = ("given", "stored", "tuned", "preset", "default")  # the first origin with a value wins


class FlagText(str):
    """Value of a flag as written on a command line, before the value is converted."""


class Switch(FlagText):
    """Text of a flag that was written without a value."""


def _integer(text: str) -> int:
    """Returns an integer, also if written as `1e5`; raises ValueError for any other text."""
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(text) if text.lstrip("+-").isdecimal() else int(number)


def _integers(text: str) -> tuple[int, ...]:
    """Returns integers separated by commas, e.g. `64,64`."""
    return tuple(_integer(item) for item in text.split(",") if item)


SWITCHES = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
# Maps the type of a value to the parser of its text and to the type's name in words.
_TYPES: dict[type, tuple[Callable[[str], Any], str]] = {
    bool: (lambda text: SWITCHES[text.lower()], "true or false"),
    int: (_integer, "an integer"),
    tuple: (_integers, "integers such as 64,64"),
    float: (float, "a number"),
    str: (str, "text"),
}


def parse_records(argv: Sequence[str], sections: Sections) -> Json:
    """Reads records of settings from command-line arguments.

    Args:
      argv: Arguments, without the program's name.
      sections: Record class of each section by prefix; `""` is the section of flags without prefix.

    Returns:
      Records by prefix; see `merge_layers`.

    Raises:
      ConfigError: A flag is unknown (the nearest flag is suggested), or a value has the wrong type
        or is out of its range; the error's field is the flag without its dashes.
      UsageError: An argument is neither a flag nor the value of a flag.

    Example:
      >>> @config.record
      ... class Settings:
      ...     envs: int = config.static(8, "environments side by side", within=config.COUNT)
      >>> parse_records(["--problem.envs=3"], {"problem": Settings})
      {'problem': Settings(envs=3)}
      >>> parse_records(["--problem.env=3"], {"problem": Settings})
      Traceback (most recent call last):
      jaxrl_po...ConfigError: problem.env: is not a setting; did you mean problem.envs?
    """
    given = convert(tokenize(argv, sections), sections)
    return merge_layers(sections, {"given": given})[0]


def tokenize(argv: Sequence[str], sections: Sections) -> dict[str, FlagText]:
    """Returns the texts of the flags among command-line arguments, by flag name.

    Args:
      argv: Arguments, without the program's name.
      sections: Record classes of the known flags by prefix. An unknown flag takes the next argument
        as its value, unless that argument is a flag.

    Raises:
      UsageError: An argument is not UTF-8, or is neither a flag nor the value of a flag.

    Example:
      >>> @config.record
      ... class Settings:
      ...     resume: bool = config.static(False, "continue")
      >>> tokenize(["--problem.num_envs", "3", "--noresume", "--seed=1"], {"": Settings})
      {'problem.num_envs': '3', 'resume': 'false', 'seed': '1'}
    """
    found, fields, last = dict[str, FlagText](), flag_fields(sections.items()), ""
    for word in argv:
        try:
            word.encode()  # text that is not UTF-8 could not be stored
        except UnicodeEncodeError:
            raise UsageError(f"{word!a} must be UTF-8") from None
        if FLAG.match(word):
            name, equals, text = word.lstrip("-").partition("=")
            known = name[2:] in fields or ("." in name and name not in fields)
            negated = not equals and name.startswith("no") and known
            name = name.removeprefix("no") if negated else name
            found[name] = FlagText(text) if equals else Switch("false" if negated else "true")
            is_switch = name in fields and _type(fields[name]) is bool
            last = "" if equals or negated or is_switch else name
        elif last:
            found[last], last = FlagText(word), ""
        else:
            raise UsageError(f"{word!r} is not a flag; write --name=value")
    return found


def flag_fields(sections: Iterable[tuple[str, type]]) -> dict[str, Field]:
    """Returns the field of each flag by flag name."""
    return {
        join(prefix, field.name): field for prefix, record in sections for field in settable(record)
    }


def convert(given: Values, sections: Sections) -> Json:
    """Returns the values of flags in the types of their fields, without checking ranges.

    Args:
      given: `FlagText` or a Python value by flag name; a Python string is never read as a number.
      sections: Record class of each section by prefix.

    Raises:
      ConfigError: A name is not a flag of the sections, or a value has another type.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      >>> convert({"problem.num_envs": FlagText("3")}, {"problem": Settings})
      {'problem.num_envs': 3}
      >>> convert({"problem.num_envs": "3"}, {"problem": Settings})
      Traceback (most recent call last):
      jaxrl_po...ConfigError: problem.num_envs: must be an integer, got '3'
    """
    fields = flag_fields(sections.items())
    for name in given:
        if name not in fields:
            raise ConfigError(name, unknown_flag(name, sections))
    return {name: _converted(name, fields[name], value) for name, value in given.items()}


def _converted(name: str, field: Field, value: object) -> object:
    kind = _type(field)
    former = dict(config.setting_of(field).were)
    if isinstance(value, str) and value in former:
        raise ConfigError(name, f"must be {spell(former[value])}, which was called {value}")
    parser, words = _TYPES[kind]
    try:
        if isinstance(value, Switch) and kind is not bool:
            raise UsageError(f"--{name} lacks a value; write --{name}=value")
        if isinstance(value, FlagText):
            return parser(value)
        value = config.static_value(name, value)
        if kind is str:
            value = value if isinstance(value, str) else spell(value)
            value.encode()  # text that is not UTF-8 could not be stored
            return value
        if kind is tuple:
            return parser(spell(value))
        if isinstance(value, str | tuple | list) or isinstance(value, bool) != (kind is bool):
            raise TypeError
        return value if kind is bool else parser(spell(value))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(name, f"must be {words}, got {value!r}") from None


def current(stored: Values, sections: Sections) -> Json:
    """Returns stored settings under today's names of their fields and values, in stored order.

    Args:
      stored: Value by flag name, as a former version may have written it.
      sections: Record class of each section by prefix.
    """
    names, found = dict[str, str](), dict(stored)
    code = found.get("resolved", {}).get(DIGESTS, {})
    for prefix, record in sections.items():
        for field in settable(record):
            name, setting = join(prefix, field.name), config.setting_of(field)
            for old in former_names(prefix, field):
                names |= {old: name} if old in found and name not in found else {}
            if not setting.stored:  # a former version may have stored the setting
                found.pop(name, None)
            for key in {name, *(old for old in names if names[old] == name)} & found.keys():
                for pair in setting.were:
                    found[key] = _present(found[key], *pair)
    if code:
        found["resolved"] = found["resolved"] | {DIGESTS: {names.get(x, x): code[x] for x in code}}
    return {names.get(name, name): value for name, value in found.items()}


def _present(value: object, old: str, new: object) -> object:
    """Replaces a former value by its present value, also in a list or distribution of values."""
    if isinstance(value, list):
        return [spell(new) if each == old else each for each in value]
    if isinstance(value, str) and value != old:
        return re.sub(rf"\b{old}\b", spell(new), value) if "(" in value else value
    return new if value == old else value


def former_names(prefix: str, field: Field) -> list[str]:
    """Returns the names of the flags that a field had in former versions."""
    prefixes = [prefix, *([FORMER_SECTIONS[prefix]] if prefix in FORMER_SECTIONS else [])]
    names = [field.name, *config.setting_of(field).was]
    return [join(x, name) for x in prefixes for name in names][1:]


def merge_layers(sections: Sections, layers: Mapping[str, Values]) -> tuple[Json, dict[str, str]]:
    """Merges the values of flags by their origin, and checks the resulting records.

    A tuned or preset value is dropped if a given or stored value makes it ineffective.

    Args:
      sections: Record class of each section by prefix.
      layers: Values by flag name, for each origin (see `ORIGINS`).

    Returns:
      Records by prefix, each checked field by field (`config.check`) and then by its own `validate`
      if it has one; and the origin of each value by flag name.

    Raises:
      ConfigError: A value is out of its range, or has no effect; the error's field is the flag.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      ...     num_steps: int = config.static(16, "length of a rollout")
      >>> merge_layers({"problem": Settings}, {"given": {"problem.num_envs": 3}})[0]
      {'problem': Settings(num_envs=3, num_steps=16)}
    """
    records, origins = dict[str, Any](), dict[str, str]()
    ordered = [origin for origin in ORIGINS if origin in layers]
    for prefix, record in sections.items():
        found: dict[str, str] = {}  # origin of each value by field
        for field in settable(record):
            name = join(prefix, field.name)
            found[field.name] = next((x for x in ordered if name in layers[x]), "default")
        with locating({prefix: record}):
            records[prefix] = _checked(prefix, record, found, layers)
        origins |= {join(prefix, field): origin for field, origin in found.items()}
    return records, origins


def _checked(
    prefix: str, record: type, origins: dict[str, str], layers: Mapping[str, Values]
) -> object:
    """Returns the checked record; dropped values have the origin `default` afterwards."""
    names = {field: join(prefix, field) for field in origins}
    values = {
        field: layers[origin][names[field]]
        for field, origin in origins.items()
        if origin != "default"
    }
    for field in values.keys() & {x for x, name in names.items() if name in READ}:
        values[field] = user_code.find_object(names[field], values[field])
    # JSON stores tuples as lists.
    made = record(**{x: tuple(y) if isinstance(y, list) else y for x, y in values.items()})
    try:
        config.check(made)
        if hasattr(made, "validate"):
            made.validate()
    except NoEffectError as error:
        chosen = {"given", "stored"} & set(origins.values())
        if not chosen or origins.get(error.field) not in ("tuned", "preset"):
            raise
        origins[error.field] = "default"
        return _checked(prefix, record, origins, layers)
    return made


def _type(field: Field) -> type:
    """Returns the type of a flag's value; float for a field that is not static."""
    return type(field.default) if config.setting_of(field).static else float


def settable(record: type) -> list[Field]:
    """Returns the fields of a record that have a flag."""
    return [field for field in dataclasses.fields(record) if field.default is not None]


def join(prefix: str, name: str) -> str:
    """Returns the name of a flag, without its dashes."""
    return f"{prefix}.{name}" if prefix else name


# Names of fields in other libraries that share no letters with the names in this library.
ALIASES = {
    **dict.fromkeys(("clip", "clip_ratio", "clip_range", "clip_eps", "clip_coef"), "epsilon_high"),
    **dict.fromkeys(("vf_coef", "vf_coeff", "vf_loss_coeff", "critic_coef"), "value_coefficient"),
    **dict.fromkeys(("beta", "init_kl_coef"), "kl_coefficient"),
    **dict.fromkeys(("gae_lambda", "lam"), "lambda_"),
    **dict.fromkeys(("batch_size", "minibatch_size"), "num_minibatches"),
    **dict.fromkeys(("max_tokens", "max_completion_length"), "max_new_tokens"),
    **dict.fromkeys(("steps", "timesteps", "total_timesteps"), "total_steps"),
    **dict.fromkeys(("hidden", "hidden_size", "hidden_sizes"), "width"),
    **dict.fromkeys(("num_seeds", "n_seeds"), "seeds"),
    "grad_clip": "max_grad_norm",
    "clip_high": "epsilon_high",
    "clip_low": "epsilon_low",
    "discount": "gamma",
    "reproducible": "deterministic",  # name in version 0.4
    "num_generations": "group_size",
}


def unknown_flag(name: str, sections: Sections) -> str:
    """Returns the message for a flag that does not exist, with the name of a similar field.

    Example:
      >>> @config.record
      ... class Settings:
      ...     learning_rate: float = config.static(0.1, "step size")
      >>> unknown_flag("config.lr", {"config": Settings})
      'is not a setting; did you mean config.learning_rate?'
    """
    section, _, field = name.lower().replace("-", "_").rpartition(".")
    for present, former in FORMER_SECTIONS.items():
        if section == former:
            return f"is not a setting; did you mean {join(present, field)}?"
    fields: dict[str, str] = {}  # flag of each field, in the same section if possible
    own: list[str] = []
    for prefix, record in sorted(sections.items(), key=lambda item: item[0] != section):
        for each in settable(record):
            if name in former_names(prefix, each):
                return f"is not a setting; did you mean {join(prefix, each.name)}?"
            fields.setdefault(each.name, join(prefix, each.name))
            own += [each.name] if prefix == section else []
    near = [
        x
        for names in (own, fields)
        for x in (field, ALIASES.get(field, ""), *(y for y in names if _abbreviates(field, y)))
        if x in names
    ]
    near += difflib.get_close_matches(field, fields, n=1, cutoff=0.5)
    return "is not a setting" + (f"; did you mean {fields[near[0]]}?" if near else "")


def _abbreviates(short: str, name: str) -> bool:
    """Returns whether `short` abbreviates the words of a name, as `ent_coef` and `lr` do."""
    words = name.split("_")
    return any(
        len(begun) == len(words) > 1 and all(map(str.startswith, words, begun))
        for begun in (short.split("_"), short)
    )


def flag_error(error: ConfigError, sections: Sections) -> ConfigError:
    """Returns an error about a field of a section as an error about the field's flag.

    Args:
      error: error whose field has no prefix yet; an error about another name is returned unchanged.
      sections: record class of each section by prefix; the first record with the field counts, and
        the empty prefix comes last.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      >>> flag_error(ConfigError("num_envs", "must be even"), {"problem": Settings}).field
      'problem.num_envs'
    """
    if isinstance(error, UserCodeError):  # a `UserCodeError` already names a flag
        return error
    for prefix, record in sorted(sections.items(), key=lambda section: not section[0]):
        if error.field in {field.name for field in dataclasses.fields(record)}:
            return ConfigError(join(prefix, error.field), error.message) if prefix else error
    return error


@contextlib.contextmanager
def locating(sections: Sections) -> Iterator[None]:
    """Context in which an error about a field names the field's flag instead; see `flag_error`."""
    try:
        yield
    except ConfigError as error:
        raise flag_error(error, sections) from None


def format_help(
    program: str,
    summary: str,
    sections: Sections,
    notes: Mapping[str, str] = MappingProxyType({}),
    *,
    everything: bool = True,
) -> str:
    """Returns the text of `--help`: flags with their defaults, descriptions, units and ranges.

    Args:
      program: Name of the command.
      summary: First line of the text.
      sections: Record class of each section by prefix.
      notes: Remarks that are shown beside the default, by flag name.
      everything: Whether to show every field instead of only the common fields.
    """
    rest = 0
    lines = [wrapped(summary), "", f"usage: {program} --flag=value …"]
    for prefix, record in sections.items():
        fields = settable(record)
        found = [field for field in fields if everything or config.setting_of(field).common]
        rest += len(fields) - len(found)
        if not found:
            continue
        title = (record.__doc__ or "").strip().splitlines()
        heading = f"{'--' + prefix + '.*' if prefix else 'flags'}: {title[0] if title else ''}"
        lines += ["", wrapped(heading)]
        for field in found:
            name = join(prefix, field.name)
            lines += [
                f"  --{name}={spell(field.default)}{notes.get(name, '')}",
                wrapped(config.describe_field(field), indent=" " * 6),
            ]
    more = ["", wrapped(f"{rest} more flags: {program} {EVERYTHING}")] if rest else []
    return "\n".join([*lines, *more])


def help_of(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Returns whether the arguments ask for help, and the other arguments."""
    others = [word for word in argv if word not in HELP]
    return len(others) < len(argv), others


def written(values: Values) -> list[str]:
    """Returns flags as command-line arguments.

    Example:
      >>> written({"task": "addition", "config.use_reference": False})
      ['--task=addition', '--config.use_reference=false']
    """
    return [f"--{name}={spell(value)}" for name, value in values.items()]


def flatten(records: Values) -> Json:
    """Returns the values of all records by flag name.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      >>> flatten({"problem": Settings()})
      {'problem.num_envs': 8}
    """
    return {
        join(prefix, field.name): getattr(record, field.name)
        for prefix, record in records.items()
        for field in settable(type(record))
    }


def ask(
    argv: Sequence[str], program: str, summary: str, record: type[config.Record]
) -> config.Record | None:
    """Returns options of a script, whose flags lack a prefix; None after `--help` has printed them.

    Args:
      argv: Arguments of the script.
      program: Name of the script.
      summary: First line of `--help`.
      record: Record class of the script's options.

    Raises:
      ConfigError, UsageError: See `parse_records`.
    """
    sections = {"": record}
    if help_of(argv)[0]:
        print(format_help(program, summary, sections))
        return None
    options: config.Record = parse_records(argv, sections)[""]
    return options


def run_script(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a script and exits with the script's status.

    A `ConfigError` is one line on stderr that names the flag, and status 2, as is a `UsageError`; a
    `RunError`, a `MemoryError` or an `OSError` is one line and status 1. A closed
    stdout or stderr is not an error.
    """
    signals.guard()
    try:
        status = main(sys.argv[1:])
    except (UsageError, ConfigError, RunError, MemoryError) as error:
        name = "out of memory: " if isinstance(error, MemoryError) else ""
        name = "--" if isinstance(error, ConfigError) else name
        print(f"error: {name}{' '.join(str(error).split())}", file=sys.stderr)
        status = 1 if isinstance(error, RunError | MemoryError) else 2
    except OSError as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        status = 1
    sys.exit(status)
