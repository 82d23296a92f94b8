"""Surrogate objectives for one action or token, shared by several methods."""

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxrl_po import losses, minibatches
from jaxrl_po.algorithms import data_flow
from jaxrl_po.config import ConfigError, Interval, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Distribution, Problem, Samples

CLIP = Interval(0.0, 1.0, True, True)

Surrogate = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""`(log_prob E*, samples) -> elements to minimise E*, and elements to log`. With a further
parameter named `distribution` it also gets the policy's distribution at the current parameters."""

# Names of fields that a run writes or acts upon.
RUN_READS = frozenset(("iteration", "step", "signal", "frac_nonfinite", "frac_no_action"))


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


@dataclasses.dataclass(frozen=True)
class RowWise:
    """A surrogate that the user states to be row-wise."""

    surrogate: Surrogate

    def __call__(self, *args: Any, **options: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """The result of the surrogate itself."""
        return self.surrogate(*args, **options)


def row_wise(surrogate: Surrogate) -> Surrogate:
    """States that no element of a surrogate, minimised or logged, reads another row.

    Its minibatches may then be computed in parts. It is only needed where the data flow does not
    show it (loops, callbacks, indexing by the number of the row), and is not verified.

    Example:
      >>> marked = row_wise(plain)
      >>> checked(marked).is_row_wise, checked(plain).is_row_wise
      (True, False)
    """
    return RowWise(surrogate)


class Checked(NamedTuple):
    """A surrogate; while it is traced, another form of its result is a ConfigError.

    Attributes:
      function: The surrogate.
      reads_distribution: It has a parameter named `distribution`.
      is_row_wise: The user states that it is, see `row_wise`.
    """

    function: Surrogate
    reads_distribution: bool
    is_row_wise: bool

    def __call__(
        self, log_prob: jax.Array, samples: Samples, distribution: Distribution | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Elements to minimise and elements to log; flags and counts to log become floats."""
        given = {"distribution": distribution} if self.reads_distribution else {}
        result, shape = self.function(log_prob, samples, **given), log_prob.shape
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
            and all(shape_of(x) == shape for x in (result[0], *result[1].values()))
        ):
            raise ConfigError(
                "surrogate must return (elements to minimise, dict of elements to log), each of "
                f"the shape {list(shape)} of log_prob, got {form(result)}; log nothing with {{}}"
            )
        elements, logged = result
        if not jnp.issubdtype(elements.dtype, jnp.floating):
            raise ConfigError(
                f"surrogate must return elements that are floats, got {elements.dtype}, which has "
                "no gradient"
            )
        for name in RUN_READS & logged.keys():
            raise ConfigError(
                f"{name} must be logged by a surrogate under another name: it is "
                "that of a field which a run reads"
            )
        return elements, {
            name: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
            for name, x in logged.items()
        }


def checked(surrogate: Surrogate) -> Checked:
    """The surrogate with what its parameters and its mark say.

    Raises:
      ConfigError: `distribution` is not a parameter beside `(log_prob, samples)`.
    """
    marked = isinstance(surrogate, RowWise)
    function = surrogate.surrogate if isinstance(surrogate, RowWise) else surrogate
    parameters = inspect.signature(function).parameters
    if "distribution" in list(parameters)[:2]:
        raise ConfigError(
            "surrogate must take (log_prob, samples), and after them a distribution if it reads "
            "one; that of a natural step takes (distribution, samples)"
        )
    asked = parameters.get("distribution")
    bound = "distribution" in getattr(function, "keywords", {})  # by functools.partial
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return Checked(function, asked is not None and asked.kind in by_name and not bound, marked)


def slots(
    surrogate: Checked,
    samples: Samples,
    problem: Problem,
    params: ActorCritic,
    num_minibatches: int,
    num_parts: int,
) -> int | None:
    """Elements in a row, or None if a minibatch must stay whole; see `updates.gradient_update`.

    A minibatch must stay whole if an element of the surrogate, minimised or logged, depends on
    other rows, as with a quantile or a mean over the minibatch. Each device reads its own rows.

    Args:
      surrogate: maps rows `[N, …]` to elements `[N, …]`.
      samples: all rows of this device.
      problem: Gives the policy and the target.
      params: Of the policy.
      num_minibatches: in which the rows are divided.
      num_parts: minibatches × microbatches.

    Raises:
      ConfigError: such a surrogate, and several microbatches.
    """
    of_row, rows = math.prod(samples.mask.shape[1:]), samples.mask.shape[0] // num_minibatches
    several = num_parts > num_minibatches
    if not several and minibatches.in_cache(rows, of_row, problem.target) == 1:
        return of_row
    policy = functools.partial(problem.apply, params._replace(value=None))
    if surrogate.is_row_wise or rows < 2 or _reads_own_row(surrogate, samples, rows, policy):
        return of_row
    if several:
        raise ConfigError(
            "num_microbatches must be 1 with this surrogate, which reads other rows of its "
            "minibatch: in parts it would be another loss. One that reads its own row alone is "
            "marked by surrogates.row_wise(surrogate)"
        )
    warnings.warn(
        "the surrogate reads other rows of its minibatch, which is therefore computed whole; one "
        "that reads its own row alone is marked by surrogates.row_wise(surrogate)",
        stacklevel=2,
    )
    return None


def _reads_own_row(
    surrogate: Checked, samples: Samples, rows: int, policy: Callable[[Any], Any]
) -> bool:
    """Whether the data flow shows that each element depends on its own row alone."""

    def program(rows: int) -> ClosedJaxpr:
        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), samples)
        distribution = None
        if surrogate.reads_distribution:
            distribution, _ = jax.eval_shape(policy, part.inputs)
        return jax.make_jaxpr(surrogate.__call__)(part.log_prob, part, distribution)

    first = program(rows)
    try:
        return data_flow.is_row_wise((first, program(2 * rows)), (rows, 2 * rows))
    except (AssertionError, TypeError, ValueError):  # it computes this number of rows alone
        return False


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
