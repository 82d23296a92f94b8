"""Lists the functions that `test_fuzz` calls, their arguments, and laws that their results obey."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import laws
import numpy as np

from jaxrl_po import (
    advantages,
    divergences,
    group_advantages,
    group_statistics,
    losses,
    masked,
    token_weights,
    trust_region,
)
from jaxrl_po.distributions import Categorical, DiagonalGaussian

STREAMS = [(5,), (2,), (1,), (3,), (4,), (8,), (31,), (64,)]
GROUPS = [(n + 1,) for (n,) in STREAMS]
MATRICES = [(2, 3), (4, 1), (1, 1), (1, 2), (2, 2), (3, 5), (8, 4), (16, 16)]
ANY = [(7, 2), (), (1,), (0,), (0, 3), (64,), (2, 3, 2), (3, 1, 2, 2)]
SCALARS = [()]


class Row(NamedTuple):
    """Function under test, with its known properties.

    Attributes:
      call: Function of arrays, one array for each kind.
      kinds: Kinds of the arguments; values where a `mask` is False are replaced by NaN, and results
        must not change.
      shapes: Shapes of all arguments that are not single numbers.
      out: `(*shapes) -> shape`, the result's shape for the shapes of the arguments; None if leaves
        differ in shape.
      law: `(outputs, *arguments) -> None`, asserts a property that holds for any input.
      differentiate: Number of leading arguments; the sum of the outputs has a finite gradient with
        respect to each of them.
    """

    call: Callable
    kinds: str
    shapes: Sequence[tuple[int, ...]] = ANY
    out: Callable[[tuple[int, ...]], tuple[int, ...]] | None = lambda shape: shape
    law: Callable[..., None] = lambda *_: None
    differentiate: int = 0


def scalar(_):
    return ()


def leading(shape):
    return shape[:-1]


def dense(root, scale):
    return scale * root @ root.T


def solve(root, b, scale):
    return trust_region.conjugate_gradient(
        lambda v: dense(root, scale) @ v, b, iterations=8, tolerance=1e-3
    )


def bounded_step(root, direction, scale):
    return trust_region.natural_step(direction, lambda v: dense(root, scale) @ v, max_kl=0.01)


def bowl(slope, kl):
    """Returns a surrogate and a KL that are not finite beyond 1e9."""
    return lambda x: (
        jnp.where(jnp.abs(x).max() > 1e9, jnp.nan, jnp.sum(slope * x)),
        jnp.sum(jnp.square(kl * x)),
    )


def search(params, step, slope, kl):
    return trust_region.line_search(bowl(slope, kl), params, step, max_kl=0.1, iterations=5)


def leap(params, step, slope, kl):
    return trust_region.full_step(bowl(slope, kl), params, step)


def products(logits, vector):
    old, weight = Categorical(logits), jnp.full(logits.shape[0], 1.0 / logits.shape[0])
    through = trust_region.fisher(Categorical, logits, weight, damping=0.0)(vector)
    return through, trust_region.fisher_vector_product(
        lambda x: jnp.sum(old.kl(Categorical(x)) * weight), logits, vector
    )


def of_categorical(logits, other):
    policy = Categorical(logits)
    action = jnp.argmin(logits, axis=-1).astype(jnp.int32)
    chances = (
        policy.log_prob(policy.mode()),
        policy.log_prob(policy.sample(jax.random.key(0))),
        jnp.maximum(policy.log_prob(action), -1e30),
    )
    return (
        policy.entropy(),
        policy.kl(Categorical(jnp.where(jnp.isfinite(other), other, -10.0))),
        *chances,
    )


def of_gaussian(mean, log_std, other_mean, other_log_std, action):
    policy = DiagonalGaussian(mean, log_std)
    chances = (
        policy.log_prob(policy.mode()),
        policy.log_prob(policy.sample(jax.random.key(0))),
        policy.log_prob(action),
    )
    return policy.entropy(), policy.kl(DiagonalGaussian(other_mean, other_log_std)), *chances


def running(first, second, stratum, mask, decay):
    """Runs two iterations; an outcome that is not finite counts as masked."""
    before = group_statistics.update_moments(
        group_statistics.empty_moments(3), jnp.where(mask, first, jnp.inf), stratum, decay=decay
    )
    after = group_statistics.update_moments(
        before, jnp.where(mask, second, jnp.nan), stratum, decay=decay
    )
    relative = group_statistics.relative(after, jnp.where(mask, second, 0.0), stratum, ddof=1)
    return jnp.concatenate([*after, jnp.where(mask, relative, 0.0)])


RATIO = {"kinds": "log_prob log_prob advantage", "differentiate": 1}
CLIP = {"kinds": "log_prob log_prob advantage epsilon epsilon", "differentiate": 1}
POOL = {"kinds": "reward mask", "out": scalar, "differentiate": 1}
KL = {"kinds": "log_prob log_prob", "differentiate": 2}
STREAM = {"shapes": STREAMS}
GROUP = {"kinds": "reward", "shapes": GROUPS}
partial = functools.partial
ROWS = {
    "gae": Row(
        lambda r, v, w, f, g, a, b: advantages.gae(r, v, w, f, g, gamma=a, lambda_=b),
        "reward reward reward flag flag unit unit",
        **STREAM,
    ),
    "discounted_returns": Row(
        lambda r, w, f, g, a: advantages.discounted_returns(r, w, f, g, gamma=a),
        "reward reward flag flag unit",
        **STREAM,
    ),
    "n_step_returns": Row(
        lambda r, w, f, g, a: advantages.n_step_returns(r, w, f, g, gamma=a, n=3),
        "reward reward flag flag unit",
        **STREAM,
    ),
    "informative": Row(
        advantages.informative,
        "reward",
        MATRICES,
        leading,
        lambda out, x: np.testing.assert_array_equal(out, np.ptp(laws.flush(x), -1) != 0),
    ),
    "group_relative": Row(advantages.group_relative, "value", GROUPS, law=laws.normalised),
    "group_relative far": Row(advantages.group_relative, **GROUP, law=laws.dead_is_zero),
    "group_relative unscaled": Row(
        partial(advantages.group_relative, scale="none"), **GROUP, law=laws.centred
    ),
    "maximum_likelihood": Row(
        lambda r: advantages.maximum_likelihood(jnp.abs(r)), **GROUP, law=laws.at_most(220.0)
    ),
    "pass_at_k": Row(partial(group_advantages.pass_at_k, k=2), **GROUP, law=laws.gained),
    "leave_one_out": Row(advantages.leave_one_out, **GROUP, law=laws.centred),
    "process_relative": Row(
        group_advantages.process_relative, "value mask", MATRICES, law=laws.process
    ),
    "whiten": Row(advantages.whiten, "value mask", law=laws.whitened),
    "whiten shifted": Row(
        partial(advantages.whiten, shift_mean=False), "value mask", law=laws.zero_where_masked
    ),
    "policy_gradient": Row(losses.policy_gradient, "log_prob advantage", differentiate=1),
    "surrogate": Row(losses.surrogate, **RATIO),
    "self_normalized_surrogate": Row(
        losses.self_normalized_surrogate, **RATIO, shapes=STREAMS, out=scalar
    ),
    "clipped_surrogate": Row(
        lambda x, y, a, e, f: losses.clipped_surrogate(x, y, a, epsilon_low=e, epsilon_high=f),
        **CLIP,
        law=laws.pessimistic,
    ),
    "clipped_surrogate dual": Row(
        lambda x, y, a, e, f: losses.clipped_surrogate(
            x, y, a, epsilon_low=e, epsilon_high=f, dual_clip=3.0
        ),
        **CLIP,
    ),
    "clip_fraction_low": Row(
        losses.clip_fraction_low, "log_prob log_prob advantage epsilon", law=laws.zero_or_one
    ),
    "clip_fraction_high": Row(
        losses.clip_fraction_high, "log_prob log_prob advantage epsilon", law=laws.zero_or_one
    ),
    "cispo": Row(
        lambda x, y, a, e, f: losses.cispo(x, y, a, epsilon_low=e, epsilon_high=f), **CLIP
    ),
    "sapo": Row(
        lambda x, y, a, e, f: losses.sapo(
            x, y, a, temperature_positive=1.0 + e, temperature_negative=1.0 + f
        ),
        **CLIP,
    ),
    "dppo": Row(
        lambda x, y, a, e, f: losses.dppo(x, y, a, delta_low=e, delta_high=f, max_ratio=20.0),
        **CLIP,
    ),
    "clipped_log_ratio": Row(
        lambda x, y, a, e, f: losses.clipped_log_ratio(x, y, a, epsilon_low=e, epsilon_high=f),
        **CLIP,
        law=laws.at_most(20.0),
    ),
    "truncated_weight": Row(
        lambda x, y: token_weights.truncated_weight(x, y, 2.0), **KL, law=laws.at_most(2.0)
    ),
    "masked_weight": Row(
        lambda x, y: token_weights.masked_weight(x, y, 0.5, 5.0), **KL, law=laws.at_most(5.0)
    ),
    "off_policy_mask": Row(
        lambda x, y, a, mask: mask & token_weights.off_policy_mask(x, y, a, mask, 0.5),
        "log_prob log_prob advantage mask",
        MATRICES,
    ),
    "top_covariance": Row(
        lambda x, a, mask: token_weights.top_covariance(x, a, mask, 0.3),
        "log_prob advantage mask",
        MATRICES,
        law=laws.a_third,
    ),
    "sequence_log_ratio": Row(
        losses.sequence_log_ratio,
        "log_prob log_prob mask",
        MATRICES,
        law=laws.equal_along_a_row,
        differentiate=2,
    ),
    "squared_value": Row(
        losses.squared_value, "value value", law=laws.non_negative, differentiate=1
    ),
    "clipped_value": Row(
        lambda v, o, t, e: losses.clipped_value(v, o, t, epsilon=e),
        "value value value epsilon",
        law=laws.non_negative,
        differentiate=1,
    ),
    "bradley_terry": Row(
        losses.bradley_terry, "reward reward", law=laws.non_negative, differentiate=2
    ),
    "token_mean": Row(losses.token_mean, **POOL, law=laws.counted(np.sum)),
    "sequence_mean": Row(
        losses.sequence_mean,
        **POOL,
        shapes=MATRICES,
        law=laws.counted(lambda mask: mask.any(axis=1).sum()),
    ),
    "fixed_length_mean": Row(
        lambda x, mask: losses.fixed_length_mean(x, mask, 7),
        **POOL,
        shapes=MATRICES,
        law=laws.counted(lambda mask: 7 * len(mask)),
    ),
    "k1": Row(divergences.k1, **KL, law=laws.at_most(20.0)),
    "k2": Row(divergences.k2, **KL, law=laws.non_negative),
    "k3": Row(divergences.k3, **KL, law=laws.non_negative),
    "adapt_coefficient": Row(
        divergences.adapt_coefficient, "coefficient kl target", SCALARS, law=laws.kept_in_range
    ),
    "adapt_proportionally": Row(
        divergences.adapt_proportionally, "coefficient kl target", SCALARS, law=laws.kept_in_range
    ),
    "masked.total": Row(masked.total, **POOL, law=laws.counted(np.sum)),
    "masked.mean": Row(masked.mean, **POOL, law=laws.mean_in_range),
    "masked.moments": Row(masked.moments, "value mask", out=scalar, law=laws.moments_in_range),
    "conjugate_gradient": Row(
        solve, "root value coefficient", STREAMS, None, laws.residual_is_told
    ),
    "natural_step": Row(bounded_step, "root event coefficient", STREAMS, law=laws.within_delta),
    "line_search": Row(search, "event reward event event", STREAMS, None, laws.passed_or_untouched),
    "full_step": Row(
        leap,
        "event reward event event",
        STREAMS,
        None,
        partial(laws.passed_or_untouched, limit=np.inf),
    ),
    "fisher": Row(products, "logits event", MATRICES, law=laws.semidefinite),
    "ratio": Row(divergences.ratio, **KL, law=laws.at_most(5e8)),
    "log_ratio": Row(divergences.log_ratio, **KL, law=laws.at_most(20.0)),
    "Categorical": Row(of_categorical, "logits logits", MATRICES, leading, laws.categorical_law),
    "DiagonalGaussian": Row(
        of_gaussian, "event log_std event log_std event", MATRICES, leading, laws.gaussian_law
    ),
    "observe and relative": Row(
        running, "value value stratum mask unit", STREAMS, lambda s: (9 + s[0],), laws.running_law
    ),
}
