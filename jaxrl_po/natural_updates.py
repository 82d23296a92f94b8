"""Takes one natural step of the policy in a trust region."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import masked, minibatches, trust_region
from jaxrl_po.config import Number
from jaxrl_po.masked import Mean
from jaxrl_po.trust_region import LineSearchInfo
from jaxrl_po.types import Metrics, PyTree

Surrogate = Callable[[Any, Any], Mean]
Policy = Callable[[PyTree, Any], Any]
Search = Callable[
    [Callable[[PyTree], tuple[jax.Array, jax.Array]], PyTree, PyTree], tuple[PyTree, LineSearchInfo]
]


def trust_region_update(
    surrogate: Surrogate,
    policy: Policy,
    *,
    max_kl: Number,
    damping: Number,
    iterations: int,
    tolerance: Number = 0.0,
    fisher_stride: int = 1,
    num_microbatches: int = 1,
    search: Search,
    of_some: Policy | None = None,
    axis_name: str | None = None,
) -> Callable[[PyTree, Any], tuple[PyTree, Metrics]]:
    """Builds a natural policy step of a length set by KL(old ‖ new) ≤ δ, and a search along it.

    The direction is `x ≈ (F + λI)⁻¹ g` with λ the damping; the step `√(2δ / xᵀ(F + λI)x) · x` is
    passed to `search`. No step is taken where the gradient, the curvature or the KL is not finite,
    or the gradient is zero.

    Args:
      surrogate: `surrogate(distribution, samples) -> Mean`, loss to minimise.
      policy: `policy(params, samples) -> distribution`, with the batch shape of `samples.mask`.
      max_kl: bound δ, nats.
      damping: damping λ, at least 0.
      iterations: largest number of conjugate-gradient iterations.
      tolerance: relative residual at which the iterations stop.
      fisher_stride: stride n: Fisher products use every n-th row, counted over all devices and
        microbatches.
      num_microbatches: number of parts of the rows, to bound memory: gradient, Fisher products and
        search become sums over parts. With several parts each Fisher product recomputes the policy,
        whereas a single part is linearised once.
      search: `search(evaluate, params, step) -> (params, LineSearchInfo)`, such as
        `trust_region.full_step` or `line_search`.
      of_some: policy function for any subset of rows, if `policy` reads complete groups; None if
        `policy` accepts any subset.
      axis_name: device axis that rows are sharded over, or None.

    Returns:
      `update(params, samples) -> (params, metrics)`, whose parameters equal the input bit for bit
      if no step was accepted. Metrics: `exact_kl` (KL(old ‖ new) of the step taken, nats),
      `policy_loss` (surrogate before the step), `gain` and `predicted_gain` of the surrogate,
      `step_size` (norm of the change), `backtracks`, `residual` (‖g − (F + λI)x‖ / ‖g‖),
      `accepted`, `grad_norm`, `skipped` (1 where numbers were not finite).

    Raises:
      ConfigError: rows do not divide into microbatches.
    """

    def update(params: PyTree, samples: Any) -> tuple[PyTree, Metrics]:
        parts = minibatches.split_rows(samples, num_microbatches)
        subset, subset_mask = every(fisher_stride, parts, axis_name)
        old = jax.lax.map(lambda part: jax.lax.stop_gradient(policy(params, part)), parts)

        def pooled(function: Callable[..., Any], *of_parts: Any) -> Any:
            """Sums the result of a function over parts and devices."""
            return masked.psum(minibatches.summed(function, *of_parts), axis_name)

        def evaluate(candidate: PyTree) -> tuple[jax.Array, jax.Array]:
            def measure(part: Any, old: Any) -> tuple[Mean, Mean]:
                distribution = policy(candidate, part)
                return surrogate(distribution, part), masked.total(old.kl(distribution), part.mask)

            objective, kl = pooled(measure, parts, old)
            return -objective.value(), kl.value()

        # Counts do not depend on parameters, so the compiler removes all other work from this pass.
        count = pooled(lambda part: surrogate(policy(params, part), part).count, parts)

        def share(params: PyTree, part: Any) -> jax.Array:
            return surrogate(policy(params, part), part).total / jnp.maximum(count, 1.0)

        def curvature(part: Any, weight: jax.Array) -> Callable[[PyTree], PyTree]:
            read = of_some if of_some and fisher_stride > 1 else policy
            return trust_region.fisher(lambda params: read(params, part), params, weight)

        loss, gradient = pooled(lambda part: jax.value_and_grad(share)(params, part), parts)
        weight = subset_mask / jnp.maximum(
            masked.psum(subset_mask.sum(dtype=float), axis_name), 1.0
        )
        if num_microbatches == 1:  # the policy is linearised once for all products
            linearised = curvature(*jax.tree.map(lambda x: x[0], (subset, weight)))

        def matvec(vector: PyTree) -> PyTree:
            if num_microbatches == 1:
                product = masked.psum(linearised(vector), axis_name)
            else:
                product = pooled(
                    lambda part, weight: curvature(part, weight)(vector), subset, weight
                )
            # Damping is added after the sum over parts and devices: otherwise each part would add a
            # damping term.
            return jax.tree.map(lambda x, v: x + damping * v, product, vector)

        uphill = jax.tree.map(jnp.negative, gradient)
        direction, residual = trust_region.conjugate_gradient(
            matvec, uphill, iterations=iterations, tolerance=tolerance
        )
        step = trust_region.natural_step(direction, matvec, max_kl=max_kl)
        after, info = search(evaluate, params, step)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(loss) & jnp.isfinite(norm) & jnp.isfinite(info.kl)
        metrics = {
            "exact_kl": info.kl,
            "policy_loss": loss,
            "gain": info.gain,
            "predicted_gain": optax.tree.vdot(uphill, step),
            "step_size": optax.tree.norm(jax.tree.map(jnp.subtract, after, params)),
            "backtracks": info.steps.astype(jnp.float32),
            "residual": residual / jnp.where(norm > 0, norm, 1.0),
            "grad_norm": norm,
        }
        # A step that is not taken affects only the metric `skipped`.
        always = {"accepted": info.accepted, "skipped": ~finite}
        metrics = {name: masked.total(x[None], finite[None]) for name, x in metrics.items()}
        return after, metrics | {name: masked.total(x.astype(float)) for name, x in always.items()}

    return update


def every(stride: int, parts: Any, axis_name: str | None) -> tuple[Any, jax.Array]:
    """Selects every n-th row, counted over all parts and devices.

    The numbers of parts and devices do not affect the selection.

    Args:
      stride: n, distance between selected rows.
      parts: samples with a `mask`, leaves `[parts, rows, …]`, in order; the rows of a device follow
        the rows of the previous device.
      axis_name: name of the device axis, or None.

    Returns:
      Selected rows, leaves `[parts, ⌈rows / n⌉, …]`, and their mask, False where a part has one row
      fewer.
    """
    num_parts, rows = parts.mask.shape[:2]
    if rows % stride == 0:  # each part's selection starts at row 0: a slice is enough
        subset = jax.tree.map(lambda x: x[:, ::stride], parts)
        return subset, subset.mask
    device = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    # Index, in each part, of the first row whose global number is a multiple of n.
    first = -(device * num_parts + jnp.arange(num_parts)) * rows % stride
    index = first[:, None] + stride * jnp.arange(-(-rows // stride))[None, :]
    subset = jax.tree.map(
        lambda x: jax.vmap(lambda part, index: part[index])(x, jnp.minimum(index, rows - 1)), parts
    )
    within = (index < rows).reshape(index.shape + (1,) * (subset.mask.ndim - 2))
    return subset, subset.mask & within
