"""Tests that a batch without an unmasked slot moves neither parameters nor optimizer state."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import tabular_problem

from jaxrl_po.algorithms import a2c, dapo, dr_grpo, ppo_penalty, reinforce, sft, trpo

STEPS = {"num_minibatches": 2, "num_microbatches": 2}
FIT = {"value_epochs": 1, "value_minibatches": 2}
CONFIGS = {
    dr_grpo: dr_grpo.Config(**STEPS),
    dapo: dapo.Config(**STEPS),
    sft: sft.Config(**STEPS),
    ppo_penalty: ppo_penalty.Config(num_epochs=1, **STEPS),
    a2c: a2c.Config(),
    reinforce: reinforce.Config(**FIT),
    trpo: trpo.Config(**FIT),
}
TO_THE_END = (dr_grpo, ppo_penalty, trpo)


@pytest.mark.parametrize(
    "module",
    [m if m in TO_THE_END else pytest.param(m, marks=pytest.mark.slow) for m in CONFIGS],
    ids=lambda module: module.__name__.rsplit(".", 1)[-1],
)
def test_nothing_scored_moves_nothing(module):
    """Neither Adam's momentum from the previous update nor the penalty's weight moves
    parameters."""
    problem = tabular_problem(num_prompts=8, group_size=4, dense=False)
    learner = module.make(CONFIGS[module], problem)

    @jax.jit
    def run(key):
        state, batch = learner.sample(learner.init(key))
        state, _ = learner.update(state, batch)
        empty = batch._replace(mask=jnp.zeros_like(batch.mask))
        return state, *learner.update(state, empty)

    before, after, metrics = run(jax.random.key(0))
    moved = ("params", "opt_state", "kl_coefficient")
    chex.assert_trees_all_equal(*([getattr(s, name) for name in moved] for s in (before, after)))
    moments = jax.tree.leaves(before.opt_state)
    assert any(np.any(leaf) for leaf in moments if leaf.dtype == jnp.float32)
    for name in ("updates", "skipped"):
        assert name not in metrics or float(metrics[name].value()) == 0.0
