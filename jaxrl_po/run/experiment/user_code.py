"""Loads code of the user, as an environment or a loss: `file.py:name`, or an object of Python."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jaxrl_po import variables
from jaxrl_po.algorithms.actor_critic import Estimation
from jaxrl_po.config import ConfigError
from jaxrl_po.optimizers import Optimization
from jaxrl_po.run.data import workers
from jaxrl_po.run.errors import UsageError, UserCodeError
from jaxrl_po.run.experiment.options import Options
from jaxrl_po.run.store.sources import OWN, Given, in_file, missing
from jaxrl_po.types import Learner

# Option that is an argument of `make` of a method, to the type of the argument.
LOSS: dict[str, Any] = dict.fromkeys(("surrogate", "advantage"), Callable)
LOSS |= {"optimizer": optax.GradientTransformation}
REPLACED = {"advantage": Estimation, "optimizer": Optimization}  # fields of the method, by option


def make(flag: str, source: str, advice: str = "", *, called: bool = True) -> Any:
    """Returns the result of a class or function without arguments, or an object given in Python.

    Args:
      flag: name of the flag.
      source: value of the flag.
      advice: remedy for a call that raises a TypeError; empty for no advice.
      called: whether to call a function or class; if not, it is returned.

    Raises:
      UserCodeError: names the flag, the file and, for an error in that file, its line.
    """
    given = source.value if isinstance(source, Given) else None
    is_function = inspect.isclass(given) or inspect.isroutine(given)
    if given is not None and not (called and is_function):
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
        return (given or workers.load(source))() if called else workers.load(source)
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


def with_loss(make_learner: Callable[..., Learner], options: Options) -> Callable[..., Learner]:
    """Returns `make` of a method with the user's surrogate, advantage and optimizer.

    Raises:
      UserCodeError: `make` lacks an argument, or the code cannot be used.
    """
    given, parameters = dict[str, Any](), inspect.signature(make_learner).parameters
    for name, kind in LOSS.items():
        source = vars(options)[name]
        if source and name not in parameters:
            raise UserCodeError(
                name, f"must be left out with algorithm = {options.algorithm}, which takes none"
            )
        if source:
            given[name] = made = make(name, source, called=kind is not Callable)
            if not isinstance(made, kind):
                raise UserCodeError(name, f"must be of type {kind.__name__}, got {made!r}")
    return functools.partial(make_learner, **given)


def without_replaced(options: Options, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values of flags without those of the fields that the user's code replaces."""
    records = [record for name, record in REPLACED.items() if vars(options)[name]]
    fields = {f"config.{name}" for record in records for name in vars(record())}
    return {name: value for name, value in values.items() if name not in fields}
