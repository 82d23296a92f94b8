"""Tests every public pure function on random shapes, masks and extremes: results are finite and
lawful.

The module `fuzzed` has one row per function. NumPy draws the data from a seed and a regime, and
programs are cached by shape, so that a case costs a millisecond.
"""

import functools

import jax
import numpy as np
import pytest
import regimes
from fuzzed import ROWS
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal

SHORT, LONG = 24, 220


@functools.cache
def program(name, shape):
    """Returns `(*arguments) -> (leaves of the result, gradients)`, compiled once for each shape."""
    row = ROWS[name]

    def evaluate(*arguments):
        first, rest = arguments[: row.differentiate], arguments[row.differentiate :]
        gradients = (
            jax.grad(lambda first: jax.tree.leaves(row.call(*first, *rest))[0].sum())(first)
            if first
            else ()
        )
        return jax.tree.leaves(row.call(*arguments)), gradients

    return jax.jit(evaluate)


def check(name, shape, drawn, seed):
    row, rng, kinds = ROWS[name], np.random.default_rng(seed), ROWS[name].kinds.split()
    arguments = [
        np.asarray(regimes.KINDS[kind][regime](rng, shape))
        for kind, regime in zip(kinds, drawn, strict=True)
    ]
    arguments = [
        x if kind in ("flag", "mask", "stratum") else x.astype(np.float32)
        for kind, x in zip(kinds, arguments, strict=True)
    ]
    outputs, gradients = jax.device_get(program(name, shape)(*arguments))
    assert all(
        x.dtype in (np.float32, np.int32, bool) and np.isfinite(x).all()
        for x in (*outputs, *gradients)
    )
    if row.out is not None:
        assert {np.shape(x) for x in outputs} == {row.out(shape)}
    row.law(outputs[0] if len(outputs) == 1 else outputs, *arguments)
    if "mask" in kinds:
        mask = arguments[kinds.index("mask")]
        hidden = [
            np.where(mask, x, np.nan).astype(np.float32)
            if x.dtype == np.float32 and x.shape == shape
            else x
            for x in arguments
        ]
        jax.tree.map(
            assert_array_equal, (outputs, gradients), jax.device_get(program(name, shape)(*hidden))
        )
        assert not any(gradient[~mask].any() for gradient in gradients)


@pytest.mark.parametrize("examples", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ROWS)
def test_fuzz(name, examples):
    row, ran = ROWS[name], 0
    shapes = row.shapes if examples == LONG else row.shapes[:2]
    draws = st.tuples(*(st.sampled_from(sorted(regimes.KINDS[kind])) for kind in row.kinds.split()))

    @settings(max_examples=examples, derandomize=True, database=None, deadline=None)
    @given(st.sampled_from(shapes), draws, st.integers(0, 2**32 - 1))
    def run(shape, drawn, seed):
        nonlocal ran
        ran += 1
        check(name, shape, drawn, seed)

    run()
    assert ran >= examples
