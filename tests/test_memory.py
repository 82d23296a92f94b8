"""Tests policies with memory: replay equals acting, and training solves tasks that need it."""

import functools
from typing import NamedTuple

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from jax.flatten_util import ravel_pytree
from memory_reference import SIZES
from numpy.testing import assert_allclose
from probes import Probe
from structured import Everything
from tables import cases

from jaxrl_po import control, trust_region
from jaxrl_po.algorithms import ppo, trpo
from jaxrl_po.config import ConfigError
from jaxrl_po.control import actor, memory, modules, networks, unroll

GRU = control.NetworkSettings(width=8, depth=1, memory="gru")


class RandomEnds(Probe):
    """Environment whose episodes end by themselves with probability ¼, and which observes noise."""

    def observation(self, state):
        return jnp.stack([state.cue, jnp.sin(7.0 * state.time + state.cue)])

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1, cue=jax.random.normal(key))
        reward = state.cue * (action - 0.5)
        return self.observation(state), state, reward, jax.random.bernoulli(key, 0.25), {}

    def observation_space(self, params=None):
        return spaces.Box(-9.0, 9.0, (2,))


def made(env, network=GRU, **sizes):
    sizes = {"num_envs": 16, "num_steps": 12} | sizes
    return control.make_problem(env, **sizes, network=network)


@functools.cache
def two_batches():
    problem = made(RandomEnds(), normalize_observations=True)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    # weights are large, so that the effect of memory is visible
    params = jax.tree.map(lambda x: 2.0 * x, params)
    collect = jax.jit(problem.collect)
    batches = []
    for i in range(3):
        collector, batch = collect(params, collector, jax.random.key(i))
        batches.append(batch)
    return jax.jit(problem.apply), params, batches


def test_what_is_replayed_is_what_acted():
    apply, params, batches = two_batches()
    for batch in batches:
        distribution, value = apply(params, batch.inputs)
        assert_allclose(distribution.log_prob(batch.action), batch.log_prob, atol=1e-5, rtol=0)
        assert_allclose(value, batch.value, atol=1e-5)
    ended = np.concatenate([b.terminated | b.truncated for b in batches])
    assert ended.any(axis=0).all()  # an episode began at every position of a row
    # Without the memories before the first step the numbers would differ.
    last = batches[-1]
    assert float(jnp.abs(last.inputs.memory).max()) > 0.1
    forgotten = last.inputs._replace(memory=jnp.zeros_like(last.inputs.memory))
    other = apply(params, forgotten)[0].log_prob(last.action)
    assert float(jnp.abs(other - last.log_prob).max()) > 1e-3


def test_next_value_uses_memory_before_reset():
    _, _, (*_, batch) = two_batches()
    ended = batch.terminated | batch.truncated
    running = ~np.asarray(ended[:, :-1])
    assert_allclose(
        np.asarray(batch.next_value[:, :-1])[running],
        np.asarray(batch.value[:, 1:])[running],
        atol=1e-5,
    )
    assert not np.allclose(batch.next_value[:, :-1][~running], batch.value[:, 1:][~running])


def test_memories_continue_from_the_previous_batch():
    apply, params, (_, first, second) = two_batches()
    ended = np.asarray((first.terminated | first.truncated)[:, -1])
    for name in ("memory", "critic_memory"):
        memory = np.asarray(getattr(second.inputs, name))
        assert not memory[ended].any()
        assert np.abs(memory[~ended]).max(axis=1).min() > 0.0
    # One row over both batches at once yields the values of the second batch.
    joined = jax.tree.map(
        lambda x, y: jnp.concatenate([x, y], axis=1), first.inputs[:2], second.inputs[:2]
    )
    whole = actor.StepRows(joined[0], joined[1].at[:, 12].set(ended), *first.inputs[2:])
    # The statistics changed between the two batches, but inputs are already normalised.
    assert_allclose(apply(params, whole)[1][:, 12:], second.value, atol=1e-5)


class Cell(NamedTuple):
    """Results of one cell of the table: step by step, all at once, and derivatives."""

    acted: jax.Array
    replayed: jax.Array
    by_steps: tuple
    at_once: tuple
    memories: tuple
    gradient: object
    products: tuple
    remember: tuple


# Episodes of two rows: memories come from steps before the segment, and are reset within the
# segment.
BEFORE, STEPS = 3, 6
BEGINS = np.zeros((2, BEFORE + STEPS), bool)
BEGINS[0, BEFORE + 3] = BEGINS[1, BEFORE + 1] = True
KINDS = ("plain", "dictionary", "masks", "privileged")
# Every pair of entries from two columns occurs.
TABLE = [
    (memory, of, kind)
    for memory in SIZES
    for i, of in enumerate(("policy", "critic", "both"))
    for j, kind in enumerate(KINDS)
    if (i + j) % 2 == (memory == "gru")
]


