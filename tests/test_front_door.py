"""Tests the first steps of a newcomer: the command, user files, and their errors."""

import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import tiny
from scripts import python
from tables import cases

from jaxrl_po import __main__ as command_line
from jaxrl_po.cli import evaluate, launch, sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import flags, sweeping, user_code

FUNCTIONS = """
from probes import CueReward


def corridor():
    return CueReward()


THREE = 3


def three():
    return THREE


def nothing():
    pass


def broken():
    return [][0]
"""
TASK = """
from jaxrl_po.language import tasks


def one_digit():
    return tasks.addition(1)
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "tasks.py").write_text(TASK)
    (tmp_path / "syntax.py").write_text("a = 1\ndef f(:\n")
    return tmp_path


def test_the_command_lists_its_commands(capsys):
    assert command_line.main(["--help"]) == 0
    assert command_line.main([]) == 2
    assert "jaxrl-po COMMAND" in capsys.readouterr().out
    with pytest.raises(UsageError, match="jaxrl-po has no command 'contrl'; did you mean control"):
        command_line.main(["contrl"])


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@cases(
    "begin",
    lambda: runpy.run_module("jaxrl_po", run_name="__main__"),
    lambda: runpy.run_path(str(EXPERIMENTS / "plot.py"), run_name="__main__"),
    ids=["module", "script"],
)
def test_module_and_script_are_the_same_command(begin, request, monkeypatch, capfd):
    """Both run in this process; two tests below run the module in a separate process."""
    command = ["plot"] if request.node.callspec.id == "module" else []
    monkeypatch.setattr(sys, "argv", ["", *command])
    with pytest.raises(SystemExit) as left:
        begin()
    assert left.value.code == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: name 1 to ")


EXPERIMENTS = Path(__file__).parent.parent / "experiments"
# Scripts of peers run in separate environments, which `make bench` creates.
OURS = sorted(path for path in EXPERIMENTS.rglob("*.py") if path.parent.name != "peers")


@pytest.mark.slow
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_every_script_starts_as_a_user_starts_it(path, tmp_path):
    """The script runs in another folder, with Python's default path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = python(path, "--help", cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr


def test_interrupt_during_imports_is_one_line(monkeypatch, capsys):
    def interrupted(main):
        raise KeyboardInterrupt

    monkeypatch.setattr(flags, "run_script", interrupted)
    with pytest.raises(SystemExit) as left:
        command_line.entry("control")
    assert left.value.code == 130
    assert capsys.readouterr().err == "interrupted: nothing was started\n"


def test_unknown_matplotlib_backend_is_named(tmp_path):
    """The command runs in a separate process, with only the parts of matplotlib that choose a
    backend."""
    (tmp_path / "matplotlib.py").write_text("raise ValueError('bogus is not a valid backend')")
    paths = f"{tmp_path}:{EXPERIMENTS.parent}"
    environment = {**os.environ, "MPLBACKEND": "bogus", "PYTHONPATH": paths}
    done = python("-m", "jaxrl_po", "plot", env=environment)
    assert done.returncode == 2
    assert done.stderr == "error: MPLBACKEND=bogus: bogus is not a valid backend\n"


def test_system_without_fork_is_refused():
    """The command runs in a separate process, which believes that its system is Windows."""
    code = (
        "import os, pathlib; from jaxrl_po import __main__; os.name = 'nt'; __main__.entry('plot')"
    )
    done = python("-c", code, env={**os.environ, "PYTHONPATH": str(EXPERIMENTS.parent)})
    assert done.returncode == 2
    assert done.stderr.startswith("error: jaxrl_po.run needs fork, setsid and fcntl")
    assert "WSL" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def refuse(*_):
    raise RuntimeError("no\nTeX")


