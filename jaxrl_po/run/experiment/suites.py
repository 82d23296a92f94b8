"""Environments of gymnax, and of other suites by name: `brax:hopper`, `jumanji:Snake-v1`."""

import contextlib
import dataclasses
import functools
import importlib
import io
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError, static_value
from jaxrl_po.control.environment import Environment, adapt, is_gymnasium
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import user_code
from jaxrl_po.run.experiment.registry import SUITES
from jaxrl_po.run.host import vector_envs
from jaxrl_po.run.store import sources


@runtime_checkable
class Suite(Protocol):
    """Environments by name: a module, an object, or a class whose instances have these methods."""

    def names(self) -> Sequence[str]:
        """Returns the names of all environments of the suite."""

    def make(self, name: str, **arguments: Any) -> Environment:
        """Makes an environment; `arguments` come from `--env_params`."""


def split_name(name: str) -> tuple[str, str]:
    """Returns the suite and the environment in it; the suite of any other name is empty.

    Example:
      >>> tuple(map(split_name, ("brax:hopper", "envpool:Hopper-v4", "mine.py:suite:Corridor")))
      (('brax', 'hopper'), ('', 'envpool:Hopper-v4'), ('mine.py:suite', 'Corridor'))
    """
    suite, _, inner = name.rpartition(":")
    is_suite = suite in SUITES or sources.in_file(suite)
    return (suite, inner) if is_suite else ("", name)


class LazyModule(types.ModuleType):
    """A module that is imported when one of its attributes is used."""

    def __getattr__(self, name: str) -> object:
        return getattr(importlib.import_module(self.__name__), name)


def import_gymnax() -> types.ModuleType:
    """Imports gymnax without seaborn, which draws some games and takes a second and 95 MB.

    The import starts JAX's backend, whose devices must have been chosen before.
    """
    if "seaborn" in sys.modules:
        return importlib.import_module("gymnax")
    sys.modules["seaborn"] = LazyModule("seaborn")
    try:
        return importlib.import_module("gymnax")
    finally:
        del sys.modules["seaborn"]


@functools.cache
def from_suite(name: str, env_params: str = "") -> Environment:
    """Makes the environment of `suite:Name` and caches it, since making one may take seconds.

    Args:
      name: Suite and environment, `suite:Name`.
      env_params: JSON object with arguments of the suite's adapter; or empty.

    Raises:
      ConfigError: the package is not installed, the name is unknown, or the environment does not
        accept the arguments.
      ConfigError: the spaces of the environment are not supported.
    """
    suite, inner = split_name(name)
    arguments = errors.json_object("env_params", env_params or "{}")
    adapter = user_code.make("env", suite) if sources.is_source(suite) else _import_adapter(suite)
    if not isinstance(adapter, Suite):
        raise ConfigError("env", f"{suite} must have the methods names and make, got {adapter!r}")
    errors.lookup("env", inner, dict.fromkeys(adapter.names()))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
            return adapter.make(inner, **arguments)
    except ConfigError:
        raise
    except (TypeError, ValueError, IndexError, AssertionError) as error:
        why = " ".join(str(error).split()) or type(error).__name__
        if not arguments:
            raise ConfigError("env", f"{name} cannot be made: {why}") from None
        raise ConfigError("env_params", f"{name} does not accept them: {why}") from None


def _import_adapter(suite: str) -> Suite:
    """Imports the adapter of a suite by its name; the adapter imports the suite.

    Output and warnings of a suite's import (optional packages, versions) are hidden from the user.
    """
    errors.require("env", SUITES[suite], suite)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        adapter: Any = importlib.import_module(f"jaxrl_po.control.adapters.{suite}")
    found: Suite = adapter
    return found


def make_env(name: str, env_params: str = "") -> Any:
    """Makes an environment: a name in gymnax, `suite:Name`, `file.py:Name`, `file.py:suite:Name`.

    Args:
      name: value of `--env`.
      env_params: JSON object with arguments of the suite's adapter, or with fields of the
        environment's `default_params`; or empty.

    Returns:
      An environment in JAX, or the `Source` of a user's environment with gymnasium's interface.

    Raises:
      ConfigError: the name is unknown, or the file or the arguments cannot be used.
    """
    if split_name(name)[0]:  # a suite in a file is not cached, since the file may change
        return (from_suite.__wrapped__ if sources.in_file(name) else from_suite)(name, env_params)
    if sources.is_source(name):
        found = user_code.load("env", name)
        # A class of gymnasium may need arguments.
        env = found if is_gymnasium(found) else user_code.make("env", name)
        if is_gymnasium(env):
            return vector_envs.own_source(name, found, env, env_params)
    else:
        gymnax = import_gymnax()
        errors.lookup("env", name, dict.fromkeys(gymnax.registered_envs))
        try:
            env = gymnax.make(name)[0]
        except OSError as error:
            raise ConfigError("env", f"{name} downloads its data, which failed: {error}") from None
    return with_params(name, env, env_params) if env_params else env


def with_params(name: str, env: object, env_params: str) -> Environment:
    """Returns the environment with other values in fields of its `default_params`.

    Args:
      name: value of `--env`, for messages.
      env: Environment, see `control.adapt`.
      env_params: JSON object that maps fields of `default_params` to values.

    Raises:
      ConfigError: the parameters lack a field, or a value has another type than the default.
    """
    params: Any = getattr(env, "default_params", None)
    is_tuple = hasattr(params, "_asdict")
    if not (is_tuple or dataclasses.is_dataclass(params)):
        raise ConfigError("env_params", f"must be left out: {name} has no default_params")
    names = [field.name for field in dataclasses.fields(params)] if not is_tuple else params._fields
    changed: dict[str, Any] = {}
    for field, value in errors.json_object("env_params", env_params).items():
        if field not in names:
            near = errors.suggest(field, names)
            raise ConfigError("env_params", f"{name} has no {field!r}{near}")
        try:
            changed[field] = _converted(field, getattr(params, field), value)
        except ConfigError as error:
            raise ConfigError("env_params", f"{name}: {field} {error.message}") from None
    return adapt(
        env, params._replace(**changed) if is_tuple else dataclasses.replace(params, **changed)
    )


def _converted(field: str, default: object, value: object) -> object:
    """Converts a JSON value to a default's type; raises ConfigError if the value would change."""
    default = static_value(field, default)
    if isinstance(default, jax.Array | np.ndarray):
        found = np.array(value)
        if found.shape != default.shape or not np.can_cast(found.dtype, default.dtype, "same_kind"):
            raise ConfigError(field, f"must be {default.dtype}{[*default.shape]}, got {value!r}")
        return jnp.asarray(found, default.dtype)
    if isinstance(default, tuple) and isinstance(value, list):
        value = tuple(value)
    return static_value(field, value, object if default is None else type(default))
