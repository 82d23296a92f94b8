"""Tests failures around a run: no data are lost silently, and a line reports the cause and the
saved state.

The runs of this file take a random walk instead of training. Other files test kills (`test_kills`);
the files that a kill leaves, seeds that remain non-finite (`test_runner`); a second interrupt
(`test_interrupts`); damaged checkpoints, kills while saving (`test_checkpoint`); other numbers of
devices (`test_sharding`, `test_processes`); unusable folders (`test_folder`); NaN, exceptions and
hangs of a Python reward (`test_scoring`, `test_rewarded_runs`).
"""

import errno
import gc
import json
import math
import os
import re
import resource
import shutil
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import one_piece
from scripts import everything, lines
from tables import cases
from test_earlier import fake_run
from toy_run import start_of

from jaxrl_po import __main__ as front
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.options import NEW_MODEL, RunConfig, RunOptions
from jaxrl_po.run.experiment.settings import length_of
from jaxrl_po.run.loop import runner
from jaxrl_po.run.loop.job import Display, Evaluation, Layout, build_job
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.store import checkpoint
from jaxrl_po.run.store import metrics as metrics_lib
from jaxrl_po.run.store.checkpoint import SaveError, Store
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import ActorCritic

# floats that do not compress, so that a checkpoint's file is larger than any other file
SIZE = 8_000
FLAGS = ["--seeds=2", "--devices=1", "--total_steps=230", "--log_every=5", "--eval_every=2"]


def walk(poison=lambda step: False):
    """Builds a random walk of one seed; `poison` marks the updates that are skipped."""

    def step(state):
        key, noise_key = jax.random.split(state.key)
        params = ActorCritic(0.9 * state.params.policy + jax.random.normal(noise_key, (SIZE,)))
        metrics = {
            "episode_return": Mean(params.policy[0], jnp.float32(1.0)),
            "skipped": Mean(jnp.float32(poison(state.step)), jnp.float32(1.0)),
        }
        return state._replace(params=params, key=key, step=state.step + 1), metrics

    return one_piece(lambda key: start_of(key, SIZE), step)


def second_number(params, collector, key):
    return {"greedy_return": params.policy[1]}


def domain(learner, measure=second_number):
    """Returns the functions of a training command, with a learner of one seed."""

    def build(config, placement, world):
        return build_job(
            learner,
            Layout(placement),
            length_of(config.run, 10),
            seed=config.run.seed,
            evaluation=Evaluation(measure, score="greedy_return"),
            display=Display("a walk"),
        )

    return SimpleNamespace(
        NAME="walk",
        UNIT="steps",
        OPTIONS=RunOptions,
        CONFIG=RunConfig,
        initial_model=lambda options: NEW_MODEL,
        require_known=lambda *_: None,
        presets=lambda *_: {},
        tuned=lambda *_: {},
        sections=lambda *_: {},
        open_world=lambda config: None,
        rows=lambda config: 16,
        steps=lambda config, world: 10,
        build=build,
    )


WALK = domain(walk())


