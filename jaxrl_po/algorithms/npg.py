"""Implements the natural policy gradient with a normalised step (Kakade 2001.

Peters & Schaal 2008).

The step is `θ' = θ + √(2δ / (gᵀF⁻¹g)) · F⁻¹g`: the longest step for which the quadratic model of
KL(old ‖ new) is at most δ. Without TRPO's line search, neither the true KL nor an improvement is
guaranteed.
"""

from typing import Any

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import losses, minibatches, natural_updates, trust_region
from jaxrl_po.algorithms import actor_critic, critic_fit, surrogates
from jaxrl_po.algorithms.actor_critic import Advantage
from jaxrl_po.algorithms.critic_fit import CriticFit, Improved
from jaxrl_po.backend import Target
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Number,
    common,
    number,
    static,
)
from jaxrl_po.masked import Mean
from jaxrl_po.natural_updates import Search, Surrogate
from jaxrl_po.types import (
    Distribution,
    Learner,
    Problem,
    Samples,
    TrainState,
)


@config_lib.record
class Config(CriticFit):
    """Hyperparameters of the natural policy gradient."""

    max_kl: Number = common.number(
        0.01, "δ, bound on the quadratic model of KL(old ‖ new)", unit="nats", within=POSITIVE
    )
    damping: Number = number(
        0.1, "multiple of the identity added to the Fisher matrix", within=NON_NEGATIVE
    )
    cg_iterations: int = static(10, "most conjugate-gradient iterations", within=COUNT)
    cg_tolerance: Number = number(
        1e-5, "relative residual at which the conjugate gradient stops", within=NON_NEGATIVE
    )
    fisher_stride: int = static(1, "Fisher products use every n-th row of the batch", within=COUNT)


def policy_surrogate(distribution: Distribution, samples: Samples) -> Mean:
    """Computes `−mean(r · A)` over steps (TRPO eq. 14), at π_old with the policy gradient."""
    log_prob = distribution.log_prob(samples.action)
    return losses.token_mean(
        losses.surrogate(log_prob, samples.log_prob, samples.advantage), samples.mask
    )


def proposal_surrogate(distribution: Distribution, samples: Samples) -> Mean:
    """Computes `−mean(π / μ · A)` over steps, for actions sampled from a proposal μ."""
    proposed = samples.columns["sampler_log_prob"]
    return policy_surrogate(distribution, samples._replace(log_prob=proposed))


def checked_mean(surrogate: Surrogate) -> Surrogate:
    """Wraps the surrogate of a natural step, and checks that it returns a `Mean` of two numbers."""

    def call(distribution: Any, samples: Samples) -> Mean:
        result = surrogate(distribution, samples)
        if (
            isinstance(result, Mean)
            and surrogates.shape_of(result.total) == surrogates.shape_of(result.count) == ()
        ):
            return result
        raise ConfigError(
            "surrogate",
            "must return a Mean of two numbers, as losses.token_mean(elements, mask) does, got "
            f"{surrogates.form(result)}",
        )

    return call


def make(
    config: Config,
    problem: Problem,
    *,
    search: Search = trust_region.full_step,
    surrogate: Surrogate | None = None,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds the natural policy gradient for any problem with a separate critic, or without critic.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of samples, control or language.
      search: search along the natural step, which decides the step's length, see
        `trust_region.line_search`.
      surrogate: `surrogate(distribution, samples) -> Mean`, minimised; None stands for
        `policy_surrogate`, or for `proposal_surrogate` if the problem is not on-policy. Unlike the
        surrogate of `ppo.make`, this surrogate gets no log-probabilities and returns the mean.
      advantage: advantage estimator, see `ppo.make`.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of the natural policy gradient.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    plain = problem.with_target(target)
    if not plain.linearizable:
        raise ConfigError(
            "fused_attention", "must be left out with natural steps: it has no forward derivative"
        )
    problem = actor_critic.share_prefixes(plain, in_order=True)
    policy = actor_critic.make_policy(problem)
    if surrogate is None:
        surrogate = policy_surrogate if problem.on_policy else proposal_surrogate
    surrogate = checked_mean(surrogate)

    def improve_policy(state: TrainState, samples: Samples, key: jax.Array) -> Improved:
        del key
        params = state.params
        update = natural_updates.trust_region_update(
            surrogate,
            actor_critic.wrt_policy(policy, params),
            of_some=actor_critic.wrt_policy(actor_critic.make_policy(plain), params),
            max_kl=config.max_kl,
            damping=config.damping,
            iterations=config.cg_iterations,
            tolerance=config.cg_tolerance,
            fisher_stride=config.fisher_stride,
            num_microbatches=config.num_microbatches,
            search=search,
            axis_name=config.axis_name,
        )
        entropy = minibatches.sum_in_parts(
            lambda part: losses.token_mean(policy(params, part).entropy(), part.mask),
            samples,
            config.num_microbatches,
        )
        new, metrics = update(params.policy, samples)
        kl = actor_critic.update_kl(
            problem, params._replace(policy=new), samples, num_parts=config.num_microbatches
        )
        return new, state.opt_state.policy, {**metrics, **kl, "entropy": entropy}

    return critic_fit.make_with_fitted_critic(
        config,
        problem,
        estimate=actor_critic.make_estimate(
            config, problem, advantage, keep_proposal=not problem.on_policy
        ),
        improve_policy=improve_policy,
        plain=plain,  # the critic's minibatches are shuffled
        num_parts=config.num_microbatches,
    )
