"""PPO: clipped, with a fixed or an adaptive penalty on the KL, or both (Schulman et al. 2017, arXiv:1707.06347).

With a reference it is the PPO of language models: the distance to a frozen policy is a price inside
the rewards, token by token (Ziegler et al. 2019, arXiv:1909.08593; Ouyang et al. 2022,
arXiv:2203.02155).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, learner, losses, masked, minibatches, optimizers, updates
from jaxrl_po.algorithms import actor_critic, reference
from jaxrl_po.algorithms.actor_critic import JointLoss
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Interval,
    Number,
    number,
    static,
)
from jaxrl_po.distributions import Distribution
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Learner, Metrics, Problem, PyTree, Samples, TrainState

NONE, FIXED, ADAPTIVE, SATISFIED = PENALTIES = ("none", "fixed", "adaptive", "satisfied")
OLD_NEW, NEW_OLD = DIRECTIONS = ("old_new", "new_old")
Round = tuple[jax.Array, jax.Array, tuple[ActorCritic, PyTree, Metrics]]
CLIP = Interval(0.0, 1.0, True, True)


@config_lib.record
class Config(JointLoss):
    """Hyperparameters of PPO; the defaults suit control."""

    clip: bool = static(True, "clip the ratio (eq. 7); off leaves the plain surrogate")
    epsilon_low: Number = number(
        0.2, "the ratio is clipped from below at 1 − epsilon_low", within=CLIP
    )
    epsilon_high: Number = number(
        0.2, "the ratio is clipped from above at 1 + epsilon_high", within=CLIP
    )
    penalty: str = static(
        NONE,
        (
            "β · KL in the loss (eq. 8): β fixed, adapted after each iteration, or until the "
            "KL of one batch is near target_kl"
        ),
        choices=PENALTIES,
    )
    kl_coefficient: Number = number(
        1.0, "β, the first one where it is adapted", within=NON_NEGATIVE
    )
    kl_direction: str = static(
        OLD_NEW, "the penalty is KL(old ‖ new) or KL(new ‖ old)", choices=DIRECTIONS
    )
    satisfied_rounds: int = static(
        6, "optimisations of one batch at most, for penalty=satisfied", within=COUNT
    )
    target_kl: Number = number(
        0.02,
        "KL that the penalty aims at, and that the early stop admits",
        unit="nats",
        within=POSITIVE,
    )
    early_stop: bool = static(
        False, "leave out the rest of an update once a minibatch's KL(old ‖ new) exceeds target_kl"
    )
    num_epochs: int = static(10, "passes over each batch", within=COUNT)
    num_minibatches: int = static(16, "gradient steps of one pass", within=COUNT)
    clip_value: bool = static(False, "clip the value's change by epsilon_high in the value loss")
    use_reference: bool = static(
        False,
        (
            "take β · (log π − log π_ref) from the reward of each step; the reference is the "
            "initial policy, frozen"
        ),
    )
    reference_kl_coefficient: Number = number(
        0.05,
        "that β, the first one where it is adapted",
        unit="reward units per nat",
        within=NON_NEGATIVE,
    )
    adapt_reference_kl: bool = static(
        False, "move that β by up to 2 % an iteration, towards reference_target_kl"
    )
    reference_target_kl: Number = number(
        0.1,
        "KL(policy ‖ reference) of one step that the adapted β aims at",
        unit="nats",
        within=POSITIVE,
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        config_lib.require(self, "epsilon_low", self.clip, "clip is on")
        config_lib.require(
            self, "epsilon_high", self.clip or self.clip_value, "clip or clip_value is on"
        )
        config_lib.require(self, "kl_coefficient", self.penalty != NONE, "there is a penalty")
        config_lib.require(self, "kl_direction", self.penalty != NONE, "there is a penalty")
        config_lib.require(
            self, "satisfied_rounds", self.penalty == SATISFIED, f"penalty is {SATISFIED}"
        )
        aims = self.early_stop or self.penalty in (ADAPTIVE, SATISFIED)
        config_lib.require(self, "target_kl", aims, "early_stop is on or the penalty adapts")
        for name in ("reference_kl_coefficient", "adapt_reference_kl"):
            config_lib.require(self, name, self.use_reference, "use_reference is on")
        config_lib.require(
            self, "reference_target_kl", self.adapt_reference_kl, "adapt_reference_kl is on"
        )
        if self.adapt_reference_kl and self.penalty in (ADAPTIVE, SATISFIED):
            raise ConfigError(
                f"adapt_reference_kl must be off where penalty is {self.penalty}: one β "
                "adapts at a time"
            )


def make(
    config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None
) -> Learner:
    """PPO on any problem with a critic.

    Args:
      config: see `Config`.
      problem: control or language.
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings
        its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """
    config.validate()
    actor_critic.require_on_policy(problem)
    optimizer = actor_critic.choose_optimizer(config, optimizer, optimizers.adam)
    policy = actor_critic.policy_of(problem)
    penalised = config.penalty != NONE
    num_parts = config.num_minibatches * config.num_microbatches

    # The state holds the β that adapts.
    def penalty_beta(state: TrainState) -> jax.Array:
        return (
            jnp.asarray(config.kl_coefficient)
            if config.adapt_reference_kl
            else state.kl_coefficient
        )

    def reference_beta(state: TrainState) -> jax.Array:
        return (
            state.kl_coefficient
            if config.adapt_reference_kl
            else jnp.asarray(config.reference_kl_coefficient)
        )

    def divergence(old: Distribution, new: Distribution) -> jax.Array:
        return old.kl(new) if config.kl_direction == OLD_NEW else new.kl(old)

    def loss(
        params: ActorCritic, samples_and_old: tuple[Samples, Distribution], *, beta: jax.Array
    ) -> tuple[tuple[Mean, ...], Metrics]:
        samples, old = samples_and_old
        distribution, value = problem.apply(params, samples.inputs)
        now = distribution.log_prob(samples.action), samples.log_prob, samples.advantage
        others = {"approximate_kl": divergences.k3(samples.log_prob, now[0])}
        if config.clip:
            policy_loss = losses.clipped_surrogate(
                *now, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high
            )
            others["clip_fraction_low"] = losses.clip_fraction_low(*now, config.epsilon_low)
            others["clip_fraction_high"] = losses.clip_fraction_high(*now, config.epsilon_high)
        else:
            policy_loss = losses.surrogate(*now)
        if config.clip_value:
            value_loss = losses.clipped_value(
                value, samples.value, samples.target, epsilon=config.epsilon_high
            )
        else:
            value_loss = losses.squared_value(value, samples.target)
        if penalised:
            policy_loss += beta * divergence(old, distribution)
        return actor_critic.joint_loss(
            config, distribution, samples, policy_loss=policy_loss, value_loss=value_loss, **others
        )

    def optimise(
        state: TrainState, beta: jax.Array, rows: Samples, key: jax.Array
    ) -> tuple[ActorCritic, PyTree, Metrics]:
        """The update from the collecting parameters under one β, and how far it went."""
        old: Any = policy(state.params.policy, rows) if penalised else ()
        update = updates.gradient_update(
            functools.partial(loss, beta=beta),
            optimizer,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
            stop=(lambda metrics: metrics["approximate_kl"].value() > config.target_kl)
            if config.early_stop
            else None,
            axis_name=config.axis_name,
        )
        scale = optimizers.decay(state.step, config.decay_iterations)
        params, opt_state, metrics = update(state.params, state.opt_state, (rows, old), key, scale)
        metrics |= actor_critic.update_kl(problem, params.policy, rows, num_parts=num_parts)
        if penalised:
            parts = minibatches.split((rows, old), num_parts)
            metrics["exact_kl"] = minibatches.summed(
                functools.partial(exact_kl, params.policy), parts
            )
        return params, opt_state, metrics

    def exact_kl(params: PyTree, part: tuple[Samples, Distribution]) -> Mean:
        samples, old = part
        return masked.total(divergence(old, policy(params, samples)), samples.mask)

    def adapt(beta: jax.Array, metrics: Metrics) -> jax.Array:
        kl = masked.psum(metrics["exact_kl"], config.axis_name).value()
        return divergences.adapt_coefficient(beta, kl, config.target_kl)

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        # The loss knows nothing of the reference: its price is inside the rewards.
        rows, beta = problem.rows(samples._replace(reference_log_prob=())), penalty_beta(state)
        params, opt_state, metrics = optimise(state, beta, rows, key)
        if config.penalty == SATISFIED:
            # β settles within the iteration: the batch is optimised from the old parameters again
            # until adapting leaves β alone.
            def unsatisfied(carry: Round) -> jax.Array:
                rounds, beta, (_, _, metrics) = carry
                return (rounds < config.satisfied_rounds) & (adapt(beta, metrics) != beta)

            def again(
                carry: Round,
            ) -> Round:
                rounds, beta, (_, _, metrics) = carry
                beta = adapt(beta, metrics)
                return (
                    rounds + 1,
                    beta,
                    optimise(state, beta, rows, jax.random.fold_in(key, rounds)),
                )

            rounds, beta, (params, opt_state, metrics) = jax.lax.while_loop(
                unsatisfied, again, (jnp.int32(1), beta, (params, opt_state, metrics))
            )
            metrics["rounds"] = Mean(rounds.astype(jnp.float32), jnp.float32(1.0))
        if penalised:
            metrics["kl_coefficient"] = Mean(beta, jnp.float32(1.0))
        if config.penalty == ADAPTIVE:
            beta = adapt(beta, metrics)
        if config.use_reference:
            far = masked.total(
                divergences.k1(samples.log_prob, samples.reference_log_prob), samples.mask
            )
            metrics |= {
                "reference_kl": far,
                "reference_kl_coefficient": masked.total(reference_beta(state)),
            }
        if config.adapt_reference_kl:
            kl = masked.psum(far, config.axis_name).value()
            beta = divergences.adapt_proportionally(
                state.kl_coefficient, kl, config.reference_target_kl
            )
        return state._replace(params=params, opt_state=opt_state, kl_coefficient=beta), metrics

    estimate = actor_critic.make_estimate(config, keep_value=config.clip_value)
    if config.use_reference:
        estimate = reference.beside(
            estimate, policy, reward_kl=divergences.k1, coefficient=reference_beta
        )
    first = config.reference_kl_coefficient if config.adapt_reference_kl else config.kl_coefficient
    return learner.make(
        problem,
        estimate=estimate,
        improve=improve,
        init_optimizer=optimizer.init,
        init_reference=lambda params: params.policy if config.use_reference else (),
        kl_coefficient=first if penalised or config.adapt_reference_kl else 0.0,
        num_parts=num_parts,
        axis_name=config.axis_name,
    )
