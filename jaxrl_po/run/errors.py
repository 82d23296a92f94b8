"""Errors of the run layer, checks of flag values, and the text format of values."""

import difflib
import importlib.util
import json
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from jaxrl_po.config import ConfigError, Json
from jaxrl_po.version import FORMATS, __version__

Entry = TypeVar("Entry")


class RunError(Exception):
    """A failure outside the library that prevents the run from continuing."""


class UsageError(Exception):
    """An invalid request that is not about a single setting; its message is one line."""


class UserCodeError(ConfigError):
    """A user's file, or the folder that a run starts from, cannot be used."""


def suggest(word: str, known: Iterable[str]) -> str:
    """Returns `; did you mean …?` with the known name that is most similar to `word`.

    Without a similar name, the text lists the known names, or is empty if more than 100 are known.

    Example:
      >>> suggest("CartPol", ["Pendulum-v1", "CartPole-v1"])
      '; did you mean CartPole-v1?'
    """
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.5)
    if near:
        return f"; did you mean {by_lower[near[0]]}?"
    return f"; choose one of {', '.join(by_lower.values())}" if len(by_lower) <= 100 else ""


def lookup(flag: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Returns `table[name]`; raises ConfigError with a similar name if the table lacks the name."""
    if name not in table:
        raise ConfigError(flag, f"unknown name {name!r}{suggest(name, table)}")
    return table[name]


def require(flag: str, package: str, extra: str) -> None:
    """Raises ConfigError if `package`, which only the flag `flag` needs, is not installed."""
    if importlib.util.find_spec(package) is None:
        message = f"needs the package {package}: pip install 'jaxrl_po[{extra}]'"
        raise ConfigError(flag, message)


def json_object(flag: str, text: str) -> Json:
    """Returns the JSON object in a flag's value; raises ConfigError for any other value."""
    try:
        return dict(json.loads(text).items())
    except (AttributeError, ValueError):
        raise ConfigError(flag, f"must be a JSON object, got {text!r}") from None


def spell(value: object) -> str:
    """Returns the text that a user would type on a command line for a value.

    Example:
      >>> spell(True), spell((64, 64)), spell(0.1)
      ('true', '64,64', '0.1')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def spell_all(values: Mapping[str, object]) -> str:
    """Returns the text of named values.

    Example:
      >>> spell_all({"gamma": 0.9, "clip": True})
      'gamma=0.9, clip=true'
    """
    return ", ".join(f"{name}={spell(value)}" for name, value in values.items())


def wrapped(text: str, *, indent: str = "") -> str:
    """Returns text wrapped between words to the width of the terminal, by default 80 columns."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def format_error(error: OSError, place: str | Path = "", then: str = "") -> str:
    """Returns one line that describes a failure of the operating system.

    Args:
      error: failure of the operating system; a failed write does not name its file.
      place: file or folder that the line names if the error names no file.
      then: advice that ends the line.

    Example:
      >>> format_error(OSError(28, "No space left on device"), "runs/a", "--resume continues")
      'runs/a: No space left on device; --resume continues'
    """
    reason = error.strerror or str(error)
    line = ": ".join(filter(None, [str(error.filename or place), reason]))
    return f"{line}; {then}" if then else line


def unread_format(number: object) -> str:
    """Returns why files with a format number cannot be read; an empty text if they can be read."""
    if number in FORMATS:
        return ""
    reads = f"and jaxrl_po {__version__} reads {', '.join(map(str, FORMATS))}"
    if number is None:
        remedy = "begin the run anew, or use the version that wrote it"
        return f"has no format number, as before version 0.4, {reads}; {remedy}"
    return f"has format {number}, {reads}; install a later version"
