"""Steps bounded in KL(old ‖ new) rather than in parameters: Fisher products, conjugate gradient, the natural step, line search.

Every function takes any pytree of parameters. KL is KL(old ‖ new) throughout, in nats, averaged
over states under the old policy; its Hessian at the old parameters is the Fisher matrix
`F = E[∇log π ∇log πᵀ]`, which is never formed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import Number

Tree = Any


def fisher_vector_product(
    kl_fn: Callable[[Tree], jax.Array],
    params: Tree,
    vector: Tree,
    *,
    damping: Number = 0.0,
    axis_name: str | None = None,
) -> Tree:
    """`(F + damping · I) v`, the Hessian of the mean KL times `v`, forward over reverse; the matrix is never formed.

    Args:
      kl_fn: `kl_fn(params) -> []`, mean KL(old ‖ params) in nats, whose minimum is at `params`:
        build it from the distribution at `params` itself. Over devices it returns the local share,
        local total / global count.
      params: θ_old, float leaves of any shape.
      vector: a tree like `params`.
      damping: at least 0, in nats per parameter unit squared; TRPO's implementations take 0.1.
      axis_name: device axis over which the products of the local shares are summed, before the
        damping, or None.

    Returns:
      A tree like `params`. Source: Schulman et al. 2015 (TRPO), appendix C.1; Pearlmutter 1994.

    Example:
      >>> import jax.numpy as jnp
      >>> bowl = lambda x: 0.5 * jnp.sum(jnp.array([1.0, 4.0]) * x**2)
      >>> fisher_vector_product(bowl, jnp.zeros(2), jnp.array([1.0, 2.0]), damping=0.5).tolist()
      [1.5, 9.0]
    """
    chex.assert_trees_all_equal_shapes_and_dtypes(params, vector)
    product = jax.jvp(jax.grad(kl_fn), (params,), (vector,))[1]
    return _add(masked.psum(product, axis_name), vector, damping)


def fisher(
    policy: Callable[[Tree], Any],
    params: Tree,
    weight: jax.Array,
    *,
    damping: Number = 0.0,
    axis_name: str | None = None,
) -> Callable[[Tree], Tree]:
    """`v -> (F + damping · I) v` through the distribution, `F = Jᵀ H J`: the same product for a third of the work.

    J is the Jacobian of the distribution's own parameters (logits, or means and log σ), H the
    Hessian of the exact KL in them. Equal to `fisher_vector_product`, since the KL's gradient in
    the distribution vanishes at the old policy and the term that the chain rule adds to JᵀHJ with
    it. The policy is linearised once for all products.

    Args:
      policy: `policy(params) -> distribution`, a pytree of float leaves with `kl`, batch shape
        `E*`.
      params: θ_old, float leaves of any shape.
      weight: `E*`, of each row in the mean KL; sums to 1 (over all devices).
      damping: at least 0.
      axis_name: device axis over which products are summed, before the damping, or None.

    Returns:
      The product as a function. Source: Schulman et al. 2015 (TRPO), appendix C.1.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxrl_po.distributions import Categorical
      >>> product = fisher(lambda logits: Categorical(logits[None]), jnp.zeros(2), jnp.ones(1))
      >>> product(jnp.array([1.0, 0.0])).tolist()
      [0.25, -0.25]
    """
    old, push = jax.linearize(policy, params)
    pull = jax.linear_transpose(push, params)

    def kl(distribution: Any) -> jax.Array:
        divergence = old.kl(distribution)
        chex.assert_equal_shape([divergence, weight])
        return jnp.sum(divergence * weight)

    def product(vector: Tree) -> Tree:
        chex.assert_trees_all_equal_shapes_and_dtypes(params, vector)
        curved = jax.jvp(jax.grad(kl), (old,), (push(vector),))[1]
        return _add(masked.psum(pull(curved)[0], axis_name), vector, damping)

    return product


def conjugate_gradient(
    matvec: Callable[[Tree], Tree], b: Tree, *, iterations: int, tolerance: Number = 0.0
) -> tuple[Tree, jax.Array]:
    """Solves `A x = b` for a symmetric positive definite `A`, from x = 0.

    Stops early at `‖b − A x‖ ≤ tolerance · ‖b‖`, and before a direction p with pᵀAp ≤ 0 or not
    finite or a residual that is not: what it has by then is returned, so that b = 0 gives x = 0 and
    no input gives a division by zero.

    Args:
      matvec: `matvec(v) -> A v`, trees like `b`.
      b: float leaves of any shape.
      iterations: products at most, static, at least 1.
      tolerance: relative residual, at least 0.

    Returns:
      The solution, a tree like `b`, and `[]` the norm of the residual `b − A x` as the recursion
      carries it. Source: Hestenes and Stiefel 1952.

    Raises:
      ValueError: `iterations` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> x, residual = conjugate_gradient(lambda v: jnp.array([1.0, 4.0]) * v, jnp.array([1.0, 2.0]), iterations=2)
      >>> [round(float(y), 4) for y in (*x, residual)]
      [1.0, 0.5, 0.0]
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    chex.assert_trees_all_equal_shapes(b, jax.eval_shape(matvec, b))
    squared = _dot(b, b)
    goal = jnp.square(tolerance) * squared

    def goes_on(carry: tuple[Any, ...]) -> jax.Array:
        step, _, _, _, squared, broken = carry
        return (step < iterations) & (squared > goal) & ~broken

    def iterate(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        step, x, residual, direction, squared, _ = carry
        product = matvec(direction)
        curvature = _dot(direction, product)
        alpha = squared / jnp.where(curvature > 0, curvature, 1.0)
        next_residual = _add(residual, product, -alpha)
        next_squared = _dot(next_residual, next_residual)
        broken = ~(
            (curvature > 0)
            & jnp.isfinite(curvature)
            & jnp.isfinite(alpha)
            & jnp.isfinite(next_squared)
        )
        next_direction = _add(next_residual, direction, next_squared / squared)
        new = (_add(x, direction, alpha), next_residual, next_direction, next_squared)
        return step + 1, *_select(broken, (x, residual, direction, squared), new), broken

    start = (jnp.int32(0), jax.tree.map(jnp.zeros_like, b), b, b, squared, jnp.bool_(False))
    _, x, _, _, squared, _ = jax.lax.while_loop(goes_on, iterate, start)
    return x, jnp.sqrt(squared)


def natural_step(direction: Tree, matvec: Callable[[Tree], Tree], *, max_kl: Number) -> Tree:
    """`√(2δ / (xᵀFx)) · x`: the longest step along `x = F⁻¹g` whose quadratic model of the KL is at most δ.

    Not `√(2δ / gᵀFg)`, which is another length altogether.

    Args:
      direction: x, a tree.
      matvec: `matvec(v) -> F v`, including the damping.
      max_kl: δ, nats, above 0.

    Returns:
      A tree like `direction`; zeros where xᵀFx is not positive or not finite. Source: Schulman et
      al. 2015 (TRPO), appendix C.

    Example:
      >>> import jax.numpy as jnp
      >>> natural_step(jnp.array([4.0, 0.0]), lambda v: 0.5 * v, max_kl=2.25).tolist()
      [3.0, 0.0]
    """
    curvature = _dot(direction, matvec(direction))
    scale = jnp.sqrt(2.0 * max_kl / jnp.where(curvature > 0, curvature, 1.0))
    usable = (curvature > 0) & jnp.isfinite(curvature) & jnp.isfinite(scale)
    return jax.tree.map(lambda x: jnp.where(usable, scale * x, 0.0).astype(x.dtype), direction)


class LineSearchInfo(NamedTuple):
    """What the line search did.

    Attributes:
      accepted: `[]`, bool; False when no candidate passed and the parameters came back as they
        were.
      kl: `[]`, nats, KL(old ‖ new) at the returned parameters.
      gain: `[]`, surrogate at the returned parameters less that at the start; 0 when not accepted.
      steps: `[]`, int32, candidates refused: the accepted step is `backtrack ** steps` of the full
        one.
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
    """The first of `params + backtrackᵏ · step`, k = 0, 1, …, with `kl ≤ max_kl` and a larger surrogate; else `params`.

    Args:
      evaluate: `evaluate(params) -> (surrogate to maximise [], KL(old ‖ params) [] in
        nats)`, global over devices.
      params: θ_old, a tree.
      step: the full step, a tree like `params`.
      max_kl: δ, nats.
      backtrack: in (0, 1).
      iterations: candidates at most, static, at least 1.

    Returns:
      The parameters, bit for bit those given when no candidate passed, and `LineSearchInfo`. A
      candidate whose surrogate or KL is not finite never passes. Source: Schulman et al. 2015
      (TRPO), appendix C.

    Raises:
      ValueError: `iterations` below 1.

    Example:
      >>> import jax.numpy as jnp
      >>> evaluate = lambda x: (x, jnp.square(x))
      >>> x, info = line_search(evaluate, jnp.float32(0.0), jnp.float32(1.0), max_kl=0.5, backtrack=0.5)
      >>> float(x), bool(info.accepted), int(info.steps)
      (0.5, True, 1)
    """
    if iterations < 1:
        raise ValueError(f"iterations must be at least 1, got {iterations}")
    chex.assert_trees_all_equal_shapes(params, step)
    start, start_kl = evaluate(params)
    chex.assert_rank([start, start_kl], 0)

    def goes_on(carry: tuple[Tree, LineSearchInfo]) -> jax.Array:
        _, info = carry
        return ~info.accepted & (info.steps < iterations)

    def attempt(carry: tuple[Tree, LineSearchInfo]) -> tuple[Tree, LineSearchInfo]:
        _, info = carry
        candidate = _add(params, step, backtrack**info.steps)
        surrogate, kl = evaluate(candidate)
        gain = surrogate - start
        accepted = jnp.isfinite(surrogate) & jnp.isfinite(kl) & (kl <= max_kl) & (gain > 0)
        passed = (candidate, LineSearchInfo(accepted, kl, gain, info.steps))
        return _select(accepted, passed, (params, info._replace(steps=info.steps + 1)))

    nothing = LineSearchInfo(jnp.bool_(False), start_kl, jnp.zeros_like(start), jnp.int32(0))
    return jax.lax.while_loop(goes_on, attempt, (params, nothing))


def full_step(
    evaluate: Callable[[Tree], tuple[jax.Array, jax.Array]], params: Tree, step: Tree
) -> tuple[Tree, LineSearchInfo]:
    """`params + step`, no questions asked but that surrogate and KL are finite: the natural policy gradient's step.

    Args:
      evaluate: see `line_search`.
      params: θ_old, a tree.
      step: a tree like `params`.

    Returns:
      See `line_search`.

    Example:
      >>> import jax.numpy as jnp
      >>> x, info = full_step(lambda x: (x, jnp.square(x)), jnp.float32(0.0), jnp.float32(1.0))
      >>> float(x), bool(info.accepted), float(info.kl)
      (1.0, True, 1.0)
    """
    chex.assert_trees_all_equal_shapes(params, step)
    start, start_kl = evaluate(params)
    candidate = _add(params, step, 1.0)
    surrogate, kl = evaluate(candidate)
    moved = _dot(step, step) > 0
    accepted = LineSearchInfo(
        jnp.isfinite(surrogate) & jnp.isfinite(kl) & moved, kl, surrogate - start, jnp.int32(0)
    )
    refused = LineSearchInfo(jnp.bool_(False), start_kl, jnp.zeros_like(start), jnp.int32(1))
    return _select(accepted.accepted, (candidate, accepted), (params, refused))


def _dot(a: Tree, b: Tree) -> jax.Array:
    # Not `vdot`, which some accelerators compute in less than float32.
    return sum(
        jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)), start=jnp.float32(0.0)
    )


def _add(a: Tree, b: Tree, scale: Number) -> Tree:
    return jax.tree.map(lambda x, y: (x + scale * y).astype(x.dtype), a, b)


def _select(condition: jax.Array, a: Tree, b: Tree) -> Tree:
    return jax.tree.map(lambda x, y: jnp.where(condition, x, y), a, b)
