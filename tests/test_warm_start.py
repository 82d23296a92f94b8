"""Tests the warm start of a run, in steps that the host starts: progress, numbers, interruption."""

import functools
import os
import re
import signal
import sys

import jax
import numpy as np
import pytest
import tiny
from tables import cases

from jaxrl_po import language
from jaxrl_po.cli import launch
from jaxrl_po.language import warm_start
from jaxrl_po.language.warm_start import BETWEEN
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import WarmStartProgram
from jaxrl_po.run.loop.progress import clock
from jaxrl_po.run.store.metrics import read

SMALL = [
    *(flag for flag in tiny.LANGUAGE if not flag.startswith(("--warm_start.", "--seeds", "--dev"))),
    "--warm_start.batch_size=8",
    "--warm_start.learning_rate=1e-2",
]
LEARNED = [
    "--reward=model",
    "--preferences.comparisons=16",
    "--preferences.batch_size=8",
    "--preferences.epochs=1",
    "--reward_model.width=8",
    "--reward_model.mlp_width=8",
    "--reward_model.layers=1",
    "--reward_model.heads=2",
    "--reward_model.kv_heads=1",
]
ACCURATE = ["--seeds=2", "--devices=2", "--warm_start.accuracy=0.9"]
STEPS = 2 * BETWEEN + 5


def job(out, *arguments):
    given = [*SMALL, *arguments, f"--out={out}"]
    return prepare(script, Experiment.parse(script, given).read())


def wait_for(function, *arguments):
    return function(*arguments), 0.0


def nothing(*arguments):
    pass


def slow(name, *arguments):
    return pytest.param([*arguments], id=name, marks=pytest.mark.slow)


@cases(
    "arguments",
    slow("seeds", *ACCURATE),
    pytest.param(["--seeds=1", "--devices=2", "--warm_start.accuracy=1"], id="rows"),
    slow("parameters", *ACCURATE, "--shard_params"),
    slow("learned reward", "--seeds=2", "--devices=1", "--algorithm=rloo", *LEARNED),
)
def test_the_state_is_that_of_one_program(tmp_path, arguments):
    given = ["--algorithm=grpo", f"--warm_start.steps={STEPS}", *arguments]
    made = job(tmp_path / "run", *given)
    expected = jax.jit(made.learner.init)(made.keys)
    init, parts = programs.compile_init(made)
    before = jax.tree.map(np.array, parts.begin(made.keys).params)
    fitted = programs.run_warm_start(parts, made.keys, wait_for, nothing, nothing)
    for x, y in zip(*map(jax.tree.leaves, (before, fitted)), strict=True):
        assert not np.array_equal(x, y)
    state = init((made.keys, fitted))
    for x, y in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        # Two programs may add in different orders.
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


def test_a_single_compiled_step_is_taken():
    task = language.tasks.addition(1)
    model = language.ModelSettings(width=16, layers=1).build(task.tokenizer.size)
    inits = [
        language.make_problem(task, model, num_prompts=1, group_size=2, warm=warm).init
        for warm in (language.WarmStart(steps=1, batch_size=2), None)
    ]
    trained, fresh = (jax.jit(init)(jax.random.key(0))[0].policy for init in inits)
    changes = jax.tree.map(lambda x, y: np.abs(x - y).max(), trained, fresh)
    assert max(jax.tree.leaves(changes)) > 1e-4


def test_every_seed_stops_where_it_would_stop_alone():
    """One of three seeds needs more steps than the other seeds, which wait for it and do not
    change."""
    task = language.tasks.addition(1)
    model = language.ModelSettings(width=32, layers=1, heads=2, kv_heads=2, mlp_width=32).build(
        task.tokenizer.size
    )
    settings = language.WarmStart(steps=400, accuracy=0.25, batch_size=64, learning_rate=5e-3)
    prompt = np.zeros((1, task.prompt_length), int), np.zeros(1, int)
    keys = jax.random.split(jax.random.key(0), 3)
    params = jax.jit(jax.vmap(lambda key: model.init(key, *prompt)))(keys)
    advance = functools.partial(warm_start.advance, model, task, settings)
    parts = WarmStartProgram(
        settings,
        jax.jit(jax.vmap(lambda key, each: warm_start.begin_warm_start(settings, each, key))),
        jax.jit(lambda fit, done, given: jax.vmap(advance, (0, None))(fit, done)),
        nothing,
    )
    done = []

    def show(name, detail, left):
        done.append(detail)

    together = programs.run_warm_start(
        parts._replace(begin=lambda keys: parts.begin(keys, params)), keys, wait_for, show, nothing
    )
    alone = jax.jit(lambda each, key: warm_start.warm_start(model, each, task, settings, key))
    params, together = jax.device_get((params, together))
    for i, key in enumerate(keys):
        expected = alone(jax.tree.map(lambda x, i=i: x[i], params), key)
        for x, y in zip(*map(jax.tree.leaves, (together, expected)), strict=True):
            np.testing.assert_allclose(x[i], y, rtol=0, atol=1e-4)
    assert 1 < len(done) < settings.steps // BETWEEN
    assert done[0].startswith(f"step {BETWEEN}/400, accuracy 0.")


@pytest.mark.slow
@pytest.mark.usefixtures("trace_only")
def test_run_shows_warm_start_and_resuming_does_not(tmp_path, capsys):
    arguments = [*SMALL, "--algorithm=grpo", "--seeds=2", "--devices=1", "--warm_start.steps=25"]
    arguments += ["--config.warm_up_iterations=0", "--config.decay_iterations=0"]
    arguments += ["--show=0", "--eval_samples=0"]
    out = f"--out={tmp_path / 'run'}"
    assert launch.language([*arguments, "--warm_start.accuracy=0.9", "--total_steps=8", out]) == 0
    shown = capsys.readouterr().out
    assert re.search(
        r"^grpo on addition, 2 seeds: warm start, step 20/25, accuracy 0\.\d\d, "
        r"< \d+:\d\d left$",
        shown,
        re.MULTILINE,
    )
    assert shown.index("warm start, step") < shown.index("initialising")
    assert launch.language(["--resume", "--total_steps=16", out]) == 0
    shown = capsys.readouterr().out
    assert "resuming at iteration 1 (step 8)" in shown
    assert "warm start" not in shown


SAID = "interrupted before the first iteration: nothing new to save"


@pytest.mark.usefixtures("trace_only")
def test_interrupt_in_warm_start_stops_immediately_without_saving(tmp_path, monkeypatch, capfd):
    times = []

    def interrupted(seconds):
        times.append(seconds)
        if len(times) == 3:
            signal.raise_signal(signal.SIGINT)
        return clock(seconds)

    monkeypatch.setattr(programs, "clock", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)
    out = tmp_path / "run"
    arguments = [*SMALL, "--algorithm=grpo", "--seeds=2", "--devices=1", f"--out={out}"]
    with pytest.raises(SystemExit) as ended:
        launch.language([*arguments, "--warm_start.steps=10000000"])
    assert ended.value.code == 128 + signal.SIGINT
    assert len(times) == 3
    assert capfd.readouterr().err.strip() == SAID
    assert read(out / "metrics.jsonl") == []
    assert not list((out / "checkpoints").glob("*/*"))
