"""Running statistics of a problem: normalised observations and scaled rewards."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import advantages
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.control import normalizer
from jaxrl_po.control.normalizer import Normalizer
from jaxrl_po.control.spaces import Observation, is_frame
from jaxrl_po.types import CollectorState, PyTree

# Entries of the collector's state, see `CollectorState`. Sharded, where rewards are scaled: the
# rolling discounted return `[B]`.
ROLLING_RETURN = "rolling_return"
# Replicated: `Normalizer` of raw observations, where they are normalised (of a structured one, a
# tree of them, with () for images that are no frame, see `is_frame`), and of the rolling
# discounted return, where rewards are scaled.
OBSERVATION_STATISTICS = "observation_statistics"
RETURN_STATISTICS = "return_statistics"


class Statistics(NamedTuple):
    """Which statistics a problem keeps in its collector, and how.

    Attributes:
      normalize_observations: keep those of observations, see `normalize`.
      scale_rewards: keep those of the rolling discounted return, and scale rewards by them.
      discount: γ of that return, in [0, 1].
      target: what the program is for.
      axis_name: device axis over which environments are sharded, or None.
    """

    normalize_observations: bool
    scale_rewards: bool
    discount: float
    target: Target
    axis_name: str | None = None

    def init(self, observation: PyTree, num_envs: int) -> CollectorState:
        """The entries of the collector's state before any data.

        Args:
          observation: shapes and dtypes of one observation.
          num_envs: B.

        Raises:
          ConfigError: there is nothing to normalise.
        """
        sharded: dict[str, PyTree] = {}
        replicated: dict[str, PyTree] = {}
        if self.normalize_observations:
            statistics = jax.tree.map(
                lambda x: normalizer.empty(x.shape) if x.dtype != jnp.uint8 or is_frame(x) else (),
                _networks_inputs(observation),
            )
            if not jax.tree.leaves(statistics):
                raise ConfigError(
                    "normalize_observations",
                    "must be off where observations are images of bytes but no frames [H, W, C] "
                    "of at least 36 × 36: the network scales them to [0, 1]",
                )
            replicated[OBSERVATION_STATISTICS] = statistics
        if self.scale_rewards:
            sharded[ROLLING_RETURN] = jnp.zeros(num_envs)
            replicated[RETURN_STATISTICS] = normalizer.empty(())
        return CollectorState(sharded, replicated)

    def update(
        self,
        collector: CollectorState,
        observation: PyTree,
        reward: jax.Array,
        ended: jax.Array,
        mask: jax.Array | None = None,
    ) -> tuple[CollectorState, jax.Array]:
        """Merges one iteration into the statistics, and scales its rewards by them.

        Args:
          collector: with the entries of `init`.
          observation: leaves `[B, T, …]`, raw.
          reward: `[B, T]`, raw.
          ended: `[B, T]`, bool, whether the episode ended.
          mask: `[B, T]`, bool, False where the slot holds no sample; None if all do. There, reward
            and `ended` are 0.

        Returns:
          The collector, and rewards `[B, T]`, in units of the return's std where they are scaled.
        """
        sharded, replicated = dict(collector.sharded), dict(collector.replicated)
        if self.scale_rewards:
            sharded[ROLLING_RETURN], rolling = _rolling_return(
                sharded[ROLLING_RETURN], reward, ended, self.discount, self.target.unroll(16)
            )
            merged = normalizer.merge(
                replicated[RETURN_STATISTICS], rolling, mask, axis_name=self.axis_name
            )
            replicated[RETURN_STATISTICS] = merged
            reward = reward / (advantages.scale_of(merged.mean, merged.std()) + 1e-8)
        if self.normalize_observations:
            replicated[OBSERVATION_STATISTICS] = _each(
                lambda one, x: normalizer.merge(one, x, mask, axis_name=self.axis_name),
                lambda none, x: none,
                replicated[OBSERVATION_STATISTICS],
                _networks_inputs(observation),
            )
        return CollectorState(sharded, replicated), reward


def normalize(collector: CollectorState, observation: PyTree) -> PyTree:
    """What the networks read: the observation, normalised where the statistics are kept."""
    statistics = collector.replicated.get(OBSERVATION_STATISTICS)
    if statistics is None:
        return observation
    normalized = _each(
        Normalizer.normalize, lambda none, x: x, statistics, _networks_inputs(observation)
    )
    if isinstance(observation, Observation):
        return Observation(normalized[0], normalized[1], observation.legal)
    return normalized


def _networks_inputs(observation: PyTree) -> PyTree:
    """The observation without the flags of legal actions."""
    if isinstance(observation, Observation):
        return observation.policy, observation.critic
    return observation


def _each(kept: Any, left: Any, statistics: PyTree, observation: PyTree) -> PyTree:
    """`kept` of each array whose statistics are kept, bytes as [0, 1]; `left` of each other."""

    def each(statistic: Any, x: jax.Array) -> Any:
        if not isinstance(statistic, Normalizer):
            return left(statistic, x)
        return kept(statistic, x / 255.0 if x.dtype == jnp.uint8 else x)

    def is_leaf(node: Any) -> bool:
        return isinstance(node, Normalizer) or node == ()

    return jax.tree.map(each, statistics, observation, is_leaf=is_leaf)


def _rolling_return(
    discounted: jax.Array, reward: jax.Array, ended: jax.Array, gamma: float, unroll: int
) -> tuple[jax.Array, jax.Array]:
    """`R_t = γ R_{t−1} + r_t` `[B, T]` and the next carry `[B]`.

    It starts from 0 after an episode's end, and where it is not finite.
    """

    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, ended = x
        rolling = gamma * carry + reward
        return jnp.where(ended | ~jnp.isfinite(rolling), 0.0, rolling), rolling

    carry, rolling = jax.lax.scan(step, discounted, (reward.T, ended.T), unroll=unroll)
    return carry, rolling.T
