"""Tests interrupts of `run.train`, `run.resume` and `run.sweep`: their result and resumption."""

import contextlib
import json
import os
import pickle
import signal
import threading

import jax
import numpy as np
import pytest
import toy_run
from toy_run import WALK, Silent

from jaxrl_po import run
from jaxrl_po.cli import launch
from jaxrl_po.run.experiment import sweeping, training
from jaxrl_po.run.loop import programs, runner, signals
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.loop.signals import SIGNALS
from jaxrl_po.run.store import metrics

SIZES = {"problem.num_envs": 2, "problem.num_steps": 4, "config.num_minibatches": 2}
SMALL = {"seeds": 2, "total_steps": 48, "over": SIZES}
ENDS = 6


@pytest.fixture(autouse=True)
def handlers():
    """Sets the signal handlers of a Python without `nohup`; each test must restore the handlers."""
    hangup = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    before = [signal.getsignal(each) for each in SIGNALS]
    yield before
    assert [signal.getsignal(each) for each in SIGNALS] == before
    signal.signal(signal.SIGHUP, hangup)


def train(**options):
    return run.train(WALK, ENDS, seeds=2, log_every=1, **options)


def signals_at(iteration, *numbers):
    """Returns an `on_row` during which signals arrive."""

    def on_row(row):
        if row["iteration"] == iteration:
            for number in numbers:
                # A default handler would end the tests.
                assert signal.getsignal(number) is not signal.SIG_DFL
                signal.raise_signal(number)

    return on_row


@pytest.fixture
def interrupt_in_update(monkeypatch):
    """Returns `interrupt_in_update(iteration)`, which sends a SIGINT while a run shows that
    iteration."""

    def at(iteration):
        def update(self, row, seconds_left):
            if row["iteration"] == iteration:
                signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(Progress, "update", update)

    return at


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a.params, b.params)


@pytest.mark.parametrize("number", SIGNALS)
def test_interrupted_holds_the_result_without_a_folder(number):
    with pytest.raises(run.Interrupted, match=r"\.trained") as error:
        train(on_row=signals_at(3, number))
    assert isinstance(error.value, KeyboardInterrupt)
    trained = error.value.trained
    assert trained.state.step.tolist() == [3, 3]
    assert [row["iteration"] for row in trained.rows] == [0, 1, 2, 3]
    assert (trained.folder, trained.interrupted, error.value.swept) == (None, True, None)
    assert str(pickle.loads(pickle.dumps(run.Interrupted("why")))) == "why"


def test_interrupted_run_resumes_as_if_it_were_not(tmp_path):
    whole = train()
    with pytest.raises(run.Interrupted) as error:
        train(out=tmp_path / "run", on_row=signals_at(3, signal.SIGINT))
    assert error.value.trained.rows == metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert error.value.trained.folder == tmp_path / "run"
    assert not whole.interrupted
    same(whole.state, train(out=tmp_path / "run", resume=True).state)


def test_one_interrupt_ends_a_loop_over_trainings():
    done = []

    def loop():
        for _ in range(3):
            train(on_row=signals_at(1, signal.SIGINT) if done else None)
            done.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert len(done) == 1


@pytest.mark.parametrize("iteration", [0, ENDS])
def test_interrupt_counts_in_first_and_last_row(iteration):
    with pytest.raises(run.Interrupted) as error:
        train(on_row=signals_at(iteration, signal.SIGINT))
    assert error.value.trained.rows[-1]["iteration"] == iteration


def test_second_interrupt_in_a_hook_raises_at_once():
    with pytest.raises(KeyboardInterrupt) as error:
        train(on_row=signals_at(3, signal.SIGINT, signal.SIGINT))
    assert type(error.value) is KeyboardInterrupt


def test_second_hangup_changes_nothing():
    with pytest.raises(KeyboardInterrupt) as error:
        train(on_row=signals_at(3, signal.SIGHUP, signal.SIGHUP))
    assert isinstance(error.value, run.Interrupted)


def test_second_interrupt_does_not_wait_for_the_iteration(tmp_path, monkeypatch):
    computing, heard, ended = (threading.Event() for _ in range(3))
    monkeypatch.setattr(signals, "say", lambda text: heard.set())

    def iterate(step, state):
        computing.set()
        assert ended.wait(60)
        return step(state)

    def interrupt():
        for each in (computing, heard):
            assert each.wait(60)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        runner.run(toy_run.job(iterate=iterate), tmp_path, Silent())
    assert not ended.is_set()
    ended.set()
    thread.join()


