"""Tests runs of the commands in environments on the host, and the ends of these runs."""

import contextlib
import functools
import importlib
import json
import os
import signal
import sys
import time
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
from clock import SEEN
from finished import ON_HOST
from tables import cases

from jaxrl_po import __main__, control, run
from jaxrl_po.cli import evaluate, launch, plot, render, report, sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import control as command
from jaxrl_po.run.host import rollouts
from jaxrl_po.run.host.vector_envs import PoolError

pytestmark = pytest.mark.slow

TINY = [flag for flag in ON_HOST if not flag.startswith("--env=")]
# An environment with two actions and no dynamics makes the smallest program that trains.
FRAGILE = ["--env=gymnasium:Fragile-v0", *(flag for flag in TINY if "--config." not in flag)]
FRAGILE += ["--algorithm=a2c"]


class Fragile(gymnasium.Env):
    """Environment that raises at its n-th step, counted over all of its instances."""

    observation_space, action_space = SEEN, gymnasium.spaces.Discrete(2)
    left = 10**9

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(2, np.float32), {}

    def step(self, action):
        type(self).left -= 1
        if type(self).left < 0:
            raise RuntimeError("the motor is\n hot")
        return np.full(2, float(action), np.float32), float(action), False, False, {}


class Endless(Fragile):
    """Environment without a time limit."""


gymnasium.register("Endless-v0", entry_point=Endless)
gymnasium.register("Fragile-v0", entry_point=Fragile, max_episode_steps=4)


def walk(tmp_path):
    """Returns the names of one environment: in a file, a class, an object and a function."""
    (tmp_path / "own.py").write_text(WALK)
    return [
        f"gymnasium:{tmp_path}/own.py:Walk",
        f"{tmp_path}/own.py:Walk",
        Fragile,
        Fragile(),
        lambda: Fragile(),
    ]


WALK = """
import gymnasium, numpy

class Walk(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-5.0, 5.0, (2,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return numpy.zeros(2, numpy.float32), {}

    def step(self, action):
        return numpy.full(2, float(action), numpy.float32), float(action), False, False, {}
"""
LIMITED = {"env_params": '{"max_episode_steps": 3}'}


@pytest.mark.parametrize("i", range(5))
def test_own_environment_of_gymnasium_needs_no_registration(tmp_path, i):
    settings = run.Experiment(env=walk(tmp_path)[i], **LIMITED).read()
    source = command.open_world(settings.config).source
    assert (source.max_steps, source.spaces.num_actions) == (3, 2)
    with contextlib.closing(source.open([1, 2])) as pool:
        pool.reset()
        steps = [pool.step(np.array([0, 1])) for _ in range(4)]
    assert [step.reward.tolist() for step in steps] == [[0.0, 1.0]] * 3 + [[0.0, 0.0]]
    assert [step.truncated.all() for step in steps] == [False, False, True, False]


class Sized(Fragile):
    def __init__(self, size):
        super().__init__()


@cases(
    "env, env_params, expected",
    (Sized, '{"size": 2, "max_episode_steps": 3}', 3),
    (functools.partial(Sized, 2), '{"max_episode_steps": 3}', 3),
    (gymnasium.make("Pendulum-v1"), "", 200),
)
def test_own_environment_takes_its_arguments_and_limit(env, env_params, expected):
    settings = run.Experiment(env=env, env_params=env_params).read()
    assert command.open_world(settings.config).source.max_steps == expected


@cases(
    "env, env_params, message",
    (Fragile(), '{"size": 2, "max_episode_steps": 3}', ".* is an object, which takes no size$"),
    (Fragile, '{"max_episode_steps": true}', "max_episode_steps must be a whole number"),
    (SimpleNamespace(), '{"size": 2}', "must be left out: .* has no default_params$"),
)
def test_unusable_arguments_of_an_own_environment_are_told(env, env_params, message):
    with pytest.raises(ConfigError, match=f"^env_params: {message}"):
        command.open_world(run.Experiment(env=env, env_params=env_params).read().config)


def test_unsuitable_gymnasium_objects_name_the_way():
    with pytest.raises(ConfigError, match=r"^env: must be in JAX, .* run.Experiment\(env=…\)"):
        control.make_problem(Fragile())
    same = Fragile()
    for options, message in (
        ({"env": Fragile, "algorithm": "grpo"}, "env: .* sampling = groups does"),
        ({"env": Fragile, "sampling": "vine", "algorithm": "trpo"}, "env: .* sampling = vine"),
        ({"env": Fragile, "deterministic": True}, "deterministic: must be off"),
        ({"env": lambda: same}, "env: .* must make another environment in each call"),
    ):
        with pytest.raises(ConfigError, match=f"^{message}"):
            command.open_world(run.Experiment(**options, **LIMITED).read().config)


def test_command_imports_modules_of_the_working_folder(tmp_path, monkeypatch):
    (tmp_path / "walks_in_here.py").write_text(WALK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["jaxrl-po", "--help"])
    with pytest.raises(SystemExit):
        __main__.entry()
    assert importlib.import_module("walks_in_here").Walk


