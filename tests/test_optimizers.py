"""Step sizes over iterations; one flat vector or a leaf for each parameter."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_po import optimizers


def test_decay_counts_iterations():
    assert optimizers.decay(jnp.int32(7), 0) == 1.0
    np.testing.assert_allclose([optimizers.decay(jnp.int32(t), 10) for t in (0, 5, 10, 20)], [1.0, 0.5, 0.0, 0.0])


def test_flat_adam_equals_leafwise_adam():
    params = {"a": jnp.ones((2, 3)), "b": jnp.full(4, 2.0)}
    gradient = jax.tree.map(lambda x: 3.0 * x, params)
    flat = optimizers.adam(0.1, max_grad_norm=0.5)
    leafwise = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1e-5))
    got, _ = flat.update(gradient, flat.init(params), params)
    large = optimizers.adam(0.1, max_grad_norm=0.5, flat_up_to=9)  # of ten parameters
    assert [leaf.shape for leaf in jax.tree.leaves(flat.init(params))] == [(), (10,), (10,)]
    assert [leaf.shape for leaf in jax.tree.leaves(large.init(params))] == [(), (2, 3), (4,), (2, 3), (4,)]
    chex.assert_trees_all_close(got, large.update(gradient, large.init(params), params)[0], rtol=1e-6)
    want, _ = leafwise.update(gradient, leafwise.init(params), params)
    chex.assert_trees_all_close(got, want, rtol=1e-5)
