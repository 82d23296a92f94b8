"""Tracks running statistics of each prompt's outcomes, a baseline for groups that are too small."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import compensated, masked
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem


class RunningMoments(NamedTuple):
    """Running moments of the outcomes of S strata (prompts, or difficulties), `[S]` each.

    Attributes:
      weight: number of outcomes, each decayed once per iteration since the outcome was seen; 0
        before the first outcome.
      mean: mean outcome in reward units.
      variance: variance with ddof 0, reward units squared; exactly 0 while all outcomes were equal.
    """

    weight: jax.Array
    mean: jax.Array
    variance: jax.Array


# Replicated entry of the collector's state: `RunningMoments` of all strata.
OUTCOME_STATISTICS = "outcome_statistics"


def empty_moments(strata: int) -> RunningMoments:
    """Returns the `RunningMoments` moments before the first iteration."""
    return RunningMoments(*[jnp.zeros(strata)] * 3)


def update_moments(
    running: RunningMoments,
    outcome: jax.Array,
    stratum: jax.Array,
    *,
    decay: Number,
    axis_name: str | None = None,
) -> RunningMoments:
    """Updates the moments with one iteration's outcomes (Chan et al. 1983).

    `w ← λ w + n`, `mean ← mean + (n / w)(b − mean)` for n outcomes of a stratum with mean b, and
    the variance accordingly; the weight of an outcome decays to `λᵃ` of its value in a iterations.
    Outcomes that are not finite are ignored.

    Args:
      running: moments before this iteration.
      outcome: `[B]`, reward units, below 1e19 (its square overflows float32 above).
      stratum: `[B]`, int32 in [0, S), stratum of each outcome.
      decay: decay factor λ in [0, 1]; 0 forgets all earlier iterations.
      axis_name: device axis that rows are sharded over, or None.

    Returns:
      New moments, equal on every device.

    Example:
      >>> two, three = jnp.array([1.0, 0.0]), jnp.ones(3)
      >>> first = update_moments(empty_moments(2), two, jnp.array([1, 1]), decay=0.5)
      >>> second = update_moments(first, three, jnp.array([1, 1, 1]), decay=0.5)
      >>> [x[1].tolist() for x in second]  # mean (½ · 1 + 3) / 4, variance 7/8 · 1/8
      [4.0, 0.875, 0.109375]
    """
    strata = running.weight.shape[0]
    valid = jnp.isfinite(outcome)

    def total(x: jax.Array) -> jax.Array:
        return masked.psum(
            jax.ops.segment_sum(jnp.where(valid, x, 0.0), stratum, strata), axis_name
        )

    count = total(jnp.ones_like(outcome))
    # Outcomes are shifted by one of them, so that equal outcomes have exactly their value as mean
    # and a variance of exactly 0.
    low = jax.ops.segment_min(jnp.where(valid, outcome, jnp.inf), stratum, strata)
    low = low if axis_name is None else jax.lax.pmin(low, axis_name)
    low = jnp.where(count > 0, low, 0.0)
    mean = low + total(outcome - low[stratum]) / jnp.maximum(count, 1.0)
    variance = total(jnp.square(outcome - mean[stratum])) / jnp.maximum(count, 1.0)
    weight = decay * running.weight + count
    share, gap = count / jnp.where(weight > 0, weight, 1.0), mean - running.mean
    return RunningMoments(
        weight=weight,
        mean=running.mean + share * gap,
        variance=(1.0 - share) * running.variance
        + share * variance
        + share * (1.0 - share) * jnp.square(gap),
    )


def relative(
    running: RunningMoments,
    outcome: jax.Array,
    stratum: jax.Array,
    *,
    scale: str = "std",
    ddof: int = 0,
    epsilon: Number = 1e-6,
    rounding: jax.Array | float = 0.0,
) -> jax.Array:
    """Computes `(R − mean) / (std + ε)` from the moments of each outcome's stratum.

    The result is exactly 0 if all outcomes of the stratum were equal, up to rounding.

    Args:
      running: moments that already include these outcomes.
      outcome: `[B]`, outcome of each row.
      stratum: `[B]`, stratum of each row.
      scale: divisor: `std`, or `none` for the centred outcome alone.
      ddof: correction: the variance is multiplied by `weight / (weight − ddof)`.
      epsilon: constant added to the std.
      rounding: `[B]`, largest std that is rounding error alone; see `compensated.rounding`.

    Returns:
      `[B]`.
    """
    weight, mean, variance = (x[stratum] for x in running)
    centred = outcome - mean
    if scale == "std":
        unbiased = variance * weight / jnp.where(weight > ddof, weight - ddof, 1.0)
        centred = centred / (jnp.sqrt(unbiased) + epsilon)
    # An outcome that is not finite remains so, and the update's check then skips the step.
    return jnp.where(
        variance > jnp.square(rounding), centred, jnp.where(jnp.isfinite(outcome), 0.0, outcome)
    )


def running_relative(
    problem: Problem,
    *,
    decay: Number,
    scale: str = "std",
    ddof: int = 0,
    epsilon: Number = 1e-6,
    axis_name: str | None = None,
) -> Problem:
    """Replaces each row's reward by its outcome relative to the moments of its stratum.

    The relative outcome is the reward of a row's first step; all other rewards of the row are 0.
    The moments include this iteration's outcomes, so a prompt seen for the first time is compared
    within its group. From the second iteration on, a group needs no second member, and a group
    whose members all score the same can still have advantages other than 0.

    Args:
      problem: problem with strata.
      decay: decay factor λ in [0, 1], see `update_moments`.
      scale: divisor, `std` or `none`, see `relative`.
      ddof: correction of the variance, see `relative`.
      epsilon: constant added to the std, see `relative`.
      axis_name: device axis that rows are sharded over, or None.

    Returns:
      Wrapped `Problem`, with the metric `revisited`: share of rows whose stratum was seen in an
      earlier iteration.

    Raises:
      ConfigError: the problem has no strata.
    """
    if not problem.strata:
        raise ConfigError(
            "running_statistics",
            "must have prompts that come again: set prompt_set, or take a task with strata, such "
            "as addition; dynamic sampling leaves no strata",
        )

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        return params, collector.add(replicated={OUTCOME_STATISTICS: empty_moments(problem.strata)})

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        before = collector.replicated[OUTCOME_STATISTICS]
        collector, batch = problem.collect(params, collector.remove(OUTCOME_STATISTICS), key)
        if batch.reward is None:
            raise ConfigError(
                "running_statistics", "must be off where rewards are computed outside the program"
            )
        paid = jnp.where(batch.mask, batch.reward, 0.0)
        sums = jax.tree.map(lambda x: x[:, 0], compensated.sums_to_go(paid))
        outcome = sums.value
        stratum = batch.columns["stratum"]
        running = update_moments(before, outcome, stratum, decay=decay, axis_name=axis_name)
        advantage = relative(
            running,
            outcome,
            stratum,
            scale=scale,
            ddof=ddof,
            epsilon=epsilon,
            rounding=compensated.rounding(outcome, sums.size, sums.terms, paid.shape[1]),
        )
        seen = before.weight[stratum] > 0
        batch = batch._replace(
            reward=jnp.zeros_like(batch.reward).at[:, 0].set(advantage),
            metrics={
                **batch.metrics,
                "revisited": Mean(seen.sum(dtype=jnp.float32), jnp.float32(seen.size)),
            },
        )
        return collector.add(replicated={OUTCOME_STATISTICS: running}), batch

    return problem._replace(init=init, collect=collect)
