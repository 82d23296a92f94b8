"""Tests `experiments/studies/overoptimisation.py`: its table for known curves, and bad input."""

import numpy as np
import overoptimisation
import pytest
from tables import cases

from jaxrl_po.config import ConfigError


def curves():
    """Returns curves of two seeds, two β and twenty iterations; the last two iterations count."""
    shape = 2, 2, 20
    ramp = np.broadcast_to(np.arange(20.0), shape)
    seed = np.arange(2.0)[:, None, None]
    return {
        "reward_model": ramp + seed,
        "accuracy": 0.5 - 0.02 * ramp * np.arange(2.0)[None, :, None],
        "reference_kl": np.full(shape, 0.25),
        "response_length": np.full(shape, 3.0),
        "reward_model_accuracy": np.full(shape, 0.75),
    }


def test_table_tells_the_end_of_each_run():
    end = overoptimisation.final(curves())
    np.testing.assert_allclose(end["reward_model"], [[18.5, 18.5], [19.5, 19.5]])
    np.testing.assert_allclose(end["accuracy"][0], [0.5, 0.13])
    np.testing.assert_allclose(end["kl"], 0.75)  # the KL of a completion of three tokens, in nats
    lines = overoptimisation.table(curves(), [1.0, 0.0]).splitlines()
    words = [" ".join(line.split()) for line in lines]
    assert words[1].startswith("warm start 0.500 [0.000, 1.000]")
    assert words[3] == "0 19.000 [18.500, 19.500] 0.130 [0.130, 0.130] 0.750 [0.750, 0.750]"
    assert words[-1].endswith("0.750 [0.750, 0.750]")


@cases(
    "argument, message",
    ("--coefficients=1,x", "coefficients: must be numbers from 0, separated by commas, got '1,x'"),
    ("--coefficients=-1", "coefficients: must be numbers from 0"),
    ("--comparisons=100", "comparisons: must be a multiple of 64, got 100"),
    ("--iterations=9", r"iterations: must lie in \[10, inf\)"),
)
def test_bad_input_is_named(tmp_path, argument, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        overoptimisation.main([argument, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_small_measurement(tmp_path, capsys):
    sizes = [
        "--coefficients=1,0",
        "--seeds=2",
        "--iterations=40",
        "--width=16",
        "--comparisons=512",
        "--devices=1",
    ]
    assert overoptimisation.main([*sizes, f"--out={tmp_path}"]) == 0
    assert (tmp_path / "overoptimisation.png").read_bytes().startswith(b"\x89PNG")
    saved = np.load(tmp_path / "curves.npz")
    assert saved["accuracy"].shape == (2, 2, 40)
    assert saved["betas"].tolist() == [1.0, 0.0]
    # Both coefficients start from the same scores.
    np.testing.assert_array_equal(saved["accuracy"][:, 0, 0], saved["accuracy"][:, 1, 0])
    assert "warm start" in capsys.readouterr().out
