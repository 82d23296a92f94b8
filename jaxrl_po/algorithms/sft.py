"""Trains on demonstrations, by supervised learning.

The loss is the cross entropy of demonstrated actions, see `language.cross_entropy.make_loss`; the
actions may come from language or control.
"""

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import learner, optimizers, updates
from jaxrl_po.algorithms import actor_critic, group_config
from jaxrl_po.backend import Target
from jaxrl_po.language import cross_entropy
from jaxrl_po.types import Learner, Metrics, Optimizer, Problem, Samples, TrainState


@config_lib.record
class Config(group_config.Steps):
    """Hyperparameters of supervised training."""


def make(
    config: Config, problem: Problem, optimizer: Optimizer = None, *, target: Target | None = None
) -> Learner:
    """Builds supervised training on a problem of demonstrations.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of demonstrations, see `language.demonstrations.make_problem`.
      optimizer: any optax transformation with its own learning rate; None stands for Adam with
        gradients clipped by norm.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of supervised training.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    problem = problem.with_target(target)
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, optimizers.adam)
    policy = actor_critic.make_policy(problem)
    loss = cross_entropy.make_loss(
        lambda params, samples: policy(params, samples).log_prob(samples.action)
    )

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        update = updates.gradient_update(
            actor_critic.wrt_policy(loss, state.params),
            optimizer,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            num_microbatches=config.num_microbatches,
            by_length=problem.fast_paths.by_length,
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
        estimate=lambda _, batch: cross_entropy.to_samples(batch),
        improve=improve,
        init_optimizer=lambda params: optimizer.init(params.policy),
        axis_name=config.axis_name,
    )
