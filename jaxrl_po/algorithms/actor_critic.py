"""What methods with a critic share: advantage estimation, the joint loss, a separate critic fit."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import (
    advantages,
    divergences,
    learner,
    lengths,
    losses,
    masked,
    minibatches,
    optimizers,
    updates,
)
from jaxrl_po import config as config_lib
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, UNIT, ConfigError, Number, number, static
from jaxrl_po.distributions import Distribution, ratio
from jaxrl_po.masked import Mean
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    Metrics,
    Problem,
    PyTree,
    Samples,
    Shorten,
    TrainState,
)

MONTE_CARLO, N_STEP, GAE = ESTIMATORS = ("monte_carlo", "n_step", "gae")

STEP, TURN = PERIODS = ("step", "turn")

Policy = Callable[[ActorCritic, Any], Distribution]


@config_lib.record
class Estimation:
    """Advantage estimation: fields of every method with a critic."""

    gamma: Number = number(0.99, "discount γ", within=UNIT)
    lambda_: Number = number(0.95, "λ of generalised advantage estimation", within=UNIT)
    estimator: str = static(GAE, "estimator of the advantage", choices=ESTIMATORS)
    discount_per: str = static(
        STEP,
        "gamma and lambda_ apply at each step (of a transformer: token), or only where a turn of a "
        "dialogue ends",
        choices=PERIODS,
    )
    n: int = static(5, "length of n-step returns; A3C(k) is n = k + 1", unit="steps", within=COUNT)
    normalize_advantage: bool = static(True, "whiten advantages over the whole batch")
    axis_name: str | None = static(None, "device axis over which rows are sharded")

    def validate(self) -> None:
        """Raises ConfigError for a field out of range or without effect."""
        config_lib.check(self)
        config_lib.require_effect(
            self,
            "lambda_",
            self.estimator == GAE,
            f"estimator is {GAE}, got estimator={self.estimator}",
        )
        config_lib.require_effect(
            self,
            "n",
            self.estimator == N_STEP,
            f"estimator is {N_STEP}, got estimator={self.estimator}",
        )


@config_lib.record
class JointLoss(Estimation):
    """One loss for actor and critic: fields of A2C and PPO."""

    learning_rate: Number = number(3e-4, "step size", within=POSITIVE)
    value_coefficient: Number = number(0.5, "weight of ½(v − target)²", within=NON_NEGATIVE)
    entropy_coefficient: Number = number(
        0.0, "weight of the entropy bonus", unit="per nat", within=NON_NEGATIVE
    )
    max_grad_norm: Number = number(0.5, "clip of the global gradient norm", within=POSITIVE)
    optimizer_epsilon: Number = number(
        1e-5, "ε of the optimizer, outside the square root", within=POSITIVE
    )
    num_microbatches: int = static(
        1, "parts of a minibatch, accumulated to bound memory", within=COUNT
    )
    decay_iterations: int = static(
        0,
        "length of the linear decay of learning_rate to 0; 0 keeps it",
        unit="iterations",
        within=NON_NEGATIVE,
    )

    @property
    def num_parts(self) -> int:
        """Parts in which a batch is read, so that memory is that of one microbatch."""
        return self.num_microbatches


@config_lib.record
class Epochs(JointLoss):
    """Epochs of minibatches on each batch: fields of both forms of PPO."""

    num_epochs: int = static(10, "passes over each batch", within=COUNT)
    num_minibatches: int = static(16, "gradient steps of one pass", within=COUNT)

    @property
    def num_parts(self) -> int:
        """Number of microbatches in a whole batch."""
        return self.num_minibatches * self.num_microbatches


def estimate(config: Estimation, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Advantages, not whitened, and the critic's targets: both `[B, T]`, reward units.

    Raises:
      ConfigError: n-step returns longer than the rollout.
    """
    ends = batch.terminated, batch.truncated
    turn_end = batch.step_end if config.discount_per == TURN else None

    def factor(number: Number, turn_end: jax.Array | None) -> Any:
        """γ or λ of each step."""
        return number if turn_end is None else jnp.where(turn_end, number, 1.0)

    if config.estimator == GAE:
        gae = jax.vmap(
            lambda end, *stream: advantages.gae(
                *stream, gamma=factor(config.gamma, end), lambda_=factor(config.lambda_, end)
            )
        )
        advantage = gae(turn_end, batch.reward, batch.value, batch.next_value, *ends)
        return advantage, advantage + batch.value
    if config.estimator == N_STEP:
        if config.n > batch.reward.shape[1]:
            raise ConfigError(
                f"n must be at most {batch.reward.shape[1]}, the steps of one rollout "
                f"(num_steps), got {config.n}"
            )
        returns = jax.vmap(
            lambda end, *stream: advantages.n_step_returns(
                *stream, gamma=factor(config.gamma, end), n=config.n
            )
        )
    else:
        returns = jax.vmap(
            lambda end, *stream: advantages.discounted_returns(
                *stream, gamma=factor(config.gamma, end)
            )
        )
    target = returns(turn_end, batch.reward, batch.next_value, *ends)
    return target - batch.value, target


