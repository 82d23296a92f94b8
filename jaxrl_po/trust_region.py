"""Computes steps bounded in KL(old ‖ new): Fisher products, conjugate gradient and line search.

Parameters may be any pytree. KL always means KL(old ‖ new), in nats, averaged over states under the
old policy; the Hessian of the KL at the old parameters is the Fisher matrix `F = E[∇log π ∇log
πᵀ]`, which is never formed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number, with_field_docs

Tree = Any


def fisher_vector_product(
    kl_fn: Callable[[Tree], jax.Array],
    params: Tree,
    vector: Tree,
    *,
    damping: Number = 0.0,
    axis_name: str | None = None,
) -> Tree:
    """Computes `(F + damping · I) v`: the Hessian of the mean KL times `v`, forward over reverse.

    Args:
      kl_fn: `kl_fn(params) -> []`, mean KL(old ‖ params) in nats, with its minimum at `params`:
        build the function from the distribution at `params`. On several devices `kl_fn` returns the
        local share, local total / global count.
      params: θ_old, float leaves of any shape.
      vector: vector v, a tree like `params`.
      damping: damping constant ≥ 0, in nats per squared unit of a parameter; TRPO implementations
        use 0.1.
      axis_name: device axis that the local products are summed over, before damping, or None.

    Returns:
      Product as a tree like `params`. Schulman et al. 2015 (TRPO), appendix C.1; Pearlmutter 1994.

    Example:
      >>> bowl = lambda x: 0.5 * jnp.sum(jnp.array([1.0, 4.0]) * x**2)
      >>> fisher_vector_product(bowl, jnp.zeros(2), jnp.array([1.0, 2.0]), damping=0.5).tolist()
      [1.5, 9.0]
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(params, vector)
    product = jax.jvp(jax.grad(kl_fn), (params,), (vector,))[1]
    # Damping is added after the sum: otherwise every device would add a damping term.
    return _add(masked.psum(product, axis_name), vector, damping)


def fisher(
    policy: Callable[[Tree], Any],
    params: Tree,
    weight: jax.Array,
    *,
    damping: Number = 0.0,
    axis_name: str | None = None,
) -> Callable[[Tree], Tree]:
    """Builds `v -> (F + damping · I) v` with `F = Jᵀ H J`, a third of a second derivative's cost.

    J is the Jacobian of the distribution's parameters (logits, or means and log σ) in θ, and H is
    the Hessian of the exact KL in the distribution's parameters. The other term of the chain rule
    vanishes, because the gradient of the KL is 0 at the old policy; so the product equals
    `fisher_vector_product`. The policy is linearised once for all products.

    Args:
      policy: `policy(params) -> distribution`, a pytree with `kl`, batch shape `E*`; leaves of the
        distribution that are not floats (the actions of a list) must not depend on the parameters.
      params: θ_old, float leaves of any shape.
      weight: `E*`, weights of the mean KL, whose sum over all devices is 1.
      damping: damping constant, at least 0.
      axis_name: device axis that products are summed over, before damping, or None.

    Returns:
      Function that computes the product. Schulman et al. 2015 (TRPO), appendix C.1.

    Example:
      >>> from jaxrl_po.distributions import Categorical
      >>> product = fisher(lambda logits: Categorical(logits[None]), jnp.zeros(2), jnp.ones(1))
      >>> product(jnp.array([1.0, 0.0])).tolist()
      [0.25, -0.25]
    """
    old, jvp, listed = jax.linearize(lambda params: _floats(policy(params)), params, has_aux=True)
    vjp = jax.linear_transpose(jvp, params)

    def kl(floats: Any) -> jax.Array:
        divergence = _joined(old, listed).kl(_joined(floats, listed))
        chex.assert_equal_shape([divergence, weight])
        return jnp.sum(divergence * weight)

    def product(vector: Tree) -> Tree:
        chex.assert_trees_all_equal_shapes_and_dtypes(params, vector)
        hessian_product = jax.jvp(jax.grad(kl), (old,), (jvp(vector),))[1]
        return _add(masked.psum(vjp(hessian_product)[0], axis_name), vector, damping)

    return product


def _floats(tree: Any) -> tuple[Any, Any]:
    """Splits a tree into its float leaves and its other leaves.

    Each tree has None for the other's leaves.
    """
    return (
        jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, tree),
        jax.tree.map(lambda x: None if jnp.issubdtype(x.dtype, jnp.floating) else x, tree),
    )


def _joined(floats: Any, others: Any) -> Any:
    """Joins the two trees that `_floats` returned."""
    return jax.tree.map(
        lambda x, y: y if x is None else x, floats, others, is_leaf=lambda x: x is None
    )


