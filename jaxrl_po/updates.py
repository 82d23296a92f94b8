"""Parameter updates: epochs of minibatch gradient steps, or one natural step in a trust region."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl_po import lengths, masked, minibatches, optimizers, trust_region
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.masked import Mean
from jaxrl_po.trust_region import LineSearchInfo
from jaxrl_po.types import Metrics, PyTree, Shorten

Loss = Callable[[PyTree, Any], tuple[tuple[Mean, ...], Metrics]]
Stop = Callable[[Metrics], jax.Array]


class _Carry(NamedTuple):
    params: PyTree
    opt_state: PyTree
    stopped: jax.Array


def gradient_update(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    num_epochs: int = 1,
    num_minibatches: int = 1,
    num_microbatches: int = 1,
    slots: int | None = None,
    shorten: Shorten | None = None,
    in_order: bool = False,
    stop: Stop | None = None,
    axis_name: str | None = None,
) -> Callable[..., tuple[PyTree, PyTree, Metrics]]:
    """Epochs of minibatch gradient steps on the loss `Σ_i total_i / max(count_i, 1)`.

    Totals and counts are summed over microbatches and devices *before* the division, so the
    gradient does not depend on how a minibatch is split. A step whose loss or gradient is not
    finite, or whose minibatch is empty, changes neither parameters nor optimizer state (an empty
    step would still let Adam's momentum move the parameters). Gradients are summed, and added to
    the parameters, in float32 at least, whatever the parameters' type.

    Args:
      loss: `loss(params, samples) -> (means, metrics)`: a tuple of `Mean`s, each divided and then
        added, and a dict of `Mean`s to log. Counts never depend on parameters.
      optimizer: any optax transformation.
      num_epochs: passes over the samples.
      num_minibatches: gradient steps per pass; with 1, rows are not shuffled.
      num_microbatches: parts of each minibatch, to bound memory; gradients are accumulated.
      slots: of a row, T of rows `[T]`: a core of a CPU computes a microbatch in parts that stay in
        its cache, see `minibatches.in_cache`. None, rows in order and rows that are cut by
        `shorten` are computed whole.
      shorten: see `Problem`; with it and several microbatches, the rows of a minibatch are sorted
        by length, and each microbatch is computed up to its longest row. None computes all slots.
      in_order: do not sort rows, which `apply` reads as whole groups.
      stop: `stop(metrics) -> bool []`, evaluated before each step on the minibatch's metrics,
        pooled over devices; once true, neither that step nor any later one is taken. None never
        stops.
      axis_name: device axis over which rows are sharded, or None.

    Returns:
      `update(params, opt_state, samples, key, scale=1.0) -> (params, opt_state, metrics)`. Leaves
      of `samples` lead with the rows. `key` is consumed by the shuffles; `scale` multiplies the
      optimizer's update (a learning-rate schedule in [0, 1]). Metrics are the loss's, pooled over
      the steps, and `grad_norm` (global norm before the optimizer), `skipped` (share of steps with
      a non-finite loss or gradient), `updates` (share of the planned steps that were taken).

    Raises:
      ConfigError: rows do not divide into minibatches, microbatches or devices.
    """
    if num_microbatches == 1:  # the longest of all rows is mostly as long as it may be
        shorten = None
    step_of = _Steps(loss, optimizer, num_microbatches, slots, shorten, in_order, stop, axis_name)

    def update(
        params: PyTree, opt_state: PyTree, samples: Any, key: jax.Array, scale: Number = 1.0
    ) -> tuple[PyTree, PyTree, Metrics]:
        rows = jax.tree.leaves(samples)[0].shape[0]
        chex.assert_tree_shape_prefix(samples, (rows,))
        if rows % (num_minibatches * num_microbatches):
            raise ConfigError(
                f"num_minibatches × num_microbatches = {num_minibatches} × "
                f"{num_microbatches} must divide the {rows} rows"
            )

        steps = num_epochs * num_minibatches
        by_length = shorten is not None and not in_order
        if num_minibatches == 1:
            orders = None
            if by_length:
                samples = lengths.sort(samples)
        else:
            order = jax.vmap(
                lambda key: minibatches.shuffle(key, rows, num_minibatches, axis_name=axis_name)
            )
            orders = order(jax.random.split(key, num_epochs)).reshape(steps, -1)
            if by_length:
                of_rows = lengths.lengths(samples)[orders]
                orders = jnp.take_along_axis(orders, jnp.argsort(of_rows, axis=1), axis=1)
            matrices, unpack = minibatches.pack(samples)

        def rows_of(order: jax.Array | None) -> Any:
            return samples if order is None else unpack([matrix[order] for matrix in matrices])

        # The denominators of all steps at once: on a CPU each sum over devices synchronises them.
        of_all = jax.vmap(lambda order: step_of.counts(params, rows_of(order)), axis_size=steps)
        local = of_all(orders)
        counts = masked.psum(local, axis_name)
        flat = optimizers.flattening(params)

        def step(carry: _Carry, of_step: Any) -> tuple[_Carry, Metrics]:
            order, counts = of_step
            return step_of.take(carry, flat, rows_of(order), counts, scale)

        carry = _Carry(flat.ravel(params), opt_state, jnp.bool_(False))
        body = step if stop is None else _unless_stopped(step)
        carry, metrics = jax.lax.scan(body, carry, (orders, counts))
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
        return flat.unravel(carry.params), carry.opt_state, metrics

    return update


class _Steps(NamedTuple):
    """Steps on one minibatch; fields as the arguments of `gradient_update`."""

    loss: Loss
    optimizer: optax.GradientTransformation
    num_microbatches: int
    slots: int | None
    shorten: Shorten | None
    in_order: bool
    stop: Stop | None
    axis_name: str | None

    def counts(self, params: PyTree, samples: Any) -> tuple[jax.Array, ...]:
        """The denominators of one minibatch, of this device's rows."""
        # They do not depend on parameters, so the compiler removes everything else from this pass.
        return minibatches.summed(
            lambda part: tuple(mean.count for mean in self.loss(params, part)[0]),
            minibatches.split(samples, self.num_microbatches),
        )

    def objective(
        self, params: PyTree, counts: tuple[jax.Array, ...], samples: Any
    ) -> tuple[jax.Array, Metrics]:
        """This device's share of the loss of a minibatch, and its metrics."""
        means, metrics = self.loss(params, samples)
        value = sum(
            mean.total / jnp.maximum(count, 1.0) for mean, count in zip(means, counts, strict=True)
        )
        return jnp.asarray(value), metrics

    def gradients(
        self, params: PyTree, samples: Any, counts: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, PyTree, Metrics]:
        """Global loss and gradient, and the local metrics, of one minibatch."""
        num_parts = self.num_microbatches
        if self.slots is not None and self.shorten is None and not self.in_order:
            rows = jax.tree.leaves(samples)[0].shape[0] // num_parts
            num_parts *= minibatches.in_cache(rows, self.slots)
        parts = minibatches.split(samples, num_parts)

        def of_part(part: Any) -> tuple[jax.Array, PyTree, Metrics]:
            (value, metrics), gradient = jax.value_and_grad(self.objective, has_aux=True)(
                params, counts, part
            )
            return value, optimizers.widened(gradient), metrics

        value, gradient, metrics = minibatches.summed(lengths.cut(of_part, self.shorten), parts)
        value, gradient = masked.psum((value, gradient), self.axis_name)
        return value, gradient, metrics

    def take(
        self,
        carry: _Carry,
        flat: optimizers.Flattening,
        samples: Any,
        counts: tuple[jax.Array, ...],
        scale: Number,
    ) -> tuple[_Carry, Metrics]:
        """One step, unless loss or gradient is not finite, the minibatch empty, or all is over."""
        params = flat.unravel(carry.params)
        value, gradient, metrics = self.gradients(params, samples, counts)
        norm = optimizers.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        stopped = carry.stopped
        if self.stop is not None:
            stopped = self.stop(masked.psum(metrics, self.axis_name))
        take = finite & (sum(counts) > 0) & ~stopped
        proposal, opt_state = self.optimizer.update(gradient, carry.opt_state, params)
        after = jax.tree.map(
            lambda p, u: jnp.where(take, (p + scale * u).astype(p.dtype), p),
            carry.params,
            flat.ravel(proposal),
        )
        opt_state = jax.tree.map(
            lambda new, old: jnp.where(take, new, old), opt_state, carry.opt_state
        )
        metrics = {**metrics, "grad_norm": Mean(norm, jnp.ones_like(norm))}
        # One non-finite step must not turn the pooled metrics into NaN: it counts as `skipped`.
        metrics = jax.tree.map(lambda x: jnp.where(finite, x, 0.0), metrics)
        metrics["skipped"] = Mean((~finite).astype(jnp.float32), jnp.float32(1.0))
        metrics["updates"] = Mean(take.astype(jnp.float32), jnp.float32(1.0))
        return _Carry(after, opt_state, stopped), metrics


def _unless_stopped(step: Callable[..., tuple[_Carry, Metrics]]) -> Callable[..., Any]:
    """The step, which after the stop adds to no metric but `updates`: it is not taken."""

    def guarded(carry: _Carry, of_step: Any) -> tuple[_Carry, Metrics]:
        no_metrics = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(step, carry, of_step)[1]
        )
        no_metrics["updates"] = Mean(jnp.float32(0.0), jnp.float32(1.0))
        # The collectives inside are safe: `stopped` comes from pooled metrics and is equal on all
        # devices.
        return jax.lax.cond(
            carry.stopped, lambda carry, of_step: (carry, no_metrics), step, carry, of_step
        )

    return guarded


