"""Planted mistakes in the losses of 2025 and 2026: sides, constants, gradients that should stop."""

from wrong import Wrong

PEERS = "test_peer_losses.py::test_losses_and_gradients_are_those_of_peers"
MASKED = (
    "test_coefficients_of_groups.py::"
    "test_wrong_responses_far_from_the_sampler_are_dropped_and_still_counted[grpo]"
)
WEIGHTED = (
    "test_coefficients_of_groups.py::"
    "test_the_surrogate_is_weighted_by_what_the_sampler_missed_and_the_penalty_is_not[grpo]"
)
WRONG = [
    Wrong(
        "REINFORCE++ whitens the rounding of the sampler",
        "algorithms.reinforce_pp",
        "jnp.where(jnp.abs(k1) > divergences.ROUNDING, k1, 0.0)",
        "k1",
        (
            "test_group_policy.py::"
            "test_reinforce_pp_does_not_move_along_the_rounding_of_the_sampler",
        ),
    ),
    Wrong(
        "outcomes differ by the order of their rewards",
        "compensated",
        "~(spread <= error)",
        "(spread != 0.0)",
        ("test_rounding.py::test_the_same_rewards_in_another_order_are_the_same_outcome",),
    ),
    Wrong(
        "the gate of SAPO half as steep",
        "losses",
        "return -4.0 / temperature",
        "return -2.0 / temperature",
        (f"{PEERS}[trl sapo]",),
    ),
    Wrong(
        "the temperatures of SAPO the other way round",
        "losses",
        "temperature = jnp.where(advantage > 0,",
        "temperature = jnp.where(advantage < 0,",
        (f"{PEERS}[verl sapo]",),
    ),
    Wrong(
        "GMPO clips both sides",
        "losses",
        "advantage > 0, jnp.minimum(x, epsilon_high), jnp.maximum(x, -epsilon_low)",
        "advantage > 0, jnp.clip(x, -epsilon_low, epsilon_high), "
        "jnp.clip(x, -epsilon_low, epsilon_high)",
        (f"{PEERS}[trl gmpo]",),
    ),
    Wrong(
        "DPPO masks the side that comes back",
        "losses",
        "change > delta_high, (advantage < 0) & (change < -delta_low)",
        "change < -delta_low, (advantage < 0) & (change > delta_high)",
        (f"{PEERS}[verl dppo]",),
    ),
    Wrong(
        "the ratio of DPPO has a gradient",
        "losses",
        "return -jax.lax.stop_gradient(weight * advantage) * log_prob\n\n\n"
        "def outside_total_variation",
        "return -weight * advantage * log_prob\n\n\ndef outside_total_variation",
        (f"{PEERS}[verl dppo]",),
    ),
    Wrong(
        "DPPO against the old policy",
        "algorithms.dppo",
        "surrogates.sampler_log_prob(samples)",
        "samples.log_prob",
        (
            "test_coefficients_of_groups.py::test_dppo_stops_where_a_probability_has_changed_that_much[dppo]",
        ),
    ),
    Wrong(
        "the tokens of the smallest covariance",
        "token_weights",
        "jnp.argsort(-everywhere)",
        "jnp.argsort(everywhere)",
        (f"{PEERS}[verl kl_cov]",),
    ),
    Wrong(
        "each device ranks its own tokens",
        "token_weights",
        "jax.lax.all_gather(product, axis_name, tiled=True)",
        "jnp.tile(product, jax.lax.axis_size(axis_name))",
        ("test_algorithms.py::test_in_double_precision_eight_devices_equal_one[kl_cov-table]",),
    ),
    Wrong(
        "truncation from below",
        "token_weights",
        "jnp.minimum(ratio(old_log_prob, sampler_log_prob), maximum)",
        "jnp.maximum(ratio(old_log_prob, sampler_log_prob), maximum)",
        (f"{PEERS}[verl truncated]",),
    ),
    Wrong(
        "the mask keeps tokens and forgets their weight",
        "token_weights",
        "(rho <= maximum), rho, 0.0)",
        "(rho <= maximum), 1.0, 0.0)",
        (f"{PEERS}[verl masked]", WEIGHTED),
    ),
    Wrong(
        "the sampler over the old policy",
        "algorithms.corrections",
        "token_weights.truncated_weight(samples.log_prob, sampled,",
        "token_weights.truncated_weight(sampled, samples.log_prob,",
        (f"{PEERS}[verl truncated]",),
    ),
    Wrong(
        "right responses are dropped",
        "token_weights",
        "(advantage >= 0) | (behind[:, None] <= threshold)",
        "(advantage <= 0) | (behind[:, None] <= threshold)",
        (MASKED,),
    ),
    Wrong(
        "the distance to the policy with the other sign",
        "token_weights",
        "sampler_log_prob - jax.lax.stop_gradient(log_prob), mask",
        "jax.lax.stop_gradient(log_prob) - sampler_log_prob, mask",
        (MASKED,),
    ),
    Wrong(
        "the weight of the penalty has no gradient",
        "algorithms.group_policy",
        "kl *= ratio(log_prob, samples.log_prob)",
        "kl *= jax.lax.stop_gradient(ratio(log_prob, samples.log_prob))",
        (f"{PEERS}[trl reweighted kl]",),
    ),
    Wrong(
        "the teacher's advantage has a gradient",
        "losses",
        "return -ratio(log_prob, old_log_prob) * jax.lax.stop_gradient(advantage)",
        "return -ratio(log_prob, old_log_prob) * advantage",
        ("test_peer_losses.py::test_distillation_is_prime_rls_without_its_penalty",),
    ),
    Wrong(
        "away from the teacher",
        "algorithms.distillation",
        'log_ratio(samples.columns["teacher_log_prob"], log_prob)',
        'log_ratio(log_prob, samples.columns["teacher_log_prob"])',
        ("test_distillation.py::test_a_student_comes_to_answer_as_its_teacher",),
    ),
    Wrong(
        "the best of k among k others",
        "group_advantages",
        "math.comb(m, k - 2) / math.comb(size - 1, k - 1)",
        "math.comb(m, k - 1) / math.comb(size - 1, k)",
        ("test_group_identities.py::test_pass_at_k_is_an_unbiased_gradient_of_the_best_of_k",),
    ),
    Wrong(
        "the mean of right answers alone",
        "advantages",
        "/ jnp.where(mean > 0, mean, 1.0)",
        "/ jnp.where(mean > 0, jnp.sqrt(mean), 1.0)",
        (
            "test_group_identities.py::test_maximum_likelihood_has_the_terms_of_log_p_below_the_size_of_the_group",
        ),
    ),
    Wrong(
        "noise of the same size at any temperature",
        "language.sampling",
        "logits = logits + noise * drawn",
        "logits = logits + decoding.temperature * noise * drawn",
        ("test_mismatch.py::test_noise_is_of_that_size_on_every_logit_and_the_sampler_says_so",),
    ),
    Wrong(
        "the same noise for every token",
        "language.sampling",
        "jax.vmap(jax.random.split)(step_keys)",
        "jax.vmap(jax.random.split)(keys)",
        ("test_mismatch.py::test_noise_is_of_that_size_on_every_logit_and_the_sampler_says_so",),
    ),
    Wrong(
        "the sampler is one iteration too young",
        "learner",
        "jnp.concatenate([x[1:], now[None]]), earlier, state.params.policy",
        "jnp.concatenate([x[1:], now[None]]), jax.tree.map(lambda x, now: jnp.concatenate("
        "[x[1:], now[None]]), earlier, state.params.policy), state.params.policy",
        ("test_mismatch.py::test_batches_are_of_the_policy_of_that_many_iterations_ago[3]",),
    ),
    Wrong(
        "the other KL without its weights",
        "learner",
        "ratio(recomputed, sampled) * divergences",
        "1.0 * divergences",
        ("test_mismatch.py::test_both_kls_are_estimated_from_the_samplers_actions",),
    ),
    Wrong(
        "no correction",
        "algorithms.corrections",
        'elements = elements * others["sampler_weight"]',
        "pass",
        ("test_mismatch.py::test_a_correction_gives_the_gradient_without_mismatch",),
    ),
    Wrong(
        "the std of the batch is that of the advantages",
        "algorithms.group_policy",
        "masked.moments(outcome, mask.any(axis=-1), axis_name=axis_name)",
        "masked.moments(centred(reward, mask, step_end)[..., 0], mask.any(axis=-1), "
        "axis_name=axis_name)",
        (
            "test_coefficients_of_groups.py::"
            "test_the_divisor_is_the_std_of_the_batch_or_the_mean_of_the_group[batch]",
        ),
    ),
    Wrong(
        "the std of each device's share of the batch",
        "algorithms.group_policy",
        "mask.any(axis=-1), axis_name=axis_name)",
        "mask.any(axis=-1))",
        (
            "test_algorithms.py::"
            "test_in_double_precision_eight_devices_equal_one[lite_ppo-truncate-mismatch]",
        ),
    ),
    Wrong(
        "KL-Cov penalises rounding",
        "algorithms.kl_cov",
        'samples.columns["penalized"] & (distance > divergences.ROUNDING)',
        'samples.columns["penalized"]',
        ("test_coefficients_of_groups.py::test_rounding_of_the_sampler_is_not_penalised",),
    ),
    Wrong(
        "the KL of an update is that of the sampler",
        "algorithms.actor_critic",
        'weighted = ratio(part.log_prob, part.columns["sampler_log_prob"]) * kl',
        "weighted = kl",
        (
            "test_mismatch.py::"
            "test_the_kl_of_an_update_is_that_of_the_old_policy_and_not_of_the_sampler",
        ),
    ),
]
