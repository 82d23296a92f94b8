"""Tests sweeps: their training, files, resumption and errors."""

import csv
import dataclasses
import errno
import json
import os
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from finished import SWEEP
from probes import one_piece
from tables import cases
from toy_run import start_of

from jaxrl_po import config, run
from jaxrl_po.cli import sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import RunError, UsageError
from jaxrl_po.run.experiment import control, language, models, search_space, settings, sweeping
from jaxrl_po.run.experiment import flags as flags_lib
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop.job import Display, Evaluation, Layout, Length, build_job
from jaxrl_po.run.loop.programs import compile_init, run_warm_start
from jaxrl_po.run.store import folder
from jaxrl_po.types import ActorCritic


@config.record
class Stride:
    """Settings of a random walk."""

    stride: float = config.number(1.0, "its step")


SMALL = [flag for flag in SWEEP if "learning_rate" not in flag]


def test_score_is_mean_of_last_three_evaluations():
    scores = sweeping.final_scores([[9.0, 1.0, 2.0, 6.0], [9.0, np.nan, 2.0, 6.0]])
    assert scores.tolist() == [3.0, -np.inf]


def test_sweep_keeps_its_microbatches():
    argv = ["--algorithm=grpo", "--task=sorting", "--model.width=16", "--warm_start.steps=2"]
    config = settings.parse_settings(language, argv).config
    alone, several = (
        language.build(config, Placement(4, 1, 1), None, methods)
        for methods in ([], [config.method] * 2)
    )
    assert alone.rebuild is not None
    assert several.rebuild is None


@pytest.mark.slow
@cases("seeds, devices", (2, 1), (3, 2))
def test_settings_of_a_sweep_share_warm_starts(seeds, devices):
    """A combination begins with the parameters of a run that has its settings alone."""
    left_out = "--seeds", "--devices", "--warm_start."
    argv = [flag for flag in tiny.LANGUAGE if not flag.startswith(left_out)]
    argv += ["--algorithm=grpo", "--warm_start.steps=25", "--warm_start.batch_size=4"]
    config = settings.parse_settings(language, argv).config
    rates = np.float32([1e-3, 1e-2])
    methods = [dataclasses.replace(config.method, learning_rate=float(x)) for x in rates]

    def begun(placement, methods=()):
        job = language.build(config, placement, None, methods)
        init, warm = compile_init(job)
        silent = [lambda *_: None] * 2
        fitted = run_warm_start(warm, job.start, lambda f, *x: (f(*x), 0.0), *silent)
        assert {len(x) for x in jax.tree.leaves(fitted)} == {seeds}
        state = init((job.start, fitted))
        return jax.device_get((state.params.policy, state.opt_state))

    alone, _ = begun(Placement(seeds, 1, 1))
    together, (of_each, _) = begun(Placement(2 * seeds, devices, 1), methods)
    np.testing.assert_array_equal(of_each.learning_rate, np.repeat(rates, seeds))
    for x, y in zip(*map(jax.tree.leaves, (together, alone)), strict=True):
        # A program on one device and a program on several devices may add in different orders.
        np.testing.assert_allclose(x, np.concatenate([y, y]), rtol=0, atol=1e-6 * (devices - 1))


def test_sweep_program_reads_its_models_once(tmp_path, programs_run, monkeypatch):
    made = []
    make = models.make_models
    monkeypatch.setattr(models, "make_models", lambda *of, **x: made.append(of) or make(*of, **x))
    experiment = run.Experiment(task="addition", seeds=1, total_steps=1024, out=tmp_path)
    run.sweep(experiment, over={"config.learning_rate": [1e-3, 1e-2, 1e-1]})
    assert len(made) == len(programs_run) == 1


@pytest.mark.usefixtures("trace_only")
def test_sweep_leaves_table_and_picture(tmp_path, capsys):
    out = tmp_path / "sweep"
    arguments = [*SMALL, f"--out={out}", "--config.learning_rate=1e-3,1e-2", "--network.width=4,8"]
    assert sweep.main([*arguments, "--overwrite"]) == 0
    printed = capsys.readouterr().out
    # Numbers share a program, whereas sizes do not.
    assert "program 2 of 2: 2 settings × 2 seeds" in printed
    rows = json.loads((out / "sweep.json").read_text())
    assert len(rows) == 4
    assert {
        (row["flags"]["config.learning_rate"], row["flags"]["network.width"]) for row in rows
    } == {(rate, width) for rate in (1e-3, 1e-2) for width in (4, 8)}
    for row in rows:
        assert np.asarray(row["scores"]).shape == (2, 2)
        assert row["steps"] == [128, 256]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "table.txt").read_text().splitlines()) == 5


