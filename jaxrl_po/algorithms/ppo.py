"""Implements PPO with a clipped ratio (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9).

The loss `−min(r A, clip(r, 1 − ε, 1 + ε) A) + c_v ½(v − G)² − c_e H(π)` with r = π / π_old is
minimised in epochs of shuffled minibatches. The module `ppo_penalty` has the form with a KL
penalty, and `reference.with_reference_kl` has PPO for language models, with a KL penalty in the
reward.

An iteration can be read in seven files: `ppo` itself, `types` (the data), `learner` (collect,
estimate, improve), `actor_critic` (advantages, the joint loss), `surrogates` and `losses` (the
equations) and `updates` (epochs of gradient steps). From the other modules it is enough to know
that a `Mean` is a total and a count that are divided last, that a `number` field can be vmapped,
that a `static` field is compiled in, and that `config.validate` refuses values out of range.
"""

import jax

from jaxrl_po import config as config_lib
from jaxrl_po import divergences, learner, losses, masked, optimizers
from jaxrl_po.algorithms import actor_critic, surrogates
from jaxrl_po.algorithms.actor_critic import Advantage, Epochs
from jaxrl_po.algorithms.surrogates import CLIP, Surrogate
from jaxrl_po.backend import Target
from jaxrl_po.config import POSITIVE, Number, common, number, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Learner, Metrics, Optimizer, Problem, Samples, TrainState


@config_lib.record
class Config(Epochs):
    """Hyperparameters of PPO; the defaults suit control tasks.

    Inherited fields are the discount, λ and the estimator of advantages (`Estimation`), the step
    size, its decay and the weights of the value loss and the entropy (`JointLoss`), and the epochs
    and minibatches (`Epochs`).
    """

    epsilon_low: Number = common.number(
        0.2, "the ratio is clipped from below at 1 − epsilon_low", within=CLIP
    )
    epsilon_high: Number = common.number(
        0.2, "the ratio is clipped from above at 1 + epsilon_high", within=CLIP
    )
    clip_value: bool = static(False, "clip the value's change by epsilon_high in the value loss")
    early_stop: bool = static(
        False, "skip the rest of an update once a minibatch's KL(old ‖ new) exceeds target_kl"
    )
    target_kl: Number = number(
        0.02,
        "largest KL before early stopping",
        unit="nats",
        within=POSITIVE,
        when=("early_stop", True),
    )


def make(
    config: Config,
    problem: Problem,
    optimizer: Optimizer = None,
    *,
    surrogate: Surrogate | None = None,
    advantage: Advantage | None = None,
    target: Target | None = None,
) -> Learner:
    """Builds the PPO learner for any problem with a critic.

    Args:
      config: hyperparameters, see `Config`.
      problem: source of samples, control or language.
      optimizer: any optax transformation with its own learning rate; None stands for Adam with
        gradients clipped by norm.
      surrogate: `(log_prob, samples) -> (elements to minimise, elements to log)`; None stands for
        `surrogates.clipped`. With a parameter named `distribution` the surrogate also gets the
        policy's distribution at the current parameters. A name in the log that the method or the
        problem logs too is a ConfigError. A surrogate that reads other rows of its minibatch needs
        num_microbatches = 1; see `surrogates.row_wise`.
      advantage: `trajectory -> (advantage [T], target [T])`, which replaces the config's advantage;
        gamma, lambda_, estimator, n_steps and discount_per then have no effect; see
        `actor_critic.Trajectory`.
      target: platform and devices of the compiled program; None stands for the problem's target.

    Returns:
      `Learner` of PPO.

    Raises:
      ConfigError: a field is invalid; the error names the field.
    """
    config.validate()
    problem = actor_critic.share_prefixes(problem.with_target(target), config.num_minibatches == 1)
    actor_critic.require_on_policy(problem)
    # the default is Adam, with the config's step size and clip of the gradient's norm
    optimizer = optimizers.choose_optimizer(config, problem, optimizer, optimizers.adam)
    if surrogate is None:
        surrogate = surrogates.clipped(config.epsilon_low, config.epsilon_high)
    else:
        unread = ("epsilon_low",) if config.clip_value else ("epsilon_low", "epsilon_high")
        for name in unread:
            config_lib.require_unset(config, name, "the surrogate is the clipped one; leave it out")
    checked = surrogates.checked(surrogate)

    def loss(params: ActorCritic, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        distribution, value = problem.apply(params, samples.inputs)
        log_prob = distribution.log_prob(samples.action)
        policy_loss, logged = checked(log_prob, samples, distribution)
        kl = divergences.k3(samples.log_prob, log_prob)  # the element is r − 1 − log r, nats
        if config.clip_value:
            value_loss = losses.clipped_value(
                value, samples.value, samples.target, epsilon=config.epsilon_high
            )
        else:
            value_loss = losses.squared_value(value, samples.target)
        return actor_critic.joint_loss(
            config,
            distribution,
            samples,
            policy_loss=policy_loss,
            value_loss=value_loss,
            logged=masked.merge({"approximate_kl": kl}, logged),
        )

    def exceeds_target(metrics: Metrics) -> jax.Array:
        return metrics["approximate_kl"].value() > config.target_kl

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        # Each step of an environment becomes a row, whereas a sequence remains one row.
        rows = problem.rows(samples)
        params, opt_state, metrics = actor_critic.gradient_steps(
            config,
            problem,
            loss,
            optimizer,
            state,
            rows,
            key,
            surrogate=checked,
            num_epochs=config.num_epochs,
            num_minibatches=config.num_minibatches,
            stop=exceeds_target if config.early_stop else None,
        )
        kl = actor_critic.update_kl(problem, params, rows, num_parts=config.num_parts)
        return state._replace(params=params, opt_state=opt_state), masked.merge(metrics, kl)

    return learner.make(
        problem,
        estimate=actor_critic.make_estimate(
            config, problem, advantage, keep_value=config.clip_value
        ),
        improve=improve,
        init_optimizer=optimizer.init,
        num_parts=config.num_parts,
        axis_name=config.axis_name,
    )
