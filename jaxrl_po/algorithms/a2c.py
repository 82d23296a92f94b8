"""A2C, the synchronous advantage actor-critic (Mnih et al. 2016, arXiv:1602.01783, algorithm S3).

A2C takes one gradient step per short rollout on `−log π(a|s) · (R⁽ⁿ⁾ − v(s)) + c_v ½(v(s) − R⁽ⁿ⁾)²
− c_e H(π)`, with n-step returns R⁽ⁿ⁾.
"""

import jax
import optax

from jaxrl_po import config as config_lib
from jaxrl_po import learner, losses, masked, optimizers
from jaxrl_po.algorithms import actor_critic, surrogates
from jaxrl_po.algorithms.actor_critic import ESTIMATORS, N_STEP, Advantage, JointLoss
from jaxrl_po.algorithms.surrogates import Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, Number, common, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Learner, Metrics, Optimizer, Problem, Samples, TrainState


@config_lib.record
class Config(JointLoss):
    """Hyperparameters of A2C."""

    estimator: str = static(N_STEP, "estimator of the advantage", choices=ESTIMATORS)
    normalize_advantage: bool = static(False, "whiten advantages over the whole batch")
    learning_rate: Number = common.number(7e-4, "step size", within=POSITIVE)
    entropy_coefficient: Number = common.number(
        0.01, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE
    )


def rmsprop(
    learning_rate: Number, *, max_grad_norm: Number, epsilon: Number
) -> optax.GradientTransformation:
    """Builds RMSProp with a decay of 0.99 and ε outside the square root; see `optimizers.adam`."""
    direction = optax.scale_by_rms(decay=0.99, eps=epsilon, eps_in_sqrt=False)
    return optimizers.chain_clipped(direction, learning_rate, max_grad_norm=max_grad_norm)


def make(
    config: Config,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    surrogate: Surrogate = surrogates.policy_gradient,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds the A2C learner for any problem with a critic.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of samples, control or language.
      optimizer: any optax transformation with its own learning rate; None stands for RMSProp with
        gradients clipped by norm.
      surrogate: surrogate objective, see `ppo.make`.
      advantage: advantage estimator, see `ppo.make`.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of A2C.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    problem, checked = problem.with_target(target), surrogates.checked(surrogate)
    actor_critic.require_on_policy(problem)
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, rmsprop)

    def loss(params: ActorCritic, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        distribution, value = problem.apply(params, samples.inputs)
        log_prob = distribution.log_prob(samples.action)
        policy_loss, logged = checked(log_prob, samples, distribution)
        return actor_critic.joint_loss(
            config,
            distribution,
            samples,
            policy_loss=policy_loss,
            value_loss=losses.squared_value(value, samples.target),
            logged=logged,
        )

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        rows = problem.rows(samples)
        params, opt_state, metrics = actor_critic.gradient_steps(
            config, problem, loss, optimizer, state, rows, key, surrogate=checked
        )
        kl = actor_critic.update_kl(problem, params, rows, num_parts=config.num_microbatches)
        return state._replace(params=params, opt_state=opt_state), masked.merge(metrics, kl)

    return learner.make(
        problem,
        estimate=actor_critic.make_estimate(config, problem, advantage),
        improve=improve,
        init_optimizer=optimizer.init,
        num_parts=config.num_microbatches,
        axis_name=config.axis_name,
    )
