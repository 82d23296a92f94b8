"""Errors of the run layer, checks of the values of flags, and how values are written."""

import difflib
import importlib.util
import json
from collections.abc import Iterable, Mapping
from typing import Any


class RunError(Exception):
    """A failure outside the library, after which the run cannot continue."""


class UsageError(Exception):
    """An invalid request: one line that says what would be valid."""


class UserCodeError(UsageError):
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


def lookup(flag: str, name: str, table: Mapping[str, Any]) -> Any:
    """`table[name]`, or a UsageError that names the flag and the nearest entry."""
    if name not in table:
        raise UsageError(f"--{flag} has no {name!r}{suggest(name, table)}")
    return table[name]


def require(flag: str, package: str, extra: str) -> None:
    """Raises UsageError if a package that only a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--{flag} needs the package {package}: pip install 'jaxrl_po[{extra}]'")


def json_object(flag: str, text: str) -> dict[str, Any]:
    """The value of a flag, a JSON object; raises UsageError for anything else."""
    try:
        return dict(json.loads(text).items())
    except (AttributeError, ValueError):
        raise UsageError(f"--{flag} must be a JSON object, got {text!r}") from None


def shown(value: Any) -> str:
    """A value as it is written on a command line.

    Example:
      >>> shown(True), shown((64, 64)), shown(0.1)
      ('true', '64,64', '0.1')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
