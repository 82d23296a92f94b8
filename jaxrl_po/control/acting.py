"""Acts with a trained policy in an environment, and writes the policy as arrays of NumPy."""

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError
from jaxrl_po.control import environment
from jaxrl_po.control.actor import actor_of, play
from jaxrl_po.control.normalizer import Normalizer
from jaxrl_po.control.spaces import Spaces
from jaxrl_po.control.statistics import OBSERVATION_STATISTICS
from jaxrl_po.types import Problem, PyTree, TrainState


class Acting:
    """Functions of one seed's policy, with observations normalised and actions in bounds.

    Args:
      problem: Control problem that the policy was trained on; None, or a problem without `spaces`,
        if the environment is unknown: `act` and `step` then raise ConfigError.
      state: Training state of one seed, or of all seeds if `select` is given.
      select: `(state) -> TrainState`, called once, when needed; None if the state has one seed.
      name: Name of the environment, for messages.
      settings: Settings of the run, which `save` writes.
      rebuild: Function and arguments that make the same object when it is unpickled; () if only the
        state can be pickled.
    """

    def __init__(
        self,
        problem: Problem | None,
        state: TrainState,
        *,
        select: Callable[[TrainState], TrainState] | None = None,
        name: str = "the environment",
        settings: Mapping[str, Any] | None = None,
        rebuild: tuple[Any, ...] = (),
    ):
        self._problem = problem if problem is not None and problem.spaces is not None else None
        self._given, self._select = state, select
        self._name, self._settings = name, settings or {}
        self._rebuild = rebuild

    def __reduce__(self) -> tuple[Any, ...]:
        rest: dict[str, Any] = {"select": self._select, "settings": json.loads(self._json())}
        return self._rebuild or (functools.partial(Acting, None, self._given, **rest), ())

    @functools.cached_property
    def _state(self) -> TrainState:
        return self._given if self._select is None else self._select(self._given)

    def _known(self) -> Problem:
        if self._problem is None:
            raise ConfigError(
                "act",
                "needs the environment, which only a learner from make(config, problem) on a "
                "control problem knows: give that learner, as in run.load(folder, learner=…)",
            )
        return self._problem

    @property
    def _spaces(self) -> Spaces:
        spaces: Spaces = self._known().spaces
        return spaces

    @functools.cached_property
    def start(self) -> PyTree:
        """Returns the memory at an episode's start; () for a policy without memory."""
        if self._problem is None:
            return ()
        return jax.tree.map(lambda x: x[0], actor_of(self._problem).start(1))

    @functools.cached_property
    def _choose(self) -> Callable[..., tuple[Any, jax.Array]]:
        actor, spaces = actor_of(self._known()), self._spaces
        params, collector = self._state.params, self._state.collector._replace(sharded={})

        @jax.jit
        def choose(memory: Any, observation: Any, key: jax.Array | None) -> tuple[Any, jax.Array]:
            seen = self._read(observation)
            if not self._is_one(seen):
                self._refuse(observation, seen)
            # The network scales bytes: an image must not become floats outside.
            seen = jax.tree.map(lambda x, like: x.astype(like.dtype), seen, spaces.observation)
            row = jax.tree.map(lambda x: x[None], (memory, seen))
            after, distribution = actor.act(params, collector, *row)
            action = distribution.mode() if key is None else distribution.sample(key)
            one = jax.tree.map(lambda x: x[0], (after, play(distribution, action)))
            return one[0], spaces.to_action(one[1])

        return choose

    @functools.cached_property
    def _act(self) -> Callable[..., jax.Array]:
        @jax.jit
        def act(observation: Any, key: jax.Array | None) -> jax.Array:
            leaves = jax.tree.leaves(observation)
            one = jax.tree.map(lambda x: x[0], observation) if all(map(jnp.ndim, leaves)) else ()
            if self._is_one(self._read(observation)) or not self._is_one(self._read(one)):
                return self._choose((), observation, key)[1]
            keys = None if key is None else jax.random.split(key, len(leaves[0]))
            axes = (None, 0, None if key is None else 0)
            return jax.vmap(self._choose, in_axes=axes)((), observation, keys)[1]

        return act

    def _array(self, observation: PyTree) -> PyTree:
        """Returns a list as an array if an observation is one array."""
        if not isinstance(self._spaces.observation, jax.ShapeDtypeStruct):
            return observation
        return np.asarray(observation) if type(observation) in (list, tuple) else observation

    def _read(self, observation: PyTree) -> PyTree:
        try:
            return self._spaces.observe(observation)
        except (AttributeError, LookupError, TypeError, ValueError):  # another structure
            return ()

    def _is_one(self, seen: PyTree) -> bool:
        same: bool = environment.shapes(seen) == environment.shapes(self._spaces.observation)
        return same

    def _refuse(self, observation: PyTree, seen: PyTree) -> NoReturn:
        trees = self._spaces.observation, observation, seen
        expected, given, read = map(environment.shapes, trees)
        if all(isinstance(shape, list) for shape in (expected, given, read)):
            # A discrete observation is a number, which the policy reads as a one-hot vector.
            expected = expected[: len(expected) - (len(read) - len(given))]
        raise ConfigError(
            "observation",
            f"must have the shape {expected} of one observation of {self._name}, or for act of a "
            f"batch of them, got {given}",
        )

    def step(
        self, memory: PyTree, observation: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array]:
        """Returns the next memory and the action; see `run.ControlPolicy`."""
        return self._choose(memory, self._array(observation), key)

    def act(self, observation: PyTree, key: jax.Array | None = None) -> jax.Array:
        """Returns the action for an observation, or for a batch; see `run.ControlPolicy`."""
        if jax.tree.leaves(self.start):
            raise ConfigError(
                "act",
                "must be replaced by step for a policy with memory: memory, action = "
                "policy.step(memory, observation), from policy.start",
            )
        return self._act(self._array(observation), key)

    def save(self, path: str | Path) -> None:
        """Writes the policy to a file `path` of `numpy.load`, which ends in `.npz`.

        The file has the networks' parameters by path (`policy/…`, `value/…`, `constants/…`); if the
        policy reads (observation − mean) / std, clipped to ±10, `observation/mean` and
        `observation/std`, which includes the 1e-4 that is added to a standard deviation; for
        actions in a box, `action/low` and `action/high`, the images of −1 and 1 if both are
        finite; for discrete actions `action/first`, the environment's number of action 0; and
        `settings`, the run's settings as JSON. A record that was pickled, or that knows no
        environment, writes no arrays of actions.

        Raises:
          ConfigError: The path does not end in `.npz`.
        """
        if Path(path).suffix != ".npz":
            raise ConfigError("path", f"must end in .npz, got {path}")
        arrays: Any = self.arrays()
        np.savez(path, **arrays)

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the arrays that `save` writes, by name."""
        params = self._state.params._replace(frozen=None)
        found = _by_path("", params._asdict())
        statistics = self._state.collector.replicated.get(OBSERVATION_STATISTICS, ())

        def of_statistics(read: Callable[[Normalizer], jax.Array]) -> PyTree:
            leaf = lambda x: isinstance(x, Normalizer)  # noqa: E731
            return jax.tree.map(read, statistics, is_leaf=leaf)

        found |= _by_path("observation/mean", of_statistics(lambda each: each.mean))
        found |= _by_path("observation/std", of_statistics(lambda each: each.divisor()))
        if self._problem is None:
            return {**found, "settings": np.array(self._json())}
        spaces = self._spaces
        if not spaces.action_size:
            first = spaces.to_action(jnp.zeros(spaces.action.shape, jnp.int32))
            found |= _by_path("action/first", first)
        most = float(np.finfo(np.float32).max)
        for name, far in (("low", -most), ("high", most)) if spaces.action_size else ():
            action = np.asarray(spaces.to_action(jnp.full(spaces.action_size, far)))
            # An action without a bound is returned as it is.
            found[f"action/{name}"] = np.where(action == np.float32(far), far * np.inf, action)
        return {**found, "settings": np.array(self._json())}

    def _json(self) -> str:
        return json.dumps(dict(self._settings), default=str)


def _by_path(name: str, tree: PyTree) -> dict[str, npt.NDArray[Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        "/".join(filter(None, [name, jax.tree_util.keystr(path, simple=True, separator="/")])): (
            np.asarray(leaf.astype(jnp.float32) if leaf.dtype == jnp.bfloat16 else leaf)
        )
        for path, leaf in leaves
    }
