"""Wrong programs of what is sampled and what is made of it: memories, groups, dialogues, scores."""

from wrong import Wrong

MEMORY = ("test_memory.py::test_a_host_environment_replays_what_acted",)
PER_TURN = ("test_dialogue_runs.py::test_a_discount_per_turn_is_that_of_the_turns",)
SAMPLER = "test_dynamic_sampling.py::"
SURPLUS = (f"{SAMPLER}test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped",)
EVERYTHING = (f"{SAMPLER}test_two_calls_differ_and_cover_everything_generated",)
DEVICES = (f"{SAMPLER}test_four_devices_equal_one",)
VINE = ("test_groups_and_vines.py::test_branches_share_their_random_numbers_and_trunks_go_on",)
GIVEN = (
    "test_dialogues.py::"
    "test_an_environment_is_given_its_own_state_the_message_and_a_key_of_its_own",
)
SETTINGS = ("test_dialogues.py::test_dialogues_are_held_as_the_settings_say",)
GAMES = ("test_dialogue_runs.py::test_games_are_told_turn_by_turn",)
FIT = ("test_reward_model.py::test_a_fit_reads_training_pairs_that_differ",)
KEPT = "test_kept.py::"
PAIRS = ("test_reward_model.py::test_pairs_are_of_training_prompts_and_at_the_temperature",)

