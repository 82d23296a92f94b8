"""Tests measurements of the control benchmark: updates alone, an environment alone, alternation."""

import json
import math

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structured
import timing
from tables import cases

from experiments.benchmarks import control as benchmark_control
from jaxrl_po import control


def test_order_of_turns_reverses_and_first_is_dropped():
    order = []
    clocks = {name: lambda name=name: order.append(name) or float(len(order)) for name in "ab"}
    assert timing.in_turns(clocks, 2) == {"a": [3.0, 6.0], "b": [4.0, 5.0]}
    assert "".join(order) == "baabba"


@pytest.mark.slow
def test_updates_are_compared_without_what_collecting_takes(monkeypatch, capsys):
    seconds = {"ppo": [0.5, 0.3], "trpo": [0.7, 0.7], "collect": [0.2, 0.2]}
    monkeypatch.setattr(timing, "stepper", lambda step, state: 0.0)
    monkeypatch.setattr(
        timing, "in_turns", lambda clocks, rounds: {name: seconds[name][:rounds] for name in clocks}
    )
    assert benchmark_control.main(["--updates=2", "--envs=2", "--steps=8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"ppo_ms": 200.0, "trpo_ms": 500.0, "ratio": 2.5}


@cases(
    "env, log_prob",
    # The first choice has two legal actions of two, the second two of three.
    pytest.param(structured.Everything(), -2 * math.log(2), id="choices"),
    pytest.param(gymnax.make("Pendulum-v1")[0], None, id="Pendulum", marks=pytest.mark.slow),
)
def test_a_random_policy_sees_nothing_and_learns_nothing(env, log_prob):
    nets = benchmark_control.blind_networks(env)
    problem = control.make_problem(env, num_envs=2, num_steps=4, **nets)
    learner = benchmark_control.make_random(benchmark_control.Options(), problem, None)
    state, batch = jax.jit(learner.sample)(learner.init(jax.random.key(0)))
    after, metrics = jax.jit(learner.update)(state, batch)
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert float(metrics["frac_nonfinite"].value()) == 0.0
    if log_prob is None:
        log_prob = jax.scipy.stats.norm.logpdf(batch.action[..., 0])
        assert float(jnp.std(batch.action)) > 0.3
    np.testing.assert_allclose(batch.log_prob, jnp.broadcast_to(log_prob, (2, 4)), atol=1e-6)


@pytest.mark.slow
def test_the_speed_of_an_environment_is_measured(capsys):
    sizes = ["--envs=4", "--steps=8", "--total_steps=64", "--devices=1"]
    assert benchmark_control.main(["--algorithm=random", *sizes, "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps_per_second"] > 0
