"""Eight seeds of a language method in one program against eight runs one after another."""

import time

import chex
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from jaxrl_po import language
from jaxrl_po.algorithms import grpo
from jaxrl_po.config import as_arrays

SEEDS, ITERATIONS = 8, 3


def make_train():
    """A new function each time, as each process of its own would compile it."""
    task = language.tasks.addition(2)
    model = language.ModelSettings(width=32, layers=2, heads=4, kv_heads=4, mlp_width=64).build(
        task.tokenizer.size
    )
    problem = language.make_problem(
        task, model, num_prompts=16, group_size=8, warm=language.WarmStart(steps=100, batch_size=64)
    )
    learner = grpo.make(as_arrays(grpo.Config(num_minibatches=2)), problem)

    def train(key):
        def step(state, _):
            state, metrics = learner.step(state)
            return state, (state.params, metrics["accuracy"].value())

        return jax.lax.scan(step, learner.init(key), None, length=ITERATIONS)[1]

    return train


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
    keys = jax.random.split(jax.random.key(0), SEEDS)
    begun = time.perf_counter()
    together = jax.block_until_ready(jax.jit(jax.vmap(make_train()))(keys))
    seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    for i, key in enumerate(keys):
        alone = jax.block_until_ready(jax.jit(make_train())(key))
        chex.assert_trees_all_close(
            jax.tree.map(lambda x, i=i: x[i], together), alone, rtol=2e-3, atol=2e-4
        )
    apart = time.perf_counter() - begun
    assert seconds < apart, (seconds, apart)
    print(f"{SEEDS} seeds together {seconds:.1f} s, one after another {apart:.1f} s")
