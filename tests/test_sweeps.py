"""Sweeps: what they train, what they leave, how they go on, and what they refuse."""

import errno
import json
import os
import shutil
import signal
import time
from concurrent import futures
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from finished import SWEEP
from probes import one_piece
from scripts import finish, start
from toy_run import start_of

from jaxrl_po.cli import sweep
from jaxrl_po.masked import Mean
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.experiment import control, search
from jaxrl_po.run.experiment import flags as flags_lib
from jaxrl_po.run.experiment.flags import RunError, UsageError
from jaxrl_po.run.loop import interrupts, vmapped
from jaxrl_po.run.store import folder
from jaxrl_po.types import ActorCritic

SMALL = [flag for flag in SWEEP if "learning_rate" not in flag]


def test_a_sweep_runs_in_one_process(tmp_path):
    with pytest.raises(
        UsageError, match=r"^--distributed is for jaxrl-po control and jaxrl-po language"
    ):
        sweep.main(
            [*SMALL, f"--out={tmp_path / 'new'}", "--distributed", "--coordinator=localhost:1234"]
        )
    assert not (tmp_path / "new").exists()


def test_a_score_is_the_mean_of_the_last_three_evaluations():
    scores = search.final([[9.0, 1.0, 2.0, 6.0], [9.0, np.nan, 2.0, 6.0]])
    assert scores.tolist() == [3.0, -np.inf]


