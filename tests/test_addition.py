"""Tests the task of addition: the golden answer, credit by hand, and the splits.

Every task, this one included, is compared with a version in plain Python in `test_tasks`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_po.language import tasks


@functools.cache
def operands(held_out, count):
    """Returns the operands of prompts of two digits, `[count, 2]`."""

    @jax.jit
    @jax.vmap
    def draw(key):
        return jnp.stack(tasks.addition(2).sample(key, held_out).problem)

    return np.asarray(draw(jax.random.split(jax.random.key(3), count)))


def test_golden_prompt_and_answer():
    """The sum 34 + 58 = 92 is written `034+058=`, then `2900` with the lowest digit first, and
    EOS."""
    for changed, text in (({}, "2900"), ({"zero_pad": False}, "29"), ({"reverse": False}, "0092")):
        task = tasks.addition(3, **changed)
        answer = task.demonstrate((jnp.uint32(34), jnp.uint32(58)))
        padding = [task.tokenizer.pad] * (4 - len(text))
        assert answer.tolist() == [*task.tokenizer.encode(text), task.tokenizer.eos, *padding]


def test_credit_is_by_token():
    """The answer `24` and EOS are three tokens with a credit of 1/3 each; padding earns no
    credit."""
    task = tasks.addition(2, zero_pad=False)
    problem = (jnp.uint32(12), jnp.uint32(30))
    digits, eos, pad = task.tokenizer.encode("25"), task.tokenizer.eos, task.tokenizer.pad
    assert_allclose(
        task.credit(problem, jnp.array([*digits, eos, pad])), [1 / 3, 0.0, 1 / 3, 0.0], rtol=1e-6
    )


def test_splits_partition_all_pairs_of_two_digits():
    """Among all 10,000 ordered pairs, b + a is in the split of a + b; about one pair in ten is held
    out."""
    a, b = np.meshgrid(np.arange(100, dtype=np.uint32), np.arange(100, dtype=np.uint32))
    held_out = np.asarray(jax.jit(tasks.is_held_out)(a, b))
    assert_array_equal(held_out, held_out.T)
    assert 0.08 < held_out.mean() < 0.12
    # Every pair can be drawn: n draws miss a share exp(−n / pairs) of the pairs, 0.7 % of about
    # 1,000 and 11 % of about 9,000.
    for split, count, missed in ((False, 20_000, 0.14), (True, 5000, 0.03)):
        drawn = set(map(tuple, operands(split, count).tolist()))
        inside = set(map(tuple, np.argwhere(held_out == split).tolist()))
        assert drawn <= inside
        assert len(drawn) > (1 - missed) * len(inside)


def test_operands_are_uniform():
    """The numbers 0 … 99 have mean 49.5 and std 28.9; the mean of 20,000 draws has a standard error
    of 0.2."""
    for operand in operands(False, 20_000).T:
        assert abs(operand.mean() - 49.5) < 1.0
        assert (operand.min(), operand.max()) == (0, 99)
