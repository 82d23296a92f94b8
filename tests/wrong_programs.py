"""Named wrong programs: plausible mistakes that a test must notice, `tests/mutants.py --wrong`.

Each is one replacement in the text of one module. The text `before` must occur exactly once, so
that a change of the program breaks the table and no mistake drops out of it unnoticed.
"""

import wrong_coefficients
import wrong_regressions
from wrong import Wrong

WRONG = [
    *wrong_coefficients.WRONG,
    # Random numbers.
    Wrong(
        "one key for action and environment",
        "control.unroll",
        "step_keys[:, 1], envs.state",
        "step_keys[:, 0], envs.state",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "one key for action and environment in an evaluation",
        "control.unroll",
        "step_keys[:, 1], play.state",
        "step_keys[:, 0], play.state",
        ("test_random_numbers.py::test_nor_in_an_evaluation_that_samples",),
    ),
    Wrong(
        "one key for prompt and completion",
        "language.problem",
        "keys[:, 1]",
        "keys[:, 0]",
        ("test_random_numbers.py::test_the_noise_of_completions_is_not_that_of_prompts",),
    ),
    Wrong(
        "one key for prompt and completion in an evaluation",
        "language.evaluation",
        "keys[:, 1]",
        "keys[:, 0]",
        ("test_random_numbers.py::test_the_noise_of_completions_is_not_that_of_prompts",),
    ),
    Wrong(
        "the same shuffle in every epoch",
        "updates",
        "order(jax.random.split(key, num_epochs))",
        "order(jnp.stack([key] * num_epochs))",
        ("test_random_numbers.py::test_every_epoch_is_shuffled_anew_and_deals_out_every_row",),
    ),
    Wrong(
        "a vine without common random numbers in its first step",
        "control.vine",
        "unroll.row_keys(first_key, state_index)",
        "unroll.row_keys(first_key, jnp.arange(state_index.shape[0]))",
        (
            "test_random_numbers.py::test_the_branches_of_a_state_share_their_noise_and_states_do_not",
        ),
    ),
    Wrong(
        "a vine without common random numbers after it",
        "control.vine",
        "EnvState(state_index, state,",
        "EnvState(jnp.arange(state_index.shape[0], dtype=jnp.int32), state,",
        (
            "test_random_numbers.py::test_the_branches_of_a_state_share_their_noise_and_states_do_not",
        ),
    ),
    Wrong(
        "the key does not advance in an update",
        "learner",
        "        state, key = next_key(state)\n        measured",
        "        _, key = next_key(state)\n        measured",
        ("test_random_numbers.py::test_no_key_is_used_twice",),
    ),
    Wrong(
        "the key does not advance at all",
        "learner",
        "return state._replace(key=following), key",
        "return state, key",
        ("test_random_numbers.py::test_no_two_iterations_sample_the_same",),
    ),
    Wrong(
        "every step of an episode with the same noise",
        "control.unroll",
        "jax.random.fold_in(key, t)",
        "jax.random.fold_in(key, 0 * t)",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "every environment with the same noise",
        "control.unroll",
        "keys = row_keys(key, envs.number)",
        "keys = row_keys(key, 0 * envs.number)",
        ("test_random_numbers.py::test_the_noise_of_actions_is_not_that_of_the_environment",),
    ),
    Wrong(
        "dynamic sampling generates one batch again and again",
        "dynamic_sampling",
        "jax.random.fold_in(key, fill.rounds)",
        "key",
        ("test_dynamic_sampling.py::test_the_first_informative_groups_are_kept_in_order",),
    ),
    # Evaluation.
    Wrong(
        "episodes are sampled where greedy is asked",
        "control.unroll",
        "        if greedy:",
        "        if False:",
        ("test_control.py::test_greedy_evaluation_plays_the_mode_whatever_the_key",),
    ),
    Wrong(
        "greedy does not reach the episodes",
        "control.evaluation",
        "greedy=greedy",
        "greedy=False",
        ("test_control.py::test_greedy_evaluation_plays_the_mode_whatever_the_key",),
    ),
    Wrong(
        "tokens are sampled where greedy is asked",
        "language.sampling",
        "        if greedy:",
        "        if False:",
        ("test_evaluation.py::test_greedy_answers_are_the_most_likely_tokens",),
    ),
    Wrong(
        "greedy does not reach the sampler",
        "language.evaluation",
        "greedy=n == 0",
        "greedy=False",
        ("test_evaluation.py::test_greedy_answers_are_the_most_likely_tokens",),
    ),
    # Bugs reported by users of similar libraries.
    Wrong(
        "a time limit ends the return",
        "advantages",
        "delta = reward + gamma * jnp.where(terminated, 0.0",
        "delta = reward + gamma * jnp.where(terminated | truncated, 0.0",
        ("test_coefficients.py::test_gamma_discounts_what_follows[ppo]",),
    ),
    Wrong(
        "the λ-recursion runs on over a time limit",
        "advantages",
        "decay = gamma * lambda_ * jnp.where(terminated | truncated",
        "decay = gamma * lambda_ * jnp.where(terminated",
        ("test_advantages.py::test_gae_by_hand",),
    ),
    Wrong(
        "the value of this state for that of the next",
        "control.problem",
        "nets.value(params, final_inputs)",
        "nets.value(params, inputs)",
        ("test_control.py::test_values_and_log_probs_are_those_of_apply",),
    ),
    Wrong(
        "the value of the next episode's first state",
        "control.problem",
        "normalize(collector, transition.final_observation)",
        "normalize(collector, transition.observation)",
        (
            "test_control.py::test_next_value_is_that_of_the_final_observation_and_not_of_the_next_episode",
        ),
    ),
    Wrong(
        "the action that was played beside the log-probability of the one that was drawn",
        "control.problem",
        "action=trajectory.action,",
        (
            "action=trajectory.action if environment.num_actions else "
            "jnp.clip(trajectory.action, -1.0, 1.0),"
        ),
        ("test_control.py::test_unclipped_action_is_stored_and_clipped_action_is_played",),
    ),
    Wrong(
        "advantages whitened on each device alone",
        "algorithms.actor_critic",
        "advantages.whiten(advantage, batch.mask, axis_name=config.axis_name)",
        "advantages.whiten(advantage, batch.mask)",
        ("test_algorithms.py::test_in_double_precision_eight_devices_equal_one[ppo-table]",),
    ),
    Wrong(
        "denominators of each device alone",
        "updates",
        "counts = masked.psum(local, axis_name)",
        "counts = local",
        ("test_updates.py::test_devices_do_not_change_the_update",),
    ),
    Wrong(
        "EOS is not trained",
        "language.problem",
        "mask = position < completions.length[:, None]",
        "mask = position < completions.length[:, None] - 1",
        ("test_language_problem.py::test_mask_follows_the_length_and_keeps_eos",),
    ),
    Wrong(
        "the learner at another temperature than the sampler",
        "language.problem",
        "Categorical(logits / temperature)",
        "Categorical(logits)",
        ("test_language_problem.py::test_sampler_and_learner_agree",),
    ),
    Wrong(
        "a group is informative where its std is not 0",
        "advantages",
        "differ = informative(reward)",
        "differ = jnp.std(reward) > 0",
        ("test_advantages.py::test_equal_rewards_give_exactly_zero",),
    ),
    Wrong(
        "dynamic sampling filters on the reward",
        "dynamic_sampling",
        "accept(batch.score)",
        "accept(jnp.sum(batch.reward, axis=1).reshape(batch.score.shape))",
        ("test_dynamic_sampling.py::test_a_reward_that_tells_everyone_apart_does_not_decide",),
    ),
    Wrong(
        "rewards are whole numbers",
        "language.problem",
        "jnp.where(is_last, score[:, None], 0.0)",
        "jnp.where(is_last, score[:, None].astype(int), 0).astype(float)",
        ("test_language_problem.py::test_rewards_are_what_the_verifier_says_to_the_last_digit",),
    ),
    Wrong(
        "the policy is its own reference",
        "algorithms.reference",
        "state.params._replace(policy=state.reference_params)",
        "state.params",
        ("test_coefficients.py::test_rloo_takes_the_distance_from_the_outcome",),
    ),
    Wrong(
        "an empty minibatch moves Adam's momentum",
        "updates",
        "finite & (sum(counts) > 0) & ~stopped",
        "finite & ~stopped",
        ("test_updates.py::test_empty_minibatch_changes_nothing_not_even_momentum",),
    ),
    Wrong(
        "a step that is not finite is taken",
        "updates",
        "take = finite & (",
        "take = jnp.bool_(True) & (",
        ("test_updates.py::test_non_finite_step_is_skipped_and_counted",),
    ),
    Wrong(
        "the log-ratio without its clamp",
        "distributions",
        (
            "jnp.clip(log_prob.astype(dtype) - old_log_prob.astype(dtype), -MAX_LOG_RATIO, "
            "MAX_LOG_RATIO)"
        ),
        "log_prob.astype(dtype) - old_log_prob.astype(dtype)",
        ("test_distributions.py::test_ratio_is_clamped",),
    ),
    Wrong(
        "the clipped surrogate is a maximum",
        "losses",
        "objective = jnp.minimum(r * advantage",
        "objective = jnp.maximum(r * advantage",
        ("test_losses.py::test_clipping",),
    ),
    Wrong(
        "clips that are counted whatever the advantage",
        "losses",
        "((advantage > 0) & (ratio(log_prob",
        "((advantage == advantage) & (ratio(log_prob",
        ("test_step_sizes.py::test_entropy_clips_and_the_norm_of_the_gradient_are_logged[grpo]",),
    ),
    Wrong(
        "training prompts in an evaluation",
        "language.evaluation",
        "task.sample(key, True)",
        "task.sample(key, False)",
        ("test_evaluation.py::test_what_is_asked_is_held_out",),
    ),
    Wrong(
        "held-out prompts in training",
        "language.problem",
        "source.sample(key, False)",
        "source.sample(key, True)",
        ("test_language_problem.py::test_training_and_evaluation_ask_of_their_own_split",),
    ),
    Wrong(
        "the return of episodes that go on is logged",
        "control.problem",
        "masked.total(trajectory.episode_return, ended)",
        "masked.total(trajectory.episode_return)",
        ("test_control.py::test_episode_metrics_count_completed_episodes_only",),
    ),
    Wrong(
        "the policy acts on raw observations",
        "control.problem",
        "nets.policy(params, normalize(collector, observation))",
        "nets.policy(params, observation)",
        ("test_control.py::test_values_and_log_probs_are_those_of_apply",),
    ),
    Wrong(
        "tokens after EOS are kept",
        "language.sampling",
        "token = jnp.where(loop.ended, pad_token, token)",
        "token = token",
        ("test_sampling.py::test_what_the_policy_would_say_after_the_end_is_not_kept",),
    ),
    Wrong(
        "the mask is whatever is not PAD",
        "language.problem",
        "mask = position < completions.length[:, None]",
        "mask = completions.tokens != task.tokenizer.pad",
        ("test_language_problem.py::test_mask_follows_the_length_and_keeps_eos",),
    ),
    Wrong(
        "what stands behind the mask stays",
        "learner",
        "batch = zero_masked(batch)",
        "batch = batch",
        ("test_group_policy.py::test_nothing_behind_the_mask_reaches_the_parameters",),
    ),
    Wrong(
        "the search does not ask for a gain",
        "trust_region",
        "(kl <= max_kl) & (gain > 0)",
        "(kl <= max_kl)",
        ("test_trust_region.py::test_refusal_returns_the_parameters_bit_exactly",),
    ),
    Wrong(
        "the search does not ask for the KL",
        "trust_region",
        "jnp.isfinite(kl) & (kl <= max_kl) & (gain",
        "jnp.isfinite(kl) & (gain",
        ("test_trust_region.py::test_refusal_returns_the_parameters_bit_exactly",),
    ),
    Wrong(
        "dynamic sampling without a bound",
        "dynamic_sampling",
        "(fill.filled < wanted) & (fill.rounds < max_generation_batches)",
        "(fill.filled < wanted) & (fill.rounds < 10 * max_generation_batches)",
        ("test_dynamic_sampling.py::test_it_gives_up_and_masks_what_is_empty",),
    ),
    Wrong(
        "empty slots are trained on",
        "dynamic_sampling",
        "mask=batch.mask & jnp.repeat(valid, shapes.score.shape[1])[:, None],",
        "mask=batch.mask | ~jnp.repeat(valid, shapes.score.shape[1])[:, None],",
        ("test_dynamic_sampling.py::test_it_gives_up_and_masks_what_is_empty",),
    ),
    Wrong(
        "the reference follows the policy",
        "algorithms.group_policy",
        "due = (state.step + 1) % iterations == 0",
        "due = state.step >= 0",
        (
            "test_group_policy.py::test_reset_makes_the_policy_the_reference_and_starts_the_optimizer_afresh",
        ),
    ),
    Wrong(
        "a shuffle that starts anew on every device",
        "minibatches",
        "first = 0 if axis_name is None else jax.lax.axis_index(axis_name) * local",
        "first = 0",
        ("test_updates.py::test_devices_do_not_change_the_update",),
    ),
    Wrong(
        "a response that ended is overlong",
        "algorithms.dapo",
        "jnp.any(batch.truncated, axis=1",
        "jnp.any(batch.terminated, axis=1",
        ("test_dynamic_sampling.py::test_overlong_filtering_leaves_cut_rows_out",),
    ),
    Wrong(
        "the last token of the budget is no truncation",
        "language.problem",
        "truncated=is_last & ~completions.ended[:, None]",
        "truncated=is_last & completions.ended[:, None]",
        ("test_language_problem.py::test_last_token_terminates_and_the_budget_truncates",),
    ),
    *wrong_regressions.WRONG,
]
