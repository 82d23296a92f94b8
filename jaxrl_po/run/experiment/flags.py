"""Records of settings as command-line flags, with one-line errors that name the flag.

A record with the prefix `config` gives `--config.<field>`; the empty prefix gives `--<field>`.
Type, unit, range and default are read from the record, so that the check, `--help` and the
documentation cannot disagree. A field whose default is None is set by code (a device axis, say) and
has no flag.
"""

import contextlib
import dataclasses
import difflib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from absl import flags as absl_flags

from jaxrl_po import config
from jaxrl_po.config import ConfigError, NoEffectError
from jaxrl_po.run.errors import RunError, UsageError, format_error, shown
from jaxrl_po.run.loop import streams

Values = dict[str, Any]
EVERYTHING = "--help=all"
HELP = ("--help", "-help", "-h", EVERYTHING)
# Fields that most runs need; `--help` shows these alone.
COMMON = {
    *("algorithm", "out", "seeds", "seed", "total_steps", "devices", "resume", "overwrite"),
    *("tensorboard", "wandb", "env", "policy", "task", "init_from", "reward", "tools"),
    *("gamma", "lambda_", "learning_rate", "value_learning_rate", "num_epochs"),
    *("num_minibatches", "num_microbatches", "epsilon_low", "epsilon_high"),
    *("entropy_coefficient", "max_kl", "use_reference", "kl_coefficient", "penalty"),
    *("num_envs", "num_steps", "normalize_observations", "scale_rewards"),
    *("num_prompts", "group_size", "max_new_tokens", "temperature"),
    *("width", "depth", "memory", "layers", "heads", "rank"),
    *("num_digits", "length", "max_turns", "train", "test", "template", "steps"),
    *("evaluations", "draws"),
}


class _Named(absl_flags.ArgumentParser[Any]):
    """A parser whose error names the flag and the kind of value that it takes."""

    def __init__(self, name: str, kind: type, parser: Any):
        self.name, self.kind, self.parser = name, kind, parser

    def parse(self, argument: Any) -> Any:
        try:
            return self.parser.parse(argument)
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(
                self.name, f"must be {_TYPES[self.kind][1]}, got {argument!r}"
            ) from None


class _Integer(absl_flags.IntegerParser):
    """An integer, also as a number that is one: `1e5`."""

    def convert(self, argument: Any) -> int:
        try:
            return super().convert(argument)
        except ValueError:
            if not (number := float(argument)).is_integer():
                raise
            return int(number)


class _Integers(absl_flags.ArgumentParser):
    """Integers separated by commas, e.g. `64,64`."""

    def parse(self, argument: Any) -> tuple[int, ...]:
        return (
            argument
            if isinstance(argument, tuple)
            else tuple(_Integer().convert(item) for item in str(argument).split(",") if item)
        )


# Type of a value to what defines its flag, and what it takes in words.
_TYPES: dict[type, tuple[Callable[..., Any], str]] = {
    bool: (absl_flags.DEFINE_boolean, "true or false"),
    int: (functools.partial(absl_flags.DEFINE, _Integer()), "an integer"),
    tuple: (functools.partial(absl_flags.DEFINE, _Integers()), "integers such as 64,64"),
    float: (absl_flags.DEFINE_float, "a number"),
    str: (absl_flags.DEFINE_string, "text"),
}


def parse(
    argv: Sequence[str],
    sections: Mapping[str, type],
    *,
    stored: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    partial: bool = False,
) -> dict[str, Any]:
    """Command-line arguments to records.

    A flag that is not given takes its value from `stored`, then from `defaults`, then from the
    record. If a given flag makes a value from `stored` or `defaults` ineffective, the record's
    default is used instead of that value.

    Args:
      argv: arguments, without the program's name.
      sections: prefix to record class; `""` holds the flags without a prefix.
      stored: flag name to value, of a run that is resumed.
      defaults: flag name to the script's default, where it differs from the record's.
      partial: ignore arguments that are not flags of `sections`, since the value of one flag may
        decide which others exist.

    Returns:
      Prefix to record, each checked field by field (`config.check`) and then by its own `validate`,
      if it has one.

    Raises:
      ConfigError: an unknown flag (the nearest is suggested), or a value of the wrong type or out
        of its range; the field is the flag without its dashes.
      UsageError: a stray argument.

    Example:
      >>> @config.record
      ... class Settings:
      ...     envs: int = config.static(8, "environments side by side", within=config.COUNT)
      >>> parse(["--problem.envs=3"], {"problem": Settings})
      {'problem': Settings(envs=3)}
      >>> parse(["--problem.env=3"], {"problem": Settings})
      Traceback (most recent call last):
      jaxrl_po...ConfigError: problem.env: is not a setting; did you mean problem.envs?
    """
    return fill(given(argv, sections, partial=partial), sections, stored=stored, defaults=defaults)


