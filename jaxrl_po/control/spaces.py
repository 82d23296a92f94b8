"""Reads spaces: observations and actions of a policy, from the spaces of gymnax or gymnasium."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import ConfigError, check_size, with_field_docs
from jaxrl_po.types import PyTree

# Entries of a structured observation with a special meaning.
LEGAL, PRIVILEGED = "action_mask", "privileged_state"


@with_field_docs
class Observation(NamedTuple):
    """Observation with parts that the policy's network does not read.

    Attributes:
      policy: inputs of the policy's network, any pytree.
      critic: inputs of the critic, any pytree; None if the critic reads the policy's inputs.
      legal: bool, `[A]` for A discrete actions, or for several choices one after another: True for
        allowed actions; None if all actions are allowed.
    """

    policy: PyTree
    critic: PyTree = None
    legal: Any = None

    def seen_by_critic(self) -> PyTree:
        """Returns the inputs of the critic."""
        return self.policy if self.critic is None else self.critic


@with_field_docs
class Spaces(NamedTuple):
    """Observation space and action space of a policy.

    Attributes:
      observation: shapes and dtypes of one observation: an array, any pytree of arrays, or an
        `Observation`.
      num_actions: number of discrete actions, or 0 for other actions.
      action_size: number of components of a continuous action, or 0 for other actions.
      choices: number of options of each of several simultaneous discrete choices, or ().
      observe: `(environment's observation) -> policy's observation`, converts to float32, or leaves
        bytes unchanged.
      to_action: `(policy's action) -> environment's action`, converts an action.
      bounded: True if a continuous action has bounds, all of which are finite.
      classes: `(observation, leaves [E*, …]) -> one-hot vectors`, returns the one-hot vectors in an
        observation, `[E*, …, n]` each.
    """

    observation: PyTree
    num_actions: int = 0
    action_size: int = 0
    choices: tuple[int, ...] = ()
    observe: Callable[[Any], PyTree] = lambda observation: observation
    to_action: Callable[[jax.Array], PyTree] = lambda action: action
    bounded: bool = True
    classes: Callable[[PyTree], list[jax.Array]] = lambda observation: []

    @property
    def action(self) -> jax.ShapeDtypeStruct:
        """Returns the shape and dtype of one action, as the policy returns it."""
        if self.action_size:
            return jax.ShapeDtypeStruct((self.action_size,), jnp.float32)
        return jax.ShapeDtypeStruct((len(self.choices),) if self.choices else (), jnp.int32)


def is_discrete(space: Any) -> bool:
    """Returns whether a space of gymnax or gymnasium consists of finitely many numbers."""
    return hasattr(space, "n") and tuple(getattr(space, "shape", None) or ()) == ()


def is_image(space: Any) -> bool:
    """Returns whether a box holds brightness of pixels; bytes of two or more axes, 0 to 255.

    Other bytes are treated as numbers: flags, counts, a one-hot vector.
    """
    if getattr(space, "dtype", None) != np.uint8 or len(space.shape) < 2:
        return False
    return bool(np.all(np.asarray(space.low) == 0) and np.all(np.asarray(space.high) == 255))


def is_frame(x: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an observation's size is that of a frame of a video game, `[H, W, C]`."""
    return len(x.shape) == 3 and min(x.shape[:2]) >= 36


def read_spaces(name: str, observation_space: Any, action_space: Any) -> Spaces:
    """Reads the spaces of an environment of gymnax or gymnasium.

    Discrete observations become one-hot vectors; images (`is_image`) remain bytes, which the
    network scales; other observations become float32 (float64 if JAX enables it). In a dictionary,
    `action_mask` holds the legal actions and only the critic reads `privileged_state`; the policy
    reads all other entries. Neither `action_mask` nor `privileged_state` may be used at a deeper
    level.

    A continuous action is in units of the box's half range around its centre. The action is clipped
    to the box after the policy: the stored action remains unclipped.

    Args:
      name: name of the environment, for messages.
      observation_space: discrete (`n`, and `start` if not 0), a box (`low`, `high`, `shape`), flags
        (`n`, `shape`), several classes (`nvec`), or a dictionary or tuple of such spaces
        (`spaces`).
      action_space: discrete space, several discrete choices (`nvec`) or a box.

    Raises:
      ConfigError: a space is of another kind, an observation has no elements, a space has no
        possible action, or a mask does not fit the actions.
    """
    read = _reader(name, observation_space)
    raw = example(observation_space)
    seen = jax.eval_shape(read, raw)
    acts = read_action_space(name, action_space)
    check_observation(name, seen, acts)
    classes = functools.partial(_classes, observation_space)
    return acts._replace(observation=seen, observe=read, classes=classes)