def scored(group, options, *_):
    """Stands in for a program without training: a larger step size scores better."""
    scores = [[[float(each.config.method.learning_rate)] * 3] * options.seeds for each in group]
    done = {"steps": [1, 2, 3], "scores": scores, "seconds": 1.0, "compile_seconds": 1.0}
    return done, False


@pytest.fixture
def programs_run(monkeypatch):
    """Returns the groups of combinations that a sweep would train as one program each."""
    trained = []
    monkeypatch.setattr(sweeping, "run_group", lambda *of: trained.append(of[0]) or scored(*of))
    return trained


RANGES = ["--config.learning_rate=1e-3,1e-2", "--network.width=4,8"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Returns a finished sweep whose programs do not train."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweeping, "run_group", scored)
        assert sweep.main([*SMALL, *RANGES, f"--out={out}"]) == 0
    return out


@cases("arguments", [], ["--seeds=2", "--config.learning_rate=1e-3,1e-2", "--devices=auto"])
def test_resumed_sweep_keeps_its_settings(tmp_path, swept, programs_run, monkeypatch, arguments):
    """The sweep keeps its settings even if the tuned settings have changed since its start."""
    monkeypatch.setattr(control, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "ppo").mkdir(parents=True)
    changed = json.dumps({"flags": {"config.gamma": 0.5}})
    (tmp_path / "configs" / "ppo" / "CartPole-v1.json").write_text(changed)
    out = shutil.copytree(swept, tmp_path / "sweep")
    rows = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(
        json.dumps([row for row in rows if row["flags"]["network.width"] == 4])
    )
    assert sweep.main([*arguments, f"--out={out}", "--resume"]) == 0
    (group,) = programs_run
    assert {each.config.network.width for each in group} == {8}
    assert all(each.config.method.num_epochs == 1 for each in group)
    assert {float(each.config.method.gamma) for each in group} == {0.99}
    assert json.loads((out / "sweep.json").read_text()) == rows


@cases(
    "arguments, message",
    (
        ["--seeds=3"],
        (
            r"seeds: must be 2, as in the run in \S+, got 3; "
            r"leave it out, or choose another folder$"
        ),
    ),
    (
        ["--config.learning_rate=1e-4,1e-2"],
        r"config\.learning_rate: must be 1e-3,1e-2, as in .* got 1e-4,1e-2; leave",
    ),
    (["--config.gamma=0.9"], r"config\.gamma: must be left out, as in .* got 0\.9; leave"),
    (
        ["--algorithm=a2c", "--config.n_steps=3"],
        r"algorithm: must be left out, as in .* got a2c; leave",
    ),
    (["--total_steps=512"], r"total_steps: must be 256, as in .* got 512; leave"),
)
def test_a_resumed_sweep_names_the_flags_that_differ(tmp_path, swept, arguments, message):
    out = shutil.copytree(swept, tmp_path / "sweep")
    before = (out / "config.json").read_bytes()
    with pytest.raises(ConfigError, match=f"^{message}"):
        sweep.main([*arguments, f"--out={out}", "--resume"])
    assert (out / "config.json").read_bytes() == before


@cases("stored", '{"format": 1, "script": "control"}', '{"format": 1, "script": "sweep"}')
def test_a_folder_that_holds_no_sweep_is_named(tmp_path, stored):
    (tmp_path / "config.json").write_text(stored)
    with pytest.raises(
        ConfigError,
        match=r"^resume: \S+ must hold a sweep of this version of jaxrl-po sweep; choose",
    ):
        sweep.main([*SMALL, f"--out={tmp_path}", "--resume"])


def test_an_overwritten_sweep_begins_anew(tmp_path, swept, programs_run):
    """Programs that another sweep left would otherwise be resumed."""
    out = shutil.copytree(swept, tmp_path / "sweep")
    (out / "programs" / "1" / "checkpoints").mkdir(parents=True)
    assert sweep.main([*SMALL, *RANGES, f"--out={out}", "--overwrite"]) == 0
    assert len(programs_run) == 2
    assert not (out / "programs").exists()


def test_what_is_best_can_be_given(tmp_path, programs_run, monkeypatch, capsys):
    """The best flags include flags that depend on a swept flag, and tuned flags that a swept flag
    makes ineffective."""
    monkeypatch.setattr(control, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "ppo").mkdir(parents=True)
    (tmp_path / "configs/ppo/CartPole-v1.json").write_text('{"flags": {"config.lambda_": 0.5}}')
    ranges = [
        "--config.early_stop=true",
        "--config.target_kl=0.5,0.25",
        "--config.estimator=monte_carlo",
    ]
    assert sweep.main([*SMALL, *ranges, f"--out={tmp_path / 'sweep'}"]) == 0
    best = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("best:")
    ).split()[1:]
    sections = settings.sections_of(control, control.ControlOptions())
    method = flags_lib.parse_records(best, sections)["config"]
    assert method.early_stop
    assert method.target_kl in (0.5, 0.25)
    assert method.estimator == "monte_carlo"


