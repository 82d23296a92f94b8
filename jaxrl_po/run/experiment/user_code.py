"""Loads objects of the user, such as an environment: `file.py:name`, or a Python object."""

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import optax

from jaxrl_po import backend, config, variables
from jaxrl_po.algorithms.actor_critic import Estimation
from jaxrl_po.config import ConfigError, Json, PythonObject, Values
from jaxrl_po.optimizers import Optimization
from jaxrl_po.run import errors
from jaxrl_po.run.data import workers
from jaxrl_po.run.errors import UsageError, UserCodeError
from jaxrl_po.run.store import sources
from jaxrl_po.run.store.sources import OWN, in_file, is_source, missing, split_source
from jaxrl_po.types import Learner
from jaxrl_po.variables import class_of

Entry = TypeVar("Entry")
# Maps an option that is an argument of a method's `make` to the type of that argument.
LOSS: dict[str, Any] = dict.fromkeys(sources.LOSS, Callable)
LOSS |= {"optimizer": optax.GradientTransformation}
# Maps an option to the record of settings that have no effect beside it.
REPLACED = {"advantage": Estimation, "optimizer": Optimization}


def load(flag: str, source: str) -> Any:
    """Returns the object that `file.py:name` names, or that was passed in Python.

    Args:
      flag: name of the flag, for messages.
      source: value of the flag.

    Raises:
      UserCodeError: the object cannot be loaded; the error names the flag, the file and, for an
        error in that file, the line.
    """
    if isinstance(source, PythonObject):
        return source.value
    if not in_file(source):
        wrong = f"must be a file and a name, file.py:name, got {source!r}"
        raise UserCodeError(flag, missing(flag, source) if source.startswith(OWN) else wrong)
    place = split_source(source)[0]
    if not os.path.isfile(place):  # `Path.is_file` raises an error if a name is too long
        raise UserCodeError(flag, f"{source}: there is no file {place}")
    backend.split_cpu()
    with naming(flag, source):
        return workers.load_source(source)


def make(flag: str, source: str, advice: str = "") -> Any:
    """Returns the result of calling a class, function or partial, or any other object.

    Args:
      flag: name of the flag, for messages.
      source: value of the flag; see `load`.
      advice: remedy for a call that raises a TypeError; empty for no advice.

    Raises:
      UserCodeError: the object cannot be loaded or called; see `load`.
    """
    found = load(flag, source)
    if not (isinstance(found, type | functools.partial) or inspect.isroutine(found)):
        return found
    with naming(flag, source, advice):
        return found()


@contextlib.contextmanager
def naming(flag: str, source: str, advice: str = "") -> Iterator[None]:
    """Context in which an error of the user's code is raised as an error that names the flag."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        more = f"; {advice}" if advice and isinstance(error, TypeError) else ""
        raise UserCodeError(flag, f"{source}: {workers.describe_error(error)}{more}") from error


def find_object(flag: str, name: str) -> str:
    """Returns the name in a flag; a name of code becomes a `PythonObject` of the loaded object."""
    return PythonObject.of(name, load(flag, name)) if is_source(name) else name


def find(flag: str, name: str, table: Mapping[str, Entry]) -> Entry:
    """Returns the entry that a table has for a name, or the user's own entry of the same class.

    Args:
      flag: name of the flag, for messages.
      name: value of the flag: a name of the table, `file.py:name`, or a Python object.
      table: entries by name, at least one.

    Raises:
      ConfigError: the name is unknown, or the object has another class than the entries.
    """
    if not is_source(name):
        return errors.lookup(flag, name, table)
    kind, own = type(next(iter(table.values()))), load(flag, name)
    if not isinstance(own, kind):
        raise UserCodeError(flag, f"{name} must be a run.{kind.__name__}, got {class_of(own)}")
    record = own[0]  # type: ignore[index]
    if not config.is_record(record):
        raise UserCodeError(flag, f"{name}: {class_of(record)} must be a class with @config.record")
    return own


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
        part = error.field.removeprefix(flag)  # path inside the module, as in `.torso`
        raise UserCodeError(flag, f"{source}{part} {error.message}") from None
    return made


def with_loss(make_learner: Callable[..., Learner], options: Values) -> Callable[..., Learner]:
    """Returns a method's `make` with the user's surrogate, advantage and optimizer.

    Raises:
      UserCodeError: `make` has no argument for a part of the loss, or the code cannot be used.
    """
    given, parameters = dict[str, Any](), inspect.signature(make_learner).parameters
    for name, kind in LOSS.items():
        source = options[name]
        if source and name not in parameters:
            raise UserCodeError(
                name, f"must be left out with algorithm = {options['algorithm']}, which takes none"
            )
        if source:
            given[name] = made = load(name, source) if kind is Callable else make(name, source)
            if not isinstance(made, kind):
                raise UserCodeError(name, f"must be of type {kind.__name__}, got {made!r}")
    return functools.partial(make_learner, **given)


def without_replaced(options: Values, values: Values) -> Json:
    """Returns values of flags, without flags whose fields the user's code replaces."""
    records = [record for name, record in REPLACED.items() if options[name]]
    fields = {f"config.{name}" for record in records for name in vars(record())}
    return {name: value for name, value in values.items() if name not in fields}
