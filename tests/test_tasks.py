"""Tests every task: its text is parsed on the host, by an independent verifier in plain Python."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from task_cases import COUNT, EVERY, cases, drawn, judge, texts, verifier

from jaxrl_po import config, language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import dialogues, tasks
from jaxrl_po.language.evaluation import Answers
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.stack_machine import execute
from jaxrl_po.language.tasks.verify import is_word

OF_OURS = tasks.TASKS | dialogues.DIALOGUES


@EVERY
def test_prompts_and_demonstrations_read_back(name):
    case = cases()[name]
    (task, pattern), (prompts, answers) = case[:2], drawn(name)
    eos, pad = task.tokenizer.eos, task.tokenizer.pad
    assert prompts.tokens.shape == (2 * COUNT, task.prompt_length)
    assert answers.shape == (2 * COUNT, task.answer_length)
    assert prompts.tokens.dtype == answers.dtype == jnp.int32
    assert_array_equal(prompts.tokens == pad, np.arange(task.prompt_length) < prompts.pad[:, None])
    is_eos = answers == eos
    assert_array_equal(is_eos.sum(axis=1), 1)
    assert_array_equal(answers == pad, np.cumsum(is_eos, axis=1) - is_eos == 1)
    assert is_eos[:, -1].any()  # the longest demonstration needs the complete length
    for prompt, answer in zip(texts(task, prompts.tokens), answers, strict=True):
        assert re.fullmatch(pattern, prompt), prompt
        assert judge(case, prompt, answer) == (True, True), prompt
    score, credit, parses = verifier(name)(
        prompts.problem, np.pad(answers, ((0, 0), (0, 3)), constant_values=pad)
    )
    assert (score.dtype, credit.dtype, parses.dtype) == (jnp.float32, jnp.float32, bool)
    assert_array_equal(score, 1.0)
    assert_allclose(credit.sum(axis=1), 1.0, rtol=1e-5)


@EVERY
def test_splits_share_no_problem(name):
    case, (prompts, _) = cases()[name], drawn(name)
    problems = [
        case.problem(re.fullmatch(case.prompt, text)) for text in texts(case.task, prompts.tokens)
    ]
    train, held_out = set(problems[:COUNT]), set(problems[COUNT:])
    assert not train & held_out
    assert len(held_out) > 1
    assert len(train) > len(held_out) or len(held_out) > COUNT / 4


@EVERY
def test_verifier_agrees_with_the_host_on_any_tokens(name):
    """Completions are right, edited, shuffled, of another problem, and random."""
    case, (prompts, answers) = cases()[name], drawn(name)
    task, rng = case.task, np.random.default_rng(0)
    length = task.answer_length + 3
    rows = np.pad(answers, ((0, 0), (0, 3)), constant_values=task.tokenizer.pad)
    changed, shuffled = rows.copy(), rows.copy()
    at = rng.integers(0, length, len(rows))
    changed[np.arange(len(rows)), at] = rng.integers(0, task.tokenizer.size, len(rows))
    for row in shuffled:
        rng.shuffle(row[: row.tolist().index(task.tokenizer.eos)])
    removed = np.stack([np.append(np.delete(row, i), 0) for row, i in zip(rows, at, strict=True)])
    inserted = np.stack([np.insert(row, i, row[i])[:-1] for row, i in zip(rows, at, strict=True)])
    garbage = rng.integers(0, task.tokenizer.size, rows.shape)
    no_end = np.where(rows == task.tokenizer.eos, task.tokenizer.pad, rows)
    right = wrong = malformed = 0
    for completions in (
        rows,
        changed,
        removed,
        inserted,
        shuffled,
        np.roll(rows, 1, axis=0),
        garbage,
        no_end,
    ):
        score, credit, parses = (
            np.asarray(x) for x in verifier(name)(prompts.problem, completions.astype(np.int32))
        )
        judged = [
            judge(case, *both)
            for both in zip(texts(task, prompts.tokens), completions, strict=True)
        ]
        assert_array_equal(np.stack([parses, score == 1.0], axis=1), judged)
        assert set(score.tolist()) <= {0.0, 1.0}
        assert (credit >= 0.0).all()
        assert (credit.sum(axis=1) <= 1.0 + 1e-5).all()
        right, wrong, malformed = (
            right + score.sum(),
            wrong + (parses & (score == 0)).sum(),
            malformed + (~parses).sum(),
        )
    # Right, wrong and malformed answers each occur often enough.
    assert min(right, wrong, malformed) > 2 * COUNT / 4


def tokens_of(task, text, length=None):
    """Returns the tokens of a completion: `$` is EOS, `_` padding."""
    ids = task.tokenizer.ids | {"$": task.tokenizer.eos, "_": task.tokenizer.pad}
    return jnp.array(
        [ids[character] for character in text.ljust(length or task.answer_length, "_")], jnp.int32
    )


def apply(function, task, problem, completions):
    """Applies `score`, `credit` or `parses` to completions of one problem."""
    rows = jnp.stack(
        [
            tokens_of(task, text, max(task.answer_length, *map(len, completions)))
            for text in completions
        ]
    )
    return jax.jit(jax.vmap(function, (None, 0)))(problem, rows).tolist()


def scores(task, problem, completions):
    return apply(task.score, task, problem, completions)


def test_credit_of_multiplication_by_hand():
    """The product is 12 · 34: 12 · 4 = 48, 12 · 30 = 360, together 408, each number with the lowest
    digit first.

    Credit is a quarter for each of the three numbers, and for the answer.
    """
    expected = {
        "840+0630:8040#8040$": [(3, 0.25), (8, 0.25), (13, 0.25), (18, 0.25)],
        "840+0930:8040#8040$": [(3, 0.25), (13, 0.25), (18, 0.25)],
        "840+0630:8040#8041$": [(3, 0.25), (8, 0.25), (13, 0.25)],
        "840#8040$": [(8, 0.25)],
        "841+0630:8040#8040": [(8, 0.25), (13, 0.25)],
    }
    task = tasks.multiplication(2)
    credits = apply(task.credit, task, (jnp.uint32(12), jnp.uint32(34)), list(expected))
    for text, credit in zip(expected, credits, strict=True):
        assert [(i, x) for i, x in enumerate(credit) if x] == expected[text], text


def test_multiplication_of_the_largest():
    """The product 9999² = 99980001 is a uint32; partial sums are 89,991, 989,901, 9,989,001 and
    99,980,001."""
    task = tasks.multiplication(4)
    text = task.tokenizer.decode(
        jax.jit(task.demonstrate)((jnp.uint32(9999), jnp.uint32(9999))).tolist()
    )
    assert text == "19998+019998:109989+0019998:1009899+00019998:10008999#10008999"
    assert len(text) + 1 == task.answer_length


def test_values_of_countdown_may_be_negative():
    """The value is (2 − 7) + 3 = 3 − (7 − 2) = −2."""
    task = tasks.countdown(3, max_number=9)
    problem = tasks.Countdown(jnp.array([3, 7, 2]), jnp.int32(-2), tokens_of(task, "27-3+$"))
    assert scores(task, problem, ["27-3+$", "372--$", "372-+$"]) == [1.0, 1.0, 0.0]


def test_expressions_use_each_number_once_and_end():
    """The given numbers are 2, 3 and 7; the row of an expression without EOS is full."""
    numbers, tokenizer = jnp.array([2, 3, 7]), tasks.countdown(3, max_number=9).tokenizer
    # All numbers are used; a number is left over, is used twice, or is not given.
    for text, uses_all in (("37*2-", True), ("37*", False), ("37*2-2-", False), ("37*5-", False)):
        ids = tokenizer.encode(text)
        found = execute(numbers, jnp.array([*ids, tokenizer.eos]), 1, tokenizer)
        assert (found.parses, found.uses_all) == (True, uses_all)
        assert not execute(numbers, jnp.array(ids), 1, tokenizer).parses
        assert not is_word(jnp.array(ids), tokenizer.size, tokenizer)


def test_countdown_does_not_overflow():
    """The largest product is 14⁸ = 1,475,789,056 < 2³¹; a larger product, 15 times 99, wraps around
    and is refused."""
    task = tasks.countdown(8, max_number=14)
    fourteens = tasks.Countdown(
        jnp.full(8, 14), jnp.int32(14**8), jnp.zeros(task.answer_length, jnp.int32)
    )
    assert scores(task, fourteens, ["14" * 8 + "*" * 7 + "$", "14" * 7 + "*" * 6 + "$"]) == [
        1.0,
        0.0,
    ]
    wrapped = np.int64(99) ** 15 % 2**32
    problem = fourteens._replace(target=jnp.int32(np.uint32(wrapped).astype(np.int32)))
    assert scores(task, problem, ["99" * 15 + "*" * 14 + "$"]) == [0.0]


def test_credit_of_a_running_sum_is_its_score():
    """3 + 1 + 4 + 1 = 9."""
    task = tasks.running_sum(4)
    problem = (jnp.array([3, 1, 4, 1], jnp.uint32), jnp.int32(2))
    assert jax.jit(task.demonstrate)(problem).tolist() == tokens_of(task, "..3489#9$").tolist()
    paid, unpaid = apply(task.credit, task, problem, ["34#9$", "3489#8$"])
    assert (paid, unpaid) == ([0.0] * 4 + [1.0] + [0.0] * 10, [0.0] * 15)


def test_demonstrations_of_the_running_sum_differ_in_length():
    """The demonstrations have 0 to 8 dots, uniformly: all nine lengths occur among 400, and the
    mean is 4 ± 0.13."""
    filler = drawn("running sum")[0].problem[1]
    assert set(filler.tolist()) == set(range(9))
    assert abs(filler.mean() - 4.0) < 0.6


@pytest.mark.parametrize(
    ("make_task", "message"),
    [
        (
            lambda: tasks.countdown(8, max_number=15),
            r"max_number: must be a whole number in \[2, 14\], got 15",
        ),
        (
            lambda: make_draw([(1, 4)], advice="raise it"),
            r"too few problems to hold out one in 10 \(0\.0% would be\): raise it",
        ),
        (  # of the six multisets of two numbers up to 3 the hash holds out none
            lambda: tasks.countdown(2, max_number=3),
            r"one in 10 \(0\.0% would be\): raise max_number or num_numbers",
        ),
    ],
)
def test_sizes_out_of_range(make_task, message):
    with pytest.raises(ConfigError, match=message):
        make_task()


def test_every_task_has_its_flags():
    """Records of the command line hold the functions' arguments, and their defaults are valid."""
    for name, (record, make) in OF_OURS.items():
        assert make is getattr(tasks if name in tasks.TASKS else dialogues, name)
        assert vars(record()).keys() == inspect.signature(make).parameters.keys()
        # a dialogue does not have `parses`
        assert getattr(make(**vars(record())), "parses", True) is not None


