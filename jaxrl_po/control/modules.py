"""Builds the networks of a control problem: defaults for its spaces, or a user's Flax modules."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po.backend import Target
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    ConfigError,
    Interval,
    check,
    common,
    record,
    require_effect,
    require_unset,
    static,
)
from jaxrl_po.control import networks
from jaxrl_po.control.memory import MEMORIES, Memory, MemoryKind, kind_of
from jaxrl_po.control.spaces import Observation, Spaces, is_frame
from jaxrl_po.distributions import DiagonalGaussian, TanhGaussian
from jaxrl_po.types import PyTree
from jaxrl_po.variables import class_of

ACTIVATIONS = {"tanh": jnp.tanh, "relu": jax.nn.relu, "silu": jax.nn.silu}
INITIALIZATIONS = {"orthogonal": networks.orthogonal, "lecun_normal": networks.lecun_normal}
MANY_KINDS = 4  # a map is embedded if it has more than 4 times as many channels as its convolution
GAUSSIAN = (
    "initial_log_std",
    "state_dependent_std",
    "tanh_squash",
)  # names of the fields that a Gaussian policy uses
POLICY, CRITIC, BOTH = REMEMBERING = ("policy", "critic", "both")


@record
class NetworkSettings:
    """Sizes and kinds of actor and critic."""

    width: int = common.static(64, "width of each hidden layer", unit="units", within=COUNT)
    depth: int = common.static(2, "hidden layers", unit="layers", within=COUNT)
    critic_width: int = static(
        0,
        "width of the critic's hidden layers; 0 for the actor's width",
        unit="units",
        within=NON_NEGATIVE,
    )
    activation: str = static(
        "tanh", "activation of the hidden layers; silu is swish", choices=tuple(ACTIVATIONS)
    )
    layer_norm: bool = static(False, "normalise each hidden layer before its activation")
    initialization: str = static(
        "orthogonal",
        "orthogonal: a scale for each kind of layer, near 0 for the policy's last layer; "
        "lecun_normal: the same formula for all layers",
        choices=tuple(INITIALIZATIONS),
    )
    channels: int = static(
        16,
        "channels of the 3 × 3 convolution for small images; 0 flattens small images. "
        "Maps of many kinds of objects are first embedded in the same number of channels, "
        "cell by cell. Frames of 36 pixels and more have the three convolutions of Mnih "
        "et al. (2015)",
        within=NON_NEGATIVE,
    )
    shared_torso: bool = static(
        False,
        "share the hidden layers of actor and critic; excludes a trust region on the policy",
    )
    memory: str = common.static(
        "none",
        "memory over the episode, after the hidden layers: "
        + ", ".join(f"{name} for {kind.summary}" for name, kind in MEMORIES.items() if kind)
        + "; or an entry of your own as file.py:name",
        choices=MEMORIES,
    )
    recurrent_networks: str = static(
        BOTH, "networks with a memory", choices=REMEMBERING, was=("memory_of",)
    )
    memory_window: int = static(
        16, "past steps that a layer of the transformer reads", unit="steps", within=COUNT
    )
    memory_layers: int = static(2, "layers of the transformer", unit="layers", within=COUNT)
    memory_heads: int = static(
        4, "heads of the transformer's attention, which divide the width", within=COUNT
    )
    initial_log_std: float = static(
        0.0,
        "initial log σ of a Gaussian policy (continuous actions only)",
        unit="nats",
        within=Interval(-20.0, 20.0),
    )
    state_dependent_std: bool = static(
        False,
        "compute σ of a Gaussian policy from the state instead of one vector for all states",
        was=("std",),
        were=(("independent", False), ("dependent", True)),
    )
    tanh_squash: bool = static(
        False,
        "bound continuous actions by tanh instead of clipping them in the environment",
        was=("squash",),
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of range, or two fields that exclude each other."""
        check(self)
        kind = kind_of(self.memory)
        if self.shared_torso and kind:
            raise ConfigError("shared_torso", "must be off with memory: each network has its own")
        if self.shared_torso and self.critic_width:
            raise ConfigError("critic_width", "must be 0 with shared_torso: there is one body")
        every: dict[str, MemoryKind | None] = {**MEMORIES, self.memory: kind}
        kinds = {name: each for name, each in every.items() if each}
        require_effect(
            self, "recurrent_networks", kind is not None, f"memory is {' or '.join(kinds)}"
        )
        for size in {size: None for each in kinds.values() for size in each.sizes}:
            readers = [name for name, each in kinds.items() if size in each.sizes]
            condition = f"memory is {' or '.join(readers)}"
            require_effect(self, f"memory_{size}", self.memory in readers, condition)
        of_critic = "critic_width" if self.critic_width else "width"
        for role, name in ((POLICY, "width"), (CRITIC, of_critic)):
            for divisor in kind.divisors if kind and self.remembers(role) else ():
                width, parts = getattr(self, name), getattr(self, f"memory_{divisor}")
                if width % parts:
                    raise ConfigError(
                        f"memory_{divisor}", f"must divide {name} = {width}, got {parts}"
                    )

    def remembers(self, role: str) -> bool:
        """Returns True if the policy or the critic has a memory."""
        return kind_of(self.memory) is not None and self.recurrent_networks in (role, BOTH)


