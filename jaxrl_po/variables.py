"""Splits variables of a Flax module: the trained collection, and the constants of a run."""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

from jaxrl_po.config import ConfigError
from jaxrl_po.types import ActorCritic, PyTree

TRAINED = ("params", "lora")
SOWN = "intermediates"  # collections written by `sow`, which has no effect in `apply` here
REFUSED = {
    "InvalidRngError": (
        "must draw no random numbers when it is applied: give dropout deterministic=True, and call "
        "make_rng only to initialise a variable"
    ),
    "ModifyScopeVariableError": (
        "must not write to a collection when it is applied: BatchNorm updates batch_stats, take "
        "LayerNorm or use_running_average=True; other variables are set once, by their initialiser"
    ),
}
"""Map from the name of a Flax error to the condition that the error reports."""
ADVICE = "an nnx class is given as flax.nnx.bridge.ToLinen(Class, args=(…))"


def is_flax(module: Any, package: str = "flax.") -> bool:
    """Returns whether a network, or its class, is Flax's; other networks have no collections."""
    kind = module if isinstance(module, type) else type(module)
    return any(base.__module__.startswith(package) for base in kind.__mro__)


def is_nnx(given: Any) -> bool:
    """Returns whether a value is an nnx module, not a graph definition, state or variable."""
    return any(
        base.__module__.startswith("flax.nnx.") and base.__name__ == "Module"
        for base in type(given).__mro__
    )


def class_of(given: Any) -> str:
    """Returns the name of a class, or of an object's class, for messages."""
    if isinstance(given, type):
        return f"the class {given.__name__}"
    return f"{'the nnx module ' * is_nnx(given)}{type(given).__name__}"


def require_module(name: str, module: Any, *attributes: str) -> None:
    """Raises ConfigError unless a network is an instance with `init` and `apply`, as in Linen.

    Args:
      name: name of the argument, for messages.
      module: network to check. An nnx module in the network's fields is rejected too: it would not
        be trained.
      attributes: names of further attributes that the network must have.
    """
    needed = ("init", "apply", *attributes)
    static = (inspect.getattr_static(module, each, None) for each in needed)
    bound = not isinstance(module, type) or all(
        isinstance(each, staticmethod | classmethod) for each in static
    )
    if not bound or not all(hasattr(module, each) for each in needed):
        raise ConfigError(
            name,
            "must be an instance of flax.linen.Module, or of a class with its "
            f"{', '.join(needed)}, got {class_of(module)}: {ADVICE}",
        )
    if not type(module).__module__.startswith(("jaxrl_po.", "flax.linen")):
        return  # the fields of a user's module are not inspected
    for field, given in vars(module).items() if is_flax(module) else ():
        for part in given if isinstance(given, tuple | list) else (given,):
            is_module = isinstance(part, type) or hasattr(part, "apply") or is_nnx(part)
            if is_flax(part) and is_module:
                require_module(f"{name}.{field}", part)


def split(module: Any, variables: PyTree) -> tuple[PyTree, PyTree]:
    """Splits variables into trained variables and the constants of a run.

    Args:
      module: module of the variables. If the module is not Flax's, all variables are trained.
      variables: result of the module's `init`: `{collection: …}`.

    Returns:
      The collections `TRAINED`, and all other collections except `sow`'s; None if there are no
      others.
    """
    if not is_flax(module) or variables.keys() <= set(TRAINED):
        return variables, None
    constants = {k: x for k, x in variables.items() if k not in (*TRAINED, SOWN)}
    return {k: variables[k] for k in TRAINED if k in variables}, constants or None


def by_role(policy: PyTree, value: PyTree) -> PyTree:
    """Joins the constants of policy and critic, None for a role without any; see `ActorCritic`."""
    roles = {"policy": policy, "value": value}
    return {role: x for role, x in roles.items() if x is not None} or None


def with_critic(policy: ActorCritic, critic: ActorCritic) -> ActorCritic:
    """Joins the policy of one set of parameters with all other fields of another."""
    of_policy = (policy.constants or {}).get("policy")
    constants = by_role(of_policy, (critic.constants or {}).get("value"))
    return critic._replace(policy=policy.policy, constants=constants)


@contextlib.contextmanager
def applied(name: str) -> Iterator[None]:
    """Context in which a Flax module, called `name` in messages, is applied to fixed variables.

    Raises:
      ConfigError: the module draws random numbers or writes to a collection.
    """
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in REFUSED:
            raise
        raise ConfigError(name, REFUSED[type(error).__name__]) from error
