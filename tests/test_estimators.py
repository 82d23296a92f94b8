"""Tests `experiments/studies/estimators.py`: its measurements agree with the exact values of the
MDP."""

import importlib.util
import json
from pathlib import Path

import moments
import numpy as np
import pytest
import segments
import tabular
from numpy.testing import assert_allclose
from tables import cases

from jaxrl_po.config import ConfigError

SCRIPT = Path(__file__).parent.parent / "experiments" / "studies" / "estimators.py"
SMALL = [
    "--num_states=4",
    "--num_actions=2",
    "--num_steps=8",
    "--num_samples=16384",
    "--gamma=0.9",
    "--lambdas=0,0.5,1",
]
EXACT, WRONG, ZEROS = range(3)


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("estimators", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    # The fixture patches the module that this test has imported, not a copy under another name.
    assert module.tabular is tabular
    return module


@pytest.fixture(scope="module")
def run(script, tmp_path_factory):
    """Returns the options, the result and the folder of one run of the script."""
    out = tmp_path_factory.mktemp("estimators")
    assert script.main([*SMALL, f"--out={out}"]) == 0
    options = script.flags.parse_records([*SMALL, f"--out={out}"], {"": script.Options})[""]
    return options, script.evaluate(options), out


@pytest.fixture(scope="module")
def both(script, run):
    """Returns the measured cells and the exact cells of the run."""
    _, result, _ = run
    grid = result.grid
    exact = moments.exact_cells(result.setting, grid.mixtures(), grid.horizons(), grid.num_steps)
    return moments.cells(result.setting, segments.total(result.sums)), exact


def index(run, *names):
    return [run[1].grid.names().index(name) for name in names]


def in_standard_errors(cells, expected):
    """Returns the distance of every measured mean in standard errors.

    A distance of pure rounding counts as zero.
    """
    assert cells.visits.min() > 100
    return np.abs(cells.mean - expected) / np.sqrt(cells.variance / cells.visits + 1e-18)


def test_the_setting_is_solved(run):
    """Bellman's equation holds, the first state is stationary, and the policy gradient theorem
    holds."""
    setting = run[1].setting
    (transition, reward, initial, gamma), policy = setting.mdp, setting.policy
    action_value = reward + gamma * transition @ setting.value
    assert_allclose(setting.value, np.sum(policy * action_value, axis=1), rtol=1e-10)
    assert_allclose(setting.advantage, action_value - setting.value[:, None], rtol=1e-9)
    assert_allclose(np.einsum("s,sa,sat->t", initial, policy, transition), initial, rtol=1e-10)
    assert_allclose(
        setting.gradient, initial[:, None] * policy * setting.advantage, rtol=1e-9, atol=1e-12
    )


def test_exact_critic_gives_no_bias(run, both):
    measured, exact = both
    assert_allclose(exact.mean[EXACT], 0.0, atol=1e-12)
    assert in_standard_errors(measured, 0.0)[EXACT].max() < 4.0
    # the same check detects the bias of a critic with errors
    assert in_standard_errors(measured, 0.0)[WRONG].max() > 20.0


def test_bias_of_one_step(run, both):
    """The bias is γ E[err(s') | s, a] − err(s) at every position."""
    setting, (measured, exact) = run[1].setting, both
    error = setting.critics[WRONG] - setting.value
    bias = np.broadcast_to(
        setting.mdp.gamma * setting.mdp.transition @ error - error[:, None], (8, 4, 2)
    )
    for e in index(run, "A3C(0)", "GAE(0)"):
        assert_allclose(exact.mean[WRONG, e], bias, rtol=1e-9, atol=1e-12)
        assert in_standard_errors(measured, bias)[WRONG, e].max() < 4.0


def test_moments_agree_with_enumeration(run, both):
    measured, exact = both
    assert in_standard_errors(measured, exact.mean).max() < 4.0
    for name in ("bias", "deviation", "rmse", "gradient_bias"):
        number, error = run[1].measured[name]
        spread = np.square(number + error) - np.square(number)
        assert (
            np.abs(np.square(number) - np.square(run[1].exact[name])) < 4.0 * spread + 1e-9
        ).all(), name


def test_policy_gradient_agrees_with_the_exact_one(script, run, both):
    options, result, _ = run
    exact = result.setting.gradient.ravel()
    groups = result.sums.gradient / (options.num_samples / segments.GROUPS)
    error = groups.std(axis=0, ddof=1) / np.sqrt(segments.GROUPS)
    distance = groups.mean(0) - exact
    quantile = 5.2  # quantile of Student's t with 15 degrees of freedom, at 1e-4
    assert (np.abs(distance[EXACT]) < quantile * error[EXACT]).all()
    bias = moments.gradient_bias(result.setting, both[1])
    assert (np.abs(distance - bias) < quantile * error).all()
    assert (np.abs(distance[ZEROS]) > quantile * error[ZEROS])[index(run, "GAE(0)")].any()


def test_steps_to_an_accuracy(script):
    scores = moments.GradientScores(np.array([0.0, 0.0025, 0.04]), np.array([3.0, 3.0, 3.0]))
    segments = scores.segments(0.1)
    assert_allclose(segments, [300.0, 400.0, np.inf])
    assert_allclose(np.sqrt(scores.error(segments)), [0.1, 0.1, 0.2])


def test_the_run_leaves_its_results_and_repeats_itself(script, run):
    options, result, out = run
    stored = json.loads((out / "table.json").read_text())
    rows = script.rows(result, options)
    assert len(rows) == 3 * 7
    assert stored["rows"] == script.folder.strict(rows)
    assert stored["options"]["gamma"] == 0.9
    assert (out / "table.txt").read_text() == script.table(result, options)
    assert np.load(out / "cells.npz")["mean"].shape == (3, 7, 8, 4, 2)
    assert (out / "estimators.png").stat().st_size > 50_000


def test_another_seed_is_another_measurement(script, run):
    options = script.flags.parse_records([*SMALL, "--seed=1"], {"": script.Options})[""]
    assert not np.allclose(
        script.evaluate(options).measured["rmse"][0], run[1].measured["rmse"][0], rtol=1e-3
    )


@cases(
    "argument, message",
    ("--gamma=1", r"gamma: must lie in \(0, 0.999\], got 1"),
    ("--num_samples=1030", "num_samples: must be a multiple of 16, got 1030"),
    ("--num_steps=1", r"num_steps: must lie in \[2, 256\] steps, got 1"),
    ("--lambdas=0,1.5", r"lambdas: must be numbers in \[0, 1\], separated by commas, got '0,1.5'"),
    ("--lambdas=0,,1", r"lambdas: must be numbers in \[0, 1\]"),
    ("--out=", "out: must name a folder"),
)
def test_bad_input_is_one_line(script, argument, message):
    with pytest.raises(ConfigError, match=f"^{message}") as error:
        script.main([argument])
    assert "\n" not in str(error.value)