def test_run_with_raising_environment_is_saved_and_continues(tmp_path, capsys, monkeypatch):
    out = tmp_path / "r"
    # Four environments with 16 steps each make an iteration; the first evaluation takes 16 steps.
    monkeypatch.setattr(Fragile, "left", 4 * 16 * 4 + 16 + 40)
    assert launch.control([*FRAGILE, f"--out={out}"]) == 1
    error = capsys.readouterr().err
    assert "error: env gymnasium:Fragile-v0: RuntimeError: the motor is hot" in error
    assert "saved at iteration" in error
    saved = int(error.split("saved at iteration ")[1].split()[0])
    assert saved == 5  # iteration 5 is within the second chunk of three iterations
    before = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in before] == [0, 3, 5]
    assert before[-1]["updates"] == before[1]["updates"]
    monkeypatch.setattr(Fragile, "left", 10**9)
    assert launch.control([f"--out={out}", "--resume"]) == 0
    text = capsys.readouterr()
    assert "environments begin new episodes" in text.out + text.err
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["iteration"] == 10
    assert [row["iteration"] for row in rows] == [0, 3, 5, 6, 9, 10]
    # Every completed episode was truncated at its limit, and its return sums the rewards of its
    # actions.
    assert rows[-1]["episode_length"] == [4.0, 4.0]


@pytest.mark.usefixtures("trace_only")
def test_a_run_whose_evaluation_fails_ends_saved(tmp_path, capsys, monkeypatch):
    evaluate_well, calls = rollouts.PoolRollouts.evaluate, []

    def evaluate(self, state, later_seed=None):
        calls.append(state)
        if len(calls) == 2:
            raise PoolError("env gymnasium:Fragile-v0: OSError: no process")
        return evaluate_well(self, state, later_seed)

    monkeypatch.setattr(rollouts.PoolRollouts, "evaluate", evaluate)
    out = tmp_path / "r"
    assert launch.control([*FRAGILE, "--checkpoint_every=9", f"--out={out}"]) == 1
    assert "saved at iteration 6" in capsys.readouterr().err
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 3, 6]
    assert "greedy_return" not in rows[-1]
    assert launch.control([f"--out={out}", "--resume"]) == 0


@pytest.fixture(scope="module")
def cart_pole(finished, tmp_path_factory):
    return finished("host", tmp_path_factory.mktemp("host") / "cart_pole")


def test_the_commands_work_on_a_run_unchanged(cart_pole, capsys, tmp_path, monkeypatch):
    rows = [json.loads(line) for line in (cart_pole / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [0, 3, 6, 9, 10]
    assert all(np.isfinite(rows[-1]["greedy_return"]))
    assert evaluate.main([f"--run={cart_pole}", "--size=3"]) == 0
    assert len(json.loads((cart_pole / "evaluation.json").read_text())["greedy_return"]) == 2
    assert plot.main([str(cart_pole), f"--out={tmp_path / 'p'}"]) == 0
    assert report.main([str(cart_pole), f"--out={tmp_path / 'r.html'}"]) == 0
    monkeypatch.setattr(render, "_camera", lambda *_: (None, "no display"))
    assert render.main([f"--run={cart_pole}", "--max_steps=3", f"--out={tmp_path / 'e.gif'}"]) == 0
    assert "drawn from the observations" in capsys.readouterr().out
    assert (tmp_path / "e.gif").stat().st_size > 0


def test_two_devices_equal_one(cart_pole, tmp_path):
    flags = ["--env=gymnasium:CartPole-v1", *TINY, "--devices=1", f"--out={tmp_path / 'one'}"]
    assert launch.control(flags) == 0
    one, two = (
        json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
        for out in (tmp_path / "one", cart_pole)
    )
    for name in ("kl", "value_loss", "greedy_return"):
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-5)


def test_a_sweep_trains_all_settings_in_one_pool(tmp_path):
    flags = [flag for flag in TINY if not flag.startswith(("--log_every", "--eval_every"))]
    status = sweep.main(
        [
            "--env=gymnasium:CartPole-v1",
            *flags,
            "--config.learning_rate=1e-9,3e-3",
            "--evaluations=2",
            f"--out={tmp_path / 's'}",
        ]
    )
    assert status == 0
    rows = json.loads((tmp_path / "s" / "sweep.json").read_text())
    by_rate = {row["flags"]["config.learning_rate"]: np.array(row["scores"]) for row in rows}
    assert all(scores.shape == (2, 2) for scores in by_rate.values())
    still = by_rate[1e-9]
    # The policy does not change during the sweep.
    np.testing.assert_array_equal(still[:, 0], still[:, 1])


@cases(
    "flags, message",
    (["--env=gymnasium:CartPol-v1"], "env: .*Did you mean: `CartPole`"),
    (
        ["--env=gymnasium:Blackjack-v1"],
        "env: .* must have observations of one array, got Tuple: flatten them",
    ),
    (["--env=gymnasium:CartPole-v1", "--distributed"], "distributed: must be off"),
    (["--env=gymnasium:CartPole-v1", '--env_params={"wings": 2}'], "env: .*wings"),
    (["--env=gymnasium:CartPole-v1", '--env_params={"max_episode_steps": 0}'], "env: .*positive"),
    (["--env=gymnasium:CartPole-v1", '--env_params={"render_mode": 5}'], "env: .*endswith"),
    (["--env=gymnasium:Endless-v0"], "env: .* must bound its episodes"),
)
def test_what_cannot_work_is_said_before_anything_compiles(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        launch.control([*flags, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("trace_only")
def test_a_signal_ends_the_run_saved(tmp_path, monkeypatch):
    out, steps = tmp_path / "r", []

    def step(self, action):
        steps.append(action)
        if len(steps) == 400:
            os.kill(os.getpid(), signal.SIGTERM)
            while signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
                time.sleep(0.001)
        return np.zeros(2, np.float32), 0.0, False, False, {}

    monkeypatch.setattr(Fragile, "step", step)
    assert launch.control([*FRAGILE, f"--out={out}"]) == 0
    assert not (out / "summary.json").exists()
    saved = max(int(path.name) for path in (out / "checkpoints" / "latest").iterdir())
    assert saved % 3  # the last iteration is within a chunk of three iterations