def conjugate_gradient(
    matvec: Callable[[Tree], Tree], b: Tree, *, iterations: int, tolerance: Number = 0.0
) -> tuple[Tree, jax.Array]:
    """Solves `A x = b` for a symmetric positive definite `A`, from x = 0.

    The iteration stops at `‖b − A x‖ ≤ tolerance · ‖b‖`, and before an iteration whose curvature
    pᵀAp is not positive or whose numbers are not finite; the last good x is returned. A right-hand
    side b = 0 gives x = 0.

    Args:
      matvec: `matvec(v) -> A v`; v and the product are trees like `b`.
      b: right-hand side, float leaves of any shape.
      iterations: largest number of products, static, at least 1.
      tolerance: relative residual at which the iteration stops, at least 0.

    Returns:
      Solution as a tree like `b`, and `[]` the norm of the residual `b − A x` by the recursion.
      Hestenes and Stiefel 1952.

    Raises:
      ValueError: `iterations` is below 1.

    Example:
      >>> diagonal, b = jnp.array([1.0, 4.0]), jnp.array([1.0, 2.0])
      >>> x, residual = conjugate_gradient(lambda v: diagonal * v, b, iterations=2)
      >>> [round(float(y), 4) for y in (*x, residual)]
      [1.0, 0.5, 0.0]
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    chex.assert_trees_all_equal_shapes(b, jax.eval_shape(matvec, b))
    squared_norm = _dot(b, b)
    threshold = jnp.square(tolerance) * squared_norm

    def unsolved(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, _, squared, failed = carry
        return (step < iterations) & (squared > threshold) & ~failed

    def iterate(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, x, residual, direction, squared, _ = carry
        product = matvec(direction)
        curvature = _dot(direction, product)
        # A step without positive curvature is discarded below; a divisor of 1 avoids dividing by 0.
        alpha = squared / jnp.where(curvature > 0, curvature, 1.0)
        next_residual = _add(residual, product, -alpha)
        next_squared = _dot(next_residual, next_residual)
        failed = ~(
            (curvature > 0)
            & jnp.isfinite(curvature)
            & jnp.isfinite(alpha)
            & jnp.isfinite(next_squared)
        )
        next_direction = _add(next_residual, direction, next_squared / squared)
        new = (_add(x, direction, alpha), next_residual, next_direction, next_squared)
        return step + 1, *_select(failed, (x, residual, direction, squared), new), failed

    start = (jnp.int32(0), jax.tree.map(jnp.zeros_like, b), b, b, squared_norm, jnp.bool_(False))
    _, x, _, _, squared_norm, _ = jax.lax.while_loop(unsolved, iterate, start)
    return x, jnp.sqrt(squared_norm)


def natural_step(direction: Tree, matvec: Callable[[Tree], Tree], *, max_kl: Number) -> Tree:
    """Computes `√(2δ / (xᵀFx)) · x`: the longest step along `x = F⁻¹g` with `½ sᵀFs ≤ δ`.

    In this formula xᵀFx = gᵀF⁻¹g; dividing by gᵀFg instead is a common mistake.

    Args:
      direction: direction x, a tree.
      matvec: `matvec(v) -> F v`, with the damping.
      max_kl: bound δ, nats, above 0.

    Returns:
      Step as a tree like `direction`; zeros where xᵀFx is not positive or not finite. Schulman et
      al. 2015 (TRPO), appendix C.

    Example:
      >>> natural_step(jnp.array([4.0, 0.0]), lambda v: 0.5 * v, max_kl=2.25).tolist()
      [3.0, 0.0]
    """
    curvature = _dot(direction, matvec(direction))
    scale = jnp.sqrt(2.0 * max_kl / jnp.where(curvature > 0, curvature, 1.0))
    usable = (curvature > 0) & jnp.isfinite(curvature) & jnp.isfinite(scale)
    return jax.tree.map(lambda x: jnp.where(usable, scale * x, 0.0).astype(x.dtype), direction)


@with_field_docs
class LineSearchInfo(NamedTuple):
    """Result of a line search, apart from the parameters.

    Attributes:
      accepted: `[]`, bool; False if no candidate passed and the parameters are unchanged.
      kl: `[]`, nats, KL(old ‖ new) at the returned parameters.
      gain: `[]`, surrogate at the returned parameters minus the initial surrogate; 0 if no
        candidate was accepted.
      steps: `[]`, int32, number of rejected candidates: an accepted step is `backtrack ** steps`
        times the full step.
    """

    accepted: jax.Array
    kl: jax.Array
    gain: jax.Array
    steps: jax.Array


def line_search(
    evaluate: Callable[[Tree], tuple[jax.Array, jax.Array]],
    params: Tree,
    step: Tree,
    *,
    max_kl: Number,
    backtrack: Number = 0.8,
    iterations: int = 10,
) -> tuple[Tree, LineSearchInfo]:
    """Returns the first of `params + backtrackᵏ · step`, k = 0, 1, …, that passes, else `params`.

    A candidate passes if `kl ≤ max_kl` and its surrogate is larger than at `params`; a candidate
    whose surrogate or KL is not finite never passes.

    Args:
      evaluate: `evaluate(params) -> (surrogate to maximise [], KL(old ‖ params) [] in nats)`,
        global over devices.
      params: θ_old, a tree.
      step: full step, a tree like `params`.
      max_kl: bound δ, nats.
      backtrack: factor on the step after each rejected candidate, in (0, 1).
      iterations: largest number of candidates, static, at least 1.

    Returns:
      New parameters, equal to `params` bit for bit if no candidate passed, and `LineSearchInfo`.
      Schulman et al. 2015 (TRPO), appendix C.

    Raises:
      ValueError: `iterations` is below 1.

    Example:
      >>> x, info = line_search(
      ...     lambda x: (x, jnp.square(x)), jnp.float32(0.0), jnp.float32(1.0),
      ...     max_kl=0.5, backtrack=0.5,
      ... )
      >>> float(x), bool(info.accepted), int(info.steps)
      (0.5, True, 1)
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    chex.assert_trees_all_equal_shapes(params, step)
    moves = _dot(step, step) > 0

    def unfinished(carry: tuple[Tree, jax.Array, LineSearchInfo]) -> jax.Array:
        _, _, info = carry
        return ~info.accepted & (info.steps < iterations)

    def attempt(
        carry: tuple[Tree, jax.Array, LineSearchInfo],
    ) -> tuple[Tree, jax.Array, LineSearchInfo]:
        # The first evaluation is at `params`, by the same program: another program may round
        # differently, and find a gain where no parameter changed.
        _, start, info = carry
        first = info.steps < 0
        candidate = _select(first, params, _add(params, step, backtrack**info.steps))
        surrogate, kl = evaluate(candidate)
        chex.assert_rank([surrogate, kl], 0)
        gain = surrogate - start
        finite = jnp.isfinite(surrogate) & jnp.isfinite(kl)
        accepted = ~first & moves & finite & (kl <= max_kl) & (gain > 0)
        passed = LineSearchInfo(accepted, kl, gain, info.steps)
        missed = info._replace(kl=jnp.where(first, kl, info.kl), steps=info.steps + 1)
        after, found = _select(accepted, (candidate, passed), (params, missed))
        return after, jnp.where(first, surrogate, start), found

    start, kl = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(evaluate, params)
    )
    none = LineSearchInfo(jnp.bool_(False), kl, jnp.zeros_like(start), jnp.int32(-1))
    after, _, info = jax.lax.while_loop(unfinished, attempt, (params, start, none))
    return after, info


