"""What a flag names as `file.py:name`: an environment or a task of the user's own."""

from pathlib import Path
from typing import Any

from jaxrl_po.run import scoring_worker
from jaxrl_po.run.flags import UsageError


def is_source(name: str) -> bool:
    """Whether a name reads like `file.py:name`.

    Example:
      >>> is_source("my_env.py:Corridor"), is_source("CartPole-v1")
      (True, False)
    """
    return ".py:" in name


def make(flag: str, source: str) -> Any:
    """Calls what `file.py:name` names, a class or a function, without arguments.

    Args:
      flag: that names it.
      source: its value.

    Raises:
      UsageError: names the flag, the file and, for an error in that file, its line.
    """
    place = source.rpartition(":")[0]
    if not Path(place).is_file():
        raise UsageError(f"--{flag}={source}: there is no file {place}")
    try:
        return scoring_worker.load(source)()
    except (Exception, SystemExit) as error:
        raise UsageError(f"--{flag}={source}: {scoring_worker.describe(error)}") from error
