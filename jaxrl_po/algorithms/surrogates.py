"""Surrogate objectives for one action or token, which several methods share."""

import dataclasses
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxrl_po import losses, minibatches
from jaxrl_po.algorithms import data_flow
from jaxrl_po.config import ConfigError, Interval, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Distribution, Problem, Samples, SumInParts

CLIP = Interval(0.0, 1.0, True, True)

Surrogate = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]
"""`(log_prob E*, samples) -> elements to minimise E*, and elements to log`, a surrogate objective.
With a further parameter named `distribution` a surrogate also gets the policy's distribution at the
current parameters."""

# Names of fields that a run writes or acts upon, including the fields of its evaluations.
RUN_READS = re.compile(
    "iteration|step|signal|accuracy|return|length|ended|frac_(nonfinite|no_action|one_step|"
    "out_of_range)|(greedy_|test_|time/).*"
)


def policy_gradient(
    log_prob: jax.Array, samples: Samples
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes `−log π · A`, see `losses.policy_gradient`; no element is logged."""
    return losses.policy_gradient(log_prob, samples.advantage), {}


def plain(log_prob: jax.Array, samples: Samples) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Computes `−r · A`, see `losses.surrogate`; no element is logged."""
    return losses.surrogate(log_prob, samples.log_prob, samples.advantage), {}


def sampler_log_prob(samples: Samples) -> jax.Array:
    """Returns log-probabilities under the sampler μ, which by default is the old policy."""
    return samples.columns.get("sampler_log_prob", samples.log_prob)


def clip_fractions(outside: jax.Array, advantage: jax.Array) -> dict[str, jax.Array]:
    """Returns metrics of slots without gradient, clipped from below (A < 0), from above (A > 0)."""
    return {
        "clip_fraction_low": (outside & (advantage < 0)).astype(jnp.float32),
        "clip_fraction_high": (outside & (advantage > 0)).astype(jnp.float32),
    }


def clipped(
    epsilon_low: Number, epsilon_high: Number, dual_clip: Number | None = None
) -> Surrogate:
    """Returns the clipped surrogate, which logs clip fractions; see `losses.clipped_surrogate`."""

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
    """Surrogate that the user declares row-wise."""

    surrogate: Surrogate

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.surrogate)

    def __call__(self, *args: Any, **options: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the result of the wrapped surrogate."""
        return self.surrogate(*args, **options)


def row_wise(surrogate: Surrogate) -> Surrogate:
    """Declares that each element of a surrogate, minimised or logged, reads its own row only.

    Elements must not depend on masked slots of their row or on the number of masked slots, either.
    Minibatches may then be computed in parts, each up to its longest row. The mark is only needed
    where the data flow does not show the property (loops, sums over the slots of a row), and the
    mark is not verified.

    Example:
      >>> marked = row_wise(plain)
      >>> checked(marked).is_row_wise, checked(plain).is_row_wise
      (True, False)
    """
    return RowWise(surrogate)


class Checked(NamedTuple):
    """Surrogate whose result is checked while it is traced.

    Attributes:
      function: surrogate of the user or of the library.
      reads_distribution: True if the function has a parameter named `distribution`.
      is_row_wise: True if the function is marked by `row_wise`.
    """

    function: Surrogate
    reads_distribution: bool
    is_row_wise: bool

    def __call__(
        self, log_prob: jax.Array, samples: Samples, distribution: Distribution | None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns elements to minimise, and elements to log as floats."""
        given = {"distribution": distribution} if self.reads_distribution else {}
        result, shape = self.function(log_prob, samples, **given), log_prob.shape
        if not (
            isinstance(result, tuple)
            and len(result) == 2
            and isinstance(result[1], dict)
            and all(shape_of(x) == shape for x in (result[0], *result[1].values()))
        ):
            raise ConfigError(
                "surrogate",
                "must return (elements to minimise, dict of elements to log), each of the shape "
                f"{list(shape)} of log_prob, got {form(result)}; log nothing with {{}}",
            )
        elements, logged = result
        if not jnp.issubdtype(elements.dtype, jnp.floating):
            raise ConfigError(
                "surrogate", f"must return elements that are floats, got {elements.dtype}"
            )
        for name in logged:
            if not isinstance(name, str) or RUN_READS.fullmatch(name):
                raise ConfigError(
                    "surrogate", f"must log {name} under another name, a text that no run reads"
                )
        return elements, {
            name: x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)
            for name, x in logged.items()
        }


def checked(surrogate: Surrogate) -> Checked:
    """Reads the parameters and the mark of a surrogate.

    Raises:
      ConfigError: the surrogate takes `distribution` as one of its first two parameters.
    """
    parameters = inspect.signature(surrogate).parameters
    if "distribution" in list(parameters)[:2]:
        raise ConfigError(
            "surrogate",
            "must take (log_prob, samples), and after them a distribution if it reads one; the "
            "surrogate of a natural step takes (distribution, samples)",
        )
    asked = parameters.get("distribution")
    # Parameters bound by functools.partial.
    bound = "distribution" in getattr(surrogate, "keywords", {})
    marked = isinstance(getattr(surrogate, "func", surrogate), RowWise)
    by_name = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return Checked(surrogate, asked is not None and asked.kind in by_name and not bound, marked)


class Division(Protocol):
    """Settings of a method that divide a minibatch into parts."""

    @property
    def num_microbatches(self) -> int:
        """Number of parts of a minibatch."""

    @property
    def axis_name(self) -> str | None:
        """Device axis that the rows are sharded over, or None."""


