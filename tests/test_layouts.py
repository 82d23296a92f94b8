"""Checkpoints of earlier versions are read: blocks apart, moments leaf by leaf or in one vector."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import optimizers
from jaxrl_po.language import Transformer
from jaxrl_po.run.store import checkpoint
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.types import ActorCritic

SEEDS, LAYERS = 2, 11  # of which 10 comes before 2 by name


class State(NamedTuple):
    params: ActorCritic
    opt_state: Any
    reference_params: Any


def apart(params):
    """The parameters of one seed as they were named before 0.3."""
    own = dict(params["params"])
    blocks = own.pop("blocks")
    for number in range(LAYERS):
        for module, tree in blocks.items():
            own[f"{module}_{number}"] = jax.tree.map(lambda x, number=number: x[number], tree)
    return {"params": own}


def states(trained, flat_up_to):
    """One Adam step on random gradients, of the old parameters and of the new ones."""
    sizes = {"width": 4, "layers": LAYERS, "heads": 2, "mlp_width": 6, "gated": False}
    policy = Transformer(7, tied=True, **sizes)
    value = Transformer(7, outputs=1, **sizes)
    optimizer = optimizers.adam(0.1, max_grad_norm=1e9, flat_up_to=flat_up_to)

    shapes = ActorCritic(policy.parameter_shapes(), value.parameter_shapes())
    generator = np.random.default_rng(0)

    def drawn():
        return jax.tree.map(
            lambda x: jnp.asarray(generator.normal(size=(SEEDS, *x.shape)), x.dtype), shapes
        )

    def one(params, gradient):
        its = trained(params)
        opt_state = optimizer.update(trained(gradient), optimizer.init(its), its)[1]
        return State(params, opt_state, params.policy)

    def older(tree):
        return ActorCritic(apart(tree.policy), apart(tree.value))

    params, gradient = drawn(), drawn()
    new = jax.jit(jax.vmap(one))(params, gradient)
    old = jax.jit(jax.vmap(lambda *both: one(*map(older, both))))(params, gradient)
    return old, new


@pytest.mark.parametrize("flat_up_to", [0, optimizers.FLAT_UP_TO], ids=["leaves", "vector"])
@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(lambda params: params.policy, id="policy", marks=pytest.mark.slow),
        pytest.param(lambda params: params.value, id="value", marks=pytest.mark.slow),
        pytest.param(lambda params: params, id="both"),
    ],
)
def test_a_state_with_blocks_apart_is_read(tmp_path, trained, flat_up_to):
    old, new = states(trained, flat_up_to)
    with Store(tmp_path / "latest") as store:
        store.save(3, old)
        iteration, found = store.load(new)
    assert iteration == 3
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8), found, new)
    policy = jax.tree.map(lambda x: x[1], new.params.policy)
    alone = checkpoint.peek_policy(tmp_path / "latest", policy, seed_index=1)
    jax.tree.map(np.testing.assert_allclose, alone, policy)


def test_modules_of_ones_own_with_the_same_names_stay_apart(tmp_path):
    """As Flax names `self.mlp = [Dense(3), Dense(3)]`."""
    params = {"params": {f"mlp_{i}": {"bias": jnp.full((SEEDS, 3), i * 1.0)} for i in range(2)}}
    state = State(ActorCritic(params), (), ())
    with Store(tmp_path / "latest") as store:
        store.save(1, state)
        _, found = store.load(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)
