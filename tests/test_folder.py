import errno
import json
import os
import shutil

import pytest
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import flags, settings
from jaxrl_po.run.experiment.options import RunOptions
from jaxrl_po.run.store import folder
from jaxrl_po.run.store.checkpoint import Store

FIELDS = settings.fields_of({"": RunOptions})
STORED = {"seed": 0, "total_steps": 100, "config.gamma": 0.9, "config.hidden": [8]}


def inspect(path, resume=False, overwrite=False):
    return folder.inspect(str(path), resume=resume, overwrite=overwrite)


@pytest.fixture
def used(tmp_path):
    folder.write_json(tmp_path / "config.json", {"seed": 3})
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0}\n')
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    return tmp_path


def test_a_folder_that_was_only_claimed_is_free(tmp_path):
    with folder.claim(str(tmp_path), overwrite=False):
        pass
    assert inspect(tmp_path) == {}
    assert inspect(tmp_path, resume=True) == {}


@pytest.fixture
def begun(tmp_path):
    """Returns the folder of a run that was interrupted while its programs compiled."""
    folder.write_settings(tmp_path, {"script": "control", "seed": 3})
    (tmp_path / "checkpoints" / "latest").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").write_text('{"iterat')
    (tmp_path / "wandb_id").write_text("1")
    return tmp_path


def test_run_without_lines_does_not_block_same_command(begun):
    assert inspect(begun) == {}
    found = {"format": 1, "script": "control", "seed": 3, "out": str(begun)}
    assert inspect(begun, resume=True) == found


def empty_mount(out):
    """A disk that is not mounted may hold a checkpoint of the run."""
    away = out.with_name(f"{out.name}-away")
    away.mkdir()
    shutil.rmtree(out / "checkpoints")
    (out / "checkpoints").symlink_to(away)


@cases(
    "change",
    lambda out: (out / "notes.txt").touch(),
    lambda out: (out / "checkpoints" / "latest" / "0").mkdir(),
    lambda out: (out / "metrics.jsonl").write_text('{"iteration": 0}\n'),
    lambda out: (out / "arms").mkdir() or (out / "arms" / "1.1.json").touch(),
    lambda out: (out / "sweep.json").touch(),
    lambda out: (out / "config.json").write_text('{"model_type": "llama"}'),
    lambda out: (out / "config.json").write_text("{"),
    lambda out: (out / "config.json").unlink(),
    empty_mount,
)
def test_what_may_be_more_than_a_beginning_blocks(begun, change):
    change(begun)
    with pytest.raises(ConfigError, match="already holds files"):
        inspect(begun)


def test_flags_of_an_unfinished_start_are_dropped(used):
    (used / folder.CONFIG).write_text(
        '{"seed": 3, "overwrite": true, "resume": true, "distributed": true, "process_id": 1}'
    )
    assert flags.current(inspect(used, resume=True), {"": RunOptions}) == {"seed": 3}


@cases(
    "out, switches, message",
    ("", {}, "out: must name a folder"),
    (".", {}, r"^out: \S+ already holds files; give resume .* overwrite .* or choose another$"),
    (".", {"resume": True, "overwrite": True}, "resume: must be left out with overwrite"),
    ("odd [1]/a", {}, r"^out: .*odd \[1\]/a must have no \[ in its path"),
    ("notes.txt", {}, r"^out: \S+notes.txt must be a folder, but .*notes.txt is a file"),
    ("notes.txt/below", {}, r"^out: \S+below must be a folder, but .*notes.txt is a file"),
    ("checkpoints/..", {}, "already holds files"),
)
def test_a_place_that_cannot_be_used(used, out, switches, message):
    before = sorted(used.rglob("*"))
    with pytest.raises(ConfigError, match=message) as caught:
        inspect(used / out if out else "", **switches)
    assert "\n" not in str(caught.value)
    assert sorted(used.rglob("*")) == before


def test_a_place_that_cannot_be_written(used, monkeypatch):
    monkeypatch.setattr(folder.os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match="can be written"):
        inspect(used / "new")


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ConfigError, match=r"^out: .* cannot be used: \S+/file/x: Not a directory"),
        folder.claim(str(tmp_path / "file" / "x"), overwrite=False),
    ):
        pass


def test_resuming_what_is_no_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        inspect(tmp_path, resume=True)


