"""Wraps actor and critic as functions of their parameters, with or without memory."""

import functools
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from jaxrl_po import distributions, variables
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, with_field_docs
from jaxrl_po.control import networks
from jaxrl_po.control.networks import Recurrent
from jaxrl_po.control.spaces import Observation, Spaces
from jaxrl_po.control.statistics import normalize
from jaxrl_po.distributions import Categorical, MultiCategorical, TanhGaussian
from jaxrl_po.types import ActorCritic, CollectorState, Distribution, Problem, PyTree, Samples


class Networks(NamedTuple):
    """Actor and critic as functions of their parameters.

    A memory has leaves `[B, …]`, zero at the start of an episode; () for a network without memory.

    Attributes:
      init: `init(key, observation) -> ActorCritic`, builds parameters from one observation;
        consumes `key`.
      start: `start(B) -> (memory, critic_memory)`, returns the memories at the start of episodes.
      act: `act(params, memory, observation) -> (memory, distribution)`, acts for one step of B
        rows.
      values: `values(params, steps, final_observation) -> (critic_memory, value, next_value)`,
        returns the memory after T steps of B rows and two values `[B, T]`; zeros without a critic.
        If `final_observation` is None, the observations of `steps` are `[B, T + 1, …]`, and each
        observation is the true next observation of the previous one.
      inputs: `inputs(steps)`, returns the inputs that `apply` takes, see `StepRows`.
      apply: `apply(params, inputs) -> (distribution, value)`, has the form of `Problem.apply`.
      hidden_matrices: `params -> ActorCritic` of bool, marks hidden matrices, see `Problem`.
    """

    init: Callable[[jax.Array, PyTree], ActorCritic]
    start: Callable[[int], tuple[PyTree, PyTree]]
    act: Callable[[ActorCritic, PyTree, PyTree], tuple[PyTree, Distribution]]
    values: Callable[[ActorCritic, "StepRows", PyTree | None], tuple[PyTree, jax.Array, jax.Array]]
    inputs: Callable[["StepRows"], PyTree]
    apply: Callable[[ActorCritic, PyTree], tuple[Distribution, jax.Array]]
    hidden_matrices: Callable[[ActorCritic], ActorCritic] | None = None


class StepRows(NamedTuple):
    """Steps of B rows, T steps each.

    Networks with memory use all fields, other networks the observations only.

    Attributes:
      observation: observations of the steps, leaves `[B, T, …]`.
      begins: `[B, T]`, bool, True if an episode begins with the step: the memories before the step
        are 0.
      memory: actor's memory before the first step, leaves `[B, …]`; () without memory.
      critic_memory: critic's memory before the first step, leaves `[B, …]`; () without memory.
    """

    observation: PyTree
    begins: jax.Array
    memory: PyTree
    critic_memory: PyTree


@with_field_docs
class Actor(NamedTuple):
    """Policy of a problem as a function that acts step by step.

    Attributes:
      start: `start(B) -> memory`, returns the memory at an episode's start.
      act: `act(params, collector, memory, observation) -> (memory, distribution)`, acts on B raw
        observations, normalised as in training.
    """

    start: Callable[[int], PyTree]
    act: Callable[[ActorCritic, CollectorState, PyTree, PyTree], tuple[PyTree, Distribution]]


def actor_of(problem: Problem) -> Actor:
    """Returns the problem's actor; by default the actor calls `apply` and has no memory."""
    if problem.actor is not None:
        return cast(Actor, problem.actor)

    def act(
        params: ActorCritic, collector: CollectorState, memory: PyTree, observation: PyTree
    ) -> tuple[PyTree, Distribution]:
        inputs = normalize(collector, observation)
        return memory, problem.apply(params._replace(value=None), inputs)[0]

    return Actor(lambda rows: (), act)


