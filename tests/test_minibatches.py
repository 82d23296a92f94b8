"""Dealing rows out to minibatches."""

import jax
import numpy as np
import pytest

from jaxrl_po import minibatches
from jaxrl_po.config import ConfigError


@pytest.mark.parametrize(
    ("rows", "num_minibatches"), [(64, 4), (512, 4), (20480, 4), (12, 3), (7, 7), (128, 1)]
)
def test_each_row_is_dealt_once(rows, num_minibatches):
    order = minibatches.shuffle(jax.random.key(0), rows, num_minibatches)
    assert order.shape == (num_minibatches, rows // num_minibatches)
    assert sorted(order.ravel().tolist()) == list(range(rows))


def test_shuffles_differ_between_keys_and_are_uniform():
    orders = jax.vmap(lambda key: minibatches.shuffle(key, 16, 4))(
        jax.random.split(jax.random.key(0), 4000)
    )
    minibatch_of_row_3 = np.asarray((orders == 3).any(-1).argmax(-1))
    counts = np.bincount(minibatch_of_row_3, minlength=4)
    # Binomial(4000, 1/4): standard deviation 27; five of them.
    assert np.abs(counts - 1000).max() < 137


def test_permutation_is_uniform():
    perms = jax.vmap(lambda key: minibatches.permutation(key, 5))(
        jax.random.split(jax.random.key(1), 6000)
    )
    _, counts = np.unique(np.asarray(perms), axis=0, return_counts=True)
    assert len(counts) == 120
    # Chi-square with 119 degrees of freedom: mean 119, standard deviation 15.4.
    assert ((counts - 50.0) ** 2 / 50.0).sum() < 119 + 5 * 15.4


@pytest.mark.parametrize(("rows", "num_minibatches"), [(12, 5), (1, 2), (8, 0)])
def test_minibatches_that_do_not_divide_the_rows_are_named(rows, num_minibatches):
    message = f"^num_minibatches = {num_minibatches} must divide the {rows} rows$"
    with pytest.raises(ConfigError, match=message):
        minibatches.num_strata(rows, num_minibatches)
