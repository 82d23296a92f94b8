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


def test_factor_scales_and_is_traced():
    @jax.jit
    def at_factor(factor):
        return soft_overlong(jnp.array([4, 5, 9]), max_length=6, cache=2, factor=factor)

    assert at_factor(4.0).tolist() == [0.0, -2.0, -4.0]
    assert at_factor(0.5).tolist() == [0.0, -0.25, -0.5]
    assert at_factor._cache_size() == 1


@pytest.mark.parametrize("cache", [0, 7])
def test_cache_outside_its_range(cache):
    with pytest.raises(ConfigError, match=r"cache: must lie in \[1, max_length = 6\] tokens"):
        soft_overlong(jnp.array([1]), max_length=6, cache=cache)
