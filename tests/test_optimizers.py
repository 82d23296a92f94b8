"""Step sizes over iterations; one flat vector or a leaf for each parameter."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import tabular_problem

from jaxrl_po import optimizers
from jaxrl_po.algorithms import a2c, grpo, ppo


def test_decay_counts_iterations():
    assert optimizers.decay(jnp.int32(7), 0) == 1.0
    np.testing.assert_allclose(
        [optimizers.decay(jnp.int32(t), 10) for t in (0, 5, 10, 20)], [1.0, 0.5, 0.0, 0.0]
    )


def test_flat_adam_equals_leafwise_adam():
    params = {"a": jnp.ones((2, 3)), "b": jnp.full(4, 2.0)}
    gradient = jax.tree.map(lambda x: 3.0 * x, params)
    flat = optimizers.adam(0.1, max_grad_norm=0.5)
    leafwise = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1e-5))

    def updated(optimizer):
        return jax.jit(lambda: optimizer.update(gradient, optimizer.init(params), params)[0])()

    got = updated(flat)
    large = optimizers.adam(0.1, max_grad_norm=0.5, flat_up_to=9)  # of ten parameters
    assert [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(flat.init, params))] == [
        (),
        (10,),
        (10,),
    ]
    assert [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(large.init, params))] == [
        (),
        (2, 3),
        (4,),
        (2, 3),
        (4,),
    ]
    chex.assert_trees_all_close(got, updated(large), rtol=1e-6)
    chex.assert_trees_all_close(got, updated(leafwise), rtol=1e-5)


MANY = {"num_epochs": 2, "num_minibatches": 2}


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (a2c, a2c.Config(decay_iterations=8)),
        (ppo, ppo.Config(decay_iterations=8, **MANY)),
        (grpo, grpo.Config(decay_iterations=8, warm_up_iterations=4, **MANY)),
    ],
    ids=["a2c", "ppo", "grpo"],
)
def test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps(module, config):
    """An optimizer that always proposes 1 for each parameter shows the scale of every step."""
    always = optax.GradientTransformation(
        lambda params: (), lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s)
    )
    problem = tabular_problem(num_prompts=4, group_size=4 if module is grpo else 1)
    learner = module.make(config, problem, optimizer=always)
    state = learner.init(jax.random.key(0))
    step, gradient_steps = jax.jit(learner.step), 1 if module is a2c else 4
    for k in (0, 1, 3, 4, 6, 9):
        after, metrics = step(state._replace(step=jnp.int32(k)))
        assert float(metrics["updates"].value()) == 1.0
        scale = max(0.0, 1 - k / 8) * (min(1.0, (k + 1) / 4) if module is grpo else 1.0)
        for new, old in zip(
            *(jax.tree.leaves(s.params.policy) for s in (after, state)), strict=True
        ):
            np.testing.assert_allclose(new - old, gradient_steps * scale, rtol=1e-5, atol=1e-5)
