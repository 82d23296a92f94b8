"""Planted mistakes in samples and their use: memories, groups, dialogues, scores."""

from wrong import Wrong, table

TEXT = """
# Rollouts on the host, and memory with a mask.
on the host, an episode begins with the memory of the last one
  control.recorded: test_memory.py::test_a_host_environment_replays_what_acted
  - unroll.forget(memory, begins), spaces
  + memory, spaces
on the host, memory survives an episode that ends with an iteration
  run.host.rollouts: test_memory.py::test_a_host_environment_replays_what_acted
  - jax.tree.map(lambda x: _zero(x, begins), memory)
  + jax.tree.map(np.asarray, memory)
on the host, every iteration begins with an empty memory
  run.host.rollouts: test_memory.py::test_a_host_environment_replays_what_acted
  - Episodes(seen, was_over, begins, memory, total, length)
  + Episodes(seen, was_over, begins, self._start(rows[1]), total, length)
on the host, what is replayed begins with an empty memory
  run.host.rollouts: test_memory.py::test_a_host_environment_replays_what_acted
  - made._replace(memory=jax.tree.map(np.asarray, memory))
  + made._replace(memory=jax.tree.map(np.zeros_like, memory))
on the host, the critic's memory survives an episode that ends with an iteration
  control.recorded: test_memory.py::test_a_host_environment_replays_what_acted
  - after = unroll.forget(after, ~mask[:, -1])
  + pass
on the host, the critic begins every iteration with an empty memory
  control.recorded: test_memory.py::test_a_host_environment_replays_what_acted
  - after = unroll.forget(after, ~mask[:, -1])
  + after = jax.tree.map(jnp.zeros_like, after)
a policy with memory ignores which actions are legal
  control.actor: test_spaces.py::test_groups_and_vines_take_masks
  - return memory, _legal(output, steps.observation)
  + return memory, require_distribution(output)
# Advantages.
λ per token where the discount is per turn
  algorithms.actor_critic: test_dialogue_runs.py::test_a_discount_per_turn_is_that_of_the_turns
  - lambda_=lambda_
  + lambda_=config.lambda_
GAE discounts every token where the discount is per turn
  algorithms.actor_critic: test_dialogue_runs.py::test_a_discount_per_turn_is_that_of_the_turns
  - gamma=gamma, lambda_
  + gamma=config.gamma, lambda_
n-step returns discount every token where the discount is per turn
  algorithms.actor_critic: test_dialogue_runs.py::test_a_discount_per_turn_is_that_of_the_turns
  - gamma=gamma, n=config.n_steps
  + gamma=config.gamma, n=config.n_steps
empty slots count in the std of the batch
  algorithms.group_policy: test_dynamic_sampling.py::test_it_gives_up_and_masks_what_is_empty
  - masked.moments(outcome, mask.any(axis=-1), axis_name=axis_name)
  + masked.moments(outcome, axis_name=axis_name)
the early stop measures KL(new ‖ old)
  algorithms.ppo: test_step_sizes.py::test_the_target_is_what_an_early_stop_admits
  - divergences.k3(samples.log_prob, log_prob)
  + divergences.k3(log_prob, samples.log_prob)
# Dynamic sampling.
every batch of an iteration begins with the same collector
  dynamic_sampling: test_dynamic_sampling.py::test_two_calls_differ_and_cover_everything_generated
  - collect(fill.collector, jax.random.fold_in(key, fill.rounds))
  + collect(empty.collector, jax.random.fold_in(key, fill.rounds))
metrics of the last batch alone
  dynamic_sampling: test_dynamic_sampling.py::test_two_calls_differ_and_cover_everything_generated
  - fill.metrics[name] + mean for
  + mean for
a surplus fills up after every batch
  dynamic_sampling:
    test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped
  - jnp.where(fill.rounds == 0, slots.wanted - filled, 0)
  + slots.wanted - filled
groups that were missing are carried
  dynamic_sampling:
    test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped
  - jnp.clip(fill.filled - slots.wanted, 0, slots.generated * slots.devices)
  + jnp.minimum(jnp.abs(fill.filled - slots.wanted), slots.generated * slots.devices)
empty slots are fresh
  dynamic_sampling:
    test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped
  - masked.total(kept.columns["age"][:, 0], valid)
  + masked.total(kept.columns["age"][:, 0])
each device counts the groups that are filled as if it were the first
  dynamic_sampling: test_dynamic_sampling.py::test_four_devices_equal_one
  - valid = slots.device * slots.share + jnp.arange(slots.share) < fill.filled
  + valid = jnp.arange(slots.share) < fill.filled
every device stores the first groups of the surplus
  dynamic_sampling: test_dynamic_sampling.py::test_four_devices_equal_one
  - slot - wanted - device * generated
  + slot - wanted
every device takes its own surplus for the first
  dynamic_sampling: test_dynamic_sampling.py::test_four_devices_equal_one
  - index = slots.device * slots.generated + jnp.arange(slots.generated)
  + index = jnp.arange(slots.generated)
# Vines.
the first step of every branch has noise of its own
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - unroll.row_keys(first_key, state_index), states
  + unroll.row_keys(first_key, jnp.arange(state_index.size, dtype=jnp.int32)), states
every branch goes on with noise of its own
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - EnvState(state_index, state, first.observation
  + EnvState(jnp.arange(state_index.size, dtype=jnp.int32), state, first.observation
trunks begin anew with every iteration
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - ENVIRONMENTS: envs}
  -         return
  + ENVIRONMENTS: collector.sharded[ENVIRONMENTS]}
  +         return
a branch runs on over a time limit at its first step
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - (first.terminated | first.truncated)[:, None]
  + first.terminated[:, None]
a branch runs on over a time limit
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - rest.transition.terminated | rest.transition.truncated
  + rest.transition.terminated
all trunks branch at the same times
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - choose(unroll.row_keys(state_key, envs.number))
  + choose(unroll.row_keys(state_key, 0 * envs.number))
a trunk branches twice from one state
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - (num_states,), replace=False
  + (num_states,), replace=True
the return of trunks that go on is logged
  control.vine: test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on
  - masked.total(trunk.episode_return, trunk_ended)
  + masked.total(trunk.episode_return)
# The policy is restricted to the tokens that the sampler kept.
a token is held with the set of another step
  language.sampling: test_kept.py::test_scored_tokens_are_the_sampled_tokens
  - jnp.zeros_like(kept)), t)
  + jnp.zeros_like(kept)), jnp.maximum(t - 1, 0))
the policy is not renormalised over what the sampler kept
  language.networks: test_kept.py::test_scored_tokens_are_the_sampled_tokens
  - kept=inputs.kept,
  + kept=None,
the reference is not renormalised over what the sampler kept
  learner: test_kept.py::test_the_first_policy_and_the_reference_are_one
  - (batch.inputs, batch.action), math.gcd
  + (batch.inputs._replace(kept=None), batch.action), math.gcd
the filters read logits that the temperature divides twice
  language.sampling: test_kept.py::test_scored_tokens_are_the_sampled_tokens
  - None if greedy else kept_tokens(logits, decoding)
  + None if greedy else kept_tokens(logits / decoding.temperature, decoding)
an action that is not listed is certain
  language.unembedding: test_kept.py::test_scored_tokens_are_the_sampled_tokens
  - jnp.where(chosen, self.slots().log_probs(), -jnp.inf)
  + jnp.where(chosen, self.slots().log_probs(), 0.0)
slots of a list that hold no token have a probability
  language.unembedding: test_kept.py::test_gradients_are_those_of_the_dense_formula
  - jnp.where(self.action >= 0, self.logits, -jnp.inf)
  + self.logits
what is kept of a group is that of its first member
  language.networks:
    test_shared_prompts.py::test_values_and_gradients_are_those_of_whole_rows[plain]
  - inputs.position, inputs.kept)
  + inputs.position, jnp.repeat(inputs.kept[::group_size], group_size, axis=0))
what was kept in a dialogue stands where it was said, not with its token
  language.transcript: test_conversation_steps.py::test_the_ratio_of_the_first_update_is_1
  - kept=sampled.kept,
  + kept=None if written.kept is None else written.kept[:, :most],
# Narrower decode loops.
what a narrower loop gives stands at the front
  language.sampling: test_narrowing.py::test_steps_are_as_wide_as_what_is_alive_asks_for
  - x.at[front].set(new)
  + x.at[:fewer].set(new)
the emptiest seed decides when rows are left out
  language.sampling: test_narrowing.py::test_every_row_is_what_it_is_in_one_loop[sample]
  - (t < steps) & anywhere(live(rows).sum() > fewer)
  + (t < steps) & ~anywhere(live(rows).sum() <= fewer)
each seed steps down by itself
  language.sampling: test_narrowing.py::test_seeds_step_down_together
  - going_on = (t < steps) & anywhere(live(rows))
  + going_on = (t < steps) & live(rows).any()
rows that the compiler places are moved
  language.sampling: test_narrowing.py::test_rows_that_the_compiler_places_on_devices_stay_there
  - [logits.shape[0]] if placed else widths_of(logits.shape[0], steps)
  + widths_of(logits.shape[0], steps)
all blocks decode with the parameters of the first
  language.transformer: test_kernels.py::test_a_step_computes_the_same[shallow]
  - variables["params"] = apart[number]
  + variables["params"] = apart[0]
# Dialogues.
all replies are drawn with one key
  language.conversation:
    test_dialogues.py::test_environment_gets_its_state_message_and_own_key
  - (rows.keys, columns + t)
  + (rows.keys, columns + 0 * t)
a reply is drawn with the key of a token
  language.conversation:
    test_dialogues.py::test_environment_gets_its_state_message_and_own_key
  - (rows.keys, columns + t)
  + (rows.keys, t)
members of a group begin in the states of other prompts
  language.conversation:
    test_dialogues.py::test_environment_gets_its_state_message_and_own_key
  - state = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), state)
  + state = jax.tree.map(lambda x: jnp.tile(x, (group_size, *[1] * (x.ndim - 1))), state)
what stood in a longer message before stands behind a shorter one
  language.conversation:
    test_dialogues.py::test_environment_gets_its_state_message_and_own_key
  - turns=turn.turns + 1
  + turns=turn.turns + 1, message=turn.message
dialogues at temperature 1
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - decoding=settings.decoding
  + decoding=settings.decoding._replace(temperature=1.0)
dialogues from all tokens
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - decoding=settings.decoding
  + decoding=settings.decoding._replace(top_k=0, top_p=1.0, min_p=0.0)
dialogues of a sampler without its noise
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - noise=sampler.noise,
dialogues of the learner where the sampler computes otherwise
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - sampler.of(model)
  + model
adapters hold a dialogue without their base
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - lora.over(sampler.of(model), params.frozen)
  + sampler.of(model)
the sampler of dialogues is as young as the learner
  language.dialogues.problem: test_dialogues.py::test_dialogues_are_held_as_the_settings_say
  - problem_of_dialogues(networks, collect, staleness=sampler.staleness)
  + problem_of_dialogues(networks, collect)
games are sampled where greedy is asked
  language.dialogues.evaluation: test_dialogue_runs.py::test_games_are_told_turn_by_turn
  - greedy=n == 0,
games are shown without their advantages
  language.dialogues.evaluation: test_dialogue_runs.py::test_games_are_told_turn_by_turn
  - if held.reward.shape[1] == 1:
  + if True:
# The reward model.
a reward model is fitted to ties
  language.reward_model: test_reward_model.py::test_a_fit_reads_training_pairs_that_differ
  - return masked.mean(losses.bradley_terry(output[:, 0], output[:, 1]), pairs.differ)
  + return losses.bradley_terry(output[:, 0], output[:, 1]).mean()
a reward model is fitted to the pairs that measure it
  language.reward_model: test_reward_model.py::test_a_fit_reads_training_pairs_that_differ
  - x[i % steps], batches
  + x[i % (steps + fresh)], batches
a reward model is normalised by pairs that it was not fitted to
  language.reward_model: test_reward_model.py::test_a_fit_reads_training_pairs_that_differ
  - masked.moments(output[:steps])
  + masked.moments(output)
a reward model is fitted to samples at temperature 1
  language.reward_model: test_reward_model.py::test_a_fit_reads_training_pairs_that_differ
  - max_new_tokens=max_new_tokens, temperature=temperature, )
  -
  -     def loss
  + max_new_tokens=max_new_tokens)
  +
  +     def loss
as many demonstrations among the comparisons as by default
  language.reward_model: test_reward_model.py::test_a_fit_reads_training_pairs_that_differ
  - demonstrations=settings.demonstrations,
comparisons at temperature 1
  language.reward_model:
    test_reward_model.py::test_pairs_are_of_training_prompts_and_at_the_temperature
  - sampling.Decoding(budget, temperature)
  + sampling.Decoding(budget)
a reward model is fitted to held-out prompts
  language.reward_model:
    test_reward_model.py::test_pairs_are_of_training_prompts_and_at_the_temperature
  - task.sample(key, False)
  + task.sample(key, True)
# Scores of many runs.
the arms of P(better) exchanged
  experiments.studies.claims.claim:
    test_studies.py::test_difference_beyond_the_margin_holds
  - statistics.probability_of_improvement(*pair)
  + statistics.probability_of_improvement(*pair[::-1])
the interval of the probability that the first run is better
  run.store.statistics:
    test_plotting.py::test_probability_of_improvement_compares_with_first_run
  - improvement_interval(mine, scores[0])
  + improvement_interval(scores[0], mine)
intervals of 90 % are called 95 %
  run.store.statistics:
    test_metrics.py::test_intervals_hold_nineteen_of_twenty_resamples
    test_studies.py::test_intervals_hold_nineteen_of_twenty_resamples
  - TAILS = (2.5, 97.5)
  + TAILS = (5.0, 95.0)
a worse run is called better with a small probability
  run.store.statistics: test_plotting.py::test_probability_of_improvement_compares_with_first_run
  - if probability < 0.5:
  + if False:
an area begins before a seed has a value
  cli.plot: test_plotting.py::test_area_begins_where_every_seed_has_a_value
  - firsts.append(step[present.argmax(axis=1)[present.any(axis=1)].max(initial=0)])
  + firsts.append(step[0])
a seed without a score disappears
  cli.plot: test_plotting.py::test_a_seed_without_a_number_counts_as_worst
  - statistics.worst_if_missing(_curve(run, metric)[1][:, -1])
  + np.array([x for x in _curve(run, metric)[1][:, -1] if np.isfinite(x)])
a summary leaves out the seeds that diverged
  run.store.metrics: test_metrics.py::test_a_final_score_counts_a_diverged_seed_as_worst
  - final = statistics.worst_if_missing(rows[-1][score])
  + final = np.array(rows[-1][score], np.float64)
an interval without an episode is a gap
  run.figures.plotting:
    test_plotting.py::test_interval_without_episode_repeats_last_return
  -             values = statistics.carried(values)
  -
  +             pass
  +
a sweep is scored by its last two evaluations
  run.experiment.sweeping: test_sweeps.py::test_score_is_mean_of_last_three_evaluations
  - [:, -3:].mean
  + [:, -2:].mean
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "keys follow the place of a row, not its number",
        "language.sampling",
        "run(params, t, jax.tree.map(lambda x: x[front], rows), narrower)",
        "run(params, t, jax.tree.map(lambda x: x[front], rows)._replace(keys=rows.keys[:fewer]), "
        "narrower)",
        ("test_narrowing.py::test_every_row_is_what_it_is_in_one_loop[sample]",),
    ),
]
