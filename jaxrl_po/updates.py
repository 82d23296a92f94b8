"""Updates parameters by gradient: epochs of minibatch steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from jaxrl_po import masked, minibatches, optimizers
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, Number
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Metrics, PyTree, Samples, SumInParts

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
    by_length: SumInParts | None = None,
    stop: Stop | None = None,
    mask_of: Callable[[Any], jax.Array] | None = None,
    target: Target | None = None,
    axis_name: str | None = None,
) -> Callable[..., tuple[PyTree, PyTree, Metrics]]:
    """Builds epochs of minibatch gradient steps on the loss `Σ_i total_i / max(count_i, 1)`.

    Totals and counts are summed over microbatches and devices *before* the division, so the
    gradient does not depend on how a minibatch is split. A gradient step whose loss or gradient is
    not finite, or whose minibatch is empty, changes neither parameters nor optimizer state (an
    empty step would still let Adam's momentum move the parameters). A minibatch is empty if its
    mask is False everywhere, or all counts are 0; counts alone do not decide, since an aggregate
    may count masked rows (`losses.fixed_length_mean`). Gradients are summed, and added to the
    parameters, in float32 at least, whatever the parameters' type.

    Args:
      loss: `loss(params, samples) -> (means, metrics)`: a tuple of `Mean`s, each divided and then
        added, and a dict of `Mean`s for the log. Counts of these means never depend on parameters.
      optimizer: any optax transformation.
      num_epochs: number of passes over the samples.
      num_minibatches: number of gradient steps per pass; with 1, rows are not shuffled.
      num_microbatches: number of parts of each minibatch, to bound memory; gradients are
        accumulated over parts.
      slots: number of slots of a row, T for rows `[T]`: a core of a CPU computes a microbatch in
        parts that stay in its cache, see `minibatches.in_cache`. With None a microbatch is computed
        as one part.
      by_length: function that sums by length, see `FastPaths`, over several microbatches, each
        computed up to its longest row. With None all slots are computed.
      stop: `stop(metrics) -> bool []`, evaluated before each step on the minibatch's metrics,
        pooled over devices; once true, the step and all later steps are skipped. With None the
        update never stops early.
      mask_of: `mask_of(samples) -> [N, …]`, bool, returns the mask of the samples. None takes the
        mask of `Samples`; in samples of another type every row counts.
      target: platform and devices of the program; None takes operations that suit every platform.
      axis_name: device axis that rows are sharded over, or None.

    Returns:
      `update(params, opt_state, samples, key, scale=1.0) -> (params, opt_state, metrics)`, function
      that runs the epochs. Frozen parameters and constants of an `ActorCritic` are not trained.
      Leaves of `samples` lead with the rows. `key` is consumed by the shuffles; `scale` multiplies
      the optimizer's update (a learning-rate schedule in [0, 1]). Metrics are the metrics of the
      loss, pooled over the steps, and `grad_norm` (global norm before the optimizer), `skipped`
      (share of steps with a non-finite loss or gradient), `updates` (share of the planned steps
      that were taken).

    Raises:
      ConfigError: rows do not divide into minibatches, microbatches or devices.
    """
    if num_microbatches == 1:  # the longest row of all mostly has full length
        by_length = None

    def update(
        params: PyTree, opt_state: PyTree, samples: Any, key: jax.Array, scale: Number = 1.0
    ) -> tuple[PyTree, PyTree, Metrics]:
        whole = _untrained(params)
        params = params.without_frozen() if isinstance(params, ActorCritic) else params
        step_of = _Steps(
            lambda params, samples: loss(whole(params), samples),
            *(optimizer, num_microbatches, slots, by_length, stop, target, axis_name),
        )
        rows = jax.tree.leaves(samples)[0].shape[0]
        chex.assert_tree_shape_prefix(samples, (rows,))
        if rows % (num_minibatches * num_microbatches):
            raise ConfigError(
                "num_minibatches",
                f"must divide the {rows} rows, and so must its product with num_microbatches, got "
                f"{num_minibatches} × {num_microbatches}",
            )

        steps = num_epochs * num_minibatches
        orders = None
        if num_minibatches > 1:
            order = jax.vmap(
                lambda key: minibatches.shuffle(key, rows, num_minibatches, axis_name=axis_name)
            )
            orders = order(jax.random.split(key, num_epochs)).reshape(steps, -1)
            matrices, unpack = minibatches.pack(samples)

        def rows_of(order: jax.Array | None) -> Any:
            return samples if order is None else unpack([matrix[order] for matrix in matrices])

        def measure(order: jax.Array | None) -> tuple[tuple[jax.Array, ...], jax.Array]:
            rows = rows_of(order)
            some = jnp.bool_(True)
            if mask_of is not None or isinstance(rows, Samples):
                some = (rows.mask if mask_of is None else mask_of(rows)).any()
            return step_of.counts(params, rows), some.astype(jnp.float32)

        # Counts are computed for all steps at once: on a CPU each sum over devices synchronises the
        # devices.
        counts, unmasked = masked.psum(jax.vmap(measure, axis_size=steps)(orders), axis_name)
        nonempty = (sum(counts) > 0) & (unmasked > 0)
        flat = optimizers.flattening(params, target)

        def step(carry: _Carry, of_step: Any) -> tuple[_Carry, Metrics]:
            order, counts, nonempty = of_step
            return step_of.take(carry, flat, rows_of(order), counts, nonempty, scale)

        carry = _Carry(flat.ravel(params), opt_state, jnp.bool_(False))
        body = step if stop is None else _unless_stopped(step)
        carry, metrics = jax.lax.scan(body, carry, (orders, counts, nonempty))
        metrics = jax.tree.map(lambda x: x.sum(0), metrics)
        return whole(flat.unravel(carry.params)), carry.opt_state, metrics

    return update


def _untrained(params: PyTree) -> Callable[[PyTree], PyTree]:
    """Returns a function that adds an `ActorCritic`'s untrained fields to trained parameters."""
    if not isinstance(params, ActorCritic):
        return lambda trained: trained
    beside = {"frozen": params.frozen, "constants": params.constants}
    return lambda trained: trained._replace(**beside)


class _Steps(NamedTuple):
    """Steps on one minibatch; the fields are arguments of `gradient_update`."""

    loss: Loss
    optimizer: optax.GradientTransformation
    num_microbatches: int
    slots: int | None
    by_length: SumInParts | None
    stop: Stop | None
    target: Target | None
    axis_name: str | None

    def counts(self, params: PyTree, samples: Any) -> tuple[jax.Array, ...]:
        """Returns the denominators of one minibatch, counted over this device's rows."""

        def counts(part: Any) -> tuple[jax.Array, ...]:
            return tuple(mean.count for mean in self.loss(params, part)[0])

        # Counts do not depend on parameters: without the unused computation, this pass computes no
        # loss.
        return minibatches.sum_in_parts(
            lambda part: minibatches.without_dead_code(counts, part)(part),
            samples,
            self.num_microbatches,
        )

    def objective(
        self, params: PyTree, counts: tuple[jax.Array, ...], samples: Any
    ) -> tuple[jax.Array, Metrics]:
        """Returns this device's share of the loss of a minibatch, and the loss's metrics."""
        means, metrics = self.loss(params, samples)
        value = sum(
            mean.total / jnp.maximum(count, 1.0) for mean, count in zip(means, counts, strict=True)
        )
        return jnp.asarray(value), metrics

    def gradients(
        self, params: PyTree, samples: Any, counts: tuple[jax.Array, ...]
    ) -> tuple[jax.Array, PyTree, Metrics]:
        """Computes global loss and gradient, and the local metrics, of one minibatch."""
        num_parts, sum_in_parts = self.num_microbatches, self.by_length or minibatches.sum_in_parts
        if self.slots is not None and self.by_length is None:
            rows = jax.tree.leaves(samples)[0].shape[0] // num_parts
            num_parts *= minibatches.in_cache(rows, self.slots, self.target)

        def of_part(part: Any) -> tuple[jax.Array, PyTree, Metrics]:
            (value, metrics), gradient = jax.value_and_grad(self.objective, has_aux=True)(
                params, counts, part
            )
            return value, optimizers.widened(gradient), metrics

        value, gradient, metrics = sum_in_parts(of_part, samples, num_parts)
        value, gradient = masked.psum((value, gradient), self.axis_name)
        return value, gradient, metrics

    def take(
        self,
        carry: _Carry,
        flat: optimizers.Flattening,
        samples: Any,
        counts: tuple[jax.Array, ...],
        nonempty: jax.Array,
        scale: Number,
    ) -> tuple[_Carry, Metrics]:
        """Takes one step unless loss or gradient is not finite, the minibatch empty, or stopped."""
        params = flat.unravel(carry.params)
        value, gradient, metrics = self.gradients(params, samples, counts)
        norm = optimizers.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        stopped = carry.stopped
        if self.stop is not None:
            stopped = self.stop(masked.psum(metrics, self.axis_name))
        take = finite & nonempty & ~stopped
        proposal, opt_state = self.optimizer.update(gradient, carry.opt_state, params)
        after = jax.tree.map(
            lambda p, u: jnp.where(take, (p + scale * u).astype(p.dtype), p),
            carry.params,
            flat.ravel(proposal),
        )
        opt_state = jax.tree.map(
            lambda new, old: jnp.where(take, new, old), opt_state, carry.opt_state
        )
        metrics = masked.merge(metrics, {"grad_norm": Mean(norm, jnp.ones_like(norm))})
        # One step that is not finite must not turn the pooled metrics into NaN: the step counts as
        # `skipped`.
        metrics = jax.tree.map(lambda x: jnp.where(finite, x, 0.0), metrics)
        steps = {"skipped": ~finite, "updates": take}
        shares = {name: masked.total(x.astype(jnp.float32)) for name, x in steps.items()}
        return _Carry(after, opt_state, stopped), masked.merge(metrics, shares)


def _unless_stopped(step: Callable[..., tuple[_Carry, Metrics]]) -> Callable[..., Any]:
    """Wraps a step: after the stop it is not taken and affects only the metric `updates`."""

    def guarded(carry: _Carry, of_step: Any) -> tuple[_Carry, Metrics]:
        traced, (_, shapes) = minibatches.traced_once(step, carry, of_step)
        no_metrics = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
        no_metrics["updates"] = Mean(jnp.float32(0.0), jnp.float32(1.0))
        # The collectives inside the branch are safe: `stopped` comes from pooled metrics and is
        # equal on all devices.
        return jax.lax.cond(
            carry.stopped, lambda carry, of_step: (carry, no_metrics), traced, carry, of_step
        )

    return guarded
