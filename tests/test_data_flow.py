"""Tests the detector of functions that mix rows, on functions whose behaviour is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.algorithms.data_flow import is_row_wise

ROW_WISE = {
    "softmax": lambda x: jax.nn.log_softmax(x),
    "quantile of a row": lambda x: x * (x < jnp.quantile(x, 0.5, axis=1, keepdims=True)),
    "one element of a row": lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1)[:, None], 1)[:, 0],
    "rolled within": lambda x: jnp.roll(x, 1, axis=1),
    "padded within": lambda x: jnp.pad(x, ((0, 0), (1, 0)))[:, :-1],
    "sums within": lambda x: jnp.cumsum(x[:, ::-1], axis=1),
    "transposed": lambda x: (x.T - x.T.mean(0, keepdims=True)).T,
    "product of rows": lambda x: jnp.einsum("nt,nt->n", x, x),
    "product with a matrix": lambda x: x @ jnp.eye(4),
    "blocks of a row": lambda x: x.reshape(-1, 2, 2).sum(2),
    "stacked": lambda x: jnp.stack([x, x], 1).sum(1),
    "positions in a row": lambda x: x * jnp.arange(4.0)[None] * np.arange(4.0)[None],
    "table": lambda x: jnp.arange(4.0)[jnp.argmax(x, 1)],
    "differentiable twice": lambda x: jax.nn.relu(x) + jax.nn.softplus(x),
    "row by row": lambda x: jax.vmap(lambda row: jnp.sort(row) + jax.lax.top_k(row, 4)[0])(x),
    "NaN": lambda x: jnp.where(x > 0, x, jnp.nan),
    "constant": lambda x: jnp.ones_like(x),
    "prints": lambda x: (jax.debug.print("{}", x.mean()), x)[1],
    "prints in order": lambda x: (jax.debug.print("{}", x, ordered=True), x)[1],
    "calls back": lambda x: jax.jit(lambda x: (jax.debug.callback(id, x), x)[1])(x),
}
MIXING = {
    "mean": lambda x: x - x.mean(0, keepdims=True),
    "mean, named": lambda x: jax.vmap(lambda r: r - jax.lax.pmean(r, "rows"), axis_name="rows")(x),
    "first rows": lambda x: x - x[:1],
    "first row for each": lambda x: x[jnp.zeros(x.shape[0], int)],
    "other order": lambda x: x[jnp.argsort(x[:, 0])],
    "reversed": lambda x: x[::-1],
    "shifted": lambda x: jax.lax.pad(x, 0.0, ((1, -1, 0), (0, 0, 0))),
    "sorted": lambda x: jnp.sort(x, axis=0),
    "sums": lambda x: jnp.cumsum(x, axis=0),
    "largest": lambda x: jax.lax.top_k(x.T, x.shape[0])[0].T,
    "pairs": lambda x: (x[:, None] - x[None]).sum(1),
    "other shape": lambda x: x.reshape(4, -1).T,
    "blocks": lambda x: x - jnp.repeat(x.reshape(-1, 3, 4).mean(1), 3, axis=0),
    "one row replaced": lambda x: x.at[0].set(0.0),
    "number of rows": lambda x: x / x.shape[0],
    "number of the row": lambda x: x * jnp.arange(x.shape[0])[:, None],
    "number of the row, constant": lambda x: x * np.arange(x.shape[0])[:, None],
    "number of rows, constant": lambda x: x * np.full((1, 4), 1.0 / x.shape[0]),
    "another program": lambda x: x + 1.0 if x.shape[0] == 6 else x,
    "another function": lambda x: jnp.sin(x) if x.shape[0] == 6 else jnp.cos(x),
    "unknown": lambda x: jax.lax.while_loop(lambda x: (x < 1).any(), lambda x: x + 1, x),
    "host": lambda x: jax.pure_callback(lambda x: x, x, x),
    "host, nothing read": lambda x: (jax.experimental.io_callback(id, None, x), x)[1],
    "random": lambda x: x + jax.random.normal(jax.random.key(0), x.shape),
}


def judged(function, rows=6):
    programs = [
        jax.make_jaxpr(function)(jax.ShapeDtypeStruct((n, 4), jnp.float32))
        for n in (rows, 2 * rows)
    ]
    return is_row_wise(tuple(programs), (rows, 2 * rows))


@pytest.mark.parametrize("name", ROW_WISE)
def test_operations_within_a_row_keep_rows_apart(name):
    assert judged(ROW_WISE[name])
    assert judged(ROW_WISE[name], rows=4)  # the input has as many rows as a row has elements


@pytest.mark.parametrize("name", MIXING)
def test_operations_across_rows_mix_them(name):
    assert not judged(MIXING[name])


def test_one_result_that_mixes_is_enough():
    assert not judged(lambda x: (x, x - x.mean(0, keepdims=True)))


def test_numbers_of_a_sweep_are_constants():
    found = []
    jax.vmap(lambda weight: (found.append(judged(lambda x: weight * x)), weight)[1])(jnp.ones(2))
    assert found == [True]
