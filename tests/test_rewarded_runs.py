"""`jaxrl-po language` with rewards in Python and prompts from files: bad input, and the example."""

import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from jaxrl_po.run import programs
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.metrics import read

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
HERE = ROOT / "tests" / "reward_functions.py"


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """Starts the backend, whose number of devices a script would choose otherwise."""
    return jax.local_device_count()


@pytest.fixture(scope="module")
def main():
    from jaxrl_po.run.commands import language

    return language.main


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(9))
    )
    (tmp_path / "bad.jsonl").write_text('{"prompt": "1+1="}\n')
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=file"], r"--task\.train must name a file of prompts"),
        (
            ["--task=file", "--task.train={tmp}/bad.jsonl"],
            r"--task\.train: .*bad\.jsonl line 1 lacks the column 'answer'",
        ),
        (
            [*FILE, "--task.test={rows}"],
            r"--task\.test_fraction has no effect unless test is left out",
        ),
        (
            [*FILE[:2], "--task.test={rows}"],
            r"--task\.test: .* the test prompt '0\+0=' is a training prompt as well",
        ),
        (
            [*FILE, "--task.max_prompt_length=3"],
            r"--task\.train: .*line 1: the prompt has 4 tokens, more than 3",
        ),
        (
            [*FILE, "--reward=nowhere.py:f"],
            r"--reward=/\S+nowhere\.py:f: there is no file /\S+nowhere\.py",
        ),
        (
            [*FILE, "--reward={here}:exacts"],
            r"--reward=.*:exacts cannot be loaded: .*but exact, digits",
        ),
        ([*FILE, *REWARD, "--reward_weights=1,2"], r"--reward_weights=1,2 must be 1 numbers"),
        (
            [*FILE, *REWARD, "--reward_weights=a"],
            r"--reward_weights must be numbers such as 1,0\.2, got 'a'",
        ),
        (
            [*FILE, *REWARD, "--reward_accuracy=b"],
            r"--reward_accuracy must be one of exact, got 'b'",
        ),
        (
            [*FILE, *REWARD, "--reward_timeout=0"],
            r"--reward_timeout must lie in \(0, inf\) seconds, got 0",
        ),
        (
            [*FILE, "--reward_timeout=5"],
            r"--reward_timeout has no effect unless reward names functions",
        ),
        (
            [*FILE, *REWARD, "--shard_params", "--devices=2"],
            r"--reward must be left out where parameters are sharded",
        ),
        (
            [*FILE, *REWARD, "--algorithm=dapo", "--config.dynamic_sampling=refill"],
            (
                r"--config\.dynamic_sampling must not refill groups of a problem "
                r"that is scored outside the program"
            ),
        ),
        (
            [*REWARD, "--problem.process_reward"],
            r"--problem\.process_reward has no effect unless verify is on",
        ),
    ],
)
def test_bad_flags_are_named_before_anything_is_compiled(
    main, rows, tmp_path, monkeypatch, arguments, message
):
    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr(programs, "compile_programs", refuse)
    given = [argument.format(rows=rows, tmp=tmp_path, here=HERE) for argument in arguments]
    algorithm = [] if any("algorithm" in argument for argument in given) else ["--algorithm=grpo"]
    with pytest.raises(UsageError, match=f"^{message}"):
        main([*SMALL, *algorithm, *given, f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


def test_the_example_of_the_documentation_trains(main, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    page = (ROOT / "docs" / "rewards.md").read_text(encoding="utf-8")
    assert (ROOT / "examples" / "reward.py").read_text(encoding="utf-8") in page
    [command] = re.findall(
        r"^jaxrl-po language (.*--reward=examples/reward\.py.*)$",
        page,
        re.MULTILINE,
    )
    given = [argument for argument in shlex.split(command) if not argument.startswith("--out=")]
    assert main([*given, *SMALL, f"--out={tmp_path}"]) == 0
    last = read(tmp_path / "metrics.jsonl")[-1]
    assert last["reward"][0] == pytest.approx(
        last["reward/nearly"][0] + 0.2 * last["reward/digits"][0]
    )
    assert last["accuracy"] == last["reward/nearly"]
    assert last["reward_failures"] == [0.0]


def test_a_reward_that_fails_at_once_ends_the_run_with_its_name(main, rows, tmp_path, capsys):
    given = [argument.format(rows=rows) for argument in FILE]
    assert (
        main(
            [
                "--algorithm=grpo",
                *SMALL,
                *given,
                f"--reward={HERE}:short",
                f"--out={tmp_path / 'out'}",
            ]
        )
        == 1
    )
    assert (
        "reward_functions.py:short returned 7 numbers for 8 completions; this is the first batch"
        in capsys.readouterr().err
    )