def read_action_space(name: str, space: Any) -> Spaces:
    """Reads the actions of an environment; the fields of observations are not set.

    Raises:
      ConfigError: the space is neither discrete, nor several discrete choices, nor a box of floats,
        or contains no action.
    """
    of_actions = f"of the action space {type(space).__name__}"
    if is_discrete(space):
        first = int(getattr(space, "start", 0))
        count = check_size("env", space.n, part=f"{name}: n {of_actions}")
        return Spaces(None, num_actions=count, to_action=lambda action: action + first)
    if hasattr(space, "nvec") and len(space.shape) == 1:
        offset = jnp.asarray(getattr(space, "start", 0))
        check_size("env", len(space.nvec), part=f"{name}: the length of nvec {of_actions}")
        counts = (
            check_size("env", n, part=f"{name}: each n of nvec {of_actions}") for n in space.nvec
        )
        return Spaces(None, choices=tuple(counts), to_action=lambda action: action + offset)
    floats = hasattr(space, "low") and jnp.issubdtype(getattr(space, "dtype", float), jnp.floating)
    if not floats:
        raise ConfigError(
            "env",
            f"{name}: actions must be discrete, several discrete choices or a box of floats, got "
            f"{type(space).__name__}",
        )
    return box_actions(name, space.low, space.high, tuple(space.shape))


def box_actions(name: str, low: Any, high: Any, shape: tuple[int, ...]) -> Spaces:
    """Reads continuous actions in a box, see `read_spaces`; fields of observations are not set.

    Raises:
      ConfigError: the box does not have components, or no action is within its bounds.
    """
    check_size(
        "env", math.prod(shape), part=f"{name}: number of components of the action space Box"
    )
    if not any(isinstance(bound, jax.core.Tracer) for bound in (low, high)):
        pairs = np.stack(np.broadcast_arrays(low, high), axis=-1).reshape(-1, 2).astype(float)
        empty = ~((pairs[:, 0] <= pairs[:, 1]) & (pairs[:, 0] < np.inf) & (pairs[:, 1] > -np.inf))
        if empty.any():
            raise ConfigError(
                "env",
                f"{name}: bounds of the action space Box must be numbers low <= high, or infinite "
                f"for none, got low {pairs[empty][0, 0]:g} and high {pairs[empty][0, 1]:g}",
            )
    low, high = (jnp.broadcast_to(jnp.asarray(bound, float), shape) for bound in (low, high))
    bounded = jnp.isfinite(low) & jnp.isfinite(high)
    # Bounds are halved before they are added: a sum of the largest floats would not be finite.
    centre = jnp.where(bounded, 0.5 * low + 0.5 * high, 0.0)
    half_range = jnp.where(bounded, 0.5 * high - 0.5 * low, 1.0)

    def to_action(action: jax.Array) -> jax.Array:
        return jnp.clip(centre + half_range * action.reshape(shape), low, high)

    known = not isinstance(bounded, jax.core.Tracer)
    return Spaces(
        None,
        action_size=math.prod(shape),
        to_action=to_action,
        bounded=bool(bounded.all()) if known else True,
    )


