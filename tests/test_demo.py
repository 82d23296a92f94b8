"""Tests the demo: its verdict, its pictures, its flags."""

import dataclasses
import json
from pathlib import Path

import demo
import pytest
from tables import cases

from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.store import metrics, statistics


def fake_part(name, score, values, status=0):
    """Builds a part of the demo that finishes immediately, with `values` as its result."""

    def main(argv):
        out = Path(next(flag.removeprefix("--out=") for flag in argv if flag.startswith("--out=")))
        assert "--overwrite" in argv
        out.mkdir(parents=True, exist_ok=True)
        (out / "metrics.jsonl").write_text(
            json.dumps({"iteration": 1, "step": 8, score: values}) + "\n"
        )
        (out / "summary.json").write_text(
            json.dumps({score: values, f"{score}_iqm": 0.0, "steps_per_second": 1.0})
        )
        return status

    part = next(part for part in demo.PARTS if part.name == name)
    assert part.score == score
    return part._replace(main=main)


@cases(
    "returns, accuracies, status",
    # The interquartile mean is 485, the mean 0.91.
    ([0.0, 480.0, 490.0, 500.0], [0.9, 0.92], 0),
    *(
        pytest.param(returns, accuracies, 1, marks=pytest.mark.slow)
        for returns, accuracies in (
            ([0.0, 450.0, 490.0, 500.0], [0.9, 0.92]),  # 470
            ([500.0] * 4, [0.85, 0.94]),  # 0.895
            ([500.0] * 4, [None, 0.94]),
        )
    ),
)
def test_the_demo_tells_whether_it_learned(
    tmp_path, monkeypatch, capsys, returns, accuracies, status
):
    parts = (
        fake_part("cartpole", "greedy_return", returns),
        fake_part("addition", "greedy_accuracy", accuracies),
        fake_part("grpo", "greedy_accuracy", [0.95]),
        fake_part("dapo", "greedy_accuracy", [0.95]),
    )
    monkeypatch.setattr(demo, "PARTS", parts)
    monkeypatch.setattr(
        demo.family, "compare", lambda options, out: [demo.comparison.read(tmp_path, "cartpole")]
    )
    assert demo.main([f"--out={tmp_path}"]) == status
    printed = capsys.readouterr().out
    assert ("NOT LEARNED" in printed) is bool(status)
    assert "ppo" in printed
    for name in ("demo.png", "groups.png", "family.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_the_demo_hands_on_a_failure(tmp_path, monkeypatch):
    failing = fake_part("cartpole", "greedy_return", [500.0], status=1)
    monkeypatch.setattr(demo, "PARTS", (failing,))
    with pytest.raises(UsageError, match="cartpole did not finish"):
        demo.main([f"--out={tmp_path}"])


def test_the_flags_of_the_demo_are_valid(tmp_path, monkeypatch):
    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr("jaxrl_po.run.loop.programs.check_job", refuse)
    for part in demo.PARTS:
        with pytest.raises(AssertionError, match="compiled"):
            part.main([*part.arguments, f"--out={tmp_path / part.name}"])
    with pytest.raises(AssertionError, match="compiled"):
        demo.family.compare(demo.FAMILY, tmp_path / "family")


def test_demo_a2c_was_tuned_for_the_demos_length():
    """Settings that were tuned for runs of 500,000 steps reached 440 in the demo and fell back to
    175."""
    saved = json.loads((demo.control.CONFIGS / "a2c" / f"{demo.FAMILY.env}.json").read_text())
    assert saved["score"]["steps"] == demo.FAMILY.total_steps
    assert saved["score"]["mean"] >= demo.FAMILY.threshold
    asked = saved["found_by"].split()
    base = next(
        (int(word.removeprefix("--seed=")) for word in asked if word.startswith("--seed=")), 0
    )
    assert base != demo.FAMILY.seed


@pytest.mark.slow
def test_a2c_of_the_demo_learns_and_keeps_it(tmp_path):
    """The test checks the last quarter, where 20 runs (10 base seeds, two commits) never fell below
    486.

    Before the last quarter 14 of the 20 runs fall below the threshold again, once to 345; rounding,
    which depends on the machine, decides which runs fall.
    """
    options = dataclasses.replace(demo.FAMILY, methods="a2c")
    (result,) = demo.family.compare(options, tmp_path)
    _, returns = metrics.curve(result.rows, "greedy_return")
    middle = statistics.interquartile_mean(returns)
    assert middle[3 * len(middle) // 4 :].min() >= options.threshold