class Parts(NamedTuple):
    """Ways to compute a minibatch in parts, in the form that `updates.gradient_update` takes.

    Attributes:
      slots: number of elements in a row, or None if a minibatch must not be divided.
      by_length: problem's function that sums by length, or None if rows must not be cut.
    """

    slots: int | None
    by_length: SumInParts | None


def parts(
    surrogate: Checked,
    samples: Samples,
    problem: Problem,
    params: ActorCritic,
    config: Division,
    num_minibatches: int = 1,
) -> Parts:
    """Returns the allowed ways to compute a minibatch in parts with a surrogate.

    A minibatch must not be divided if an element of the surrogate, minimised or logged, or its
    gradient depends on other rows, for example through a quantile or a mean over the minibatch.
    Rows must not be cut after their last token if an element depends on other slots of its row.
    Each device checks its own rows.

    Args:
      surrogate: surrogate that maps rows `[N, …]` to elements `[N, …]`.
      samples: all rows of this device.
      problem: source of the policy, the target and the function that sums by length.
      params: parameters of the policy.
      config: settings of the method.
      num_minibatches: number of minibatches in an epoch.

    Raises:
      ConfigError: the surrogate reads other rows, and there are several microbatches.
    """
    of_row, rows = math.prod(samples.mask.shape[1:]), samples.mask.shape[0] // num_minibatches
    by_length, num_microbatches = problem.fast_paths.by_length, config.num_microbatches
    several_devices = config.axis_name is not None and jax.lax.axis_size(config.axis_name) > 1
    num_parts = max(num_microbatches, minibatches.in_cache(rows, of_row, problem.target))
    if surrogate.is_row_wise or (num_parts == 1 and not several_devices):
        return Parts(of_row, by_length)
    policy = functools.partial(problem.apply, params._replace(value=None))
    trace = functools.partial(_trace, surrogate, samples, policy)
    part, whole = max(rows // num_parts, 2), max(rows, 2)
    if not _are_apart(trace, (part if part < whole else 2 * whole, whole), axis=0):
        if num_microbatches > 1:
            raise ConfigError(
                "num_microbatches",
                "must be 1 with this surrogate, which reads other rows of its minibatch; if it "
                "reads its own row alone, mark it by surrogates.row_wise(surrogate)",
            )
        marked = "one that reads its own row alone is marked by surrogates.row_wise(surrogate)"
        if num_parts > 1:
            warnings.warn(
                "the surrogate reads other rows of its minibatch, which is therefore computed "
                f"whole; {marked}",
                stacklevel=2,
            )
        # A surrogate that reduces over the device axis reads other devices on purpose.
        elif not any("Axis" in type(x).__name__ for x in trace(whole, 0).effects):
            warnings.warn(
                "the surrogate reads other rows of its minibatch, of which a device has its own "
                f"alone; {marked}",
                stacklevel=2,
            )
        return Parts(None, None)
    steps = of_row if samples.mask.ndim > 1 else 1
    if by_length is None or num_microbatches == 1 or steps == 1:
        return Parts(of_row, by_length)
    cut = _are_apart(trace, (2 * steps, steps), axis=1)
    return Parts(of_row, by_length if cut else None)


def _are_apart(trace: Callable[..., ClosedJaxpr], sizes: tuple[int, int], axis: int) -> bool:
    """Returns whether the data flow shows that elements along an axis are independent."""
    whole = trace(sizes[1], axis)
    try:
        return data_flow.is_row_wise((trace(sizes[0], axis), whole), sizes)
    except (AssertionError, TypeError, ValueError):  # the surrogate accepts only one size
        return False


def _trace(
    surrogate: Checked, samples: Samples, policy: Callable[[Any], Any], size: int, axis: int
) -> ClosedJaxpr:
    """Traces the elements of a surrogate and their gradient for one number of rows or slots."""

    def resized(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)

    part: Samples = jax.tree.map(resized, samples._replace(inputs=None, measured=None))
    whole = jax.eval_shape(lambda: samples.inputs)
    part = part._replace(inputs=whole if axis else jax.tree.map(resized, whole))
    distribution = None
    if surrogate.reads_distribution:
        distribution, _ = jax.eval_shape(policy, part.inputs)

    def program(log_prob: jax.Array, part: Samples, distribution: Any, weight: jax.Array) -> Any:
        elements, pull_back, logged = jax.vjp(
            lambda log_prob: surrogate(log_prob, part, distribution), log_prob, has_aux=True
        )
        return elements, logged, pull_back(weight.astype(elements.dtype))

    return jax.make_jaxpr(program)(part.log_prob, part, distribution, part.log_prob)


def shape_of(x: Any) -> tuple[int, ...] | None:
    """Returns the shape of an array, and None for any other value."""
    return getattr(x, "shape", None)


def form(result: Any) -> str:
    """Returns a short description of a surrogate's result by types and shapes."""
    if isinstance(result, Mean):
        return f"Mean of {form(result.total)} and {form(result.count)}"
    if isinstance(result, tuple):
        return f"({', '.join(map(form, result))})"
    if isinstance(result, dict):
        return f"{{{', '.join(f'{name}: {form(x)}' for name, x in result.items())}}}"
    return f"array {list(result.shape)}" if hasattr(result, "shape") else type(result).__name__
