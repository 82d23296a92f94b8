"""Tests Python objects whose source changed between two starts of a run."""

import functools
import json
import linecache
import re
import shutil
import typing

import jax
import pytest
import shapes
from tables import cases

from jaxrl_po import run
from jaxrl_po.config import ConfigError, PythonObject
from jaxrl_po.run.experiment.experiment import DOMAINS, read_experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.store import sources

CODE = """
import dataclasses
import flax.linen as nn
import jax.numpy as jnp
from jaxrl_po import language
from jaxrl_po.distributions import DiagonalGaussian
from probes import MatchCueContinuous

HALF = 0.5
x = 1
cue = 1

def half(x):
    return HALF * x

class Cue(MatchCueContinuous):
    power = 2

    def reward(self, state, action):
        def inner(x):
            return half(x)
        return -jnp.abs(action[0] - inner(state.cue)) ** self.power

@dataclasses.dataclass
class Wrapper:
    env: Cue

class Mean(nn.Module):
    scale: float = 1.0

    @nn.compact
    def __call__(self, x):
        mean = self.scale * x + self.param("bias", nn.initializers.zeros, ())
        return DiagonalGaussian(mean, jnp.zeros_like(mean))

def score(completions, **_):
    return [half(1.0) for _ in completions]
"""
SAME, UNREADABLE = ("", ""), None
SETTINGS = {"algorithm": "a2c", "total_steps": 64, "eval_episodes": 2, "seeds": 2}
SIZES = {"problem.num_envs": 4, "problem.num_steps": 8, "network.width": 8}


def defined(change, place="<a cell>"):
    """Returns the names of `CODE` after a change, as a notebook defines them; `UNREADABLE` has no
    source lines."""
    text = CODE.replace(*(change or SAME), 1)
    names = {"__name__": "own"}
    exec(compile(text, place, "exec"), names)
    linecache.cache[place] = (len(text), None, text.splitlines(True) if change else [], place)
    return names


