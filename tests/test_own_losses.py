"""Tests runs with a user's surrogate, advantage, optimizer or body of both networks."""

import functools
import json
import shutil

import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest
from probes import MatchCueContinuous
from shapes import trace_only
from tables import cases

from jaxrl_po import run
from jaxrl_po.algorithms import a2c, surrogates
from jaxrl_po.algorithms.actor_critic import estimator
from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import DiagonalGaussian
from jaxrl_po.run.experiment.experiment import DOMAINS, read_experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.store.metrics import read

CODE = """
from jaxrl_po import advantages
from jaxrl_po.algorithms import a2c

def surrogate(log_prob, samples):
    return -log_prob * samples.advantage, {}

def advantage(steps):
    ends = steps.terminated, steps.truncated
    rewards = steps.reward, steps.next_value, *ends
    target = advantages.n_step_returns(*rewards, gamma=0.99, n=5)
    return target - steps.value, target

def optimizer():
    return a2c.rmsprop(7e-4, max_grad_norm=0.5, epsilon=1e-5)
"""
OWN = ("surrogate", "advantage", "optimizer")
SMALL = {"problem.num_envs": 4, "problem.num_steps": 8, "network.width": 8}
SIZES = {"algorithm": "a2c", "total_steps": 64, "log_every": 1, "eval_episodes": 2, "seeds": 2}
SIZES |= {"env": MatchCueContinuous, "devices": 1, "over": SMALL}
Experiment = functools.partial(run.Experiment, **SIZES)


def flags_of(file):
    return {name: f"{file}:{name}" for name in OWN}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns the folder of a run with the code of A2C as a user's file."""
    place = tmp_path_factory.mktemp("own")
    (place / "own.py").write_text(CODE)
    run.train(Experiment(**flags_of(place / "own.py"), out=place / "run"))
    return place / "run"


@pytest.fixture
def moved(trained, tmp_path):
    """Returns a copy of the trained run beside its code."""
    shutil.copytree(trained.parent, tmp_path / "moved")
    return tmp_path / "moved" / "run"


def numbers(rows):
    return [{x: y for x, y in row.items() if "time/" not in x} for row in rows]


def test_own_code_of_a_method_gives_its_metrics(trained, tmp_path):
    stock = run.train(Experiment(out=tmp_path / "stock")).rows
    assert numbers(read(trained / "metrics.jsonl")) == numbers(stock)
    assert any(stock[-1]["policy_loss"])


@pytest.mark.usefixtures("trace_only")
def test_run_with_own_loss_resumes_with_its_code(moved, capsys):
    assert launch.control(["--resume", f"--out={moved}", "--total_steps=96"]) == 0
    assert read(moved / "metrics.jsonl")[-1]["step"] == 96
    stored = json.loads((moved / "config.json").read_text())
    assert {name: stored[name] for name in OWN} == flags_of(moved.parent / "own.py")
    assert "other circumstances" not in capsys.readouterr().out
    (moved.parent / "own.py").write_text(CODE.replace("-log_prob", "-2.0 * log_prob"))
    resumed = read_experiment(str(moved))
    notes = " ".join(prepare(DOMAINS["control"], resumed.read()).display.notes)
    assert all(f" {name}: " in notes for name in OWN)
    (moved.parent / "own.py").rename(moved.parent / "other.py")
    with pytest.raises(ConfigError, match=r"^surrogate: \S+: there is no file \S+own.py"):
        run.resume(moved, total_steps=128)
    with pytest.raises(ConfigError, match=r"^surrogate: must be \S+, as .*, or the same in a file"):
        run.resume(moved, surrogate=f"{moved.parent}/other.py:surrogate")


@pytest.mark.usefixtures("trace_only")
def test_policy_with_own_loss_needs_no_loss(moved):
    stored = (moved / "config.json").read_text()
    (moved / "config.json").write_text(stored.replace("own.py:", "gone.py:"))
    policy = run.load(moved, checkpoint="latest")
    assert "gone.py:" in policy.settings["surrogate"]
    assert policy.act(jnp.zeros(1)).shape == (1,)
    assert evaluate.main([f"--run={moved}", "--checkpoint=latest"]) == 0