def seen(kind):
    """Returns the observation space of an environment of one kind, with three actions."""
    two, three = (jax.ShapeDtypeStruct((n,), jnp.float32) for n in (2, 3))
    legal = jax.ShapeDtypeStruct((3,), bool)
    return {
        "plain": two,
        "dictionary": {"a": two, "b": three},
        "masks": control.Observation(two, legal=legal),
        "privileged": control.Observation(two, critic=three),
    }[kind]


def legal_at(times):
    """Returns which of three actions are legal, `[T, 3]`: one action is illegal in each step."""
    return np.arange(3) != times[:, None] % 3


@functools.cache
def cell(memory, recurrent_networks, kind):
    spaces = control.Spaces(seen(kind), num_actions=3)
    network = control.NetworkSettings(
        width=4, depth=1, memory=memory, recurrent_networks=recurrent_networks, **SIZES[memory]
    )
    nets = actor.build_networks(modules.default_modules(spaces, network), spaces)
    rng = np.random.default_rng(0)

    def drawn(x, *axes):
        if x.dtype == bool:
            times = np.arange(axes[-1] if axes else 1)
            return np.broadcast_to(legal_at(times), (*axes, 3)) if axes else legal_at(times)[0]
        return rng.normal(size=(*axes, *x.shape)).astype(np.float32)

    one = jax.tree.map(drawn, spaces.observation)
    shapes_of = jax.eval_shape(nets.init, jax.random.key(0), one)
    params = jax.tree.map(lambda x: 0.7 * drawn(x), shapes_of)
    whole, final = (
        jax.tree.map(lambda x: drawn(x, 2, BEFORE + STEPS), spaces.observation) for _ in range(2)
    )
    flat, unravel = ravel_pytree(params.policy)
    vector = drawn(flat)

    @jax.jit
    def program(params, whole, final):
        def step(memories, x):
            observation, final, begins = x
            memories = unroll.forget(memories, begins)
            of_policy, distribution = nets.act(params, memories[0], observation)
            row, after = jax.tree.map(lambda x: x[:, None], (observation, final))
            steps = actor.StepRows(row, jnp.zeros((2, 1), bool), *memories)
            of_critic, value, _ = nets.values(params, steps, after)
            # The observation after a step and the memory after the step are computed separately.
            follows = steps._replace(observation=after, critic_memory=of_critic)
            _, next_value, _ = nets.values(params, follows, after)
            return (of_policy, of_critic), (memories, distribution.log_probs(), [value, next_value])

        xs = jax.tree.map(networks.time_first, (whole, final, BEGINS))
        last, seen = jax.lax.scan(step, nets.start(2), xs)
        memories, acted, values = jax.tree.map(lambda x: x[BEFORE:], seen)
        before = jax.tree.map(lambda x: x[0], memories)
        observation, after = jax.tree.map(lambda x: x[:, BEFORE:], (whole, final))
        steps = actor.StepRows(observation, jnp.asarray(BEGINS[:, BEFORE:]), *before)
        of_critic, *at_once = nets.values(params, steps, after)

        def distribution(x):
            return nets.apply(params._replace(policy=unravel(x)), nets.inputs(steps))[0]

        def at_last(observation):
            inputs = nets.inputs(steps._replace(observation=observation))
            distribution, value = nets.apply(params, inputs)
            return (distribution.log_probs()[..., 0] * 0.5 + value)[:, -1].sum()

        def products():
            """Returns Fisher products with a vector: the library's product and the enumerated
            product."""
            old = distribution(flat)
            product = trust_region.fisher_vector_product(
                lambda x: old.kl(distribution(x)).mean(), flat, vector
            )
            probs = jnp.exp(old.log_probs())

            def log_probs(x):
                return jnp.where(probs > 0, distribution(x).log_probs(), 0.0)

            _, slope = jax.jvp(log_probs, (flat,), (vector,))
            return product, jax.vjp(log_probs, flat)[1](probs * slope / (2 * STEPS))[0]

        return Cell(
            networks.time_first(acted),
            distribution(flat).log_probs(),
            jax.tree.map(lambda x: networks.time_first(x[..., 0]), values),
            at_once,
            (last[1], of_critic),
            jax.grad(at_last, allow_int=True)(observation),
            products() if recurrent_networks == "policy" else (),
            tuple(bool(jax.tree.leaves(x)) for x in nets.start(2)),
        )

    return jax.tree.map(np.asarray, program(params, whole, final))


