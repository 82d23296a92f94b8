"""Seeds in one program: against runs one after another, and updated in groups."""

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
from jaxrl_po.run.devices.seeds import STATE_AXES, group_size, in_groups, over_seeds

SEEDS, ITERATIONS = 8, 3
GROWN = 1e-2  # rounding of parameters after the warm start; two seeds differ by 1


def make_programs():
    """Returns new functions each time, as each process would compile its own."""
    task = language.tasks.addition(2)
    model = language.ModelSettings(width=32, layers=2, heads=4, kv_heads=4, mlp_width=64).build(
        task.tokenizer.size
    )
    problem = language.make_problem(
        task, model, num_prompts=16, group_size=8, warm=language.WarmStart(steps=100, batch_size=64)
    )
    learner = grpo.make(as_arrays(grpo.Config(num_minibatches=2)), problem)

    def train(state):
        def step(state, _):
            state, batch = learner.sample(state)
            state, metrics = learner.update(state, batch)
            return state, (batch.action, metrics["accuracy"].value(), state.params)

        return jax.lax.scan(step, state, None, length=ITERATIONS)[1]

    return learner.init, train


@pytest.fixture
def no_cache():
    """Compiled programs are not kept, so that each run pays for its own."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", folder)
    compilation_cache.reset_cache()


@pytest.mark.slow
@pytest.mark.usefixtures("no_cache")
@pytest.mark.timeout(900)
def test_vmapped_seeds_equal_single_runs_in_less_time_than_one_after_another():
    """Single runs train from the vmapped warm start: rounding grows in 100 steps of Adam.

    Other parameters sample other tokens, whereas those of one start sample the same.
    """
    keys = jax.random.split(jax.random.key(0), SEEDS)
    begun = time.perf_counter()
    init, train = (jax.jit(jax.vmap(function)) for function in make_programs())
    warm = init(keys)
    together = jax.block_until_ready(train(warm))
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    for i, key in enumerate(keys):
        own, one = jax.tree.map(lambda x, i=i: x[i], (warm, together))
        init, train = map(jax.jit, make_programs())
        fitted, alone = init(key), jax.block_until_ready(train(own))
        chex.assert_trees_all_equal(fitted.key, own.key)
        chex.assert_trees_all_close(fitted.params, own.params, atol=GROWN)
        chex.assert_trees_all_equal(alone[:2], one[:2])  # tokens, and their accuracy
        chex.assert_trees_all_close(alone[2], one[2], rtol=2e-3, atol=2e-4)
    apart = time.perf_counter() - begun
    assert seconds < apart, (seconds, apart)
    print(f"{SEEDS} seeds together {seconds:.1f} s, one after another {apart:.1f} s")


def test_a_core_updates_at_most_eight_seeds_side_by_side():
    numbers = (1, 3, 8, 10, 11, 16, 20, 22, 63, 64)
    sizes = [group_size(n, Target("cpu", 2, 2)) for n in numbers]
    assert sizes == [1, 3, 8, 5, 11, 8, 5, 22, 7, 8]
    assert [group_size(n, Target("cpu", 1, 2)) for n in numbers] == list(numbers)


def test_seeds_in_groups_keep_their_order_and_share_what_is_frozen():
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
    whole, parts = stacked(state, batch), in_groups(stacked, 2)(state, batch)
    chex.assert_trees_all_equal(whole, parts)
    assert parts[0].params.frozen.shape == (3,)


def test_seeds_in_groups_learn_what_they_learn_at_once(monkeypatch):
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