def check_observation(name: str, observation: PyTree, spaces: Spaces) -> None:
    """Raises ConfigError if policy or critic has no input, or legal actions do not fit."""
    seen = observation if isinstance(observation, Observation) else Observation(observation)
    for part in (seen.policy, seen.seen_by_critic()):
        if not sum(math.prod(x.shape) for x in jax.tree.leaves(part)):
            raise ConfigError(
                "env",
                f"{name}: an observation must have at least one element, got shapes "
                f"{jax.tree.map(lambda x: list(x.shape), part)}",
            )
    if not isinstance(observation, Observation) or observation.legal is None:
        return
    size = sum(spaces.choices) if spaces.choices else spaces.num_actions
    if observation.legal.shape != (size,):
        raise ConfigError(
            "env",
            f"{name}: {LEGAL} must have the shape [{size}], one flag for each discrete action, got "
            f"{list(observation.legal.shape)}",
        )


def _parts(space: Any) -> Any:
    """Returns the spaces inside a dictionary or tuple of spaces; None for other spaces."""
    inner = getattr(space, "spaces", None)
    return inner if isinstance(inner, Mapping | tuple | list) else None


def _reader(name: str, space: Any, inside: bool = False) -> Callable[[Any], PyTree]:
    parts = _parts(space)
    if parts is None:
        return _leaf_reader(name, space)
    if not isinstance(parts, Mapping):
        readers = tuple(_reader(name, part, True) for part in parts)
        return lambda raw: tuple(read(x) for read, x in zip(readers, raw, strict=True))
    if inside and {LEGAL, PRIVILEGED} & set(parts):
        raise ConfigError(
            "env", f"{name}: {LEGAL} and {PRIVILEGED} must be entries of the observation itself"
        )
    of = {key: _reader(name, part, True) for key, part in parts.items() if key != LEGAL}
    if parts and not set(of) - {PRIVILEGED}:
        raise ConfigError("env", f"{name}: the policy must see something beside {', '.join(parts)}")

    def read(raw: Any) -> PyTree:
        seen = {key: reader(raw[key]) for key, reader in of.items()}
        if not {LEGAL, PRIVILEGED} & set(parts):
            return seen
        critic = seen if PRIVILEGED in seen else None
        policy = {key: x for key, x in seen.items() if key != PRIVILEGED}
        legal = jnp.asarray(raw[LEGAL], bool).reshape(-1) if LEGAL in parts else None
        return Observation(policy, critic, legal)

    return read


def _classes(space: Any, seen: PyTree) -> list[jax.Array]:
    """Returns the one-hot vectors in observations of a space, in the form of `_reader`."""
    parts = _parts(space)
    if parts is None:
        return [seen] if is_discrete(space) else []
    if isinstance(seen, Observation):
        seen = seen.seen_by_critic()  # all entries except the legal actions
    keys = list(parts) if isinstance(parts, Mapping) else range(len(parts))
    return [each for key in keys if key != LEGAL for each in _classes(parts[key], seen[key])]


def _leaf_reader(name: str, space: Any) -> Callable[[Any], jax.Array]:
    discrete = is_discrete(space)
    first = int(getattr(space, "start", 0)) if discrete else 0
    if not any(hasattr(space, kind) for kind in ("low", "n", "nvec")):
        raise ConfigError(
            "env",
            f"{name}: observations must be boxes, discrete, flags or several classes, or "
            f"dictionaries or tuples of these, got {type(space).__name__}",
        )

    image = not discrete and is_image(space)

    def read(raw: Any) -> jax.Array:
        if discrete:
            return jax.nn.one_hot(raw - first, int(space.n), dtype=float)
        return jnp.asarray(raw) if image else jnp.asarray(raw).astype(float)

    return read


def example(space: Any) -> PyTree:
    """Returns the shapes and dtypes of the observations in a space."""
    parts = _parts(space)
    if isinstance(parts, Mapping):
        return {key: example(part) for key, part in parts.items()}
    if parts is not None:
        return tuple(map(example, parts))
    if is_discrete(space):
        return jax.ShapeDtypeStruct((), jnp.int32)
    dtype = getattr(space, "dtype", None) or float
    return jax.ShapeDtypeStruct(tuple(space.shape), jax.dtypes.canonicalize_dtype(dtype))
