"""Tests `jaxrl-po language` with rewards in Python and prompts from files: bad input and
failures."""

import json
import runpy
from pathlib import Path

import pytest
import tiny
from tables import cases

from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.language.rewards import budget_with_room
from jaxrl_po.run.devices.parallel import choose
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import rewarding, settings
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store.metrics import read

ROOT = Path(__file__).parent.parent
SMALL = [
    "--seeds=1",
    "--devices=1",
    "--total_steps=16",
    "--eval_prompts=2",
    "--show=1",
    "--problem.num_prompts=2",
    "--problem.group_size=4",
    *tiny.MODEL,
    "--warm_start.steps=0",
    "--warm_start.accuracy=1",
]
FILE = ["--task=file", "--task.train={rows}", "--task.test_fraction=0.5"]
REWARD = ["--reward={here}:exact"]
HERE = ROOT / "tests" / "support" / "reward_functions.py"


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(9))
    )
    return path


@cases(
    "arguments, message",
    (["--task=file"], r"task\.train: must name a file of prompts"),
    (
        [*FILE[:2], "--task.test={rows}"],
        r"task\.test: .* the test prompt '0\+0=' is a training prompt as well",
    ),
    (
        [*FILE, "--task.max_prompt_length=3"],
        r"task\.train: .*line 1: the prompt has 4 tokens, more than 3",
    ),
    ([*FILE, "--reward={here}:exacts"], r"reward: .*:exacts cannot be loaded: .*but exact, digits"),
    (
        [*FILE, *REWARD, "--reward_weights=1,2"],
        r"reward_weights: must be 1 numbers, one for each function, got 1,2$",
    ),
    (
        [*FILE, *REWARD, "--reward_timeout=0"],
        r"reward_timeout: must lie in \(0, inf\) seconds, got 0",
    ),
    ([*FILE, "--reward_timeout=5"], r"reward_timeout: has no effect unless reward names functions"),
    (
        [*FILE, *REWARD, "--shard_params", "--devices=2"],
        r"reward: must be left out with sharded parameters",
    ),
    (
        [*FILE, *REWARD, "--algorithm=dapo", "--config.dynamic_sampling=refill"],
        r"config\.dynamic_sampling: must be off or reweight where groups are scored in Python",
    ),
)
def test_bad_flags_are_named_before_anything_is_compiled(
    rows, tmp_path, monkeypatch, arguments, message
):
    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr(programs, "compile_programs", refuse)
    given = [argument.format(rows=rows, tmp=tmp_path, here=HERE) for argument in arguments]
    algorithm = [] if any("algorithm" in argument for argument in given) else ["--algorithm=grpo"]
    with pytest.raises(ConfigError, match=f"^{message}"):
        launch.language([*SMALL, *algorithm, *given, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_the_example_of_the_documentation_scores():
    example = runpy.run_path(str(ROOT / "examples" / "reward.py"))
    assert example["nearly"](["12", "1", ""], ["12", "12", "12"]) == [1.0, 0.5, 0.0]
    assert example["digits"](["12", "1+1", ""]) == [1.0, 0.0, 0.0]


@pytest.fixture
def questions(tmp_path):
    """Returns the flags of prompts without answers."""
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(16)))
    return [each.format(rows=path) for each in FILE]


LATE = """
from pathlib import Path

def late(completions, **columns):
    if len(completions) == 2:
        count = Path(__file__).with_suffix(".count")
        evaluations = len(count.read_text()) + 1 if count.exists() else 1
        count.write_text("x" * evaluations)
        assert evaluations != 2, "not this time"
    return [None, *(0.5 * (len(text) % 2) for text in completions[1:])]
"""


@pytest.mark.usefixtures("trace_only")
def test_function_failing_on_later_evaluation_loses_nothing(questions, tmp_path, capfd):
    rewards, out = tmp_path / "late.py", tmp_path / "run"
    rewards.write_text(LATE)
    flags = [
        *questions,
        *SMALL[:-1],
        f"--reward={rewards}:late",
        f"--out={out}",
        "--total_steps=32",
    ]
    flags += ["--problem.max_new_tokens=3", "--log_every=1", "--eval_every=2"]
    assert launch.language(flags) == 0
    said = capfd.readouterr().out
    assert "in an evaluation; training continues without this evaluation" in said
    lines = read(out / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [0, 1, 2, 3, 4]
    whole = [True, False, False, False, True]
    assert ["greedy_accuracy" in line for line in lines] == whole
    assert "greedy_accuracy" in json.loads((out / "summary.json").read_text())


DOWN = """
from pathlib import Path

def down(completions, **columns):
    calls, up = (Path(__file__).with_suffix(suffix) for suffix in (".calls", ".up"))
    if len(completions) <= 2:  # of an evaluation or its examples
        calls.open("a").write("x")
        if calls.stat().st_size > {calls} and not up.exists():
            raise OSError("the service is down")
    return [0.5 * (len(text) % 2) for text in completions]
"""


# At iterations 0 and 2 an evaluation makes one call, and the examples make two calls: greedy and
# sampled.
@pytest.mark.usefixtures("trace_only")
@cases("calls", 3, 4)
def test_function_that_stays_down_loses_nothing(questions, tmp_path, capfd, calls):
    rewards, out = tmp_path / "service.py", tmp_path / "run"
    rewards.write_text(DOWN.replace("{calls}", str(calls)))
    flags = [*questions, *SMALL, f"--reward={rewards}:down", f"--out={out}", "--total_steps=32"]
    flags += ["--problem.max_new_tokens=3", "--log_every=1", "--eval_every=2"]
    assert launch.language(flags) == 1
    assert "in an evaluation; saved at iteration 4" in capfd.readouterr().err
    lines, samples = read(out / "metrics.jsonl"), read(out / "samples.jsonl")
    # The examples of a successful evaluation are shown without their scores.
    second = calls == 4
    assert ["greedy_accuracy" in line for line in lines] == [True, False, second, False, False]
    assert {sample["iteration"] for sample in samples} == ({0, 2} if second else {0})
    assert all((sample["score"] is None) == (sample["iteration"] == 2) for sample in samples)
    with pytest.raises(RunError, match="the service is down"):
        evaluate.main([f"--run={out}"])
    rewards.with_suffix(".up").touch()
    assert launch.language([f"--out={out}", "--resume"]) == 0
    assert ["greedy_accuracy" in line for line in read(out / "metrics.jsonl")] == [
        *(True, False, second, False, True)
    ]
    again = [sample["iteration"] for sample in read(out / "samples.jsonl")]
    assert set(again) == {*(sample["iteration"] for sample in samples), 4}


def test_reward_model_reads_completions_of_the_policys_length(monkeypatch, tmp_path):
    """For its penalty, DAPO extends the budget beyond the longest answer."""
    budgets = []

    def fitted(problem, config, task, policy):
        budgets.append((config.problem.max_new_tokens, task.answer_length))
        return problem

    monkeypatch.setattr(rewarding, "with_reward_model", fitted)
    flags = ["--algorithm=dapo", "--reward=model", "--task=addition", f"--out={tmp_path}/run"]
    config = settings.parse_settings(script, [*flags, *SMALL]).config
    script.build(config, choose("1", num_seeds=1, num_rows=2))
    [(budget, longest)] = budgets
    assert budget == budget_with_room(longest) > longest
