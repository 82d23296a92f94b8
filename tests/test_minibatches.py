"""Tests the assignment of rows to minibatches, and the computation of minibatches in
microbatches."""

import jax
import numpy as np
import pytest
from learners import make
from tables import cases

from jaxrl_po import minibatches
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError


@cases("rows, num_minibatches", (64, 4), (512, 4), (20480, 4), (12, 3), (7, 7), (128, 1))
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
    # Binomial(4000, 1/4) has a standard deviation of 27; the bound is five of them.
    assert np.abs(counts - 1000).max() < 137


def test_permutation_is_uniform():
    perms = jax.vmap(lambda key: minibatches.permutation(key, 5))(
        jax.random.split(jax.random.key(1), 6000)
    )
    _, counts = np.unique(np.asarray(perms), axis=0, return_counts=True)
    assert len(counts) == 120
    # Chi-square with 119 degrees of freedom has mean 119 and standard deviation 15.4.
    assert ((counts - 50.0) ** 2 / 50.0).sum() < 119 + 5 * 15.4


@cases("rows, num_minibatches", (12, 5), (1, 2), (8, 0))
def test_minibatches_that_do_not_divide_rows_are_named(rows, num_minibatches):
    message = f"^num_minibatches: must divide the {rows} rows, got {num_minibatches}$"
    with pytest.raises(ConfigError, match=message):
        minibatches.num_strata(rows, num_minibatches)


SIZES = ((512, 1), (513, 1), (1009, 1), (1024, 1), (2560, 1), (256, 5), (64, 64), (3, 512))


def test_core_computes_at_least_256_slots_at_once():
    one_each = Target("cpu", devices=2, cores=2)
    assert [minibatches.in_cache(*size, one_each) for size in SIZES] == [1, 1, 1, 4, 10, 4, 16, 3]
    for target in (Target("cpu", devices=1, cores=2), Target("gpu", devices=2, cores=2), None):
        assert [minibatches.in_cache(*size, target) for size in SIZES] == [1] * len(SIZES)


@cases(
    "algorithm, problem, expected",
    ("ppo", "CartPole", {(64, 1)}),
    ("ppo-penalty", "CartPole", {(64, 1)}),
    ("a2c", "everything", {(8, 8)}),
    # updates of the policy, and of the critic in two minibatches
    ("reinforce", "addition", {(32, 4), (16, 4)}),
    ("trpo", "CartPole", {(64, 1)}),  # updates of the critic alone
    ("grpo", "addition", {(16, 4)}),
)
def test_methods_name_the_slots_of_their_rows(algorithm, problem, expected, monkeypatch):
    asked, in_cache = set(), minibatches.in_cache

    def recorded(rows, slots, target):
        asked.add((rows, slots))
        return in_cache(rows, slots, target)

    monkeypatch.setattr(minibatches, "in_cache", recorded)
    learner = make(algorithm, problem)
    jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))
    assert asked == expected