Surrogate = Callable[[Any, Any], Mean]
Search = Callable[
    [Callable[[PyTree], tuple[jax.Array, jax.Array]], PyTree, PyTree], tuple[PyTree, LineSearchInfo]
]


def trust_region_update(
    surrogate: Surrogate,
    policy: Callable[[PyTree, Any], Any],
    *,
    max_kl: Number,
    damping: Number,
    iterations: int,
    tolerance: Number = 0.0,
    fisher_stride: int = 1,
    num_microbatches: int = 1,
    search: Search,
    axis_name: str | None = None,
) -> Callable[[PyTree, Any], tuple[PyTree, Metrics]]:
    """One natural policy step, of a length given by KL(old ‖ new) ≤ δ, and a search along it.

    `x ≈ (F + λI)⁻¹ g` with λ the damping, step `√(2δ / xᵀ(F + λI)x) · x`, then `search`. No step is
    taken where the gradient, the curvature or the KL is not finite, or the gradient is zero.

    Args:
      surrogate: `surrogate(distribution, samples) -> Mean`, minimised.
      policy: `policy(params, samples) -> distribution`, batch shape that of `samples.mask`.
      max_kl: δ, nats.
      damping: λ, at least 0.
      iterations: largest number of conjugate-gradient iterations.
      tolerance: relative residual at which they stop.
      fisher_stride: n: Fisher products use every n-th row, counted over all devices and
        microbatches.
      num_microbatches: parts of the rows, to bound memory: gradient, Fisher products and search
        become sums over parts. Each product then recomputes the policy, which is linearised once
        when there is one part.
      search: `search(evaluate, params, step) -> (params, LineSearchInfo)`, such as
        `trust_region.full_step` or `line_search`.
      axis_name: device axis over which rows are sharded, or None.

    Returns:
      `update(params, samples) -> (params, metrics)`, bit for bit the given parameters if no step
      was accepted. Metrics: `exact_kl` (KL(old ‖ new) of the step taken, nats), `policy_loss`
      (before the step), `gain` and `predicted_gain` of the surrogate, `step_size` (norm of the
      change), `backtracks`, `residual` (‖g − (F + λI)x‖ / ‖g‖), `accepted`, `grad_norm`, `skipped`
      (1 where numbers were not finite).

    Raises:
      ConfigError: rows do not divide into microbatches.
    """

    def update(params: PyTree, samples: Any) -> tuple[PyTree, Metrics]:
        parts = minibatches.split(samples, num_microbatches)
        subset, subset_mask = minibatches.every(fisher_stride, parts, axis_name)
        old = jax.lax.map(lambda part: jax.lax.stop_gradient(policy(params, part)), parts)

        def pooled(function: Callable[..., Any], *of_parts: Any) -> Any:
            """Sum over parts and devices."""
            return masked.psum(minibatches.summed(function, *of_parts), axis_name)

        def evaluate(candidate: PyTree) -> tuple[jax.Array, jax.Array]:
            def measure(part: Any, old: Any) -> tuple[Mean, Mean]:
                distribution = policy(candidate, part)
                return surrogate(distribution, part), masked.total(old.kl(distribution), part.mask)

            objective, kl = pooled(measure, parts, old)
            return -objective.value(), kl.value()

        # Counts do not depend on parameters, so the compiler removes all else from this pass.
        count = pooled(lambda part: surrogate(policy(params, part), part).count, parts)

        def share(params: PyTree, part: Any) -> jax.Array:
            return surrogate(policy(params, part), part).total / jnp.maximum(count, 1.0)

        def curvature(part: Any, weight: jax.Array) -> Callable[[PyTree], PyTree]:
            return trust_region.fisher(lambda params: policy(params, part), params, weight)

        loss, gradient = pooled(lambda part: jax.value_and_grad(share)(params, part), parts)
        weight = subset_mask / jnp.maximum(
            masked.psum(subset_mask.sum(dtype=float), axis_name), 1.0
        )
        if num_microbatches == 1:  # linearised here, once for all products
            linearised = curvature(*jax.tree.map(lambda x: x[0], (subset, weight)))

        def matvec(vector: PyTree) -> PyTree:
            if num_microbatches == 1:
                product = masked.psum(linearised(vector), axis_name)
            else:
                product = pooled(
                    lambda part, weight: curvature(part, weight)(vector), subset, weight
                )
            # Damping after the sum over parts and devices: else each of them would add its own.
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
        # A step that is not taken counts as `skipped`, and in nothing else.
        always = {"accepted": info.accepted, "skipped": ~finite}
        metrics = {name: masked.total(x[None], finite[None]) for name, x in metrics.items()}
        return after, metrics | {name: masked.total(x.astype(float)) for name, x in always.items()}

    return update
