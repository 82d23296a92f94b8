"""Tests answers as text: any tokens that spell the answer are right, in the program and byte by
byte."""

import families  # noqa: F401, which skips without the libraries
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jaxrl_po.language.pretrained.text import TextTokenizer
from jaxrl_po.language.tasks import table
from jaxrl_po.language.tasks.table import Example
from jaxrl_po.language.tasks.texts import LONGEST, make_texts, match
from jaxrl_po.language.tokenizer import make_tokenizer

TOKENS = [b"", b"", b"1", b"2", b"12", b" ", b"0", b" 12", b"\n", b"100", b"00", b"\xc3", b"\xa9"]
ANSWERS = ["12", "100", " 1 2", "", "é", "x" * (LONGEST + 1)]
ENDS = (0, 1)
LENGTH = 6


@jax.jit
@jax.vmap
def found(row, tokens):
    return match(make_texts(TOKENS, ANSWERS), row, tokens, ENDS)


def test_a_text_is_right_in_whatever_tokens():
    """The test compares with Python's strings: 2,000 random completions, and one of each right
    spelling."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(len(TOKENS), size=(2000, LENGTH)).astype(np.int32)
    row = generator.integers(len(ANSWERS), size=len(tokens)).astype(np.int32)
    spelt = [(0, [2, 3, 1]), (0, [7, 8, 0]), (1, [2, 6, 6, 1]), (1, [2, 10, 0])]
    spelt += [(2, [5, 2, 5, 3, 1]), (3, [1]), (3, [5, 8, 0]), (4, [11, 12, 1])]
    for i, (right, written) in enumerate(spelt):
        row[i], tokens[i] = right, np.resize(np.array(written), LENGTH)
    given = found(row, tokens)
    expected = []
    for answer, written in zip(row, tokens.tolist(), strict=True):
        end = next((i for i, token in enumerate(written) if token in ENDS), None)
        text = b"".join(TOKENS[token] for token in written[:end])
        expected.append(end is not None and text.strip() == ANSWERS[answer].strip().encode())
    np.testing.assert_array_equal(given.score, expected)
    assert 20 < sum(expected) < 1000
    assert all(expected[: len(spelt)])
    shares = np.asarray(given.credit.sum(1))
    np.testing.assert_allclose(shares[expected], 1.0, rtol=1e-6)
    assert shares[~np.array(expected)].max() < 1.0


def test_credit_is_by_bytes():
    written = jnp.array([[9, 6, 1, 0, 0, 0], [2, 6, 1, 0, 0, 0], [2, 10, 0, 0, 0, 0]])
    np.testing.assert_allclose(
        found(jnp.array([1, 1, 1]), written).credit[:, :3],
        [[0.75, 0, 0], [0.25, 0.25, 0], [0.25, 0.5, 0.25]],
    )


@pytest.fixture(scope="module")
def merging():
    """Builds a tokenizer of bytes that merges tokens 1 and 2."""
    special = {"<end>": 0, "<pad>": 1}
    words = special | {x: i for i, x in enumerate(["1", "2", "0", "Ġ", "12", "?", "Ġ12"], 2)}
    rules = tokenizers.Tokenizer(
        tokenizers.models.BPE(words, [("1", "2"), ("Ġ", "12")], unk_token="?")
    )
    rules.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = tokenizers.decoders.ByteLevel()
    rules.add_special_tokens([tokenizers.AddedToken(x, special=True) for x in special])
    return TextTokenizer(rules, len(words) + 1, 1, (0,), {})


def test_digits_that_merge_are_right_one_by_one(merging):
    task = table("t", merging, [Example("?", "12")], [Example("1?", "120")])
    score = jax.jit(jax.vmap(task.score, (None, 0)))
    one, two, both, spaced, end, pad = 2, 3, 6, 8, 0, 1
    rows = [[both, end], [one, two, end], [spaced, end], [two, one, end], [one, two], [both, both]]
    written = jnp.array([row + [pad] * (4 - len(row)) for row in rows])
    assert score(jnp.int32(0), written).tolist() == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    credit = jax.vmap(task.credit, (None, 0))(jnp.int32(0), written)
    np.testing.assert_allclose(credit.sum(1)[:3], 1.0, rtol=1e-6)
    assert float(task.score(jnp.int32(1), task.demonstrate(jnp.int32(1)))) == 1.0


def test_a_tokenizer_of_ours_compares_tokens():
    task = table("t", make_tokenizer("?12"), [Example("?", "12")], [Example("1?", "2")])
    assert task.data.texts is None


def test_credit_of_the_usual_tokens_is_by_token(merging):
    """The credit is by token even if the shares of bytes sum to a little more than 1."""
    answer = "12" * 13
    task = table("t", merging, [Example("?", answer)], [Example("1?", "2")])
    credit = np.asarray(task.credit(jnp.int32(0), task.demonstrate(jnp.int32(0))))
    np.testing.assert_array_equal(credit[:14], np.float32(1 / 14))


def test_answers_have_the_tokenizers_form_of_unicode(merging):
    rules = tokenizers.Tokenizer.from_str(merging.rules.to_str())
    rules.normalizer = tokenizers.normalizers.NFKC()
    task = table(
        "t", merging._replace(rules=rules), [Example("?", "\uff11\uff12")], [Example("1?", "2")]
    )
    one, two, end = 2, 3, 0
    assert float(task.score(jnp.int32(0), jnp.array([one, two, end]))) == 1.0


def test_long_answer_is_right_in_its_own_tokens(merging):
    answer = "12" * 300
    task = table("t", merging, [Example("?", answer)], [Example("1?", "2")])
    written = task.demonstrate(jnp.int32(0))
    assert float(task.score(jnp.int32(0), written)) == 1.0
    assert float(task.score(jnp.int32(0), written.at[0].set(2))) == 0.0
    assert task.data.texts.answer.shape[1] == 512
