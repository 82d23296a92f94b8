"""Tests runs with an environment in Python: seeds, resume, evaluation, and bad input."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from costs import uncounted
from folders import TOOL_ROWS, write_rows, write_tools
from scripts import everything
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import settings
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import ActorCritic

pytestmark = pytest.mark.slow

CLASSES = Path(__file__).parent / "support" / "tool_environments.py"
SMALL = [
    *("--algorithm=grpo", "--devices=1", "--seeds=1", "--task=file", "--task.test_fraction=0.3"),
    *("--eval_prompts=3", "--eval_samples=2", "--show=1"),
    *("--problem.num_prompts=2", "--problem.group_size=2"),
    *("--problem.max_new_tokens=2", "--problem.temperature=3"),
    *("--config.num_minibatches=1", "--config.num_epochs=1", "--config.learning_rate=0.01"),
    *("--config.decay_iterations=4", "--tools.turns=2", "--tools.reply_length=24"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_tools(tmp_path_factory.mktemp("place"))


def arguments(place, out, *further, name="Guess"):
    given = [
        *SMALL,
        f"--init_from={place / 'model'}",
        f"--task.train={place / 'rows.jsonl'}",
        f"--tools={CLASSES}:{name}",
        f"--out={out}",
    ]
    replaced = {each.partition("=")[0] for each in further}
    return [each for each in given if each.partition("=")[0] not in replaced] + list(further)


@pytest.fixture(scope="module")
def whole(place):
    """Returns the folder of an uninterrupted run of two seeds and three iterations."""
    out = place / "whole"
    flags = ["--total_steps=12", "--log_every=1", "--seeds=2"]
    with uncounted():
        assert launch.language(arguments(place, out, *flags)) == 0
    return out


def test_run_counts_events_and_shows_its_dialogues(whole):
    rows = read(whole / "metrics.jsonl")
    last = rows[-1]
    assert last["iteration"] == 3
    for name in ("calls", "turns", "truncated", "response_length", "killed", "cut_replies"):
        assert np.isfinite(last[name]).all(), name
        assert f"greedy_{name}" in last or name in ("truncated", "response_length")
    assert 0.0 < last["outside"][0] < 1.0
    assert {"avg@2", "pass@2", "greedy_accuracy"} <= last.keys()
    assert sum(sum(row["calls"]) for row in rows[1:]) > 0
    shown = [json.loads(line) for line in (whole / "samples.jsonl").read_text().splitlines()]
    turns = [turn for row in shown for turn in row["turns"]]
    assert {turn["reply"] for turn in turns} > {""}
    assert all("assistant:" in turn["reply"] for turn in turns if turn["reply"])
    config = json.loads((whole / "config.json").read_text())
    assert config["tools"] == f"{CLASSES}:Guess"
    assert config["tools.turns"] == 2


def test_a_resumed_run_equals_the_uninterrupted_one(whole, tmp_path):
    out = shutil.copytree(whole, tmp_path / "run")
    for later in ("2", "3"):
        shutil.rmtree(out / "checkpoints" / "latest" / later)
    assert launch.language([f"--out={out}", "--resume"]) == 0
    assert everything(out)[1].keys() == everything(whole)[1].keys()
    for key, arrays in everything(whole)[1].items():
        assert everything(out)[1][key] == arrays


def begun(place, seeds):
    """Returns the result of the first evaluation, and the recording of the first iteration."""
    flags = arguments(place, place / "none", "--total_steps=12", f"--seeds={seeds}")
    config = settings.parse_settings(script, flags).config
    job = script.build(config, Placement(seeds, 1, 1))
    state, rollouts = job.learner.init(job.start), job.host.rollouts
    with contextlib.closing(rollouts):
        return job.evaluate(state), rollouts.record(state, print)[1]


def test_a_seed_does_not_depend_on_the_others(place):
    alone, both = begun(place, 1), begun(place, 2)
    jax.tree.map(lambda one, two: np.testing.assert_allclose(two[:1], one, atol=1e-6), alone, both)
    assert any(not np.array_equal(*leaf) for leaf in jax.tree.leaves(both[1]))


def test_each_row_of_a_set_is_asked_once(place, monkeypatch):
    """Only a later evaluation, by its own command, uses the test rows."""
    config = settings.parse_settings(
        script, arguments(place, place / "none", "--eval_prompts=0", "--eval_samples=0")
    ).config
    built = script.build(config, Placement(1, 1, 1))
    rollouts, asked = built.host.rollouts, []

    def hold(params, episodes, *_, **__):
        asked.extend(each.row for each in episodes if each is not None)
        raise StopIteration

    monkeypatch.setattr(rollouts, "hold", hold)
    state = jax.eval_shape(built.learner.init, built.start)
    state = state._replace(params=ActorCritic(None))
    with contextlib.closing(rollouts):
        for later in (None, 1, 2):
            with contextlib.suppress(StopIteration):
                rollouts.evaluate(state, later)
    train = 8 - len(set(asked))
    assert 0 < train < 8
    validation, test = rollouts._host.task.validation, rollouts._host.task.test
    assert asked == [*validation, *test, *test]
    assert (validation.start, test.stop) == (train, 8)


def test_one_turn_without_tools_is_a_completion(place, tmp_path):
    """The batch equals a batch from the same prompts without an environment, except for rewards."""
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}], "answer": "low"}
        for row in TOOL_ROWS
    ]
    own = tmp_path / "quiet.py"
    own.write_text(
        "class Quiet:\n    def reset(self):\n        pass\n"
        "    def get_reward(self):\n        return 3.0\n"
    )
    given = [write_rows(tmp_path / "rows.jsonl", rows[2:])]
    given += [f"--task.test={tmp_path / 'test.jsonl'}"]
    write_rows(tmp_path / "test.jsonl", rows[:2])
    one = [*given, f"--tools={own}:Quiet", "--tools.turns=1"]
    flags = arguments(place, tmp_path / "out", *one)
    flags = [each for each in flags if not each.startswith("--task.test_fraction")]
    plain = [each for each in flags if not each.startswith("--tools")]
    batches = []
    for argv in (flags, plain):
        config = settings.parse_settings(script, argv).config
        built = script.build(config, Placement(1, 1, 1))
        state, rollouts = built.learner.init(built.start), built.host.rollouts
        if rollouts is not None:
            recording = rollouts.record(state, print)[1]
            rollouts.close()
            state = rollouts.with_recording(state, recording)
        batches.append(jax.tree.map(lambda x: x[0], built.learner.sample(state)[1]))
    held, completed = batches
    for name in ("action", "mask", "terminated", "truncated"):
        expected = getattr(completed, name)
        # A message without a call ends its dialogue, whatever the message's length.
        if name == "truncated":
            expected = np.zeros_like(expected)
        np.testing.assert_array_equal(getattr(held, name), expected, err_msg=name)
    np.testing.assert_allclose(held.log_prob, completed.log_prob, atol=2e-5)
    np.testing.assert_array_equal(held.reward, 3.0 * held.terminated)
    np.testing.assert_array_equal(held.score, np.full((2, 2), 3.0))


@cases(
    "further, said",
    (["--tools=Guess"], "tools: must be a file and a class, file.py:Class"),
    ([f"--tools={CLASSES}:Gess"], "tools: .* holds no 'Gess', but Guess"),
    ([f"--tools={CLASSES}:Blind"], "tools: must have a method get_reward, or reward"),
    (["--task=mastermind"], "task: must be file with tools = "),
    (["--init_from="], "init_from: must name a pretrained model with a chat template"),
    (["--problem.max_new_tokens=0"], "problem.max_new_tokens: must be given"),
    (["--tools.reply_length=3"], "tools.reply_length: must be above 3, the tokens"),
    (["--tools.turns=12"], "tools.turns: the longest dialogue has"),
    (["--reward=model"], "reward: must be left out with tools, got model"),
    (["--warm_start.steps=3"], "warm_start.steps: must be 0"),
    (
        ["--algorithm=dapo", "--config.dynamic_sampling=refill"],
        "config.dynamic_sampling: .* a refill needs",
    ),
    (["--distributed"], "distributed: must be false with tools = "),
    (["--problem.prompt_set=2"], "problem.prompt_set"),
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_before_anything_compiles(
    place, further, said, tmp_path, monkeypatch
):
    def compile_programs(job):
        raise AssertionError("it compiles")

    monkeypatch.setattr("jaxrl_po.run.loop.programs.compile_programs", compile_programs)
    flags = arguments(place, tmp_path / "out", "--total_steps=12", *further)
    if "--task=mastermind" in further:
        flags = [each for each in flags if not each.startswith("--task.")]
    with pytest.raises(ConfigError, match=f"^{said}") as found:
        launch.language(flags)
    assert "\n" not in str(found.value)


def test_unusable_template_or_rows_give_one_line(place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(place / "model", folder)
    (folder / "chat_template.jinja").unlink()
    few = "--total_steps=12"
    flags = arguments(place, tmp_path / "out", few, f"--init_from={folder}")
    with pytest.raises(ConfigError, match="must have a chat template, which writes the tools"):
        launch.language(flags)
    flags = arguments(place, tmp_path / "out", few, f"--task.train={tmp_path / 'rows.jsonl'}")
    for roles, said in ((["system"], "have a user's"), (["user", "assistant"], "not end with the")):
        rows = [
            {"messages": [{"role": role, "content": f"w{i}"} for role in roles], "secret": 0}
            for i in range(9)
        ]
        write_rows(tmp_path / "rows.jsonl", rows)
        with pytest.raises(
            ConfigError, match=rf"^task.train: \S+rows.jsonl line \d+: messages must {said}"
        ):
            launch.language(flags)


def test_the_example_of_the_documentation_runs(tmp_path):
    """The example's model is fitted for two steps and trained for one iteration."""
    root = Path(__file__).parent.parent
    script_of_model = [sys.executable, "examples/guessing_model.py", str(tmp_path), "--steps=2"]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run(script_of_model, check=True, cwd=root, env=environment)
    replaced = [
        f"--task.train={tmp_path / 'prompts.jsonl'}",
        f"--init_from={tmp_path / 'model'}",
        f"--tools={root / 'examples' / 'guessing.py'}:Guessing",
        "--tools.reply_length=32",
        "--total_steps=4",
    ]
    assert launch.language(arguments(tmp_path, tmp_path / "run", *replaced)) == 0
