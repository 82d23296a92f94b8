"""Tests a user's method, memory, suite, task, reward and flag, each in a file of its own."""

from pathlib import Path

import pytest
from scripts import python

pytestmark = pytest.mark.slow

HELPERS = Path(__file__).parent / "support"
FILES = {
    "method.py": '''
from jaxrl_po import config, run
from jaxrl_po.algorithms import ppo

@config.record
class Config(ppo.Config):
    """PPO under another name."""

    boost: float = config.number(1.0, "a flag that the library lacks")
    loud: bool = config.static(False, "a switch that the library lacks")

MADE = []

def make(config, problem):
    MADE.append(config)
    return ppo.make(config, problem)

entry = run.MethodEntry(Config, make, has_critic=True, control={"config.num_epochs": 1})
''',
    "cell.py": """
import jax
import jax.numpy as jnp
from jaxrl_po.control.memory import Memory

def Cell(size, initialization, target=None):
    def run(memory, features, begins, final):
        assert features.shape[-1] == size

        def step(memory, x):
            memory = jnp.where(x[1][:, None], 0.0, memory) + x[0]
            return memory, memory

        memory, outputs = jax.lax.scan(step, memory, (features, begins))
        return memory, outputs, None if final is None else outputs + final

    return Memory(lambda rows: jnp.zeros((rows, size)), run)
""",
    "suite.py": """
import gymnax
from jaxrl_po import control

class suite:
    @staticmethod
    def names():
        return ["Pole"]

    @staticmethod
    def make(name, length=500):
        env = gymnax.make("CartPole-v1")[0]
        return control.adapt(env, env.default_params.replace(max_steps_in_episode=length))
""",
    "task.py": '''
from jaxrl_po import config, language, run

@config.record
class Settings:
    """A task of the user's."""

    depth: int = config.static(3, "digits of a number", within=config.COUNT)

entry = run.TaskEntry(Settings, lambda settings, _: language.tasks.addition(settings.depth))
''',
    "reward.py": """
def longest(completions, **columns):
    return [float(len(text)) for text in completions]
""",
    "scorer.py": """
import numpy as np
from jaxrl_po.language import give_reward

class Batches:
    calls = 0

    def score_batch(self, batch, *, first, report):
        self.calls += 1
        score = np.asarray(batch.mask).sum(axis=2, dtype=np.float32)
        self.longest = batch.mask.shape[2]
        return give_reward(batch, score, score), {}
""",
}
PROCESS = """
import json
import pickle
import sys
from pathlib import Path

import pytest
import shapes
import tiny
import jax
import jax.numpy as jnp

from jaxrl_po import __main__ as command, run
from jaxrl_po.config import ConfigError

place = Path.cwd()
sys.path.append(str(place))
from jaxrl_po.cli import launch
from jaxrl_po.run.experiment import policies, training
import method, scorer, task

def stored(name):
    return json.loads((place / name / "config.json").read_text())

patch = pytest.MonkeyPatch()
shapes.trace_only(patch)
small = ["--devices=1", "--config.num_minibatches=2"]
shared = ["--algorithm=method.py:entry", "--config.boost=2.5", "--config.loud=true", *small]
control = [x for x in tiny.CONTROL if "epochs" not in x and x not in small]
language = [x for x in tiny.LANGUAGE if "digits" not in x and x not in small]

env = ["--env=suite.py:suite:Pole", '--env_params={"length": 7}', "--network.memory=cell.py:Cell"]
assert command.main(["control", *control, *env, *shared, "--out=a"]) == 0
assert stored("a")["algorithm"] == f"{place}/method.py:entry"
assert stored("a")["env"] == f"{place}/suite.py:suite:Pole"
assert stored("a")["network.memory"] == f"{place}/cell.py:Cell"
assert (stored("a")["config.boost"], stored("a")["config.loud"]) == (2.5, True)
assert stored("a")["config.num_epochs"] == 1  # by the entry
assert stored("a")["resolved"]["code"].keys() == {"algorithm", "env", "network.memory"}
assert run.resume("a", total_steps=6400).rows[-1]["step"] == 6400
policy = pickle.loads(pickle.dumps(run.load("a")))
after, _ = policy.step(policy.start, jnp.ones(4))
assert {x.shape for x in jax.tree.leaves(after)} == {(8,)}

spoken = ["--task=task.py:entry", "--task.depth=1", "--reward=reward.py:longest"]
assert command.main(["language", *language, *spoken, *shared, "--out=b"]) == 0
assert stored("b")["task.depth"] == 1
assert stored("b")["config.gamma"] == 1.0  # as every method with a critic
assert "reward/longest" in (place / "b" / "metrics.jsonl").read_text()

def values(argv):
    pairs = (each.removeprefix("--").split("=") for each in argv)
    return {name: json.loads(x) if x[0] in "-.0123456789tf" else x for name, x in pairs}

own = {"config.boost": 2.5, "config.loud": True, "config.num_minibatches": 2}
given = {x: y for x, y in values(language).items() if "." in x}
batches = scorer.Batches()
method.MADE.clear()
run.train(run.Experiment(
    algorithm=method.entry, task=task.entry, reward=batches, out="c", seeds=1, total_steps=24,
    devices=1, show=0, over={**given, **own, "task.depth": 1},
))
assert batches.calls == 3
assert batches.longest == 3  # a sum of one-digit numbers has two digits and EOS
assert {float(config.boost) for config in method.MADE} == {2.5}
assert (stored("c")["algorithm"], stored("c")["reward"]) == ("python:MethodEntry", "python:Batches")
with pytest.raises(ConfigError, match="^task: python:TaskEntry was given in Python"):
    run.resume("c", total_steps=48)

for argv, message in (
    (["--algorithm=task.py:entry"], "task.py:entry must be a run.MethodEntry, got TaskEntry"),
    (["--network.memory=cell.py:Sell"], "holds no 'Sell', but Cell"),
    ([*shared, "--config.bost=2"], "config.bost: is not a setting; did you mean config.boost?"),
):
    with pytest.raises(ConfigError) as caught:
        launch.control([*argv, "--out=d"])
    assert message in str(caught.value), caught.value
print("all extended")
"""


def test_each_extension_is_one_file(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code = f"import sys\nsys.path.append({str(HELPERS)!r})\n{PROCESS}"
    done = python("-c", code, cwd=tmp_path)
    assert done.stdout.endswith("all extended\n"), done.stderr[-4000:]
