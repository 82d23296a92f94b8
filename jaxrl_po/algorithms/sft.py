"""Supervised training on demonstrations.

The cross entropy of demonstrated actions, `−log π(a | s)`, as a mean over them: the policy gradient
of REINFORCE with demonstrations in place of samples, and an advantage of 1.
"""

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import learner, losses, optimizers, updates
from jaxrl_po.algorithms import actor_critic, group_config
from jaxrl_po.backend import Target
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


@config_lib.record
class Config(group_config.Steps):
    """Hyperparameters of supervised training."""


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Supervised training on a problem of demonstrations.

    Args:
      config: see `Config`.
      problem: of demonstrations, see `language.demonstrations.make_problem`.
      optimizer: any optax transformation with its own learning rate; None for Adam with gradients
        clipped by norm.
      target: what the program is compiled for; None for the problem's.

    Returns:
      The learner.

    Raises:
      ConfigError: names the invalid field.
    """
    config.validate()
    problem = problem.on(target)
    optimizer = optimizers.choose(config, problem, optimizer, optimizers.adam)
    policy = actor_critic.policy_of(problem)

    def estimate(state: TrainState, batch: Batch) -> Samples:
        del state
        return Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=batch.log_prob,
            advantage=jnp.ones(batch.mask.shape),
            mask=batch.mask,
        )

    def loss(params: ActorCritic, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        log_prob = policy(params, samples).log_prob(samples.action)
        elements = losses.policy_gradient(log_prob, samples.advantage)
        mean = losses.token_mean(elements, samples.mask)
        return (mean,), {"loss": mean}

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        update = updates.gradient_update(
            actor_critic.wrt_policy(loss, state.params),
            optimizer,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
            by_length=problem.speedups.by_length,
            target=problem.target,
            axis_name=config.axis_name,
        )
        scale = optimizers.scale(config, state.step)
        new, opt_state, metrics = update(
            state.params.policy, state.opt_state, problem.rows(samples), key, scale
        )
        params = state.params._replace(policy=new)
        return state._replace(params=params, opt_state=opt_state), metrics

    return learner.make(
        problem,
        estimate=estimate,
        improve=improve,
        init_optimizer=lambda params: optimizer.init(params.policy),
        axis_name=config.axis_name,
    )