def main(out, *arguments, script=WALK):
    return launch.main(script, [*FLAGS, *arguments, f"--out={out}"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("faults") / "whole"
    assert main(out, "--deterministic") == 0
    return everything(out)


def at(monkeypatch, iteration, happens):
    """Calls a function once, between the line of an iteration and the iteration's checkpoint."""
    update, pending = Progress.update, [happens]

    def hook(self, row, seconds_left):
        update(self, row, seconds_left)
        if row["iteration"] == iteration and pending:
            pending.pop()()

    monkeypatch.setattr(Progress, "update", hook)


@pytest.fixture
def limit_files():
    """Limits the size of files: larger writes are refused as on a full disk.

    Programs in the compilation cache are not truncated by the limit.
    """
    before, seconds = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
    gc.collect()  # remains of a failed write cause warnings here


def test_full_disk_ends_run_cleanly_without_loss(whole, tmp_path, monkeypatch, capfd, limit_files):
    at(monkeypatch, 10, lambda: limit_files(20_000))
    status = main(tmp_path, "--deterministic")
    limit_files(resource.RLIM_INFINITY)
    assert status == 1
    [line] = capfd.readouterr().err.splitlines()
    kept = checkpoint.newest_intact(tmp_path / "checkpoints" / "latest")
    assert kept in (0, 5)  # the checkpoint of iteration 5 may have been half written
    assert re.match(rf"error: {tmp_path}(/checkpoints/.*/\d+)?: File too large; ", line)
    assert line.endswith(
        f"; --resume continues from iteration {kept}, which is intact in {tmp_path}"
    )
    rows = lines(tmp_path)
    assert rows == whole[0][: len(rows)]
    assert rows[-1]["iteration"] >= 10
    assert main(tmp_path, "--resume") == 0
    assert everything(tmp_path) == whole


def test_read_only_folder_is_reported_with_remaining_files(whole, tmp_path, monkeypatch, capfd):
    append = metrics_lib.append

    def refuse(path, *rows):
        if rows[0]["iteration"] > 10:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        append(path, *rows)

    monkeypatch.setattr(metrics_lib, "append", refuse)
    assert main(tmp_path, "--deterministic") == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line == (
        f"error: {tmp_path / 'metrics.jsonl'}: Read-only file system; "
        f"--resume continues from iteration 10, which is intact in {tmp_path}"
    )
    monkeypatch.setattr(metrics_lib, "append", append)
    assert main(tmp_path, "--resume") == 0
    assert everything(tmp_path) == whole


def test_moved_folder_is_not_created_again(tmp_path, monkeypatch, capfd):
    out, there = tmp_path / "run", tmp_path / "moved"

    def move():
        while not (out / "checkpoints" / "latest" / "0" / checkpoint.CHECKSUMS).exists():
            time.sleep(0.001)
        out.rename(there)

    at(monkeypatch, 5, move)
    assert main(out) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert "No such file or directory" in line
    assert not out.exists()
    assert main(there, "--resume") == 0


@cases("goes_on", "full", "closed")
def test_a_run_goes_on_without_its_output(tmp_path, monkeypatch, capfd, goes_on):
    reading, writing = os.pipe()
    os.close(reading)
    with open("/dev/full" if goes_on == "full" else writing, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(SystemExit) as left:
            flags.run_script(lambda _: main(tmp_path))
    if goes_on == "full":
        os.close(writing)
    assert left.value.code == 0
    assert (tmp_path / "summary.json").exists()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("note: standard output: ")


def entered(monkeypatch, *argv):
    """Returns the exit status of a command, which exits through `flags.run_script`."""
    monkeypatch.setattr(sys, "argv", ["jaxrl-po", *map(str, argv)])
    with pytest.raises(SystemExit) as left:
        flags.run_script(front.main)
    return left.value.code


def test_comparison_on_full_disk_ends_in_one_line(tmp_path, monkeypatch, capsys, limit_files):
    run = fake_run(tmp_path / "run", [1.0, 2.0])
    limit_files(100)
    status = entered(monkeypatch, "plot", run, f"--out={tmp_path}")
    assert status == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path}: File too large"
    status = entered(monkeypatch, "report", run, f"--out={tmp_path / 'a.html'}")
    limit_files(resource.RLIM_INFINITY)
    assert status == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line == f"error: {tmp_path / 'a.html'}: File too large"


def test_nothing_saved_yet_is_said(tmp_path, capfd, limit_files):
    limit_files(20_000)
    status = main(tmp_path)
    limit_files(resource.RLIM_INFINITY)
    assert status == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.endswith("File too large; --resume continues from what is there, or begins again")
    assert main(tmp_path, "--resume") == 0


def test_checkpoints_that_are_gone_are_missed(whole, tmp_path, capfd):
    assert main(tmp_path, "--total_steps=100") == 0
    for path in (tmp_path / "checkpoints" / "latest").iterdir():
        path.rename(tmp_path / path.name)
    assert main(tmp_path, "--resume") == 0
    assert "no checkpoint is left to resume from: starts at iteration 0" in capfd.readouterr().out
    assert lines(tmp_path) == whole[0]


def test_checkpoint_replaces_another_only_once_complete(tmp_path, monkeypatch):
    def refuse(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Store(tmp_path, keep=1) as store:
        store.save(1, {"x": jnp.ones(3)})
        store.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "write_atomically", refuse)
            store.save(2, {"x": jnp.zeros(3)})
            with pytest.raises(SaveError, match=r"No space left on device: '.*/2'"):
                store.wait_until_finished()
        assert checkpoint.newest_intact(tmp_path) == 1
        store.save(3, {"x": jnp.zeros(3)})
        assert store.iterations() == [3]
        # A run that was rolled back leaves no files of its former future.
        store.save(2, {"x": jnp.zeros(3)})
        assert store.iterations() == [2]


def test_failed_write_of_many_arrays_is_reported_once(tmp_path, monkeypatch, capfd, limit_files):
    """One error is reported, however late tensorstore reports further errors to orbax's closed
    loop."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    noise = np.random.default_rng(0).normal(size=(12, SIZE))
    with Store(tmp_path) as store, Store(tmp_path / "other"):
        limit_files(2_000)
        store.save(1, {str(i): row for i, row in enumerate(noise)})
        with pytest.raises(SaveError, match="File too large"):
            store.wait_until_finished()
        limit_files(resource.RLIM_INFINITY)
    late, of_a_user = RuntimeError("Event loop is closed"), RuntimeError("mine")
    for error in (late, of_a_user):
        sys.unraisablehook(SimpleNamespace(exc_value=error, object=None))
    gc.collect()
    assert [each.exc_value for each in told] == [of_a_user]
    assert capfd.readouterr().err == ""


def test_best_state_is_on_disk_before_latest(tmp_path, monkeypatch):
    """In the other order, a run killed between the writes would continue past an unsaved best
    state."""
    gate, order, write = threading.Event(), [], Store._write

    def slow(self, iteration, arrays, first):
        if self._folder.name == "best":
            gate.wait(30)
        write(self, iteration, arrays, first)
        order.append(self._folder.name)

    monkeypatch.setattr(Store, "_write", slow)
    with Store(tmp_path / "best") as best, Store(tmp_path / "latest") as latest:
        best.save(1, {"x": jnp.ones(3)})
        latest.save(1, {"x": jnp.ones(3)}, after=best)
        time.sleep(0.2)
        assert checkpoint.newest_intact(tmp_path / "latest") is None
        gate.set()
        latest.wait_until_finished()
    assert order == ["best", "latest"]


def test_a_run_saves_its_best_state_first(tmp_path, monkeypatch):
    save, asked = Store.save, []

    def spy(self, iteration, state, *, after=None):
        asked.append((self._folder.name, after and after._folder.name))
        save(self, iteration, state, after=after)

    monkeypatch.setattr(Store, "save", spy)
    assert main(tmp_path, "--total_steps=50") == 0
    assert {pair for pair in asked if pair[0] == "latest"} == {("latest", "best")}


def jumping(jumps):
    """Returns a clock that jumps ahead or back by the next of `jumps` seconds at each reading."""
    state = {"looks": 0, "time": 1e6}

    def look():
        state["looks"] += 1
        state["time"] += jumps[state["looks"] % len(jumps)]
        return state["time"]

    return look


@cases("jumps", (3600.0, -7200.0, 1.0), (0.0,), (1e9,))
def test_clock_jump_spoils_no_number_or_line(whole, tmp_path, monkeypatch, capfd, jumps):
    wall, offset = time.time, max(jumps, key=abs)
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=jumping(jumps)))
    at(monkeypatch, 10, lambda: monkeypatch.setattr(time, "time", lambda: wall() + offset))
    assert main(tmp_path, "--deterministic", "--tensorboard") == 0
    monkeypatch.undo()
    assert everything(tmp_path) == whole
    for row in read(tmp_path / "metrics.jsonl")[1:]:
        assert row["time/seconds"] >= 0.0
        rate = row["time/steps_per_second"]
        assert rate is None or (math.isfinite(rate) and rate > 0.0)
    summary = json.loads((tmp_path / "summary.json").read_text())["steps_per_second"]
    assert summary is None or summary > 0.0
    # The return of the random walk.
    shown = re.sub(r"greedy return \S+", "", capfd.readouterr().out)
    assert (
        "-"
        not in "".join(shown.splitlines(keepends=True)[2:])
        .replace(str(tmp_path), "")
        .split("done: ")[0]
    )
    assert "inf" not in shown
    assert "nan" not in shown


def test_persistent_nan_updates_end_run_naming_the_seed(tmp_path, capfd):
    assert main(tmp_path, script=domain(walk(lambda step: step >= 7))) == 1
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(
        "error: seed 0: loss or gradient was not finite in any update of the 10 iterations "
        "up to iteration 17"
    )
    assert "the last good checkpoint, of iteration 5, stays" in line
    assert not (tmp_path / "summary.json").exists()


def test_deterministic_run_resumes_only_on_its_original_devices(tmp_path, capfd):
    bound, free = tmp_path / "bound", tmp_path / "free"
    assert main(bound, "--total_steps=50", "--deterministic") == 0
    shutil.copytree(bound, free)
    (free / "config.json").write_text(
        json.dumps(json.loads((free / "config.json").read_text()) | {"deterministic": False})
    )
    before = everything(bound)
    with pytest.raises(
        ConfigError,
        match=r"deterministic: promises the same bits only .*; "
        r"there differ placement: .* on 2 dev",
    ):
        main(bound, "--resume", "--devices=2", "--total_steps=100")
    assert everything(bound) == before
    capfd.readouterr()
    assert main(free, "--resume", "--devices=2", "--total_steps=100") == 0
    assert (
        "so numbers may differ: placement: 2 seeds on 1 device → 2 seeds on 2 devices, 1 on each"
    ) in capfd.readouterr().out
    assert [row["iteration"] for row in lines(free)] == [0, 5, 10]
