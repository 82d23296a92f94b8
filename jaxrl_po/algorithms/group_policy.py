"""Parts that methods without a critic share: responses are compared within a group.

A method is defined by the functions that it passes to `make`: the advantage of a response within
its group, the surrogate of a token, and the average over tokens. The config of a method inherits
the fields that the method uses from the mix-ins of `group_config`.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import (
    advantages,
    group_advantages,
    learner,
    losses,
    masked,
    natural_updates,
    optimizers,
    updates,
)
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import actor_critic, corrections, group_config, surrogates
from jaxrl_po.algorithms import reference as reference_lib
from jaxrl_po.algorithms.group_config import Clip, GroupScale, Reference
from jaxrl_po.algorithms.group_config import GradientSteps as GradientSteps  # for users' methods
from jaxrl_po.algorithms.reference import Divergence
from jaxrl_po.algorithms.surrogates import Checked, Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.distributions import log_prob_and_entropy
from jaxrl_po.divergences import ratio
from jaxrl_po.masked import Mean
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    Learner,
    Metrics,
    Optimizer,
    Problem,
    Samples,
    TrainState,
)

KL_STRIDE = 4  # a pass over all groups would take a quarter of the time of an update

GroupAdvantage = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""`(reward [P, G, T], mask [P, G, T], step_end [P, G, T]) -> [P, G, T]`, computes advantages from
fields of `Batch`."""
Aggregate = Callable[[jax.Array, jax.Array], Mean]
"""`(elements [B, T], mask [B, T]) -> Mean`, averages over tokens."""


def relative_to_group(config: GroupScale) -> GroupAdvantage:
    """Returns the advantage `(R − mean) / scale` within the group, for every token.

    The formulas are in `advantages.group_relative` and `advantages.maximum_likelihood`.
    """
    if config.scale == group_config.MEAN:
        return outcome_advantage(advantages.maximum_likelihood)
    if config.scale == group_config.BATCH:
        return batch_relative(config.std_epsilon, config.axis_name)
    return outcome_advantage(
        lambda r: advantages.group_relative(
            r, scale=config.scale, ddof=config.ddof, epsilon=config.std_epsilon
        )
    )


def batch_relative(epsilon: Number, axis_name: str | None) -> GroupAdvantage:
    """Returns the advantage `(R − group mean) / (std of all outcomes + ε)` (arXiv:2508.08221).

    The divisor is the scale of Lite PPO: a group in which a single member differs does not get a
    tiny divisor. The std has ddof 0; rows without a token do not count.
    """
    centred = outcome_advantage(lambda r: advantages.group_relative(r, scale=group_config.CENTRED))

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        outcome = jax.vmap(group_advantages.outcomes)(reward)
        _, std = masked.moments(outcome, mask.any(axis=-1), axis_name=axis_name)
        return centred(reward, mask, step_end) / (std + epsilon)

    return advantage


def outcome_advantage(relative: Callable[[jax.Array], jax.Array]) -> GroupAdvantage:
    """Returns the advantage of outcome supervision, one advantage for all tokens of a response.

    Args:
      relative: `(outcomes [G]) -> advantages [G]` of one group, see `group_advantages.outcomes`.
    """

    def advantage(reward: jax.Array, mask: jax.Array, step_end: jax.Array) -> jax.Array:
        del step_end
        require_group(reward)
        outcome = jax.vmap(group_advantages.outcomes)(reward)
        return jnp.broadcast_to(jax.vmap(relative)(outcome)[..., None], mask.shape)

    return advantage


def drop_extra_members(samples: Samples, group_size: int, extra_samples: int) -> Samples:
    """Returns the samples without the last `extra_samples` members of each group.

    Raises:
      ConfigError: a group would have no member left.
    """
    if extra_samples >= group_size:
        raise ConfigError(
            "extra_samples", f"must be below group_size = {group_size}, got {extra_samples}"
        )

    def keep(x: jax.Array) -> jax.Array:
        members = x.reshape(-1, group_size, *x.shape[1:])[:, : group_size - extra_samples]
        return members.reshape(-1, *x.shape[1:])

    return jax.tree.map(keep, samples)


def every_group(stride: int, samples: Samples, group_size: int, axis_name: str | None) -> Samples:
    """Returns the rows of every n-th group over all devices, see `natural_updates.every`."""
    groups = jax.tree.map(lambda x: x.reshape(1, -1, group_size, *x.shape[1:]), samples)
    chosen, mask = natural_updates.every(stride, groups, axis_name)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), chosen._replace(mask=mask))


def require_group(reward: jax.Array) -> None:
    """Raises ConfigError if rewards `[P, G, T]` have G = 1."""
    if reward.shape[1] < 2:
        raise ConfigError("group_size", "must be at least 2: the group is the baseline")


