"""Tests mistakes in a user's own entries, suites, rewards and losses; and their digests and
pickles."""

import dataclasses
import functools
import json
import pickle

import pytest
from probes import MatchCue
from tables import cases

from jaxrl_po import run
from jaxrl_po.config import ConfigError
from jaxrl_po.language import tasks
from jaxrl_po.run.data import tables
from jaxrl_po.run.experiment import (
    control,
    flags,
    language_config,
    rewarding,
    search_space,
    settings,
    suites,
    sweeping,
)
from jaxrl_po.run.experiment.experiment import DOMAINS
from jaxrl_po.run.experiment.registry import METHODS
from jaxrl_po.run.store import folder, sources

CODE = """
import dataclasses
from jaxrl_po import run
from jaxrl_po.language import dialogues, tasks
from jaxrl_po.run.data import tables

@dataclasses.dataclass
class Plain:
    rate: float = 1.0

class NotSuite:
    pass

class Suite:
    def names(self):
        return ["A"]

    def make(self, name, **arguments):
        raise TypeError("no level")

def raises(settings, reading):
    raise RuntimeError("no data")

plain_method = run.MethodEntry(Plain, make=print)
plain_task = run.TaskEntry(Plain, make=print)
failing_task = run.TaskEntry(tables.NoSettings, make=raises)
empty_task = run.TaskEntry(tables.NoSettings, make=lambda *_: None)
whole_task = run.TaskEntry(tables.NoSettings, make=lambda *_: tasks.addition(1))
dialogue = run.TaskEntry(tables.NoSettings, make=print, is_dialogue=True)

def guess():
    return dialogues.higher_lower(4)
"""


@pytest.fixture
def mine(tmp_path):
    (tmp_path / "mine.py").write_text(CODE)
    return f"{tmp_path / 'mine.py'}:"


def make_task(name):
    return language_config.task_entry(name).make(tables.NoSettings(), None)


@cases(
    "read, name, message",
    (lambda x: run.Experiment(algorithm=x), "plain_method", r"^algorithm: .* class with @con"),
    (language_config.task_entry, "plain_task", r"^task: .* Plain.* class with @config.record"),
    (make_task, "failing_task", r"^task: \S+mine.py:failing_task: RuntimeError: no data"),
    (make_task, "empty_task", r"^task: must be a \S+Task or Dialogue, got NoneType"),
    (suites.from_suite, "NotSuite:A", r"^env: \S+NotSuite must have the methods names and make"),
    (suites.from_suite, "Suite:A", r"^env: \S+Suite:A cannot be made: no level"),
    (suites.from_suite, "Suite:B", "^env: unknown name 'B'; choose one of A"),
)
def test_wrong_entry_is_named(mine, read, name, message):
    with pytest.raises(ConfigError, match=message):
        read(mine + name)


def test_own_entry_keeps_validation_rows_apart(mine):
    task, whole = make_task(f"{mine}whole_task"), tasks.addition(1)
    assert len(task.test) + len(task.validation) == len(whole.test)


def test_own_dialogue_is_an_entry_or_a_function(mine):
    assert language_config.is_dialogue(f"{mine}dialogue")
    assert language_config.is_dialogue(f"{mine}guess")
    assert not language_config.is_dialogue(f"{mine}whole_task")


class Constant:
    def score_batch(self, batch, *, first, report):
        return batch, {}

    def score(self, completions, **columns):
        return [1.0] * len(completions)


def test_scorer_is_the_reward_itself():
    scorer = Constant()
    experiment = run.Experiment(task="addition", reward=scorer)
    options = settings.options_of(DOMAINS["language"].OPTIONS, experiment.settings)
    assert rewarding.own_scorer(options) is scorer
    assert not rewarding.functions(options)


def test_memory_of_a_file_is_its_object(mine):
    given = {"network.memory": flags.FlagText(f"{mine}NotSuite")}
    memory = settings.merge_settings(control, given, stored={}).config.network.memory
    assert memory.value.__name__ == "NotSuite"


@cases("reward", Constant, [Constant(), len])
def test_scorer_is_one_object(reward):
    with pytest.raises(ConfigError, match=r"^reward: must be one object or functions"):
        run.Experiment(task="addition", reward=reward)


@cases(
    "flag, make",
    ("surrogate", lambda rate: functools.partial(print, sep=rate)),
    ("advantage", lambda rate: lambda steps: rate * steps),
)
def test_digest_holds_the_numbers_of_a_loss(flag, make):
    first, again, other = (
        sources.digests({flag: sources.name_object(flag, make(rate))}) for rate in (0.1, 0.1, 0.9)
    )
    assert first == again != other
    assert "python:" not in first[flag]


def test_swept_settings_have_their_own_presets(tmp_path):
    """The presets of the transformer memory stop epochs early; the GRU has no presets."""
    given = {"network.memory": "gru,transformer", "env": "CartPole-v1", "out": str(tmp_path)}
    texts = {name: flags.FlagText(value) for name, value in given.items()}
    options = settings.options_of(search_space.ControlSweep, texts)
    asked = search_space.parse(control, texts, options)
    groups = sweeping.group(control, asked, search_space.combinations(asked, 0, 0))
    stops = {made.config.network.memory: made.config.method.early_stop for [(_, made)] in groups}
    assert stops == {"gru": False, "transformer": True}


def test_swept_code_is_absolute(mine, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    texts = {"network.memory": flags.FlagText("none,mine.py:Cell")}
    options = settings.options_of(search_space.ControlSweep, texts)
    asked = search_space.parse(control, texts, options)
    assert asked.swept == {"network.memory": ["none", f"{mine}Cell"]}


def test_sweep_refuses_a_list_of_objects(tmp_path):
    cell = functools.partial(print)
    with pytest.raises(ConfigError, match=r"^over: network.memory must list names"):
        run.sweep(
            run.Experiment(env=MatchCue, out=tmp_path / "s"),
            over={"network.memory": ["none", cell]},
        )


@cases("code", {"reward": "a:f,b:g"}, {"env": 3})
def test_damaged_code_of_a_run_is_named(tmp_path, code):
    stored = {"format": 1, "script": "language", "reward": "mine.py:f", "resolved": {"code": code}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    with pytest.raises(ConfigError, match=r"^run: .* holds a damaged config.json"):
        folder.read_settings(tmp_path, "run")


def test_path_of_an_exporter_may_hold_a_comma(tmp_path):
    stored = {"format": 1, "script": "control", "exporter": "a,b.py:Mine", "resolved": {"code": {}}}
    (tmp_path / "config.json").write_text(json.dumps(stored))
    assert folder.read_settings(tmp_path)["exporter"] == "a,b.py:Mine"


def test_entries_pickle():
    copy = pickle.loads(pickle.dumps(METHODS["ppo"]))
    assert copy == METHODS["ppo"]
    assert dataclasses.is_dataclass(copy.Config)


@cases("arguments, field", ((5, 1), "what"), ((None,), "what"), ((), "iterations"))
def test_learner_and_iterations_are_asked_for(arguments, field):
    learner = run.train.__globals__["Learner"](None, None, None) if not arguments else arguments[0]
    with pytest.raises(ConfigError, match=f"^{field}: must be "):
        run.train(learner, *arguments[1:])