def fill(
    asked: Mapping[str, Any],
    sections: Mapping[str, type],
    *,
    stored: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The records of the flags that are given, by name, and of the values of all others.

    See `parse`.
    """
    records = {}
    for prefix, record in sections.items():
        fields: Values = {}
        assumed: Values = {}
        for field in settable(record):
            name = join(prefix, field.name)
            if name in asked:
                fields[field.name] = asked[name]
            elif stored and name in stored:
                value = stored[name]
                assumed[field.name] = tuple(value) if isinstance(value, list) else value
            elif defaults and name in defaults:
                assumed[field.name] = defaults[name]
        with locating({prefix: record}):
            records[prefix] = _checked(record, fields, assumed)
    return records


def given(argv: Sequence[str], sections: Mapping[str, type], *, partial: bool = False) -> Values:
    """Flag name to value, of the flags given in the arguments; ranges are not checked.

    See `parse`.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      >>> given(["--problem.num_envs=3"], {"problem": Settings}), given([], {"problem": Settings})
      ({'problem.num_envs': 3}, {})
    """
    values = absl_flags.FlagValues()
    types: dict[str, type] = {}
    for prefix, record in sections.items():
        for field in settable(record):
            name, default = join(prefix, field.name), field.default
            types[name] = _type(field)
            _TYPES[types[name]][0](name, default, config.setting_of(field).doc, flag_values=values)
            values[name].parser = _Named(name, types[name], values[name].parser)
    _absorb(values, argv, types, partial)
    return {name: values[name].value for name in types if values[name].present}


def require_kinds(given: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Refuses text for a number, and anything but a bool for a switch, among values from Python.

    Args:
      given: flag name to the value given.
      read: flag name to the value of the flag.

    Raises:
      ConfigError: names the first flag with a value of another kind.

    Example:
      >>> require_kinds({"seeds": "4"}, {"seeds": 4})
      Traceback (most recent call last):
      jaxrl_po...ConfigError: seeds: must be an integer, got '4'
    """
    for name, value in given.items():
        kind = type(read.get(name))
        text = kind in (int, float) and isinstance(value, str)
        if text or (kind is bool and not isinstance(value, bool)):
            raise ConfigError(name, f"must be {_TYPES[kind][1]}, got {value!r}")


def _checked(record: type, fields: Values, assumed: Values) -> Any:
    """The checked record; `assumed` values that `fields` make ineffective are dropped.

    So the error that a value has no effect is raised only for values that the user gave.
    """
    made = record(**assumed, **fields)
    try:
        config.check(made)
        if hasattr(made, "validate"):
            made.validate()
    except NoEffectError as error:
        if not fields or error.field not in assumed:
            raise
        return _checked(
            record, fields, {name: value for name, value in assumed.items() if name != error.field}
        )
    return made


def _type(field: dataclasses.Field[Any]) -> type:
    """The type of a flag's value; float if the field is not static, whatever its default."""
    return type(field.default) if config.setting_of(field).static else float


def settable(record: type) -> list[dataclasses.Field[Any]]:
    """The fields of a record that have a flag."""
    return [field for field in dataclasses.fields(record) if field.default is not None]


def join(prefix: str, name: str) -> str:
    """A flag's name without its dashes."""
    return f"{prefix}.{name}" if prefix else name


def _absorb(
    values: absl_flags.FlagValues, argv: Sequence[str], types: Mapping[str, type], partial: bool
) -> None:
    """Parses `argv` into `values`; errors of absl become `ConfigError` or `UsageError`."""
    try:
        for word in argv:
            word.encode()  # what is no UTF-8 could not be written down
        stray = values(["program", *argv], known_only=partial)[1:]
    except absl_flags.UnrecognizedFlagError as error:
        raise ConfigError(error.flagname, unknown_flag(error.flagname, types)) from None
    except UnicodeEncodeError as error:
        raise UsageError(f"{error.object!a} must be UTF-8") from None
    except absl_flags.Error as error:
        if isinstance(error.__context__, ConfigError):  # raised by `_Named`
            raise error.__context__ from None
        raise UsageError(" ".join(str(error).split())) from None
    if stray and not partial:
        raise UsageError(f"{stray[0]!r} is not a flag; write --name=value")


# What other libraries call a field, where the letters of our name do not tell.
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
    "reproducible": "deterministic",  # of 0.4
    "num_generations": "group_size",
}