def as_problem(
    nets: Networks,
    init: Callable[..., Any],
    collect: Callable[..., Any],
    target: Target,
    *,
    spaces: Spaces,
    steps: int,
    on_policy: bool = True,
) -> Problem:
    """Returns the control problem of networks; networks with memory also set the field `actor`."""
    remembers = has_memory(nets)
    return Problem(
        init,
        collect,
        nets.apply,
        rows=whole_sequences if remembers else merge_time,
        on_policy=on_policy,
        truncated_is_overlong=False,
        hidden_matrices=nets.hidden_matrices,
        actor=(
            Actor(lambda rows: nets.start(rows)[0], functools.partial(act_normalized, nets))
            if remembers
            else None
        ),
        target=target,
        spaces=spaces,
        steps=steps,
        unit="environment steps",
    )


def act_normalized(
    nets: Networks,
    params: ActorCritic,
    collector: CollectorState,
    memory: PyTree,
    observation: PyTree,
) -> tuple[PyTree, Distribution]:
    """Calls `Networks.act` on raw observations, normalised by the collector's statistics."""
    return nets.act(params, memory, normalize(collector, observation))


def has_memory(nets: Networks) -> bool:
    """Returns whether the networks have memory and therefore need complete sequences."""
    return bool(jax.tree.leaves(nets.start(1)))


def whole_sequences(samples: Samples) -> Samples:
    """Returns the rows unchanged, because a policy with memory needs complete sequences."""
    return samples


def merge_time(samples: Samples) -> Samples:
    """Reshapes leaves `[B, T, …]` to `[B·T, …]`: without memory a policy does not mix steps."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)


def play(distribution: Distribution, action: jax.Array) -> jax.Array:
    """Converts a stored action for `Spaces.to_action`.

    The u of a `TanhGaussian` becomes tanh(u).
    """
    return jnp.tanh(action) if isinstance(distribution, TanhGaussian) else action


class _Network(NamedTuple):
    """Functions that apply one Flax module.

    Attributes:
      init: `init(key, observation) -> (params, constants)`, draws variables from one observation,
        see `variables.split`; consumes `key`.
      start: `start(B) -> memory`, returns the first memory; () for a module without memory.
      run: `networks.Recurrent` as a function; without memory it accepts rows of any shape.
    """

    init: Callable[[jax.Array, PyTree], tuple[PyTree, PyTree]]
    start: Callable[[int], PyTree]
    run: Callable[..., tuple[PyTree, Any, Any]]


def _network(
    name: str, module: Any, pick: Callable[[Any], Any] = lambda output: output
) -> _Network:
    """Wraps a module, called `name` in messages; `pick` selects a part of the module's output."""
    remembers = isinstance(module, Recurrent)
    if remembers:
        networks.build_memory(module)
    variables.require_module(name, module)

    def init(key: jax.Array, observation: PyTree) -> tuple[PyTree, PyTree]:
        if not remembers:
            return variables.split(module, module.init(key, observation))
        row = jax.tree.map(lambda x: x[None, None], observation)
        made = module.init(key, module.start(1), row, jnp.zeros((1, 1), bool))
        return variables.split(module, made)

    def apply(*arguments: Any) -> Any:
        with variables.applied(name):
            return module.apply(*arguments)

    def run(
        params: PyTree, memory: PyTree, observation: PyTree, begins: jax.Array, final: PyTree = None
    ) -> tuple[PyTree, Any, Any]:
        output = pick(apply(params, observation))
        return memory, output, None if final is None else pick(apply(params, final))

    return _Network(init, module.start, apply) if remembers else _Network(init, lambda _: (), run)


