"""Wrong programs of earlier versions of the package."""

from wrong import Wrong

WRONG = [
    Wrong(
        "fewest microbatches where memory is short",
        "run.experiment.microbatches",
        "if self.needs(each) <= space",
        "if self.needs(each) > space",
        ("test_microbatches.py::test_less_memory_never_means_fewer_microbatches",),
    ),
    Wrong(
        "a critic's prompts are counted once a group",
        "run.experiment.microbatches",
        "unshared * sum(each[1:])",
        "tokens * sum(each[1:])",
        ("test_microbatches.py::test_a_critic_shares_no_prompts",),
    ),
    Wrong(
        "sampling that does not fit is compiled in more microbatches",
        "run.experiment.microbatches",
        "need.choices and need.sampling * SHARE <= there",
        "need.choices",
        ("test_microbatches.py::test_sampling_that_does_not_fit_is_refused",),
    ),
    Wrong(
        "a resumed sweep takes the tuned settings of today",
        "run.experiment.sweeping",
        'options = flags.parse(argv, {"": Options}, stored=asked.flags, partial=True)[""]',
        "asked = asked._replace(tuned=control.defaults(control.Options()))\n"
        '    options = flags.parse(argv, {"": Options}, stored=asked.flags, partial=True)[""]',
        ("test_sweeps.py::test_a_sweep_that_is_resumed_is_the_one_that_was_begun",),
    ),
    Wrong(
        "an exact run follows the memory that is free",
        "run.experiment.plan",
        "chosen = options.exact or ",
        "chosen = ",
        (
            "test_microbatches.py::test_a_program_that_needs_more_than_was_counted_is_compiled_again",
        ),
    ),
    Wrong(
        "each CPU device has all the memory of the machine",
        "run.experiment.microbatches",
        "(devices if backend.here().on_cpu else 1)",
        "1",
        ("test_microbatches.py::test_cpu_devices_share_what_is_free",),
    ),
    Wrong(
        "a program that does not fit runs nevertheless",
        "run.loop.runner",
        "None if job.refit is None or peak is None else job.refit(peak)",
        "None",
        (
            "test_microbatches.py::test_a_program_that_needs_more_than_was_counted_is_compiled_again",
        ),
    ),
    Wrong(
        "a resumed run chooses its microbatches anew",
        "run.experiment.plan",
        "microbatches.FLAG in (settings if before else given)",
        "microbatches.FLAG in given",
        (
            "test_microbatches.py::test_a_program_that_needs_more_than_was_counted_is_compiled_again",
        ),
    ),
    Wrong(
        "a run is said to need the memory of one of its devices",
        "run.devices.room",
        "held() + devices * memory.peak",
        "held() + memory.peak",
        ("test_microbatches.py::test_what_is_told_is_the_memory_of_the_process",),
    ),
    Wrong(
        "names in pictures are read as TeX",
        "run.figures.plotting",
        '"text.parse_math": False',
        '"text.parse_math": True',
        ("test_plotting.py::test_names_stand_as_they_are_whatever_a_matplotlibrc_asks_for",),
    ),
    Wrong(
        "a picture that fails fails the run",
        "run.experiment.training",
        'with plotting.beside(out / "curves.png"):',
        "if out:",
        ("test_front_door.py::test_a_picture_that_fails_fails_no_run",),
    ),
    Wrong(
        "an iteration without signal in one seed is said to have taught nothing",
        "run.loop.log",
        "~np.any(np.asarray(signal.total) > 0, axis=1)",
        "~np.all(np.asarray(signal.total) > 0, axis=1)",
        ("test_doubts.py::test_an_iteration_without_signal_in_any_seed_is_said_once",),
    ),
    Wrong(
        "FORCE_COLOR puts cursor codes into files",
        "run.loop.progress",
        "self._console.file.isatty() and not",
        "self._console.is_terminal and not",
        ("test_progress.py::test_there_are_lines_where_a_cursor_does_not_move",),
    ),
    Wrong(
        "all runs of a sweep have the settings of the first",
        "run.experiment.assembly",
        "for setting in settings for _ in range",
        "for setting in settings[:1] * len(settings) for _ in range",
        ("test_sweeps.py::test_runs_are_trained_from_one_evaluation_to_the_next",),
    ),
    Wrong(
        "what is drawn log-uniformly is drawn uniformly",
        "run.experiment.search",
        "np.exp(generator.uniform(np.log(low), np.log(high), count))",
        "generator.uniform(low, high, count)",
        ("test_sweeps.py::test_draws_follow_from_the_seed_and_lie_where_they_must",),
    ),
    Wrong(
        "a run that is resumed from Python cannot grow",
        "run.experiment.experiment",
        '{"out": out, "resume": True, **more}',
        '{"out": out, "resume": True}',
        ("test_train_and_load.py::test_an_experiment_leaves_what_its_command_leaves",),
    ),
    Wrong(
        "of the metrics of a call, those of iterations that it had not are kept",
        "run.loop.programs",
        "lambda x, now=now: np.asarray(x)[:now]",
        "lambda x: np.asarray(x)",
        ("test_runner.py::test_a_chunk_is_calls_of_its_program_of_some_seconds_each",),
    ),
    Wrong(
        "every chunk begins with a call of one iteration",
        "run.loop.programs",
        "begun, done, rows = time.perf_counter(), 0, list[Metrics]()",
        "begun, done, rows, size = time.perf_counter(), 0, list[Metrics](), 1",
        ("test_runner.py::test_a_chunk_is_calls_of_its_program_of_some_seconds_each",),
    ),
    Wrong(
        "processes disagree on how many iterations a call has",
        "run.loop.programs",
        "min(processes.gather(max(1, int(SECONDS_OF_CALL * done / took))))",
        "max(1, int(SECONDS_OF_CALL * done / took))",
        ("test_runner.py::test_processes_agree_on_how_long_a_call_is_and_on_when_they_stop",),
    ),
    Wrong(
        "the line of a chunk that was cut holds only what came after",
        "run.loop.runner",
        "aside = read_aside(",
        "_ = read_aside(",
        ("test_runner.py::test_a_run_that_was_stopped_within_a_chunk_equals_one_that_was_not",),
    ),
    Wrong(
        "what was set aside before is lost when the chunk is cut again",
        "run.loop.runner",
        "write_aside(self.folder / ASIDE, self.aside)",
        "write_aside(self.folder / ASIDE, means)",
        ("test_runner.py::test_a_run_that_was_stopped_within_a_chunk_equals_one_that_was_not",),
    ),
    Wrong(
        "a signal waits for the end of a chunk that is scored",
        "run.loop.programs",
        """                break
            try:""",
        """                pass
            try:""",
        ("test_halves.py::test_resumed_with_a_reward_in_python_equals_uninterrupted",),
    ),
    Wrong(
        "a second hangup ends the run unsaved",
        "run.loop.interrupts",
        "signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL",
        "signal.SIG_DFL",
        ("test_interrupts.py::test_interrupt_finishes_the_iteration_saves_and_says_so",),
    ),
    Wrong(
        "checkpoints on a disk that is not mounted count as none",
        "run.store.folder",
        " or any(path.is_symlink() for path in held.values())",
        "",
        ("test_folder.py::test_what_may_be_more_than_a_beginning_blocks",),
    ),
    Wrong(
        "what compiling freed stays with the process",
        "run.devices.compilation",
        "    return_freed_memory()\n    return program",
        "    return program",
        ("test_compilation.py::test_what_compiling_freed_is_returned_to_the_system",),
    ),
    Wrong(
        "the time of programs that were read counts as that of compiling",
        "run.devices.compilation",
        "seconds >= 1.0 and not read and",
        "seconds >= 1.0 and",
        ("test_compilation.py::test_a_run_says_what_it_compiles_and_how_long_the_last_such_took",),
    ),
    Wrong(
        "an iteration is traced again for its program",
        "run.devices.compilation",
        ".lower(*bare)",
        ".lower(*arguments)",
        (
            "test_compilation.py::"
            "test_what_runs_seldom_on_a_small_state_is_compiled_at_little_effort",
        ),
    ),
    Wrong(
        "what describes a large state is compiled at little effort",
        "run.loop.programs",
        "light=is_light(like)",
        "light=True",
        (
            "test_compilation.py::"
            "test_what_runs_seldom_on_a_small_state_is_compiled_at_little_effort",
        ),
    ),
    Wrong(
        "an error waits for what compiles beside it",
        "run.devices.compilation",
        "return_when=FIRST_EXCEPTION",
        "return_when='ALL_COMPLETED'",
        (
            "test_compilation.py::"
            "test_programs_compile_side_by_side_and_the_first_error_is_raised_at_once",
        ),
    ),
    Wrong(
        "minibatches are computed in parts where a device has several cores",
        "minibatches",
        "or target is None or not target.one_core_each",
        "or target is None",
        ("test_minibatches.py::test_a_core_computes_at_least_256_slots_at_a_time",),
    ),
    Wrong(
        "a part of a minibatch may be smaller than what keeps a core busy",
        "minibatches",
        "min(rows, rows * slots // AT_A_TIME)",
        "rows",
        ("test_minibatches.py::test_a_core_computes_at_least_256_slots_at_a_time",),
    ),
    Wrong(
        "rows that are read as whole groups are computed in parts",
        "algorithms.group_policy",
        "slots=slots if problem.speedups.grouped is None else None",
        "slots=slots",
        ("test_shared_prompts.py::test_a_core_computes_whole_groups",),
    ),
    Wrong(
        "rows that are cut at the longest are computed in more parts",
        "updates",
        "self.slots is not None and self.by_length is None",
        "self.slots is not None",
        ("test_lengths.py::test_rows_that_are_cut_are_computed_in_no_more_parts",),
    ),
    Wrong(
        "the critic's rows count as one slot each",
        "algorithms.critic_fit",
        "slots=rows.mask[0].size",
        "slots=1",
        (
            "test_minibatches.py::test_methods_name_the_slots_of_their_rows"
            "[reinforce-addition-expected3]",
        ),
    ),
    Wrong(
        "groups of seeds are updated in another order",
        "run.devices.seeds",
        "jax.lax.map(of_group, groups)",
        "jax.lax.map(of_group, jax.tree.map(lambda x: x[::-1], groups))",
        ("test_seeds.py::test_seeds_in_groups_keep_their_order_and_share_what_is_frozen",),
    ),
    Wrong(
        "seeds are updated in groups on every device",
        "run.devices.seeds",
        "dividing[0] if dividing and target.one_core_each else num_seeds",
        "dividing[0] if dividing else num_seeds",
        ("test_seeds.py::test_a_core_updates_at_most_eight_seeds_side_by_side",),
    ),
    Wrong(
        "a seed without a number makes a state the best",
        "run.loop.log",
        "score is not None and whole and score >= self._best",
        "score is not None and score >= self._best",
        ("test_runner.py::test_a_line_without_a_number_of_some_seed_is_not_the_best",),
    ),
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
        "a column of slots keeps what is masked",
        "learner",
        "masked.zero(leaf, batch.mask) if leaf.ndim > 1 else leaf",
        "masked.zero(leaf, batch.mask) if leaf.dtype != jnp.float32 else leaf",
        (
            "test_group_policy.py::test_columns_of_ones_own_are_read_where_they_belong",
            "test_own_advantage.py::test_v_trace_on_completions_of_an_older_policy_is_its_equation",
        ),
    ),
    Wrong(
        "a surrogate is given the columns of rows",
        "types",
        ".items() if x.ndim > 1",
        ".items()",
        ("test_group_policy.py::test_columns_of_ones_own_are_read_where_they_belong",),
    ),
    Wrong(
        "the KL is that before the update",
        "algorithms.actor_critic",
        "divergences.k3(part.log_prob, policy(params, part).log_prob(part.action))",
        "divergences.k3(part.log_prob, part.log_prob)",
        ("test_algorithms.py::test_kl_is_one_quantity_that_of_the_whole_update[gspo-4]",),
    ),
    Wrong(
        "the KL of a vine is that from the proposal",
        "algorithms.actor_critic",
        'weighted = ratio(part.log_prob, part.columns["sampler_log_prob"]) * kl',
        (
            "weighted = divergences.k3("
            'part.columns["sampler_log_prob"], policy(params, part).log_prob(part.action))'
        ),
        (
            "test_groups_and_vines.py::test_kl_and_surrogate_of_a_vine_are_those_of_the_policy_and_not_of_the_proposal",
        ),
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
        "room = jnp.where(fill.rounds == 0, slots.wanted - filled, 0)",
        "room = jnp.where(fill.rounds == 0, slots.wanted - filled + slots.generated, 0)",
        (
            "test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped",
        ),
    ),
    Wrong(
        "what is carried does not age",
        "dynamic_sampling",
        '"age": spare.columns["age"] + 1',
        '"age": spare.columns["age"]',
        ("test_dynamic_sampling.py::test_what_is_trained_on_is_at_most_one_update_old",),
    ),
    Wrong(
        "every token is a step",
        "algorithms.grpo",
        "estimator(*group, **settings)",
        "estimator(*group[:2], **settings)",
        ("test_group_policy.py::test_process_supervision_counts_the_steps_that_the_problem_names",),
    ),
    Wrong(
        "a process reward is due at every token",
        "language.problem",
        'columns["step_end"] = is_last | step_end',
        "pass",
        ("test_language_problem.py::test_the_task_says_where_a_process_reward_is_due",),
    ),
    Wrong(
        "actions of a proposal as if the policy had drawn them",
        "algorithms.npg",
        "policy_surrogate if problem.facts.on_policy else proposal_surrogate",
        "policy_surrogate",
        (
            "test_groups_and_vines.py::test_kl_and_surrogate_of_a_vine_are_those_of_the_policy_and_not_of_the_proposal",
        ),
    ),
    Wrong(
        "a proposal is admitted where nothing weighs it",
        "algorithms.actor_critic",
        "    if not problem.facts.on_policy:\n        raise",
        "    if False:\n        raise",
        (
            "test_groups_and_vines.py::test_actions_of_a_proposal_are_refused_where_nothing_weighs_them",
        ),
    ),
    Wrong(
        "actions are drawn in half precision",
        "distributions",
        "logits = _wide(self.logits)",
        "logits = self.logits",
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
        "natural_updates",
        "first = -(device * num_parts + jnp.arange(num_parts)) * rows % stride",
        "first = 0 * (device * num_parts + jnp.arange(num_parts))",
        ("test_fisher.py::test_the_fisher_stride_counts_rows_over_devices_and_parts",),
    ),
    Wrong(
        "the sampler's log-probabilities are the old policy's in half precision",
        "learner",
        "if not problem.facts.exact_sampler:",
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
        "if config.overlong_filtering and problem.facts.truncated_is_overlong:",
        "if config.overlong_filtering:",
        ("test_groups_and_vines.py::test_dapo_on_control_keeps_the_episodes_that_reach_the_limit",),
    ),
    Wrong(
        "what a jitted function reads is what all of its outputs depend on",
        "algorithms.critic_fit",
        "_, is_read = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))",
        (
            "is_read = [True for equation in program.jaxpr.eqns if equation.primitive.name in "
            "('jit', 'pjit')]"
        ),
        ("test_family.py::test_a_jitted_policy_and_critic_of_their_own_are_no_shared_body",),
    ),
    Wrong(
        "the KL of a surplus counts two updates",
        "types",
        "self.mask if age is None else self.mask & (age == 0)[:, None]",
        "self.mask",
        ("test_dynamic_sampling.py::test_kl_is_of_this_update_and_not_of_the_one_before",),
    ),
    Wrong(
        "the KL is of what is trained on",
        "algorithms.group_policy",
        "samples._replace(mask=batch.fresh()), batch.score",
        "samples, batch.score",
        ("test_dynamic_sampling.py::test_kl_covers_what_the_loss_leaves_out",),
    ),
    Wrong(
        "a demonstrated reply is part of its own prompt",
        "run.data.prompts",
        "pairs = [(messages[:i], ",
        "pairs = [(messages[: i + 1], ",
        ("test_sft.py::test_rows_demonstrate_answers",),
    ),
    Wrong(
        "adapters are trained at the step size of a whole model",
        "run.experiment.presets",
        'ADAPTED = {**PRETRAINED, "config.learning_rate": 5e-4,',
        "ADAPTED = {**PRETRAINED,",
        (
            "test_pretrained_input.py::"
            "test_adapters_have_settings_that_suit_them_and_a_warm_up_is_a_tenth",
        ),
    ),
    Wrong(
        "a short run is all warm-up",
        "run.experiment.plan",
        "min(defaults[WARM_UP], iterations // 10)",
        "defaults[WARM_UP]",
        (
            "test_pretrained_input.py::"
            "test_adapters_have_settings_that_suit_them_and_a_warm_up_is_a_tenth",
        ),
    ),
    Wrong(
        "a completion that fills its budget is rewarded although an end is required",
        "run.data.scoring",
        "np.where(cut, np.float32(0.0), x) for x in scored[:2]",
        "x for x in scored[:2]",
        ("test_answers.py::test_a_pattern_reaches_the_worker_and_what_does_not_end_scores_0",),
    ),
    Wrong(
        "the first number of a text is its answer",
        "run.data.answers",
        "same(found[-1], right)",
        "same(found[0], right)",
        ("test_answers.py::test_answers_are_found_in_texts",),
    ),
    Wrong(
        "a first evaluation of 0 ends without a word",
        "run.loop.runner",
        "and not np.any(row.get(self.job.score, 1.0))",
        "and np.any(row.get(self.job.score, 1.0))",
        ("test_answers.py::test_a_first_evaluation_of_0_is_explained",),
    ),
    Wrong(
        "a demonstrated action is that of another step",
        "control.cloning",
        "observation[drawn], action[drawn]",
        "observation[drawn], action[drawn - 1]",
        ("test_cloning.py::test_steps_are_drawn_with_their_actions_whatever_the_layout",),
    ),
    Wrong(
        "an overwritten sweep goes on with the programs of the one before",
        "run.store.folder",
        '"table.txt", "programs")',
        '"table.txt")',
        ("test_sweeps.py::test_an_overwritten_sweep_begins_anew",),
    ),
    Wrong(
        "a run replaces one that it began with by way of another",
        "run.experiment.models",
        'root(stored.get("init_from", ""), here, *seen)',
        'root(stored.get("init_from", ""))',
        ("test_init_from.py::test_no_run_takes_the_place_of_one_that_it_began_with",),
    ),
    Wrong(
        "the first line that is left passes for that of the initial policy",
        "run.store.metrics",
        'if initial and first["iteration"] == 0 else {}',
        "if initial else {}",
        ("test_metrics.py::test_a_later_line_is_not_that_of_the_initial_policy",),
    ),
    Wrong(
        "an empty answer is found in every text",
        "run.data.answers",
        "bool(word and re.search(",
        "bool(re.search(",
        ("test_answers.py::test_answers_are_found_in_texts",),
    ),
    Wrong(
        "a picture that fails is left half written",
        "run.figures.plotting",
        "temporary.unlink(missing_ok=True)",
        "pass",
        ("test_plotting.py::test_a_picture_that_fails_leaves_the_one_before_and_nothing_else",),
    ),
    Wrong(
        "the last of two sizes of an axis is that of the mesh",
        "run.devices.parallel",
        " and name not in axes",
        "",
        ("test_parallel.py::test_bad_meshes_are_named",),
    ),
]
