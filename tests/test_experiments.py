import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_po import language as language_lib
from jaxrl_po import runner
from jaxrl_po.algorithms import dapo
from jaxrl_po.checkpoint import Store
from jaxrl_po.flags import UsageError
from jaxrl_po.metrics import read

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
SMALL = [
    "--seeds=2",
    "--devices=1",
    "--total_steps=3200",
    "--log_every=2",
    "--eval_every=3",
    "--eval_episodes=2",
    "--problem.num_envs=4",
    "--problem.num_steps=8",
    "--problem.width=8",
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
]
SMALL_LANGUAGE = [
    "--seeds=2",
    "--devices=1",
    "--total_steps=24",
    "--eval_prompts=4",
    "--eval_samples=2",
    "--show=3",
    "--task.num_digits=1",
    "--problem.num_prompts=2",
    "--problem.group_size=4",
    "--model.width=8",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=1",
    "--model.mlp_width=8",
    "--config.num_minibatches=2",
    "--config.num_epochs=1",
    "--warm_start.steps=2",
    "--warm_start.batch_size=4",
]


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """A script would choose the number of devices of a backend that does not run yet."""
    return jax.local_device_count()


def load(name):
    spec = importlib.util.spec_from_file_location(name, EXPERIMENTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def scripts():
    sys.path.insert(0, str(EXPERIMENTS))
    try:
        yield {name: load(name) for name in ("control", "language")}
    finally:
        sys.path.remove(str(EXPERIMENTS))


@pytest.fixture(scope="module")
def environment():
    """Processes share what this one has compiled, and what earlier ones have."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
    }


def start(script, arguments, environment=None):
    command = [sys.executable, str(EXPERIMENTS / f"{script}.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


@pytest.fixture(scope="module")
def finished(environment, tmp_path_factory):
    """A finished run of each script."""
    out = tmp_path_factory.mktemp("finished")
    flags = {"control": SMALL, "language": SMALL_LANGUAGE}
    processes = {name: start(name, [*flags[name], f"--out={out / name}"], environment) for name in flags}
    for name, process in processes.items():
        _, errors = process.communicate(timeout=200)
        assert process.returncode == 0, (name, errors)
    return out


def snapshot(path):
    return {file.relative_to(path): file.read_bytes() for file in path.rglob("*") if file.is_file()} if path.exists() else None


@pytest.fixture
def no_compilation(monkeypatch):
    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr(runner, "compile_programs", refuse)


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize(
    ("script", "argument", "message"),
    [
        ("control", "--algorithm=pppo", r"--algorithm has no 'pppo'; did you mean ppo\?"),
        ("control", "--env=CartPol-v1", r"--env has no 'CartPol-v1'; did you mean CartPole-v1\?"),
        ("control", "--sead=1", r"--sead is not a flag; did you mean --seed\?"),
        ("control", "--config.learning_rat=1", r"--config\.learning_rat is not a flag; did you mean --config\.learning_rate\?"),
        ("control", "--problem.temperature=1", r"--problem\.temperature is not a flag"),
        ("control", "--config.gamma=1.5", r"--config\.gamma must lie in \[0, 1\], got 1\.5"),
        ("control", "--config.gamma=nan", r"--config\.gamma must lie in \[0, 1\], got nan"),
        ("control", "--config.lambda_=-0.1", r"--config\.lambda_ must lie in \[0, 1\], got -0\.1"),
        ("control", "--config.epsilon_low=1", r"--config\.epsilon_low must lie in"),
        ("control", "--config.epsilon_high=1", r"--config\.epsilon_high must lie in"),
        ("control", "--config.learning_rate=-1", r"--config\.learning_rate must lie in \(0, inf\), got -1"),
        ("control", "--config.target_kl=0.5", r"--config\.target_kl has no effect unless early_stop is on"),
        ("control", "--config.num_minibatches=3", r"--config\.num_minibatches .* must divide the 32 rows"),
        ("control", "--config.num_minibatches=0", r"--config\.num_minibatches must lie in \[1, inf\), got 0"),
        ("control", "--problem.num_envs=-4", r"--problem\.num_envs must lie in \[1, inf\), got -4"),
        ("control", "--problem.initial_log_std=0.5", r"--problem\.initial_log_std applies to continuous actions only"),
        ("control", "--problem.activation=tan", r"--problem\.activation must be one of tanh"),
        ("control", "--seeds=0", r"--seeds must lie in \[1, inf\) seeds, got 0"),
        ("control", "--total_steps=31", r"--total_steps=31 must be at least 32, the environment steps of one iteration"),
        ("control", "--total_steps=-1", r"--total_steps must lie in \[1, inf\), got -1"),
        ("control", "--total_steps=1e6", r"--total_steps must be an integer, got '1e6'"),
        ("control", "--devices=none", r"--devices must be 'auto' or a positive number, got 'none'"),
        ("control", "--devices=0", r"--devices must be 'auto' or a positive number, got '0'"),
        ("control", "--devices=1000", r"--devices must be at most"),
        (
            "control",
            "--devices=auto --mesh=model:2",
            r"--mesh=model:2: model is for language\.py; the networks of control\.py are",
        ),
        ("control", "--shard_params", r"--shard_params is not a flag"),
        (
            "language",
            "--devices=auto --mesh=model:4",
            r"--model\.kv_heads=1 must be a multiple of 4, the devices of the model axis",
        ),
        (
            "language",
            "--devices=auto --mesh=model:2 --model.kv_heads=2 --model.mlp_width=9",
            r"--model\.mlp_width=9 must be a multiple of 2, the devices of the model axis",
        ),
        (
            "language",
            "--devices=4 --shard_params --problem.num_prompts=4 --model.width=6 --model.heads=1",
            r"--model\.width=6 must be a multiple of 4, the devices of the data axis",
        ),
        ("control", "--eval_every=0", r"--eval_every must lie in \[1, inf\) lines, got 0"),
        ("control", "--coordinator=host:1234", r"--coordinator has no effect unless --distributed is given"),
        ("control", "--num_processes=2", r"--num_processes has no effect unless --distributed is given"),
        ("control", "--process_id=0", r"--process_id has no effect unless --distributed is given"),
        ("control", "--coordinator_timeout=5", r"--coordinator_timeout has no effect unless --distributed is given"),
        ("control", "--distributed --num_processes=-1", r"--num_processes must lie in \[0, inf\), got -1"),
        ("control", "--distributed --process_id=-2", r"--process_id must lie in \[-1, inf\), got -2"),
        ("control", "--distributed --coordinator_timeout=0", r"--coordinator_timeout must lie in \[1, inf\) seconds, got 0"),
        ("language", "--distributed --coordinator=host", r"--coordinator must read like host:port"),
        ("control", "--out=", r"--out must name a folder"),
        ("control", "--overwrite --resume", r"--resume and --overwrite exclude each other"),
        ("control", "extra", r"'extra' is not a flag"),
        ("language", "--task=adition", r"--task has no 'adition'; did you mean addition\?"),
        ("language", "--problem.top_p=0", r"--problem\.top_p must lie in \(0, 1\], got 0"),
        ("language", "--problem.top_k=15", r"--problem\.top_k must be at most 14, the vocabulary, got 15"),
        ("language", "--eval_samples=-1", r"--eval_samples must lie in \[0, inf\) samples, got -1"),
        ("language", "--show=-1", r"--show must lie in \[0, inf\) prompts, got -1"),
        ("language", "--env=CartPole-v1", r"--env is not a flag"),
        ("language", "--task.num_digits=10", r"--task\.num_digits must lie in \[1, 9\] digits, got 10"),
        ("language", "--problem.temperature=0", r"--problem\.temperature must lie in \(0, inf\), got 0"),
        ("language", "--problem.max_new_tokens=2", r"--problem\.max_new_tokens must be at least 3"),
        ("language", "--model.heads=3", r"--model\.width / heads must be an even whole number, got 8 / 3"),
        ("language", "--model.kv_heads=3", r"--model\.kv_heads must divide heads = 2, got 3"),
        ("language", "--total_steps=7", r"--total_steps=7 must be at least 8, the completions of one iteration"),
        ("language", "--warm_start.steps=-1", r"--warm_start\.steps must lie in \[0, inf\) steps, got -1"),
    ],
)
def test_bad_input_ends_before_compiling_and_leaves_no_folder(scripts, tmp_path, script, argument, message):
    small = SMALL if script == "control" else SMALL_LANGUAGE
    with pytest.raises(UsageError, match=f"^{message}") as caught:
        scripts[script].main([*small, f"--out={tmp_path / 'new'}", *argument.split()])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "new").exists()


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("control", [], r"--out=.*control already holds files; add --resume .*, --overwrite .*, or choose another"),
        ("control", ["--resume", "--config.learning_rate=0.5"], r"--config\.learning_rate=0\.5 must be 0\.0003, as in the run"),
        ("control", ["--resume", "--problem.num_envs=8"], r"--problem\.num_envs=8 must be 4, as in the run"),
        ("control", ["--resume", "--env=Pendulum-v1"], r"--env=Pendulum-v1 must be CartPole-v1, as in the run"),
        ("control", ["--resume", "--seed=1"], r"--seed=1 must be 0, as in the run"),
        ("control", ["--resume", "--total_steps=160"], r"--total_steps=160 must be at least 3200, .* may only grow"),
        ("language", ["--resume", "--task.num_digits=2"], r"--task\.num_digits=2 must be 1, as in the run"),
    ],
)
def test_a_used_folder_keeps_every_byte(scripts, finished, script, arguments, message):
    before = snapshot(finished / script)
    with pytest.raises(UsageError, match=f"^{message}"):
        scripts[script].main([f"--out={finished / script}", *arguments])
    assert snapshot(finished / script) == before


def test_one_script_does_not_resume_the_other(scripts, finished):
    with pytest.raises(UsageError, match=r"holds a run of control\.py, not of language\.py"):
        scripts["language"].main(["--resume", f"--out={finished / 'control'}"])


@pytest.mark.parametrize("script", ["control", "language"])
def test_a_run_leaves_its_files(finished, script):
    out = finished / script
    files = {".lock", "checkpoints", "config.json", "curves.png", "metrics.jsonl", "summary.json"}
    assert {path.name for path in out.iterdir()} == files | ({"samples.jsonl"} if script == "language" else set())
    config, summary = (json.loads((out / f"{name}.json").read_text()) for name in ("config", "summary"))
    assert config["config.gamma"] == {"control": 0.99, "language": 1.0}[script]
    assert config["resolved"]["steps_per_iteration"] == {"control": 32, "language": 8}[script]
    score = {"control": "greedy_return", "language": "greedy_accuracy"}[script]
    rows = read(out / "metrics.jsonl")
    assert summary[score] == rows[-1][score]
    assert len(summary[score]) == 2
    assert summary["steps"] == {"control": 3200, "language": 24}[script] == rows[-1]["step"]
    assert summary["steps_per_second"] > 0
    assert summary["compile_seconds"] > 0
    assert set(summary["versions"]) == {"python", "jax", "jaxlib", "flax", "optax", "gymnax", "jaxrl_po"}
    assert summary["device"]
    if script == "language":
        assert summary["warm_start_accuracy"] == rows[0]["greedy_accuracy"]


def test_lines_hold_what_is_to_be_watched(finished):
    row = read(finished / "control" / "metrics.jsonl")[-1]
    wanted = {"episode_return", "policy_loss", "value_loss", "entropy", "kl", "grad_norm", "skipped", "greedy_return"}
    for name in wanted:
        assert {name, f"{name}/mean", f"{name}/iqm"} <= set(row)


def test_the_language_script_evaluates_samples_and_shows_some(finished):
    """Three iterations, a line each, evaluated at the first state, and at the last."""
    rows = read(finished / "language" / "metrics.jsonl")
    evaluated = [row for row in rows if "greedy_accuracy" in row]
    assert all({"greedy_length", "avg@2", "pass@1", "pass@2"} <= set(row) for row in evaluated)
    shown = read(finished / "language" / "samples.jsonl")
    assert [row["iteration"] for row in shown] == [row["iteration"] for row in evaluated for _ in range(6)]
    assert [row["decoding"] for row in shown] == ["greedy", "sampled"] * (len(shown) // 2)
    assert len({row["prompt"] for row in shown}) == 3
    names = ["iteration", "step", "seed", "decoding", "prompt", "completion", "length", "score", "ended"]
    assert list(shown[0]) == names


def params(out):
    """The final parameters and the whole state, as bytes."""
    with Store(out / "checkpoints" / "latest") as store:
        iteration = store.iterations()[-1]
        saved = store.read(iteration)
    return iteration, {name: np.asarray(array).tobytes() for name, array in saved.items()}


def lines(out):
    rows = read(out / "metrics.jsonl")
    return [{name: value for name, value in row.items() if not name.startswith("time/")} for row in rows]


def test_help_lists_every_field_with_its_default(scripts, capsys):
    assert scripts["control"].main(["--help"]) == 0
    text = capsys.readouterr().out
    for flag in ("--total_steps=500000", "--config.learning_rate=0.0003", "--config.target_kl=0.02", "--problem.num_envs=64"):
        assert f"  {flag}\n" in text
    assert "nats" in text
    assert scripts["language"].main(["--algorithm=ppo", "-h"]) == 0
    text = capsys.readouterr().out
    for flag in ("--task.num_digits=", "--model.width=", "--warm_start.steps=", "--problem.temperature="):
        assert f"  {flag}" in text


def test_the_process_ends_with_status_2_and_one_line(tmp_path):
    with start("control", [f"--out={tmp_path / 'new'}", "--config.gama=0.9"]) as process:
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert errors == "error: --config.gama is not a flag; did you mean --config.gamma?\n"
    assert output == ""


def test_a_run_that_was_killed_resumed_and_extended_equals_the_uninterrupted_one(finished, environment, tmp_path):
    short = [flag for flag in SMALL if "total_steps" not in flag]
    # Begun with --overwrite, which is no setting of the run: it must not be taken over when the run is resumed.
    with start("control", [*short, "--total_steps=1920", f"--out={tmp_path}", "--overwrite"], environment) as process:
        while process.poll() is None and len(read(tmp_path / "metrics.jsonl")) < 10:
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
    assert 10 <= len(read(tmp_path / "metrics.jsonl")) < 31
    with start("control", ["--resume", "--total_steps=3200", f"--out={tmp_path}"], environment) as process:
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert "resuming at step" in output
    assert lines(tmp_path) == lines(finished / "control")
    assert params(tmp_path) == params(finished / "control")
    assert json.loads((tmp_path / "config.json").read_text())["total_steps"] == 3200


def test_a_script_has_defaults_of_its_own(scripts, capsys):
    assert scripts["language"].main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--config.gamma=1.0" in shown
    assert "--total_steps=131072" in shown
    assert scripts["control"].main(["--help"]) == 0
    assert "--config.gamma=0.99" in capsys.readouterr().out


def test_a_decay_that_ends_before_the_run_is_refused(scripts, tmp_path):
    with pytest.raises(UsageError, match="decay_iterations=3 must be 0 or at least 100"):
        scripts["control"].main([*SMALL, "--config.decay_iterations=3", f"--out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("no_compilation")
def test_a_tuned_decay_ends_with_the_run(scripts, tmp_path, monkeypatch):
    built, build = [], scripts["control"].SCRIPT.build

    def spy(records, *arguments):
        built.append(records["config"].decay_iterations)
        return build(records, *arguments)

    script = scripts["control"].SCRIPT._replace(build=spy, defaults=lambda options: {"config.decay_iterations": 7})
    monkeypatch.setattr(scripts["control"], "SCRIPT", script)
    for arguments, want in (([], 100), (["--total_steps=32"], 1), (["--config.decay_iterations=500"], 500)):
        with pytest.raises(AssertionError, match="compiled"):
            scripts["control"].main([*SMALL, *arguments, f"--out={tmp_path / str(want)}"])
        assert built[-1] == want


@pytest.mark.usefixtures("no_compilation")
@pytest.mark.parametrize(
    ("arguments", "want"),
    [
        (["--algorithm=dapo"], 4),  # an answer of 3 tokens, and the last fifth of 4, rounded up to 1, is punished
        (["--algorithm=dapo", "--config.soft_overlong=false"], 0),
        (["--algorithm=dapo", "--problem.max_new_tokens=9"], 9),
        (["--algorithm=grpo"], 0),
    ],
)
def test_overlong_shaping_does_not_punish_the_longest_right_answer(scripts, tmp_path, monkeypatch, arguments, want):
    asked, make_problem = [], language_lib.make_problem

    def spy(*positional, **named):
        asked.append(named["max_new_tokens"])
        return make_problem(*positional, **named)

    monkeypatch.setattr(language_lib, "make_problem", spy)
    with pytest.raises(AssertionError, match="compiled"):
        scripts["language"].main(["--task.num_digits=1", "--devices=1", *arguments, f"--out={tmp_path / 'run'}"])
    assert set(asked) == {want}


@pytest.mark.usefixtures("no_compilation")
def test_an_episode_that_lasts_is_not_overlong(scripts, tmp_path, monkeypatch):
    asked, make = [], dapo.make
    monkeypatch.setattr(dapo, "make", lambda config, problem: asked.append(config) or make(config, problem))
    with pytest.raises(AssertionError, match="compiled"):
        scripts["control"].main(["--algorithm=dapo", "--devices=1", "--total_steps=100000", f"--out={tmp_path / 'run'}"])
    assert (asked[0].soft_overlong, asked[0].overlong_filtering) == (False, False)
