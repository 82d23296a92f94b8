"""Tests `jaxrl-po language` with rewards in Python and prompts from files: bad input, and the
example."""

import json
import re
import shlex
from pathlib import Path

import pytest
from tables import cases

from jaxrl_po.config import ConfigError
from jaxrl_po.language.rewards import budget_with_room
from jaxrl_po.run.errors import RunError
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
    "--model.width=8",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=1",
    "--model.mlp_width=8",
    "--warm_start.steps=0",
    "--warm_start.accuracy=1",
]
FILE = ["--task=file", "--task.train={rows}", "--task.test_fraction=0.5"]
REWARD = ["--reward={here}:exact"]
HERE = ROOT / "tests" / "support" / "reward_functions.py"


@pytest.fixture(scope="module")
def main():
    from jaxrl_po.cli import launch

    return launch.language


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(9))
    )
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n')
    return path


@cases(
    "arguments, message",
    (["--task=file"], r"task\.train: must name a file of prompts"),
    (
        ["--task=file", "--task.train={tmp}/bad.jsonl"],
        r"task\.train: .*bad\.jsonl line 1: lacks the column 'answer'",
    ),
    (
        [*FILE[:2], "--task.test={rows}"],
        r"task\.test: .* the test prompt '0\+0=' is a training prompt as well",
    ),
    (
        [*FILE, "--task.max_prompt_length=3"],
        r"task\.train: .*line 1: the prompt has 4 tokens, more than 3",
    ),
    (
        [*FILE, "--reward=nowhere.py:f"],
        r"reward: /\S+nowhere\.py:f: there is no file /\S+nowhere\.py",
    ),
    ([*FILE, "--reward={here}:exacts"], r"reward: .*:exacts cannot be loaded: .*but exact, digits"),
    (
        [*FILE, *REWARD, "--reward_weights=1,2"],
        r"reward_weights: must be 1 numbers, one for each function, got 1,2$",
    ),
    (
        [*FILE, *REWARD, "--reward_weights=a"],
        r"reward_weights: must be 1 numbers, one for each function, got a$",
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
    (
        [*REWARD, "--problem.process_reward"],
        r"problem\.process_reward: has no effect unless the verifier .*reward = verifier",
    ),
)
def test_bad_flags_are_named_before_anything_is_compiled(
    main, rows, tmp_path, monkeypatch, arguments, message
):
    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr(programs, "compile_programs", refuse)
    given = [argument.format(rows=rows, tmp=tmp_path, here=HERE) for argument in arguments]
    algorithm = [] if any("algorithm" in argument for argument in given) else ["--algorithm=grpo"]
    with pytest.raises(ConfigError, match=f"^{message}"):
        main([*SMALL, *algorithm, *given, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_example_of_the_documentation_trains(main, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "reward.py").read_text(encoding="utf-8") in page
    lines = page.replace("\\\n", "")  # one line of documentation may have several commands
    [command] = re.findall(
        r"^jaxrl-po language (.*--reward=examples/reward\.py.*)$", lines, re.MULTILINE
    )
    given = [argument for argument in shlex.split(command) if not argument.startswith("--out=")]
    given += [flag for flag in SMALL if flag != "--show=1"]
    assert main([*given, "--show=0", f"--out={tmp_path}"]) == 0
    last = read(tmp_path / "metrics.jsonl")[-1]
    assert last["reward"][0] == pytest.approx(
        last["reward/nearly"][0] + 0.2 * last["reward/digits"][0]
    )
    assert last["accuracy"] == last["reward/nearly"]
    assert last["reward_failures"] == [0.0]


@pytest.mark.usefixtures("trace_only")
def test_immediately_failing_reward_ends_run_with_its_name(main, rows, tmp_path, capsys):
    given = [argument.format(rows=rows) for argument in FILE]
    given = [*SMALL, *given, f"--reward={HERE}:short", f"--out={tmp_path}/out"]
    assert main(["--algorithm=grpo", *given]) == 1
    assert (
        "reward_functions.py:short returned 7 numbers for 8 completions; this is the first batch"
        in capsys.readouterr().err
    )


LATE = """
from pathlib import Path

def late(completions, **columns):
    if len(completions) == 2:
        count = Path(__file__).with_suffix(".count")
        evaluations = len(count.read_text()) + 1 if count.exists() else 1
        count.write_text("x" * evaluations)
        assert evaluations != {fails}, "not this time"
    return [None, *(0.5 * (len(text) % 2) for text in completions[1:])]
"""


@pytest.mark.usefixtures("trace_only")
@cases("fails, status", (2, 0), (3, 1))
def test_function_failing_on_later_evaluation_loses_nothing(main, tmp_path, capfd, fails, status):
    rows, rewards, out = tmp_path / "rows.jsonl", tmp_path / "late.py", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(16)))
    rewards.write_text(LATE.replace("{fails}", str(fails)))
    flags = [each.format(rows=rows) for each in FILE]
    flags += [*SMALL[:-1], f"--reward={rewards}:late", f"--out={out}", "--total_steps=32"]
    flags += ["--problem.max_new_tokens=3", "--log_every=1", "--eval_every=2"]
    assert main(flags) == status
    said = capfd.readouterr()
    if status:  # the last evaluation failed: a resumed run repeats the evaluation
        assert "in an evaluation; saved at iteration 4" in said.err
        assert not (out / "summary.json").exists()
        assert main([f"--out={out}", "--resume"]) == 0
    else:
        assert "in an evaluation; training continues without this evaluation" in said.out
    rows = read(out / "metrics.jsonl")
    assert [row["iteration"] for row in rows] == [0, 1, 2, 3, 4]
    whole = [True, False, bool(status), False, True]
    assert ["greedy_accuracy" in row for row in rows] == whole
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
def test_function_that_stays_down_loses_nothing(main, tmp_path, capfd, calls):
    from jaxrl_po.cli import evaluate

    rows, rewards, out = tmp_path / "rows.jsonl", tmp_path / "service.py", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(9)))
    rewards.write_text(DOWN.replace("{calls}", str(calls)))
    flags = [each.format(rows=rows) for each in FILE]
    flags += [*SMALL, f"--reward={rewards}:down", f"--out={out}", "--total_steps=32"]
    flags += ["--problem.max_new_tokens=3", "--log_every=1", "--eval_every=2"]
    assert main(flags) == 1
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
    assert main([f"--out={out}", "--resume"]) == 0
    assert ["greedy_accuracy" in line for line in read(out / "metrics.jsonl")] == [
        *(True, False, second, False, True)
    ]
    again = [sample["iteration"] for sample in read(out / "samples.jsonl")]
    assert set(again) == {*(sample["iteration"] for sample in samples), 4}


def test_reward_model_reads_completions_of_the_policys_length(monkeypatch, tmp_path):
    """For its penalty, DAPO extends the budget beyond the longest answer."""
    from jaxrl_po.run.devices.parallel import choose
    from jaxrl_po.run.experiment import language as script
    from jaxrl_po.run.experiment import rewarding, settings

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
