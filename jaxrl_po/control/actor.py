"""Actor and critic as functions of their parameters, with memory or without."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import distributions
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.control.networks import Recurrent
from jaxrl_po.control.spaces import Observation, Spaces
from jaxrl_po.control.statistics import normalize
from jaxrl_po.distributions import Categorical, MultiCategorical, TanhGaussian
from jaxrl_po.types import (
    ActorCritic,
    CollectorState,
    Distribution,
    Facts,
    Problem,
    PyTree,
    Samples,
)


class Networks(NamedTuple):
    """Actor and critic as functions of their parameters.

    A memory is an array `[B, H]`, zero at the start of an episode; () for networks without one.

    Attributes:
      init: `init(key, observation) -> ActorCritic` from one observation; consumes `key`.
      start: `start(B) -> (memory, critic_memory)`.
      act: `act(params, memory, observation) -> (memory, distribution)`: one step of B rows.
      values: `values(params, steps, final_observation) -> (critic_memory, value, next_value)`, the
        memory after T steps of B rows and two values `[B, T]`; zeros without a critic. With None
        for `final_observation` the observations of `steps` are `[B, T + 1, …]`, each the true next
        one of that before it.
      inputs: `inputs(steps)`: what `apply` reads, see `Sequences`.
      apply: `apply(params, inputs) -> (distribution, value)`, as `Problem.apply`.
    """

    init: Callable[[jax.Array, PyTree], ActorCritic]
    start: Callable[[int], tuple[PyTree, PyTree]]
    act: Callable[[ActorCritic, PyTree, PyTree], tuple[PyTree, Distribution]]
    values: Callable[[ActorCritic, "Sequences", PyTree | None], tuple[PyTree, jax.Array, jax.Array]]
    inputs: Callable[["Sequences"], PyTree]
    apply: Callable[[ActorCritic, PyTree], tuple[Distribution, jax.Array]]


class Sequences(NamedTuple):
    """T steps of B rows. Networks with memory read all of it, others the observations alone.

    Attributes:
      observation: leaves `[B, T, …]`.
      begins: `[B, T]`, bool, whether an episode begins with the step: the memories before it are 0.
      memory: `[B, H]`, the actor's before the first step; () without one.
      critic_memory: `[B, H]`, the critic's; () without one.
    """

    observation: PyTree
    begins: jax.Array
    memory: PyTree
    critic_memory: PyTree


class Actor(NamedTuple):
    """How the policy of a problem acts, one step after another.

    Attributes:
      start: `start(B) -> memory` at an episode's start.
      act: `act(params, collector, memory, observation) -> (memory, distribution)` of B raw
        observations, normalised as in training.
    """

    start: Callable[[int], PyTree]
    act: Callable[[ActorCritic, CollectorState, PyTree, PyTree], tuple[PyTree, Distribution]]


def actor_of(problem: Problem) -> Actor:
    """The problem's actor; without one, `apply` is the policy, which has no memory."""
    if problem.actor is not None:
        return cast(Actor, problem.actor)

    def act(
        params: ActorCritic, collector: CollectorState, memory: PyTree, observation: PyTree
    ) -> tuple[PyTree, Distribution]:
        inputs = normalize(collector, observation)
        return memory, problem.apply(params._replace(value=None), inputs)[0]

    return Actor(lambda rows: (), act)


def problem_of(
    nets: Networks,
    init: Callable[..., Any],
    collect: Callable[..., Any],
    target: Target,
    *,
    on_policy: bool = True,
) -> Problem:
    """The control problem of these networks, with its `rows` and, with memory, its `actor`."""
    remembers = has_memory(nets)
    return Problem(
        init,
        collect,
        nets.apply,
        rows=whole_sequences if remembers else merge_time,
        facts=Facts(on_policy=on_policy, truncated_is_overlong=False),
        actor=(
            Actor(lambda rows: nets.start(rows)[0], functools.partial(act_normalized, nets))
            if remembers
            else None
        ),
        target=target,
    )


def act_normalized(
    nets: Networks,
    params: ActorCritic,
    collector: CollectorState,
    memory: PyTree,
    observation: PyTree,
) -> tuple[PyTree, Distribution]:
    """`Networks.act` on raw observations, normalised by the statistics in the collector."""
    return nets.act(params, memory, normalize(collector, observation))


def has_memory(nets: Networks) -> bool:
    """Whether the networks read whole sequences."""
    return bool(jax.tree.leaves(nets.start(1)))


def whole_sequences(samples: Samples) -> Samples:
    """The rows as they are: a policy with memory reads whole sequences."""
    return samples


