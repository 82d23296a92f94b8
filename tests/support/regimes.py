"""Draws inputs of fuzzed functions with NumPy: a few regimes for each kind of argument."""

from collections.abc import Callable

import numpy as np


def reals(huge, tiny=1e-40):
    """Returns regimes of finite numbers up to ±`huge`, including denormals and ties."""
    extremes = np.array([0.0, 1.0, -1.0, tiny, -tiny, 0.1, huge, -huge])
    return {
        "normal": lambda rng, shape: rng.normal(size=shape),
        "equal": lambda rng, shape: np.full(
            shape, rng.choice([rng.normal(), rng.choice(extremes)])
        ),
        "few": lambda rng, shape: rng.integers(0, 2, shape),
        "tiny": lambda rng, shape: tiny * rng.normal(size=shape),
        "huge": lambda rng, shape: huge * rng.uniform(-1, 1, shape),
        "mixed": lambda rng, shape: rng.choice(extremes, shape),
    }


def numbers(*values):
    """Returns a regime that takes one of several numbers for all elements."""
    return {"one": lambda rng, _: rng.choice(values)}


def ragged(rng, shape):
    *rows, length = shape or (1,)
    return (np.arange(length) < rng.integers(0, length + 1, (*rows, 1))).reshape(shape)


MASK = {
    "none": lambda rng, shape: np.zeros(shape, bool),
    "all": lambda rng, shape: np.ones(shape, bool),
    "any": lambda rng, shape: rng.random(shape) < 0.5,
    "ragged": ragged,
}
LOG_PROB = {
    "normal": lambda rng, shape: -rng.exponential(size=shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "wide": lambda rng, shape: rng.uniform(-1e4, 0, shape),
    "mixed": lambda rng, shape: rng.choice([0.0, -1e-40, -1e-3, -1.0, -20.0, -1e4], shape),
}
LOGITS = reals(1e4) | {
    "excluded": lambda rng, shape: np.where(
        np.arange(shape[-1]) == shape[-1] // 2, 0.0, rng.choice([0.0, 3.0, -np.inf], shape)
    )
}
LOG_STD = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "wide": lambda rng, shape: rng.uniform(-10, 10, shape),
}
KINDS: dict[str, dict[str, Callable]] = {
    "reward": reals(1e30),  # larger numbers are allowed, since rewards are only added
    "value": reals(1e18),  # squared
    "advantage": reals(1e25),  # numbers are smaller, since advantages are multiplied by a ratio
    "log_prob": LOG_PROB,
    "flag": MASK,
    "mask": MASK,
    "unit": numbers(0.0, 0.5, 0.99, 1.0),
    "epsilon": numbers(0.0, 0.2, 0.99),
    "target": numbers(1e-8, 0.01, 10.0),
    "coefficient": numbers(0.0, 1e-8, 1.0, 1e8),
    "kl": numbers(0.0, 1e-40, 0.01, 1.0, -1.0, 1e30, np.nan, np.inf, -np.inf),
    "logits": LOGITS,
    "event": reals(1e4),
    "root": {
        "any": lambda rng, shape: rng.normal(size=shape * 2),
        "singular": lambda rng, shape: np.ones(shape * 2),
    },
    "log_std": LOG_STD,
    "stratum": {"any": lambda rng, shape: rng.integers(0, 3, shape)},
}
