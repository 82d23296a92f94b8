import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from numpy.testing import assert_array_equal
from tables import cases

from jaxrl_po.run.store import checkpoint
from jaxrl_po.run.store.checkpoint import CheckpointError, Store


class State(NamedTuple):
    params: dict
    opt_state: tuple
    key: jax.Array
    step: jax.Array


def state(step=0):
    return State(
        params={
            "w": jnp.arange(600.0).reshape(20, 30) + step,
            "half": jnp.full(3, 1.5, jnp.bfloat16),
            "none": jnp.zeros((0, 3)),
        },
        opt_state=((), jnp.array([jnp.nan, -jnp.inf, -0.0])),
        key=jax.random.split(jax.random.key(step), 3),
        step=jnp.int32(step),
    )


def bits(tree):
    words = jax.tree.map(
        lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x,
        tree,
    )
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), np.asarray(x).tobytes()), words)


@pytest.fixture
def saved(tmp_path):
    with Store(tmp_path / "s") as store:
        for step in (1, 2, 3):
            store.save(step, state(step))
    return tmp_path / "s"


def load(folder, like=None):
    told = []
    with Store(folder) as store:
        iteration, loaded = store.load(state() if like is None else like, report=told.append)
        return iteration, loaded, told, store.iterations()


def largest(folder):
    return max(
        (path for path in (folder / "default/d").iterdir()), key=lambda path: path.stat().st_size
    )


def test_every_bit_comes_back(saved):
    iteration, loaded, told, _ = load(saved)
    assert iteration == 3
    assert jax.tree.structure(loaded) == jax.tree.structure(state())
    assert bits(loaded) == bits(state(3))
    assert told == []
    # the restored key draws the same numbers
    assert_array_equal(
        jax.random.normal(loaded.key[1], (4,)), jax.random.normal(state(3).key[1], (4,))
    )


def test_a_generator_of_another_kind_comes_back(tmp_path):
    keys = {"key": jax.random.key(5, impl="rbg")}
    with Store(tmp_path) as store:
        store.save(0, keys)
        assert bits(store.load(keys)[1]) == bits(keys)


def test_the_state_may_be_donated_at_once(tmp_path):
    overwrite = jax.jit(lambda x: x * 0.0 - 1.0, donate_argnums=0)
    x = jnp.arange(100_000.0)
    with Store(tmp_path) as store:
        store.save(0, {"x": x})
        jax.block_until_ready(overwrite(x))
        assert x.is_deleted()
        assert_array_equal(store.load({"x": jnp.zeros(100_000)})[1]["x"], np.arange(100_000.0))


def test_saving_the_same_iteration_again_replaces_it(tmp_path):
    with Store(tmp_path) as store:
        store.save(4, {"x": jnp.zeros(2)})
        store.save(4, {"x": jnp.ones(2)})
        assert_array_equal(store.load({"x": jnp.zeros(2)})[1]["x"], [1.0, 1.0])


def flip_one_bit(step):
    path = largest(step)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0b100
    path.write_bytes(content)


def remove_a_file(step):
    largest(step).unlink()


def garble_the_checksums(step):
    (step / "checksums.json").write_text("{")


def empty_the_checksums(step):
    (step / "checksums.json").write_text("{}")


DAMAGES = [flip_one_bit, remove_a_file, garble_the_checksums, empty_the_checksums]


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_reported_and_previous_is_used(saved, damage, capfd):
    damage(saved / "3")
    iteration, loaded, told, left = load(saved)
    assert iteration == 2
    assert bits(loaded) == bits(state(2))
    assert told == [f"checkpoint {saved / '3'} is damaged and dropped"]
    assert left == [2]
    assert capfd.readouterr().err == ""


def test_foreign_files_do_not_damage_checkpoints(saved):
    for place in ("", "3", "3/default", "3/default/d"):
        (saved / place / ".DS_Store").write_bytes(b"Bud1")
        (saved / place / "@eaDir").mkdir()
    iteration, loaded, told, left = load(saved)
    assert (iteration, told, left) == (3, [], [2, 3])
    assert bits(loaded) == bits(state(3)) == bits(checkpoint.peek(saved, state())[1])


