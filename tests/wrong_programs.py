"""Named wrong programs: plausible mistakes that a test must notice, `make gate`.

Each wrong program is one replacement in the text of one module. The text `before` must occur
exactly once, so that a change of the module breaks the table and no mistake drops out of the table
unnoticed.
"""

import wrong_aot
import wrong_attention
import wrong_claims
import wrong_coefficients
import wrong_collections
import wrong_corrections
import wrong_dialogues
import wrong_environments
import wrong_held_out
import wrong_interrupts
import wrong_limits
import wrong_pretrained
import wrong_python
import wrong_random_numbers
import wrong_regressions
import wrong_rounding
import wrong_samples
import wrong_settings
import wrong_spaces
import wrong_static_values
import wrong_store
import wrong_timings
from wrong import Wrong

WRONG = [
    *wrong_aot.WRONG,
    *wrong_attention.WRONG,
    *wrong_claims.WRONG,
    *wrong_collections.WRONG,
    *wrong_coefficients.WRONG,
    *wrong_corrections.WRONG,
    *wrong_random_numbers.WRONG,
    *wrong_rounding.WRONG,
    *wrong_timings.WRONG,
    # Evaluation.
    Wrong(
        "episodes are sampled where greedy is asked",
        "control.unroll",
        "    if greedy:",
        "    if False:",
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
        "    if greedy:",
        "    if False:",
        ("test_evaluation.py::test_greedy_answers_are_the_most_likely_tokens",),
    ),
    Wrong(
        "greedy does not reach the sampler",
        "language.evaluation",
        "greedy=n == 0",
        "greedy=False",
        ("test_evaluation.py::test_greedy_answers_are_the_most_likely_tokens",),
    ),
    # Bugs that users of similar libraries reported.
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
        "nets.values(params, steps, final)",
        "nets.values(params, steps, seen)",
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
            "action=trajectory.action if spaces.num_actions else "
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
        "counts, unmasked = masked.psum(jax.vmap(measure, axis_size=steps)(orders), axis_name)",
        "counts, unmasked = jax.vmap(measure, axis_size=steps)(orders)",
        ("test_updates.py::test_devices_do_not_change_the_update",),
    ),
    Wrong(
        "denominators of the first minibatch for all",
        "updates",
        "return step_of.counts(params, rows), ",
        "return step_of.counts(params, rows_of(orders[0])), ",
        ("test_updates.py::test_each_step_divides_by_the_counts_of_its_own_minibatch",),
    ),
    Wrong(
        "a product whose input has no derivative",
        "control.networks",
        "dx @ kernel + of_kernel(x, d_kernel)",
        "of_kernel(x, d_kernel)",
        ("test_networks.py::test_product_has_the_derivatives_of_a_matrix_product[batch1-shape1]",),
    ),
    Wrong(
        "XLA takes the transpose of a tall kernel's gradient into the product",
        "control.networks",
        "jax.lax.optimization_barrier(kernel.T)",
        "kernel.T",
        (
            "test_networks.py::test_the_gradient_of_a_tall_kernel_is_computed_transposed"
            "[seeds0-36-shape0-True]",
        ),
    ),
    Wrong(
        "a kernel is tall with few rows too",
        "control.networks",
        "math.prod(x.shape[:-1]) >= 4 * columns",
        "math.prod(x.shape[:-1]) >= 2 * columns",
        (
            "test_networks.py::test_the_gradient_of_a_tall_kernel_is_computed_transposed"
            "[seeds0-35-shape1-False]",
        ),
    ),
    Wrong(
        "parameters of several types are one vector",
        "optimizers",
        "len(types) > 1 or ",
        "",
        ("test_backend.py::test_other_trees_stay_as_they_are[tree0]",),
    ),
    Wrong(
        "a CPU hands on one vector",
        "optimizers",
        "plain = target is None or target.on_cpu",
        "plain = False",
        ("test_backend.py::test_gradient_steps_hand_on_one_vector",),
    ),
    Wrong(
        "a method keeps to its problem's target whatever it is given",
        "types",
        "target=target or self.target or backend.here()",
        "target=self.target or target or backend.here()",
        ("test_backend.py::test_a_method_may_be_for_another_target_than_its_problem",),
    ),
    Wrong(
        "a transformer decodes as this process would, whatever its target",
        "language.transformer",
        "return model.clone(target=target) if target and isinstance(model, Transformer) else model",
        "return model",
        ("test_kernels.py::test_many_rows_and_accelerators_keep_the_parameters",),
    ),
    Wrong(
        "a rollout is unrolled as on a CPU, whatever its target",
        "control.unroll",
        "1 if target is None else target.unroll(8)",
        "1",
        (
            "test_backend.py::test_a_program_for_another_platform_is_traced_here"
            "[on_cartpole-jaxrl_po.algorithms.ppo-config0]",
        ),
    ),
    Wrong(
        "settings of an advantage that another replaces are taken without a word",
        "algorithms.actor_critic",
        'for name in ("gamma", "lambda_", "estimator", "n_steps", "discount_per"):',
        'for name in ("estimator", "n_steps", "discount_per"):',
        (
            "test_own_advantage.py::test_settings_of_the_advantage_that_is_replaced_are_refused[ppo]",
        ),
    ),
    Wrong(
        "the sampler of a trajectory is the old policy",
        "algorithms.actor_critic",
        'sampler_log_prob=batch.columns.get("sampler_log_prob", batch.log_prob),',
        "sampler_log_prob=batch.log_prob,",
        ("test_own_advantage.py::test_a_trajectory_is_a_row_of_the_batch",),
    ),
    Wrong(
        "an advantage of one's own may have any shape",
        "algorithms.actor_critic",
        "if not pair or any(surrogates.shape_of(x) != shape for x in result):",
        "if not pair:",
        ("test_own_advantage.py::test_another_form_of_result_is_named",),
    ),
    Wrong(
        "a long step is short if it calls functions",
        "control.hoisting",
        "return len(jaxpr.eqns) + sum(map(_equations, inner))",
        "return len(jaxpr.eqns)",
        (
            "test_backend.py::test_short_loops_take_several_steps_at_a_time",
            "test_backend.py::test_steps_with_long_loops_inside_are_taken_one_at_a_time",
        ),
    ),
    Wrong(
        "columns of a narrow product side by side along the rows",
        "control.networks",
        "jnp.stack([x @ column for column in kernel.T], axis=-1)",
        "jnp.stack([x @ column for column in kernel.T]).reshape(*x.shape[:-1], -1)",
        ("test_networks.py::test_product_has_the_derivatives_of_a_matrix_product[batch1-shape1]",),
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
        "language.unembedding",
        "restricted(some(logits) / temperature, kept)",
        "restricted(some(logits), kept)",
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
        "finite & nonempty & ~stopped",
        "finite & ~stopped",
        ("test_updates.py::test_empty_minibatch_changes_nothing_not_even_momentum",),
    ),
    Wrong(
        "a step that is not finite is taken",
        "updates",
        "take = finite & nonempty",
        "take = nonempty",
        ("test_updates.py::test_non_finite_step_is_skipped_and_counted",),
    ),
    Wrong(
        "the log-ratio without its clamp",
        "divergences",
        "jnp.clip(log_prob.astype(dtype) - old_log_prob, -MAX_LOG_RATIO, MAX_LOG_RATIO)",
        "log_prob.astype(dtype) - old_log_prob",
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
        "language.tasks.types",
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
        "control.actor",
        "nets.act(params, memory, normalize(collector, observation))",
        "nets.act(params, memory, observation)",
        ("test_control.py::test_values_and_log_probs_are_those_of_apply",),
    ),
    Wrong(
        "tokens after EOS are kept",
        "language.sampling",
        "token = jnp.where(said.ended, pad_token, token)",
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
        "finite & (kl <= max_kl) & (gain",
        "finite & (gain",
        ("test_trust_region.py::test_refusal_returns_the_parameters_bit_exactly",),
    ),
    Wrong(
        "dynamic sampling without a bound",
        "dynamic_sampling",
        "(fill.filled < slots.wanted) & (fill.rounds < max_generation_batches)",
        "(fill.filled < slots.wanted) & (fill.rounds < 10 * max_generation_batches)",
        ("test_dynamic_sampling.py::test_it_gives_up_and_masks_what_is_empty",),
    ),
    Wrong(
        "empty slots are trained on",
        "dynamic_sampling",
        "mask = rows.mask & jnp.repeat(valid, kept.score.shape[1])[:, None]",
        "mask = rows.mask | ~jnp.repeat(valid, kept.score.shape[1])[:, None]",
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
    Wrong(
        "an ignored action is trained on",
        "control.recorded",
        "mask, ended = recording.mask, recording.terminated | recording.truncated",
        "mask, ended = jnp.ones_like(recording.mask), recording.terminated | recording.truncated",
        ("test_host.py::test_a_slot_that_holds_no_sample_changes_nothing[a2c]",),
    ),
    Wrong(
        "statistics of observations on which nothing was done",
        "control.recorded",
        "statistics.update(collector, observation[:, :-1], reward, ended, mask)",
        "statistics.update(collector, observation[:, :-1], reward, ended)",
        ("test_host.py::test_statistics_are_those_of_the_samples",),
    ),
    Wrong(
        "on the host, the value of this observation for that of the next",
        "control.actor",
        "of_steps[:, :-1], of_steps[:, 1:]",
        "of_steps[:, :-1], of_steps[:, :-1]",
        ("test_host.py::test_the_batch_bootstraps_from_the_true_final_observation[True]",),
    ),
    Wrong(
        "a truncation on the host is recorded as a termination",
        "run.host.rollouts",
        "made.truncated[:, :, t] = truncated & ~terminated & mask",
        "made.terminated[:, :, t] |= truncated & mask",
        ("test_host.py::test_the_batch_bootstraps_from_the_true_final_observation[True]",),
    ),
    Wrong(
        "environments of the host share their seed",
        "run.host.rollouts",
        "seed_of(self._base, seed, env, iteration)",
        "seed_of(self._base, seed, 0, iteration)",
        ("test_host.py::test_further_seeds_leave_the_environments_of_the_first_as_they_are",),
    ),
    Wrong(
        "one reward that is not finite stays in the statistics",
        "control.normalizer",
        "lambda new, old: jnp.where(finite, new, old), new, old",
        "lambda new, old: new, new, old",
        ("test_host.py::test_a_reward_that_is_not_finite_is_counted_and_its_update_skipped",),
    ),
    Wrong(
        "rows of blocks and of pixels within them mixed",
        "control.networks",
        "blocks = jnp.moveaxis(blocks, -4, -3).reshape",
        "blocks = blocks.reshape",
        ("test_networks.py::test_convolution_equals_xlas[4-2-size1]",),
    ),
    *wrong_dialogues.WRONG,
    *wrong_environments.WRONG,
    *wrong_held_out.WRONG,
    *wrong_interrupts.WRONG,
    *wrong_limits.WRONG,
    *wrong_pretrained.WRONG,
    *wrong_python.WRONG,
    *wrong_regressions.WRONG,
    *wrong_samples.WRONG,
    *wrong_settings.WRONG,
    *wrong_store.WRONG,
    *wrong_spaces.WRONG,
    *wrong_static_values.WRONG,
]