def default_modules(
    spaces: Spaces, settings: NetworkSettings, target: Target | None = None
) -> dict[str, Any]:
    """Builds MLPs for actor and critic (after convolutions for images) and the action space's head.

    The modules are compiled for `target`; None stands for `backend.here()`.

    Raises:
      ConfigError: a setting has no effect on the environment's spaces.
    """
    settings.validate()
    whole = spaces.observation
    seen, for_critic = (
        (whole.policy, whole.seen_by_critic()) if isinstance(whole, Observation) else (whole, whole)
    )
    small = [x for x in jax.tree.leaves((seen, for_critic)) if _is_image(x) and not is_frame(x)]
    if not small and settings.channels != NetworkSettings.channels:
        raise ConfigError(
            "channels",
            "applies to small images only; this environment's observations are "
            f"{jax.tree.map(lambda x: list(x.shape), seen)}",
        )
    if not spaces.action_size:
        for name in GAUSSIAN:
            if getattr(settings, name) != getattr(NetworkSettings, name):
                raise ConfigError(
                    name, "applies to continuous actions only; this environment's are discrete"
                )
    if settings.tanh_squash and not spaces.bounded:
        raise ConfigError("tanh_squash", "must be off where actions are unbounded")
    if settings.shared_torso and for_critic is not seen:
        raise ConfigError(
            "shared_torso", "must be off where the critic sees more (privileged_state)"
        )

    torso = _torso(seen, settings, settings.width, target)
    head = _head(spaces, settings, target)
    initialization = INITIALIZATIONS[settings.initialization]
    if settings.shared_torso:
        return {"actor_critic": networks.SharedActorCritic(torso, head, initialization)}
    width = settings.critic_width or settings.width
    of_critic = _torso(for_critic, settings, width, target)
    value_head = networks.ValueHead(initialization)
    given = {
        POLICY: networks.Policy(torso, head),
        CRITIC: networks.Critic(of_critic, initialization),
    }
    parts = {POLICY: (torso, head, settings.width), CRITIC: (of_critic, value_head, width)}
    kind = kind_of(settings.memory)
    if kind is None:
        return given
    made = initialization, target, _memory(kind, settings)
    return given | {
        role: networks.Recurrent(*parts[role], *made) for role in parts if settings.remembers(role)
    }


def _memory(kind: MemoryKind, settings: NetworkSettings) -> Callable[..., Memory]:
    sizes = {name: getattr(settings, f"memory_{name}") for name in kind.sizes}
    return functools.partial(kind.make, **sizes) if sizes else kind.make


def policy_module(
    spaces: Spaces,
    settings: NetworkSettings | None = None,
    policy: Any = None,
    *,
    target: Target | None = None,
) -> Any:
    """Returns the policy of a problem without critic.

    `policy`, or a module built from the settings.

    Raises:
      ConfigError: as in `default_modules`; also for a setting of the critic.
    """
    settings = _require_settings(settings)
    if policy is not None:
        _require_default(settings)
        return policy
    for name in ("shared_torso", "critic_width", "recurrent_networks"):
        require_unset(settings, name, "there is a critic; leave it out")
    return default_modules(spaces, settings, target)["policy"]


