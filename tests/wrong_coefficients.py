"""Wrong programs of the mathematics: coefficients, sizes of steps, trust regions."""

from wrong import Wrong

WRONG = [
    Wrong(
        "a surrogate with a quantile of its minibatch is computed in parts",
        "algorithms.surrogates",
        "    return None\n",
        "    return of_row\n",
        ("test_surrogates.py::test_a_surrogate_that_reads_its_minibatch_gets_it_whole",),
    ),
    Wrong(
        "the optimizer ignores its ε",
        "optimizers",
        "optax.scale_by_adam(eps=epsilon)",
        "optax.scale_by_adam(eps=1e-8)",
        (
            "test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[ppo]",
        ),
    ),
    # Coefficients.
    Wrong(
        "entropy with the other sign in the joint loss",
        "algorithms.actor_critic",
        "entropy * -config.entropy_coefficient",
        "entropy * config.entropy_coefficient",
        ("test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[a2c]",),
    ),
    Wrong(
        "entropy with the other sign without a critic",
        "algorithms.group_policy",
        "-config.entropy_coefficient)",
        "config.entropy_coefficient)",
        ("test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[grpo]",),
    ),
    Wrong(
        "entropy with the other sign in REINFORCE",
        "algorithms.reinforce",
        'means["entropy"] * -config.entropy_coefficient',
        'means["entropy"] * config.entropy_coefficient',
        ("test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[reinforce]",),
    ),
    Wrong(
        "entropy twice",
        "algorithms.group_policy",
        "-config.entropy_coefficient)",
        "-2.0 * config.entropy_coefficient)",
        ("test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[rloo]",),
    ),
    Wrong(
        "value loss twice",
        "algorithms.actor_critic",
        "value * config.value_coefficient",
        "value * (2.0 * config.value_coefficient)",
        (
            "test_coefficients.py::test_the_value_loss_is_half_the_squared_error_times_its_coefficient",
        ),
    ),
    Wrong(
        "distance to the reference with the other sign",
        "algorithms.group_policy",
        "(kl, reference.kl_coefficient)",
        "(kl, -reference.kl_coefficient)",
        ("test_coefficients.py::test_the_penalty_pulls_towards_the_reference_in_proportion[grpo]",),
    ),
    Wrong(
        "distance to the reference added to the reward",
        "algorithms.reference",
        "batch.reward - coefficient * kl",
        "batch.reward + coefficient * kl",
        ("test_coefficients.py::test_rloo_takes_the_distance_from_the_outcome",),
    ),
    Wrong(
        "the penalty of PPO with the other sign",
        "algorithms.ppo_penalty",
        "policy_loss + beta *",
        "policy_loss - beta *",
        ("test_coefficients.py::test_ppo_is_pulled_back_to_where_the_update_began",),
    ),
    Wrong(
        "the KL penalty to the reference added to the reward of a step",
        "algorithms.reference",
        "batch.reward - beta * jnp.where",
        "batch.reward + beta * jnp.where",
        ("test_ppo.py::test_price_of_a_token_by_hand",),
    ),
    Wrong(
        "frozen parameters are trained",
        "algorithms.actor_critic",
        "state.params.trained(), state.opt_state",
        "state.params, state.opt_state",
        ("test_frozen.py::test_a_frozen_base_is_read_and_not_trained[ppo]",),
    ),
    Wrong(
        "β is a square",
        "algorithms.ppo_penalty",
        "policy_loss + beta *",
        "policy_loss + beta**2 *",
        ("test_coefficients.py::test_ppo_is_pulled_back_to_where_the_update_began",),
    ),
    Wrong(
        "γ for λ",
        "algorithms.actor_critic",
        "lambda_=lambda_, unroll",
        "lambda_=gamma, unroll",
        ("test_coefficients.py::test_lambda_decays_what_follows",),
    ),
    Wrong(
        "ε high for ε low in PPO",
        "algorithms.ppo",
        "clipped(config.epsilon_low, config.epsilon_high)",
        "clipped(config.epsilon_high, config.epsilon_low)",
        ("test_coefficients.py::test_ratios_lose_their_gradient_outside_the_clip[ppo]",),
    ),
    Wrong(
        "the upper clip of DAPO at the lower ε",
        "algorithms.group_policy",
        "config.epsilon_low, config.upper, config.dual",
        "config.epsilon_low, config.epsilon_low, config.dual",
        ("test_coefficients.py::test_ratios_lose_their_gradient_outside_the_clip[dapo]",),
    ),
    Wrong(
        "CISPO clips above at ε, not 1 + ε",
        "losses",
        "weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, 1.0 + epsilon_high)",
        "weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, epsilon_high)",
        ("test_coefficients.py::test_cispo_clips_the_weight_and_drops_nothing",),
    ),
    Wrong(
        "the std of the group without its ε",
        "algorithms.group_policy",
        "epsilon=config.std_epsilon",
        "epsilon=1e-6",
        ("test_coefficients.py::test_std_epsilon_is_added_to_the_std_of_the_group",),
    ),
    Wrong(
        "punished by the square of the factor",
        "algorithms.dapo",
        "factor=config.overlong_factor",
        "factor=config.overlong_factor**2",
        (
            "test_coefficients.py::test_the_punishment_of_length_is_its_factor_times_the_share_of_the_cache",
        ),
    ),
    Wrong(
        "statistics of the batch in place of the group",
        "algorithms.group_policy",
        "jax.vmap(relative)(outcome)[..., None]",
        "relative(reward.sum(axis=-1).ravel()).reshape(reward.shape[:2])[..., None]",
        ("test_coefficients.py::test_std_epsilon_is_added_to_the_std_of_the_group",),
    ),
    Wrong(
        "earlier outcomes keep half of their weight",
        "group_statistics",
        "weight = decay * running.weight + count",
        "weight = 0.5 * decay * running.weight + count",
        ("test_coefficients.py::test_earlier_outcomes_keep_that_weight_in_each_iteration",),
    ),
    Wrong(
        "the early stop admits one and a half times its target",
        "algorithms.ppo",
        ".value() > config.target_kl",
        ".value() > 1.5 * config.target_kl",
        ("test_step_sizes.py::test_the_target_is_what_an_early_stop_admits",),
    ),
    Wrong(
        "the penalty adapts to the square of its target",
        "algorithms.ppo_penalty",
        "adapt_coefficient(beta, kl.value(), config.target_kl)",
        "adapt_coefficient(beta, kl.value(), config.target_kl**2)",
        ("test_step_sizes.py::test_the_target_is_what_the_penalty_aims_at",),
    ),
    Wrong(
        "the price adapts the wrong way",
        "algorithms.reference",
        "(beta, kl.value(), settings.target_kl)",
        "(beta, 2.0 * settings.target_kl - kl.value(), settings.target_kl)",
        ("test_step_sizes.py::test_the_price_of_distance_moves_in_proportion_to_the_error",),
    ),
    # The length of a step.
    Wrong(
        "Adam climbs",
        "optimizers",
        "optax.scale(-1.0 * learning_rate)",
        "optax.scale(learning_rate)",
        (
            "test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]",
        ),
    ),
    Wrong(
        "the norm is cut after Adam",
        "optimizers",
        "optax.chain(clip, direction, scale)",
        "optax.chain(direction, clip, scale)",
        (
            "test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]",
        ),
    ),
    Wrong(
        "the critic steps by the policy's learning rate",
        "algorithms.critic_fit",
        "optimizers.adam(config.value_learning_rate",
        'optimizers.adam(getattr(config, "learning_rate", 1e-3)',
        ("test_step_sizes.py::test_the_critic_steps_by_its_own_learning_rate",),
    ),
    Wrong(
        "decay counted in gradient steps in A2C and PPO",
        "algorithms.actor_critic",
        "optimizers.decay(state.step,",
        "optimizers.decay(16 * state.step,",
        (
            "test_optimizers.py::test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps[a2c]",
        ),
    ),
    Wrong(
        "decay counted in gradient steps without a critic",
        "algorithms.group_policy",
        "state.step, config.decay_iterations",
        "state.step * config.num_epochs * config.num_minibatches, config.decay_iterations",
        (
            "test_optimizers.py::test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps[grpo]",
        ),
    ),
    Wrong(
        "warm-up counted in gradient steps",
        "algorithms.group_policy",
        "state.step, config.warm_up_iterations",
        "state.step * config.num_epochs * config.num_minibatches, config.warm_up_iterations",
        (
            "test_optimizers.py::test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps[grpo]",
        ),
    ),
    Wrong(
        "every gradient step decays by itself",
        "updates",
        "rows_of(order), counts, nonempty, scale)",
        "rows_of(order), counts, nonempty, scale / num_minibatches)",
        (
            "test_optimizers.py::test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps[ppo]",
        ),
    ),
    # Trust regions.
    Wrong(
        "damping thrice",
        "natural_updates",
        "x + damping * v",
        "x + 3.0 * damping * v",
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "damping once for each device",
        "natural_updates",
        "x + damping * v",
        "x + damping * (1 if axis_name is None else jax.lax.axis_size(axis_name)) * v",
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "damping once for each microbatch",
        "natural_updates",
        "x + damping * v",
        "x + damping * num_microbatches * v",
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "no damping in the length of the step",
        "natural_updates",
        "trust_region.natural_step(direction, matvec,",
        (
            "trust_region.natural_step(direction, lambda v: jax.tree.map(lambda x, y: x - "
            "damping * y, matvec(v), v),"
        ),
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "δ in place of 2δ",
        "trust_region",
        "jnp.sqrt(2.0 * max_kl",
        "jnp.sqrt(max_kl",
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "gradients of devices averaged by their own counts",
        "natural_updates",
        "count = pooled(lambda part: surrogate(policy(params, part), part).count, parts)",
        (
            "count = minibatches.summed(lambda part: surrogate(policy(params, part), "
            "part).count, parts)"
        ),
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "rows of the Fisher matrix weighed by the devices",
        "natural_updates",
        "jnp.maximum(masked.psum(subset_mask.sum(dtype=float), axis_name), 1.0)",
        "jnp.maximum(subset.mask.sum(dtype=float), 1.0)",
        ("test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "downhill",
        "natural_updates",
        "uphill = jax.tree.map(jnp.negative, gradient)",
        "uphill = gradient",
        ("test_step_sizes.py",),
    ),
    Wrong(
        "the search shortens by its own factor",
        "algorithms.trpo",
        "backtrack=config.backtrack,",
        "backtrack=0.8,",
        ("test_step_sizes.py::test_each_refusal_shortens_the_step_by_that_factor",),
    ),
    Wrong(
        "an absolute tolerance",
        "natural_updates",
        "tolerance=tolerance)\n        step",
        "tolerance=tolerance / optax.tree.norm(uphill))\n        step",
        ("test_step_sizes.py::test_the_conjugate_gradient_stops_at_that_share_of_the_gradient",),
    ),
    Wrong(
        "the page of --help holds every flag",
        "run.experiment.flags",
        "if everything or field.name in COMMON]",
        "]",
        ("test_script_flags.py::test_help_is_of_the_flags_that_most_runs_need",),
    ),
    Wrong(
        "a step that may be left out is traced twice",
        "updates",
        "(carry, no_metrics), traced, carry",
        "(carry, no_metrics), step, carry",
        ("test_updates.py::test_a_loss_is_traced_once_for_its_counts_and_once_for_its_gradient",),
    ),
]