def merge_time(samples: Samples) -> Samples:
    """Leaves `[B, T, …]` to `[B·T, …]`: a policy without memory does not mix steps."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def play(distribution: Distribution, action: jax.Array) -> jax.Array:
    """A stored action in the units that `Spaces.to_action` takes: tanh(u) for a `TanhGaussian`."""
    return jnp.tanh(action) if isinstance(distribution, TanhGaussian) else action


def build_networks(modules: Mapping[str, Any], spaces: Spaces) -> Networks:
    """Flax modules as functions of `ActorCritic`.

    Args:
      modules: `policy` (observation `[E*, …]` to a distribution) and `critic` (to a value `[E*]`,
        or None), or `actor_critic` (to both), whose parameters are all in `params.policy`. Policy
        and critic may both be `networks.Recurrent`.
      spaces: of the environment. Of an `Observation`, each network reads its own part, and the
        illegal actions are excluded from what the policy returns.

    Raises:
      ConfigError: one of policy and critic has memory, the other has none.
    """
    remembers = [isinstance(module, Recurrent) for module in modules.values() if module is not None]
    if not any(remembers):
        return _memoryless(modules, spaces)
    if not all(remembers) or "policy" not in modules:
        raise ConfigError("policy and critic must both be networks.Recurrent, or neither")
    return _recurrent(modules["policy"], modules["critic"], spaces)


def require_fit(nets: Networks, spaces: Spaces) -> None:
    """Traces the networks on two observations.

    Raises:
      ConfigError: what the policy draws is no action of the environment, or the networks do not
        return what they should.
    """

    def draw(key: jax.Array) -> tuple[jax.Array, Distribution, jax.Array]:
        one = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spaces.observation)
        params = nets.init(key, one)
        two = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), spaces.observation)
        memory, critic_memory = nets.start(2)
        _, distribution = nets.act(params, memory, two)
        row = jax.tree.map(lambda x: x[:, None], two)
        inputs = nets.inputs(Sequences(row, jnp.zeros((2, 1), bool), memory, critic_memory))
        return distribution.sample(key), distribution, nets.apply(params, inputs)[1]

    drawn, distribution, _ = jax.eval_shape(draw, jax.random.key(0))
    action = spaces.action
    fits = drawn.shape == (2, *action.shape)
    fits &= jnp.issubdtype(drawn.dtype, jnp.integer) == jnp.issubdtype(action.dtype, jnp.integer)
    wanted = (
        f"{action.shape[0]} continuous components"
        if spaces.action_size
        else f"one of {spaces.num_actions or ' and one of '.join(map(str, spaces.choices))} options"
    )
    got = f"a {type(distribution).__name__} of actions {list(drawn.shape[1:])}"
    if isinstance(distribution, Categorical):
        fits &= distribution.logits.shape[-1] == spaces.num_actions
        got = f"a Categorical over {distribution.logits.shape[-1]} options"
    if isinstance(distribution, MultiCategorical):
        fits &= distribution.sizes == spaces.choices
        got = f"a MultiCategorical over {' and '.join(map(str, distribution.sizes))} options"
    if not fits:
        raise ConfigError(f"policy must draw {wanted}, as the environment takes them, got {got}")


def _memoryless(modules: Mapping[str, Any], spaces: Spaces) -> Networks:
    shared = modules.get("actor_critic")
    actor: Any = modules.get("policy")
    critic: Any = modules.get("critic")

    def init(key: jax.Array, observation: PyTree) -> ActorCritic:
        seen, judged = _parts(observation)
        if shared is not None:
            return ActorCritic(shared.init(key, seen))
        policy_key, critic_key = jax.random.split(key)
        value = None if critic is None else critic.init(critic_key, judged)
        return ActorCritic(actor.init(policy_key, seen), value)

    def policy(params: ActorCritic, inputs: PyTree) -> Distribution:
        seen, _ = _parts(inputs)
        if shared is not None:
            return _legal(shared.apply(params.policy, seen)[0], inputs)
        return _legal(actor.apply(params.policy, seen), inputs)

    def value(params: ActorCritic, inputs: PyTree) -> jax.Array:
        seen, judged = _parts(inputs)
        shape = _batch_shape(inputs, spaces)
        if shared is not None:
            return require_value(shared.apply(params.policy, seen)[1], shape)
        if params.value is None:
            return jnp.zeros(shape)
        return require_value(critic.apply(params.value, judged), shape)

    def values(
        params: ActorCritic, steps: Sequences, final_observation: PyTree | None
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        of_steps = value(params, steps.observation)
        if final_observation is None:
            return (), of_steps[:, :-1], of_steps[:, 1:]
        return (), of_steps, value(params, final_observation)

    return Networks(
        init,
        start=lambda rows: ((), ()),
        act=lambda params, memory, observation: (memory, policy(params, observation)),
        values=values,
        inputs=lambda steps: steps.observation,
        apply=lambda params, inputs: (policy(params, inputs), value(params, inputs)),
    )


def _recurrent(actor: Recurrent, critic: Recurrent | None, spaces: Spaces) -> Networks:
    def init(key: jax.Array, observation: PyTree) -> ActorCritic:
        row = jax.tree.map(lambda x: x[None, None], observation)
        seen, judged = _parts(row)
        begins = jnp.zeros((1, 1), bool)
        policy_key, critic_key = jax.random.split(key)
        of_policy = actor.init(policy_key, jnp.zeros((1, actor.size)), seen, begins)
        if critic is None:
            return ActorCritic(of_policy)
        of_value = critic.init(critic_key, jnp.zeros((1, critic.size)), judged, begins)
        return ActorCritic(of_policy, of_value)

    def start(rows: int) -> tuple[PyTree, PyTree]:
        of_critic = () if critic is None else jnp.zeros((rows, critic.size))
        return jnp.zeros((rows, actor.size)), of_critic

    def policy(
        params: ActorCritic, memory: jax.Array, observation: PyTree, begins: jax.Array
    ) -> tuple[jax.Array, Distribution]:
        seen, _ = _parts(observation)
        memories, distribution = actor.apply(params.policy, memory, seen, begins)
        return memories, _legal(distribution, observation)

    def value(
        params: ActorCritic, memory: jax.Array, observation: PyTree, begins: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        _, judged = _parts(observation)
        output: Any = cast(Recurrent, critic).apply(params.value, memory, judged, begins)
        return output[0], require_value(output[1], begins.shape)

    def act(
        params: ActorCritic, memory: PyTree, observation: PyTree
    ) -> tuple[PyTree, Distribution]:
        step = jax.tree.map(lambda x: x[:, None], observation)
        memories, distribution = policy(params, memory, step, jnp.zeros((memory.shape[0], 1), bool))
        return jax.tree.map(lambda x: x[:, 0], (memories, distribution))

    def values(
        params: ActorCritic, steps: Sequences, final_observation: PyTree | None
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        observation, begins, _, memory = steps
        if params.value is None:
            return memory, jnp.zeros(begins.shape), jnp.zeros(begins.shape)
        if final_observation is None:
            final_observation = jax.tree.map(lambda x: x[:, 1:], observation)
            observation = jax.tree.map(lambda x: x[:, :-1], observation)
        memories, of_steps = value(params, memory, observation, begins)
        # One step on from the memory after each step, before any reset.
        flat = jax.tree.map(lambda x: x.reshape(-1, 1, *x.shape[2:]), final_observation)
        after = memories.reshape(-1, memories.shape[-1])
        _, next_value = value(params, after, flat, jnp.zeros((after.shape[0], 1), bool))
        return memories[:, -1], of_steps, next_value.reshape(begins.shape)

    def apply(params: ActorCritic, inputs: Sequences) -> tuple[Distribution, jax.Array]:
        observation, begins, memory, critic_memory = inputs
        chex.assert_rank(begins, 2)
        _, distribution = policy(params, memory, observation, begins)
        if params.value is None:
            return distribution, jnp.zeros(begins.shape)
        return distribution, value(params, critic_memory, observation, begins)[1]

    return Networks(init, start, act, values, inputs=lambda steps: steps, apply=apply)


def _parts(observation: PyTree) -> tuple[PyTree, PyTree]:
    """What the policy reads, and what the critic does."""
    if isinstance(observation, Observation):
        return observation.policy, observation.seen_by_critic()
    return observation, observation


def _batch_shape(inputs: PyTree, spaces: Spaces) -> tuple[int, ...]:
    """The axes of inputs before those of one observation."""
    first, of_one = (jax.tree.leaves(tree)[0] for tree in (inputs, spaces.observation))
    shape: tuple[int, ...] = first.shape
    return shape[: len(shape) - len(of_one.shape)]


def _legal(output: Any, inputs: PyTree) -> Distribution:
    """The output of a policy, over the legal actions alone.

    Raises:
      ConfigError: it is no distribution, such as an array of logits.
    """
    distribution = require_distribution(output)
    if isinstance(inputs, Observation) and inputs.legal is not None:
        return distributions.allow(distribution, inputs.legal)
    return distribution


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


def require_value(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The output of a critic, which must have one value for each observation.

    Raises:
      ConfigError: it has another shape, such as a last axis of one.
    """
    if not isinstance(value, jax.Array) or value.shape != shape:
        got = list(value.shape) if isinstance(value, jax.Array) else type(value).__name__
        raise ConfigError(
            f"critic must return one value for each observation, shape {list(shape)}, got "
            f"{got}: drop a last axis of 1 by [..., 0]"
        )
    return value
