"""Tests the task of addition: prompts, demonstrations, the verifier and the splits."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po.language import tasks

EACH = [(1, True, True), (2, True, False), (3, False, True), (9, False, False)]
VARIANTS = pytest.mark.parametrize("variant", EACH, ids=str)
SPLITS = cases("variant, held_out", *itertools.product(EACH, (False, True)), ids=str)


@functools.cache
def make(num_digits, zero_pad=True, reverse=True):
    return tasks.addition(num_digits, zero_pad=zero_pad, reverse=reverse)


@functools.cache
def drawer(variant, held_out):
    task = make(*variant)

    @jax.jit
    @jax.vmap
    def draw(key):
        prompt = task.sample(key, held_out)
        return prompt, task.demonstrate(prompt.problem)

    return draw


@functools.cache
def examples(variant, held_out=False, count=300, seed=0):
    """Returns prompts and their right answers."""
    return jax.tree.map(
        np.asarray, drawer(variant, held_out)(jax.random.split(jax.random.key(seed), count))
    )


@SPLITS
def test_prompt_and_demonstration_say_the_sum(variant, held_out):
    """Each text is parsed on the host, so that generator and verifier cannot share an error."""
    (num_digits, zero_pad, reverse), task = variant, make(*variant)
    sampled, answers = examples(variant, held_out)
    assert sampled.tokens.shape == (300, task.prompt_length)
    assert answers.shape == (300, task.answer_length)
    assert sampled.tokens.dtype == answers.dtype == jnp.int32
    for prompt, completion, a, b in zip(
        sampled.tokens.tolist(), answers.tolist(), *sampled.problem, strict=True
    ):
        text, answer = task.tokenizer.decode(prompt), task.tokenizer.decode(completion)
        first, second = text.removesuffix("=").split("+")
        assert (int(first), int(second)) == (a, b)
        assert int(answer[::-1] if reverse else answer) == int(a) + int(b)
        if zero_pad:
            assert (len(first), len(second), len(answer)) == (
                num_digits,
                num_digits,
                num_digits + 1,
            )
        else:
            assert (first, second) == (str(a), str(b))


@SPLITS
def test_each_split_keeps_to_its_operands(variant, held_out):
    assert (
        np.asarray(tasks.is_held_out(*examples(variant, held_out)[0].problem)) == held_out
    ).all()


def test_golden_prompt_and_answer():
    """The sum 34 + 58 = 92 is written `034+058=`, then `2900` with the lowest digit first, and
    EOS."""
    task = tasks.addition(3)
    answer = task.demonstrate((jnp.uint32(34), jnp.uint32(58)))
    assert answer.tolist() == [*task.tokenizer.encode("2900"), task.tokenizer.eos]
    assert tasks.addition(3, zero_pad=False).demonstrate(
        (jnp.uint32(34), jnp.uint32(58))
    ).tolist() == [
        *task.tokenizer.encode("29"),
        task.tokenizer.eos,
        task.tokenizer.pad,
        task.tokenizer.pad,
    ]
    forwards = tasks.addition(3, reverse=False).demonstrate((jnp.uint32(34), jnp.uint32(58)))
    assert forwards.tolist() == [*task.tokenizer.encode("0092"), task.tokenizer.eos]


@VARIANTS
def test_padding_stands_on_the_left_and_is_counted(variant):
    task = make(*variant)
    sampled, answers = examples(variant)
    padded = sampled.tokens == task.tokenizer.pad
    assert_array_equal(padded, np.arange(task.prompt_length) < sampled.pad[:, None])
    assert (len(set(sampled.pad.tolist())) > 1) == (not variant[1])  # prompts may be ragged or not
    is_eos = answers == task.tokenizer.eos
    assert (is_eos.sum(axis=1) == 1).all()
    assert_array_equal(answers == task.tokenizer.pad, np.cumsum(is_eos, axis=1) - is_eos == 1)


@VARIANTS
@cases("slack", 0, 3)
def test_verifier_accepts_the_demonstration_and_nothing_else(variant, slack):
    task = make(*variant)
    sampled, answers = examples(variant)
    answers = np.pad(answers, ((0, 0), (0, slack)), constant_values=task.tokenizer.pad)
    length = answers.shape[1]
    # Row 0 is the right answer; row i + 1 changes token i, which is a digit, EOS, or the padding
    # after EOS.
    changes = np.concatenate([np.zeros((1, length), int), np.eye(length, dtype=int)])
    completions = ((answers[:, None] + changes) % task.tokenizer.size).astype(np.int32)
    score = jax.jit(jax.vmap(jax.vmap(task.score, (None, 0))))(sampled.problem, completions)
    assert score.dtype == jnp.float32
    assert_array_equal(score, np.broadcast_to(np.arange(length + 1) == 0, score.shape))


def test_right_digits_without_proper_end_are_wrong():
    task = make(2, False)
    problem = (jnp.uint32(12), jnp.uint32(30))  # 42
    digits, eos, pad = task.tokenizer.encode("24"), task.tokenizer.eos, task.tokenizer.pad
    cases = {
        (*digits, eos, pad): 1.0,
        (*digits, pad, pad): 0.0,
        (*digits, *digits): 0.0,
        (*digits, digits[0], eos): 0.0,
    }
    for tokens, want in cases.items():
        assert float(task.score(problem, jnp.array(tokens))) == want


def test_credit_sums_to_score_of_right_answer():
    """The answer `24` and EOS are three tokens with a credit of 1/3 each; padding earns no
    credit."""
    task = make(2, False)
    problem = (jnp.uint32(12), jnp.uint32(30))
    digits, eos, pad = task.tokenizer.encode("25"), task.tokenizer.eos, task.tokenizer.pad
    assert_allclose(
        task.credit(problem, jnp.array([*digits, eos, pad])), [1 / 3, 0.0, 1 / 3, 0.0], rtol=1e-6
    )
    sampled, answers = examples((3, False, True))
    credit = jax.jit(jax.vmap(make(3, False).credit))(sampled.problem, answers)
    assert credit.dtype == jnp.float32
    assert_allclose(credit.sum(axis=1), 1.0, rtol=1e-6)


def test_splits_partition_all_pairs_of_two_digits():
    """Among all 10,000 ordered pairs, b + a is in the split of a + b; about one pair in ten is held
    out."""
    a, b = np.meshgrid(np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.uint32))
    held_out = np.asarray(jax.jit(tasks.is_held_out)(a, b))
    assert_array_equal(held_out, held_out.T)
    assert 0.08 < held_out.mean() < 0.12
    drawn = {}
    for split in (False, True):
        problem = examples((2, True, False), split, 5000 if split else 20_000, seed=3)[0].problem
        drawn[split] = set(zip(*(operand.tolist() for operand in problem), strict=True))
    inside = {
        split: {(i, j) for i in range(100) for j in range(100) if held_out[i, j] == split}
        for split in (False, True)
    }
    # Every pair can be drawn: n draws miss a share exp(−n / pairs) of the pairs, 0.7 % of about
    # 1,000 and 11 % of about 9,000.
    for split, missed in ((False, 0.14), (True, 0.03)):
        assert drawn[split] <= inside[split]
        assert len(drawn[split]) > (1 - missed) * len(inside[split])


def test_operands_are_uniform():
    """The numbers 0 … 99 have mean 49.5 and std 28.9; the mean of 20,000 draws has a standard error
    of 0.2."""
    first, second = examples((2, True, False), False, 20_000, seed=3)[0].problem
    for operand in (first, second):
        assert abs(operand.mean() - 49.5) < 1.0
        assert (operand.min(), operand.max()) == (0, 99)


def test_keys_decide():
    one, other = (examples((1, True, True), seed=seed)[0].tokens for seed in (0, 1))
    assert not np.array_equal(one, other)
