"""Former names of flags and values: read from JSON, and suggested on the command line."""

import dataclasses
import json
import tarfile
from pathlib import Path

import pytest
from test_golden_flags import RENAMED, records

from jaxrl_po import config, run
from jaxrl_po.__main__ import main
from jaxrl_po.config import ConfigError, setting_of

RUN_OF_0_4 = Path(__file__).parent / "run_of_0_4.tar.xz"
TUNED = sorted(Path(run.__file__).parent.glob("experiment/configs/*/*.json"))
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


def test_every_tuned_file_is_found():
    assert len(TUNED) == 28


@pytest.mark.parametrize("path", TUNED, ids=lambda path: f"{path.parent.name}, {path.stem}")
def test_tuned_flags_are_valid_settings(path):
    algorithm, found = path.parent.name, records()
    problem = "groups" if algorithm == "grpo" else "paths"
    made = {
        "config": found["control language sweep", "config", algorithm],
        "problem": found["control sweep", "problem", problem],
        "network": found["control sweep", "network", "only"],
    }
    given = {section: {} for section in made}
    for flag, value in json.loads(path.read_text())["flags"].items():
        section, _, name = flag.partition(".")
        fields = [x for x in settings(made[section]) if name in (x.name, *setting_of(x).was)]
        assert len(fields) == 1, flag
        value = tuple(value) if isinstance(value, list) else value
        given[section][fields[0].name] = dict(setting_of(fields[0]).were).get(value, value)
    for section, record in made.items():
        settled = record(**given[section])
        config.check(settled)
        getattr(settled, "validate", lambda: None)()


@pytest.fixture
def kept(tmp_path):
    with tarfile.open(RUN_OF_0_4) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run_of_0_4"


def of_run():
    """Yields `(section, field)` of the settings of that run."""
    for (commands, section, name), record in records().items():
        if "control" in commands.split() and name in ("options", "ppo", "paths", "only"):
            yield from ((section, field) for field in settings(record))


def test_former_values_of_a_stored_run_load(kept):
    stored = json.loads((kept / "config.json").read_text())
    changes = [
        {joined(section, name): old}
        for section, field in of_run()
        for name in (field.name, *setting_of(field).was)
        for old, new in setting_of(field).were
        if new is not True  # CartPole-v1 has no σ
    ]
    for change in ({}, {"sampling": "path"}, *changes):
        (kept / "config.json").write_text(json.dumps(stored | change))
        assert run.load(kept, checkpoint="latest").act([0.0] * 4) in (0, 1)


def test_a_former_name_of_a_stored_run_is_read(kept):
    """A value of another kind is refused by the present name."""
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
    """Before anything compiles, in one line; the exit status of a `ConfigError` is 2."""
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
