"""Actor and critic as functions of their parameters: the default networks, or a user's modules."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError, check, record, static
from jaxrl_po.control import networks
from jaxrl_po.control.environment import Spaces
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import ActorCritic

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
        "channels of the 3 × 3 convolution that reads small images; 0 flattens them. Frames of 36 "
        "pixels and more are read by the three convolutions of Mnih et al. (2015)",
        within=NON_NEGATIVE,
    )
    initial_log_std: float = static(
        0.0, "initial log σ of a Gaussian policy (continuous actions only)", unit="nats"
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range."""
        check(self)

    def sizes(self) -> dict[str, Any]:
        """The fields that an extension of this record adds, by name: sizes of its problem."""
        networks_own = {field.name for field in dataclasses.fields(NetworkSettings)}
        return {name: value for name, value in vars(self).items() if name not in networks_own}


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
    spaces: Spaces, settings: NetworkSettings, *, shared_torso: bool = False
) -> dict[str, Any]:
    """MLPs for actor and critic (for images, after a convolution) and a head for the action space.

    Raises:
      ConfigError: for a setting that has no effect on this spaces.
    """
    shape = spaces.observation_shape
    rank = len(shape)
    frames = rank == 3 and min(shape[:2]) >= 36
    if (rank != 3 or frames) and settings.channels != NetworkSettings.channels:
        raise ConfigError(
            f"channels applies to small images only; this environment's observations are "
            f"{list(shape)}"
        )
    if spaces.num_actions and settings.initial_log_std != NetworkSettings.initial_log_std:
        raise ConfigError(
            "initial_log_std applies to continuous actions only; this environment's "
            "actions are discrete"
        )

    def torso() -> networks.Torso:
        hidden = (settings.width,) * settings.depth
        small = ((settings.channels, 3, 1),) if rank == 3 and settings.channels else ()
        convolutions = networks.FRAMES if frames else small
        return networks.Torso(hidden, ACTIVATIONS[settings.activation], rank, convolutions)

    head: Any = networks.GaussianHead(spaces.action_size, settings.initial_log_std)
    if spaces.num_actions:
        head = networks.CategoricalHead(spaces.num_actions)
    if shared_torso:
        return {"actor_critic": networks.SharedActorCritic(torso(), head)}
    return {"policy": networks.Policy(torso(), head), "critic": networks.Critic(torso())}


def choose_modules(spaces: Spaces, policy: Any, critic: Any, actor_critic: Any) -> dict[str, Any]:
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
    return default_modules(spaces, NetworkSettings()) | given
