"""Tests seeds in one program: against runs one after another, and updated in groups."""

import time

import chex
import gymnax
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache
from probes import tabular_problem

from jaxrl_po import backend, control, language
from jaxrl_po.algorithms import grpo, ppo
from jaxrl_po.backend import Target
from jaxrl_po.config import as_arrays
from jaxrl_po.run.devices.seeds import (
    STATE_AXES,
    group_size,
    over_seeds,
    select_seed,
    update_in_groups,
)

SEEDS, ITERATIONS = 8, 3
GROWN = 1e-2  # bound on the rounding of parameters after the warm start; two seeds differ by 4


def make_learner():
    """Returns a new learner for each call, as each process would compile its own learner."""
    task = language.tasks.addition(2)
    model = language.ModelSettings(width=32, layers=2, heads=4, kv_heads=4, mlp_width=64).build(
        task.tokenizer.size
    )
    problem = language.make_problem(
        task, model, num_prompts=16, group_size=8, warm=language.WarmStart(steps=100, batch_size=64)
    )
    # At the reference the gradient of the KL penalty is pure rounding, which Adam scales to full
    # steps.
    return grpo.make(as_arrays(grpo.Config(num_minibatches=2, use_reference=False)), problem)


def make_programs(learner):
    """Returns `init(key)` and `step(state) -> (state, (actions, accuracy, parameters))`."""

    def step(state):
        state, batch = learner.sample(state)
        state, metrics = learner.update(state, batch)
        return state, (batch.action, metrics["accuracy"].value(), state.params)

    return jax.jit(learner.init), jax.jit(step)


@pytest.fixture
def no_cache():
    """Disables the compilation cache, so that each run compiles its own programs."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(900)
def test_vmapped_seeds_equal_single_runs_in_less_time():
    """Single runs start from states of the vmapped run, because rounding grows in a warm start with
    Adam.

    Different parameters sample different tokens, whereas equal states sample equal tokens.
    """
    keys = jax.random.split(jax.random.key(0), SEEDS)
    begun = time.perf_counter()
    init, step = make_programs(over_seeds(make_learner(), SEEDS))
    states, found = [init(keys)], []
    for _ in range(ITERATIONS):
        state, outputs = step(states[-1])
        states.append(state)
        found.append(outputs)
    jax.block_until_ready(states)
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    for i, key in enumerate(keys):
        init, step = make_programs(make_learner())
        start = init(key)
        for n in range(ITERATIONS):
            state, (tokens, accuracy, params) = jax.tree.map(
                lambda x, i=i: x[i], (states[n], found[n])
            )
            if n == 0:
                chex.assert_trees_all_equal(start.key, state.key)
                chex.assert_trees_all_close(start.params, state.params, atol=GROWN)
            alone = step(state)[1]
            chex.assert_trees_all_equal(alone[:2], (tokens, accuracy))
            chex.assert_trees_all_close(alone[2], params, rtol=2e-3, atol=2e-4)
    apart = time.perf_counter() - begun
    assert seconds < apart, (seconds, apart)
    print(f"{SEEDS} seeds together {seconds:.1f} s, one after another {apart:.1f} s")


def test_core_updates_at_most_eight_seeds_at_once():
    numbers = (1, 3, 8, 10, 11, 16, 20, 22, 63, 64)
    sizes = [group_size(n, Target("cpu", 2, 2)) for n in numbers]
    assert sizes == [1, 3, 8, 5, 11, 8, 5, 22, 7, 8]
    assert [group_size(n, Target("cpu", 1, 2)) for n in numbers] == list(numbers)


def test_grouped_seeds_keep_order_and_share_frozen_values():
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=2)
    state = jax.eval_shape(ppo.make(ppo.Config(), problem).init, jax.random.key(0))
    scale = jnp.arange(1.0, 4.0)
    state = jax.tree.map(lambda x: jnp.zeros(6), state)
    state = state._replace(step=jnp.arange(6), params=state.params._replace(frozen=scale))

    def update(state, batch):
        moved = state.step * (state.params.frozen @ batch)
        return state._replace(step=moved), {"moved": moved}

    stacked = jax.vmap(update, (STATE_AXES, 0), (STATE_AXES, 0))
    batch = jax.random.normal(jax.random.key(1), (6, 3))
    whole, parts = stacked(state, batch), update_in_groups(stacked, 2)(state, batch)
    chex.assert_trees_all_equal(whole, parts)
    assert parts[0].params.frozen.shape == (3,)


def test_grouped_seeds_learn_as_if_at_once(monkeypatch):
    monkeypatch.setattr(backend, "here", lambda: Target("cpu", 2, 2))
    problem = tabular_problem(num_prompts=4, num_steps=8)
    learner = ppo.make(as_arrays(ppo.Config(num_minibatches=2)), problem)
    seeds = over_seeds(learner, 16)
    keys = jax.random.split(jax.random.key(0), 16)
    state, batch = jax.jit(seeds.sample)(jax.jit(seeds.init)(keys))
    grouped = jax.jit(seeds.update)(state, batch)
    whole = jax.jit(jax.vmap(learner.update))(state, batch)
    chex.assert_trees_all_close(grouped[0].params, whole[0].params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(grouped[0].key, whole[0].key)
    loops = [
        equation.params["length"]
        for equation in jax.make_jaxpr(seeds.update)(state, batch).eqns
        if equation.primitive.name == "scan"
    ]
    assert loops == [2]


def test_each_seed_begins_samples_and_learns_alone():
    problem = tabular_problem(num_prompts=4, num_steps=8)
    learner = ppo.make(as_arrays(ppo.Config(num_minibatches=2)), problem)
    seeds = over_seeds(learner, 3)
    keys = jax.random.split(jax.random.key(0), 3)
    state = jax.jit(seeds.init)(keys)
    sampled, batch = jax.jit(seeds.sample)(state)
    after, metrics = jax.jit(seeds.update)(sampled, batch)
    init, sample, update = map(jax.jit, learner)
    for i, key in enumerate(keys):
        begun = init(key)
        chex.assert_trees_all_equal(begun.key, select_seed(state, i).key)
        chex.assert_trees_all_close(begun.params, select_seed(state, i).params, rtol=1e-6)
        of_one = sample(select_seed(state, i))
        own = jax.tree.map(lambda x, i=i: x[i], batch)
        chex.assert_trees_all_equal(of_one[0].key, select_seed(sampled, i).key)
        chex.assert_trees_all_equal(of_one[1].action, own.action)
        changed, of_update = update(select_seed(sampled, i), own)
        chex.assert_trees_all_close(
            changed.params, select_seed(after, i).params, rtol=1e-5, atol=1e-6
        )
        measured = jax.tree.map(lambda x, i=i: x[i], metrics)
        chex.assert_trees_all_close(of_update, measured, rtol=1e-4, atol=1e-5)
