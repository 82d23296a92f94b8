"""Planted mistakes in which rounding decides."""

from wrong import Wrong

SAME = "test_rounding.py::test_the_same_rewards_in_another_order_are_the_same_outcome"
REAL = "test_rounding.py::test_a_real_difference_is_a_full_advantage"
CONSTANT = "test_rounding.py::test_a_constant_observation_is_normalised_to_zero"

WRONG = [
    Wrong(
        "sums are not compensated",
        "compensated",
        "error = a.error + b.error + jnp.where(jnp.isfinite(value), rounded, 0.0)",
        "error = a.error + b.error",
        (SAME,),
    ),
    Wrong(
        "rounding by the size of the terms decides",
        "compensated",
        "4 * epsilon * jnp.abs(value) + length * epsilon**2 * size",
        "length * epsilon * size",
        (REAL,),
    ),
    Wrong(
        "a single reward is rounded like a sum",
        "compensated",
        "jnp.where(terms > 1, ",
        "jnp.where(terms > 0, 4 * ",
        (REAL,),
    ),
    Wrong(
        "outcomes that are equal keep their rounding",
        "group_advantages",
        "jnp.where(differ, sums.value, sums.value.max())",
        "sums.value",
        (SAME,),
    ),
    Wrong(
        "a constant is centred by a sum that was rounded",
        "control.normalizer",
        "around + shift, jnp.maximum(",
        "around, jnp.maximum(",
        (CONSTANT,),
    ),
    Wrong(
        "the count of samples overflows",
        "control.normalizer",
        "jnp.minimum(old.seen, MOST - jnp.minimum(count, MOST)) + count",
        "old.seen + count",
        ("test_rounding.py::test_a_billion_samples_do_not_stop_the_count",),
    ),
    Wrong(
        "the KL of what the first policy excludes is left out",
        "distributions",
        "probs * exp_excess(gap), jnp.exp(its))",
        "probs * exp_excess(gap), 0.0)",
        (
            "test_rounding.py::"
            "test_the_kl_counts_what_the_first_excludes_and_is_infinite_for_what_the_second_does",
        ),
    ),
    Wrong(
        "a small KL cancels",
        "divergences",
        "small = jnp.abs(x) < limit",
        "small = jnp.abs(x) < 0.0",
        ("test_rounding.py::test_the_exact_kl_of_a_small_step",),
    ),
    Wrong(
        "a nucleus has a token more than it takes",
        "language.sampling",
        "top_p - ROUNDING if",
        "top_p + ROUNDING if",
        ("test_rounding.py::test_the_nucleus_is_the_smallest_set_of_that_mass",),
    ),
    Wrong(
        "tokens are sorted by the signs of zeros",
        "language.sampling",
        "jax.lax.top_k(jnp.where(logits == 0, 0, logits), count)",
        "jax.lax.top_k(logits, count)",
        (
            "test_sampling.py::test_ties_of_signed_zeros_keep_the_lower_indices[float32-4096]",
            "test_sampling.py::test_ties_of_signed_zeros_keep_the_lower_indices[float32-1]",
        ),
    ),
    Wrong(
        "tokens of the largest covariance are sorted by the signs of zeros",
        "token_weights",
        "jnp.argsort(-everywhere)",
        "jax.lax.top_k(everywhere, everywhere.size)[1]",
        ("test_group_identities.py::test_signs_of_zero_rewards_change_no_advantage",),
    ),
    Wrong(
        "a line search accepts where nothing moved",
        "trust_region",
        "accepted = ~first & moves & finite & (kl <= max_kl) & (gain > 0)",
        "accepted = ~first & finite & (kl <= max_kl) & (gain >= 0)",
        ("test_rounding.py::test_a_step_of_zero_is_no_gain",),
    ),
    Wrong(
        "a natural step that was skipped counts as zeros",
        "natural_updates",
        "masked.total(x[None], finite[None])",
        "masked.total(jnp.where(finite, x, 0.0))",
        ("test_rounding.py::test_a_natural_step_that_is_skipped_counts_in_nothing_else",),
    ),
    Wrong(
        "an adapter is merged into half the digits",
        "language.lora",
        "kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32)) + change",
        "(kernel.astype(change.dtype) + change).astype(kernel.dtype)",
        ("test_rounding.py::test_adapters_are_not_lost_in_bfloat16",),
    ),
    Wrong(
        "Adam's ε shortens the first steps of a mean over tokens",
        "algorithms.group_config",
        "optimizer_epsilon: Number = number(1e-8",
        "optimizer_epsilon: Number = number(1e-5",
        ("test_rounding.py::test_the_first_step_of_grpo_does_not_depend_on_the_scale_of_the_loss",),
    ),
    Wrong(
        "a series of float32 in float64",
        "divergences",
        "1e-3 if x.dtype == jnp.float64 else 0.05",
        "0.05",
        ("test_divergences.py::test_excess_equals_exact_sums",),
    ),
    Wrong(
        "the series overflows where it is not selected",
        "divergences",
        "near = jnp.clip(x, -limit, limit)",
        "near = x",
        ("test_divergences.py::test_excess_has_a_slope_everywhere",),
    ),
]