def full_step(
    evaluate: Callable[[Tree], tuple[jax.Array, jax.Array]], params: Tree, step: Tree
) -> tuple[Tree, LineSearchInfo]:
    """Takes `params + step` if surrogate and KL are finite, as the natural policy gradient does.

    Args:
      evaluate: `(params) -> (surrogate, KL)`, see `line_search`.
      params: θ_old, a tree.
      step: full step, a tree like `params`.

    Returns:
      Parameters and `LineSearchInfo`, see `line_search`; a zero step counts as not accepted.

    Example:
      >>> evaluate = lambda x: (x, jnp.square(x))
      >>> x, info = full_step(evaluate, jnp.float32(0.0), jnp.float32(1.0))
      >>> float(x), bool(info.accepted), float(info.kl)
      (1.0, True, 1.0)
    """
    chex.assert_trees_all_equal_shapes(params, step)
    start, start_kl = evaluate(params)
    candidate = _add(params, step, 1.0)
    surrogate, kl = evaluate(candidate)
    passed = jnp.isfinite(surrogate) & jnp.isfinite(kl) & (_dot(step, step) > 0)
    accepted = LineSearchInfo(passed, kl, surrogate - start, jnp.int32(0))
    rejected = LineSearchInfo(jnp.bool_(False), start_kl, jnp.zeros_like(start), jnp.int32(1))
    return _select(passed, (candidate, accepted), (params, rejected))


def _dot(a: Tree, b: Tree) -> jax.Array:
    # A `vdot` is avoided, since some accelerators compute `vdot` in lower precision than float32.
    return sum(
        jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), start=jnp.float32(0.0)
    )


def _add(a: Tree, b: Tree, scale: Number) -> Tree:
    return jax.tree.map(lambda x, y: (x + scale * y).astype(x.dtype), a, b)


def _select(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
