"""Tests deep models: scanned blocks equal unrolled blocks, and compile as one block."""

import functools

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import drawn

from jaxrl_po import language, optimizers, updates
from jaxrl_po.algorithms import grpo
from jaxrl_po.language import Transformer, sampling, transformer
from jaxrl_po.language.lora import Lora
from jaxrl_po.masked import Mean

TASK = language.tasks.addition(1)
DEEP = transformer.UNROLLED + 2
TOKENS = jnp.asarray(np.random.default_rng(1).integers(2, 12, size=(3, 9)), jnp.int32)
PAD = jnp.array([0, 2, 5])
BEFORE = {
    ("attention", "query"): ([0.2038965, 0.1921305], [0.1918965, 0.1915073]),
    ("attention", "out"): ([0.2152103, 0.1906206], [0.1823677, 0.2256487]),
    ("mlp", "down"): ([0.16934, 0.1758346], [0.144097, 0.1642854]),
}


@pytest.mark.parametrize("adapters", [None, pytest.param(Lora(2), marks=pytest.mark.slow)])
def test_scanned_and_unrolled_are_one_function(monkeypatch, adapters):
    """Compares values, gradients, and completions sampled with a cache; the scanned model has
    `remat`."""
    model = Transformer(14, width=8, layers=DEEP, heads=2, mlp_width=12, lora=adapters)
    params = drawn(model.parameter_shapes(), 0.5)

    def found(model, unrolled):
        monkeypatch.setattr(transformer, "UNROLLED", unrolled)

        def loss(params):
            return jnp.square(model.apply(params, TOKENS, PAD, last=3)[0]).mean()

        sample = functools.partial(
            sampling.generate,
            model,
            group_size=2,
            decoding=sampling.Decoding(5),
            eos=1,
            pad_token=0,
        )
        keys = jax.random.split(jax.random.key(0), 3)
        return jax.jit(
            lambda params: (
                jax.value_and_grad(loss)(params),
                sample(params, TOKENS, PAD, keys)._asdict(),
            )
        )(params)

    scanned, apart = found(model.clone(remat=True), 0), found(model, DEEP)
    jax.tree.map(functools.partial(assert_allclose, rtol=1e-3, atol=1e-5), scanned, apart)


def instructions(layers):
    """Returns the instructions in the compiled program of one iteration, with sampling and
    update."""
    model = Transformer(
        TASK.tokenizer.size, width=8, layers=layers, heads=2, mlp_width=12, gated=False
    )
    problem = language.make_problem(TASK, model, num_prompts=2, group_size=2)
    learner = grpo.make(grpo.Config(use_reference=False), problem)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    return jax.jit(learner.step).lower(state).as_text().count(" = ")


def test_deeper_programs_are_no_longer():
    unrolled, deep, deeper = (instructions(layers) for layers in (4, DEEP, 2 * DEEP))
    assert deep == deeper < unrolled


def test_the_cache_of_scanned_blocks_leads_with_rows():
    model = Transformer(14, width=8, layers=DEEP, heads=2, kv_heads=1, dtype=jnp.dtype("bfloat16"))
    leaves = jax.tree.leaves(model.empty_cache(3, 7))
    assert {(leaf.shape, str(leaf.dtype)) for leaf in leaves} == {((3, DEEP, 1, 7, 4), "bfloat16")}


def test_cache_of_scanned_blocks_is_updated_in_place():
    """No instruction of a decoding step creates a second array of the cache's size."""
    model = Transformer(14, width=8, layers=DEEP, heads=2)
    cache, params = model.empty_cache(3, 50), drawn(model.parameter_shapes(), 0.5)

    def decode(cache):
        def step(column, cache):
            return model.apply(params, TOKENS[:, :1], PAD, cache, column)[1]

        return jax.lax.fori_loop(0, 50, step, cache)

    program = jax.jit(decode, donate_argnums=0).lower(cache).compile()
    held = 2 * cache[0].nbytes
    assert program.memory_analysis().temp_size_in_bytes < 0.75 * held


def test_bfloat16_parameters_have_float32_moments_and_round_once():
    """Adam's first step is 0.001957 by hand, just over half of the distance from 1 to 1 − 2⁻⁸.

    With moments in bfloat16, the step would be exactly half of the distance 2⁻⁸, and a parameter of
    1 would not change.
    """
    params = {"w": jnp.full(4, 1.0, jnp.bfloat16)}
    optimizer = optimizers.adam(0.001957, max_grad_norm=1.0)
    state = optimizer.init(params)

    def loss(params, samples):
        total = jnp.sum(params["w"].astype(jnp.float32)[None] * samples)
        return (Mean(total, jnp.float32(1.0)),), {}

    update = updates.gradient_update(loss, optimizer, num_microbatches=4)
    # In bfloat16, the sum 1 + 3/1024 + 3/1024 + 3/1024 would remain 1.
    samples = jnp.array([1.0, *[3 / 1024] * 3])[:, None] * jnp.ones((4, 4))
    after, opt_state, metrics = jax.jit(update)(params, state, samples, jax.random.key(0))
    assert_allclose(metrics["grad_norm"].value(), 2 * (1 + 9 / 1024) / 4, rtol=1e-6)
    assert after["w"].dtype == jnp.bfloat16
    assert_array_equal(after["w"].astype(jnp.float32), jnp.full(4, 1 - 2.0**-8))
    for each in (state, opt_state):
        assert {str(x.dtype) for x in jax.tree.leaves(each)} == {"float32", "int32"}


def test_shallow_model_keeps_its_initialization_by_key():
    """The matrices have the means of commit 0fc4288, in which each block had its own names."""
    model = Transformer(14, width=16, heads=4, mlp_width=24, lora=Lora(rank=2))
    variables = jax.jit(model.init)(jax.random.key(7), TOKENS, PAD)
    blocks, adapters = (variables[name]["blocks"] for name in ("params", "lora"))
    for path, expected in BEFORE.items():
        role, matrix = path
        found = blocks[role][matrix]["kernel"], adapters[role][matrix]["a"]
        for x, mean in zip(found, expected, strict=True):
            assert_allclose(np.abs(x).mean(axis=(1, 2)), mean, rtol=1e-5)


@pytest.mark.parametrize("depth", [2, DEEP])
def test_parameters_of_another_depth_are_refused(depth):
    """A missing block would otherwise be taken from the last block that exists."""
    model = Transformer(14, width=8, layers=depth, heads=2, mlp_width=12)
    params = drawn(model.parameter_shapes(), 0.5)
    for other in (depth - 1, depth + 1):
        with pytest.raises(AssertionError, match="Tree leaf"):
            model.clone(layers=other).apply(params, TOKENS, PAD)


def test_a_model_with_adapters_asks_for_them():
    params = drawn(Transformer(14, width=8, heads=2, mlp_width=12).parameter_shapes(), 0.5)
    model = Transformer(14, width=8, heads=2, mlp_width=12, lora=Lora(rank=2))
    with pytest.raises(flax.errors.ScopeCollectionNotFound, match="lora"):
        model.apply(params, TOKENS, PAD)