@pytest.mark.parametrize("name", OF_OURS)
def test_a_task_has_the_ranges_of_its_flags(name):
    record, make = OF_OURS[name]
    for field in dataclasses.fields(record):
        within = config.setting_of(field).within
        for outside in (within.low - 1, within.high + 1) if within else ():
            shown = re.escape(str(within).removesuffix(" inf)"))
            if np.isfinite(outside):
                with pytest.raises(ConfigError, match=f"^{field.name}: .* whole number in {shown}"):
                    make(**vars(record()) | {field.name: outside})


def test_lowest_digit_first_answers_are_noted():
    for name, case in cases().items():
        lowest_first = case.answer is not None and "reverse" in case.answer.__code__.co_names
        assert ("lowest digit first" in case.task.note) == lowest_first, name
    assert tasks.addition(2).note == "answers are written lowest digit first"
    assert not tasks.addition(2, reverse=False).note


def test_prompts_of_random_tokens_are_shown_as_numbers():
    task = tasks.random_prompts(12, 3, 2)
    tokens, one = np.array([[11, 5, 3]]), np.ones((1, 1))
    answers = Answers(tokens, one[0], None, tokens[None, :, :2], 2 * one.astype(int), one, one, [])
    (row,) = language.render(task, {"greedy": answers._replace(expected=np.array([[10, 10]]))})
    assert (row["prompt"], row["completion"], row["expected"]) == ("5 3", "□ 5", "")
    assert task.tokenizer.encode(row["prompt"]) == [5, 3]
