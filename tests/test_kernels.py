"""Tests kernels that are stored by outputs, or cut out of their stacks: decoding steps compute the
same results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import slow

from jaxrl_po.backend import Target
from jaxrl_po.distributions import MANY, Categorical
from jaxrl_po.language import Transformer, kernels, lora, sampling
from jaxrl_po.language.lora import Lora
from jaxrl_po.language.transformer import compiled_for

DEEP = Transformer(23, width=8, layers=5, heads=4, kv_heads=2, mlp_width=12)
UNLIKE = {
    "plain": {},
    "gemma": {"qk_norm": True, "post_norms": True, "qkv_bias": True, "windows": (0, 3, 0, 5, 2)},
    "tied and not gated": {"tied": True, "gated": False},
    "adapters": {"lora": Lora(2, targets=("query", "down"))},
    "shallow": {"layers": 3, "lora": Lora(2, targets=("query", "down"))},
    "bfloat16": {"dtype": jnp.dtype("bfloat16")},
}
PROMPT, PAD = jnp.array([[0, 3, 4], [5, 6, 7]], jnp.int32), jnp.array([1, 0], jnp.int32)


def model_and_params(name, seed=0):
    """Returns model and parameters far from an initial model, so that differences are visible."""
    model = DEEP.clone(**UNLIKE[name])
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jnp.asarray((x.ndim < 3) + 0.3 * generator.normal(size=x.shape), x.dtype),
        model.parameter_shapes(),
    )
    if "lora" not in params:
        return model, params
    adapters = {"lora": params["lora"]}
    return lora.over(model, {"params": params["params"]}), adapters


def step(model, params, *, prepared):
    """Returns logits of a decoding step after the prompts, and the step's cache."""
    logits, cache, pad = sampling.prefill(model, params, PROMPT, PAD, 4, group_size=2)
    token = jnp.argmax(logits, axis=-1)[:, None]
    if prepared:
        params = sampling.for_decoding(model, params, token.shape[0])
    return model.apply(params, token, pad, cache, 3)


@pytest.mark.parametrize("name", [slow("plain"), *(name for name in UNLIKE if name != "plain")])
def test_a_step_computes_the_same(name):
    model, params = model_and_params(name)
    prepared = jax.eval_shape(lambda: sampling.for_decoding(model, params, 4))
    added = kernels.APART if name == "shallow" else kernels.BY_OUTPUTS
    assert set(prepared) == {*params, added}
    one, other = jax.jit(
        lambda params: [step(model, params, prepared=prepared) for prepared in (False, True)]
    )(params)
    assert np.std(one[0]) > 0.1
    tolerance = {"bfloat16": 0.1, "shallow": 0.0}.get(name, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=tolerance), one, other)


@pytest.mark.parametrize("name", ["plain", "adapters"])
def test_seeds_side_by_side_compute_as_if_alone(name):
    each = [model_and_params(name, seed) for seed in range(3)]
    model = each[0][0]
    run = jax.jit(lambda params: step(model, params, prepared=True)[0])
    alone = np.stack([run(params) for _, params in each])
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(params for _, params in each))
    assert np.abs(alone[0] - alone[1]).max() > 0.01
    np.testing.assert_allclose(jax.jit(jax.vmap(run))(stacked), alone, atol=1e-5)


def test_many_rows_and_accelerators_keep_the_parameters():
    model, params = model_and_params("plain")
    assert model.for_decoding(params, kernels.FEW + 1) is params
    prepared = sampling.for_decoding(model, params, 1)
    assert sampling.for_decoding(model, prepared, 1) is prepared
    gpu = compiled_for(Target("gpu", devices=1, cores=8), model)
    assert gpu.for_decoding(params, 1) is params
    assert gpu.clone(layers=2).for_decoding(params, 1) is params
    assert compiled_for(None, gpu) is gpu


def test_few_actions_are_drawn_as_jax_draws_them():
    key = jax.random.key(3)
    logits = jax.random.normal(key, (40, 3)).at[:, 2].set(-jnp.inf)
    drawn = jax.jit(Categorical(logits).sample)(key)
    np.testing.assert_array_equal(drawn, jax.random.categorical(key, logits))


def test_many_actions_are_drawn_by_every_bit():
    key = jax.random.key(4)
    logits = jax.random.normal(key, (40, MANY + 5)).at[:, 2].set(-jnp.inf)
    drawn = jax.jit(Categorical(logits).sample)(key)
    bits = np.asarray(jax.random.bits(key, logits.shape, jnp.uint32), np.float64)
    gumbel = -np.log(-np.log1p(-(bits + 0.5) / 2.0**32))
    np.testing.assert_array_equal(drawn, np.argmax(logits + gumbel, axis=-1))


@pytest.mark.parametrize("actions", [3, MANY + 5])
def test_the_first_of_equal_actions_is_the_mode(actions):
    logits = jnp.zeros((2, actions)).at[1, jnp.array([1, actions - 1])].set(2.0)
    np.testing.assert_array_equal(Categorical(logits).mode(), [0, 1])


@pytest.mark.parametrize("actions", [3, MANY + 5])
def test_nonfinite_logits_give_action_in_range(actions):
    logits = jnp.zeros((2, actions)).at[0, 1].set(jnp.nan).at[1].set(-jnp.inf)
    drawn = jnp.stack([Categorical(logits).sample(jax.random.key(0)), Categorical(logits).mode()])
    assert ((drawn >= 0) & (drawn < actions)).all()
