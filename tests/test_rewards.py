"""Tests the shaping of outcome rewards."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.config import ConfigError
from jaxrl_po.language.rewards import soft_overlong


def test_golden_values_of_dapo():
    """With L_max = 20480 and a cache of 4096, the reward is 0 up to 16384, −½ halfway at 18432, −1
    from 20480 on."""
    length = jnp.array([0, 1, 16384, 17408, 18432, 20479, 20480, 20481, 40960])
    want = [0.0, 0.0, 0.0, -0.25, -0.5, -4095 / 4096, -1.0, -1.0, -1.0]
    np.testing.assert_allclose(soft_overlong(length, max_length=20480, cache=4096), want, rtol=1e-7)


def test_matches_the_three_cases_of_the_paper():
    def paper(n, max_length, cache):
        if n <= max_length - cache:
            return 0.0
        return (max_length - cache - n) / cache if n <= max_length else -1.0

    for max_length, cache in [(7, 3), (7, 1), (7, 7)]:
        lengths = range(12)
        want = [paper(n, max_length, cache) for n in lengths]
        np.testing.assert_allclose(
            soft_overlong(jnp.array(lengths), max_length=max_length, cache=cache), want, rtol=1e-6
        )


def test_float32_from_integer_lengths_and_any_shape():
    """An integer buffer would round −0.5 to 0."""
    shaped = soft_overlong(jnp.array([[4, 5], [6, 7]], jnp.int32), max_length=6, cache=2)
    assert shaped.dtype == jnp.float32
    assert shaped.tolist() == [[0.0, -0.5], [-1.0, -1.0]]


def test_factor_scales_and_is_traced():
    @jax.jit
    def at_factor(factor):
        return soft_overlong(jnp.array([4, 5, 9]), max_length=6, cache=2, factor=factor)

    assert at_factor(4.0).tolist() == [0.0, -2.0, -4.0]
    assert at_factor(0.5).tolist() == [0.0, -0.25, -0.5]
    assert at_factor._cache_size() == 1


@pytest.mark.parametrize("cache", [0, -1, 7])
def test_cache_outside_its_range(cache):
    with pytest.raises(ConfigError, match=r"cache: must lie in \[1, max_length = 6\] tokens"):
        soft_overlong(jnp.array([1]), max_length=6, cache=cache)
