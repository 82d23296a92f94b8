"""Tests evaluation of a language policy: pass@k, avg@n, and the displayed answers."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import evaluation
from jaxrl_po.language.evaluation import estimate_pass_at_k, make_answer
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.tasks.types import selecting

SAMPLES, PROMPTS, SHOWN = 6, 24, 16
ADDITION = language.tasks.addition(1, zero_pad=False)
# Ten operands are too few to generalise from.
TASK = ADDITION._replace(sample=lambda key, held_out: ADDITION.sample(key, False))
MODEL = language.ModelSettings(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16).build(
    TASK.tokenizer.size
)
KEY = jax.random.key(3)


@functools.cache
def trained():
    """Returns parameters that answer some prompts correctly and other prompts incorrectly."""
    warm = language.WarmStart(steps=1000, accuracy=0.5, batch_size=64, learning_rate=1e-2)
    return jax.jit(language.make_problem(TASK, MODEL, num_prompts=2, group_size=2, warm=warm).init)(
        jax.random.key(0)
    )


@functools.cache
def answers(n, num_prompts=PROMPTS, **options):
    return jax.jit(make_answer(TASK, MODEL, num_prompts=num_prompts, **options), static_argnums=2)(
        trained()[0], KEY, n
    )


@functools.cache
def evaluated(**options):
    return jax.jit(language.make_evaluate(TASK, MODEL, num_prompts=PROMPTS, **options))(
        *trained(), KEY
    )


@functools.cache
def shown():
    return jax.jit(
        language.make_describe(TASK, MODEL, num_prompts=SHOWN, decoding=Decoding(temperature=1.3))
    )(*trained(), KEY)


@cases("n", 1, 2, 5, 8)
def test_pass_at_k_is_one_minus_binomial_ratio(n):
    """Among the C(n, k) choices of k from n samples, C(n − c, k) contain no right answer."""
    correct = jnp.arange(n + 1)
    for k in range(1, n + 1):
        expected = [1 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)]
        assert_allclose(
            jax.jit(estimate_pass_at_k, static_argnums=(1, 2))(correct, n, k), expected, atol=1e-6
        )


def test_pass_at_k_where_a_binomial_would_overflow():
    """The binomial C(4096, 2048) has 1232 digits.

    If c of n samples are right, k = 1 yields c / n, and k = n yields 1 for c > 0.
    """
    correct = jnp.array([[0, 1, 1024], [2048, 4095, 4096]])
    assert_allclose(estimate_pass_at_k(correct, 4096, 1), correct / 4096, rtol=1e-4, atol=1e-6)
    assert_array_equal(estimate_pass_at_k(correct, 4096, 4096), [[0, 1, 1], [1, 1, 1]])
    assert_allclose(estimate_pass_at_k(correct, 4096, 2048)[0, :2], [0.0, 0.5], rtol=1e-3)


@cases("k", 0, 9)
def test_k_outside_the_samples_is_refused(k):
    with pytest.raises(ConfigError, match=r"k: must be a whole number in \[1, 8\]"):
        estimate_pass_at_k(jnp.array(2), 8, k)


def test_evaluation_summarises_the_samples():
    values, score = (
        evaluated(num_samples=SAMPLES, decoding=Decoding(temperature=1.3)),
        np.asarray(answers(SAMPLES, decoding=Decoding(temperature=1.3)).score),
    )
    assert set(values) == {
        "greedy_accuracy",
        "greedy_length",
        "avg@6",
        "pass@1",
        "pass@2",
        "pass@4",
        "pass@6",
    }
    assert all(value.shape == (PROMPTS,) for value in values.values())
    assert_allclose(values["avg@6"], score.mean(1), rtol=1e-6)
    # every score is 0 or 1
    assert_allclose(values["pass@1"], values["avg@6"], atol=1e-6)
    wrong = (score < 1.0).sum(1)
    expected = [1 - math.comb(w, 4) / math.comb(SAMPLES, 4) for w in wrong]
    assert_allclose(values["pass@4"], expected, atol=1e-6)
    assert 0.0 < values["avg@6"].mean() < values["pass@2"].mean() < values["pass@4"].mean() < 1.0


def test_what_is_asked_is_held_out():
    asked = []

    def sample(key, held_out):
        asked.append(held_out)
        return ADDITION.sample(key, held_out)

    answer = make_answer(ADDITION._replace(sample=sample), MODEL, num_prompts=2)
    jax.eval_shape(lambda params, key: answer(params, key, 0), trained()[0], KEY)
    assert asked == [True]


def test_every_row_of_finite_set_is_asked_once(monkeypatch):
    """A policy that answers exactly half of the rows correctly scores .5, for any key; in
    microbatches too."""
    rows = [language.tasks.Example(f"{i}+1=", str(i)) for i in range(40)]
    task = language.tasks.table("rows", TASK.tokenizer, rows[:10], rows[10:])
    half = task._replace(score=lambda row, tokens: (row % 2).astype(jnp.float32))
    params = trained()[0]._replace(frozen=None)

    @jax.jit
    def numbers(key):
        few, shown = (language.make_evaluate(half, MODEL, num_prompts=n) for n in (8, 100))
        once = make_answer(half, MODEL, num_prompts=None)(params, key, 2)
        monkeypatch.setattr(evaluation, "DRAWN", 8)
        in_parts = make_answer(half, MODEL, num_prompts=None)(params, key, 2)
        whole = language.make_evaluate(half, MODEL, num_samples=2)(params, None, key)
        return once, in_parts, whole, few(params, None, key), shown(params, None, key)

    for key in (KEY, jax.random.key(4)):
        once, in_parts, whole, few, all_of_them = jax.device_get(numbers(key))
        assert_array_equal(once.problem, range(10, 40))
        jax.tree.map(assert_array_equal, in_parts, once)
        for name in ("greedy_accuracy", "avg@2", "pass@1", "pass@2"):
            assert whole[name].shape == (30,), name
            assert whole[name].mean() == 0.5, name
        assert_array_equal(few["greedy_accuracy"], np.arange(10, 18) % 2)
        assert_array_equal(all_of_them["greedy_accuracy"], np.arange(10, 40) % 2)
    with pytest.raises(ConfigError, match=r"^task: rows must have test rows, and for a run val"):
        language.make_evaluate(selecting(task), MODEL)


def test_greedy_answers_are_the_most_likely_tokens():
    """One pass over the finished sequences confirms the greedy tokens."""
    greedy, (params, _) = answers(0), trained()
    tokens = jnp.concatenate([greedy.prompt, greedy.tokens[:, 0]], axis=1)
    pad = jnp.sum(jnp.cumsum(greedy.prompt != TASK.tokenizer.pad, axis=1) == 0, axis=1)
    whole = jax.jit(MODEL.apply, static_argnames="last")
    logits = whole(params.policy, tokens[:, :-1], pad, last=greedy.tokens.shape[2])[0]
    written = np.arange(greedy.tokens.shape[2]) < np.asarray(greedy.length[:, :1])
    assert_array_equal(
        np.asarray(logits.argmax(-1))[written], np.asarray(greedy.tokens[:, 0])[written]
    )


def test_samples_leave_the_greedy_numbers_alone():
    values, greedy = evaluated(num_samples=SAMPLES, decoding=Decoding(temperature=1.3)), answers(0)
    assert_array_equal(values["greedy_accuracy"], greedy.score[:, 0])
    assert_array_equal(values["greedy_length"], greedy.length[:, 0])
    alone = jax.eval_shape(
        language.make_evaluate(TASK, MODEL, num_prompts=PROMPTS), *trained(), KEY
    )
    assert set(alone) == {"greedy_accuracy", "greedy_length"}


def test_truncation_reaches_the_samples():
    """Every sample is the greedy answer if truncation allows only one token."""
    one, greedy = answers(2, decoding=Decoding(top_k=1)), answers(0)
    assert_array_equal(one.tokens, np.repeat(greedy.tokens, 2, axis=1))


def test_shown_answers_are_first_of_the_evaluation():
    of_evaluation = {
        "greedy": answers(0),
        "sampled": answers(SAMPLES, decoding=Decoding(temperature=1.3)),
    }
    for decoding, few in shown().items():
        many = of_evaluation[decoding]
        first = many._replace(
            **{name: getattr(many, name)[:, :1] for name in ("tokens", "length", "ended", "score")}
        )
        jax.tree.map(lambda x, y: assert_array_equal(x, y[:SHOWN]), few, first)


def test_rows_say_what_was_asked_and_answered():
    rows = language.render(TASK, jax.device_get(shown()))
    assert [row["decoding"] for row in rows] == ["greedy", "sampled"] * SHOWN
    assert [row["prompt"] for row in rows[::2]] == [row["prompt"] for row in rows[1::2]]
    for row in rows:
        a, b = row["prompt"].removesuffix("=").split("+")
        right = row["ended"] and row["completion"] == str(int(a) + int(b))[::-1]
        assert row["score"] == float(right)
        assert type(row["length"]) is int
        assert row["length"] == len(row["completion"]) + row["ended"]
    assert len({row["score"] for row in rows}) == 2


@cases(
    "options, match",
    ({"decoding": Decoding(temperature=0.0)}, "temperature"),
    ({"decoding": Decoding(top_k=15)}, "top_k: must be at most 14"),
)
def test_bad_arguments_are_named(options, match):
    with pytest.raises(ConfigError, match=match):
        language.make_evaluate(TASK, MODEL, **options)
