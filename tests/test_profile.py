"""The account of an iteration: what is counted in a program, and what of it is run."""

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import control, profile


def chain(x):
    """Seven products, one after another, and a sort."""
    product, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=7)
    return jnp.sort(product, axis=0)


def test_operations_are_counted_once_and_as_often_as_they_run():
    program = profile.program(chain, jnp.full((64, 64), 0.01))
    counted = profile.operations(program.compiled)
    assert (counted["while"], counted["sort"], counted["all-reduce"]) == (1, 1, 0)
    run = profile.executed(program)
    # A product and its activation, as two operations or one.
    assert 7 <= sum(run.get(kind, (0, 0.0))[0] for kind in ("dot", "fusion", "small")) <= 21
    assert run["sort"][0] == 1
    assert all(seconds > 0 for _, seconds in run.values())


def test_the_settings_are_those_of_the_benchmark():
    assert profile.SETTINGS == control.PPO
    assert tuple((envs, steps) for envs, steps, *_ in control.TABLE[:3]) == profile.SIZES


@pytest.mark.slow
def test_an_account_adds_up():
    row = profile.account(4, 16, 2)
    ms = row["ms"]
    parts = sum(ms[name] for name in ("collecting", "advantages", "shuffling", "kl"))
    assert parts < 3 * ms["iteration"]
    assert row["us_of_a_gradient_step"]["arithmetic_at_peak"] > 0
    assert row["compiled"]["dot"] >= 14  # three products with each of six kernels, less two
