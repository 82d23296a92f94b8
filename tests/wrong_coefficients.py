"""Planted mistakes in the mathematics: coefficients, sizes of steps, trust regions."""

from wrong import Wrong, table

TEXT = """
a surrogate with a quantile of its minibatch is computed in parts
  algorithms.surrogates: test_surrogates.py::test_surrogate_reading_its_minibatch_gets_it_whole
  - return Parts(None, None)
  + return Parts(of_row, None)
the optimizer ignores its ε
  optimizers:
    test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[ppo]
  - optax.scale_by_adam(eps=epsilon)
  + optax.scale_by_adam(eps=1e-8)
# Coefficients.
entropy with the other sign in the joint loss
  algorithms.actor_critic:
    test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[a2c]
  - entropy * -config.entropy_coefficient
  + entropy * config.entropy_coefficient
entropy with the other sign without a critic
  algorithms.group_policy:
    test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[grpo]
  - -config.entropy_coefficient)
  + config.entropy_coefficient)
entropy with the other sign in REINFORCE
  algorithms.reinforce:
    test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[reinforce]
  - means["entropy"] * -config.entropy_coefficient
  + means["entropy"] * config.entropy_coefficient
entropy twice
  algorithms.group_policy:
    test_coefficients.py::test_the_entropy_bonus_raises_entropy_in_proportion[rloo]
  - -config.entropy_coefficient)
  + -2.0 * config.entropy_coefficient)
value loss twice
  algorithms.actor_critic:
    test_coefficients.py::test_the_value_loss_is_half_the_squared_error_times_its_coefficient
  - value * config.value_coefficient
  + value * (2.0 * config.value_coefficient)
distance to the reference with the other sign
  algorithms.group_policy:
    test_coefficients.py::test_the_penalty_pulls_towards_the_reference_in_proportion[grpo]
  - (kl, reference.kl_coefficient)
  + (kl, -reference.kl_coefficient)
distance to the reference added to the reward
  algorithms.reference: test_coefficients.py::test_rloo_takes_the_distance_from_the_outcome
  - batch.reward - coefficient * kl
  + batch.reward + coefficient * kl
the penalty of PPO with the other sign
  algorithms.ppo_penalty: test_coefficients.py::test_ppo_is_pulled_back_to_where_the_update_began
  - policy_loss + beta *
  + policy_loss - beta *
the KL penalty to the reference added to the reward of a step
  algorithms.reference: test_ppo.py::test_price_of_a_token_by_hand
  - batch.reward - beta * jnp.where
  + batch.reward + beta * jnp.where
frozen parameters are trained
  updates: test_frozen.py::test_a_frozen_base_is_read_and_not_trained[ppo]
  - params.without_frozen() if isinstance(params, ActorCritic) else params
  + params
β is a square
  algorithms.ppo_penalty: test_coefficients.py::test_ppo_is_pulled_back_to_where_the_update_began
  - policy_loss + beta *
  + policy_loss + beta**2 *
γ for λ
  algorithms.actor_critic: test_coefficients.py::test_lambda_decays_what_follows
  - lambda_=lambda_, unroll
  + lambda_=gamma, unroll
ε high for ε low in PPO
  algorithms.ppo: test_coefficients.py::test_ratios_lose_their_gradient_outside_the_clip[ppo]
  - clipped(config.epsilon_low, config.epsilon_high)
  + clipped(config.epsilon_high, config.epsilon_low)
the upper clip of DAPO at the lower ε
  algorithms.group_policy:
    test_coefficients.py::test_ratios_lose_their_gradient_outside_the_clip[dapo]
  - config.epsilon_low, config.upper, config.dual
  + config.epsilon_low, config.epsilon_low, config.dual
CISPO clips above at ε, not 1 + ε
  losses: test_coefficients.py::test_cispo_clips_the_weight_and_drops_nothing
  - weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, 1.0 + epsilon_high)
  + weight = jnp.clip(ratio(log_prob, old_log_prob), 1.0 - epsilon_low, epsilon_high)
the std of the group without its ε
  algorithms.group_policy: test_coefficients.py::test_std_epsilon_is_added_to_the_std_of_the_group
  - epsilon=config.std_epsilon
  + epsilon=1e-6
punished by the square of the factor
  algorithms.dapo:
    test_coefficients.py::test_the_punishment_of_length_is_its_factor_times_the_share_of_the_cache
  - factor=config.overlong_factor
  + factor=config.overlong_factor**2
statistics of the batch in place of the group
  algorithms.group_policy: test_coefficients.py::test_std_epsilon_is_added_to_the_std_of_the_group
  - jax.vmap(relative)(outcome)[..., None]
  + relative(reward.sum(axis=-1).ravel()).reshape(reward.shape[:2])[..., None]
earlier outcomes keep half of their weight
  group_statistics: test_coefficients.py::test_earlier_outcomes_keep_that_weight_in_each_iteration
  - weight = decay * running.weight + count
  + weight = 0.5 * decay * running.weight + count
the early stop admits one and a half times its target
  algorithms.ppo: test_step_sizes.py::test_the_target_is_what_an_early_stop_admits
  - .value() > config.target_kl
  + .value() > 1.5 * config.target_kl
the penalty adapts to the square of its target
  algorithms.ppo_penalty: test_step_sizes.py::test_the_target_is_what_the_penalty_aims_at
  - adapt_coefficient(beta, kl.value(), config.target_kl)
  + adapt_coefficient(beta, kl.value(), config.target_kl**2)
the price adapts the wrong way
  algorithms.reference:
    test_step_sizes.py::test_the_price_of_distance_moves_in_proportion_to_the_error
  - (beta, kl.value(), settings.target_kl)
  + (beta, 2.0 * settings.target_kl - kl.value(), settings.target_kl)
# The length of a step.
Adam climbs
  optimizers:
    test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]
  - optax.scale(-1.0 * learning_rate)
  + optax.scale(learning_rate)
the norm is cut after Adam
  optimizers:
    test_step_sizes.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]
  - optax.chain(clip, direction, scale)
  + optax.chain(direction, clip, scale)
the critic steps by the policy's learning rate
  algorithms.critic_fit: test_step_sizes.py::test_the_critic_steps_by_its_own_learning_rate
  - optimizers.adam(config.value_learning_rate
  + optimizers.adam(getattr(config, "learning_rate", 1e-3)
decay counted in gradient steps of A2C and PPO
  algorithms.actor_critic: test_optimizers.py::test_step_sizes_follow_iterations[a2c-linear]
  - optimizers.scale(config, state.step)
  + optimizers.scale(config, 16 * state.step)
decay counted in gradient steps of methods without a critic
  algorithms.group_policy: test_optimizers.py::test_step_sizes_follow_iterations[grpo-linear]
  - optimizers.scale(config, state.step)
  + optimizers.scale(config, state.step * config.num_epochs * config.num_minibatches)
decay counted in gradient steps of supervised training
  algorithms.sft: test_optimizers.py::test_step_sizes_follow_iterations[sft-linear]
  - optimizers.scale(config, state.step)
  + optimizers.scale(config, state.step * config.num_epochs * config.num_minibatches)
REINFORCE keeps its step size
  algorithms.reinforce: test_optimizers.py::test_step_sizes_follow_iterations[reinforce-cosine]
  - optimizers.scale(config, state.step)
  + 1.0
warm-up is left out
  optimizers: test_optimizers.py::test_step_sizes_follow_iterations[ppo-linear]
  - rise = warm_up(step, config.warm_up_iterations)
  + rise = 1.0
a cosine rises again
  optimizers: test_optimizers.py::test_step_sizes_follow_iterations[grpo-cosine]
  - jnp.minimum(step / iterations, 1.0)
  + step / iterations
a cosine is linear
  optimizers: test_optimizers.py::test_step_sizes_follow_iterations[ppo_penalty-cosine]
  - cosine_decay if config.schedule == COSINE else decay
  + decay
every gradient step decays by itself
  updates: test_optimizers.py::test_step_sizes_follow_iterations[ppo-linear]
  - rows_of(order), counts, nonempty, scale)
  + rows_of(order), counts, nonempty, scale / num_minibatches)
# Trust regions.
damping thrice
  natural_updates: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - x + damping * v
  + x + 3.0 * damping * v
damping once for each device
  natural_updates: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - x + damping * v
  + x + damping * (1 if axis_name is None else jax.lax.axis_size(axis_name)) * v
damping once for each microbatch
  natural_updates: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - x + damping * v
  + x + damping * num_microbatches * v
δ in place of 2δ
  trust_region: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - jnp.sqrt(2.0 * max_kl
  + jnp.sqrt(max_kl
gradients of devices averaged by their own counts
  natural_updates: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - count = pooled(lambda part: surrogate(policy(params, part), part).count, parts)
  + count = minibatches.summed(lambda part: surrogate(policy(params, part), part).count, parts)
rows of the Fisher matrix weighed by the devices
  natural_updates: test_fisher.py::test_the_whole_update_is_that_of_the_dense_matrix
  - jnp.maximum(masked.psum(subset_mask.sum(dtype=float), axis_name), 1.0)
  + jnp.maximum(subset.mask.sum(dtype=float), 1.0)
downhill
  natural_updates: test_step_sizes.py
  - uphill = jax.tree.map(jnp.negative, gradient)
  + uphill = gradient
the search shortens by its own factor
  algorithms.trpo: test_step_sizes.py::test_each_refusal_shortens_the_step_by_that_factor
  - backtrack=config.backtrack,
  + backtrack=0.8,
an absolute tolerance
  natural_updates:
    test_step_sizes.py::test_the_conjugate_gradient_stops_at_that_share_of_the_gradient
  - tolerance=tolerance)
  -         step
  + tolerance=tolerance / optax.tree.norm(uphill))
  +         step
the page of --help holds every flag
  run.experiment.flags: test_script_flags.py::test_help_shows_the_common_flags
  - if everything or config.setting_of(field).common]
  + ]
a step that may be left out is traced twice
  updates: test_updates.py::test_loss_is_traced_once_for_counts_and_gradient
  - (carry, no_metrics), traced, carry
  + (carry, no_metrics), step, carry
the penalty of PPO is KL(old ‖ new) in either direction
  algorithms.ppo_penalty:
    test_step_sizes.py::test_the_penalty_is_the_kl_in_its_direction[categorical-new_old]
  - return old.kl(new) if config.kl_direction == OLD_NEW else new.kl(old)
  + return old.kl(new)
the loss of PPO with a penalty ignores its direction
  algorithms.ppo_penalty:
    test_step_sizes.py::test_the_penalty_is_the_kl_in_its_direction[gaussian-new_old]
  - beta * divergence(config, old, distribution)
  + beta * old.kl(distribution)
β adapts to KL(old ‖ new) in either direction
  algorithms.ppo_penalty:
    test_step_sizes.py::test_the_penalty_is_the_kl_in_its_direction[categorical-new_old]
  - masked.total(divergence(config, old, policy(params, samples)), samples.mask)
  + masked.total(old.kl(policy(params, samples)), samples.mask)
the directions of the penalty are swapped
  algorithms.ppo_penalty:
    test_step_sizes.py::test_the_penalty_is_the_kl_in_its_direction[gaussian-old_new]
  - config.kl_direction == OLD_NEW
  + config.kl_direction != OLD_NEW
the approximate KL of a penalty is KL(new ‖ old)
  algorithms.ppo_penalty:
    test_step_sizes.py::test_the_penalty_is_the_kl_in_its_direction[gaussian-old_new]
  - divergences.k3(samples.log_prob, log_prob)
  + divergences.k3(log_prob, samples.log_prob)
the trust region is of KL(new ‖ old)
  natural_updates: test_kept.py::test_the_trust_region_is_over_the_sets
  - masked.total(old.kl(distribution), part.mask)
  + masked.total(distribution.kl(old), part.mask)
each device has a baseline of its own
  algorithms.reinforce:
    test_algorithms.py::test_statistics_of_eight_devices_equal_one[reinforce-batch_mean-False]
  - masked.mean(target, batch.mask, axis_name=config.axis_name)
  + masked.mean(target, batch.mask)
returns are divided by the std of each device
  algorithms.reinforce:
    test_algorithms.py::test_statistics_of_eight_devices_equal_one[reinforce-none-True]
  - masked.moments(advantage, batch.mask, axis_name=config.axis_name)
  + masked.moments(advantage, batch.mask)
REINFORCE whitens on each device alone
  algorithms.reinforce:
    test_algorithms.py::test_statistics_of_eight_devices_equal_one[reinforce-value-True]
  - advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)
  + advantages.whiten(advantage, batch.mask)
β adapts to the KL of each device
  algorithms.ppo_penalty:
    test_algorithms.py::test_statistics_of_eight_devices_equal_one[ppo_penalty]
  - masked.psum(metrics["exact_kl"], config.axis_name)
  + metrics["exact_kl"]
the price adapts to the distance of each device
  algorithms.reference:
    test_algorithms.py::test_statistics_of_eight_devices_equal_one[ppo_reference]
  - masked.psum(masked.total(k1, batch.mask), axis_name)
  + masked.total(k1, batch.mask)
each device has running statistics of its own
  algorithms.grpo: test_algorithms.py::test_statistics_of_eight_devices_equal_one[grpo]
  - decay=config.running_decay, axis_name=config.axis_name, **settings
  + decay=config.running_decay, **settings
supervised steps follow the gradient of each device
  algorithms.sft: test_algorithms.py::test_statistics_of_eight_devices_equal_one[sft]
  - target=problem.target, axis_name=config.axis_name
  + target=problem.target
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "a cosine counts the steps of the optimizer",
        "optimizers",
        "return in_float32(optax.chain(optax.clip_by_global_norm(clip), by_name(config, problem)))",
        "return in_float32(optax.chain(optax.clip_by_global_norm(clip), by_name(config, problem), "
        "optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, max(config.decay_iterations, 1)))"
        "))",
        ("test_optimizers.py::test_a_cosine_outlives_resets_of_the_optimizer[lion]",),
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
]
