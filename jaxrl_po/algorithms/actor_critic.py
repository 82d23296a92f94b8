"""Defines parts of methods with a critic: advantage estimation, joint loss, separate critic fit."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import (
    advantages,
    divergences,
    learner,
    losses,
    masked,
    minibatches,
    optimizers,
    updates,
)
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import surrogates
from jaxrl_po.algorithms.surrogates import Checked
from jaxrl_po.config import COUNT, NON_NEGATIVE, UNIT, ConfigError, Number, common, number, static
from jaxrl_po.divergences import ratio
from jaxrl_po.masked import Mean
from jaxrl_po.optimizers import Optimization
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    Distribution,
    FastPaths,
    Metrics,
    Problem,
    PyTree,
    Samples,
    TrainState,
)

MONTE_CARLO, N_STEP, GAE = ESTIMATORS = ("monte_carlo", "n_step", "gae")

STEP, TURN = PERIODS = ("step", "turn")

Policy = Callable[[ActorCritic, Any], Distribution]


@config_lib.record
class Estimation:
    """Settings of advantage estimation, fields of every method with a critic."""

    gamma: Number = common.number(0.99, "discount γ", within=UNIT)
    lambda_: Number = common.number(
        0.95, "λ of generalised advantage estimation", within=UNIT, when=("estimator", GAE)
    )
    estimator: str = static(GAE, "estimator of the advantage", choices=ESTIMATORS)
    discount_per: str = static(
        STEP,
        "gamma and lambda_ apply at each step (of a transformer: token), or only where a turn of a "
        "dialogue ends",
        choices=PERIODS,
    )
    n_steps: int = static(
        5,
        "length of n-step returns; A3C(k) has n_steps = k + 1",
        unit="steps",
        within=COUNT,
        when=("estimator", N_STEP),
        was=("n",),
    )
    normalize_advantage: bool = static(True, "whiten advantages over the whole batch")
    axis_name: str | None = static(None, "device axis over which rows are sharded")

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        config_lib.check(self)


@config_lib.record
class JointLoss(Estimation, Optimization):
    """Settings of one loss for actor and critic, fields of A2C and PPO."""

    value_coefficient: Number = number(0.5, "weight of ½(v − target)²", within=NON_NEGATIVE)
    entropy_coefficient: Number = common.number(
        0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE
    )
    num_microbatches: int = common.static(
        1, "parts of a minibatch, accumulated to bound memory", within=COUNT
    )

    @property
    def num_parts(self) -> int:
        """Number of parts of a batch, so that a part needs the memory of one microbatch."""
        return self.num_microbatches


@config_lib.record
class Epochs(JointLoss):
    """Settings of epochs of minibatches on each batch, fields of both forms of PPO."""

    num_epochs: int = common.static(10, "passes over each batch", within=COUNT)
    num_minibatches: int = common.static(16, "gradient steps of one pass", within=COUNT)

    @property
    def num_parts(self) -> int:
        """Number of microbatches in a complete batch."""
        return self.num_minibatches * self.num_microbatches


class Trajectory(NamedTuple):
    """Row of a batch, leaves `[T]`, masked slots zero; `Batch` documents the fields.

    Attributes:
      reward: reward r_t of the step, reward units.
      value: critic's value V(s_t), reward units.
      next_value: critic's value V of the true next observation, reward units.
      terminated: bool, True where the episode ended by itself.
      truncated: bool, True where a limit cut the episode.
      mask: bool, True where the slot holds a sample.
      step_end: bool, True where a turn ends; True everywhere if the problem has no turns.
      log_prob: nats, log-probability of the action under the old policy.
      sampler_log_prob: nats, log-probability under the sampler; by default `log_prob`.
    """

    reward: jax.Array
    value: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    mask: jax.Array
    step_end: jax.Array
    log_prob: jax.Array
    sampler_log_prob: jax.Array


Advantage = Callable[[Trajectory], tuple[jax.Array, jax.Array]]
"""`trajectory -> (advantage [T], target of the critic [T])`, reward units.

