"""Implements REINFORCE, the policy gradient with a baseline (Williams 1992; Sutton et al. 2000).

The gradient is `∇J ≈ mean(∇log π(a|s) · (G − b(s)))` over the steps of a batch; the critic is
fitted to the returns. As is usual, the factor γᵗ in the gradient of the discounted return is
omitted: all steps have equal weight.
"""

import jax

from jaxrl_po import advantages, losses, masked, optimizers, updates
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import actor_critic, critic_fit, surrogates
from jaxrl_po.algorithms.actor_critic import ESTIMATORS, MONTE_CARLO, Advantage
from jaxrl_po.algorithms.critic_fit import CriticFit, Improved
from jaxrl_po.algorithms.surrogates import Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, Number, common, static
from jaxrl_po.masked import Mean
from jaxrl_po.optimizers import Optimization
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

NONE, BATCH_MEAN, VALUE = BASELINES = ("none", "batch_mean", "value")


@config_lib.record
class Config(CriticFit, Optimization):
    """Hyperparameters of REINFORCE; optimizer and schedule apply to the policy."""

    estimator: str = static(
        MONTE_CARLO, "estimator of the return minus the baseline", choices=ESTIMATORS
    )
    baseline: str = static(VALUE, "baseline that is subtracted from the return", choices=BASELINES)
    learning_rate: Number = common.number(1e-2, "step size of the policy", within=POSITIVE)
    entropy_coefficient: Number = common.number(
        0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE
    )


def make(
    config: Config,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    surrogate: Surrogate = surrogates.policy_gradient,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds REINFORCE for any problem with a separate critic, or without critic.

    The critic is fitted for any baseline, because returns also bootstrap from the critic where a
    rollout ends.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of samples, control or language.
      optimizer: any optax transformation with its own learning rate, for the policy; None stands
        for the config's optimizer.
      surrogate: surrogate objective, see `ppo.make`.
      advantage: advantage estimator, see `ppo.make`; the estimator then includes its own baseline.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of REINFORCE.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    problem, checked = problem.with_target(target), surrogates.checked(surrogate)
    actor_critic.require_on_policy(problem)
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, optimizers.adam)
    policy = actor_critic.make_policy(problem)
    chosen = actor_critic.choose_advantage(config, problem, advantage)
    if advantage is not None:
        own = "the advantage is the method's own; leave it out"
        config_lib.require_unset(config, "baseline", own)

    def estimate(state: TrainState, batch: Batch) -> Samples:
        del state
        advantage, target = actor_critic.estimate(chosen, batch)
        if config.baseline != VALUE:
            advantage = target
        if config.baseline == BATCH_MEAN:
            advantage = advantage - masked.mean(target, batch.mask, axis_name=config.axis_name)
        if config.normalize_advantage and config.baseline == NONE:
            # The returns are only divided by their std: subtracting the mean would be a baseline.
            mean, std = masked.moments(advantage, batch.mask, axis_name=config.axis_name)
            advantage = advantage / (advantages.scale_of(mean, std) + 1e-8)
        elif config.normalize_advantage:
            advantage = advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)
        return Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=batch.log_prob,
            advantage=advantage,
            mask=batch.mask,
            target=target,
        )

    def loss(params: ActorCritic, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        distribution = policy(params, samples)
        elements, logged = checked(distribution.log_prob(samples.action), samples, distribution)
        logged = masked.merge({"policy_loss": elements, "entropy": distribution.entropy()}, logged)
        means = {name: losses.token_mean(x, samples.mask) for name, x in logged.items()}
        return (means["policy_loss"], means["entropy"] * -config.entropy_coefficient), means

    def improve_policy(state: TrainState, samples: Samples, key: jax.Array) -> Improved:
        params, scale = state.params, optimizers.scale(config, state.step)
        parts = surrogates.parts(checked, samples, problem, params, config)
        update = updates.gradient_update(
            actor_critic.wrt_policy(loss, params),
            optimizer,
            num_microbatches=config.num_microbatches,
            slots=parts.slots,
            by_length=parts.by_length,
            target=problem.target,
            axis_name=config.axis_name,
        )
        new, opt_state, metrics = update(params.policy, state.opt_state.policy, samples, key, scale)
        kl = actor_critic.update_kl(
            problem, params._replace(policy=new), samples, num_parts=config.num_microbatches
        )
        return new, opt_state, masked.merge(metrics, kl)

    return critic_fit.make_with_fitted_critic(
        config,
        problem,
        estimate=estimate,
        improve_policy=improve_policy,
        init_policy_optimizer=optimizer.init,
        num_parts=config.num_microbatches,
    )
