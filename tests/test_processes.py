"""Tests several processes as one program, started as a user starts them; gloo connects CPU
devices."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import scripts
import tiny
import toy_run
from scripts import surroundings
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices import processes
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import read

pytestmark = pytest.mark.slow

EXPERIMENTS = Path(__file__).parent.parent / "experiments"
CONTROL = [*tiny.CONTROL, "--devices=auto", "--problem.num_envs=8", "--log_every=1"]
CONTROL += ["--eval_every=1000"]
STEPS = 64  # number of environment steps in one iteration
LANGUAGE = [*tiny.LANGUAGE, "--devices=auto", "--algorithm=grpo", "--total_steps=96"]
LANGUAGE += ["--problem.num_prompts=8", "--config.num_minibatches=1"]
CLUSTERS = ("SLURM_", "OMPI_", "KUBERNETES_", "TPU_", "MEGASCALE_")
CLUSTERS += ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


@pytest.fixture(scope="module")
def environment():
    """Returns environment variables without the variables of a cluster."""
    return {name: value for name, value in surroundings().items() if not name.startswith(CLUSTERS)}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def join(count, index, port, timeout=120):
    return [
        "--distributed",
        f"--coordinator=127.0.0.1:{port}",
        f"--num_processes={count}",
        f"--process_id={index}",
        f"--coordinator_timeout={timeout}",
    ]


@contextlib.contextmanager
def started(script, arguments, environment, count=2, timeout=120, apart=()):
    """Starts the processes of one run; `apart` are additional arguments of the last process."""
    port, running = free_port(), []
    try:
        for i in range(count):
            several = join(count, i, port, timeout) if count > 1 else []
            command = [
                sys.executable,
                str(EXPERIMENTS / f"{script}.py"),
                *arguments,
                *several,
                *(apart if i == count - 1 else ()),
            ]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            running.append(subprocess.Popen(command, **pipes, text=True, env=environment))
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def finish(running, limit=200):
    """Returns status, lines of standard output and errors of each process."""
    ends = []
    for process in running:
        output, errors = process.communicate(timeout=limit)
        ends.append((process.returncode, output.splitlines(), errors))
    return ends


def run(script, arguments, environment, **several):
    with started(script, arguments, environment, **several) as running:
        ends = finish(running)
    assert [status for status, *_ in ends] == [0] * len(ends), ends
    return ends


def lines(out):
    return scripts.lines(out, without=("time/", "memory/peak"))


def last(out):
    with Store(out / "checkpoints" / "latest") as store:
        iteration = store.iterations()[-1]
        return iteration, store.read(iteration)


def assert_equal_runs(one, other, tolerance):
    for row, twin in zip(lines(one), lines(other), strict=True):
        assert list(row) == list(twin)
        for name, value in row.items():
            np.testing.assert_allclose(
                np.asarray(value, np.float64),
                np.asarray(twin[name], np.float64),
                rtol=tolerance,
                atol=tolerance,
                err_msg=name,
            )
    (iteration, state), (_, twin) = last(one), last(other)
    assert state.keys() == twin.keys()
    for name, array in state.items():
        np.testing.assert_allclose(array, twin[name], rtol=tolerance, atol=tolerance, err_msg=name)
    return iteration


@pytest.fixture(scope="module")
def pair(environment, tmp_path_factory):
    """Runs three iterations on eight devices: in one process, and in two processes."""
    out = tmp_path_factory.mktemp("pair")
    flags = [*CONTROL, f"--total_steps={3 * STEPS}", "--mesh=seed:2,data:4"]
    assert launch.control([*flags, f"--out={out / 'one'}"]) == 0
    return out, run("control", [*flags, f"--out={out / 'two'}"], environment)


def test_two_processes_of_four_devices_equal_eight(pair):
    out, _ = pair
    assert assert_equal_runs(out / "one", out / "two", 1e-5) == 3


def test_first_process_writes_and_others_are_silent(pair):
    out, ends = pair
    assert ends[0][1][-1].endswith(f"; results in {out / 'two'}")
    assert ends[1][1] == []
    assert {path.name for path in (out / "two").iterdir()} == {
        path.name for path in (out / "one").iterdir()
    }
    config = json.loads((out / "two" / "config.json").read_text())
    assert config["resolved"]["device"] == "8 × cpu in 2 processes"
    assert "process_id" not in config


def test_lines_of_others_pass_where_gloo_is_hidden():
    code = "import os, time; from jaxrl_po.run.devices import processes; processes.hide_gloo();"
    code += "print('mine', flush=True); os.write(1, b'[Gloo] Rank 0 is connected to 1 \\n');"
    code += "time.sleep(0.5); os.system('echo a child; echo 42'); os.write(1, b'the end')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "mine\na child\n42\nthe end"


def test_lines_of_gloo_end_at_other_lines():
    gloo = [b"[Gloo] Rank 0 is connected to 1 \n", b"7\n", b"\n", b" peer ranks.\n"]
    others = [b"mine\n", b"42\n", b"the end"]
    assert list(processes.drop_gloo([others[0], *gloo, *others])) == [others[0], *others]
    assert list(processes.drop_gloo([*others[1:], *gloo])) == others[1:]


def test_what_a_process_needs_is_told(pair):
    out, ends = pair
    told = next(line for line in ends[0][1] if "a device holds" in line)
    assert told.startswith(
        "2 seeds in 2 shares of 1, the rows of each sharded over 4 devices, 8 in all; "
        "a device holds "
    )
    first = read(out / "two" / "metrics.jsonl")[0]
    assert 0 < first["memory/state_bytes"] < first["memory/peak_bytes"]


def test_signal_to_another_process_saves_and_ends_this(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(processes, "any_of", lambda flag: asked.append(flag) or len(asked) > 4)
    stopped = toy_run.run(tmp_path)
    assert not any(asked)
    assert stopped.interrupted
    assert 0 < stopped.iteration == last(tmp_path)[0] == lines(tmp_path)[-1]["iteration"]


def test_signal_to_one_saves_all_for_other_devices(environment, tmp_path):
    flags = [*CONTROL, f"--out={tmp_path / 'run'}"]
    long = f"--total_steps={150 * STEPS}"
    with started(
        "control", [*flags, long, "--mesh=seed:2,data:4", "--checkpoint_every=1000"], environment
    ) as running:
        while (
            all(process.poll() is None for process in running)
            and len(read(tmp_path / "run" / "metrics.jsonl")) < 3
        ):
            time.sleep(0.05)
        running[1].send_signal(signal.SIGTERM)
        ends = finish(running)
    assert [status for status, *_ in ends] == [0, 0], ends
    stopped = lines(tmp_path / "run")[-1]["iteration"]
    assert 2 <= stopped < 150
    assert f"stopped and saved at iteration {stopped}" in ends[0][1][-1]
    assert last(tmp_path / "run")[0] == stopped
    told = run("control", [*flags, long, "--resume", "--mesh=seed:2"], environment, count=1)[0][1]
    assert any(
        line.startswith(f"resuming at iteration {stopped} (step {stopped * STEPS:,})")
        for line in told
    )
    assert [row["iteration"] for row in lines(tmp_path / "run")] == list(range(151))


def test_processes_that_disagree_all_end_and_say_where(environment, tmp_path):
    flags = [*CONTROL, "--devices=2", f"--out={tmp_path / 'new'}"]
    with started("control", flags, environment, apart=["--config.gamma=0.9"]) as running:
        ends = finish(running, 60)
    for status, output, errors in ends:
        assert (status, output) == (2, [])
        assert errors == (
            "error: --config.gamma: must be the same in all processes, but is 0.99 in "
            "process 0 and 0.9 in process 1\n"
        )
    assert not (tmp_path / "new").exists()


def test_a_coordinator_that_cannot_be_reached_is_named(environment, tmp_path):
    port = free_port()
    flags = [*join(2, 1, port, timeout=2), f"--out={tmp_path / 'new'}"]
    ended = scripts.python(EXPERIMENTS / "control.py", *flags, env=environment, timeout=240)
    assert ended.returncode == 2
    assert ended.stderr.startswith(
        "error: --distributed: not all processes met within coordinator_timeout = 2 s; "
        "start every process_id from 0 to num_processes - 1 once, and let all reach process 0, "
        f"which must run at coordinator = 127.0.0.1:{port}\n"
    )
    assert "Traceback" not in ended.stderr
    assert "stack trace" not in ended.stderr
    assert not (tmp_path / "new").exists()


def test_cluster_that_does_not_tell_all_is_named(monkeypatch):
    def refuse(*_, **__):
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    monkeypatch.setattr(jax.distributed, "initialize", refuse)
    with pytest.raises(
        ConfigError,
        match=r"^distributed: found no cluster .*: give coordinator \(host:port\), "
        r"num_processes and process_id \(coordinator_address should be defined",
    ):
        processes.join_processes()


@cases(
    "arguments, message",
    (
        {"coordinator": "somewhere"},
        r"coordinator: must read like host:port, e\.g\. 10\.0\.0\.1:1234, got 'somewhere'",
    ),
    ({"coordinator": "host:port"}, r"coordinator: must read like host:port"),
    ({"coordinator": "host:70000"}, r"coordinator: must read like host:port"),
    (
        {"num_processes": 2, "process_id": 2},
        r"process_id: must be below num_processes = 2, got 2; the first is 0$",
    ),
)
def test_bad_flags_are_named_before_any_waiting(arguments, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        processes.join_processes(**arguments)


@pytest.mark.timeout(1200)
def test_two_processes_equal_one_on_language(environment, tmp_path):
    flags = [*LANGUAGE, "--mesh=data:8"]
    run("language", [*flags, f"--out={tmp_path / 'one'}"], environment, count=1)
    run("language", [*flags, f"--out={tmp_path / 'two'}"], environment)
    assert assert_equal_runs(tmp_path / "one", tmp_path / "two", 1e-5) == 3
    assert (tmp_path / "one" / "samples.jsonl").read_bytes() == (
        tmp_path / "two" / "samples.jsonl"
    ).read_bytes()


@pytest.mark.timeout(600)
@cases("victim", 0, 1)
def test_killed_process_ends_others_and_run_resumes(environment, tmp_path, victim):
    flags = [
        *CONTROL,
        f"--out={tmp_path / 'run'}",
        "--mesh=seed:2,data:4",
        f"--total_steps={150 * STEPS}",
    ]
    with started("control", flags, environment, timeout=10) as running:
        while (
            all(process.poll() is None for process in running)
            and len(read(tmp_path / "run" / "metrics.jsonl")) < 4
        ):
            time.sleep(0.05)
        running[victim].kill()
        begun = time.monotonic()
        _, _, errors = finish([running[1 - victim]], 60)[0]
        assert time.monotonic() - begun < 40
        assert running[1 - victim].returncode not in (0, None)
    assert "another task died" in errors
    told = run("control", [*flags, "--resume"], environment)[0][1]
    assert any(line.startswith("resuming at iteration") for line in told)
    assert [row["iteration"] for row in lines(tmp_path / "run")] == list(range(151))
