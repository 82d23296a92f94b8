"""Surrogate objectives for one action or token, shared by several methods."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import losses, updates
from jaxrl_po.config import ConfigError, Interval, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import Samples

CLIP = Interval(0.0, 1.0, True, True)

Surrogate = Callable[[jax.Array, Samples], tuple[jax.Array, dict[str, jax.Array]]]
"""`(log_prob E*, samples) -> elements to minimise E*, and elements to log`."""


def plain(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`−r · A`, see `losses.surrogate`; logs nothing."""
    return losses.surrogate(log_prob, samples.log_prob, samples.advantage), {}


def sampler_log_prob(samples: Samples) -> jax.Array:
    """Log-probabilities of the sampler μ; of the old policy where that sampled."""
    mu: jax.Array | None = samples.sampler_log_prob
    return samples.log_prob if mu is None else mu


def clip_fractions(outside: jax.Array, advantage: jax.Array) -> dict[str, jax.Array]:
    """Metrics of slots without a gradient: clipped from below (A < 0) and from above (A > 0)."""
    return {
        "clip_fraction_low": (outside & (advantage < 0)).astype(jnp.float32),
        "clip_fraction_high": (outside & (advantage > 0)).astype(jnp.float32),
    }


def clipped(
    epsilon_low: Number, epsilon_high: Number, dual_clip: Number | None = None
) -> Surrogate:
    """The clipped surrogate and its clip fractions; see `losses.clipped_surrogate`."""

    def surrogate(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        old_log_prob, advantage = samples.log_prob, samples.advantage
        elements = losses.clipped_surrogate(
            log_prob,
            old_log_prob,
            advantage,
            epsilon_low=epsilon_low,
            epsilon_high=epsilon_high,
            dual_clip=dual_clip,
        )
        return elements, {
            "clip_fraction_low": losses.clip_fraction_low(
                log_prob, old_log_prob, advantage, epsilon_low
            ),
            "clip_fraction_high": losses.clip_fraction_high(
                log_prob, old_log_prob, advantage, epsilon_high
            ),
        }

    return surrogate


def checked(surrogate: Surrogate) -> Surrogate:
    """The same surrogate; while it is traced, another form of its result is a ConfigError."""

    def call(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
        result, shape = surrogate(log_prob, samples), log_prob.shape
        if (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
            and all(_shape(x) == shape for x in (result[0], *result[1].values()))
        ):
            return result
        raise ConfigError(
            "surrogate must return (elements to minimise, dict of elements to log), each of the "
            f"shape {list(shape)} of log_prob, got {_form(result)}; log nothing with {{}}"
        )

    return call


def checked_mean(surrogate: updates.Surrogate) -> updates.Surrogate:
    """The same for the surrogate of a natural step, which returns a `Mean` of two numbers."""

    def call(distribution: Any, samples: Samples) -> Mean:
        result = surrogate(distribution, samples)
        if isinstance(result, Mean) and _shape(result.total) == _shape(result.count) == ():
            return result
        raise ConfigError(
            "surrogate must return a Mean of two numbers, as losses.token_mean(elements, mask) "
            f"does, got {_form(result)}"
        )

    return call


def _shape(x: Any) -> tuple[int, ...] | None:
    return getattr(x, "shape", None)


def _form(result: Any) -> str:
    """What a surrogate returned, in short: kinds and shapes."""
    if isinstance(result, Mean):
        return f"Mean of {_form(result.total)} and {_form(result.count)}"
    if isinstance(result, tuple):
        return f"({', '.join(map(_form, result))})"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{name}: {_form(x)}' for name, x in result.items())}}}"
    return f"array {list(result.shape)}" if hasattr(result, "shape") else type(result).__name__
