"""Tests files of runs of both scripts, also of stopped, extended and moved runs.

Tests that kill such a process are in `test_kills`, tests of signals in `test_interrupts`.
"""

import json
import shutil
import signal

import finished as finished_runs
import jax
import pytest
from scripts import everything
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store.metrics import read

MAIN = {"control": launch.control, "language": launch.language}


@pytest.fixture(scope="module")
def runs(finished, tmp_path_factory):
    """Returns a finished run of each script."""
    out = tmp_path_factory.mktemp("runs")
    for script in MAIN:
        finished(script, out / script)
    return out


def snapshot(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.usefixtures("no_compilation")
@cases(
    "script, arguments, message",
    (
        "control",
        [],
        r"out: \S+control already holds files; give resume .*, overwrite .*, or choose another",
    ),
    (
        "language",
        ["--resume", "--task.num_digits=2"],
        r"task\.num_digits: must be 1, as in the run .* got 2; leave",
    ),
)
def test_a_used_folder_keeps_every_byte(runs, script, arguments, message):
    before = snapshot(runs / script)
    with pytest.raises(ConfigError, match=f"^{message}"):
        MAIN[script]([f"--out={runs / script}", *arguments])
    assert snapshot(runs / script) == before


def test_one_script_does_not_resume_the_other(runs):
    with pytest.raises(ConfigError, match=r"^resume: \S+ holds a run of control, not of language"):
        launch.language(["--resume", f"--out={runs / 'control'}"])


@cases("script", "control", "language")
def test_a_run_leaves_its_files(runs, script):
    out = runs / script
    files = {".lock", "checkpoints", "config.json", "curves.png", "metrics.jsonl", "summary.json"}
    further = {"control": "tensorboard", "language": "samples.jsonl"}
    assert {path.name for path in out.iterdir()} == files | {further[script]}
    config, summary = (
        json.loads((out / f"{name}.json").read_text()) for name in ("config", "summary")
    )
    assert config["config.gamma"] == {"control": 0.99, "language": 1.0}[script]
    assert config["resolved"]["steps_per_iteration"] == {"control": 32, "language": 8}[script]
    score = {"control": "greedy_return", "language": "greedy_accuracy"}[script]
    rows = read(out / "metrics.jsonl")
    assert summary[score] == rows[-1][score]
    assert len(summary[score]) == 2
    assert summary["steps"] == {"control": 320, "language": 24}[script] == rows[-1]["step"]
    assert summary["steps_per_second"] > 0
    assert summary["compile_seconds"] > 0
    assert summary["versions"]["jax"] == jax.__version__
    assert summary["device"]
    if script == "language":
        assert summary["warm_start_accuracy"] == rows[0]["greedy_accuracy"]


def test_the_language_script_evaluates_samples_and_shows_some(runs):
    """The run has three iterations with a line each, and is evaluated at the first and at the last
    state."""
    rows = read(runs / "language" / "metrics.jsonl")
    evaluated = [row for row in rows if "greedy_accuracy" in row]
    assert all({"greedy_length", "avg@2", "pass@1", "pass@2"} <= set(row) for row in evaluated)
    shown = read(runs / "language" / "samples.jsonl")
    assert [row["iteration"] for row in shown] == [
        row["iteration"] for row in evaluated for _ in range(6)
    ]
    assert [row["decoding"] for row in shown] == ["greedy", "sampled"] * (len(shown) // 2)
    assert len({row["prompt"] for row in shown}) == 3
    assert {"completion", "expected", "length", "score", "ended"} <= set(shown[0])
    assert shown[0]["note"] == "answers are written lowest digit first"


@pytest.mark.slow
def test_stopped_resumed_extended_run_equals_uninterrupted(runs, tmp_path, monkeypatch, capsys):
    update = Progress.update

    def stop(self, row, seconds_left):
        update(self, row, seconds_left)
        if row["iteration"] == 4:
            signal.raise_signal(signal.SIGTERM)

    short = [flag for flag in finished_runs.CONTROL if "total_steps" not in flag]
    # The first start uses --overwrite, which is not a setting of the run: a resumed run must not
    # take over the flag.
    begin = [*short, "--total_steps=256", "--deterministic", f"--out={tmp_path}", "--overwrite"]
    with monkeypatch.context() as patch:
        patch.setattr(Progress, "update", stop)
        assert launch.control(begin) == 0
    assert [row["iteration"] for row in read(tmp_path / "metrics.jsonl")] == [0, 2, 4]
    assert not (tmp_path / "summary.json").exists()
    assert launch.control(["--resume", "--total_steps=320", f"--out={tmp_path}"]) == 0
    assert "resuming at iteration 4" in capsys.readouterr().out
    assert everything(tmp_path) == everything(runs / "control")
    assert json.loads((tmp_path / "config.json").read_text())["total_steps"] == 320


def with_older_jax(run, out):
    """Copies a run as if an older version of JAX had made the run."""
    shutil.copytree(run, out)
    stored = json.loads((out / "config.json").read_text())
    stored["resolved"]["versions"]["jax"] = "0.0.1"
    (out / "config.json").write_text(json.dumps(stored))
    return out


def test_resuming_under_other_versions_is_noted(runs, tmp_path, capsys):
    out = with_older_jax(runs / "control", tmp_path / "run")
    assert launch.control(["--resume", f"--out={out}"]) == 0
    told = [
        line for line in capsys.readouterr().out.splitlines() if "under other circumstances" in line
    ]
    assert len(told) == 1
    assert f"jax: 0.0.1 → {jax.__version__}" in told[0]
    kept = json.loads((out / "config.json").read_text())["resolved"]
    assert kept["versions"]["jax"] == jax.__version__
    assert [each["versions"]["jax"] for each in kept["before"]] == ["0.0.1"]