def objects(change):
    names = defined(change)
    return {"env": names["Cue"](), "policy": names["Mean"]()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Returns folders of two runs, traced only; the second run is deterministic."""
    outs = [tmp_path_factory.mktemp("runs") / name for name in ("plain", "deterministic")]
    with pytest.MonkeyPatch.context() as patch:
        shapes.trace_only(patch)
        for out in outs:
            exact = {"deterministic": out.name == "deterministic"}
            run.train(run.Experiment(**objects(SAME), **SETTINGS, **exact, out=out, over=SIZES))
    return outs


def told(resumed):
    found = prepare(DOMAINS[resumed.script], resumed.read()).display.notes
    return [line for line in found if "under other circumstances" in line]


@cases(
    "change, expected",
    (SAME, ""),
    (("scale: float = 1.0", "scale: float = 2.0"), r"policy: (\w+:Mean) → (?!\1)\w+:Mean"),
    (("-jnp.abs", "jnp.abs"), r"env: (\w+:Cue) → (?!\1)\w+:Cue"),
    (UNREADABLE, "env may differ from the run's; policy may differ from the run's"),
    ids=["same", "policy", "env", "unreadable"],
)
def test_changed_object_is_named_on_resume(trained, change, expected):
    found = told(read_experiment(str(trained[0]), **objects(change)))
    assert len(found) == bool(expected)
    assert all(re.search(rf"may differ: {expected}$", line) for line in found)


def test_changed_object_is_named_on_load(trained, capsys):
    run.load(trained[0], **objects(SAME))
    assert capsys.readouterr().err == ""
    run.load(trained[0], **objects(("-jnp.abs", "jnp.abs")))
    assert re.search(r"was made with other code: env: \w+:Cue → \w+:Cue$", capsys.readouterr().err)


@cases("change", UNREADABLE, ("-jnp.abs", "jnp.abs"))
def test_deterministic_run_refuses_changed_object(trained, change):
    assert told(read_experiment(str(trained[1]), **objects(SAME))) == []
    with pytest.raises(ConfigError, match=r"^deterministic: promises the same bits .* differ env"):
        run.resume(trained[1], total_steps=96, **objects(change))


def test_deterministic_run_refuses_object_never_read(trained, tmp_path):
    out = shutil.copytree(trained[1], tmp_path / "run")
    stored = json.loads((out / "config.json").read_text())
    stored["resolved"]["code"] = {"env": "python:Cue", "policy": "python:Mean"}
    (out / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"differ env may differ from the run's; policy may"):
        run.resume(out, total_steps=96, **objects(UNREADABLE))


def digest(flag, value):
    return sources.digests({flag: PythonObject.of("python:it", value)})[flag]


def kinds(change):
    """Returns digests of objects that contain the same code in different ways."""
    names = defined(change)
    cue, score = names["Cue"], names["score"]
    values = {
        "class": cue,
        "instance": cue(),
        "attribute": names["Wrapper"](cue()),
        "method": cue().reward,
        "function": score,
        "jitted": jax.jit(names["half"]),
        "partial": functools.partial(score, scale=1.0),
        "closure": lambda completions: score(completions),
        "list": [score],
    }
    return {name: digest("env", value) for name, value in values.items()}


KINDS = {"class", "instance", "attribute", "method"}
KINDS |= {"function", "jitted", "partial", "closure", "list"}


@cases(
    "change, other",
    (("power = 2", "power = 3"), {"class", "instance", "attribute", "method"}),
    (("HALF = 0.5", "HALF = 0.6"), KINDS),
    (("return HALF * x", "return x * HALF"), KINDS),
    (("return [half", "return [-half"), {"function", "partial", "closure", "list"}),
    (("scale: float", "scale: int"), set()),
    (("\nx = 1\ncue = 1", "\nx = 2\ncue = 2"), set()),  # names of an argument and a field
    ids=["constant of a class", "constant", "helper", "function", "another class", "other names"],
)
def test_digest_follows_the_code_that_is_used(change, other):
    before, after = kinds(SAME), kinds(change)
    assert {name for name in before if before[name] != after[name]} == other


def test_lambda_is_known_wherever_it_stands():
    first = digest("reward", lambda completions, **_: [1.0 for _ in completions])
    settings = {"reward": lambda completions, **_: [1.0 for _ in completions], "seeds": 2}
    # The line of the lambda contains other code too.
    assert digest("reward", settings["reward"]) != first
    again = {
        "seeds": 2,
        "reward": lambda completions, **_: [1.0 for _ in completions],
    }
    assert digest("reward", again["reward"]) == first


def test_package_reward_is_known_without_its_import(tmp_path, monkeypatch):
    package = tmp_path / "own_package"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (package / "rewards.py").write_text("def score(completions): return [1.0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = {"reward": "own_package.rewards:score"}
    before = sources.digests(reward)
    assert re.fullmatch(r"\w{16}:score", before["reward"])
    (package / "rewards.py").write_text("def score(completions): return [2.0]\n")
    assert sources.digests(reward) != before
    assert sources.digests({"reward": r"regex:^(\d+)$"}) == {"reward": r"regex:^(\d+)$"}


class Loud:
    """Object whose attributes raise when they are read."""

    @property
    def args(self):
        raise RuntimeError("reset first")

    def __getattr__(self, name):
        raise KeyError(name)


class Pair(typing.NamedTuple):
    first: int

    def step(self):
        return self.first


def test_any_object_has_a_digest():
    assert re.fullmatch(r"\w{16}:it", digest("env", Loud()))
    assert "def step" in "".join(sources._texts(Pair(1)))
    assert sources._texts({"data": [[1, 2, 3]] * 10}) == set()
    one, two = (lambda: 1), (lambda: 2)
    assert digest("reward", one) != digest("reward", two)


def test_sweep_names_a_changed_object(tmp_path, monkeypatch, capsys):
    shapes.trace_only(monkeypatch)
    over = {"config.learning_rate": [1e-3, 1e-2]}

    def sweep(change, **options):
        names = defined(change)
        experiment = run.Experiment(
            **SETTINGS, env=names["Cue"](), out=tmp_path / "sweep", over=SIZES
        )
        run.sweep(experiment, over=over, evaluations=2, **options)
        return "under other circumstances, so numbers may differ: env" in capsys.readouterr().out

    assert not sweep(SAME)
    assert not sweep(SAME, resume=True)
    assert sweep(("-jnp.abs", "jnp.abs"), resume=True)
