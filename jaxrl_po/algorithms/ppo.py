"""PPO with the clipped surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 7 and 9, algorithm 1)."""

import jax
import optax

from jaxrl_po import advantages, divergences, learner, losses, updates
from jaxrl_po import config as config_lib
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, UNIT, ConfigError, Interval, Number, number, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, Learner, Metrics, Problem, Samples, TrainState


@config_lib.record
class Config:
    """Hyperparameters of PPO; the defaults suit control."""

    learning_rate: Number = number(3e-4, "Adam's step size", within=POSITIVE)
    gamma: Number = number(0.99, "discount γ", within=UNIT)
    lambda_: Number = number(0.95, "λ of generalised advantage estimation", within=UNIT)
    epsilon_low: Number = number(
        0.2, "the ratio is clipped from below at 1 − epsilon_low", within=Interval(0.0, 1.0, True, True)
    )
    epsilon_high: Number = number(
        0.2, "the ratio is clipped from above at 1 + epsilon_high", within=Interval(0.0, 1.0, True, True)
    )
    value_coefficient: Number = number(0.5, "weight of ½(v − target)²", within=NON_NEGATIVE)
    entropy_coefficient: Number = number(0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE)
    max_grad_norm: Number = number(0.5, "clip of the global gradient norm", within=POSITIVE)
    target_kl: Number = number(0.02, "early stop once KL(old ‖ new) of a minibatch exceeds it", unit="nats", within=POSITIVE)
    num_epochs: int = static(10, "passes over each batch", within=COUNT)
    num_minibatches: int = static(16, "gradient steps of one pass", within=COUNT)
    num_microbatches: int = static(1, "parts of a minibatch, accumulated to bound memory", within=COUNT)
    normalize_advantage: bool = static(True, "whiten advantages over the whole batch")
    clip_value: bool = static(False, "clip the value's change by epsilon_high in the value loss")
    early_stop: bool = static(False, "leave out the rest of an update once target_kl is exceeded")
    decay_iterations: int = static(
        0, "length of the linear decay of learning_rate to 0; 0 keeps it", unit="iterations", within=NON_NEGATIVE
    )
    axis_name: str | None = static(None, "device axis over which rows are sharded")

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        config_lib.check(self)
        if not self.early_stop and config_lib.changed(self, "target_kl"):
            raise ConfigError("target_kl has no effect unless early_stop is on")


def make(config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None) -> Learner:
    """PPO on any problem with a critic.

    Args:
      config: see `Config`.
      problem: control or language.
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """
    config.validate()
    if optimizer is not None and (config_lib.changed(config, "learning_rate") or config_lib.changed(config, "max_grad_norm")):
        raise ConfigError("learning_rate and max_grad_norm have no effect beside an optimizer of your own; leave them out")
    if optimizer is None:
        optimizer = updates.adam(config.learning_rate, max_grad_norm=config.max_grad_norm)

    def estimate(state: TrainState, batch: Batch) -> Samples:
        gae = jax.vmap(lambda *stream: advantages.gae(*stream, gamma=config.gamma, lambda_=config.lambda_))
        advantage = gae(batch.reward, batch.value, batch.next_value, batch.terminated, batch.truncated)
        target = advantage + batch.value
        if config.normalize_advantage:
            advantage = advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)
        value = batch.value if config.clip_value else ()
        return Samples(batch.inputs, batch.action, batch.log_prob, advantage, target, value, (), batch.mask)

    def loss(params: ActorCritic, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        distribution, value = problem.apply(params, samples.inputs)
        log_prob, entropy = distribution.log_prob(samples.action), distribution.entropy()
        epsilons = {"epsilon_low": config.epsilon_low, "epsilon_high": config.epsilon_high}
        policy_loss = losses.clipped_surrogate(log_prob, samples.log_prob, samples.advantage, **epsilons)
        if config.clip_value:
            value_loss = losses.clipped_value(value, samples.value, samples.target, epsilon=config.epsilon_high)
        else:
            value_loss = losses.squared_value(value, samples.target)
        elements = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": divergences.k3(samples.log_prob, log_prob),
            "clip_fraction_low": losses.clip_fraction_low(log_prob, samples.log_prob, samples.advantage, config.epsilon_low),
            "clip_fraction_high": losses.clip_fraction_high(log_prob, samples.log_prob, samples.advantage, config.epsilon_high),
        }
        metrics = {name: losses.token_mean(x, samples.mask) for name, x in elements.items()}
        means = (
            metrics["policy_loss"],
            metrics["value_loss"] * config.value_coefficient,
            metrics["entropy"] * -config.entropy_coefficient,
        )
        return means, metrics

    update = updates.gradient_update(
        loss,
        optimizer,
        num_epochs=config.num_epochs,
        num_minibatches=config.num_minibatches,
        num_microbatches=config.num_microbatches,
        stop=(lambda metrics: metrics["kl"].value() > config.target_kl) if config.early_stop else None,
        axis_name=config.axis_name,
    )

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        scale = updates.decay(state.step, config.decay_iterations)
        params, opt_state, metrics = update(state.params, state.opt_state, problem.rows(samples), key, scale)
        return state._replace(params=params, opt_state=opt_state), metrics

    return learner.make(problem, estimate=estimate, improve=improve, init_optimizer=optimizer.init, axis_name=config.axis_name)
