"""GRPO: the group is the baseline (Shao et al. 2024, arXiv:2402.03300, eq. 3 and 4).

G responses to one prompt are scored; each token's advantage is its response's `(R − mean) / std` in the group. The clipped
surrogate and `β · k3(π ‖ π_ref)` are averaged over the tokens of a response, then over responses.
"""

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import advantages, divergences, learner, losses, updates
from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import actor_critic
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, ConfigError, Interval, Number, number, static
from jaxrl_po.masked import Mean
from jaxrl_po.types import Batch, Learner, Metrics, Problem, PyTree, Samples, TrainState

CLIP = Interval(0.0, 1.0, True, True)


@config_lib.record
class Config:
    """Hyperparameters of GRPO; the defaults suit small models from a warm start."""

    learning_rate: Number = number(1e-3, "Adam's step size", within=POSITIVE)
    epsilon_low: Number = number(0.2, "the ratio is clipped from below at 1 − epsilon_low", within=CLIP)
    epsilon_high: Number = number(0.2, "the ratio is clipped from above at 1 + epsilon_high", within=CLIP)
    scale: str = static("std", "advantages are divided by the group's std, or not at all", choices=("std", "none"))
    ddof: int = static(0, "the std divides by G − ddof", choices=(0, 1))
    std_epsilon: Number = number(1e-6, "added to the std", unit="reward units", within=NON_NEGATIVE)
    use_reference: bool = static(True, "penalise the distance to the initial policy")
    kl_coefficient: Number = number(0.04, "β, weight of the k3 estimate of KL(policy ‖ reference)", within=NON_NEGATIVE)
    entropy_coefficient: Number = number(0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE)
    max_grad_norm: Number = number(1.0, "clip of the global gradient norm", within=POSITIVE)
    num_epochs: int = static(1, "passes over each batch", within=COUNT)
    num_minibatches: int = static(1, "gradient steps of one pass", within=COUNT)
    num_microbatches: int = static(1, "parts of a minibatch, accumulated to bound memory", within=COUNT)
    decay_iterations: int = static(
        0, "length of the linear decay of learning_rate to 0; 0 keeps it", unit="iterations", within=NON_NEGATIVE
    )
    axis_name: str | None = static(None, "device axis over which rows are sharded")

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        config_lib.check(self)
        config_lib.require(self, "ddof", self.scale == "std", "scale is std")
        config_lib.require(self, "std_epsilon", self.scale == "std", "scale is std")
        config_lib.require(self, "kl_coefficient", self.use_reference, "use_reference is on")


def make(config: Config, problem: Problem, optimizer: optax.GradientTransformation | None = None) -> Learner:
    """GRPO on any problem in groups: completions of one prompt, or episodes from one initial state.

    Args:
      config: see `Config`.
      problem: with group_size of at least 2; a critic, if there is one, is left as it is.
      optimizer: any optax transformation in place of Adam behind a gradient-norm clip; it brings its own step size.

    Returns:
      The learner.

    Raises:
      ConfigError: names the field that cannot work.
    """
    config.validate()
    optimizer = actor_critic.choose_optimizer(config, optimizer, updates.adam)
    policy = actor_critic.policy_of(problem)

    def estimate(state: TrainState, batch: Batch) -> Samples:
        if batch.score.shape[1] < 2:
            raise ConfigError("group_size must be at least 2: the group is the baseline")
        in_group = jax.vmap(
            lambda r: advantages.group_relative(r, scale=config.scale, ddof=config.ddof, epsilon=config.std_epsilon)
        )
        outcome = jnp.sum(batch.reward, axis=1).reshape(batch.score.shape)
        advantage = jnp.broadcast_to(in_group(outcome).reshape(-1, 1), batch.mask.shape)
        samples = Samples(batch.inputs, batch.action, batch.log_prob, advantage, (), (), (), batch.mask)
        if config.use_reference:
            reference = policy(state.reference_params, samples).log_prob(batch.action)
            samples = samples._replace(reference_log_prob=reference)
        return samples

    def loss(params: PyTree, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        distribution = policy(params, samples)
        now = distribution.log_prob(samples.action), samples.log_prob, samples.advantage
        elements = {
            "policy_loss": losses.clipped_surrogate(*now, epsilon_low=config.epsilon_low, epsilon_high=config.epsilon_high),
            "entropy": distribution.entropy(),
        }
        weights = {"policy_loss": 1.0, "entropy": -config.entropy_coefficient}
        if config.use_reference:
            elements["reference_kl"] = divergences.k3(now[0], samples.reference_log_prob)
            weights["reference_kl"] = config.kl_coefficient
        metrics = {name: losses.sequence_mean(x, samples.mask) for name, x in elements.items()}
        others = {
            "kl": divergences.k3(samples.log_prob, now[0]),
            "clip_fraction_low": losses.clip_fraction_low(*now, config.epsilon_low),
            "clip_fraction_high": losses.clip_fraction_high(*now, config.epsilon_high),
        }
        metrics |= {name: losses.token_mean(x, samples.mask) for name, x in others.items()}
        return tuple(metrics[name] * weight for name, weight in weights.items()), metrics

    update = updates.gradient_update(
        loss,
        optimizer,
        num_epochs=config.num_epochs,
        num_minibatches=config.num_minibatches,
        num_microbatches=config.num_microbatches,
        axis_name=config.axis_name,
    )

    def improve(state: TrainState, samples: Samples, key: jax.Array) -> tuple[TrainState, Metrics]:
        scale = updates.decay(state.step, config.decay_iterations)
        params, opt_state, metrics = update(state.params.policy, state.opt_state, samples, key, scale)
        return state._replace(params=state.params._replace(policy=params), opt_state=opt_state), metrics

    return learner.make(
        problem,
        estimate=estimate,
        improve=improve,
        init_optimizer=lambda params: optimizer.init(params.policy),
        init_reference=(lambda params: params.policy) if config.use_reference else (lambda params: ()),
        axis_name=config.axis_name,
    )
