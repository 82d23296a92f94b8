"""Control as a `Problem`: vectorised environments, an unroll, and the critic after it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_po import advantages, masked
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    UNIT,
    ConfigError,
    check,
    record,
    require_effect,
    static,
)
from jaxrl_po.control import networks, normalizer, unroll
from jaxrl_po.control.environment import Environment, adapt
from jaxrl_po.control.normalizer import Normalizer
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree, Samples

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}


@record
class NetworkSettings:
    """Sizes of actor and critic."""

    width: int = static(
        64, "width of each hidden layer of actor and critic", unit="units", within=COUNT
    )
    depth: int = static(2, "hidden layers of actor and critic", unit="layers", within=COUNT)
    activation: str = static("tanh", "activation of the hidden layers", choices=tuple(ACTIVATIONS))
    channels: int = static(
        16,
        "channels of the 3 × 3 convolution that reads image observations; 0 flattens them",
        within=NON_NEGATIVE,
    )
    initial_log_std: float = static(
        0.0, "initial log σ of a Gaussian policy (continuous actions only)", unit="nats"
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range."""
        check(self)


@record
class Settings(NetworkSettings):
    """Sizes and switches of a control problem, as a record for command lines and logs."""

    num_envs: int = static(64, "environments that run side by side, over all devices", within=COUNT)
    num_steps: int = static(
        128, "steps of each environment in one iteration", unit="steps", within=COUNT
    )
    shared_torso: bool = static(
        False,
        "actor and critic are heads on one body, which rules out a trust region on the policy",
    )
    normalize_observations: bool = static(
        False, "normalise observations by running mean and std, clip ±10"
    )
    scale_rewards: bool = static(
        False, "divide rewards by the running std of the rolling discounted return"
    )
    reward_discount: float = static(
        0.99, "γ of the rolling return that scales rewards", within=UNIT
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        require_effect(self, "reward_discount", self.scale_rewards, "scale_rewards is on")


# Entries of the collector's state, see `CollectorState`. Sharded: `EnvState` and, where rewards
# are scaled, the rolling discounted return `[B]`.
ENVIRONMENTS = "environments"
ROLLING_RETURN = "rolling_return"
# Replicated: `Normalizer` of raw observations, where they are normalised, and of the rolling
# discounted return, where rewards are scaled.
OBSERVATION_STATISTICS = "observation_statistics"
RETURN_STATISTICS = "return_statistics"


class Networks(NamedTuple):
    """Actor and critic as functions of their parameters.

    Attributes:
      init: `init(key, observation) -> ActorCritic`; consumes `key`.
      policy: `policy(params, inputs) -> distribution`.
      value: `value(params, inputs) -> values`; zeros where there is no critic.
    """

    init: Callable[[jax.Array, jax.Array], ActorCritic]
    policy: Callable[[ActorCritic, jax.Array], Distribution]
    value: Callable[[ActorCritic, jax.Array], jax.Array]


def build_networks(modules: Mapping[str, Any], observation_rank: int) -> Networks:
    """Flax modules as functions of `ActorCritic`.

    Args:
      modules: `policy` (observation `[E*, …]` to a distribution) and `critic` (to a value `[E*]`,
        or None), or `actor_critic` (to both), whose parameters are all in `params.policy`.
      observation_rank: axes of one observation.
    """
    if "actor_critic" in modules:
        shared = modules["actor_critic"]
        return Networks(
            init=lambda key, observation: ActorCritic(shared.init(key, observation)),
            policy=lambda params, inputs: require_distribution(
                shared.apply(params.policy, inputs)[0]
            ),
            value=lambda params, inputs: require_value(
                shared.apply(params.policy, inputs)[1], inputs, observation_rank
            ),
        )
    policy, critic = modules["policy"], modules["critic"]

    def init(key: jax.Array, observation: jax.Array) -> ActorCritic:
        policy_key, critic_key = jax.random.split(key)
        value = None if critic is None else critic.init(critic_key, observation)
        return ActorCritic(policy.init(policy_key, observation), value)

    def value(params: ActorCritic, inputs: jax.Array) -> jax.Array:
        if params.value is None:
            return jnp.zeros(inputs.shape[: inputs.ndim - observation_rank])
        return require_value(critic.apply(params.value, inputs), inputs, observation_rank)

    return Networks(
        init,
        lambda params, inputs: require_distribution(policy.apply(params.policy, inputs)),
        value,
    )


def require_distribution(output: Any) -> Distribution:
    """The output of a policy, which must be a distribution.

    Raises:
      ConfigError: it is something else, such as an array of logits.
    """
    if not all(hasattr(output, name) for name in ("log_prob", "entropy", "kl", "sample", "mode")):
        raise ConfigError(
            f"policy must return a distribution, got {type(output).__name__}: wrap logits as "
            "jaxrl_po.distributions.Categorical(logits), a mean and log σ as DiagonalGaussian"
        )
    return cast(Distribution, output)


def require_value(value: jax.Array, inputs: jax.Array, observation_rank: int) -> jax.Array:
    """The output of a critic, which must have one value for each observation.

    Raises:
      ConfigError: it has another shape, such as a last axis of one.
    """
    shape = inputs.shape[: inputs.ndim - observation_rank]
    if value.shape != shape:
        raise ConfigError(
            f"critic must return one value for each observation, shape {list(shape)}, got "
            f"{list(value.shape)}: drop a last axis of 1 by [..., 0]"
        )
    return value


def default_modules(
    environment: Environment, settings: NetworkSettings, *, shared_torso: bool = False
) -> dict[str, Any]:
    """MLPs for actor and critic (for images, after a convolution) and a head for the action space.

    Raises:
      ConfigError: for a setting that has no effect on this environment.
    """
    rank = len(environment.observation_shape)
    if rank != 3 and settings.channels != NetworkSettings.channels:
        raise ConfigError(
            "channels applies to image observations only; this environment's have one axis"
        )
    if environment.num_actions and settings.initial_log_std != NetworkSettings.initial_log_std:
        raise ConfigError(
            "initial_log_std applies to continuous actions only; this environment's "
            "actions are discrete"
        )

    def torso() -> networks.Torso:
        hidden, channels = (settings.width,) * settings.depth, settings.channels if rank == 3 else 0
        return networks.Torso(hidden, ACTIVATIONS[settings.activation], rank, channels)

    head: Any = networks.GaussianHead(environment.action_size, settings.initial_log_std)
    if environment.num_actions:
        head = networks.CategoricalHead(environment.num_actions)
    if shared_torso:
        return {"actor_critic": networks.SharedActorCritic(torso(), head)}
    return {"policy": networks.Policy(torso(), head), "critic": networks.Critic(torso())}


def choose_modules(
    environment: Environment, policy: Any, critic: Any, actor_critic: Any
) -> dict[str, Any]:
    """The given modules, with defaults in place of None."""
    if actor_critic is not None:
        if policy is not None or critic is not None:
            raise ConfigError(
                "actor_critic stands for both networks; give it alone, or policy and critic"
            )
        return {"actor_critic": actor_critic}
    given = {
        name: module
        for name, module in {"policy": policy, "critic": critic}.items()
        if module is not None
    }
    return default_modules(environment, NetworkSettings()) | given


def from_settings(env: Any, settings: Settings, *, axis_name: str | None = None) -> Problem:
    """`make_problem` with its arguments taken from a settings record."""
    settings.validate()
    return make_problem(
        env,
        num_envs=settings.num_envs,
        num_steps=settings.num_steps,
        **default_modules(adapt(env), settings, shared_torso=settings.shared_torso),
        normalize_observations=settings.normalize_observations,
        scale_rewards=settings.scale_rewards,
        reward_discount=settings.reward_discount,
        axis_name=axis_name,
    )


def make_problem(
    env: Any,
    *,
    num_envs: int = 64,
    num_steps: int = 128,
    env_params: Any = None,
    policy: Any = None,
    critic: Any = None,
    actor_critic: Any = None,
    normalize_observations: bool = False,
    scale_rewards: bool = False,
    reward_discount: float = 0.99,
    axis_name: str | None = None,
) -> Problem:
    """A control problem: `num_envs` environments whose episodes continue across iterations.

    Args:
      env: a gymnax ≥ 1.0 environment or one with the same interface.
      num_envs: B, environments over all devices.
      num_steps: T, steps of each environment in one iteration.
      env_params: parameters of the environment; None takes its defaults.
      policy: Flax module, observation `[E*, …]` to a distribution; None builds a 64 × 64 tanh
        perceptron for the action space.
      critic: Flax module, observation `[E*, …]` to a value `[E*]`; None builds a 64 × 64 tanh
        perceptron.
      actor_critic: Flax module, observation `[E*, …]` to `(distribution, value)`, in place of both,
        for a shared torso.
      normalize_observations: subtract the running mean and divide by the running std (clip ±10).
        The statistics are those before the iteration, so that every log-prob of a batch is of the
        same policy.
      scale_rewards: divide rewards by the running std of the rolling discounted return, this
        iteration's included, or by a tenth of its |mean| where that is more, see
        `advantages.scale_of`.
      reward_discount: γ of that rolling return, in [0, 1].
      axis_name: device axis over which environments are sharded, or None.

    Returns:
      The `Problem`. Its metrics `episode_return` (raw reward units) and `episode_length` (steps)
      are means over the episodes that ended in the iteration, with count 0 when none did.

    Raises:
      ConfigError: counts below 1, a discount outside [0, 1], spaces that the adapter refuses, or
        `actor_critic` together with `policy` or `critic`.

    Example:
      >>> import gymnax
      >>> problem = make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=3)
      >>> params, collector = problem.init(jax.random.key(0))
      >>> collector, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
      >>> batch.inputs.shape, batch.reward.shape
      ((2, 3, 4), (2, 3))
    """
    check(Settings(num_envs=num_envs, num_steps=num_steps, reward_discount=reward_discount))
    environment = adapt(env, env_params)
    observation_rank = len(environment.observation_shape)
    nets = build_networks(
        choose_modules(environment, policy, critic, actor_critic), observation_rank
    )

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        envs = unroll.start(environment, env_key, jnp.arange(num_envs, dtype=jnp.int32))
        sharded: dict[str, PyTree] = {ENVIRONMENTS: envs}
        replicated: dict[str, PyTree] = {}
        if normalize_observations:
            replicated[OBSERVATION_STATISTICS] = normalizer.empty(environment.observation_shape)
        if scale_rewards:
            sharded[ROLLING_RETURN] = jnp.zeros(num_envs)
            replicated[RETURN_STATISTICS] = normalizer.empty(())
        return nets.init(network_key, envs.observation[0]), CollectorState(sharded, replicated)

    def apply(params: ActorCritic, inputs: jax.Array) -> tuple[Distribution, jax.Array]:
        return nets.policy(params, inputs), nets.value(params, inputs)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        def act(observation: jax.Array) -> Distribution:
            return nets.policy(params, normalize(collector, observation))

        sharded, replicated = dict(collector.sharded), dict(collector.replicated)
        sharded[ENVIRONMENTS], trajectory = unroll.unroll(
            environment, act, collector.sharded[ENVIRONMENTS], key, num_steps=num_steps
        )
        transition = trajectory.transition
        ended = transition.terminated | transition.truncated
        inputs = normalize(collector, trajectory.observation)
        final_inputs = normalize(collector, transition.final_observation)

        reward = transition.reward
        if scale_rewards:
            sharded[ROLLING_RETURN], rolling = _rolling_return(
                sharded[ROLLING_RETURN], reward, ended, reward_discount
            )
            statistics = normalizer.merge(
                replicated[RETURN_STATISTICS], rolling, axis_name=axis_name
            )
            replicated[RETURN_STATISTICS] = statistics
            reward = reward / (advantages.scale_of(statistics.mean, statistics.std()) + 1e-8)
        if normalize_observations:
            replicated[OBSERVATION_STATISTICS] = normalizer.merge(
                replicated[OBSERVATION_STATISTICS], trajectory.observation, axis_name=axis_name
            )

        batch = Batch(
            inputs=inputs,
            action=trajectory.action,
            log_prob=trajectory.distribution.log_prob(trajectory.action),
            reward=reward,
            value=nets.value(params, inputs),
            next_value=nets.value(params, final_inputs),
            terminated=transition.terminated,
            truncated=transition.truncated,
            mask=jnp.ones(reward.shape, bool),
            score=transition.reward.sum(axis=1, keepdims=True),
            metrics={
                "episode_return": masked.total(trajectory.episode_return, ended),
                "episode_length": masked.total(trajectory.episode_length, ended),
            },
        )
        return CollectorState(sharded, replicated), batch

    return Problem(init, collect, apply, merge_time, truncated_is_overlong=False)


def normalize(collector: CollectorState, observation: jax.Array) -> jax.Array:
    """The input of the networks: the observation, normalised where the statistics are kept."""
    statistics = collector.replicated.get(OBSERVATION_STATISTICS)
    return (
        observation if statistics is None else cast(Normalizer, statistics).normalize(observation)
    )


def merge_time(samples: Samples) -> Samples:
    """Leaves `[B, T, …]` to `[B·T, …]`: a control policy does not mix steps."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def _rolling_return(
    discounted: jax.Array, reward: jax.Array, ended: jax.Array, gamma: float
) -> tuple[jax.Array, jax.Array]:
    """`R_t = γ R_{t−1} + r_t` `[B, T]`, from 0 after an episode's end, and the next carry `[B]`."""

    def step(carry: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        reward, ended = x
        rolling = gamma * carry + reward
        return jnp.where(ended, 0.0, rolling), rolling

    carry, rolling = jax.lax.scan(step, discounted, (reward.T, ended.T))
    return carry, rolling.T
