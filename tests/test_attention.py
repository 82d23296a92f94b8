"""Tests that fused attention equals attention by two products, and is refused where no kernel
computes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from tables import cases

from jaxrl_po import language
from jaxrl_po.algorithms import trpo
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, attention, transformer
from jaxrl_po.language.tasks import addition

KERNELS = {
    "splash": functools.partial(attention.splash, interpret=True),
    # Computes cuDNN's attention in plain XLA operations.
    "cudnn": functools.partial(attention.cudnn, by="xla"),
}
CASES = {
    # Cases: heads, key heads, positions with outputs, columns, window, and the rounding of the
    # type.
    "grouped heads, last positions": (4, 2, 20, 140, 0, "float32", 1e-5),
    "window, two blocks of columns": (2, 1, 140, 140, 9, "bfloat16", 2e-2),
}
SIZE, SCALE = 8, 0.4


def drawn(heads, kv_heads, read, columns, dtype):
    """Returns queries, keys, values, and a cotangent of the output; the last of three rows is
    padding."""
    generator = np.random.default_rng(0)
    shapes = [(3, read, heads, SIZE), *[(3, kv_heads, columns, SIZE)] * 2, (3, read, heads, SIZE)]
    return [jnp.asarray(generator.normal(size=shape), dtype) for shape in shapes]


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_kernel_is_the_attention_of_two_products(kernel, case):
    """Values and gradients agree; where all positions are padding, both are finite."""
    heads, kv_heads, read, columns, window, dtype, rounding = case
    *qkv, cotangent = drawn(heads, kv_heads, read, columns, dtype)
    pad = jnp.array([0, 7, columns])
    places = columns - read + np.arange(read)
    behind = places[:, None] - np.arange(columns)
    sees = (behind >= 0) & (behind < (window or columns))
    mask = jnp.asarray(sees[None] & (np.arange(columns) >= np.asarray(pad)[:, None])[:, None])
    real = jnp.asarray(places >= np.asarray(pad)[:, None])[:, :, None, None]

    @functools.partial(jax.jit, static_argnums=0)
    def both(kernel, *qkv):
        sight = attention.AttentionMask(mask, pad, window, (window,), kernel)
        out, pull = jax.vjp(lambda *qkv: attention.attend(qkv, sight, SCALE), *qkv)
        return out, *pull(jnp.where(real, cotangent, 0)), *pull(cotangent)

    (out, *gradients), (expected, *expected_gradients) = both(kernel, *qkv), both(None, *qkv)
    assert all(bool(jnp.isfinite(x).all()) for x in (out, *gradients))
    pairs = zip(
        (jnp.where(real, out, 0), *gradients[:3]),
        (jnp.where(real, expected, 0), *expected_gradients[:3]),
        strict=True,
    )
    for x, reference in pairs:
        assert x.dtype == jnp.dtype(dtype)
        size = float(jnp.abs(reference).max())
        assert_allclose(
            np.asarray(x, np.float32), np.asarray(reference, np.float32), atol=rounding * size
        )


@pytest.mark.slow
@cases("layers", 2, 5, ids=["unrolled", "scanned"])
def test_model_with_several_windows_uses_the_kernel(layers, monkeypatch):
    """Outputs and gradients are the same, with prompts computed once per group where possible; a
    pass with a cache has no kernel."""
    model = Transformer(
        7, width=16, layers=layers, heads=4, kv_heads=2, windows=(0, 3, 0, 4, 3)[:layers]
    )
    generator = np.random.default_rng(0)
    prompt, tokens = (
        jnp.asarray(generator.integers(7, size=shape), jnp.int32) for shape in ((2, 4), (6, 3))
    )
    pad, reading = jnp.array([1, 0]), {"prompt": prompt}
    if not model.scanned:
        tokens = jnp.concatenate([jnp.repeat(prompt, 3, axis=0), tokens], axis=1)
        pad, reading = jnp.repeat(pad, 3), {"last": 4}
    params = model.init(jax.random.key(0), tokens[:, :1], jnp.zeros(6, jnp.int32))

    def total(params, model):
        return jnp.sin(model.apply(params, tokens, pad, **reading)[0]).sum()

    expected = jax.jit(jax.grad(total), static_argnums=1)(params, model)
    calls = []

    def kernel(qkv, pad, **options):
        calls.append(options["window"])
        return KERNELS["cudnn"](qkv, pad, **options)

    monkeypatch.setattr(transformer, "kernel_for", lambda *target: kernel)
    fused = model.clone(fused_attention=True)
    found = jax.jit(jax.grad(total), static_argnums=1)(params, fused)
    assert set(calls) == set(model.windows)
    jax.tree.map(lambda x, y: assert_allclose(x, y, rtol=1e-4, atol=1e-5), found, expected)
    calls.clear()
    jax.eval_shape(fused.apply, params, tokens, jnp.zeros(6, jnp.int32), fused.empty_cache(6, 9))
    assert not calls


TPU, GPU = Target("tpu", 1, 1), Target("gpu", 1, 1)
TASK = addition(1)


def problem(target, **switches):
    sizes = {"vocabulary": TASK.tokenizer.size, "width": 16, "layers": 1, "heads": 2}
    model = Transformer(**sizes, fused_attention=True, **switches)
    return language.make_problem(TASK, model, num_prompts=2, group_size=2, target=target)


@cases(
    "target, switches, said",
    (Target("cpu", 1, 1), {}, "a CPU has no such kernel"),
    (TPU, {"dtype": jnp.dtype("float64")}, "dtype must be float32 or bfloat16, got float64"),
    (TPU, {"constrain": lambda x: x}, "shard_params and a model axis"),
    (GPU, {}, "dtype must be bfloat16 .* got float32 and 8"),
    (GPU, {"dtype": jnp.dtype("bfloat16"), "head_size": 12}, "up to 128, got bfloat16 and 12"),
    (GPU, {"dtype": jnp.dtype("bfloat16"), "head_size": 256}, "got bfloat16 and 256"),
)
def test_what_no_kernel_computes_is_refused(target, switches, said):
    with pytest.raises(ConfigError, match=f"^fused_attention: must be left out here: .*{said}"):
        problem(target, **switches)


def test_each_target_has_its_kernel_except_natural_steps():
    made = problem(TPU)
    shapes = jax.eval_shape(made.init, jax.random.key(0))
    batch = jax.eval_shape(made.collect, *shapes, jax.random.key(0))[1]
    traced = str(jax.make_jaxpr(made.apply)(shapes[0], batch.inputs))
    assert traced.count("pallas_call") == 1
    assert "f32[4,2,128,8]" in traced  # rows of six columns are padded to 128, not further
    with jax.default_matmul_precision("highest"):
        assert not problem(TPU).log_prob_matches_sampler
    half = Transformer(7, dtype=jnp.dtype("bfloat16"), fused_attention=True)
    assert half.clone(target=GPU).kernel is attention.cudnn
    assert half.clone(target=Target("cpu", 1, 1)).kernel is None
    with pytest.raises(ConfigError, match="fused_attention: must be left out with natural steps"):
        trpo.make(trpo.Config(), made)