def build_networks(modules: Mapping[str, Any], spaces: Spaces) -> Networks:
    """Turns Flax modules into functions of an `ActorCritic`.

    Args:
      modules: `policy` (observation `[E*, …]` to a distribution) and `critic` (observation to a
        value `[E*]`, or None), or `actor_critic` (observation to distribution and value), whose
        parameters are all in `params.policy`. Policy and critic may each be a `networks.Recurrent`.
      spaces: spaces of the environment. Each network reads its own part of an `Observation`, and
        illegal actions are excluded from the policy's distribution.

    Raises:
      ConfigError: `actor_critic` has memory.
    """
    shared = modules.get("actor_critic")
    if isinstance(shared, Recurrent):
        raise ConfigError("actor_critic", "must be without memory: give a policy and a critic")
    if shared is None:
        actor, critic_module = _network("policy", modules["policy"]), modules["critic"]
        critic = None if critic_module is None else _network("critic", critic_module)
    else:
        actor, critic = (_network("actor_critic", shared, itemgetter(part)) for part in (0, 1))

    def init(key: jax.Array, observation: PyTree) -> ActorCritic:
        seen, for_critic = _parts(observation)
        policy_key, critic_key = (key, key) if shared is not None else jax.random.split(key)
        policy, of_policy = actor.init(policy_key, seen)
        value, of_value = None, None
        if shared is None and critic is not None:
            value, of_value = critic.init(critic_key, for_critic)
        return ActorCritic(policy, value, constants=variables.by_role(of_policy, of_value))

    def start(rows: int) -> tuple[PyTree, PyTree]:
        return actor.start(rows), () if critic is None else critic.start(rows)

    remembers = bool(jax.tree.leaves(start(1)))

    def policy(params: ActorCritic, steps: StepRows) -> tuple[PyTree, Distribution]:
        seen, _ = _parts(steps.observation)
        memory, output, _ = actor.run(params.variables("policy"), steps.memory, seen, steps.begins)
        return memory, _legal(output, steps.observation)

    def value(params: ActorCritic, steps: StepRows, final: PyTree = None) -> tuple[PyTree, Any]:
        """Returns the critic's memory after the steps, and values at the steps and at `final`."""
        of_critic = params.variables("value" if shared is None else "policy")
        shape = steps.begins.shape
        if of_critic is None or critic is None:
            return steps.critic_memory, [jnp.zeros(shape)] * 2
        given = [x for x in (steps.observation, final) if x is not None]
        for_critic, *after = (_parts(x)[shared is None] for x in given)
        memory, *values = critic.run(
            of_critic, steps.critic_memory, for_critic, steps.begins, *after
        )
        return memory, [x if x is None else require_value(x, shape) for x in values]

    def act(
        params: ActorCritic, memory: PyTree, observation: PyTree
    ) -> tuple[PyTree, Distribution]:
        if not jax.tree.leaves(memory):
            return memory, policy(params, alone(observation))[1]
        row = jax.tree.map(lambda x: x[:, None], observation)
        rows = jax.tree.leaves(memory)[0].shape[0]
        steps = StepRows(row, jnp.zeros((rows, 1), bool), memory, ())
        memory, distribution = policy(params, steps)
        return memory, jax.tree.map(lambda x: x[:, 0], distribution)

    def values(
        params: ActorCritic, steps: StepRows, final_observation: PyTree | None
    ) -> tuple[PyTree, jax.Array, jax.Array]:
        if final_observation is None and not jax.tree.leaves(steps.critic_memory):
            _, (of_steps, _) = value(params, alone(steps.observation))
            return (), of_steps[:, :-1], of_steps[:, 1:]
        if final_observation is None:
            final_observation = jax.tree.map(lambda x: x[:, 1:], steps.observation)
            before = jax.tree.map(lambda x: x[:, :-1], steps.observation)
            steps = steps._replace(observation=before)
        memory, (of_steps, of_final) = value(params, steps, final_observation)
        return memory, of_steps, of_final

    def alone(observation: PyTree) -> StepRows:
        """Wraps observations `[E*, …]` for networks without memory."""
        return StepRows(observation, jnp.zeros(_batch_shape(observation, spaces), bool), (), ())

    def apply(params: ActorCritic, inputs: PyTree) -> tuple[Distribution, jax.Array]:
        steps: Any = inputs if remembers else alone(inputs)
        return policy(params, steps)[1], value(params, steps)[1][0]

    def inputs(steps: StepRows) -> PyTree:
        return steps if remembers else steps.observation

    hidden = find_hidden_matrices(
        *(modules.get(role) for role in ("actor_critic", "policy", "critic"))
    )
    return Networks(init, start, act, values, inputs, apply, hidden)