def test_keyboard_interrupt_of_a_hook_is_an_interrupt():
    def on_row(row):
        if row["iteration"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        train(on_row=on_row)
    assert error.value.trained.state.step.tolist() == [2, 2]


def test_interrupt_during_an_evaluation_finishes_it(tmp_path):
    def judge(scores):
        os.kill(os.getpid(), signal.SIGINT)
        return scores

    outcome = runner.run(toy_run.job(score_evaluation=judge), tmp_path, Silent())
    assert (outcome.interrupted, outcome.iteration) == (True, 0)
    assert "greedy_return" in metrics.read(tmp_path / "metrics.jsonl")[-1]


def test_interrupt_during_compilation_has_no_result(monkeypatch):
    ended = threading.Event()

    def compile_programs(job):
        os.kill(os.getpid(), signal.SIGINT)
        assert ended.wait(60)

    monkeypatch.setattr(programs, "compile_programs", compile_programs)
    with pytest.raises(KeyboardInterrupt) as error:
        train()
    ended.set()
    assert type(error.value) is KeyboardInterrupt


def test_interrupt_while_curves_are_drawn_loses_nothing(monkeypatch):
    def draw(plan, out):
        signal.raise_signal(signal.SIGINT)
        return drawn(plan, out)

    drawn = training.draw_curves
    monkeypatch.setattr(training, "draw_curves", draw)
    with pytest.raises(run.Interrupted) as error:
        train()
    assert error.value.trained.state.step.tolist() == [ENDS, ENDS]


def test_an_error_restores_the_handlers():
    with pytest.raises(ZeroDivisionError):
        train(on_row=lambda row: 1 / 0)


def test_another_thread_sets_no_handler(monkeypatch):
    def refuse(*_):
        raise ValueError

    trained = []
    monkeypatch.setattr(signals.signal, "signal", refuse)
    thread = threading.Thread(target=lambda: trained.append(train()))
    thread.start()
    thread.join()
    monkeypatch.undo()
    assert not trained[0].interrupted


def test_handler_that_c_set_stays(monkeypatch):
    seen, of = [], signal.getsignal
    monkeypatch.setattr(
        signal, "getsignal", lambda number: None if number == signal.SIGTERM else of(number)
    )
    with signals.handle_signals(None, leave_early=False):
        seen.append(of(signal.SIGTERM))
        assert of(signal.SIGINT) is not signal.default_int_handler
    monkeypatch.undo()
    assert seen == [signal.SIG_DFL]


def test_interrupt_between_handlers_restores_all(monkeypatch):
    calls, put = [], signal.signal

    def interrupted(number, handler):
        calls.append(number)
        before = put(number, handler)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return before

    monkeypatch.setattr(signal, "signal", interrupted)
    with pytest.raises(KeyboardInterrupt), signals.handle_signals(None, leave_early=False):
        raise AssertionError
    monkeypatch.undo()


@pytest.mark.usefixtures("trace_only")
def test_experiments_and_resumed_runs_raise_interrupted(tmp_path):
    experiment = run.Experiment(env="CartPole-v1", log_every=1, out=tmp_path / "run", **SMALL)
    for iteration, call in (
        (1, run.train),
        (2, lambda _, **more: run.resume(tmp_path / "run", **more)),
    ):
        with pytest.raises(run.Interrupted) as error:
            call(experiment, on_row=signals_at(iteration, signal.SIGINT))
        assert error.value.trained.rows[-1]["iteration"] == iteration
    assert run.resume(tmp_path / "run").rows[-1]["iteration"] == 6


@pytest.mark.usefixtures("trace_only")
def test_interrupted_command_exits_with_zero(tmp_path, interrupt_in_update, capsys):
    interrupt_in_update(1)
    over = [f"--{name}={value}" for name, value in SIZES.items()]
    sizes = ["--seeds=2", "--total_steps=48", "--log_every=1"]
    with contextlib.suppress(KeyboardInterrupt):  # a default handler would end the tests
        ended = launch.control(["--env=CartPole-v1", f"--out={tmp_path / 'run'}", *sizes, *over])
    assert ended == 0
    assert "stopped and saved at iteration 1; --resume continues" in capsys.readouterr().out


OVER = {"config.learning_rate": [1e-3, 1e-2], "network.width": [4, 8]}


def sweep(out, **options):
    """Returns a sweep of two programs, each with two step sizes."""
    experiment = run.Experiment(env="CartPole-v1", out=out, **SMALL)
    return run.sweep(experiment, over=OVER, evaluations=3, **options)


@pytest.mark.parametrize("evaluated", [True, False])
def test_interrupted_sweep_holds_programs_so_far(tmp_path, monkeypatch, evaluated):
    ended = []

    def program(group, options, *_):
        number = len(ended)
        ended.append(number)
        if number == 1 and not evaluated:
            raise KeyboardInterrupt
        scores = [[[number + float(each.config.method.learning_rate)]] * 2 for each in group]
        return {"steps": [8], "scores": scores, "seconds": 1.0, "compile_seconds": 1.0}, number == 1

    monkeypatch.setattr(sweeping, "run_group", program)
    with pytest.raises(run.Interrupted, match=r"\.swept") as error:
        sweep(tmp_path)
    swept = error.value.swept
    assert len(swept.rows) == (4 if evaluated else 2)
    assert swept.best["network.width"] == (8 if evaluated else 4)
    assert (swept.best["config.learning_rate"], swept.folder) == (1e-2, tmp_path)
    assert len(json.loads((tmp_path / "sweep.json").read_text())) == 2
    assert len(sweep(tmp_path, resume=True).rows) == 4
    assert ended == [0, 1, 2]


@pytest.mark.usefixtures("trace_only")
@pytest.mark.parametrize(("iteration", "steps"), [(0, None), (2, [16]), (6, [16, 32, 48])])
def test_interrupted_program_of_a_sweep_has_its_evaluations(
    tmp_path, interrupt_in_update, iteration, steps
):
    interrupt_in_update(iteration)
    with pytest.raises(run.Interrupted) as error:
        sweep(tmp_path)
    assert [row["steps"] for row in error.value.swept.rows] == ([steps] * 2 if steps else [])
    assert not (tmp_path / "sweep.json").exists()