@pytest.mark.parametrize(("memory", "recurrent_networks", "kind"), TABLE)
def test_laws_of_memory(memory, recurrent_networks, kind):
    of = cell(memory, recurrent_networks, kind)
    assert tuple(of.remember) == (recurrent_networks != "critic", recurrent_networks != "policy")
    # Replay at once equals acting step by step, and so do values and memories.
    assert_allclose(np.exp(of.replayed), np.exp(of.acted), atol=1e-5)
    possible = of.acted > -50
    assert_allclose(of.replayed[possible], of.acted[possible], atol=1e-5)
    chex.assert_trees_all_close(of.at_once, of.by_steps, atol=1e-5)
    chex.assert_trees_all_close(*of.memories, atol=1e-5)
    # Illegal actions have probability 0.
    if kind == "masks":
        assert not np.exp(of.replayed[:, ~legal_at(np.arange(BEFORE, BEFORE + STEPS))]).any()
    # No gradient crosses the end of an episode; within an episode of a policy with memory a
    # gradient does.
    remembered = False
    for leaf in jax.tree.leaves(of.gradient):
        if leaf.dtype == np.float32:
            for row, start in enumerate(BEGINS[:, BEFORE:].argmax(axis=1)):
                reached = np.abs(leaf[row]).sum(axis=-1) > 0
                assert not reached[:start].any()
                assert reached[-1]
                remembered |= reached[start:-1].any()
    assert remembered
    if recurrent_networks == "policy":
        assert_allclose(*of.products, rtol=1e-3, atol=1e-5)
        assert np.abs(of.products[0]).max() > 1e-3


def test_minibatches_are_whole_sequences():
    learner = ppo.make(ppo.Config(num_minibatches=3), made(RandomEnds()))
    with pytest.raises(
        ConfigError,
        match=r"num_minibatches: must divide the 16 rows, and so must its product .* got 3 × 1",
    ):
        jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))


@pytest.mark.slow
@pytest.mark.timeout(900)
@cases(
    "module, config, memory, env, least",
    (
        ppo,
        ppo.Config(num_minibatches=4, learning_rate=5e-3, entropy_coefficient=0.05),
        {"memory": "gru"},
        Everything(),
        8.0,
    ),
    (
        trpo,
        trpo.Config(value_minibatches=4, value_learning_rate=5e-3, max_kl=0.03),
        {"memory": "transformer", "memory_window": 8},
        gymnax.make("MemoryChain-bsuite")[0],
        0.95,
    ),
    ids=["ppo", "trpo"],
)
def test_a_cue_is_remembered_after_training(module, config, memory, env, least):
    """The first observation decides all later rewards; the optimal returns are 10 and 1."""
    network = control.NetworkSettings(width=16, depth=1, **memory)
    problem = made(env, network, num_envs=64, num_steps=32)
    learner = module.make(config, problem)
    state, step = jax.jit(learner.init)(jax.random.key(1)), jax.jit(learner.step)
    for _ in range(20):
        state, _ = step(state)
    evaluate = jax.jit(control.make_evaluate(env, problem, num_episodes=256, max_steps=20))
    found = evaluate(state.params, state.collector, jax.random.key(9))["return"].mean()
    assert float(found) > least


def test_what_cannot_remember_is_named():
    remembering = networks.Recurrent(networks.Torso((4,)), networks.CategoricalHead(2), 4)
    with pytest.raises(ConfigError, match="memory_heads: must divide width = 64"):
        made(RandomEnds(), control.NetworkSettings(memory="transformer", memory_heads=3))
    of_role = functools.partial(control.make_problem, RandomEnds())
    with pytest.raises(ConfigError, match="recurrent_networks: must not be policy, which is given"):
        of_role(
            network=control.NetworkSettings(memory="gru", recurrent_networks="policy"),
            policy=remembering,
        )
    # flags can build only the critic's memory
    of_role(network=control.NetworkSettings(memory="gru"), policy=remembering)
    narrow = {"memory": "transformer", "recurrent_networks": "policy", "critic_width": 6}
    control.NetworkSettings(**narrow).validate()
    with pytest.raises(ConfigError, match="memory_heads: must divide critic_width = 6"):
        control.NetworkSettings(**narrow | {"recurrent_networks": "both"}).validate()
    network = control.NetworkSettings(memory="gru", recurrent_networks="policy")
    with pytest.raises(ConfigError, match=r"recurrent_networks.* there is a critic"):
        control.make_groups(RandomEnds(), network=network)
    with pytest.raises(ConfigError, match="actor_critic: must be without memory"):
        control.make_problem(RandomEnds(), actor_critic=remembering)
    with pytest.raises(ConfigError, match="memory: must be none in a vine"):
        control.make_vine(RandomEnds(), policy=remembering)


def test_groups_remember_too():
    window = functools.partial(memory.transformer, layers=1, heads=2, window=3)
    remembering = networks.Recurrent(
        networks.Torso((4,)), networks.CategoricalHead(2), 4, memory=window
    )
    problem = control.make_groups(
        RandomEnds(), num_prompts=2, group_size=3, num_steps=6, policy=remembering
    )

    @jax.jit
    def played(key):
        params, collector = problem.init(key)
        params = jax.tree.map(lambda x: 2.0 * x, params)
        _, batch = problem.collect(params, collector, jax.random.key(1))
        replayed = problem.apply(params, batch.inputs)[0].log_prob(batch.action)
        return batch.mask, replayed, batch.log_prob

    within, replayed, acted = map(np.asarray, played(jax.random.key(0)))
    assert_allclose(replayed[within], acted[within], atol=1e-5)
