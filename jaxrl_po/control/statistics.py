"""Maintains running statistics of a problem: normalised observations and scaled rewards."""

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

# Names of entries in the collector's state, see `CollectorState`. If rewards are scaled, the
# sharded state has the rolling discounted return `[B]`.
ROLLING_RETURN = "rolling_return"
# The replicated state has a `Normalizer` of raw observations if they are normalised (a tree of
# `Normalizer`s for a structured observation, with () for images that are not frames, see
# `is_frame`), and a `Normalizer` of the rolling discounted return if rewards are scaled.
OBSERVATION_STATISTICS = "observation_statistics"
RETURN_STATISTICS = "return_statistics"


class Statistics(NamedTuple):
    """Statistics that a problem maintains in its collector.

    Attributes:
      normalize_observations: True to maintain statistics of observations, see `normalize`.
      scale_rewards: True to maintain statistics of the rolling discounted return, which scale
        rewards.
      discount: discount γ of the rolling return, in [0, 1].
      target: platform and devices of the program.
      axis_name: device axis that environments are sharded over, or None.
    """

    normalize_observations: bool
    scale_rewards: bool
    discount: float
    target: Target
    axis_name: str | None = None

    def init(self, observation: PyTree, num_envs: int) -> CollectorState:
        """Returns the statistics' entries of the collector's state before any data.

        Args:
          observation: shapes and dtypes of one observation.
          num_envs: number B of environments.

        Raises:
          ConfigError: observations do not have an entry to normalise.
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
        """Merges one iteration into the statistics, and scales the iteration's rewards by them.

        Args:
          collector: collector's state with the entries of `init`.
          observation: raw observations, leaves `[B, T, …]`.
          reward: `[B, T]`, raw rewards.
          ended: `[B, T]`, bool, True where an episode ended.
          mask: `[B, T]`, bool, False in slots without a sample, where reward and `ended` are 0;
            None if all slots hold samples.

        Returns:
          Collector's state, and rewards `[B, T]`, in units of the return's std if rewards are
          scaled.
        """
        sharded, replicated = dict(collector.sharded), dict(collector.replicated)
        if self.scale_rewards:
            sharded[ROLLING_RETURN], rolling = _rolling_return(
                sharded[ROLLING_RETURN], reward, ended, self.discount, self.target.unroll(16)
            )
            merged = normalizer.merge_batch(
                replicated[RETURN_STATISTICS], rolling, mask, axis_name=self.axis_name
            )
            replicated[RETURN_STATISTICS] = merged
            reward = reward / (advantages.scale_of(merged.mean, merged.std()) + 1e-8)
        if self.normalize_observations:
            replicated[OBSERVATION_STATISTICS] = _each(
                lambda one, x: normalizer.merge_batch(one, x, mask, axis_name=self.axis_name),
                lambda none, x: none,
                replicated[OBSERVATION_STATISTICS],
                _networks_inputs(observation),
            )
        return CollectorState(sharded, replicated), reward


def normalize(collector: CollectorState, observation: PyTree) -> PyTree:
    """Returns the networks' input, the observation, normalised where statistics exist."""
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
    """Returns the observation without the flags of legal actions."""
    if isinstance(observation, Observation):
        return observation.policy, observation.critic
    return observation


def _each(kept: Any, left: Any, statistics: PyTree, observation: PyTree) -> PyTree:
    """Maps arrays with statistics by `kept`, bytes to [0, 1], and all other arrays by `left`."""

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
    """Computes `R_t = γ R_{t−1} + r_t` `[B, T]` and the next carry `[B]`.

    The sum restarts from 0 after an episode's end, and after a value that is not finite.
    """

    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, ended = x
        rolling = gamma * carry + reward
        return jnp.where(ended | ~jnp.isfinite(rolling), 0.0, rolling), rolling

    carry, rolling = jax.lax.scan(step, discounted, (reward.T, ended.T), unroll=unroll)
    return carry, rolling.T
