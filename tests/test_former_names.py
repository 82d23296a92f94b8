"""Tests former names of flags and values: accepted in JSON, and suggested on the command line."""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest
from test_golden_flags import records

from jaxrl_po import config, control, run
from jaxrl_po.__main__ import main
from jaxrl_po.config import ConfigError, setting_of
from jaxrl_po.run.experiment import flags, language_config

RUN_OF_0_4 = Path(__file__).parent / "run_of_0_4.tar.xz"
# Map from a former flag to the present flag; a name that ends in a dot is a section. A flag of a
# few commands has their names in front: `"export seed": "seed_index"`.
RENAMED = {
    "config.n": "config.n_steps",
    "environment": "tools",
    "environment.": "tools.",
    "export seed": "seed_index",
    "network.memory_of": "network.recurrent_networks",
    "network.squash": "network.tanh_squash",
    "network.std": "network.state_dependent_std",
}
SELECTING = {
    "groups": ["--algorithm=grpo"],
    "vine": ["--algorithm=trpo", "--sampling=vine"],
    "dialogues": ["--task=mastermind"],
    "demonstrations": ["--algorithm=sft"],
}


def settings(record):
    """Returns the fields of a record that have a flag."""
    return [field for field in dataclasses.fields(record) if config.SETTING in field.metadata]


def joined(section, name):
    return f"{section}.{name}".lstrip(".")


@pytest.fixture
def kept(tmp_path):
    with tarfile.open(RUN_OF_0_4) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run_of_0_4"


def of_run():
    """Yields `(section, field)` for the settings of the stored run."""
    for (commands, section, name), record in records().items():
        if "control" in commands.split() and name in ("options", "ppo", "paths", "only"):
            yield from ((section, field) for field in settings(record))


def test_former_values_of_a_stored_run_load(kept):
    stored = json.loads((kept / "config.json").read_text())
    changes = [
        (joined(section, name), old, joined(section, field.name), new)
        for section, field in of_run()
        for name in (field.name, *setting_of(field).was)
        for old, new in setting_of(field).were
        if new is not True  # CartPole-v1 has no σ
    ]
    for name, old, present, new in changes:
        (kept / "config.json").write_text(json.dumps(stored | {name: old}))
        policy = run.load(kept, checkpoint="latest")
        assert policy.settings[present] == new
        assert policy.act([0.0] * 4) in (0, 1)


def test_former_values_and_sections_become_present_ones():
    """The test includes settings that the stored run does not have."""
    network = {"network": control.NetworkSettings}
    for old, new in {"dependent": True, "independent": False}.items():
        assert flags.current({"network.std": old}, network) == {"network.state_dependent_std": new}
    stored = {"environment": "a.py:A", "environment.turns": 3}
    tools = {"": language_config.LanguageOptions, "tools": language_config.ToolSettings}
    assert flags.current(stored, tools) == {"tools": "a.py:A", "tools.turns": 3}


def test_former_name_in_stored_run_is_read(kept):
    """A value of the wrong type is refused, and the error has the present name."""
    stored, checked = json.loads((kept / "config.json").read_text()), 0
    for section, field in of_run():
        present = joined(section, field.name)
        for flag in (joined(section, old) for old in setting_of(field).was):
            (kept / "config.json").write_text(json.dumps(stored | {flag: {}}))
            with pytest.raises(ConfigError, match=f"{present}: must be "):
                run.load(kept, checkpoint="latest")
            checked += flag in stored
    assert checked


def test_a_former_flag_suggests_the_present_one(tmp_path):
    """The error comes before compilation, in one line; a `ConfigError` has exit status 2."""
    names, out = set(), tmp_path / "new"
    for (commands, section, name), record in records().items():
        own = {"config": "algorithm", "task": "task"}.get(section)
        chosen = [f"--{own}={name}"] if own else SELECTING.get(name, [])
        for field in settings(record):
            for flag in (joined(section, old) for old in setting_of(field).was):
                for command in commands.split():
                    with pytest.raises(ConfigError) as caught:
                        main([command, *chosen, f"--out={out}", f"--{flag}=1"])
                    told = f"{flag}: is not a setting; did you mean {joined(section, field.name)}?"
                    assert str(caught.value) == told
                names.add(flag)
    assert names
    assert not out.exists()
    renamed = {flag.rpartition(" ")[2] for flag in RENAMED if not flag.endswith(".")}
    assert renamed <= names
