"""Tests prompts from files, and an error for every line that cannot be used."""

import json
import types

import jax
import numpy as np
import pytest
from tables import cases

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import prompts
from jaxrl_po.run.experiment import rewarding

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 3} for i in range(40)]


def write(path, rows=ROWS):
    path.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
        encoding="utf-8",
    )
    return str(path)


@pytest.fixture
def task(tmp_path):
    rows = prompts.read_jsonl(write(tmp_path / "all.jsonl"))
    train, validation, test = prompts.hash_split(rows, 0.5, 2)
    return prompts.make_task_from_rows("doubles", train, test, validation=validation)


def test_task_draws_each_split_and_knows_its_answers(task):
    assert task.tokenizer.characters == "+0123456789="
    drawn = {}
    for held_out in (False, True):
        drawn[held_out] = jax.vmap(lambda key, out=held_out: task.sample(key, out))(
            jax.random.split(jax.random.key(0), 200)
        )
    texts = {
        out: {task.tokenizer.decode(row.tolist()) for row in of.tokens} for out, of in drawn.items()
    }
    assert len(texts[False]) > 20
    assert len(texts[True]) > 3
    validation = {task.tokenizer.decode(task.row(i).tokens.tolist()) for i in task.validation}
    assert validation
    assert not validation & (texts[False] | texts[True])
    assert not texts[False] & texts[True]
    assert texts[False] | texts[True] <= {row["prompt"] for row in ROWS}
    train = drawn[False]
    np.testing.assert_array_equal(train.pad, (train.tokens == task.tokenizer.pad).sum(axis=1))
    answers = jax.vmap(task.demonstrate)(train.problem)
    np.testing.assert_array_equal(jax.vmap(task.score)(train.problem, answers), 1.0)
    np.testing.assert_array_equal(jax.vmap(task.score)(train.problem, answers.at[:, 0].add(1)), 0.0)
    columns = task.columns(train.problem)
    assert list(columns) == ["answer", "level"]
    for tokens, answer, level in zip(
        train.tokens, columns["answer"], columns["level"], strict=True
    ):
        i = int(task.tokenizer.decode(tokens.tolist()).split("+")[0])
        assert (answer, level) == (str(2 * i), i % 3)


def test_a_split_follows_the_prompt_alone():
    rows = [prompts.Row(row, "") for row in ROWS]
    train, test = prompts.hash_split([*rows, *reversed(rows)], 0.25)
    assert {row.prompt for row in train}.isdisjoint(row.prompt for row in test)
    assert len(train) + len(test) == 80
    assert {row.prompt for row in test} == {row.prompt for row in prompts.hash_split(rows, 0.25)[1]}


def test_validation_and_test_share_what_is_held_out():
    """Each set has at least one prompt.

    The training rows do not depend on how the other rows are split.
    """
    rows = [prompts.Row(row, f"{i:02d}") for i, row in enumerate(ROWS)]
    train, *held_out = prompts.hash_split(rows, 0.25, 2)
    first, second = prompts.hash_split(rows, 0.25)
    assert train == first
    assert sorted(row.place for part in held_out for row in part) == [row.place for row in second]
    assert [len(part) for part in prompts.hash_split(rows[:3], 1e-9, 2)] == [1, 1, 1]


@cases(
    "line, match",
    ('{"prompt": "1+1=", "answer": "2"', r"rows.jsonl line 3: is not JSON: .*delimiter"),
    ('["1+1=", "2"]', "line 3: must be an object with prompt and answer, got list"),
    (
        '{"prompt": "1+1=", "level": 0}',
        "line 3: lacks the column 'answer'; it has 'prompt', 'level'",
    ),
    ('{"answer": "2"}', "line 3: lacks the column 'prompt'"),
    (
        '{"prompt": "1+1=", "answer": 2.5, "level": 0}',
        "line 3: answer must be text or a whole number, got 2.5",
    ),
    ('{"prompt": "", "answer": "2", "level": 0}', "line 3: prompt must not be empty"),
    (
        '{"prompt": "1+1=", "answer": "2"}',
        "line 3: must have the columns of .*line 1: 'level' stands in one of them only",
    ),
    (
        '{"prompt": "1+1=", "answer": "2", "level": 0, "completions": 1}',
        "line 3: the column 'completions' must have another",
    ),
    ('{"prompt": "\\ud800", "answer": "2", "level": 0}', "line 3: is not JSON: .* surrogates"),
)
def test_bad_lines_are_named(tmp_path, line, match):
    with pytest.raises(ConfigError, match=match):
        prompts.read_jsonl(write(tmp_path / "rows.jsonl", [ROWS[0], "", line]))


def test_other_bad_input(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl cannot be read: No such file"):
        prompts.read_jsonl(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ConfigError, match="line 1: is not JSON: maximum recursion depth"):
        prompts.read_jsonl(write(tmp_path / "deep.jsonl", ['{"prompt": ' + 100_000 * "["]))
    with pytest.raises(ConfigError, match="holds no prompts"):
        prompts.read_jsonl(write(tmp_path / "empty.jsonl", [""]))
    rows = prompts.read_jsonl(write(tmp_path / "rows.jsonl"))
    advice = "leaves none to train on; give at least 3 different prompts"
    with pytest.raises(ConfigError, match=rf"fraction: 0.1 of 2 prompts {advice}$"):
        prompts.hash_split(rows[:2], 0.1, 2)
    other = prompts.read_jsonl(write(tmp_path / "other.jsonl", [{**ROWS[7], "answer": "15"}]))
    with pytest.raises(
        ConfigError,
        match=r"other.jsonl line 1: the test prompt '7\+7=' is a training prompt "
        r".*rows.jsonl line 8",
    ):
        prompts.make_task_from_rows("doubles", rows, other)
    with pytest.raises(
        ConfigError, match=r"rows.jsonl line 11: the prompt has 6 tokens, more than 5"
    ):
        prompts.make_task_from_rows("doubles", rows[:20], rows[20:], max_prompt_length=5)
    with pytest.raises(
        ConfigError, match=r"rows.jsonl line 10: prompt must not hold '9', only '012345678\+='"
    ):
        prompts.make_task_from_rows("doubles", rows[:20], rows[20:], characters="012345678+=")
    pair = [language.tasks.Example("a", "b")]
    with pytest.raises(ConfigError, match="test: must share no prompt with train, but has 'a'"):
        language.tasks.table("pairs", language.make_tokenizer("ab"), pair, pair)


def test_an_answer_may_be_null_where_functions_reward(tmp_path):
    path = write(tmp_path / "rows.jsonl", [*ROWS[:3], {**ROWS[3], "answer": None}])
    with pytest.raises(ConfigError, match=r"line 4: answer must be text .* got None"):
        prompts.read_jsonl(path)
    read = prompts.read_jsonl(path, answers=False)
    task = prompts.make_task_from_rows("file", read[:2], read[2:])
    assert task.columns(np.arange(4))["answer"] == ["0", "2", "4", None]
    options = types.SimpleNamespace(task="file")
    assert rewarding.unanswered(options, task)
    assert not rewarding.unanswered(
        options, prompts.make_task_from_rows("file", read[:2], read[2:3])
    )


def test_a_null_answer_is_no_demonstration():
    messages = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    row = prompts.Row({"messages": messages, "answer": None}, "rows.jsonl line 1")
    assert [each.columns["answer"] for each in row.demonstrations()] == ["4"]
    with pytest.raises(
        ConfigError, match=r"^task.train: rows.jsonl line 1: must have completion, answer"
    ):
        prompts.Row({"prompt": "2+2", "answer": None}, "rows.jsonl line 1").demonstrations()
