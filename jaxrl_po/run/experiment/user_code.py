"""Loads an environment, network or task of the user: `file.py:name`, or an object of Python."""

import inspect
import os
from typing import Any

from jaxrl_po import variables
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import workers
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.store.sources import OWN, Given, in_file, missing


def make(flag: str, source: str) -> Any:
    """Calls a class or function of the user, or returns the object that was given in Python.

    Args:
      flag: Name of the flag, for messages.
      source: Value of the flag.

    Raises:
      UserCodeError: names the flag, the file and, for an error in that file, its line.
    """
    given = source.value if isinstance(source, Given) else None
    if given is not None and not (inspect.isclass(given) or inspect.isroutine(given)):
        return given
    if given is None and source.startswith(OWN):
        raise UserCodeError(missing(flag, source))
    if given is None and not in_file(source):
        raise UserCodeError(f"--{flag}={source} must be a file and a name, file.py:name")
    place = source.rpartition(":")[0]
    # Where a name is too long, `Path.is_file` raises.
    if given is None and not os.path.isfile(place):
        raise UserCodeError(f"--{flag}={source}: there is no file {place}")
    try:
        return (given or workers.load(source))()
    except (Exception, SystemExit) as error:
        raise UserCodeError(f"--{flag}={source}: {workers.describe(error)}") from error


def require_not_imported() -> None:
    """Raises ConfigError if a file that a run imports would itself start a run."""
    if workers.LOADING:
        raise ConfigError(
            f"{workers.LOADING[-1]} trains when it is imported, as it is here for what it defines: "
            'put that below `if __name__ == "__main__":`'
        )


def network(flag: str, source: str) -> Any:
    """Makes the network that `--policy` or `--critic` names.

    Raises:
      UserCodeError: the network is not a module, see `variables.require_module`.
    """
    try:
        made = make(flag, source)
        variables.require_module(f"--{flag}={source}", made)
    except (ConfigError, UserCodeError) as error:
        called = isinstance(error.__cause__, TypeError)
        raise UserCodeError(f"{error}{f'; {variables.ADVICE}' * called}") from error
    return made
