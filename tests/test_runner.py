"""Tests the training loop: chunks, lines, checkpoints, resume."""

import os
import signal
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from probes import one_piece
from scripts import lines
from tables import cases
from toy_run import SEEDS, Silent, bits, greedy, job, run, toy

from jaxrl_po.masked import Mean
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import processes
from jaxrl_po.run.devices.memory import measure_memory
from jaxrl_po.run.loop import programs, signals
from jaxrl_po.run.loop.runner import Diverged, Log, extend_streaks, read_aside
from jaxrl_po.run.store import metrics
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import read


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return path, run(path)


def test_the_chunks_are_the_iterations_one_by_one(whole):
    path, outcome = whole
    state, sizes = toy().init(job().keys), []
    step = jax.jit(toy().step)
    for _ in range(23):
        state, metrics = step(state)
        sizes.append(np.asarray(metrics["size"].value()))
    np.testing.assert_allclose(outcome.state.params.policy, state.params.policy, rtol=1e-6)
    rows = lines(path)
    assert [row["iteration"] for row in rows] == [0, 5, 10, 15, 20, 23]
    assert [row["step"] for row in rows] == [0, 50, 100, 150, 200, 230]
    np.testing.assert_allclose(rows[1]["size"], np.mean(sizes[:5], axis=0), rtol=1e-6)
    np.testing.assert_allclose(rows[5]["size"], np.mean(sizes[20:], axis=0), rtol=1e-6)
    assert [row["iteration"] for row in rows if "greedy_return" in row] == [0, 10, 20, 23]


def test_row_holds_seeds_aggregates_and_clock(whole):
    row = read(whole[0] / "metrics.jsonl")[1]
    assert len(row["size"]) == SEEDS
    assert row["size/mean"] == pytest.approx(np.mean(row["size"]))
    # Of three seeds no seed is dropped.
    assert row["size/iqm"] == pytest.approx(np.mean(row["size"]))
    clock = {name for name in row if name.startswith("time/")}
    assert clock == {"time/seconds", "time/steps_per_second", "time/compile_seconds"}
    assert row["time/steps_per_second"] == pytest.approx(5 * 10 * SEEDS / row["time/seconds"])


def test_latest_and_best_are_kept_apart(whole):
    path, outcome = whole
    scores = {
        row["iteration"]: row["greedy_return/mean"] for row in lines(path) if "greedy_return" in row
    }
    with (
        Store(path / "checkpoints" / "best") as best,
        Store(path / "checkpoints" / "latest") as latest,
    ):
        assert best.iterations() == [max(scores, key=scores.get)]
        assert latest.iterations() == [20, 23]
        iteration, state = latest.load(outcome.state)
        assert bits(state) == bits(outcome.state)
        _, state = best.load(outcome.state)
        assert float(greedy(state)["greedy_return"].mean()) == pytest.approx(
            max(scores.values()), rel=1e-6
        )
    assert iteration == 23


def test_lines_after_the_checkpoint_are_written_again(tmp_path, whole):
    run(tmp_path, iterations=10)
    with (tmp_path / "metrics.jsonl").open(
        "a"
    ) as file:  # the state after a kill between a line and its checkpoint
        file.write(
            '{"iteration": 15, "step": 150, "greedy_return/mean": 1e9}\n{"iteration": 20, "st'
        )
    outcome = run(tmp_path, resume=True)
    assert lines(tmp_path) == lines(whole[0])
    assert bits(outcome.state) == bits(whole[1].state)


def test_a_larger_total_extends_the_run(tmp_path, whole):
    run(tmp_path, iterations=12)
    assert bits(run(tmp_path, resume=True).state) == bits(whole[1].state)
    rows = {row["iteration"]: row for row in lines(tmp_path)}
    assert list(rows) == [0, 5, 10, 12, 15, 20, 23]  # the former last iteration keeps its line
    assert rows[20] == lines(whole[0])[4]


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    first = run(tmp_path, iterations=5)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    reporter = Silent()
    again = run(tmp_path, reporter, iterations=5, resume=True)
    assert reporter.phases == []  # no program is compiled
    assert reporter.reported == ["nothing left to do: iteration 5 (step 50) is reached"]
    assert bits(again.state) == bits(first.state)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_damaged_checkpoint_is_reported_and_dropped(tmp_path, whole):
    run(tmp_path, iterations=15)
    victim = tmp_path / "checkpoints" / "latest" / "15" / "default" / "manifest.ocdbt"
    victim.write_bytes(victim.read_bytes()[:-1])
    reporter = Silent()
    outcome = run(tmp_path, reporter, resume=True)
    assert reporter.reported[1].endswith("15 is damaged and dropped")
    assert reporter.reported[2] == "resuming at iteration 10 (step 100)"
    assert lines(tmp_path) == lines(whole[0])
    assert bits(outcome.state) == bits(whole[1].state)


