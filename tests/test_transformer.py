"""Tests the transformer: sizes, precision, the first policy, stretched RoPE, memory under remat.

`test_pretrained` compares its logits with `transformers`, and `test_sampling` its cache with passes
over whole rows.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose
from probes import drawn
from tables import cases

from jaxrl_po.language import Transformer
from jaxrl_po.language.rope import Rope, frequencies

VOCABULARY = 7
TOKENS = jnp.asarray(np.random.default_rng(0).integers(VOCABULARY, size=(3, 32)), jnp.int32)
PAD = jnp.array([0, 2, 1])
MODEL = Transformer(VOCABULARY, width=16, layers=2, heads=4, mlp_width=24)


def logits_of(model, params):
    return jax.jit(model.apply)(params, TOKENS, PAD)[0]


def parameter_count(**switches):
    shapes = MODEL.clone(**switches).parameter_shapes()
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def test_parameter_counts():
    """The sizes are D = 16, F = 24, V = 7, 2 layers: V·D = 112 in, 112 out, norms 5·16 = 80.

    A layer has 4·D² = 1024 parameters in attention and 3·D·F = 1152 in its MLP.
    """
    assert parameter_count() == 112 + 112 + 80 + 2 * (1024 + 1152) == 4656
    assert parameter_count(tied=True) == 4656 - 112
    assert parameter_count(gated=False) == 4656 - 2 * 16 * 24
    # keys and values have width 4 instead of 16
    assert parameter_count(kv_heads=1) == 4656 - 2 * 2 * 16 * 12
    assert parameter_count(outputs=1) == 4656 - 112 + 16
    # A critic does not have a vocabulary that could be tied.
    assert parameter_count(outputs=1, tied=True) == parameter_count(outputs=1)


@cases("tied", False, True)
def test_bfloat16_computes_and_keeps_float32_parameters_and_logits(tied):
    model = MODEL.clone(layers=1, tied=tied)
    low = model.clone(dtype=jnp.dtype("bfloat16"))
    params = drawn(low.parameter_shapes(), 0.5)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(low.empty_cache(1, 2))} == {jnp.dtype("bfloat16")}
    logits, want = logits_of(low, params), logits_of(model, params)
    assert logits.dtype == jnp.float32
    error = float(jnp.abs(logits - want).max() / jnp.abs(want).max())
    assert 0.0 < error < 0.1  # the numbers are rounded to 8 bits, but the function is the same


def test_a_fresh_policy_is_close_to_uniform():
    params = jax.jit(MODEL.init)(jax.random.key(0), TOKENS, PAD)
    log_probs = jax.nn.log_softmax(logits_of(MODEL, params))
    entropy = float(-(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean())
    assert 0.99 * math.log(VOCABULARY) < entropy < math.log(VOCABULARY)


def test_the_backward_pass_of_remat_stores_less():
    def kept(model):
        def loss(params):
            return jnp.square(model.apply(params, TOKENS, PAD)[0]).mean()

        shapes = model.parameter_shapes()
        backward = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], shapes)
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    model = MODEL.clone(mlp_width=128)
    assert kept(model.clone(remat=True)) < 0.5 * kept(model)


def test_stretched_frequencies_by_hand():
    """A context of 1885 tokens is 300, 30, 3 and .3 wavelengths of the four frequencies."""
    plain = np.array([1.0, 0.1, 0.01, 0.001])
    assert_allclose(frequencies(8), plain)
    assert_allclose(frequencies(8, Rope(factor=8.0)), plain / 8)
    stretched = frequencies(8, Rope(factor=8.0, context=1885))
    assert_allclose(stretched / plain, [1.0, 1.0, 2 / 3 + 1 / 24, 1 / 8], rtol=1e-4)