@pytest.mark.usefixtures("trace_only")
def test_sweep_leaves_a_table_and_a_picture_and_goes_on(tmp_path, capsys, monkeypatch):
    out = tmp_path / "sweep"
    arguments = [*SMALL, f"--out={out}", "--config.learning_rate=1e-3,1e-2", "--network.width=4,8"]
    monkeypatch.setattr(control, "CONFIGS", tmp_path / "configs")
    assert sweep.main([*arguments, "--save", "--overwrite"]) == 0
    printed = capsys.readouterr().out
    # Numbers share a program, sizes do not.
    assert "program 2 of 2: 2 settings × 2 seeds" in printed
    rows = json.loads((out / "sweep.json").read_text())
    assert len(rows) == 4
    assert {
        (row["flags"]["config.learning_rate"], row["flags"]["network.width"]) for row in rows
    } == {(rate, width) for rate in ("1e-3", "1e-2") for width in ("4", "8")}
    for row in rows:
        assert np.asarray(row["scores"]).shape == (2, 2)
        assert row["steps"] == [128, 256]
    assert (out / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert len((out / "table.txt").read_text().splitlines()) == 5
    # control.py then starts from what was saved.
    saved = json.loads((tmp_path / "configs" / "ppo" / "CartPole-v1.json").read_text())
    assert saved["flags"]["config.learning_rate"] == float(rows[0]["flags"]["config.learning_rate"])
    assert saved["flags"]["problem.num_envs"] == 4
    assert "--config.learning_rate=1e-3,1e-2" in saved["found_by"]
    options = flags_lib.parse([], {"": control.Options})[""]
    assert control.tuned(options) == saved["flags"]
    # Interrupted after the first program, it runs only the second.
    (out / "sweep.json").write_text(
        json.dumps([row for row in rows if row["flags"]["network.width"] == "4"])
    )
    assert sweep.main([*arguments, "--save", "--resume"]) == 0
    assert "program 1" not in capsys.readouterr().out
    assert json.loads((out / "sweep.json").read_text())[0]["scores"] == rows[0]["scores"]
    # Flags that are not given keep their values, even if saving has changed the defaults of
    # control.py.
    (out / "sweep.json").write_text(
        json.dumps([row for row in rows if row["flags"]["network.width"] == "4"])
    )
    assert sweep.main([f"--out={out}", "--resume"]) == 0
    assert "program 2 of 2: 2 settings × 2 seeds" in capsys.readouterr().out
    assert json.loads((out / "sweep.json").read_text())[0]["scores"] == rows[0]["scores"]
    assert json.loads((tmp_path / "configs" / "ppo" / "CartPole-v1.json").read_text()) == saved


def scored(group, options, given):
    """A program without training: a larger step size scores better; one of many seeds is killed."""
    width = group[0]["network"].width
    if options.seeds == 3 and width == 8:
        path = Path(options.out) / "sweep.json"
        while not path.exists() or '"4"' not in path.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
    scores = [[[float(each["config"].learning_rate)] * 3] * options.seeds for each in group]
    return {"steps": [1, 2, 3], "scores": scores, "seconds": 1.0, "compile_seconds": 1.0}


@pytest.fixture
def programs_run(monkeypatch):
    """The groups that a sweep trains, without training."""
    trained = []
    monkeypatch.setattr(sweep, "run", lambda *of: trained.append(of[0]) or scored(*of))
    return trained


RANGES = ["--config.learning_rate=1e-3,1e-2", "--network.width=4,8"]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A finished sweep, without training."""
    out = tmp_path_factory.mktemp("swept") / "sweep"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sweep, "run", scored)
        assert sweep.main([*SMALL, *RANGES, f"--out={out}"]) == 0
    return out


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--seeds=2", "--config.learning_rate=0.01,0.001"],  # unchanged, spelled differently
        ["--seed=0", "--config.gamma=0.99"],  # unchanged, the default
        ["--network.width=8,4", "--processes=1", "--devices=auto", "--nosave"],
    ],
)
def test_a_sweep_that_is_resumed_is_the_one_that_was_begun(
    tmp_path, swept, programs_run, arguments
):
    out = shutil.copytree(swept, tmp_path / "sweep")
    rows = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(
        json.dumps([row for row in rows if row["flags"]["network.width"] == "4"])
    )
    assert sweep.main([*arguments, f"--out={out}", "--resume"]) == 0
    (group,) = programs_run
    assert {records["network"].width for records in group} == {8}
    assert all(records["config"].num_epochs == 1 for records in group)
    assert json.loads((out / "sweep.json").read_text()) == rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--seeds=3"],
            (
                r"--seeds=3 must be 2, as in the sweep in \S+ that is resumed; "
                r"leave the flag out, or choose another --out"
            ),
        ),
        (
            ["--config.learning_rate=1e-4,1e-2"],
            r"--config\.learning_rate=0\.0001,0\.01 must be 0\.001,0\.01, as in",
        ),
        (
            ["--config.gamma=0.9", "--network.width=4"],
            r"--config\.gamma=0\.9 must be 0\.99, --network\.width=4 must be 4,8, as in",
        ),
        (["--algorithm=a2c", "--config.n=3"], r"--algorithm=a2c must be ppo, as in"),
        (["--total_steps=512"], r"--total_steps=512 must be 256, as in"),
        (["--config.gama=0.9"], r"--config\.gama is not a flag; did you mean --config\.gamma\?"),
    ],
)
def test_a_resumed_sweep_names_the_flags_that_differ(tmp_path, swept, arguments, message):
    out = shutil.copytree(swept, tmp_path / "sweep")
    before = (out / "config.json").read_bytes()
    with pytest.raises(UsageError, match=f"^{message}"):
        sweep.main([*arguments, f"--out={out}", "--resume"])
    assert (out / "config.json").read_bytes() == before


@pytest.mark.parametrize(
    "stored", ['{"script": "control", "seeds": 2}', '{"script": "sweep", "argv": []}']
)
def test_a_folder_that_holds_no_sweep_is_named(tmp_path, stored):
    (tmp_path / "config.json").write_text(stored)
    with pytest.raises(
        UsageError,
        match=r"^--resume: --out=\S+ must hold a sweep of this version of jaxrl-po sweep",
    ):
        sweep.main([*SMALL, f"--out={tmp_path}", "--resume"])


def test_what_is_best_can_be_given_and_saved(tmp_path, programs_run, monkeypatch, capsys):
    """Flags that depend on a swept one, and tuned flags that it makes ineffective."""
    monkeypatch.setattr(control, "CONFIGS", tmp_path / "configs")
    (tmp_path / "configs" / "ppo").mkdir(parents=True)
    (tmp_path / "configs" / "ppo" / "CartPole-v1.json").write_text(
        '{"flags": {"config.lambda_": 0.5}}'
    )
    ranges = [
        "--config.early_stop=true",
        "--config.target_kl=0.5,0.25",
        "--config.estimator=monte_carlo",
    ]
    assert sweep.main([*SMALL, *ranges, f"--out={tmp_path / 'sweep'}", "--save"]) == 0
    best = next(
        line for line in capsys.readouterr().out.splitlines() if line.startswith("best:")
    ).split()[1:]
    sections = sweep.plan.sections_of(control.SCRIPT, control.Options())
    records = flags_lib.parse(best, sections)
    assert records["config"].early_stop
    assert records["config"].target_kl in (0.5, 0.25)
    assert records["config"].estimator == "monte_carlo"
    saved = json.loads((tmp_path / "configs" / "ppo" / "CartPole-v1.json").read_text())
    assert flags_lib.parse([], sections, defaults=saved["flags"]) == records


def test_sweep_help_names_the_flags(capsys):
    assert sweep.main(["--help"]) == 0
    assert "  --evaluations=10\n" in capsys.readouterr().out


def test_sweep_compares_like_with_like(tmp_path, finished):
    """A combination trains as it would alone, on the same seeds as the others."""
    # A small step, so that the rounding of either program does not grow into another episode.
    sweep.main([*SMALL, f"--out={tmp_path / 'one'}", "--config.learning_rate=1e-3"])
    both = {
        row["flags"]["config.learning_rate"]: row["scores"]
        for row in json.loads((finished("sweep", tmp_path / "both") / "sweep.json").read_text())
    }
    one = json.loads((tmp_path / "one/sweep.json").read_text())[0]["scores"]
    assert both["1e-3"] == one != both["1e-2"]


@pytest.mark.slow
def test_programs_in_processes_find_what_one_process_finds(tmp_path, monkeypatch):
    # A process sets its own compilation cache; that of the tests comes from the environment.
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", jax.config.jax_compilation_cache_dir)
    arguments = [*SMALL, "--config.learning_rate=1e-4", "--network.width=4,8"]
    found = []
    for processes in (1, 2):
        out = tmp_path / str(processes)
        assert sweep.main([*arguments, f"--processes={processes}", f"--out={out}"]) == 0
        found.append(
            {
                row["flags"]["network.width"]: row["scores"]
                for row in json.loads((out / "sweep.json").read_text())
            }
        )
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_a_sweep_trains_with_the_decay_that_a_run_would_have(tmp_path, monkeypatch):
    """The tuned one was found for another number of steps."""
    seen = []

    def build(records, *others):
        seen.append(records["config"].decay_iterations)
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


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_processes_of_a_sweep_end_with_it(tmp_path, number):
    """However it ends; and it says how it goes on, where it can."""
    out, trained = tmp_path / "sweep", [flag for flag in SMALL if "total_steps" not in flag]
    with start(
        *("sweep", *trained, *RANGES, "--total_steps=25600000", "--processes=2", f"--out={out}")
    ) as process:
        while not (out / "config.json").exists():
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(started := children.read_text().split()) < 2:
            time.sleep(0.1)
        time.sleep(10.0)
        process.send_signal(number)
        _, _, errors = finish(process)
    if number == signal.SIGTERM:
        assert process.returncode == 128 + number
        assert errors.strip() == (
            f"interrupted: what is done is kept; continue with --out={out} --resume"
        )
    deadline = time.monotonic() + 60.0
    while any(Path(f"/proc/{child}").exists() for child in started):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_signal_ends_a_sweep_and_its_processes(tmp_path, monkeypatch, capfd):
    """What waits for the first program is told; the processes are not waited for."""
    killed = []
    child = SimpleNamespace(kill=lambda: killed.append(True))
    monkeypatch.setattr(interrupts.multiprocessing, "active_children", lambda: [child])
    monkeypatch.setattr(sweep, "check", lambda *_: None)
    monkeypatch.setattr(
        futures, "as_completed", lambda _: iter(lambda: signal.raise_signal(signal.SIGTERM), 0)
    )
    monkeypatch.setattr(futures.ProcessPoolExecutor, "submit", lambda *_: futures.Future())
    monkeypatch.setattr(sweep, "run", None)
    out = tmp_path / "sweep"
    monkeypatch.setattr(futures.Future, "result", lambda _: None)
    with pytest.raises(SystemExit) as stop:
        sweep.main([*SMALL, *RANGES, "--processes=2", f"--out={out}"])
    assert stop.value.code == 128 + signal.SIGTERM
    assert f"continue with --out={out} --resume" in capfd.readouterr().err
    assert killed == [True]


def test_a_sweep_that_cannot_write_says_how_it_goes_on(tmp_path, monkeypatch, programs_run):
    write, out = folder.write_json, tmp_path / "sweep"

    def refuse(path, content):
        if path.name == "sweep.json" and len(content) > 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    monkeypatch.setattr(folder, "write_json", refuse)
    with pytest.raises(RunError) as said:
        sweep.main([*SMALL, *RANGES, f"--out={out}"])
    assert str(said.value) == (
        f"{out}: No space left on device; free some space there, then continue with --out={out} "
        "--resume: what is done is kept"
    )
    monkeypatch.setattr(folder, "write_json", write)
    assert sweep.main([f"--out={out}", "--resume"]) == 0
    assert len(programs_run) == 3  # the first was kept


def test_programs_in_processes_find_what_one_process_finds_and_a_killed_one_is_named(
    tmp_path, monkeypatch
):
    spawn = interrupts.Processes
    monkeypatch.setattr(
        interrupts,
        "Processes",
        # What only checks the flags is not the subject, and a process takes seconds to start.
        lambda count: futures.ThreadPoolExecutor() if count == 1 else spawn(count),
    )
    monkeypatch.setattr(sweep, "run", scored)
    arguments = [*SMALL, "--seeds=3", "--config.learning_rate=1e-4", "--network.width=4,8"]
    out = f"--out={tmp_path / 'sweep'}"
    with pytest.raises(UsageError, match=r"^--processes=2: a process of the sweep was killed"):
        sweep.main([*arguments, "--processes=2", out])
    (row,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert (row["flags"]["network.width"], row["scores"]) == ("4", [[1e-4] * 3] * 3)
    # The number of parallel processes belongs to the start, not to the sweep.
    trained = []
    monkeypatch.setattr(sweep, "run", lambda group, *_: trained.append(group) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        sweep.main([out, "--resume"])
    assert [group[0]["network"].width for group in trained] == [8]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--config.learning_rate=1e-3,-1"], "config.learning_rate"),
        (["--config.learning_rat=1e-3,1e-2"], "learning_rate"),
        (["--problem.num_envs=4,many"], "num_envs"),
        (["--env=CartPole-v2"], "CartPole-v1"),
        (["--patience=3"], "--patience must be left out: a sweep has --evaluations"),
        (["--total_steps=0"], "--total_steps=0 must be at least the steps of an iteration"),
        (["--total_steps=1"], "--total_steps=1 must be 0 or at least 32"),
        (["--devices=99"], "--devices must be at most"),
        (["--critic=nowhere.py:A"], "there is no file"),
        pytest.param(["--env=CartPole-v2", "--processes=2"], "CartPole-v1", marks=pytest.mark.slow),
    ],
)
def test_bad_sweeps_are_named_and_touch_nothing(tmp_path, arguments, match):
    with pytest.raises(UsageError, match=match):
        sweep.main([*SMALL, f"--out={tmp_path / 'sweep'}", *arguments])
    assert not (tmp_path / "sweep").exists()
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "sweep.json").write_text("[]")
    with pytest.raises(UsageError, match=match):
        sweep.main([*SMALL, f"--out={earlier}", "--overwrite", *arguments])
    assert [path.name for path in earlier.iterdir()] == ["sweep.json"]


@pytest.mark.parametrize("rows", ["{bad", "5", "[{}]"])
def test_a_damaged_table_is_named(tmp_path, swept, rows):
    out = shutil.copytree(swept, tmp_path / "sweep")
    (out / "sweep.json").write_text(rows)
    with pytest.raises(UsageError, match=r"^--resume: \S+sweep.json is damaged"):
        sweep.main([f"--out={out}", "--resume"])
    stored = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(stored | {"swept": 5}))
    with pytest.raises(UsageError, match=r"^--resume: \S+config.json is damaged"):
        sweep.main([f"--out={out}", "--resume"])


@pytest.mark.parametrize("devices", [1, 2])
def test_runs_are_trained_from_one_evaluation_to_the_next(monkeypatch, devices):
    """Seven iterations of walks that differ in their step, evaluated three times."""
    called, call = [], jax.stages.Compiled.__call__

    def recorded(program, *arguments):
        called.append(program)
        return call(program, *arguments)

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

    def measure(params, collector, key):
        return {"score": params.policy + params.frozen}

    strides, keys = jnp.arange(4.0), jax.random.split(jax.random.key(0), 4)
    training = vmapped.Training(learner, parallel.Placement(4, devices, 1), 7, 3)
    monkeypatch.setattr(jax.stages.Compiled, "__call__", recorded)
    done = vmapped.train_in_program(training, measure, strides, keys, keys[0])
    np.testing.assert_allclose(done.curves["score"], np.outer(np.arange(4), [2, 4, 7]) + 1)
    np.testing.assert_allclose(done.curves["size"], np.outer(np.arange(4), [1.5, 3.5, 6.0]))
    assert len(called) == 4  # the beginning, and three stretches of one program
    assert len(set(map(id, called))) == 2