def test_a_seed_that_only_skips_stops_the_run(tmp_path):
    # seed 1 skips every update from step 12 on: the fourth skipped update in a row is iteration 16,
    # counted from 1
    learner = toy(lambda step, seed: (seed == 1) & (step >= 12))
    with pytest.raises(
        Diverged,
        match=r"seed 1: .* 4 iterations up to iteration 16 \(step 160\); .* iteration 10, stays",
    ):
        run(tmp_path, learner=learner, skipped=4)
    with Store(tmp_path / "checkpoints" / "latest") as latest:
        assert latest.iterations() == [5, 10]  # no state of the bad streak
    assert lines(tmp_path)[-1]["skipped"] == [0.0, 1.0, 0.0]


def test_nothing_tried_is_not_a_skip():
    streak, _ = extend_streaks(np.array([5]), Mean(np.zeros((1, 1)), np.zeros((1, 1))), patience=9)
    assert streak.tolist() == [0]


def test_memory_does_not_grow_with_the_iterations(tmp_path):
    live = []
    run(
        tmp_path,
        Silent(lambda row: live.append(sum(x.nbytes for x in jax.live_arrays()))),
        iterations=100,
    )
    assert len(live) == 21
    assert max(live[2:]) <= max(live[:2])


def test_memory_is_reported_and_in_first_row(tmp_path):
    reporter = Silent()
    run(tmp_path, reporter, iterations=5)
    assert reporter.reported[0].startswith("3 seeds on 1 device; a device holds 96 bytes ")
    first, second = read(tmp_path / "metrics.jsonl")
    # each seed has four floats, a key of two words, the coefficient and the step
    assert first["memory/state_bytes"] == SEEDS * (4 * 4 + 8 + 4 + 4)
    assert first["memory/peak_bytes"] > first["memory/state_bytes"]
    assert not any(name.startswith("memory/") for name in second)


def test_a_compiler_that_tells_nothing_of_memory(whole):
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), whole[1].state
    )
    held = measure_memory(SimpleNamespace(memory_analysis=lambda: None), like)
    assert held.describe() == "a device holds 96 bytes of state"


def read_walk(arrays):
    """Returns the first two components of the walk of each seed."""
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(arrays))
    return [{"seed": s, "at": row.tolist()} for s, row in enumerate(arrays["walk"])]


EXAMPLES = Examples(lambda state: {"walk": state.params.policy[:, :2]}, read_walk)


def test_examples_of_every_evaluation_are_kept(tmp_path, whole):
    outcome = run(tmp_path, examples=EXAMPLES)
    rows = read(tmp_path / "samples.jsonl")
    evaluated = [row for row in lines(tmp_path) if "greedy_return" in row]
    assert [(row["iteration"], row["step"], row["seed"]) for row in rows] == [
        (row["iteration"], row["step"], seed) for row in evaluated for seed in range(SEEDS)
    ]
    np.testing.assert_allclose(
        [row["at"] for row in rows[-SEEDS:]], outcome.state.params.policy[:, :2], rtol=1e-6
    )
    assert lines(tmp_path) == lines(whole[0])  # showing examples does not change the run
    assert not (whole[0] / "samples.jsonl").exists()


def test_a_resumed_run_loses_and_doubles_no_example(tmp_path):
    run(tmp_path / "whole", examples=EXAMPLES)
    cut = tmp_path / "cut"
    run(cut, examples=EXAMPLES, iterations=10)
    with (cut / "samples.jsonl").open(
        "a"
    ) as file:  # the state after a kill between the examples and their checkpoint
        file.write(
            '{"iteration": 20, "step": 200, "seed": 0, "at": [0.0, 0.0]}\n{"iteration": 20, "st'
        )
    run(cut, examples=EXAMPLES, resume=True)
    assert (cut / "samples.jsonl").read_bytes() == (tmp_path / "whole/samples.jsonl").read_bytes()
    run(cut, examples=EXAMPLES)  # the run in `cut` is started again, not resumed
    assert (cut / "samples.jsonl").read_bytes() == (tmp_path / "whole/samples.jsonl").read_bytes()


def test_one_program_serves_every_chunk_and_every_length(tmp_path):
    traced = []

    def step(state):
        traced.append(1)
        return toy().step(state)

    run(tmp_path / "a", learner=one_piece(toy().init, step), iterations=5)
    short = len(traced)
    traced.clear()
    run(tmp_path / "b", learner=one_piece(toy().init, step), iterations=23)
    assert 1 <= len(traced) <= short


def test_later_of_equal_scores_is_best(tmp_path):
    """A tie between initial and trained policy selects the trained policy."""
    log = Log(tmp_path / "metrics.jsonl", "score", after=0)
    rows = [{"iteration": i, "score": [x], "score/mean": x} for i, x in enumerate((0.0, 0.0, -1.0))]
    assert [log.write(row) for row in rows] == [True, True, False]