def choose_modules(
    spaces: Spaces,
    policy: Any,
    critic: Any,
    actor_critic: Any = None,
    settings: NetworkSettings | None = None,
    *,
    target: Target | None = None,
) -> dict[str, Any]:
    """Returns the user's modules; each module that is None is built from the settings.

    Raises:
      ConfigError: as in `default_modules`; also if another argument replaces a setting or a module.
    """
    settings = _require_settings(settings)
    if actor_critic is not None:
        if policy is not None or critic is not None:
            raise ConfigError("actor_critic", "must be given without policy and critic")
        _require_default(settings)
        return {"actor_critic": actor_critic}
    given = {
        name: module
        for name, module in {"policy": policy, "critic": critic}.items()
        if module is not None
    }
    if len(given) == 2:
        _require_default(settings)
        return given
    unread = {POLICY: GAUSSIAN, CRITIC: ("critic_width",)}
    for role in given:
        for name in (*unread[role], "shared_torso"):
            require_unset(settings, name, f"the {role} is made here, not given; leave it out")
        if settings.recurrent_networks == role:
            raise ConfigError(
                "recurrent_networks",
                f"must not be {role}, which is given and has a memory of its own",
            )
    return default_modules(spaces, settings, target) | given


def _require_settings(network: Any) -> NetworkSettings:
    """Returns the settings, or the default for None; raises ConfigError if given a module."""
    if network is not None and not isinstance(network, NetworkSettings):
        raise ConfigError(
            "network",
            f"must be a control.NetworkSettings, got {class_of(network)}: give a module as policy, "
            "critic or actor_critic",
        )
    return network or NetworkSettings()


def _require_default(settings: NetworkSettings) -> None:
    for field in dataclasses.fields(NetworkSettings):
        require_unset(settings, field.name, "the networks are made here, not given; leave it out")


def _head(spaces: Spaces, settings: NetworkSettings, target: Target | None) -> Any:
    initialization = INITIALIZATIONS[settings.initialization]
    if spaces.choices:
        return networks.MultiCategoricalHead(spaces.choices, initialization, target)
    if spaces.num_actions:
        return networks.CategoricalHead(spaces.num_actions, initialization, target)
    return networks.GaussianHead(
        spaces.action_size,
        settings.initial_log_std,
        settings.state_dependent_std,
        TanhGaussian if settings.tanh_squash else DiagonalGaussian,
        initialization,
        target,
    )


def _torso(seen: PyTree, settings: NetworkSettings, width: int, target: Target | None) -> Any:
    """Builds the layers before a head; the arrays of a structured observation are concatenated."""
    hidden = (width,) * settings.depth
    activation = ACTIVATIONS[settings.activation]
    initialization = INITIALIZATIONS[settings.initialization]

    def reader(x: jax.ShapeDtypeStruct, hidden: tuple[int, ...]) -> networks.Torso:
        convolutions: tuple[tuple[int, int, int], ...] = ()
        if is_frame(x):
            convolutions = networks.FRAMES
        elif _is_image(x) and settings.channels:
            convolutions = ((settings.channels, 3, 1),)
            if x.shape[-1] > MANY_KINDS * settings.channels:
                convolutions = ((settings.channels, 1, 1), *convolutions)
        rank = len(x.shape)
        return networks.Torso(
            hidden, activation, rank, convolutions, settings.layer_norm, initialization, target
        )

    leaves = jax.tree.leaves(seen)
    if len(leaves) == 1 and leaves[0] is seen:
        return reader(seen, hidden)
    joined = networks.Torso(hidden, activation, 1, (), settings.layer_norm, initialization, target)
    return networks.SideBySide(tuple(reader(x, ()) for x in leaves), joined)


def _is_image(x: jax.ShapeDtypeStruct) -> bool:
    """Returns whether an array has height, width and channels, and is large enough for a kernel."""
    return len(x.shape) == 3 and min(x.shape[:2]) >= 3