@pytest.mark.slow
def test_sweep_compares_like_with_like(tmp_path, finished):
    """A combination trains as it would alone, on the same seeds as the other combinations."""
    # A small step ensures that the rounding of two programs does not grow into another episode.
    sweep.main([*SMALL, f"--out={tmp_path / 'one'}", "--config.learning_rate=1e-3"])
    both = {
        row["flags"]["config.learning_rate"]: row["scores"]
        for row in json.loads((finished("sweep", tmp_path / "both") / "sweep.json").read_text())
    }
    one = json.loads((tmp_path / "one/sweep.json").read_text())[0]["scores"]
    assert both[1e-3] == one != both[1e-2]


def test_sweep_trains_with_the_decay_of_runs(tmp_path, monkeypatch):
    """The tuned decay was found for another number of steps."""
    seen = []

    def build(config, *others):
        seen.append(config.method.decay_iterations)
        raise UsageError("enough")

    monkeypatch.setattr(control, "build", build)
    flags = ["--env=Pendulum-v1", "--config.learning_rate=1e-3,1e-2"]
    for further, want in (
        (["--total_steps=4096"], 2),
        (["--total_steps=2097152"], 1024),
        (["--total_steps=4096", "--config.decay_iterations=3"], 3),
    ):
        with pytest.raises(UsageError, match="enough"):
            sweep.main([*flags, *further, f"--out={tmp_path}"])
        assert seen[-1] == want


def test_sweep_that_cannot_write_says_resume(tmp_path, monkeypatch, programs_run):
    write, out = folder.write_json, tmp_path / "sweep"

    def refuse(path, content):
        if path.name == "sweep.json" and len(content) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(folder, "write_json", refuse)
    with pytest.raises(RunError) as said:
        sweep.main([*SMALL, *RANGES, f"--out={out}"])
    assert str(said.value) == (
        f"{out}: No space left on device; resume with out = {out}: what is done is kept"
    )
    monkeypatch.setattr(folder, "write_json", write)
    assert sweep.main([f"--out={out}", "--resume"]) == 0
    assert len(programs_run) == 3  # the first program's results are stored


@cases("rows", "{bad", "5", "[{}]")
def test_a_damaged_table_is_named(tmp_path, swept, rows):
    out = shutil.copytree(swept, tmp_path / "sweep")
    (out / "sweep.json").write_text(rows)
    with pytest.raises(ConfigError, match=r"^resume: \S+sweep.json is damaged"):
        sweep.main([f"--out={out}", "--resume"])
    stored = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stored | {"swept": 5}))
    with pytest.raises(ConfigError, match=r"^resume: \S+config.json is damaged"):
        sweep.main([f"--out={out}", "--resume"])


def test_runs_train_from_evaluation_to_evaluation(tmp_path):
    """Seven iterations of walks with different steps are evaluated three times."""

    def learner(stride):
        def step(state):
            policy = state.params.policy + stride * state.params.frozen
            metrics = {"size": Mean(policy[0], jnp.float32(1.0))}
            return state._replace(params=state.params._replace(policy=policy)), metrics

        def init(key):
            state = start_of(key, 4)
            zero = jnp.zeros_like(state.params.policy)
            return state._replace(params=ActorCritic(zero, frozen=jnp.float32(1.0)))

        return one_piece(init, step)

    options = control.ControlOptions(seeds=2, devices="2")
    job = build_job(
        learner(1.0),
        Layout(sweeping.place_runs(options, 4)),
        Length(7, 10),
        seed=0,
        methods=[Stride(stride=float(stride)) for stride in range(4)],
        learner_of=lambda settings: learner(settings.stride),
        evaluation=Evaluation(
            lambda params, collector, key: {"score": params.policy + params.frozen}, score="score"
        ),
        display=Display(),
    )
    options = search_space.ControlSweep(evaluations=3)
    rows, _ = sweeping.train_group(job, options, tmp_path / "run", "walks")
    curves = sweeping.curves(rows)
    assert [row["step"] for row in rows] == [30, 60, 70]
    strides = np.repeat(np.arange(4), 2)
    np.testing.assert_allclose(curves["score"], np.outer(strides, [3, 6, 7]) + 1)
    np.testing.assert_allclose(curves["size"], np.outer(strides, [2, 5, 7]))