WRONG = [
    # Rollouts on the host, and memory with a mask.
    Wrong(
        "on the host, an episode begins with the memory of the last one",
        "control.recorded",
        "unroll.forget(memory, begins), spaces",
        "memory, spaces",
        MEMORY,
    ),
    Wrong(
        "on the host, memory survives an episode that ends with an iteration",
        "run.host.rollouts",
        "jax.tree.map(lambda x: _zero(x, begins), memory)",
        "jax.tree.map(np.asarray, memory)",
        MEMORY,
    ),
    Wrong(
        "on the host, every iteration begins with an empty memory",
        "run.host.rollouts",
        "Episodes(seen, was_over, begins, memory, total, length)",
        "Episodes(seen, was_over, begins, self._start(rows[1]), total, length)",
        MEMORY,
    ),
    Wrong(
        "on the host, what is replayed begins with an empty memory",
        "run.host.rollouts",
        "made._replace(memory=jax.tree.map(np.asarray, memory))",
        "made._replace(memory=jax.tree.map(np.zeros_like, memory))",
        MEMORY,
    ),
    Wrong(
        "on the host, the critic's memory survives an episode that ends with an iteration",
        "control.recorded",
        "after = unroll.forget(after, ~mask[:, -1])",
        "pass",
        MEMORY,
    ),
    Wrong(
        "on the host, the critic begins every iteration with an empty memory",
        "control.recorded",
        "after = unroll.forget(after, ~mask[:, -1])",
        "after = jax.tree.map(jnp.zeros_like, after)",
        MEMORY,
    ),
    Wrong(
        "a policy with memory ignores which actions are legal",
        "control.actor",
        "return memory, _legal(output, steps.observation)",
        "return memory, require_distribution(output)",
        ("test_spaces.py::test_groups_and_vines_take_masks",),
    ),
    # Advantages.
    Wrong(
        "λ per token where the discount is per turn",
        "algorithms.actor_critic",
        "lambda_=lambda_",
        "lambda_=config.lambda_",
        PER_TURN,
    ),
    Wrong(
        "GAE discounts every token where the discount is per turn",
        "algorithms.actor_critic",
        "gamma=gamma, lambda_",
        "gamma=config.gamma, lambda_",
        PER_TURN,
    ),
    Wrong(
        "n-step returns discount every token where the discount is per turn",
        "algorithms.actor_critic",
        "gamma=gamma, n=config.n_steps",
        "gamma=config.gamma, n=config.n_steps",
        PER_TURN,
    ),
    Wrong(
        "empty slots count in the std of the batch",
        "algorithms.group_policy",
        "masked.moments(outcome, mask.any(axis=-1), axis_name=axis_name)",
        "masked.moments(outcome, axis_name=axis_name)",
        ("test_dynamic_sampling.py::test_it_gives_up_and_masks_what_is_empty",),
    ),
    Wrong(
        "the early stop measures KL(new ‖ old)",
        "algorithms.ppo",
        "divergences.k3(samples.log_prob, log_prob)",
        "divergences.k3(log_prob, samples.log_prob)",
        ("test_step_sizes.py::test_the_target_is_what_an_early_stop_admits",),
    ),
    # Dynamic sampling.
    Wrong(
        "every batch of an iteration begins with the same collector",
        "dynamic_sampling",
        "collect(fill.collector, jax.random.fold_in(key, fill.rounds))",
        "collect(empty.collector, jax.random.fold_in(key, fill.rounds))",
        EVERYTHING,
    ),
    Wrong(
        "metrics of the last batch alone",
        "dynamic_sampling",
        "fill.metrics[name] + mean for",
        "mean for",
        EVERYTHING,
    ),
    Wrong(
        "a surplus fills up after every batch",
        "dynamic_sampling",
        "jnp.where(fill.rounds == 0, slots.wanted - filled, 0)",
        "slots.wanted - filled",
        SURPLUS,
    ),
    Wrong(
        "groups that were missing are carried",
        "dynamic_sampling",
        "jnp.clip(fill.filled - slots.wanted, 0, slots.generated * slots.devices)",
        "jnp.minimum(jnp.abs(fill.filled - slots.wanted), slots.generated * slots.devices)",
        SURPLUS,
    ),
    Wrong(
        "empty slots are fresh",
        "dynamic_sampling",
        'masked.total(kept.columns["age"][:, 0], valid)',
        'masked.total(kept.columns["age"][:, 0])',
        SURPLUS,
    ),
    Wrong(
        "each device counts the groups that are filled as if it were the first",
        "dynamic_sampling",
        "valid = slots.device * slots.share + jnp.arange(slots.share) < fill.filled",
        "valid = jnp.arange(slots.share) < fill.filled",
        DEVICES,
    ),
    Wrong(
        "every device stores the first groups of the surplus",
        "dynamic_sampling",
        "slot - wanted - device * generated",
        "slot - wanted",
        DEVICES,
    ),
    Wrong(
        "every device takes its own surplus for the first",
        "dynamic_sampling",
        "index = slots.device * slots.generated + jnp.arange(slots.generated)",
        "index = jnp.arange(slots.generated)",
        DEVICES,
    ),
    # Vines.
    Wrong(
        "the first step of every branch has noise of its own",
        "control.vine",
        "unroll.row_keys(first_key, state_index), states",
        "unroll.row_keys(first_key, jnp.arange(state_index.size, dtype=jnp.int32)), states",
        VINE,
    ),
    Wrong(
        "every branch goes on with noise of its own",
        "control.vine",
        "EnvState(state_index, state, first.observation",
        "EnvState(jnp.arange(state_index.size, dtype=jnp.int32), state, first.observation",
        VINE,
    ),
    Wrong(
        "trunks begin anew with every iteration",
        "control.vine",
        "ENVIRONMENTS: envs}\n        return",
        "ENVIRONMENTS: collector.sharded[ENVIRONMENTS]}\n        return",
        VINE,
    ),
    Wrong(
        "a branch runs on over a time limit at its first step",
        "control.vine",
        "(first.terminated | first.truncated)[:, None]",
        "first.terminated[:, None]",
        VINE,
    ),
    Wrong(
        "a branch runs on over a time limit",
        "control.vine",
        "rest.transition.terminated | rest.transition.truncated",
        "rest.transition.terminated",
        VINE,
    ),
    Wrong(
        "all trunks branch at the same times",
        "control.vine",
        "choose(unroll.row_keys(state_key, envs.number))",
        "choose(unroll.row_keys(state_key, 0 * envs.number))",
        VINE,
    ),
    Wrong(
        "a trunk branches twice from one state",
        "control.vine",
        "(num_states,), replace=False",
        "(num_states,), replace=True",
        VINE,
    ),
    Wrong(
        "the return of trunks that go on is logged",
        "control.vine",
        "masked.total(trunk.episode_return, trunk_ended)",
        "masked.total(trunk.episode_return)",
        VINE,
    ),
    # The policy is restricted to the tokens that the sampler kept.
    Wrong(
        "a token is held with the set of another step",
        "language.sampling",
        "jnp.zeros_like(kept)), t)",
        "jnp.zeros_like(kept)), jnp.maximum(t - 1, 0))",
        (KEPT + "test_what_is_scored_is_what_was_sampled_token_by_token",),
    ),
    Wrong(
        "the policy is not renormalised over what the sampler kept",
        "language.networks",
        "kept=inputs.kept,",
        "kept=None,",
        (KEPT + "test_what_is_scored_is_what_was_sampled_token_by_token",),
    ),
    Wrong(
        "the reference is not renormalised over what the sampler kept",
        "learner",
        "(batch.inputs, batch.action), math.gcd",
        "(batch.inputs._replace(kept=None), batch.action), math.gcd",
        (KEPT + "test_the_first_policy_and_the_reference_are_one",),
    ),
    Wrong(
        "the filters read logits that the temperature divides twice",
        "language.sampling",
        "None if greedy else kept_tokens(logits, decoding)",
        "None if greedy else kept_tokens(logits / decoding.temperature, decoding)",
        (KEPT + "test_what_is_scored_is_what_was_sampled_token_by_token",),
    ),
    Wrong(
        "an action that is not listed is certain",
        "language.unembedding",
        "jnp.where(chosen, self.slots().log_probs(), -jnp.inf)",
        "jnp.where(chosen, self.slots().log_probs(), 0.0)",
        (KEPT + "test_what_is_scored_is_what_was_sampled_token_by_token",),
    ),
    Wrong(
        "slots of a list that hold no token have a probability",
        "language.unembedding",
        "jnp.where(self.action >= 0, self.logits, -jnp.inf)",
        "self.logits",
        (KEPT + "test_gradients_are_those_of_the_dense_formula",),
    ),
    Wrong(
        "what is kept of a group is that of its first member",
        "language.networks",
        "inputs.position, inputs.kept)",
        "inputs.position, jnp.repeat(inputs.kept[::group_size], group_size, axis=0))",
        ("test_shared_prompts.py::test_values_and_gradients_are_those_of_whole_rows[plain]",),
    ),
    Wrong(
        "what was kept in a dialogue stands where it was said, not with its token",
        "language.transcript",
        "kept=sampled.kept,",
        "kept=None if written.kept is None else written.kept[:, :most],",
        ("test_conversation_steps.py::test_the_ratio_of_the_first_update_is_1",),
    ),
    # Narrower decode loops.
    Wrong(
        "keys follow the place of a row, not its number",
        "language.sampling",
        "run(params, t, jax.tree.map(lambda x: x[front], rows), narrower)",
        "run(params, t, jax.tree.map(lambda x: x[front], rows)._replace(keys=rows.keys[:fewer]), "
        "narrower)",
        ("test_narrowing.py::test_every_row_is_what_it_is_in_one_loop[sample]",),
    ),
    Wrong(
        "what a narrower loop gives stands at the front",
        "language.sampling",
        "x.at[front].set(new)",
        "x.at[:fewer].set(new)",
        ("test_narrowing.py::test_steps_are_as_wide_as_what_is_alive_asks_for",),
    ),
    Wrong(
        "the emptiest seed decides when rows are left out",
        "language.sampling",
        "(t < steps) & anywhere(live(rows).sum() > fewer)",
        "(t < steps) & ~anywhere(live(rows).sum() <= fewer)",
        ("test_narrowing.py::test_every_row_is_what_it_is_in_one_loop[sample]",),
    ),
    Wrong(
        "each seed steps down by itself",
        "language.sampling",
        "going_on = (t < steps) & anywhere(live(rows))",
        "going_on = (t < steps) & live(rows).any()",
        ("test_narrowing.py::test_seeds_step_down_together",),
    ),
    Wrong(
        "rows that the compiler places are moved",
        "language.sampling",
        "[logits.shape[0]] if placed else widths_of(logits.shape[0], steps)",
        "widths_of(logits.shape[0], steps)",
        ("test_narrowing.py::test_rows_that_the_compiler_places_on_devices_stay_there",),
    ),
    Wrong(
        "all blocks decode with the parameters of the first",
        "language.transformer",
        'variables["params"] = apart[number]',
        'variables["params"] = apart[0]',
        ("test_kernels.py::test_a_step_computes_the_same[shallow]",),
    ),
    # Dialogues.
    Wrong(
        "all replies are drawn with one key",
        "language.conversation",
        "(rows.keys, columns + t)",
        "(rows.keys, columns + 0 * t)",
        GIVEN,
    ),
    Wrong(
        "a reply is drawn with the key of a token",
        "language.conversation",
        "(rows.keys, columns + t)",
        "(rows.keys, t)",
        GIVEN,
    ),
    Wrong(
        "members of a group begin in the states of other prompts",
        "language.conversation",
        "state = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), state)",
        "state = jax.tree.map(lambda x: jnp.tile(x, (group_size, *[1] * (x.ndim - 1))), state)",
        GIVEN,
    ),
    Wrong(
        "what stood in a longer message before stands behind a shorter one",
        "language.conversation",
        "turns=turn.turns + 1",
        "turns=turn.turns + 1, message=turn.message",
        GIVEN,
    ),
    Wrong(
        "dialogues at temperature 1",
        "language.dialogues.problem",
        "decoding=settings.decoding",
        "decoding=settings.decoding._replace(temperature=1.0)",
        SETTINGS,
    ),
    Wrong(
        "dialogues from all tokens",
        "language.dialogues.problem",
        "decoding=settings.decoding",
        "decoding=settings.decoding._replace(top_k=0, top_p=1.0, min_p=0.0)",
        SETTINGS,
    ),
    Wrong(
        "dialogues of a sampler without its noise",
        "language.dialogues.problem",
        "noise=sampler.noise,",
        "",
        SETTINGS,
    ),
    Wrong(
        "dialogues of the learner where the sampler computes otherwise",
        "language.dialogues.problem",
        "sampler.of(model)",
        "model",
        SETTINGS,
    ),
    Wrong(
        "adapters hold a dialogue without their base",
        "language.dialogues.problem",
        "lora.over(sampler.of(model), params.frozen)",
        "sampler.of(model)",
        SETTINGS,
    ),
    Wrong(
        "the sampler of dialogues is as young as the learner",
        "language.dialogues.problem",
        "problem_of_dialogues(networks, collect, staleness=sampler.staleness)",
        "problem_of_dialogues(networks, collect)",
        SETTINGS,
    ),
    Wrong(
        "games are sampled where greedy is asked",
        "language.dialogues.evaluation",
        "greedy=n == 0,",
        "",
        GAMES,
    ),
    Wrong(
        "games are shown without their advantages",
        "language.dialogues.evaluation",
        "if held.reward.shape[1] == 1:",
        "if True:",
        GAMES,
    ),
    # The reward model.
    Wrong(
        "a reward model is fitted to ties",
        "language.reward_model",
        "return masked.mean(losses.bradley_terry(output[:, 0], output[:, 1]), pairs.differ)",
        "return losses.bradley_terry(output[:, 0], output[:, 1]).mean()",
        FIT,
    ),
    Wrong(
        "a reward model is fitted to the pairs that measure it",
        "language.reward_model",
        "x[i % steps], batches",
        "x[i % (steps + fresh)], batches",
        FIT,
    ),
    Wrong(
        "a reward model is normalised by pairs that it was not fitted to",
        "language.reward_model",
        "masked.moments(output[:steps])",
        "masked.moments(output)",
        FIT,
    ),
    Wrong(
        "a reward model is fitted to samples at temperature 1",
        "language.reward_model",
        "max_new_tokens=max_new_tokens, temperature=temperature, )\n\n    def loss",
        "max_new_tokens=max_new_tokens)\n\n    def loss",
        FIT,
    ),
    Wrong(
        "as many demonstrations among the comparisons as by default",
        "language.reward_model",
        "demonstrations=settings.demonstrations,",
        "",
        FIT,
    ),
    Wrong(
        "comparisons at temperature 1",
        "language.reward_model",
        "sampling.Decoding(budget, temperature)",
        "sampling.Decoding(budget)",
        PAIRS,
    ),
    Wrong(
        "a reward model is fitted to held-out prompts",
        "language.reward_model",
        "task.sample(key, False)",
        "task.sample(key, True)",
        PAIRS,
    ),
    # Scores of many runs.
    Wrong(
        "the arms of P(better) exchanged",
        "experiments.studies.claims.claim",
        "statistics.probability_of_improvement(*pair)",
        "statistics.probability_of_improvement(*pair[::-1])",
        (
            "test_studies.py::test_a_difference_beyond_the_margin_holds_and_one_short_of_it_does_not",
        ),
    ),
    Wrong(
        "the interval of the probability that the first run is better",
        "cli.plot",
        "statistics.improvement_interval(mine, scores[0])",
        "statistics.improvement_interval(scores[0], mine)",
        ("test_plotting.py::test_the_probability_of_improvement_is_that_over_the_first_run",),
    ),
    Wrong(
        "intervals of 90 % are called 95 %",
        "run.store.statistics",
        "TAILS = (2.5, 97.5)",
        "TAILS = (5.0, 95.0)",
        (
            "test_metrics.py::test_intervals_hold_nineteen_of_twenty_resamples",
            "test_studies.py::test_intervals_hold_nineteen_of_twenty_resamples",
        ),
    ),
    Wrong(
        "a seed without a score disappears",
        "cli.plot",
        "statistics.worst_if_missing(values[:, -1])",
        "values[:, -1][np.isfinite(values[:, -1])]",
        ("test_plotting.py::test_a_seed_without_a_number_counts_as_worst",),
    ),
    Wrong(
        "a summary leaves out the seeds that diverged",
        "run.store.metrics",
        "final = statistics.worst_if_missing(rows[-1][score])",
        "final = np.array(rows[-1][score], np.float64)",
        ("test_metrics.py::test_a_final_score_counts_a_diverged_seed_as_worst",),
    ),
    Wrong(
        "an interval without an episode is a gap",
        "run.figures.plotting",
        "            values = statistics.carried(values)\n",
        "            pass\n",
        ("test_plotting.py::test_an_interval_without_an_episode_carries_the_last_return",),
    ),
    Wrong(
        "a sweep is scored by its last two evaluations",
        "run.experiment.sweeping",
        "[:, -3:].mean",
        "[:, -2:].mean",
        ("test_sweeps.py::test_a_score_is_the_mean_of_the_last_three_evaluations",),
    ),
]
