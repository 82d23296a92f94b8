"""Implements PPO with a KL penalty (Schulman et al. 2017, arXiv:1707.06347, eq. 8).

The loss is `−r A + β · KL(old ‖ new) + c_v ½(v − G)² − c_e H(π)`, with β fixed, adapted after each
iteration towards `target_kl`, or adapted within an iteration until the batch's KL is near
`target_kl`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, learner, losses, masked, minibatches, optimizers
from jaxrl_po.algorithms import actor_critic, surrogates
from jaxrl_po.algorithms.actor_critic import Advantage, Epochs
from jaxrl_po.algorithms.surrogates import Checked, Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import (
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Interval,
    Number,
    common,
    number,
    static,
)
from jaxrl_po.masked import Mean
from jaxrl_po.types import (
    ActorCritic,
    Distribution,
    Learner,
    Metrics,
    Optimizer,
    Problem,
    Samples,
    TrainState,
)

FIXED, ADAPTIVE, SATISFIED = PENALTIES = ("fixed", "adaptive", "satisfied")
OLD_NEW, NEW_OLD = DIRECTIONS = ("old_new", "new_old")
Update = tuple[ActorCritic, Any, Metrics]


@config_lib.record
class Config(Epochs):
    """Hyperparameters of PPO with a KL penalty; the defaults suit control tasks."""

    penalty: str = common.static(
        ADAPTIVE,
        "β is fixed, adapted after each iteration, or adapted within an iteration until the KL is "
        "near target_kl",
        choices=PENALTIES,
    )
    kl_coefficient: Number = common.number(
        1.0,
        "coefficient β of the KL penalty; the initial value if β is adapted",
        within=NON_NEGATIVE,
    )
    kl_direction: str = static(
        OLD_NEW, "the penalty is KL(old ‖ new) or KL(new ‖ old)", choices=DIRECTIONS
    )
    target_kl: Number = number(
        0.02,
        "target KL of an adapted β",
        unit="nats",
        within=POSITIVE,
        when=("penalty", ADAPTIVE, SATISFIED),
    )
    max_rounds: int = static(
        6,
        "most optimisations of one batch, for penalty=satisfied",
        within=Interval(2),
        when=("penalty", SATISFIED),
    )


def make(
    config: Config,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    surrogate: Surrogate = surrogates.plain,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds PPO with a KL penalty for any problem with a critic.

    `ppo.make` documents the arguments.

    The metric `exact_kl` is in the direction of `kl_direction`; `policy_loss` includes the penalty.
    """
    config.validate()
    problem, checked = problem.with_target(target), surrogates.checked(surrogate)
    actor_critic.require_on_policy(problem)
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, optimizers.adam)
    policy = actor_critic.make_policy(problem)

    loss = make_loss(config, problem, checked)

    def exact_kl(params: ActorCritic, part: tuple[Samples, Distribution]) -> Mean:
        samples, old = part
        return masked.total(divergence(config, old, policy(params, samples)), samples.mask)

    def optimise(state: TrainState, beta: jax.Array, rows: Samples, key: jax.Array) -> Update:
        """Computes one update from the old parameters with coefficient β, and the update's KL."""
        # The old distributions are shuffled along with the samples.
        old = policy(state.params, rows)
        require_kept(old, rows)
        params, opt_state, metrics = actor_critic.gradient_steps(
            config,
            problem,
            functools.partial(loss, beta=beta),
            optimizer,
            state,
            rows,
            key,
            surrogate=checked,
            beside=old,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
        )
        exact = minibatches.sum_in_parts(
            functools.partial(exact_kl, params), (rows, old), config.num_parts
        )
        kl = actor_critic.update_kl(problem, params, rows, num_parts=config.num_parts)
        return params, opt_state, masked.merge(metrics, {"exact_kl": exact}, kl)

    def adapt(beta: jax.Array, metrics: Metrics) -> jax.Array:
        kl = masked.psum(metrics["exact_kl"], config.axis_name)
        adapted = divergences.adapt_coefficient(beta, kl.value(), config.target_kl)
        return jnp.where(kl.count > 0, adapted, beta)

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        rows, beta = problem.rows(samples), state.kl_coefficient
        first_key, further_key = jax.random.split(key)
        update = optimise(state, beta, rows, first_key)
        if config.penalty == SATISFIED:
            beta, update = satisfied(
                lambda beta, key: optimise(state, beta, rows, key),
                adapt,
                beta,
                update,
                further_key,
                max_rounds=config.max_rounds,
            )
        params, opt_state, metrics = update
        metrics = masked.merge(metrics, {"kl_coefficient": Mean(beta, jnp.float32(1.0))})
        if config.penalty == ADAPTIVE:
            beta = adapt(beta, metrics)
        return state._replace(params=params, opt_state=opt_state, kl_coefficient=beta), metrics

    return learner.make(
        problem,
        estimate=actor_critic.make_estimate(config, problem, advantage),
        improve=improve,
        init_optimizer=optimizer.init,
        kl_coefficient=config.kl_coefficient,
        num_parts=config.num_parts,
        axis_name=config.axis_name,
    )