def test_partial_mean_selects_no_checkpoint(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    log = Log(tmp_path / "metrics.jsonl", "score", after=0)
    part = {"score": [1.0], "score/mean": 1.0, "evaluation_failures": [0.25]}
    assert log.write({"iteration": 1, **part})  # the first checkpoint
    assert log.write({"iteration": 2, **part, "score/mean": 0.5, "evaluation_failures": [0.0]})
    assert not log.write({"iteration": 3, **part})


def test_row_with_a_nan_seed_is_not_best(tmp_path):
    log = Log(tmp_path / "metrics.jsonl", "score", after=0)
    scores = ([90.0, 92.0], [100.0, np.nan], [95.0, 96.0])
    best = [
        log.write({"iteration": i, **metrics.by_seed({"score": values})})
        for i, values in enumerate(scores)
    ]
    assert best == [True, False, True]
    again = Log(tmp_path / "metrics.jsonl", "score", after=2)
    assert not again.write({"iteration": 3, **metrics.by_seed({"score": [95.0, 95.5]})})


@cases("seconds, calls", (0.0, [1] * 10), (2.0, [1, 2, 2, 2, 2, 1]), (1e9, [1, 4, 5]))
def test_chunk_is_split_into_timed_calls(monkeypatch, seconds, calls):
    """Each iteration takes a second; in a call of n iterations, the first n rows of the metrics are
    valid."""
    now, asked = [0.0], []

    def program(state, n):
        asked.append(int(n))
        now[0] += float(n)
        counts = np.where(np.arange(10) < n, state + np.arange(10), -1)
        return state + n, {"count": Mean(counts[:, None], np.ones((10, 1)))}

    monkeypatch.setattr(programs, "SECONDS_OF_CALL", seconds)
    monkeypatch.setattr(programs, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    chunk, never = programs.run_in_timed_calls(program), threading.Event()
    state, first, *_ = chunk(np.int32(0), np.int32(5), print, never)
    state, second, count, _ = chunk(state, np.int32(5), print, never)
    assert (state, count) == (10, 5)
    assert asked == calls
    counts = np.concatenate([first["count"].total, second["count"].total])
    np.testing.assert_array_equal(counts, np.arange(10)[:, None])
    assert first["count"].count.shape == (5, 1)


def test_processes_agree_on_call_length_and_stop(monkeypatch):
    """The other process is slower, and receives a signal at its second call."""
    asked, heard = [], [False, False, True]

    def program(state, n):
        asked.append(int(n))
        return state + n, {}

    monkeypatch.setattr(processes, "gather_values", lambda size: [size, 2])
    monkeypatch.setattr(processes, "any_of", lambda flag: heard.pop(0))
    *_, count, _ = programs.run_in_timed_calls(program)(np.int32(0), 9, print, threading.Event())
    assert (asked, count) == ([1, 2, 2], 5)


def interrupted_after(calls, monkeypatch):
    """Sends a signal within a chunk, after a number of the chunk's calls of one iteration."""
    asked, heard = [], threading.Event()

    def any_of(flag):
        if threading.current_thread() is not threading.main_thread():
            asked.append(flag)
            if len(asked) == calls:
                os.kill(os.getpid(), signal.SIGTERM)
                assert heard.wait(60)
                return True
        return flag

    monkeypatch.setattr(processes, "any_of", any_of)
    monkeypatch.setattr(signals, "say", lambda text: heard.set())
    monkeypatch.setattr(programs, "SECONDS_OF_CALL", 0.0)


@cases("calls", 2, 11)
def test_run_stopped_within_a_chunk_equals_uninterrupted(tmp_path, whole, monkeypatch, calls):
    with monkeypatch.context() as patch:
        interrupted_after(calls, patch)
        stopped = run(tmp_path, Silent())
    assert stopped.interrupted
    assert stopped.iteration % 5  # in the middle of the chunk
    assert read(tmp_path / "metrics.jsonl")[-1]["iteration"] == stopped.iteration // 5 * 5
    with monkeypatch.context() as patch:  # a second time, in the same chunk
        interrupted_after(1, patch)
        assert run(tmp_path, resume=True).iteration == stopped.iteration + 1
    outcome = run(tmp_path, resume=True)
    assert lines(tmp_path) == lines(whole[0])
    assert bits(outcome.state) == bits(whole[1].state)


@cases("content", "", "{}", '{"loss": [[[1.0]], [[1.0]]]}')
def test_partial_rows_of_other_iterations_are_ignored(tmp_path, content):
    (tmp_path / "aside").write_text(content)
    assert read_aside(tmp_path / "aside", 2) == {}
