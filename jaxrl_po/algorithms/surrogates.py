"""Surrogate objectives for one action or token, shared by several methods."""

from collections.abc import Callable

import jax

from jaxrl_po import losses
from jaxrl_po.config import Interval, Number
from jaxrl_po.types import Samples

CLIP = Interval(0.0, 1.0, True, True)

Surrogate = Callable[[jax.Array, Samples], tuple[jax.Array, dict[str, jax.Array]]]
"""`(log_prob E*, samples) -> elements to minimise E*, and elements to log`."""


def plain(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`−r · A`, see `losses.surrogate`; logs nothing."""
    return losses.surrogate(log_prob, samples.log_prob, samples.advantage), {}


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