def find_hidden_matrices(
    shared: Any, policy: Any, critic: Any
) -> Callable[[ActorCritic], ActorCritic] | None:
    """Returns `Problem.hidden_matrices` of one shared module, or of policy and critic (or None)."""
    of_policy = networks.hidden_matrices(policy if shared is None else shared)
    of_value = None if critic is None else networks.hidden_matrices(critic)
    if of_policy is None or (critic is not None and of_value is None):
        return None

    def marked(params: ActorCritic) -> ActorCritic:
        value = None if params.value is None or of_value is None else of_value(params.value)
        return ActorCritic(of_policy(params.policy), value)

    return marked


def require_fit(nets: Networks, spaces: Spaces) -> None:
    """Traces the networks on two observations.

    Raises:
      ConfigError: the policy's sample is not an action of the environment, or the networks do not
        return the documented types and shapes.
    """

    def draw(key: jax.Array) -> tuple[jax.Array, Distribution, jax.Array]:
        one = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), spaces.observation)
        params = nets.init(key, one)
        two = jax.tree.map(lambda x: jnp.zeros((2, *x.shape), x.dtype), spaces.observation)
        memory, critic_memory = nets.start(2)
        _, distribution = nets.act(params, memory, two)
        row = jax.tree.map(lambda x: x[:, None], two)
        inputs = nets.inputs(StepRows(row, jnp.zeros((2, 1), bool), memory, critic_memory))
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
        raise ConfigError("policy", f"must draw {wanted}, as the environment takes them, got {got}")


def _parts(observation: PyTree) -> tuple[PyTree, PyTree]:
    """Returns the parts of an observation that policy and critic read."""
    if isinstance(observation, Observation):
        return observation.policy, observation.seen_by_critic()
    return observation, observation


def _batch_shape(inputs: PyTree, spaces: Spaces) -> tuple[int, ...]:
    """Returns the batch axes of inputs, which lead the axes of one observation."""
    first, of_one = (jax.tree.leaves(tree)[0] for tree in (inputs, spaces.observation))
    shape: tuple[int, ...] = first.shape
    return shape[: len(shape) - len(of_one.shape)]


def _legal(output: Any, inputs: PyTree) -> Distribution:
    """Returns the output of a policy, restricted to the legal actions.

    Raises:
      ConfigError: the output is not a distribution, such as an array of logits.
    """
    distribution = require_distribution(output)
    if isinstance(inputs, Observation) and inputs.legal is not None:
        return distributions.allow(distribution, inputs.legal)
    return distribution


def require_distribution(output: Any) -> Distribution:
    """Returns the output of a policy, which must be a distribution.

    Raises:
      ConfigError: the output is not a distribution, for example an array of logits.
    """
    if not all(hasattr(output, name) for name in ("log_prob", "entropy", "kl", "sample", "mode")):
        raise ConfigError(
            "policy",
            f"must return a distribution, got {type(output).__name__}: wrap logits as "
            "jaxrl_po.distributions.Categorical(logits), a mean and log σ as DiagonalGaussian",
        )
    return cast(Distribution, output)


def require_value(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the output of a critic, which must have one value for each observation.

    Raises:
      ConfigError: the output has another shape, such as a last axis of size one.
    """
    if not isinstance(value, jax.Array) or value.shape != shape:
        got = list(value.shape) if isinstance(value, jax.Array) else type(value).__name__
        raise ConfigError(
            "critic",
            f"must return one value for each observation, shape {list(shape)}, got {got}: drop a "
            "last axis of 1 by [..., 0]",
        )
    return value
