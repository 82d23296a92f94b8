"""Tests `run.Experiment`: keywords, settings and files of an experiment in Python."""

import json

import pytest
import shapes
from tables import cases

from jaxrl_po import run
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError

SMALL = {"network.width": 8, "problem.num_envs": 4, "problem.num_steps": 8}


def test_an_experiment_leaves_what_its_command_leaves(tmp_path, monkeypatch):
    shapes.trace_only(monkeypatch)
    experiment = run.Experiment(
        env="CartPole-v1",
        algorithm="ppo",
        seeds=2,
        total_steps=64,
        out=tmp_path / "python",
        over={**SMALL, "config.num_minibatches": 2},
    )
    trained = run.train(experiment)
    flags = [f"--{name}={value}" for name, value in experiment.settings.items() if name != "out"]
    assert launch.control([*flags, f"--out={tmp_path / 'command'}"]) == 0
    kept, made = (
        json.loads((tmp_path / name / "config.json").read_text()) for name in ("python", "command")
    )
    assert kept | {"out": ""} == made | {"out": ""}
    assert kept["seeds"] == 2
    assert kept["problem.num_steps"] == 8
    assert [row["iteration"] for row in trained.rows] == [0, 1, 2]
    longer = run.resume(tmp_path / "python", total_steps=96)
    assert [row["iteration"] for row in longer.rows] == [0, 1, 2, 3]
    assert longer.folder == tmp_path / "python"
    with pytest.raises(
        ConfigError, match=r"^seeds: must be 2, as in the run in .* got 3; leave it"
    ):
        run.resume(tmp_path / "python", seeds=3)
    with pytest.raises(ConfigError, match=r"^log_every: must be left out beside an Experiment"):
        run.train(experiment, log_every=3)


@cases(
    "keywords, message",
    ({"env": "CartPole-v1", "seed_s": 2}, r"^seed_s: is not a setting; did you mean seeds\?"),
    ({"seeds": object()}, r"^seeds: must be a number or text, got object"),
    ({"seeds": 2.5}, r"^seeds: must be an integer, got 2.5"),
    ({"seeds": 0}, r"^seeds: must lie in \[1, inf\) seeds, got 0"),
    ({"over": {"config.lr": 1.0}}, r"^config.lr: is not a setting; did you mean config.learning_"),
    ({"task": "addition", "env": "CartPole-v1"}, r"^env: must be left out beside task: "),
)
def test_wrong_keywords_of_an_experiment_are_named(keywords, message):
    with pytest.raises(ConfigError, match=message):
        run.Experiment(**keywords)
