"""Tests the transformer: causality, padding, the cache, grouped queries, the effect of each
switch."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_po.language import Transformer
from jaxrl_po.language.rope import Rope, frequencies, rotate, turns

VOCABULARY, LENGTH = 7, 6
PAD = jnp.array([0, 2, 1])
SIZES = {"vocabulary": VOCABULARY, "width": 16, "layers": 2, "heads": 4, "mlp_width": 24}
UNLIKE = {
    "plain": {},
    "two groups, GELU": {"kv_heads": 2, "gated": False},
    "one group, tied": {"kv_heads": 1, "tied": True},
}
SWITCHES = pytest.mark.parametrize("switches", UNLIKE.values(), ids=UNLIKE)


def tokens_of(batch=3, length=LENGTH):
    return jnp.asarray(
        np.random.default_rng(0).integers(VOCABULARY, size=(batch, length)), jnp.int32
    )


def build(**switches):
    """Builds a model with parameters of order one, far from uniform, so that differences are
    visible."""
    model = Transformer(**(SIZES | switches))
    generator = np.random.default_rng(1)
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_of(), PAD)

    def draw(path, leaf):
        scale = 1.0 if path[-1].key == "scale" else 2.0 / math.sqrt(leaf.shape[-2])
        return jnp.asarray(scale * generator.normal(size=leaf.shape), leaf.dtype)

    return model, jax.tree_util.tree_map_with_path(draw, shapes)


def logits_of(model, params, tokens, pad=PAD, **options):
    return jax.jit(functools.partial(model.apply, **options))(params, tokens, pad)[0]


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_no_gradient_from_the_future_nor_from_padding(kv_heads):
    """The derivative d logits[n] / d embedding of token m is zero for m > n and m < pad, and
    nonzero elsewhere."""
    model, params = build(vocabulary=LENGTH * VOCABULARY, kv_heads=kv_heads)
    # Every position has its own rows of the embedding, so the gradient shows which position was
    # used.
    tokens = jnp.arange(LENGTH)[None, :] * VOCABULARY + tokens_of(batch=1)
    pad = jnp.array([2])
    projection = jnp.asarray(np.random.default_rng(2).normal(size=LENGTH * VOCABULARY), jnp.float32)

    def outputs(embedding):
        inside = {"params": params["params"] | {"embedding": embedding}}
        return model.apply(inside, tokens, pad)[0][0] @ projection

    jacobian = jax.jit(jax.jacrev(outputs))(params["params"]["embedding"])
    reads = np.abs(jacobian).sum(axis=2)[:, np.asarray(tokens[0])] > 0
    n, m = np.meshgrid(np.arange(LENGTH), np.arange(LENGTH), indexing="ij")
    real = n >= 2  # padded positions are never used
    assert_array_equal(reads[real], ((m <= n) & (m >= 2))[real])


@SWITCHES
def test_cached_steps_equal_one_pass(switches):
    model, params = build(**switches)
    tokens, prompt = tokens_of(), 3

    @jax.jit
    def begin(params):
        whole = model.apply(params, tokens, PAD)[0]
        cache = model.empty_cache(3, LENGTH)
        return whole, *model.apply(params, tokens[:, :prompt], PAD, cache, 0)

    step = jax.jit(lambda tokens, cache, start: model.apply(params, tokens, PAD, cache, start))
    whole, logits, cache = begin(params)
    pieces = [logits]
    for column in range(prompt, LENGTH):
        logits, cache = step(tokens[:, column : column + 1], cache, column)
        pieces.append(logits)
    real = np.arange(LENGTH)[None, :] >= np.asarray(PAD)[:, None]
    assert_allclose(np.concatenate(pieces, axis=1)[real], whole[real], rtol=1e-4, atol=1e-5)


def test_cache_keeps_key_value_heads_only():
    model, _ = build(kv_heads=2)
    assert {x.shape for x in jax.tree.leaves(model.empty_cache(3, LENGTH))} == {(3, 2, LENGTH, 4)}
    assert len(model.empty_cache(3, LENGTH)) == 2


def test_padding_does_not_matter():
    """Left padding does not change the outputs of a prompt, whatever the padding tokens are."""
    model, params = build(layers=1)
    bare = logits_of(model, params, tokens_of(batch=1, length=4), jnp.array([0]))
    for filler in (0, 5):
        padded = jnp.pad(tokens_of(batch=1, length=4), ((0, 0), (2, 0)), constant_values=filler)
        assert_allclose(
            logits_of(model, params, padded, jnp.array([2]))[:, 2:], bare, rtol=1e-4, atol=1e-5
        )


def test_position_matters():
    """Without positions, attention would not distinguish the order of two earlier tokens."""
    model, params = build(layers=1)
    tokens = jnp.array([[3, 4, 5], [4, 3, 5]])
    one, swapped = logits_of(model, params, tokens, jnp.zeros(2, jnp.int32))[:, 2]
    assert float(jnp.abs(one - swapped).max()) > 1e-2


@pytest.mark.parametrize(
    ("switches", "layers"),
    [
        pytest.param(
            switches,
            layers,
            id=f"{name}-{layers}",
            marks=[] if layers == 2 or name == "two groups, GELU" else pytest.mark.slow,
        )
        for name, switches in UNLIKE.items()
        for layers in (0, 1, 2)
    ],
)
def test_the_last_outputs_alone_are_those_of_all(switches, layers):
    """Values and gradients agree; the cache holds the keys and values of every position."""
    model, params = build(**switches, layers=layers)
    tokens, weights = (
        tokens_of(),
        jnp.asarray(np.random.default_rng(3).normal(size=(3, 2, VOCABULARY)), jnp.float32),
    )

    def outputs(params, last):
        logits, cache = model.apply(
            params, tokens, PAD, model.empty_cache(3, LENGTH) if layers else None, last=last
        )
        return (weights * logits[:, -2:]).sum(), (logits, cache)

    gradient = jax.grad(outputs, has_aux=True)
    (alone, (logits, cache)), (whole, (all_logits, whole_cache)) = jax.jit(
        lambda params: [gradient(params, last) for last in (2, 0)]
    )(params)
    assert logits.shape == (3, 2, VOCABULARY)
    assert_allclose(logits, all_logits[:, -2:], rtol=1e-5, atol=1e-5)
    chex.assert_trees_all_close((alone, cache), (whole, whole_cache), rtol=1e-5, atol=1e-5)


def test_grouped_queries_share_their_keys():
    """One key/value head, copied to all four query heads, equals the model with four heads."""
    grouped, params = build(kv_heads=1, layers=1)
    full, _ = build(layers=1)
    copied = jax.tree.map(lambda x: x, params)
    for name in ("key", "value"):
        kernel = params["params"]["blocks"]["attention"][name]["kernel"]
        copied["params"]["blocks"]["attention"][name]["kernel"] = jnp.tile(kernel, (1, 4))
    assert_allclose(
        logits_of(grouped, params, tokens_of()),
        logits_of(full, copied, tokens_of()),
        rtol=1e-4,
        atol=1e-5,
    )


def parameter_count(**switches):
    model = Transformer(**(SIZES | switches))
    shapes = jax.eval_shape(model.init, jax.random.key(0), tokens_of(), PAD)
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


def test_rotation_by_hand():
    """For C = 4, the pair (x0, x2) turns by the position, the pair (x1, x3) by position / 100."""
    x = jnp.array([1.0, 2.0, 3.0, 4.0])
    turned = rotate(jnp.broadcast_to(x, (1, 4, 1, 4)), *turns(4, 4))[0, :, 0]
    assert_allclose(turned[0], x)
    c, s, c100, s100 = math.cos(3.0), math.sin(3.0), math.cos(0.03), math.sin(0.03)
    want = [c - 3 * s, 2 * c100 - 4 * s100, s + 3 * c, 2 * s100 + 4 * c100]
    assert_allclose(turned[3], want, rtol=1e-5)


def test_rotation_depends_on_the_distance_alone():
    """The product ⟨R_m q, R_n k⟩ is a function of m − n."""
    q, k = (
        rotate(jnp.broadcast_to(x, (1, 16, 1, 8)), *turns(16, 8))
        for x in jax.random.normal(jax.random.key(0), (2, 8))
    )

    def product(m, n):
        return float(jnp.sum(q[0, m] * k[0, n]))

    assert math.isclose(product(5, 2), product(13, 10), rel_tol=1e-4)
    assert not math.isclose(product(5, 2), product(5, 4), rel_tol=1e-2)


@pytest.mark.parametrize("tied", [False, True])
def test_bfloat16_computes_and_keeps_float32_parameters_and_logits(tied):
    model, params = build(layers=1, tied=tied)
    low, low_params = build(layers=1, tied=tied, dtype=jnp.dtype("bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(low_params)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(low.empty_cache(1, 2))} == {jnp.dtype("bfloat16")}
    logits, want = logits_of(low, low_params, tokens_of()), logits_of(model, params, tokens_of())
    assert logits.dtype == jnp.float32
    error = float(jnp.abs(logits - want).max() / jnp.abs(want).max())
    assert 0.0 < error < 0.1  # the numbers are rounded to 8 bits, but the function is the same


def test_a_fresh_policy_is_close_to_uniform():
    model = Transformer(**SIZES)
    log_probs = jax.nn.log_softmax(
        logits_of(model, jax.jit(model.init)(jax.random.key(0), tokens_of(), PAD), tokens_of())
    )
    entropy = float(-(jnp.exp(log_probs) * log_probs).sum(axis=-1).mean())
    assert 0.99 * math.log(VOCABULARY) < entropy < math.log(VOCABULARY)


def test_remat_keeps_less_and_changes_nothing_else():
    """Parameters, loss and gradient agree, and the backward pass stores less."""
    tokens = tokens_of(length=32)
    model, params = build(mlp_width=128)
    again, again_params = build(mlp_width=128, remat=True)
    jax.tree.map(assert_array_equal, params, again_params)

    def loss(model, params):
        return jnp.square(model.apply(params, tokens, PAD)[0]).mean()

    def kept(model):
        backward = jax.eval_shape(
            lambda params: jax.vjp(functools.partial(loss, model), params)[1], params
        )
        return sum(leaf.size for leaf in jax.tree.leaves(backward))

    want, got = (
        jax.jit(jax.value_and_grad(functools.partial(loss, each)))(params)
        for each in (model, again)
    )
    chex.assert_trees_all_close(got, want, rtol=2e-3, atol=1e-4)
    assert kept(again) < 0.5 * kept(model)


def test_stretched_frequencies_by_hand():
    """A context of 1885 tokens is 300, 30, 3 and .3 wavelengths of the four frequencies."""
    plain = np.array([1.0, 0.1, 0.01, 0.001])
    assert_allclose(frequencies(8), plain)
    assert_allclose(frequencies(8, Rope(factor=8.0)), plain / 8)
    stretched = frequencies(8, Rope(factor=8.0, context=1885))
    assert_allclose(stretched / plain, [1.0, 1.0, 2 / 3 + 1 / 24, 1 / 8], rtol=1e-4)