def choose_surrogate(config: Clip, given: Surrogate | None = None) -> Surrogate:
    """Returns the user's surrogate, or the clipped surrogate with the config's bounds.

    Raises:
      ConfigError: a clip bound is set together with a user's surrogate.
    """
    if given is not None:
        for name in ("epsilon_low", "epsilon_high", "dual_clip", "dual_clip_ratio"):
            config_lib.require_unset(config, name, "the surrogate is the clipped one; leave it out")
        return given
    return surrogates.clipped(
        config.epsilon_low, config.upper, config.dual_clip_ratio if config.dual_clip else None
    )


def make(
    config: GradientSteps,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    group_advantage: GroupAdvantage,
    surrogate: Surrogate,
    aggregate: Aggregate,
    reward_fn: Callable[[Batch], jax.Array] = lambda batch: batch.reward,
    loss_mask_fn: Callable[[Batch], jax.Array] = lambda batch: batch.mask,
    extra_samples: int = 0,
    reward_kl: Divergence | None = None,
    loss_kl: Divergence | None = None,
    select: Callable[[Samples], jax.Array] | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds a learner that compares responses within groups.

    The loss is `aggregate(w · surrogate) + β · aggregate(loss_kl) − c_e · aggregate(entropy)`, on
    rewards `reward_fn(batch) − β · reward_kl`. A method passes one of `loss_kl` and `reward_kl`,
    not both. The weights w, from `correction` and `mask_off_policy`, do not change any denominator.

    Args:
      config: hyperparameters, inheriting the mix-ins of `group_config` that the method uses.
      problem: source of completions of prompts, or of episodes, in groups; no critic is trained.
      optimizer: any optax transformation with its own learning rate; None stands for Adam with
        gradients clipped by norm.
      group_advantage: advantages within groups, see `GroupAdvantage`; masked slots have reward 0.
      surrogate: surrogate objective, see `Surrogate`; `ppo.make` states the names that it may log.
      aggregate: average over tokens, see `Aggregate`.
      reward_fn: `(batch) -> rewards [B, T]`, for reward shaping.
      loss_mask_fn: `(batch) -> mask [B, T]`, returns True for the tokens in the loss.
      extra_samples: number of members of each group, the last ones, that enter the group's
        statistics but not the loss.
      reward_kl: estimate of KL(policy ‖ reference) for the penalty in the rewards, or None.
      loss_kl: estimate of KL(policy ‖ reference) for the penalty in the loss, or None.
      select: `(samples) -> penalized [B, T]` over the complete batch, for a surrogate that
        penalises some tokens; or None.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` that compares responses within groups. Metrics are `signal`, the share of tokens
      with a non-zero advantage (unless a teacher rewards each token); `extreme_ratio`, the share of
      tokens with a ratio outside [1/2, 2]; with a `correction` also `sampler_weight`, the weight's
      mean over tokens; with `mask_off_policy` also `off_policy`, the share of dropped tokens.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    problem = problem.with_target(target)
    actor_critic.require_on_policy(problem)
    # each ordered part of a batch consists of complete groups
    in_order = config.num_minibatches == 1 and not extra_samples
    problem = actor_critic.share_prefixes(problem, in_order)
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, optimizers.adam)
    corrections.require_mismatch(config, problem, config.num_epochs * config.num_minibatches)
    reference = reference_of(config)
    if reference is not None:
        config_lib.require_effect(
            reference, "reweight_kl", loss_kl is not None, "the penalty is in the loss"
        )
    estimate = make_estimate(config, group_advantage, reward_fn, loss_mask_fn, select)
    if reference is not None:
        estimate = reference_lib.with_reference_log_prob(
            estimate,
            problem,
            num_parts=config.num_parts,
            reward_kl=reward_kl,
            coefficient=reference.kl_coefficient,
        )

    def estimate_trained(state: TrainState, batch: Batch) -> Samples:
        return drop_extra_members(estimate(state, batch), batch.score.shape[1], extra_samples)

    return learner.make(
        problem,
        estimate=estimate_trained if extra_samples else estimate,
        improve=make_improve(
            config, problem, surrogates.checked(surrogate), aggregate, loss_kl, optimizer
        ),
        init_optimizer=lambda params: optimizer.init(params.policy),
        init_reference=lambda params: None if reference is None else params.policy,
        num_parts=config.num_parts,
        axis_name=config.axis_name,
    )


def reference_of(config: GradientSteps) -> Reference | None:
    """Returns the settings of the reference policy; None if the method does not use a reference."""
    return config if isinstance(config, Reference) and config.use_reference else None


def make_estimate(
    config: GradientSteps,
    group_advantage: GroupAdvantage,
    reward_fn: Callable[[Batch], jax.Array],
    loss_mask_fn: Callable[[Batch], jax.Array],
    select: Callable[[Samples], jax.Array] | None,
) -> learner.Estimate:
    """Builds `estimate`, with advantages within groups; `make` documents the arguments."""

    def estimate(state: TrainState, batch: Batch) -> Samples:
        del state
        step_end = batch.columns.get("step_end", batch.mask)
        grouped = [
            x.reshape(*batch.score.shape, -1) for x in (reward_fn(batch), batch.mask, step_end)
        ]
        relative = group_advantage(*grouped).reshape(batch.mask.shape)
        samples = Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=batch.log_prob,
            advantage=relative,
            mask=loss_mask_fn(batch),
            columns=batch.per_step_columns(),
        )
        # Stale rows come from an earlier policy, so they do not measure the KL of this update.
        measured = every_group(
            KL_STRIDE, samples._replace(mask=batch.fresh()), batch.score.shape[1], config.axis_name
        )
        if select is not None:
            columns = samples.columns | {"penalized": select(samples)}
            samples = samples._replace(columns=columns)
        return samples._replace(measured=measured)

    return estimate


def make_improve(
    config: GradientSteps,
    problem: Problem,
    surrogate: Checked,
    aggregate: Aggregate,
    loss_kl: Divergence | None,
    optimizer: optax.GradientTransformation,
) -> learner.Improve:
    """Builds `improve`, gradient steps and the KL after them; `make` documents the arguments."""
    loss = make_loss(config, problem, surrogate, aggregate, loss_kl)
    reference = reference_of(config)

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        of_budget = functools.partial(loss, steps=samples.mask.shape[1])
        trained_on = samples._replace(measured=None)
        parts = surrogates.parts(
            surrogate, trained_on, problem, state.params, config, config.num_minibatches
        )
        update = updates.gradient_update(
            actor_critic.wrt_policy(of_budget, state.params),
            optimizer,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
            slots=parts.slots if problem.fast_paths.grouped is None else None,
            by_length=parts.by_length,
            target=problem.target,
            axis_name=config.axis_name,
        )
        scale = optimizers.scale(config, state.step)
        new, opt_state, metrics = update(
            state.params.policy, state.opt_state, trained_on, key, scale
        )
        params = state.params._replace(policy=new)
        num_kl_parts = -(-config.num_parts // KL_STRIDE)
        kl = actor_critic.update_kl(problem, params, samples.measured, num_parts=num_kl_parts)
        metrics = masked.merge(metrics, kl)
        if "teacher_log_prob" not in samples.columns:  # with a teacher every token has a signal
            metrics["signal"] = masked.total(samples.advantage != 0.0, samples.mask)
        state = state._replace(params=params, opt_state=opt_state)
        if reference is not None and reference.reset_iterations:
            state = reset(state, optimizer, reference.reset_iterations)
        return state, metrics

    return improve


def make_loss(
    config: GradientSteps,
    problem: Problem,
    surrogate: Checked,
    aggregate: Aggregate,
    loss_kl: Divergence | None,
) -> Callable[..., tuple[tuple[Mean, ...], Metrics]]:
    """Builds `loss(params, samples, steps)` for rows cut from a budget of `steps` tokens."""
    policy, reference = actor_critic.make_policy(problem), reference_of(config)

    def loss(params: ActorCritic, samples: Samples, steps: int) -> tuple[tuple[Mean, ...], Metrics]:
        distribution = policy(params, samples)
        log_prob, entropy = log_prob_and_entropy(distribution, samples.action)
        elements, logged = surrogate(log_prob, samples, distribution)
        elements, corrected = corrections.apply_correction(config, elements, log_prob, samples)
        terms = {
            "policy_loss": (elements, 1.0),
            "entropy": (entropy, -config.entropy_coefficient),
        }
        if reference is not None and loss_kl is not None:
            kl = loss_kl(log_prob, samples.reference_log_prob)
            if reference.reweight_kl:
                kl *= ratio(log_prob, samples.log_prob)
            terms["reference_kl"] = (kl, reference.kl_coefficient)
        # Rows may have been cut, whereas an aggregate may divide by the full budget.
        beyond = ((0, 0), (0, steps - samples.mask.shape[1]))
        mask = jnp.pad(samples.mask, beyond)
        means = {name: aggregate(jnp.pad(x, beyond), mask) for name, (x, _) in terms.items()}
        extreme = jnp.abs(log_prob - samples.log_prob) > jnp.log(2.0)
        others = masked.merge(logged, corrected, {"extreme_ratio": extreme.astype(jnp.float32)})
        of_tokens = {name: losses.token_mean(x, samples.mask) for name, x in others.items()}
        metrics = masked.merge(means, of_tokens)
        return tuple(means[name] * weight for name, (_, weight) in terms.items()), metrics

    return loss


def reset(
    state: TrainState, optimizer: optax.GradientTransformation, iterations: int
) -> TrainState:
    """Makes the policy the reference and resets the optimizer after every n-th iteration."""
    policy = state.params.policy
    due = (state.step + 1) % iterations == 0
    reference_params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(due, new, old),
        (policy, optimizer.init(policy)),
        (state.reference_params, state.opt_state),
    )
    return state._replace(reference_params=reference_params, opt_state=opt_state)
