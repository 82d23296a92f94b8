"""Loads an environment, network or task of the user: `file.py:name`, or an object of Python."""

import inspect
import os
from typing import Any

from jaxrl_po import variables
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import workers
from jaxrl_po.run.errors import UsageError, UserCodeError
from jaxrl_po.run.store.sources import OWN, Given, in_file, missing


def make(flag: str, source: str, advice: str = "") -> Any:
    """Returns the result of a class or function without arguments, or an object given in Python.

    Args:
      flag: name of the flag.
      source: value of the flag.
      advice: remedy for a call that raises a TypeError; empty for no advice.

    Raises:
      UserCodeError: names the flag, the file and, for an error in that file, its line.
    """
    given = source.value if isinstance(source, Given) else None
    if given is not None and not (inspect.isclass(given) or inspect.isroutine(given)):
        return given
    if given is None and source.startswith(OWN):
        raise UserCodeError(flag, missing(flag, source))
    if given is None and not in_file(source):
        raise UserCodeError(flag, f"must be a file and a name, file.py:name, got {source!r}")
    place = source.rpartition(":")[0]
    # Where a name is too long, `Path.is_file` raises.
    if given is None and not os.path.isfile(place):
        raise UserCodeError(flag, f"{source}: there is no file {place}")
    try:
        return (given or workers.load(source))()
    except (Exception, SystemExit) as error:
        more = f"; {advice}" if advice and isinstance(error, TypeError) else ""
        raise UserCodeError(flag, f"{source}: {workers.describe(error)}{more}") from error


def require_not_imported() -> None:
    """Raises UsageError if a file that a run imports would itself start a run."""
    if workers.LOADING:
        raise UsageError(
            f"{workers.LOADING[-1]} trains when it is imported, as it is here for its "
            'definitions: put the training below `if __name__ == "__main__":`'
        )


def network(flag: str, source: str) -> Any:
    """Makes the network that `--policy` or `--critic` names.

    Raises:
      UserCodeError: the network is not a module, see `variables.require_module`.
    """
    made = make(flag, source, variables.ADVICE)
    try:
        variables.require_module(flag, made)
    except ConfigError as error:
        part = error.field.removeprefix(flag)  # of the module, as in `.torso`
        raise UserCodeError(flag, f"{source}{part} {error.message}") from None
    return made
