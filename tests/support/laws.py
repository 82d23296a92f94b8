"""Properties of any output: each `law(outputs, *arguments)` asserts one property in NumPy."""

import math

import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose

from jaxrl_po import losses

SMALLEST = np.finfo(np.float32).tiny


def flush(x):
    """Returns an array with denormals set to 0, as compiled programs do."""
    return np.where(np.abs(x) < SMALLEST, 0.0, x)


def dead_is_zero(out, reward, *_):
    if reward.max() == reward.min():
        assert not out.any()


def gained(out, reward, *_):
    dead_is_zero(out, reward)
    assert np.all(out >= 0.0)
    assert np.all(out[reward == reward.min()] == 0.0)


def a_third(out, _, __, mask):
    assert not out[~mask].any()
    most = int(np.float32(0.3) * mask.sum(dtype=np.float32))
    assert out.sum() == (max(most, 1) if mask.any() else 0)


def centred(out, reward, *_):
    dead_is_zero(out, reward)
    assert abs(np.float64(out).sum()) <= 1e-5 * len(out) * max(
        np.abs(out).max(), np.abs(reward).max() * (np.abs(out).max() > 1e6)
    )


def normalised(out, reward, *_):
    dead_is_zero(out, reward)
    assert np.abs(out).max(initial=0.0) <= math.sqrt(out.size) * 1.001


def process(out, reward, mask):
    zero_where_masked(out, reward, mask)
    if mask.any():
        dead_is_zero(out, reward[mask])


def zero_where_masked(out, _, mask):
    assert not out[~mask].any()


def whitened(out, x, mask):
    zero_where_masked(out, x, mask)
    if mask.any():
        dead_is_zero(out, x[mask])
    assert np.abs(out).max(initial=0.0) <= math.sqrt(out.size) * 1.001


def pessimistic(out, log_prob, old_log_prob, advantage, *_):
    assert np.all(
        out
        >= np.asarray(losses.surrogate(*map(jnp.asarray, (log_prob, old_log_prob, advantage))))
        - 1e-30
    )


def at_most(bound):
    def law(out, *_):
        assert np.abs(out).max(initial=0.0) <= bound

    return law


def non_negative(out, *_):
    assert np.all(out >= -1e-4)


def zero_or_one(out, *_):
    assert np.all((out == 0.0) | (out == 1.0))


def equal_along_a_row(out, _, __, mask):
    assert np.all(out == out[:, :1])
    assert not out[~mask.any(axis=1)].any()


def kept_in_range(out, before, kl, *_):
    assert (1e-8 * 0.999 <= out <= 1e8) if np.isfinite(kl) else out == before


def counted(count):
    def law(out, x, mask):
        assert out[1] == count(mask)

    return law


def mean_in_range(out, x, mask):
    low, high = (x[mask].min(), x[mask].max()) if mask.any() else (0.0, 0.0)
    slack = 1e-5 * max(abs(low), abs(high)) + SMALLEST
    assert low - slack <= out <= high + slack


def moments_in_range(out, x, mask):
    mean_in_range(out[0], x, mask)
    assert 0.0 <= out[1] <= np.abs(x[mask] - out[0]).max(initial=0.0) * 1.001
    if mask.any() and x[mask].max() == x[mask].min():
        assert (out[0], out[1]) == (flush(x[mask][0]), 0.0)


def residual_is_told(out, root, b, scale):
    x, residual = np.float64(out[0]), np.float64(out[1])
    matrix = np.float64(scale) * np.float64(root) @ np.float64(root).T
    size = np.linalg.norm(b) + np.linalg.norm(matrix) * np.linalg.norm(x)
    assert abs(np.linalg.norm(b - matrix @ x) - residual) <= 1e-3 * size + 1e-12
    assert x @ b >= -1e-6 * np.linalg.norm(x) * np.linalg.norm(b)


def within_delta(out, root, direction, scale):
    matrix = np.float64(scale) * np.float64(root) @ np.float64(root).T
    assert (
        np.float64(out) @ matrix @ np.float64(out) <= 0.02 * (1 + 1e-3)
        or np.linalg.cond(matrix) > 1e4
    )


def passed_or_untouched(out, params, *_, limit=0.1):
    x, accepted, kl, gain, _ = out
    if accepted:
        assert kl <= limit
        assert limit == np.inf or gain > 0
    else:
        assert x.tobytes() == params.tobytes()
        assert gain == 0


def semidefinite(out, _, vector):
    size = np.float64(np.abs(vector).max())
    for product in out:
        assert np.sum(np.float64(product) * vector) >= -1e-4 * size**2
    assert_allclose(out[0], out[1], atol=1e-3 * size + 1e-30)


def categorical_law(out, logits, *_):
    entropy, kl, mode, sampled, least = out
    assert np.all((entropy >= -1e-6) & (entropy <= math.log(logits.shape[-1]) + 1e-5))
    assert np.all(kl >= -1e-2 if np.abs(logits[np.isfinite(logits)]).max() > 1e2 else kl >= -1e-5)
    assert np.all((mode <= 0) & (mode >= sampled) & (mode >= least))


def gaussian_law(out, *_):
    _, kl, mode, sampled, other = out
    assert np.all(kl >= -1e-3)
    assert np.all((mode >= sampled) & (mode >= other))


def running_law(out, first, second, stratum, mask, decay):
    weight, _, variance = out[:9].reshape(3, 3)
    assert np.all(variance >= 0)
    assert_allclose(weight.sum(), (decay + 1) * mask.sum(), rtol=1e-5)
    assert not out[9:][~mask].any()