def test_overwriting_removes_links_and_keeps_their_targets(used, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("scratch")
    (elsewhere / "3").mkdir()
    (used / "checkpoints").rmdir()
    (used / "checkpoints").symlink_to(elsewhere)
    (used / "tensorboard").symlink_to(elsewhere / "gone")
    (used / "programs").mkdir()
    (used / "programs" / "1").symlink_to(elsewhere)
    with folder.claim(str(used), overwrite=True):
        assert sorted(path.name for path in used.iterdir()) == [".lock", "notes.txt"]
    assert list(elsewhere.iterdir()) == [elsewhere / "3"]


def test_undeletable_file_is_named_and_folder_stays(used, monkeypatch):
    (used / "checkpoints" / "3").write_text("")

    unlink = os.unlink

    def refuse(path, **_):
        if path.name == "3":
            raise OSError(errno.EACCES, "Permission denied", str(path))
        unlink(path)

    monkeypatch.setattr(os, "unlink", refuse)
    with (
        pytest.raises(
            ConfigError,
            match=r"^overwrite: \S+/checkpoints/3 cannot be deleted: Permission denied; other "
            r"files of the run may be deleted already$",
        ),
        folder.claim(str(used), overwrite=True),
    ):
        pass
    assert folder.read_settings(used) == {"seed": 3}


def test_overwriting_empties_a_mount_point(used, monkeypatch):
    (used / "checkpoints" / "3").write_text("")
    monkeypatch.setattr(folder.os, "rmdir", refusal(errno.EBUSY))
    with folder.claim(str(used), overwrite=True):
        names = [path.name for path in sorted(used.rglob("*"))]
    assert names == [".lock", "checkpoints", "notes.txt"]


@cases("name", "", "checkpoints", "checkpoints/latest")
def test_dangling_link_is_not_written_through(used, tmp_path_factory, name):
    (used / "checkpoints" / "latest").mkdir()
    place = tmp_path_factory.mktemp("place")
    out, away = place / "run", place / "away"
    shutil.copytree(used, out)
    shutil.rmtree(out / name)
    (out / name).symlink_to(away)
    with (
        pytest.raises((ConfigError, OSError), match="File exists") as caught,
        folder.claim(str(out), overwrite=False),
        Store(out / "checkpoints" / "latest"),
    ):
        pass
    assert str(out / name) in str(caught.value)
    assert (out / name).is_symlink()
    assert not away.exists()


def test_two_runs_cannot_hold_one_folder(tmp_path):
    """The lock belongs to an open file: another process meets the lock as another `open` does."""
    with folder.claim(str(tmp_path), overwrite=False):
        (tmp_path / "metrics.jsonl").write_text("kept")
        with (
            pytest.raises(ConfigError, match="is in use by another run"),
            folder.claim(str(tmp_path), overwrite=True),
        ):
            pass
        assert (tmp_path / "metrics.jsonl").read_text() == "kept"
    with folder.claim(str(tmp_path), overwrite=True):
        assert not (tmp_path / "metrics.jsonl").exists()


@cases("number", errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
def test_file_system_without_locks_is_noted_and_used(tmp_path, monkeypatch, capsys, number):
    monkeypatch.setattr(folder.fcntl, "flock", refusal(number))
    with folder.claim(str(tmp_path), overwrite=False):
        pass
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"note: --out={tmp_path} cannot be locked (")
    monkeypatch.setattr(folder.fcntl, "flock", refusal(errno.EIO))
    with (
        pytest.raises(ConfigError, match=r"^out: \S+ cannot be used: Input/output error$"),
        folder.claim(str(tmp_path), overwrite=False),
    ):
        pass


def refusal(number):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    return refuse


@cases(
    "changed, message",
    (
        {"seed": 1},
        r"^seed: must be 0, as in the run in runs/x, got 1; leave it out, or choose another "
        "folder$",
    ),
    ({"config.gamma": 0.99}, r"^config\.gamma: must be 0\.9, as .* got 0\.99; leave"),
    ({"config.hidden": (8, 8)}, r"^config\.hidden: must be 8, as .* got 8,8; leave"),
    ({"total_steps": 99}, r"^total_steps: must be at least 100, .* got 99: it may only grow"),
)
def test_going_on_with_other_settings_names_the_flag(changed, message):
    same = {"seed": 0, "total_steps": 100, "config.gamma": 0.9, "config.hidden": (8,)}
    folder.require_same(same, STORED, FIELDS, "runs/x")
    with pytest.raises(ConfigError, match=message):
        folder.require_same(same | changed, STORED, FIELDS, "runs/x")


def test_json_is_strict(tmp_path):
    folder.write_json(
        tmp_path / "x.json", {"seed": 0, "resolved": {"x": float("nan"), "device": "2 × cpu"}}
    )
    assert json.loads((tmp_path / "x.json").read_text()) == {
        "seed": 0,
        "resolved": {"x": None, "device": "2 × cpu"},
    }


@cases(
    "config",
    "5",
    '{"resolved": []}',
    '{"resolved": {"code": 5}}',
    '{"env": null}',
    '{"init_from": 5}',
    "{bad",
)
def test_damaged_settings_are_named(used, config):
    (used / folder.CONFIG).write_text(config)
    with pytest.raises(ConfigError, match=r"^resume: \S+ holds a damaged config.json$"):
        inspect(used, resume=True)


@cases(
    "name, why",
    ("~/runs", "must not begin with ~"),
    ("x" * 300, "cannot be used: File name too long$"),
)
def test_names_that_cannot_be_used(name, why):
    for flag, check in (
        ("out", lambda: inspect(name)),
        ("record", lambda: folder.require_file(f"{name}.npz", ".npz", "record")),
    ):
        with pytest.raises(ConfigError, match=rf"^{flag}: {name}\S* {why}"):
            check()