def test_python_sweep_draws_and_names_best(tmp_path, programs_run, capsys):
    experiment = run.Experiment(env="CartPole-v1", seeds=2, total_steps=256, out=tmp_path / "a")
    rates = {"config.learning_rate": "log_uniform(1e-5, 1e-2)"}
    swept = run.sweep(
        experiment, over=rates | {"network.width": [4, 8, 8]}, draws=3, **{"problem.num_envs": 2}
    )
    assert "6 of 9 combinations are distinct; each trains once" in capsys.readouterr().out
    assert len(swept.rows) == 6
    assert len(programs_run) == 2  # one program for each width
    best = max(float(row["flags"]["config.learning_rate"]) for row in swept.rows)
    assert swept.best["config.learning_rate"] == best
    assert swept.best["problem.num_envs"] == 2
    assert (swept.folder / "sweep.png").exists()
    with pytest.raises(
        ConfigError, match=r"^evaluation: is not a setting; did you mean evaluations"
    ):
        run.sweep(experiment, over=rates, evaluation=3, out=tmp_path / "b")
    with pytest.raises(
        ConfigError, match=r"^config.learning_rate: must be log_u.* got uniform\(0,1\)"
    ):
        run.sweep(experiment, over={"config.learning_rate": "uniform(0,1)"}, draws=3, resume=True)


def experiment_of(out):
    sizes = {"problem.num_envs": 2}
    return run.Experiment(env="CartPole-v1", seeds=2, total_steps=256, out=out, over=sizes)


def test_each_sweep_run_has_a_flat_row(tmp_path, programs_run, monkeypatch):
    drawn = []
    monkeypatch.setattr(plotting, "save_sweep", lambda rows, *_: drawn.append(rows[0][0]))
    over = {
        "config.learning_rate": [1e-3, 1e-2],
        "config.epsilon_low": "@config.epsilon_high",
        "config.epsilon_high": [0.125, 0.25],
    }
    table = run.sweep(experiment_of(tmp_path), over=over).table()
    ends = {"seed_index": 1, "score": pytest.approx(0.01)}
    clips = {"config.epsilon_low": 0.125, "config.epsilon_high": 0.125}
    assert len(table) == 8
    assert table[1] == {"config.learning_rate": 0.01, **clips, **ends}
    with (tmp_path / "sweep.csv").open() as file:
        found = list(csv.DictReader(file))
    assert [{name: float(x) for name, x in row.items()} for row in found] == table
    assert drawn == [{"config.learning_rate": "0.01", "config.epsilon_high": "0.125"}]


def test_sweep_with_numbers_as_texts_resumes(tmp_path, swept, programs_run):
    """Sweeps of version 0.4.0 and before have texts in `sweep.json`."""
    out = shutil.copytree(swept, tmp_path / "sweep")
    rows = json.loads((out / "sweep.json").read_text())
    texts = [row | {"flags": {x: str(y) for x, y in row["flags"].items()}} for row in rows]
    (out / "sweep.json").write_text(json.dumps(texts))
    found = sweeping.run_sweep(control, {"out": str(out), "resume": True})
    assert (found.rows, programs_run) == (rows, [])


def test_best_combination_is_confirmed_on_fresh_seeds(tmp_path, monkeypatch, capsys):
    trained = []

    def program(group, options, *_):
        runs = [each.config.run for each in group]
        rates = [round(float(each.config.method.learning_rate), 6) for each in group]
        trained.append((rates, {(each.seed, each.seeds) for each in runs}))
        if len(trained) == 2:
            raise KeyboardInterrupt
        return scored(group, options)

    monkeypatch.setattr(sweeping, "run_group", program)
    over = {"config.learning_rate": [0.1, 0.2]}
    with pytest.raises(run.Interrupted) as error:
        run.sweep(experiment_of(tmp_path), over=over, confirm=4)
    assert (len(error.value.swept.rows), error.value.swept.confirmed) == (2, [])
    swept = run.sweep(experiment_of(tmp_path), over=over, resume=True)
    first, killed, again = trained
    assert first == ([0.1, 0.2], {(0, 2)})
    assert killed == again
    assert (again[0][0], again[1]) == (0.2, {(1, 4)})
    assert [np.shape(row["scores"]) for row in swept.confirmed] == [(4, 3)] * 2
    said = capsys.readouterr().out
    assert "best is better than default with probability 1.00 [0.58, 1.00], p = 0.029" in said
    assert re.search(r"best − default: \S+ \[\S+, \S+\], difference of the IQMs", said)
    assert "best: " in said.splitlines()[-1]
    assert "config.learning_rate=0.2" in said.splitlines()[-1]
    run.sweep(experiment_of(tmp_path), over=over, resume=True)
    assert len(trained) == 3


def test_language_sweeps_refuse_rewards_on_the_host(tmp_path):
    (tmp_path / "mine.py").write_text("def score(**_):\n    return [0.0]\n")
    given = {"task": "sorting", "reward": f"{tmp_path}/mine.py:score", "out": tmp_path / "a"}
    with pytest.raises(ConfigError, match=r"^reward: must be computed in the program of a sweep"):
        run.sweep(run.Experiment(**given), over={"config.learning_rate": [1e-3, 1e-2]})
