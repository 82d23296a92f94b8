"""Named wrong programs: mistakes that pass for the real thing until a test asks. `tests/mutants.py --wrong` runs them.

Each is one replacement in the text of one module. The text before must stand there exactly once, so
that a program which is written otherwise breaks this table and no mistake drops out of it unseen.
"""

import re
from typing import NamedTuple


class Wrong(NamedTuple):
    """One wrong program.

    Attributes:
      name: what is wrong.
      module: of `jaxrl_po`.
      before: text of the module, which stands in it once.
      after: what stands there in the wrong program.
      tests: files or tests in this folder, each of which must notice.
    """

    name: str
    module: str
    before: str
    after: str
    tests: tuple[str, ...]

    def source(self, text: str) -> str:
        """The module's text with the mistake; how the lines are broken does not matter.

        Raises:
          ValueError: the text before does not stand there exactly once.

        Example:
          >>> Wrong("sign", "losses", "f(a - b, c)", "f(a + b, c)", ()).source("return f(\\n  a - b,\\n  c,\\n)")
          'return f(a + b, c)'
        """
        found = list(pattern(self.before).finditer(text))
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: {self.before!r} stands {len(found)} times in {self.module}, not once"
            )
        return text[: found[0].start()] + self.after + text[found[0].end() :]


def pattern(code: str) -> re.Pattern[str]:
    """What finds the code however its lines are broken; white space at its ends counts."""
    inner = code.strip()
    start, end = code[: len(code) - len(code.lstrip())], code[len(code.rstrip()) :]
    parts = []
    for token in re.findall(r"\s+|\w+|[^\w\s]", inner):
        if token.isspace():
            parts.append(r"\s+")
        elif token in "([{":
            parts.append(re.escape(token) + r"\s*")
        elif token in ")]}":
            parts.append(r",?\s*" + re.escape(token))
        else:
            parts.append(re.escape(token))
    return re.compile(re.escape(start) + "".join(parts) + re.escape(end))


