"""Errors of the run layer, checks of the values of flags, and how values are written."""

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
    """A failure outside the library, after which the run cannot continue."""


class UsageError(Exception):
    """An invalid request that is not about one setting, in one line."""


class UserCodeError(ConfigError):
    """A file of the user's own, or a folder that a run began with, cannot be used."""


def suggest(word: str, known: Iterable[str]) -> str:
    """`; did you mean …?` with the nearest of `known`, or all of up to 100 if none is near.

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
    """Returns `table[name]`; raises ConfigError, with the nearest entry, if it is missing."""
    if name not in table:
        raise ConfigError(flag, f"unknown name {name!r}{suggest(name, table)}")
    return table[name]


def require(flag: str, package: str, extra: str) -> None:
    """Raises ConfigError if a package that only a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        message = f"needs the package {package}: pip install 'jaxrl_po[{extra}]'"
        raise ConfigError(flag, message)


def json_object(flag: str, text: str) -> Json:
    """Returns the value of a flag, a JSON object; raises ConfigError for anything else."""
    try:
        return dict(json.loads(text).items())
    except (AttributeError, ValueError):
        raise ConfigError(flag, f"must be a JSON object, got {text!r}") from None


def shown(value: object) -> str:
    """Returns a value as it is written on a command line.

    Example:
      >>> shown(True), shown((64, 64)), shown(0.1)
      ('true', '64,64', '0.1')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def wrapped(text: str, *, indent: str = "") -> str:
    """Returns lines that end between words and fit the terminal, or 80 characters without one."""
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
    """Returns one line on a failure of the operating system.

    Args:
      error: failure; one of a write names no file.
      place: file or folder to name if the error names no file.
      then: advice at the end of the line.

    Example:
      >>> format_error(OSError(28, "No space left on device"), "runs/a", "--resume continues")
      'runs/a: No space left on device; --resume continues'
    """
    reason = error.strerror or str(error)
    line = ": ".join(filter(None, [str(error.filename or place), reason]))
    return f"{line}; {then}" if then else line


def unread_format(number: object) -> str:
    """Returns why a folder or checkpoint with this format number is not read, or an empty text."""
    if number in FORMATS:
        return ""
    reads = f"and jaxrl_po {__version__} reads {', '.join(map(str, FORMATS))}"
    if number is None:
        remedy = "begin the run anew, or use the version that wrote it"
        return f"has no format number, as before version 0.4, {reads}; {remedy}"
    return f"has format {number}, {reads}; install a later version"
