"""Tests `experiments/studies/countdown_zero.py`: its traces, its verifier, its held-out
problems."""

import json
import operator
import random
import re
from pathlib import Path

import countdown_zero
from tables import cases

SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@cases("numbers", [3, 7, 2], [9, 9, 1], [5, 5, 5])
def test_each_trace_computes_rightly_and_answers_its_last(numbers):
    draw = random.Random(0)
    values = sorted({one.value for one in countdown_zero.tries(numbers)})
    outcomes = set()
    for _ in range(100):
        target = draw.choice(values)
        written = countdown_zero.trace(numbers, target, draw)
        tried, expression = written.split(":")
        assert re.fullmatch(r"([^<>!]+[<>])*[^<>!]+[<>!]", tried)
        marks, tried = re.findall("[<>!]", tried), re.split("[<>!]", tried)[:-1]
        assert 1 <= len(tried) == len(set(tried)) <= countdown_zero.PATIENCE
        found = []
        for each in tried:
            a, sign, b, x, other, c, value = re.fullmatch(
                r"(\d)([+*-])(\d)=(\w)([+*-])(\d)=(\w)", each
            ).groups()
            assert sorted(map(int, (a, b, c))) == sorted(numbers)
            assert SIGNS[sign](int(a), int(b)) == int(x, 36)
            assert SIGNS[other](int(x, 36), int(c)) == int(value, 36)
            assert countdown_zero.right([f":({a}{sign}{b}){other}{c}"], [numbers], [int(value, 36)])
            found.append(int(value, 36))
        assert marks == ["<" if value < target else ">!"[value == target] for value in found]
        assert expression == f"({a}{sign}{b}){other}{c}"
        [score] = countdown_zero.right([written], [numbers], [target])
        assert score == (found[-1] == target)
        outcomes.add(score)
    assert outcomes == {0.0, 1.0}  # the traces contain searches that succeed and searches that fail


@cases("text", "(3*2)+7", "7+3*2", "7+(2*3)", "((7))+2*3", "3+7:3*2+7")
def test_any_right_expression_is_right(text):
    assert countdown_zero.right([f"7-2=5+3=8:{text}"], [[3, 7, 2]], [13]) == [1.0]


@cases(
    "text",
    # Wrong traces: without an answer after the tries; with other numbers or another value;
    # without an expression.
    *("", "(3*2)+7", "3*2=6+7=D", "(3*2)+7:", ":(3*2)+7:3+7"),
    *(":3+3+7", ":3*2+7+0", ":3*2*7", ":6+7", ":13", ":(3-2)*7", ":(7-3)*2+7-2"),
    *(":3*2+7=13", ":3*2+7,", ":(3*2+7", ":3(2)+7", ":7--2*-3", ":3*2++7", ":" + 90 * "("),
)
def test_all_else_is_wrong(text):
    assert countdown_zero.right([text], [[3, 7, 2]], [13]) == [0.0]


def test_questions_have_numbers_that_were_never_seen(tmp_path):
    files = countdown_zero.write(tmp_path, traces=500)
    text = {name: Path(path).read_text(encoding="utf-8") for name, path in files.items()}
    rows = {name: list(map(json.loads, each.splitlines())) for name, each in text.items()}
    seen = {tuple(sorted(row["numbers"])) for row in rows["train"]}
    assert seen.isdisjoint(tuple(sorted(row["numbers"])) for row in rows["test"])
    prompts = {name: {row["prompt"] for row in of} for name, of in rows.items()}
    assert len(prompts["test"]) == len(rows["test"]) == countdown_zero.HELD_OUT
    assert prompts["traces"] <= prompts["train"]
    right = sum(
        countdown_zero.reaches(
            row["completion"].partition(":")[2],
            [int(x) for x in row["prompt"].partition("=")[0].split(",")],
            int(row["prompt"][-2], 36),
        )
        for row in rows["traces"]
    )
    assert right <= 0.3 * len(rows["traces"])
    alphabet = set(countdown_zero.SHARED["task.characters"])
    assert all(set(row["prompt"] + row["completion"]) <= alphabet for row in rows["traces"])