def divergence(config: Config, old: Distribution, new: Distribution) -> jax.Array:
    """Computes the exact KL between two policies, nats, in the direction of `kl_direction`."""
    return old.kl(new) if config.kl_direction == OLD_NEW else new.kl(old)


def make_loss(config: Config, problem: Problem, surrogate: Checked) -> Callable[..., Any]:
    """Builds `loss(params, (samples, old), *, beta) -> (means, metrics)`, with penalty β · KL."""

    def loss(
        params: ActorCritic, samples_and_old: tuple[Samples, Distribution], *, beta: jax.Array
    ) -> tuple[tuple[Mean, ...], Metrics]:
        samples, old = samples_and_old
        distribution, value = problem.apply(params, samples.inputs)
        log_prob = distribution.log_prob(samples.action)
        policy_loss, logged = surrogate(log_prob, samples, distribution)
        approximate_kl = divergences.k3(samples.log_prob, log_prob)
        return actor_critic.joint_loss(
            config,
            distribution,
            samples,
            policy_loss=policy_loss + beta * divergence(config, old, distribution),
            value_loss=losses.squared_value(value, samples.target),
            logged=masked.merge({"approximate_kl": approximate_kl}, logged),
        )

    return loss


def require_kept(old: Distribution, rows: Samples) -> None:
    """Raises ConfigError if the old distributions are too large to store one for each action."""
    shape = rows.mask.shape
    if any(leaf.shape[: len(shape)] != shape for leaf in jax.tree.leaves(old)):
        raise ConfigError(
            "algorithm",
            "must be another than ppo_penalty, which keeps the old distribution of every token, "
            "for a vocabulary of this size: take ppo",
        )


def satisfied(
    optimise: Callable[[jax.Array, jax.Array], Update],
    adapt: Callable[[jax.Array, Metrics], jax.Array],
    beta: jax.Array,
    first: Update,
    key: jax.Array,
    *,
    max_rounds: int,
) -> tuple[jax.Array, Update]:
    """Repeats an update from the old parameters until β no longer changes.

    Each round discards the update of the previous round. With sharded rows, all devices run the
    same number of rounds, since `adapt` pools the KL.

    Args:
      optimise: `(beta, key) -> update`, starts from the old parameters.
      adapt: `(beta, metrics) -> beta`, returns the next β.
      beta: coefficient β of the first update.
      first: first update, which used `beta`.
      key: PRNG key, consumed.
      max_rounds: largest number of updates, including the first.

    Returns:
      Coefficient β and the last update, with the metric `rounds`.
    """
    Carry = tuple[jax.Array, jax.Array, Update]

    def unsatisfied(carry: Carry) -> jax.Array:
        rounds, beta, (_, _, metrics) = carry
        return (rounds < max_rounds) & (adapt(beta, metrics) != beta)

    def again(carry: Carry) -> Carry:
        rounds, beta, (_, _, metrics) = carry
        beta = adapt(beta, metrics)
        return rounds + 1, beta, optimise(beta, jax.random.fold_in(key, rounds))

    rounds, beta, last = jax.lax.while_loop(unsatisfied, again, (jnp.int32(1), beta, first))
    params, opt_state, metrics = last
    count = Mean(rounds.astype(jnp.float32), jnp.float32(1.0))
    return beta, (params, opt_state, masked.merge(metrics, {"rounds": count}))
