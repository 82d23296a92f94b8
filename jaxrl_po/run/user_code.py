"""What a flag names as `file.py:name`: an environment or a task of the user's own."""

import importlib.util
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_po.run.flags import UsageError, suggest

SUFFIX = ".py:"


def is_source(name: str) -> bool:
    """Whether a name reads like `file.py:name`.

    Example:
      >>> is_source("my_env.py:Corridor"), is_source("CartPole-v1")
      (True, False)
    """
    return SUFFIX in name


def make(flag: str, source: str) -> Any:
    """What `file.py:name` names; a class or a function is called without arguments.

    Args:
      flag: that names it.
      source: its value.

    Raises:
      UsageError: names the flag, the file and, for an error of the user's own, its line.
    """
    place, _, name = source.rpartition(":")
    path = Path(place).resolve()
    if not path.is_file():
        raise UsageError(f"--{flag}={source}: there is no file {place}")
    try:
        module = _load(path)
    except (Exception, SystemExit) as error:
        raise UsageError(f"--{flag}={source}: {_where(error, path)}") from error
    if name not in vars(module):
        own = [
            each
            for each, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
        ]
        raise UsageError(f"--{flag}={source}: {place} has no {name!r}{suggest(name, own)}")
    found = vars(module)[name]
    if not callable(found):
        return found
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--{flag}={source}: {_where(error, path)}") from error


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module


def _where(error: BaseException, path: Path) -> str:
    """The error with the last line of the user's file that led to it."""
    inside = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename) == path
    ]
    if isinstance(error, SyntaxError):
        inside = [error.lineno]
    line = f" line {inside[-1]}" if inside else ""
    return f"{path.name}{line}: {type(error).__name__}: {error}"