@pytest.mark.usefixtures("trace_only")
@cases("seeds", 1, 2)
def test_a_picture_that_fails_fails_no_run(seeds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxrl_po.run.figures.plotting.save_panels", refuse)
    out = tmp_path / "run"
    flags = [*tiny.CONTROL[1:], f"--seeds={seeds}", "--total_steps=4e1", f"--out={out}"]
    assert launch.control(flags) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 32
    shown = capsys.readouterr()
    picture = f"{out / 'curves.png'} was not drawn, all else is there: RuntimeError: no TeX"
    assert shown.err == f"warning: {picture}\n"
    counted, worst = {1: ("1 seed", ""), 2: ("2 seeds", ", worst seed 0")}[seeds]
    assert f"ppo on CartPole-v1, {counted}: compiling the training step" in shown.out
    assert "--total_steps: 40 becomes 32: a whole number of iterations\n" in shown.out
    assert shown.out.endswith(f"\ndone: greedy return 0{worst}; results in {out}\n")


@pytest.mark.usefixtures("trace_only")
def test_user_environment_is_found_from_another_folder(files, monkeypatch, capsys):
    env, out = "--env=mine.py:corridor", f"--out={files / 'run'}"
    monkeypatch.chdir(files)
    first = [*tiny.CONTROL, "--total_steps=32", env, out, "--deterministic"]
    assert launch.control(first) == 0
    assert "ppo on mine.py:corridor, 2 seeds" in capsys.readouterr().out
    (files / "elsewhere").mkdir()
    monkeypatch.chdir(files / "elsewhere")
    assert evaluate.main([f"--run={files / 'run'}"]) == 0
    more = [out, "--resume", "--total_steps=64"]
    assert launch.control(more) == 0
    with pytest.raises(
        ConfigError,
        match=r"^env: must be /\S+mine.py:corridor, as .* got /\S+where/mine.py:corridor; leave it",
    ):
        launch.control([*more, env])
    with (files / "mine.py").open("a") as mine:
        mine.write("# another line\n")
    with pytest.raises(
        ConfigError, match=r"^deterministic: .* differ env: (\w+:corridor) → (?!\1)\w+:corridor; re"
    ):
        launch.control(more)
    (files / "mine.py").write_text("1 / 0\n")
    with pytest.raises(ConfigError, match=r"^run: \S+run: env: \S+: ZeroDivisionError"):
        evaluate.main([f"--run={files / 'run'}"])
    (files / "mine.py").unlink()
    with pytest.raises(ConfigError, match=r"^run: \S+run needs \S+mine.py, which is missing"):
        evaluate.main([f"--run={files / 'run'}"])


@pytest.mark.usefixtures("trace_only")
def test_a_sweep_survives_a_picture_that_fails(files, monkeypatch, capsys):
    swept = [*tiny.SWEPT, "--total_steps=330", "--config.learning_rate=0.01,0.05"]
    out = f"--out={files / 'sweep'}"
    monkeypatch.chdir(files)
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_po.run.figures.plotting.save_sweep", refuse)
        assert sweep.main([*swept, "--env=mine.py:corridor", out]) == 0
    shown = capsys.readouterr()
    assert shown.err.endswith("sweep.png was not drawn, all else is there: RuntimeError: no TeX\n")
    assert "program 1 of 1: 2 settings × 2 seeds, 320 steps each, " in shown.out


@pytest.mark.usefixtures("trace_only")
def test_user_task_trains_and_starts_another_run(files, capsys):
    task = f"--task={files / 'tasks.py'}:one_digit"
    left_out = ("--task.", "--warm_start.", "--show", "--eval_samples", "--total_steps")
    small = [flag for flag in tiny.LANGUAGE if not flag.startswith(left_out)]
    small += ["--algorithm=grpo", "--total_steps=8", "--show=0", task]
    assert launch.language([*small, "--warm_start.steps=0", f"--out={files / 'run'}"]) == 0
    assert capsys.readouterr().out.count("taught nothing: ") == 1
    start = f"--init_from={files / 'run'}"
    assert launch.language([*small, start, f"--out={files / 'more'}"]) == 0


@cases(
    "source, message",
    ("nowhere.py:f", r"^env: \S+nowhere.py:f: there is no file \S+nowhere.py"),
    (
        "mine.py:coridor",
        r"^env: \S+: ImportError: \S+mine.py holds no 'coridor', but corridor, three",
    ),
    ("syntax.py:f", r"^env: \S+: SyntaxError: .*\(syntax.py, line 2\)"),
    ("mine.py:broken", r"^env: \S+: IndexError: list index out of range \(\S+mine.py, line 21\)"),
    (f"{'a' * 300}.py:f", "there is no file"),
)
def test_what_a_file_lacks_is_named(files, source, message):
    with pytest.raises(ConfigError, match=message):
        user_code.make("env", str(files / source))


@cases(
    "main, flag, name, message",
    (
        launch.control,
        "policy",
        "nothing",
        r"policy: \S+mine.py:nothing must be an instance of flax.linen.Module, .* got NoneType",
    ),
    (launch.control, "critic", "three", r"critic: \S+:three must be an instance .*, got int"),
    (launch.control, "env", "three", "env: must have the interface .* int lacks reset"),
    (launch.language, "task", "three", r"task: must be a \S+language.Task or Dialogue, got int"),
    (launch.control, "env", "THREE", "env: must have the interface .* int lacks reset"),
)
def test_what_is_neither_environment_nor_task_is_named(files, main, flag, name, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        main([f"--{flag}={files / 'mine.py'}:{name}", f"--out={files / 'run'}"])
    assert not (files / "run").exists()


def test_a_sweep_keeps_its_programs_as_well(tmp_path, monkeypatch):
    kept = []
    monkeypatch.setattr(sweeping, "keep_programs", kept.append)
    monkeypatch.setattr(sweeping, "run_group", lambda *_: 1 / 0)
    arguments = ["--config.gamma=0.9,0.95", f"--compilation_cache={tmp_path / 'cache'}"]
    with pytest.raises(ZeroDivisionError):
        sweep.main([*arguments, f"--out={tmp_path / 'sweep'}"])
    assert kept == [str(tmp_path / "cache")]


def test_tuned_settings_are_named_and_stored(tmp_path, capsys, written_down):
    of_ppo = ("--config.num_minibatches", "--config.num_epochs")
    arguments = [flag for flag in tiny.CONTROL if not flag.startswith(of_ppo)]
    arguments += ["--algorithm=trpo", "--config.value_minibatches=1"]
    written_down(launch.control, [*arguments, f"--out={tmp_path / 'run'}"])
    stored = json.loads((tmp_path / "run" / "config.json").read_text())["resolved"]["tuned"]
    assert stored
    assert "problem.num_envs" not in stored  # this flag was set by the user
    out = capsys.readouterr().out
    for name, value in stored.items():
        assert f"{name}={errors.spell(value)}" in out