def test_temporarily_unreadable_checkpoint_is_not_dropped(saved, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(checkpoint.Path, "read_bytes", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        load(saved)
    monkeypatch.undo()
    assert load(saved)[0] == 3


def test_an_unfinished_checkpoint_is_not_used(saved):
    (saved / "3" / "checksums.json").unlink()
    iteration, _, told, _ = load(saved)
    assert iteration == 2
    assert told == [f"checkpoint {saved / '3'} is unfinished and dropped"]


def test_peeking_finds_newest_intact_checkpoint_without_changes(saved, monkeypatch):
    # An intact checkpoint does not need other folders.
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    flip_one_bit(saved / "3")
    (saved / "4").mkdir()  # another process has just started to write this checkpoint
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    iteration, loaded = checkpoint.peek(saved, state())
    assert iteration == 2
    assert bits(loaded) == bits(state(2))
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before
    assert checkpoint.peek(saved / "absent", state()) is None
    with pytest.raises(CheckpointError, match="is not wanted"):
        checkpoint.peek(saved, state()._replace(params={}))
    flip_one_bit(saved / "2")
    assert checkpoint.peek(saved, state()) is None


@cases("raises", False, True)
def test_checkpoint_deleted_during_reading_is_not_used(saved, monkeypatch, raises):
    """The writer continues with the next checkpoint, which is then read in place of the deleted
    one."""
    restore, read = ocp.CheckpointManager.restore, []

    def overtaken(self, iteration, args):
        arrays = restore(self, iteration, args=args)
        read.append(iteration)
        if len(read) == 1:
            shutil.rmtree(saved)
            with Store(saved) as store:
                store.save(4, state(4))
            kept = {checkpoint.FORMAT: arrays[checkpoint.FORMAT]}
            arrays = {name: np.zeros_like(array) for name, array in arrays.items()} | kept
            if raises:
                raise FileNotFoundError("gone")
        return arrays

    monkeypatch.setattr(ocp.CheckpointManager, "restore", overtaken)
    iteration, loaded = checkpoint.peek(saved, state())
    assert (iteration, read) == (4, [3, 4])
    assert bits(loaded) == bits(state(4))


def test_if_all_are_damaged_nothing_is_removed(saved):
    for step in ("2", "3"):
        flip_one_bit(saved / step)
    before = sorted(path for path in saved.rglob("*"))
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .* is intact: \[2, 3\] are damaged"
    ):
        load(saved)
    assert sorted(path for path in saved.rglob("*")) == before


@cases(
    "change, message",
    (
        lambda s: s._replace(step=jnp.zeros(2, jnp.int32)),
        r"holds int32\[\] for \.step, where int32\[2\] is wanted",
    ),
    (
        lambda s: s._replace(step=jnp.float32(0)),
        r"holds int32\[\] for \.step, where float32\[\] is wanted",
    ),
    (
        lambda s: s._replace(opt_state=(jnp.zeros(1), s.opt_state[1])),
        r"holds nothing for \.opt_state\[0\]",
    ),
    (lambda s: s._replace(opt_state=()), r"holds \.opt_state\[1\], which is not wanted"),
)
def test_another_structure_is_refused(saved, change, message):
    with pytest.raises(CheckpointError, match=message):
        load(saved, like=change(state()))


def test_what_goes_wrong_in_the_background_is_raised(tmp_path):
    store = Store(tmp_path / "s")
    shutil.rmtree(tmp_path / "s")
    (tmp_path / "s").write_text("a file where the folder was")
    store.save(0, {"x": jnp.zeros(2)})
    with pytest.raises(OSError, match="s"):
        store.close()


KILLED = """
import sys, pathlib, jax.numpy as jnp
from jaxrl_po.run.store.checkpoint import Store
with Store(pathlib.Path(sys.argv[1])) as store:
    for i in range(100_000):
        store.save(i, {"x": jnp.full(20_000, i)})
        print(i, flush=True)
"""


def test_a_kill_while_saving_leaves_a_good_checkpoint(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout:
            if int(line) == 4:
                break
        time.sleep(0.013)
        os.kill(process.pid, signal.SIGKILL)
    with Store(tmp_path) as store:
        iteration, loaded = store.load({"x": jnp.zeros(20_000, jnp.int32)}, report=lambda _: None)
    assert iteration >= 3
    assert_array_equal(loaded["x"], np.full(20_000, iteration))
