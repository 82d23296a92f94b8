"""Tests runs whose folder, code or data was moved: they load and resume with the same content
only."""

import json
import shutil
from pathlib import Path

import pytest
import shapes
import tiny
from folders import ROWS, SMALL, write_place, write_rows
from tables import cases

from jaxrl_po import run
from jaxrl_po.cli import evaluate, launch, sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import models
from jaxrl_po.run.experiment.experiment import DOMAINS, read_experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.store import sources

pytestmark = pytest.mark.slow

ENV = "from probes import CueReward\n\ndef cue():\n    return CueReward()\n"
REWARD = "def nearly(completions, **_):\n    return [0.0 for _ in completions]\n"


def flags_of(inputs):
    """Returns the flags of the two runs that name files and folders."""
    language = {"init_from": "model", "task.train": "rows.jsonl", "reward": "own.py:nearly"}
    given = {"control": {"env": "own.py:cue"}, "language": language}
    return {
        script: {name: f"{inputs / path}" for name, path in each.items()}
        for script, each in given.items()
    }


def written(flags):
    return [f"--{name}={value}" for name, value in flags.items()]


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Makes a project with three traced runs that use relative paths, and a copy of the project."""
    place = tmp_path_factory.mktemp("moved") / "old"
    (place / "inputs").mkdir(parents=True)
    (write_place(place / "inputs") / "own.py").write_text(ENV + REWARD)
    given = flags_of(Path("inputs"))
    control, language = written(given["control"]), written(given["language"])
    swept = [*tiny.SWEPT, "--total_steps=320", "--config.learning_rate=0.01,0.05", *control]
    with pytest.MonkeyPatch.context() as patch:
        shapes.trace_only(patch)
        patch.chdir(place)
        control = [*tiny.CONTROL, "--total_steps=32", *control, "--out=runs/control"]
        assert launch.control(control) == 0
        language = [*SMALL, "--total_steps=8", "--lora.rank=2", *language, "--out=runs/language"]
        assert launch.language(language) == 0
        assert sweep.main([*swept, "--out=runs/sweep"]) == 0
    return place, shutil.copytree(place, place.parent / "copy")


@pytest.fixture
def project(kept):
    place, copy = kept
    shutil.rmtree(place)
    return shutil.copytree(copy, place)


def resumed(script, out, **given):
    return prepare(DOMAINS[script], read_experiment(str(out / "runs" / script), **given).read())


@pytest.mark.usefixtures("trace_only")
@cases("moved", ("runs",), ("inputs",), ("runs", "inputs"))
def test_moved_run_loads_and_resumes(project, moved, tmp_path):
    for name in moved:
        (project / name).rename(tmp_path / name)
    places = {name: tmp_path if name in moved else project for name in ("runs", "inputs")}
    runs, inputs = (place / name for name, place in places.items())
    if moved == ("runs", "inputs"):  # the stored path leads to other code
        (project / "inputs").mkdir()
        (project / "inputs" / "own.py").write_text("1 / 0\n")
    anew = flags_of(inputs)
    for script, expected in anew.items():
        given = expected if moved == ("inputs",) else {}
        if given:
            with pytest.raises(ConfigError, match=r"^folder: \S+ (needs|.*must be)"):
                run.load(runs / script, checkpoint="latest")
            with pytest.raises(ConfigError, match=r"no (file|config)|cannot be read"):
                resumed(script, places["runs"])
        settings = run.load(runs / script, checkpoint="latest", **given).settings
        assert {name: settings[name] for name in expected} == expected
        found = resumed(script, places["runs"], **given)
        assert {name: found.output.settings[name] for name in expected} == expected
        assert not any("other circumstances" in note for note in found.display.notes)
    assert moved == ("inputs",) or models.root(f"{runs / 'language'}") == f"{inputs / 'model'}"
    more = written(anew["control"]) if moved == ("inputs",) else []
    assert sweep.main([f"--out={runs / 'sweep'}", "--resume", *more]) == 0
    out = f"{runs / 'control'}"
    assert launch.control([f"--out={out}", "--resume", "--total_steps=64", *more]) == 0
    assert json.loads((runs / "control" / "config.json").read_text())["out"] == out
    assert evaluate.main([f"--run={out}"]) == 0


@cases(
    "script, flag, message",
    ("control", "env", r"^env: must be \S+, as .*, or the same in a file of the same"),
    ("language", "reward", r"^reward: must be \S+, as .*, or the same in a file of"),
    ("language", "task.train", "began with another set of prompts and answers"),
    ("language", "init_from", "holds adapters over another base"),
)
def test_new_path_needs_the_same_content(project, tmp_path, script, flag, message):
    inputs = shutil.copytree(project / "inputs", tmp_path / "inputs")
    given = {flag: flags_of(inputs)[script][flag]}
    resumed(script, project, **given)
    (inputs / "own.py").write_text(f"{ENV}{REWARD}# another line\n")
    write_rows(inputs / "rows.jsonl", ROWS[:-1])
    config = inputs / "model" / "config.json"
    config.write_text(config.read_text().replace("1000000.0", "500000.0"))
    with pytest.raises(ConfigError, match=message):
        resumed(script, project, **given)
    with pytest.raises(ConfigError, match=message):
        run.load(project / "runs" / script, checkpoint="latest", **given)


@pytest.fixture
def places(tmp_path):
    """Returns old and new folder of a project, each with a reward, and the digest of the new
    reward."""
    for name, text in (("old", "1 / 0\n"), ("new", REWARD)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.py").write_text(text)
    source = f"{tmp_path}/new/own.py:nearly,last_number"
    return tmp_path / "old", tmp_path / "new", sources.digests({"reward": source})


@cases("out", "runs/a", "/runs/a")
def test_code_is_found_by_its_digest(places, out):
    old, new, code = places
    stored = {"reward": f"{old}/own.py:nearly,last_number"}
    before = f"{old}{out}" if out[0] == "/" else out
    found = {"reward": f"{new}/own.py:nearly,last_number"}
    assert sources.located(stored, code, before, new / "runs" / "a") == found
    before = f"{new}{out}" if out[0] == "/" else out
    assert sources.located(found, code, before, old / "runs" / "a") == found


def test_data_of_a_moved_run_lie_beside_it(places):
    old, new, _ = places
    for name in ("own.py", "gone"):  # the next move starts from the new folder
        stored = {"init_from": f"{old}/{name}"}
        found = sources.located(stored, {}, f"{old}/runs/a", new / "runs" / "a")
        assert found == {"init_from": f"{new}/{name}"}