def unknown_flag(name: str, known: Iterable[str]) -> str:
    """Returns the message for a flag that does not exist, with the name of its field here.

    Example:
      >>> unknown_flag("config.lr", ["config.gamma", "config.learning_rate"])
      'is not a setting; did you mean config.learning_rate?'
    """
    section, _, field = name.lower().replace("-", "_").rpartition(".")
    fields: dict[str, str] = {}  # to their flags, that of the same section if there is one
    for flag in sorted(known, key=lambda flag: flag.rpartition(".")[0] != section):
        fields.setdefault(flag.rpartition(".")[2], flag)
    near = [
        *(meant for meant in (field, ALIASES.get(field)) if meant in fields),
        *(other for other in fields if _abbreviates(field, other)),
        *difflib.get_close_matches(field, fields, n=1, cutoff=0.5),
    ]
    return "is not a setting" + (f"; did you mean {fields[near[0]]}?" if near else "")


def _abbreviates(short: str, name: str) -> bool:
    """Whether a name has words with these beginnings or first letters: `ent_coef`, `lr`."""
    words = name.split("_")
    return any(
        len(begun) == len(words) > 1 and all(map(str.startswith, words, begun))
        for begun in (short.split("_"), short)
    )


def located(error: ConfigError, sections: Mapping[str, type]) -> ConfigError:
    """Returns an error about a field of a section as one about its flag.

    Args:
      error: error whose field has no prefix yet; an error about another name is returned as it is.
      sections: prefix to record class; the first record that has the field counts.

    Example:
      >>> @config.record
      ... class Settings:
      ...     num_envs: int = config.static(8, "environments side by side")
      >>> located(ConfigError("num_envs", "must be even"), {"problem": Settings}).field
      'problem.num_envs'
    """
    for prefix, record in sections.items():
        if error.field in {field.name for field in dataclasses.fields(record)}:
            return ConfigError(join(prefix, error.field), error.message) if prefix else error
    return error


@contextlib.contextmanager
def locating(sections: Mapping[str, type]) -> Iterator[None]:
    """Context in which an error about a field is raised as one about its flag; see `located`."""
    try:
        yield
    except ConfigError as error:
        raise located(error, sections) from None


def usage(
    program: str,
    summary: str,
    sections: Mapping[str, type],
    defaults: Mapping[str, Any] | None = None,
    *,
    everything: bool = True,
) -> str:
    """The text of `--help`: flags with their defaults, descriptions, units and ranges.

    Args:
      program: the command.
      summary: first line.
      sections: see `parse`.
      defaults: see `parse`.
      everything: False shows the fields in `COMMON` alone.
    """
    defaults, rest = defaults or {}, 0
    lines = [streams.wrapped(summary), "", f"usage: {program} --flag=value …"]
    for prefix, record in sections.items():
        fields = settable(record)
        found = [field for field in fields if everything or field.name in COMMON]
        rest += len(fields) - len(found)
        if not found:
            continue
        title = (record.__doc__ or "").strip().splitlines()
        heading = f"{'--' + prefix + '.*' if prefix else 'flags'}: {title[0] if title else ''}"
        lines += ["", streams.wrapped(heading)]
        for field in found:
            name = join(prefix, field.name)
            lines += [
                f"  --{name}={shown(defaults.get(name, field.default))}",
                streams.wrapped(config.describe(field), indent=" " * 6),
            ]
    more = ["", streams.wrapped(f"{rest} more flags: {program} {EVERYTHING}")] if rest else []
    return "\n".join([*lines, *more])


def help_of(argv: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether help is asked for, and the other arguments."""
    others = [word for word in argv if word not in HELP]
    return len(others) < len(argv), others


def written(values: Mapping[str, Any]) -> list[str]:
    """Flags as arguments.

    Example:
      >>> written({"task": "addition", "config.use_reference": False})
      ['--task=addition', '--config.use_reference=false']
    """
    return [f"--{name}={shown(value)}" for name, value in values.items()]


def flatten(records: Mapping[str, Any]) -> Values:
    """Flag name to value, of all records.

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


def ask(argv: Sequence[str], program: str, summary: str, record: type) -> Any:
    """The options of a script whose flags have no prefix; None after `--help` has printed them.

    Args:
      argv: arguments.
      program: the script's name.
      summary: first line of `--help`.
      record: the script's options.

    Raises:
      ConfigError, UsageError: see `parse`.
    """
    sections = {"": record}
    if help_of(argv)[0]:
        print(usage(program, summary, sections))
        return None
    return parse(argv, sections)[""]


def entry(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a script and exits with its status.

    A `ConfigError` is one line on stderr that names the flag, and status 2, like a `UsageError`; a
    `RunError`, a `MemoryError` or an `OSError` is one line and status 1. Neither needs a reader.
    """
    streams.guard()
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