WRONG = [
    # Coefficients.
    Wrong(
        "entropy with the other sign in the joint loss",
        "algorithms.actor_critic",
        '"entropy": -config.entropy_coefficient',
        '"entropy": config.entropy_coefficient',
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
        "entropy * -config.entropy_coefficient",
        "entropy * config.entropy_coefficient",
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
        '"value_loss": config.value_coefficient',
        '"value_loss": 2.0 * config.value_coefficient',
        (
            "test_coefficients.py::test_the_value_loss_is_half_the_squared_error_times_its_coefficient",
        ),
    ),
    Wrong(
        "distance to the reference with the other sign",
        "algorithms.group_policy",
        " reference.kl_coefficient,\n",
        " -reference.kl_coefficient,\n",
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
        "β is a square",
        "algorithms.ppo_penalty",
        "policy_loss + beta *",
        "policy_loss + beta**2 *",
        ("test_coefficients.py::test_ppo_is_pulled_back_to_where_the_update_began",),
    ),
    Wrong(
        "γ for λ",
        "algorithms.actor_critic",
        "lambda_=config.lambda_",
        "lambda_=config.gamma",
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
        "jax.vmap(relative)(reward.sum(axis=-1))[..., None]",
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
        ("test_coefficients.py::test_the_target_is_what_an_early_stop_admits",),
    ),
    Wrong(
        "the penalty adapts to the square of its target",
        "algorithms.ppo_penalty",
        "adapt_coefficient(beta, kl, config.target_kl)",
        "adapt_coefficient(beta, kl, config.target_kl**2)",
        ("test_coefficients.py::test_the_target_is_what_the_penalty_aims_at",),
    ),
    Wrong(
        "the price adapts the wrong way",
        "algorithms.reference",
        "(beta, kl.value(), settings.target_kl)",
        "(beta, 2.0 * settings.target_kl - kl.value(), settings.target_kl)",
        ("test_coefficients.py::test_the_price_of_distance_moves_in_proportion_to_the_error",),
    ),
    # The length of a step.
    Wrong(
        "Adam climbs",
        "optimizers",
        "optax.scale_by_adam(eps=epsilon), optax.scale(-1.0 * learning_rate)",
        "optax.scale_by_adam(eps=epsilon), optax.scale(learning_rate)",
        (
            "test_coefficients.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]",
        ),
    ),
    Wrong(
        "the norm is cut after Adam",
        "optimizers",
        "optax.clip_by_global_norm(max_grad_norm), optax.scale_by_adam(eps=epsilon), optax",
        "optax.scale_by_adam(eps=epsilon), optax.clip_by_global_norm(max_grad_norm), optax",
        (
            "test_coefficients.py::test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut[grpo]",
        ),
    ),
    Wrong(
        "the critic steps by the policy's learning rate",
        "algorithms.actor_critic",
        "optimizers.adam(config.value_learning_rate",
        'optimizers.adam(getattr(config, "learning_rate", 1e-3)',
        ("test_coefficients.py::test_the_critic_steps_by_its_own_learning_rate",),
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
        "minibatch_step(carry, minibatch, scale)",
        "minibatch_step(carry, minibatch, scale / num_minibatches)",
        (
            "test_optimizers.py::test_step_sizes_rise_and_fall_with_iterations_and_not_with_gradient_steps[ppo]",
        ),
    ),
    # Trust regions.
    Wrong(
        "damping thrice",
        "updates",
        "x + damping * v",
        "x + 3.0 * damping * v",
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "damping once for each device",
        "updates",
        "x + damping * v",
        "x + damping * (1 if axis_name is None else jax.lax.axis_size(axis_name)) * v",
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "damping once for each microbatch",
        "updates",
        "x + damping * v",
        "x + damping * num_microbatches * v",
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "no damping in the length of the step",
        "updates",
        "trust_region.natural_step(direction, matvec,",
        (
            "trust_region.natural_step(direction, lambda v: jax.tree.map(lambda x, y: x - "
            "damping * y, matvec(v), v),"
        ),
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "δ in place of 2δ",
        "trust_region",
        "jnp.sqrt(2.0 * max_kl",
        "jnp.sqrt(max_kl",
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "gradients of devices averaged by their own counts",
        "updates",
        "count = pooled(lambda part: surrogate(policy(params, part), part).count, parts)",
        (
            "count = minibatches.summed(lambda part: surrogate(policy(params, part), "
            "part).count, parts)"
        ),
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "rows of the Fisher matrix weighed by the devices",
        "updates",
        "jnp.maximum(masked.psum(sampled_mask.sum(dtype=float), axis_name), 1.0)",
        "jnp.maximum(sampled.mask.sum(dtype=float), 1.0)",
        ("test_trust_region.py::test_the_whole_update_is_that_of_the_dense_matrix",),
    ),
    Wrong(
        "downhill",
        "updates",
        "uphill = jax.tree.map(jnp.negative, gradient)",
        "uphill = gradient",
        ("test_coefficients.py",),
    ),
    Wrong(
        "the search shortens by its own factor",
        "algorithms.trpo",
        "backtrack=config.backtrack,",
        "backtrack=0.8,",
        ("test_coefficients.py::test_each_refusal_shortens_the_step_by_that_factor",),
    ),
    Wrong(
        "an absolute tolerance",
        "updates",
        "tolerance=tolerance)\n        step",
        "tolerance=tolerance / optax.tree.norm(uphill))\n        step",
        ("test_coefficients.py::test_the_conjugate_gradient_stops_at_that_share_of_the_gradient",),
    ),
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
        "unroll.row_keys(first_key, number)",
        "unroll.row_keys(first_key, jnp.arange(number.shape[0]))",
        (
            "test_random_numbers.py::test_the_branches_of_a_state_share_their_noise_and_states_do_not",
        ),
    ),
    Wrong(
        "a vine without common random numbers after it",
        "control.vine",
        "EnvState(number, state,",
        "EnvState(jnp.arange(number.shape[0], dtype=jnp.int32), state,",
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
    # What peers' users reported.
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
        ("test_coefficients.py::test_entropy_clips_and_the_norm_of_the_gradient_are_logged[grpo]",),
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
        "now = (state.step + 1) % iterations == 0",
        "now = state.step >= 0",
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
    # What the first wave had wrong.
    Wrong(
        "whatever has the shape of a masked slot is zeroed",
        "learner",
        (
            "return batch._replace(**{name: jax.tree.map(zero, getattr(batch, name)) for name "
            "in ZEROED})"
        ),
        "like = lambda x: zero(x) if x.shape[:2] == batch.mask.shape else x\n"
        "    return batch._replace(inputs=jax.tree.map(like, batch.inputs))",
        ("test_halves.py::test_a_tasks_data_reaches_the_scorer_as_the_task_wrote_it",),
    ),
    Wrong(
        "the KL is that before the update",
        "algorithms.actor_critic",
        "divergences.k3(part.log_prob, policy(params, part).log_prob(part.action))",
        "divergences.k3(part.log_prob, part.log_prob)",
        ("test_algorithms.py::test_kl_is_one_quantity_that_of_the_whole_update[gspo]",),
    ),
    Wrong(
        "the KL of a vine is that from the proposal",
        "algorithms.actor_critic",
        "kl = ratio(part.log_prob, part.sampler_log_prob) * kl",
        "kl = divergences.k3(part.sampler_log_prob, policy(params, part).log_prob(part.action))",
        ("test_family.py::test_kl_of_a_vine_is_that_of_the_policy_and_not_of_the_proposal",),
    ),
    Wrong(
        "without a baseline returns are shifted and scaled, and shifted back unscaled",
        "algorithms.reinforce",
        "advantage = advantage / (advantages.scale_of(mean, std) + 1e-8)",
        "advantage = (advantage - mean) / (std + 1e-8) + mean",
        (
            "test_family.py::test_without_a_baseline_returns_are_divided_by_their_std_and_not_shifted",
        ),
    ),
    Wrong(
        "a std without a floor",
        "advantages",
        "jnp.maximum(std, 0.1 * jnp.abs(mean))",
        "std",
        (
            "test_control.py::test_a_return_that_does_not_vary_is_scaled_by_its_mean",
            "test_family.py::test_a_constant_return_without_a_baseline_is_scaled_by_its_mean",
        ),
    ),
    Wrong(
        "what is carried is stored up",
        "dynamic_sampling",
        "room = jnp.where(fill.rounds == 0, wanted - filled, 0)",
        "room = jnp.where(fill.rounds == 0, wanted - filled + generated, 0)",
        (
            "test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped",
        ),
    ),
    Wrong(
        "what is carried does not age",
        "dynamic_sampling",
        "spare = spare._replace(age=spare.age + 1)",
        "spare = spare._replace(age=spare.age)",
        ("test_dynamic_sampling.py::test_what_is_trained_on_is_at_most_one_update_old",),
    ),
    Wrong(
        "every token is a step",
        "algorithms.grpo",
        "advantages.process_relative(*group, **settings)",
        "advantages.process_relative(*group[:2], **settings)",
        ("test_group_policy.py::test_process_supervision_counts_the_steps_that_the_problem_names",),
    ),
    Wrong(
        "a process reward is due at every token",
        "language.problem",
        "step_end = is_last | jax.vmap(source.step_end)(members.problem, completions.tokens)",
        "step_end = None",
        ("test_language_problem.py::test_the_task_says_where_a_process_reward_is_due",),
    ),
    Wrong(
        "actions of a proposal as if the policy had drawn them",
        "algorithms.npg",
        "policy_surrogate if problem.on_policy else proposal_surrogate",
        "policy_surrogate",
        ("test_family.py::test_the_surrogate_of_a_vine_is_an_expectation_over_all_actions",),
    ),
    Wrong(
        "a proposal is admitted where nothing weighs it",
        "algorithms.actor_critic",
        "    if not problem.on_policy:\n        raise",
        "    if False:\n        raise",
        ("test_family.py::test_actions_of_a_proposal_are_refused_where_nothing_weighs_them",),
    ),
    Wrong(
        "actions are drawn in half precision",
        "distributions",
        "jax.random.categorical(key, _wide(self.logits))",
        "jax.random.categorical(key, self.logits)",
        ("test_distributions.py::test_what_is_drawn_in_half_precision_is_what_is_scored",),
    ),
    Wrong(
        "a Gaussian is scored in half precision",
        "distributions",
        "        mean, log_std = _wide(self.mean), _wide(self.log_std)\n        z =",
        "        mean, log_std = self.mean, self.log_std\n        z =",
        ("test_distributions.py::test_what_is_drawn_in_half_precision_is_what_is_scored",),
    ),
    Wrong(
        "a stride that starts anew in every part and on every device",
        "updates",
        "first = -(device * num_parts + jnp.arange(num_parts)) * rows % stride",
        "first = 0 * (device * num_parts + jnp.arange(num_parts))",
        ("test_trust_region.py::test_the_fisher_stride_counts_rows_over_devices_and_parts",),
    ),
    Wrong(
        "the sampler's log-probabilities are the old policy's in half precision",
        "learner",
        "if not problem.exact_sampler:",
        "if False:",
        ("test_old_policy.py::test_cached_and_whole_passes_differ_and_the_learners_own_are_taken",),
    ),
    Wrong(
        "what is carried is scored by parameters that did not draw it",
        "learner",
        "jnp.where(fresh, recomputed, batch.log_prob)",
        "recomputed",
        ("test_old_policy.py::test_what_is_recomputed_and_what_is_logged",),
    ),
    Wrong(
        "an episode that reaches its limit is overlong",
        "algorithms.dapo",
        "if config.overlong_filtering and problem.truncated_is_overlong:",
        "if config.overlong_filtering:",
        ("test_family.py::test_dapo_on_control_keeps_the_episodes_that_reach_the_limit",),
    ),
    Wrong(
        "what a jitted function reads is what all of its outputs depend on",
        "algorithms.actor_critic",
        "_, is_read = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))",
        (
            "is_read = [True for equation in program.jaxpr.eqns if equation.primitive.name in "
            "('jit', 'pjit')]"
        ),
        ("test_family.py::test_a_jitted_policy_and_critic_of_their_own_are_no_shared_body",),
    ),
    Wrong(
        "the KL of a surplus counts two updates",
        "algorithms.group_policy",
        "batch.mask & (batch.age == 0)[:, None]",
        "batch.mask",
        ("test_dynamic_sampling.py::test_kl_is_of_this_update_and_not_of_the_one_before",),
    ),
    Wrong(
        "the KL is of what is trained on",
        "algorithms.actor_critic",
        "part.mask if part.sampled is None else part.sampled",
        "part.mask",
        ("test_dynamic_sampling.py::test_kl_covers_what_the_loss_leaves_out",),
    ),
]
