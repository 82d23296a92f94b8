"""Errors of the run layer, and names and packages that are not there."""

import difflib
import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_po.config import ConfigError


class RunError(Exception):
    """A failure outside the library, after which the run cannot continue."""


class UsageError(Exception):
    """An invalid request that is not about one setting, in one line."""


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
    """Returns `table[name]`; raises ConfigError, with the nearest entry, if it is missing."""
    if name not in table:
        raise ConfigError(flag, f"unknown name {name!r}{suggest(name, table)}")
    return table[name]


def require(flag: str, package: str, extra: str) -> None:
    """Raises ConfigError if a package that only a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        message = f"needs the package {package}: pip install 'jaxrl_po[{extra}]'"
        raise ConfigError(flag, message)
