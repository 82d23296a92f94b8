r"""Tests the reward `math`: answers in `\boxed{}` or after `####`, equal as mathematics."""

import importlib.util
import json

import families
import pytest
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data.scoring import Worker
from jaxrl_po.run.store.metrics import read

pytest.importorskip("math_verify")
CASES = [
    ("0.5", r"so \boxed{\frac{1}{2}}", 1.0),
    ("4", "2 + 2 = 4\n#### 4", 1.0),
    ("4", "4", 0.0),
    ("4", r"\boxed{4} or \boxed{5}", 0.0),
    ("1234", "#### 1,234.", 1.0),
    ("5", "#### $5", 1.0),
    ("(x+1)^2", r"\boxed{x^2+2x+1}", 1.0),
    ("(3,4)", r"\boxed{(4,3)}", 0.0),
    ("a long proof #### 7", r"\boxed{7}", 1.0),
    ("1", "####", 0.0),
    ("1", r"\boxed{1", 0.0),
    ("1", r"\boxed{9^{9^{9}}}", 0.0),
    ("1", r"\boxed{99999999!}", 0.0),
    ("1", r"\boxed{__import__('os').system('true')}", 0.0),
    ("1", r"\boxed{" + "1" * 300 + "}", 0.0),
    # An expression whose evaluation would not end, although its text does not show it.
    ("2", r"\boxed{9^{9\cdot 10^{9}}}", 0.0),
    ("2", r"\boxed{4-2}", 1.0),
    ("1100", r"\boxed{(1,100)}", 0.0),
    ("2300", r"\boxed{[2,300]}", 0.0),
    ("3100", r"\boxed{\{3,100\}}", 0.0),
    ("(1,100)", r"\boxed{(1,100)}", 1.0),
    ("5", r"so \boxed 5", 1.0),
    ("5", r"so \boxed 51.", 0.0),
    ("51", r"so \boxed 51.", 1.0),
    ("5", r"so \boxed {5}", 1.0),
    ("5", "so \\boxed\n{ 5 }", 1.0),
    ("10000", r"\boxed{10\,000}", 1.0),
    ("10000", r"\boxed{10{,}000}", 1.0),
    ("1234", r"\boxed{1\ 234}", 1.0),
    ("1234.5", r"#### 1 234.5", 1.0),
    ("-3.5", "#### -3 1/2", 1.0),
    ("1000", r"\boxed{1e3}", 1.0),
    ("0.0015", "#### 1.5E-3", 1.0),
    ("-5", r"\boxed{−5}", 1.0),
    ("5", "#### –5", 0.0),
    ("1", r"\boxed{1e99999999}", 0.0),
]


def test_answers_are_compared_in_the_guarded_process():
    worker = Worker("jaxrl_po.run.data.mathematics:correct", 60.0)
    worker.start()
    answers, texts, expected = zip(*CASES, strict=True)
    columns = {"completions": texts, "answer": answers, "prompts": texts, "completion_ids": []}
    worker.ask(columns, len(texts))
    found = worker.take()
    worker.close()
    assert found.why == ""
    assert found.values.tolist() == list(expected)


@cases(
    "text, answer",
    (r"\boxed{5} or \boxed{4}", "4"),
    (r"#### 5, so \boxed{4}", "4"),
    (r"\boxed{5} #### 4", "4"),
    ("#### 5 #### 4", "4"),
    (r"\boxed{4}. I put it in \boxed as asked.", "4"),
    (r"#### 4" + "\n" + r"\boxed notation is not needed", "4"),
    (r"\boxed{4} \boxedtext", "4"),
    (r"so \boxed 4.", "4"),
    (r"so $\boxed −4.5$", "-4.5"),
    (r"so $\boxed 1,234$, done", "1,234"),
    *((text, "") for text in (r"\boxed 1/2", r"\boxed x+1", r"\boxed 3\sqrt2", r"\boxed\frac12")),
)
def test_the_last_answer_counts(text, answer):
    from jaxrl_po.run.data import mathematics

    assert mathematics.final_answer(text) == answer


def test_a_mixed_number_is_a_sum():
    from jaxrl_po.run.data import mathematics

    assert mathematics.equal("3.5", r"\boxed{3 1/2}")
    assert not mathematics.equal("1.5", r"\boxed{3 1/2}")


def test_no_more_than_names_and_literals_is_compiled():
    from jaxrl_po.run.data import mathematics

    for text in ("from sympy import *", "Integer (12 )", "Symbol ('x' )", "E "):
        assert mathematics.harmless(text, "")
    for text in ("__import__('os')", "Integer (9**9)", "open ('x' )", "Symbol ('x' );f()"):
        assert not mathematics.harmless(text, "")


@pytest.mark.usefixtures("trace_only")
def test_a_run_is_rewarded_and_evaluated_by_it(tmp_path):
    families.write(tmp_path / "model", "qwen2", num_hidden_layers=1)
    rows = [{"prompt": f"w{i}", "answer": i} for i in range(10, 40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--devices=1",
        "--seeds=1",
        "--eval_prompts=4",
        "--show=0",
        "--task=file",
        f"--task.train={tmp_path / 'rows.jsonl'}",
        f"--init_from={tmp_path / 'model'}",
        "--problem.num_prompts=2",
        "--problem.group_size=4",
        "--problem.max_new_tokens=4",
        "--config.num_minibatches=1",
        "--algorithm=grpo",
        "--reward=math",
        "--total_steps=8",
        f"--out={tmp_path / 'run'}",
    ]
    assert launch.language(flags) == 0
    last = read(tmp_path / "run" / "metrics.jsonl")[-1]
    assert last["greedy_accuracy"] == last["accuracy"] == last["reward/correct"] == [0.0]
    assert last["reward_failures"] == [0.0]


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "math_verify" else found(name)
    )
    with pytest.raises(ConfigError, match=r"^reward: needs .*: pip install 'jaxrl_po\[math\]'$"):
        launch.language(["--reward=math", "--algorithm=grpo", f"--out={tmp_path / 'run'}"])
