"""Surrogate objectives for one action or token, shared by several methods."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun

from jaxrl_po import losses, minibatches
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, Interval, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import Samples

CLIP = Interval(0.0, 1.0, True, True)

Surrogate = Callable[[jax.Array, Samples], tuple[jax.Array, dict[str, jax.Array]]]
"""`(log_prob E*, samples) -> elements to minimise E*, and elements to log`."""


def policy_gradient(
    log_prob: jax.Array, samples: Samples
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`−log π · A`, see `losses.policy_gradient`; logs nothing."""
    return losses.policy_gradient(log_prob, samples.advantage), {}


def plain(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    """`−r · A`, see `losses.surrogate`; logs nothing."""
    return losses.surrogate(log_prob, samples.log_prob, samples.advantage), {}


def sampler_log_prob(samples: Samples) -> jax.Array:
    """Log-probabilities of the sampler μ; of the old policy where that sampled."""
    return samples.columns.get("sampler_log_prob", samples.log_prob)


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
        actions = log_prob, samples.log_prob, samples.advantage
        elements = losses.clipped_surrogate(
            *actions, epsilon_low=epsilon_low, epsilon_high=epsilon_high, dual_clip=dual_clip
        )
        return elements, {
            "clip_fraction_low": losses.clip_fraction_low(*actions, epsilon_low),
            "clip_fraction_high": losses.clip_fraction_high(*actions, epsilon_high),
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
            and all(shape_of(x) == shape for x in (result[0], *result[1].values()))
        ):
            return result
        raise ConfigError(
            "surrogate must return (elements to minimise, dict of elements to log), each of the "
            f"shape {list(shape)} of log_prob, got {form(result)}; log nothing with {{}}"
        )

    return call


def slots(
    surrogate: Surrogate, samples: Samples, num_minibatches: int, num_parts: int, target: Target
) -> int | None:
    """Elements in a row, or None if a minibatch must stay whole; see `updates.gradient_update`.

    A minibatch must stay whole if an element of the surrogate depends on other rows, as with a
    quantile or a mean over the minibatch. Each device reads its own rows.

    Args:
      surrogate: maps rows `[N, …]` to elements `[N, …]`.
      samples: all rows of this device.
      num_minibatches: in which the rows are divided.
      num_parts: minibatches × microbatches.
      target: what the program is for.

    Raises:
      ConfigError: such a surrogate, and several microbatches.
    """
    of_row, rows = samples.mask[0].size, samples.mask.shape[0]
    several = num_parts > num_minibatches
    if not several and minibatches.in_cache(rows // num_minibatches, of_row, target) == 1:
        return of_row
    if _is_row_wise(surrogate, samples, rows // num_minibatches):
        return of_row
    if several:
        raise ConfigError(
            "num_microbatches must be 1 with this surrogate, which reads other rows of its "
            "minibatch: in parts it would be another loss"
        )
    warnings.warn(
        "the surrogate reads other rows of its minibatch, which is therefore computed whole",
        stacklevel=2,
    )
    return None


def _is_row_wise(surrogate: Surrogate, samples: Samples, rows: int) -> bool:
    """Whether the first row's elements stay as they are when all other rows change."""
    generator = np.random.default_rng(0)

    def draw(x: Any, around: float = 0.0) -> np.ndarray[Any, Any]:
        if jnp.issubdtype(x.dtype, jnp.floating):
            return (around + 0.1 * generator.normal(size=x.shape)).astype(x.dtype)
        return generator.integers(0, 2, x.shape).astype(x.dtype)

    def of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)

    inputs = jax.tree.map(of, (samples.log_prob, samples))
    traced = jax.make_jaxpr(lambda *inputs: surrogate(*inputs)[0])(*inputs)
    if traced.effects:  # it reads the rows of other devices
        return False
    # Numbers that the surrogate closes over may be traced, as those of a sweep are.
    constants = [draw(x, 1.0) if isinstance(x, jax.core.Tracer) else x for x in traced.consts]
    elements = jax.jit(jaxpr_as_fun(traced.replace(consts=constants)))
    data = [draw(x) for x in jax.tree.leaves(inputs)]
    # Far below and far above the first row, so that a quantile falls on either side of it.
    below, above = ([np.concatenate([x[:1], draw(x[1:], d)]) for x in data] for d in (-1.0, 1.0))
    with jax.ensure_compile_time_eval():
        low, high = (np.asarray(elements(*rows)[0])[0] for rows in (below, above))
    return np.array_equal(low, high, equal_nan=True)


def shape_of(x: Any) -> tuple[int, ...] | None:
    """The shape of an array, and None of anything else."""
    return getattr(x, "shape", None)


def form(result: Any) -> str:
    """What a surrogate returned, in short: kinds and shapes."""
    if isinstance(result, Mean):
        return f"Mean of {form(result.total)} and {form(result.count)}"
    if isinstance(result, tuple):
        return f"({', '.join(map(form, result))})"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{name}: {form(x)}' for name, x in result.items())}}}"
    return f"array {list(result.shape)}" if hasattr(result, "shape") else type(result).__name__