The function is vmapped.
"""


def estimator(config: Estimation, unroll: int = 1) -> Advantage:
    """Returns the advantage function of a config; its targets are the advantage plus the value.

    Args:
      config: hyperparameters, see `Estimation`.
      unroll: number of loop steps per pass, see `backend.Target.unroll`.
    """

    def advantage(steps: Trajectory) -> tuple[jax.Array, jax.Array]:
        ends = steps.terminated, steps.truncated
        gamma, lambda_ = (
            jnp.where(steps.step_end, x, 1.0) if config.discount_per == TURN else x
            for x in (config.gamma, config.lambda_)
        )
        if config.estimator == GAE:
            stream = steps.reward, steps.value, steps.next_value, *ends
            gae = advantages.gae(*stream, gamma=gamma, lambda_=lambda_, unroll=unroll)
            return gae, gae + steps.value
        rewards = steps.reward, steps.next_value, *ends
        if config.estimator == N_STEP:
            if config.n_steps > steps.reward.size:
                most = f"num_steps = {steps.reward.size}"
                raise ConfigError("n_steps", f"must be at most {most}, got {config.n_steps}")
            returns = advantages.n_step_returns(*rewards, gamma=gamma, n=config.n_steps)
        else:
            returns = advantages.discounted_returns(*rewards, gamma=gamma, unroll=unroll)
        return returns - steps.value, returns

    return advantage


def choose_advantage(config: Estimation, problem: Problem, given: Advantage | None) -> Advantage:
    """Returns the user's advantage function, or the config's function if the user's is None.

    Raises:
      ConfigError: discounts are per turn in a problem without turns, or a setting of the config's
        advantage is given next to a user's advantage.
    """
    if given is None:
        if config.discount_per == TURN:
            require_turns(problem, "discount_per", STEP)
        return estimator(config, problem.target.unroll(16))
    for name in ("gamma", "lambda_", "estimator", "n_steps", "discount_per"):
        config_lib.require_unset(config, name, "the advantage is the method's own; leave it out")

    def checked(trajectory: Trajectory) -> tuple[jax.Array, jax.Array]:
        result, shape = given(trajectory), trajectory.reward.shape
        pair = isinstance(result, tuple) and len(result) == 2
        if not pair or any(surrogates.shape_of(x) != shape for x in result):
            raise ConfigError(
                "advantage",
                f"must return (advantage, target), each {list(shape)}, as its reward, got "
                f"{surrogates.form(result)}",
            )
        return result

    return checked


def estimate(advantage: Advantage, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Computes advantages, not whitened, and the critic's targets, both `[B, T]`, reward units."""
    return jax.vmap(advantage)(
        Trajectory(
            reward=batch.reward,
            value=batch.value,
            next_value=batch.next_value,
            terminated=batch.terminated,
            truncated=batch.truncated,
            mask=batch.mask,
            step_end=batch.columns.get("step_end", jnp.ones_like(batch.mask)),
            log_prob=batch.log_prob,
            sampler_log_prob=batch.columns.get("sampler_log_prob", batch.log_prob),
        )
    )


def make_estimate(
    config: Estimation,
    problem: Problem,
    advantage: Advantage | None = None,
    *,
    keep_value: bool = False,
    keep_proposal: bool = False,
) -> learner.Estimate:
    """Builds `estimate(state, batch) -> samples`, which whitens advantages if the config says so.

    Args:
      config: hyperparameters, see `Estimation`.
      problem: source of the batches, which must have turns if discounts are per turn.
      advantage: function that replaces the config's advantage, see `choose_advantage`.
      keep_value: True to keep the critic's values from collection, for a clipped value loss.
      keep_proposal: True to keep log μ of the actions, for a surrogate weighted by π / μ.

    Raises:
      ConfigError: `choose_advantage` refuses a setting.
    """
    chosen = choose_advantage(config, problem, advantage)

    def from_batch(state: TrainState, batch: Batch) -> Samples:
        del state
        advantage, target = estimate(chosen, batch)
        if config.normalize_advantage:  # mean 0 and std 1 over the unmasked slots of all devices
            advantage = advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)
        if keep_proposal and "sampler_log_prob" not in batch.columns:
            raise ConfigError(
                "sampler_log_prob", "must be given by a problem that is not on-policy: it is log μ"
            )
        return Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=batch.log_prob,
            advantage=advantage,
            mask=batch.mask,
            target=target,
            value=batch.value if keep_value else None,
            columns=batch.per_step_columns() if keep_proposal else {},
        )

    return from_batch


def share_prefixes(problem: Problem, in_order: bool) -> Problem:
    """Returns the problem for ordered parts of a batch; a group's shared prefix is computed once.

    Args:
      problem: any problem.
      in_order: True if the method reads only ordered parts; False leaves the problem unchanged.
    """
    by_length, grouped = problem.fast_paths
    if grouped is None or not in_order:
        return problem._replace(fast_paths=FastPaths(by_length))
    return problem._replace(
        apply=lambda params, inputs: problem.apply(params, grouped(inputs)),
        fast_paths=FastPaths(by_length and functools.partial(by_length, in_order=True), grouped),
    )


def make_policy(problem: Problem) -> Policy:
    """Returns `policy(params, samples) -> distribution`; the critic is not evaluated."""
    return lambda params, samples: problem.apply(params._replace(value=None), samples.inputs)[0]


def wrt_policy(function: Callable[..., Any], params: ActorCritic) -> Callable[..., Any]:
    """Returns a `function` of the policy's parameters.

    All other parameters are taken from `params`.
    """
    return lambda policy, *others: function(params._replace(policy=policy), *others)