def make_estimate(
    config: Estimation, problem: Problem, *, keep_value: bool = False, keep_proposal: bool = False
) -> learner.Estimate:
    """`estimate(state, batch) -> samples` with targets and, if so configured, whitened advantages.

    Args:
      config: see `Estimation`.
      problem: with turns, if discounts are per turn.
      keep_value: keep the critic's values from collection, for a clipped value loss.
      keep_proposal: keep log μ of the actions, for a surrogate weighted by π / μ.

    Raises:
      ConfigError: discounts per turn where there are no turns.
    """
    if config.discount_per == TURN:
        require_turns(problem, "discount_per", STEP)

    def from_batch(state: TrainState, batch: Batch) -> Samples:
        del state
        advantage, target = estimate(config, batch)
        if config.normalize_advantage:  # mean 0 and std 1 over the unmasked slots of all devices
            advantage = advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)
        value = batch.value if keep_value else None
        proposal = batch.sampler_log_prob if keep_proposal else None
        if keep_proposal and proposal is None:
            raise ConfigError(
                "sampler_log_prob must be given by a problem that is not on-policy: it is "
                "log μ of the actions"
            )
        return Samples(
            inputs=batch.inputs,
            action=batch.action,
            log_prob=batch.log_prob,
            advantage=advantage,
            mask=batch.mask,
            target=target,
            value=value,
            sampler_log_prob=proposal,
        )

    return from_batch


def policy_of(problem: Problem) -> Policy:
    """`policy(params, samples) -> distribution`; the critic is not evaluated."""
    return lambda params, samples: problem.apply(params._replace(value=None), samples.inputs)[0]


def wrt_policy(function: Callable[..., Any], params: ActorCritic) -> Callable[..., Any]:
    """`function` as a function of the policy's parameters, the others taken from `params`."""
    return lambda policy, *others: function(params._replace(policy=policy), *others)


def gradient_steps(
    config: "JointLoss",
    loss: updates.Loss,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    samples: Any,
    key: jax.Array,
    *,
    slots: int | None,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    shorten: Shorten | None = None,
    stop: updates.Stop | None = None,
) -> tuple[ActorCritic, PyTree, Metrics]:
    """Epochs of minibatch steps on a loss of policy and critic; frozen parameters get no gradient.

    Args:
      config: see `JointLoss`.
      loss: `loss(params, samples) -> (means, metrics)` of the whole `ActorCritic`.
      optimizer: any optax transformation.
      state: before the update.
      samples: leaves lead with the rows.
      key: consumed by the shuffles.
      slots: see `updates.gradient_update`, as for `num_epochs`, `num_minibatches`, `shorten` and
        `stop`.

    Returns:
      Parameters, optimizer state and metrics, see `updates.gradient_update`.
    """
    frozen = state.params.frozen
    update = updates.gradient_update(
        lambda params, samples: loss(params._replace(frozen=frozen), samples),
        optimizer,
        num_epochs=num_epochs,
        num_minibatches=num_minibatches,
        num_microbatches=config.num_microbatches,
        slots=slots,
        shorten=shorten,
        stop=stop,
        axis_name=config.axis_name,
    )
    scale = optimizers.decay(state.step, config.decay_iterations)  # from 1 to 0, or always 1
    params, opt_state, metrics = update(
        state.params.trained(), state.opt_state, samples, key, scale
    )
    return params._replace(frozen=frozen), opt_state, metrics