@pytest.mark.usefixtures("trace_only")
def test_python_objects_are_given_again_to_resume(tmp_path):
    calls = []

    def surrogate(log_prob, samples):
        calls.append(log_prob.shape)
        return surrogates.plain(log_prob, samples)

    own = {"surrogate": surrogate, "optimizer": optax.sgd(1e-2)}
    own["advantage"] = estimator(a2c.Config(n_steps=3))
    run.train(Experiment(**own, out=tmp_path / "run"))
    assert calls
    stored = json.loads((tmp_path / "run" / "config.json").read_text())
    assert [stored[x].partition(":")[0] for x in OWN] == ["python"] * 3
    run.load(tmp_path / "run", checkpoint="latest")
    with pytest.raises(ConfigError, match=r"^\w+: python:\w+ was given in Python and cannot"):
        run.resume(tmp_path / "run", total_steps=96)
    assert run.resume(tmp_path / "run", total_steps=96, **own).rows[-1]["step"] == 96


def test_sweep_trains_with_own_loss(trained, tmp_path, monkeypatch):
    trace_only(monkeypatch)
    calls = []

    def advantage(steps):
        calls.append(steps.reward.shape)
        return steps.reward - steps.value, steps.reward

    own = flags_of(trained.parent / "own.py") | {"advantage": advantage}
    plain = {name: x for name, x in SIZES.items() if name not in ("log_every", "over")}
    searched = run.Experiment(**plain, **own, over=SMALL, out=tmp_path / "sweep")
    over = {"config.entropy_coefficient": [0.0, 0.1]}
    swept = run.sweep(searched, over=over, evaluations=1)
    assert len(swept.rows) == 2
    assert calls
    assert not {f"config.{name}" for name in ("gamma", "learning_rate")} & swept.best.keys()
    assert run.sweep(searched, over=over, evaluations=1, resume=True).rows == swept.rows


@cases(
    "given, message",
    ({"algorithm": "trpo", "optimizer": optax.sgd(0.1)}, "optimizer: must be left out with al"),
    (
        {"task": "addition", "algorithm": "grpo", "advantage": surrogates.plain},
        "advantage: must be left out with algorithm = grpo, which",
    ),
    ({"optimizer": lambda: 3}, "optimizer: must be of type GradientTransformation, got 3"),
    ({"optimizer": "adam"}, r"optimizer: must be a file and a name, file\.py:name, got 'adam'"),
    ({"advantage": lambda steps: steps.reward}, "advantage: must return"),
    (
        {"optimizer": optax.sgd(0.1), "over": {"config.optimizer": "lion"}},
        r"config\.optimizer: must be auto beside make",
    ),
    (
        {"optimizer": optax.sgd(0.1), "over": {"config.learning_rate": 0.1}},
        r"config\.learning_rate: has no effect unless the optimizer",
    ),
    (
        {"algorithm": "grpo", "surrogate": surrogates.plain, "over": {"config.dual_clip": True}},
        r"config\.dual_clip: has no effect unless the surrogate is the clipped one",
    ),
    ({"algorithm": "grpo", "actor_critic": nn.Dense(1)}, "actor_critic: must be left out: sam"),
)
def test_what_a_method_cannot_take_is_named(given, message, tmp_path):
    with pytest.raises(ConfigError, match=f"^{message}"):
        run.train(run.Experiment(**given, seeds=1, total_steps=0, out=tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@cases("name", "advantage", "optimizer")
def test_tuned_values_of_replaced_parts_are_omitted(name):
    replaced = {"advantage": "config.gamma", "optimizer": "config.learning_rate"}
    own = {"advantage": lambda steps: (steps.reward, steps.reward), "optimizer": optax.sgd(0.1)}
    for problem in ({"env": "Pendulum-v1"}, {"task": "addition"}):
        stock = run.Experiment(algorithm="ppo", **problem).read().origins
        found = run.Experiment(algorithm="ppo", **problem, **{name: own[name]}).read().origins
        assert {x for x in stock if stock[x] != found[x]} >= {replaced[name]}
        assert found[replaced[name]] == "default"
        other = next(x for x in replaced.values() if x != replaced[name])
        assert found[other] == stock[other] != "default"


class Both(nn.Module):
    """Policy and critic in one body."""

    @nn.compact
    def __call__(self, x):
        mean = nn.Dense(1)(x)
        return DiagonalGaussian(mean, jnp.zeros_like(mean)), nn.Dense(1)(x)[..., 0]


@pytest.mark.usefixtures("trace_only")
def test_policy_and_critic_share_a_body(tmp_path):
    sizes = {name: x for name, x in SMALL.items() if "network" not in name}
    run.train(Experiment(actor_critic=Both, over=sizes, out=tmp_path / "run"))
    policy = run.load(tmp_path / "run", checkpoint="latest")
    assert policy.params.value is None
    assert policy.act(jnp.zeros(1)).shape == (1,)
    with pytest.raises(ConfigError, match=r"^network\.width: has no effect"):
        run.train(Experiment(actor_critic=Both, out=tmp_path / "other"))
