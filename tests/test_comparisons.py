"""Tests the comparison scripts: the family of methods, tuned settings and suites."""

import json
from pathlib import Path

import family
import gymnax
import jax
import pytest
from benchmarks import suites

from jaxrl_po import control as control_lib
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import control, registry, settings
from jaxrl_po.run.experiment import flags as flags_lib
from jaxrl_po.run.experiment.registry import SUITES
from jaxrl_po.run.experiment.suites import from_suite, split_name

EXPERIMENTS = Path(__file__).parent.parent / "experiments"


def fake_control(main_argv):
    """Stands in for a run that finishes immediately: TRPO is good from the first evaluation, other
    methods never."""

    def main(argv):
        main_argv.append(argv)
        out = Path(next(a.removeprefix("--out=") for a in argv if a.startswith("--out=")))
        good = "--algorithm=trpo" in argv
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").touch()
        returns = [480.0 if good else 20.0] * 2
        shared = {"greedy_return": returns, "kl": [0.01, 0.02], "time/seconds": 0.5}
        rows = [{"iteration": i, "step": 100 * i, **shared} for i in range(3)]
        (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        summary = {"greedy_return": returns, "greedy_return_iqm": returns[0]}
        (out / "summary.json").write_text(json.dumps(summary | {"steps_per_second": 1000.0}))
        return 0

    return main


def test_family_compares_methods(tmp_path, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(launch, "control", fake_control(asked))
    arguments = ["--methods=trpo,ppo_penalty", "--seeds=2", "--seed=3", "--total_steps=200"]
    assert family.main([*arguments, f"--out={tmp_path / 'family'}"]) == 0
    assert (tmp_path / "family" / "family.png").read_bytes().startswith(b"\x89PNG")
    header, trpo, ppo_penalty = (tmp_path / "family" / "table.txt").read_text().splitlines()
    assert header.split()[:4] == ["method", "mean", "IQM", "worst"]
    assert trpo.split() == ["trpo", "480.0", "480.0", "480.0", "0", "1,000", "750.0"]
    assert ppo_penalty.split()[4] == "inf"
    assert "--config.target_kl=0.01" in asked[1]
    assert all("--seed=3" in argv for argv in asked)


def test_every_method_of_the_family_has_valid_flags(tmp_path, written_down):
    for name in (name for name, x in registry.METHODS.items() if not x.supervised):
        out = f"--out={tmp_path / name}"
        written_down(family.main, [f"--methods={name}", out, "--total_steps=100000"])


def test_unknown_methods_are_named(tmp_path):
    with pytest.raises(ConfigError, match="did you mean trpo"):
        family.main(["--methods=trop", f"--out={tmp_path}"])


# Environments on the host share their settings: one environment of each family.
FAMILIES = {"MuJoCo": "envpool:HalfCheetah-v4"}


def env_of(stem):
    """Returns the environment that a file of settings is for; the file's name has a hyphen for a
    suite's colon."""
    suite, _, name = stem.partition("-")
    return f"{suite}:{name}" if suite in SUITES else FAMILIES.get(stem, stem)


def configs():
    return sorted(control.CONFIGS.glob("*/*.json"))


def name(path):
    return f"{path.parent.name}-{path.stem}"


def test_every_tuned_file_is_read():
    assert len(configs()) == 28


@pytest.mark.parametrize("path", configs(), ids=name)
def test_tuned_settings_are_valid(path):
    """Every file of settings names an existing method and environment, and flags that both have."""
    saved = json.loads(path.read_text())
    env = env_of(path.stem)
    options = flags_lib.parse_records(
        [f"--algorithm={path.parent.name}", f"--env={env}"], {"": control.ControlOptions}
    )[""]
    assert control.tuned_file(options) == path
    sections = settings.sections_of(control, options)
    tuned = flags_lib.current(saved["flags"], sections)
    assert len(tuned) == len(saved["flags"])
    flags_lib.parse_records(
        [f"--{name}={flags_lib.spell(x)}" for name, x in tuned.items()], sections
    )
    if path.stem in FAMILIES:
        return
    assert saved["score"]["seeds"] >= 2
    assert saved["found_by"].startswith("jaxrl-po sweep ")
    if not split_name(env)[0]:
        control_lib.adapt(gymnax.make(options.env)[0])


@pytest.mark.parametrize(
    "path",
    [
        # brax takes seconds to import.
        pytest.param(path, marks=[pytest.mark.slow] * path.stem.startswith("brax-"))
        for path in configs()
        if split_name(env_of(path.stem))[0]
    ],
    ids=name,
)
def test_tuned_settings_of_suites_name_existing_environments(path):
    env = env_of(path.stem)
    pytest.importorskip(SUITES[env.partition(":")[0]])
    with jax.numpy_rank_promotion("allow"):  # the suites rely on rank promotion
        from_suite(env)


def test_suite_table_is_printed_and_resumes(tmp_path, monkeypatch):
    rows = (
        suites.Row("CartPole-v1", 64, ("--problem.num_envs=4",), {"trpo": 500.0}),
        suites.Row("CartPole-v1", 64, (), {}, "shallow"),
    )
    asked = []
    monkeypatch.setattr(launch, "control", fake_control(asked))
    monkeypatch.setitem(suites.SUITES, "brax", rows)
    arguments = ["--suite=brax", "--seeds=2", f"--out={tmp_path}"]
    assert suites.main([*arguments, "--methods=trpo", "--envs=shallow"]) == 0
    assert suites.main([*arguments, "--methods=trpo,npg"]) == 0
    assert ["--resume" in argv for argv in asked] == [False, False, False, True, False]
    assert ["--problem.num_envs=4" in argv for argv in asked] == [False, True, True, False, False]
    assert all("--total_steps=64" in argv for argv in asked)
    table = (tmp_path / "table.txt").read_text().splitlines()
    assert [line.split()[0] for line in table[-4:]] == ["CartPole-v1"] * 2 + ["CartPole-v1,"] * 2
    assert "500.0" in table[-4]
    assert "–" in table[-3]
    assert (tmp_path / "brax.png").stat().st_size > 5000
    with pytest.raises(
        ConfigError, match=r"envs: must hold a word of CartPole-v1; CartPole.* got Snake$"
    ):
        suites.main([*arguments, "--envs=Snake"])
    with pytest.raises(ConfigError, match="methods: unknown name 'dqn'"):
        suites.main([*arguments, "--methods=dqn"])