def joint_loss(
    config: JointLoss,
    distribution: Distribution,
    samples: Samples,
    *,
    policy_loss: jax.Array,
    value_loss: jax.Array,
    **others: jax.Array,
) -> tuple[tuple[Mean, ...], Metrics]:
    """`policy_loss + c_v · value_loss − c_e · entropy`, each a mean over steps.

    Mnih et al. 2016 (A3C), section 4; Schulman et al. 2017 (PPO), eq. 9.
    The two losses and `others` are per element; `others` are logged only.
    """
    elements = {
        "policy_loss": policy_loss,
        "value_loss": value_loss,
        "entropy": distribution.entropy(),
        **others,
    }
    means = {name: losses.token_mean(x, samples.mask) for name, x in elements.items()}
    terms = {
        "policy_loss": 1.0,
        "value_loss": config.value_coefficient,
        "entropy": -config.entropy_coefficient,
    }
    return tuple(means[name] * coefficient for name, coefficient in terms.items()), means


def choose_optimizer(
    config: Any,
    given: optax.GradientTransformation | None,
    default: Callable[..., optax.GradientTransformation],
) -> optax.GradientTransformation:
    """The given optimizer, or the default with the config's step size, gradient-norm clip and ε.

    Raises:
      ConfigError: one of these is set together with an optimizer.
    """
    if given is None:
        return default(
            config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            epsilon=config.optimizer_epsilon,
        )
    for name in ("learning_rate", "max_grad_norm", "optimizer_epsilon"):
        config_lib.require_unset(config, name, "the optimizer is the method's own; leave it out")
    return given


def require_turns(problem: Problem, field: str, otherwise: str) -> None:
    """Raises ConfigError about a field with the value `turn` if the problem has no turns."""
    if not problem.turns:
        raise ConfigError(
            f"{field} must be {otherwise} here, got {TURN}: only dialogues have turns"
        )


def require_on_policy(problem: Problem) -> None:
    """Raises ConfigError if a proposal samples the actions; for losses without a weight π / μ."""
    if not problem.on_policy:
        raise ConfigError(
            "sampling must be from the policy itself for this method. Here a proposal "
            "draws the actions (a vine with num_branches = 0 tries each once), and only "
            "npg and trpo weigh them by π / μ: take one of these, or set num_branches to "
            "at least 2"
        )


def update_kl(
    problem: Problem,
    params: ActorCritic,
    samples: Samples,
    *,
    num_parts: int = 1,
    in_order: bool = False,
) -> Metrics:
    """Metric `kl` of an update: the k3 estimate of KL(old ‖ new), in nats, on the old samples.

    Args:
      problem: gives the policy.
      params: after the update.
      samples: rows; those of a sampler μ that is not the old policy are weighted by π_old / μ.
      num_parts: smallest number of parts to process one after another, to bound memory. Several
        parts are sorted by length.
      in_order: see `updates.gradient_update`.
    """
    policy = policy_of(problem)
    rows = samples.mask.shape[0]
    num_parts = next(n for n in range(num_parts, rows + 1) if rows % n == 0)

    def total(part: Samples) -> Mean:
        kl = divergences.k3(part.log_prob, policy(params, part).log_prob(part.action))
        if part.sampler_log_prob is not None:
            # An action that the policy cannot take, which a vine may try, counts 0 · log 0 = 0.
            weighted = ratio(part.log_prob, part.sampler_log_prob) * kl
            kl = jnp.where(part.log_prob == -jnp.inf, 0.0, weighted)
        return masked.total(kl, part.mask)

    # The parts one after another, their totals and counts added up.
    shorten = problem.shorten if num_parts > 1 else None
    if shorten is not None and not in_order:
        samples = lengths.sort(samples)
    parts = minibatches.split(samples, num_parts)
    return {"kl": minibatches.summed(lengths.cut(total, shorten), parts)}