def gradient_steps(
    config: JointLoss,
    problem: Problem,
    loss: updates.Loss,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    samples: Samples,
    key: jax.Array,
    *,
    surrogate: Checked,
    beside: PyTree = None,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    stop: updates.Stop | None = None,
) -> tuple[ActorCritic, PyTree, Metrics]:
    """Takes epochs of minibatch steps on a loss of policy and critic; only they get gradients.

    Args:
      config: hyperparameters, see `JointLoss`.
      problem: source of the samples.
      loss: `(params, samples) -> (means, metrics)`, a function of the complete `ActorCritic`.
      optimizer: any optax transformation.
      state: state before the update.
      samples: samples of the iteration, whose leaves lead with the rows.
      key: PRNG key, consumed by the shuffles.
      surrogate: surrogate in the loss; a minibatch is not divided if the surrogate mixes rows.
      beside: further leaves that are shuffled with the samples, so that the loss gets `(samples,
        beside)`; None to pass the samples alone.
      num_epochs: number of passes over the samples.
      num_minibatches: number of gradient steps in one pass.
      stop: `(metrics) -> bool []`, True ends the update; None means that the update never stops
        early.

    Returns:
      Parameters, optimizer state and metrics, as from `updates.gradient_update`.
    """
    parts = surrogates.parts(surrogate, samples, problem, state.params, config, num_minibatches)
    update = updates.gradient_update(
        loss,
        optimizer,
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        num_microbatches=config.num_microbatches,
        slots=parts.slots if problem.fast_paths.grouped is None else None,
        by_length=parts.by_length if beside is None else None,
        stop=stop,
        mask_of=lambda rows: (rows if beside is None else rows[0]).mask,
        target=problem.target,
        axis_name=config.axis_name,
    )
    rows = samples if beside is None else (samples, beside)
    scale = optimizers.scale(config, state.step)
    return update(state.params, state.opt_state, rows, key, scale)


def joint_loss(
    config: JointLoss,
    distribution: Distribution,
    samples: Samples,
    *,
    policy_loss: jax.Array,
    value_loss: jax.Array,
    logged: dict[str, jax.Array],
) -> tuple[tuple[Mean, ...], Metrics]:
    """Computes `policy_loss + c_v · value_loss − c_e · entropy`, each a mean over steps.

    Source: Mnih et al. 2016 (A3C), section 4; Schulman et al. 2017 (PPO), eq. 9. Policy loss and
    value loss are per element, and so are the elements that are only logged.

    Raises:
      ConfigError: an element in the log has the name of a term of the loss.
    """
    terms = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": distribution.entropy(),
    }
    elements = masked.merge(terms, logged)
    means = {name: losses.token_mean(x, samples.mask) for name, x in elements.items()}
    policy, value, entropy = (means[name] for name in ("policy_loss", "value_loss", "entropy"))
    weighted = value * config.value_coefficient, entropy * -config.entropy_coefficient
    return (policy, *weighted), means


def require_turns(problem: Problem, field: str, otherwise: str) -> None:
    """Raises ConfigError about a field with the value `turn` if the problem does not have turns."""
    if not problem.has_turns:
        raise ConfigError(field, f"must be {otherwise} here, got {TURN}: only dialogues have turns")


def require_on_policy(problem: Problem) -> None:
    """Raises ConfigError if a proposal samples the actions, for losses without a weight π / μ."""
    if not problem.on_policy:
        raise ConfigError(
            "sampling",
            "must be from the policy itself for this method: only npg and trpo weigh the actions "
            "of a vine with num_branches = 0 by π / μ. Take one of these, or num_branches of at "
            "least 2",
        )


def update_kl(
    problem: Problem, params: ActorCritic, samples: Samples, *, num_parts: int = 1
) -> Metrics:
    """Computes the metric `kl` of an update: k3 estimate of KL(old ‖ new), nats, on old samples.

    Args:
      problem: problem whose policy is evaluated.
      params: parameters after the update.
      samples: samples to measure on; if their sampler μ is not the old policy, they are weighted by
        π_old / μ.
      num_parts: smallest number of parts to process one after another, to bound memory. With
        several parts, rows are sorted by length.
    """
    policy, rows = make_policy(problem), samples.mask.shape[0]
    num_parts = next(n for n in range(num_parts, rows + 1) if rows % n == 0)

    def total(part: Samples) -> Mean:
        kl = divergences.k3(part.log_prob, policy(params, part).log_prob(part.action))
        if "sampler_log_prob" in part.columns:
            # A vine may try an action of probability 0, whose term counts as 0 · log 0 = 0.
            weighted = ratio(part.log_prob, part.columns["sampler_log_prob"]) * kl
            kl = jnp.where(part.log_prob == -jnp.inf, 0.0, weighted)
        return masked.total(kl, part.mask)

    # One part is computed after another, and their totals and counts are added.
    by_length = problem.fast_paths.by_length if num_parts > 1 else None
    return {"kl": (by_length or minibatches.sum_in_parts)(total, samples, num_parts)}
