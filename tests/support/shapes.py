"""Replaces compilation by tracing, for runs whose numbers do not matter.

Files, flags, messages and shapes of a traced run are the same as in a real run; its numbers have no
meaning.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np


class Traced:
    """Stand-in for a compiled program, which returns zeros with the traced shapes."""

    def __init__(self, function, *arguments, out_shardings=None, **_):
        self.shapes = jax.eval_shape(function, *arguments)
        one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self.output_shardings = jax.tree.map(
            lambda x: getattr(x, "sharding", None) or one, self.shapes
        )

    def __call__(self, *_):
        return jax.tree.map(zeros, self.shapes)

    def memory_analysis(self):
        return None


def zeros(shape):
    """Returns zeros of a shape, which may be a shape of PRNG keys."""
    if not jnp.issubdtype(shape.dtype, jax.dtypes.prng_key):
        return jnp.asarray(np.zeros(shape.shape, shape.dtype))
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(shape.shape, shape.dtype))
    return jax.random.wrap_key_data(jnp.asarray(np.zeros(data.shape, data.dtype)))


def trace_only(monkeypatch):
    """Replaces compilation, so that every program of a run is only traced."""
    from jaxrl_po.run.devices import compilation

    compiled = compilation.compiled
    for module in list(sys.modules.values()):
        if getattr(module, "compiled", None) is compiled:
            monkeypatch.setattr(module, "compiled", Traced)
