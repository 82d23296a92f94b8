"""Planted mistakes in earlier versions of the package."""

from wrong import Wrong, table

TEXT = r"""
fewest microbatches where memory is short
  run.loop.programs: test_microbatches.py::test_smallest_number_that_fits_is_chosen
  - slope * (1 / number - x1) <= space
  + slope * (1 / number - x1) > space
all memory shrinks with more microbatches
  run.loop.programs: test_microbatches.py::test_smallest_number_that_fits_is_chosen
  - found = _next_job(job, points[-2:], number, space)
  + found = _next_job(job, [(0.0, 0), points[-1]], number, space)
two numbers with the same peak end the search
  run.loop.programs: test_microbatches.py::test_two_numbers_may_have_the_same_peak
  - found = found or _next_job(job, [points[0], points[-1]], number, space)
  + found = found or None
a run that does not fit is compiled with every number
  run.loop.programs: test_microbatches.py::test_training_that_does_not_fit_is_an_error
  - range(COMPILATIONS)
  + range(COMPILATIONS + 9)
sampling that does not fit is compiled in more microbatches
  run.loop.programs: test_microbatches.py::test_training_that_does_not_fit_is_an_error
  - max(memory.fixed, memory.floor) <= space
  + memory.fixed <= space
memory of sampling is a part of that of each update
  run.devices.memory: test_microbatches.py::test_sampling_must_fit_but_asks_for_no_microbatches
  - floor=sampling.peak)
  + fixed=max(self.fixed, sampling.peak), floor=sampling.peak)
a sweep chooses its microbatches
  run.loop.job: test_sweeps.py::test_sweep_keeps_its_microbatches
  - if learned and not methods
  + if learned
a sweep repeats its warm start for each setting
  run.loop.job: test_sweeps.py::test_settings_of_a_sweep_share_warm_starts
  - x[: len(x) // times]
  + x
the settings of a seed have warm starts of other seeds
  run.loop.job: test_sweeps.py::test_settings_of_a_sweep_share_warm_starts
  - jnp.concatenate([x] * times)
  + jnp.repeat(x, times, axis=0)
devices that do not divide the seeds are left out
  run.devices.parallel: test_sweeps.py::test_devices_that_do_not_divide_seeds_compute_copies
  - copies = self.data_devices * self.seed_devices // devices
  + copies = self.data_devices
a sweep reads its models for each combination
  run.experiment.sweeping: test_sweeps.py::test_a_program_of_a_sweep_reads_its_models_once
  - job = build_group(domain, [one for _, one in group], options)
  + job = [build_group(domain, [one], options) for _, one in group][-1]
microbatches are chosen once
  run.loop.programs: test_microbatches.py::test_microbatch_is_of_whole_prompts_or_of_one
  - dataclasses.replace(job, learner=learner)
  + dataclasses.replace(job, learner=learner, rebuild=None)
a microbatch mixes parts of prompts
  run.loop.job: test_microbatches.py::test_microbatch_is_of_whole_prompts_or_of_one
  - if rows % number or (prompts % number and number % prompts):
  + if rows % number:
microbatches divide rows that are not learned from
  run.experiment.registry: test_microbatches.py::test_microbatch_is_of_whole_prompts_or_of_one
  - (config.train_prompts or prompts, members)
  + (prompts, members)
a resumed sweep takes the tuned settings of today
  run.experiment.search_space: test_sweeps.py::test_resumed_sweep_keeps_its_settings
  - spec = spec._replace(flags=spec.flags | found)
  + tuned = control.tuned(control.ControlOptions())
  +     spec = spec._replace(flags=spec.flags | found, tuned=tuned)
each CPU device has all the memory of the machine
  run.devices.memory:
    test_microbatches.py::test_available_memory_is_limit_minus_resident
  - (limit // sharing - resident_bytes()) // devices
  + limit // sharing - resident_bytes()
a program that does not fit runs nevertheless
  run.devices.memory: test_microbatches.py::test_run_in_little_memory_takes_microbatches
  - (self.peak or 0) <= space)
  + (self.peak or 0) <= space or space != 1)
only the outermost control group is read
  run.devices.memory: test_microbatches.py::test_limit_is_of_container_or_machine
  - *path.strip("/").split("/")]
  + ""]
settings that are chosen later are not exported
  run.store.exporters: test_microbatches.py::test_chosen_number_is_exported
  - for exporter in exporters], start
  + for exporter in exporters], copy.deepcopy(start)
a program fits though the compiler refused it
  run.devices.memory: test_microbatches.py::test_refused_program_never_fits
  - return not self.refused and (space
  + return (space
a resumed run chooses its microbatches anew
  run.experiment.prepare: test_microbatches.py::test_resumed_run_keeps_its_number
  - MICROBATCHES in {**before, **settings.given}
  + MICROBATCHES in settings.given
names in pictures are read as TeX
  run.figures.plotting:
    test_plotting.py::test_names_are_literal_under_any_matplotlibrc
  - "text.parse_math": False
  + "text.parse_math": True
a picture that fails fails the run
  run.experiment.training: test_front_door.py::test_a_picture_that_fails_fails_no_run
  - with plotting.report_failure(out / "curves.png"):
  + if out:
an iteration without signal in one seed is said to have taught nothing
  run.loop.progress: test_doubts.py::test_an_iteration_without_signal_in_any_seed_is_said_once
  - np.any(np.asarray(signal.total) > 0, axis=1)
  + np.all(np.asarray(signal.total) > 0, axis=1)
a large kl is not reported
  run.loop.progress: test_doubts.py::test_a_large_kl_is_reported_once
  - LARGE_KL = 1.0
  + LARGE_KL = math.inf
a warning of a large kl names no setting
  run.loop.runner: test_doubts.py::test_a_run_says_what_makes_steps_smaller
  - MetricWarnings(job.display.smaller_steps)
  + MetricWarnings()
a warning of a large kl knows no method
  run.loop.job: test_doubts.py::test_a_job_has_its_methods_advice
  - smaller_steps=smaller_steps(method)
  + smaller_steps=smaller_steps(None)
an early stop that is on is advised
  run.loop.job: test_doubts.py::test_advice_names_fields_of_the_method
  - getattr(method, "early_stop", None) is False
  + hasattr(method, "early_stop")
transformer memory trains without an early stop
  run.experiment.control: test_script_flags.py::test_transformer_memory_stops_early_unless_told
  - stops = kind is not None and kind.needs_early_stop and
  + stops = False and
another memory is a transformer
  control.modules: test_memory.py::test_another_memory_is_one_entry
  - functools.partial(kind.make, **sizes) if sizes else kind.make
  + functools.partial(MEMORIES["transformer"].make, **sizes)
sizes of the transformer have an effect with another memory
  control.modules: test_memory.py::test_another_memory_is_one_entry
  - self.memory in readers
  + self.memory not in ('none', 'gru')
another method with a critic has the defaults of methods in groups
  run.experiment.presets: test_every_algorithm.py::test_another_method_with_a_critic_is_one_entry
  - WITH_CRITIC: entry.has_critic
  + WITH_CRITIC: options.algorithm in ('a2c', 'npg', 'trpo', 'ppo', 'ppo_penalty')
a reward model has a reference by the name of the method
  run.experiment.presets: test_every_algorithm.py::test_another_method_with_a_critic_is_one_entry
  - issubclass(entry.Config, Epochs)
  + options.algorithm in ('ppo', 'ppo_penalty')
a sweep has the defaults of another memory
  run.experiment.search_space: test_script_flags.py::test_a_sweep_has_the_defaults_of_its_memory
  - domain.tuned(*of_run)
  + domain.tuned(options, {}, initial)
FORCE_COLOR puts cursor codes into files
  run.loop.progress: test_progress.py::test_there_are_lines_where_a_cursor_does_not_move
  - self._console.file.isatty() and not
  + self._console.is_terminal and not
all runs of a sweep have the settings of the first
  run.loop.job: test_sweeps.py::test_runs_train_from_evaluation_to_evaluation
  - for x in methods for _ in range
  + for x in methods[:1] * len(methods) for _ in range
what is drawn log-uniformly is drawn uniformly
  run.experiment.search_space: test_sweeps.py::test_draws_follow_seed_and_lie_in_range
  - np.exp(generator.uniform(np.log(low), np.log(high), count))
  + generator.uniform(low, high, count)
draws are rounded to four digits
  run.experiment.search_space: test_sweeps.py::test_draws_keep_all_their_digits
  - f"{value:.4g}" if rounded else repr(float(value))
  + f"{value:.4g}"
equal combinations are searched again
  run.experiment.search_space: test_sweeps.py::test_equal_combinations_are_searched_once
  - every if rounded else list({tuple(each.items()): each for each in every}.values())
  + every
a tie is a text
  run.experiment.search_space: test_sweeps.py::test_tied_flag_has_the_value_of_its_flag
  - untied(each | row) for each
  + each | row for each
a tie after a blank is a text
  run.experiment.search_space: test_sweeps.py::test_blank_may_precede_a_tie
  - [each.strip() if TIE in each else each for each in text.split(",")]
  + text.split(",")
a tie names a flag that has one value
  run.experiment.search_space: test_sweeps.py::test_bad_sweeps_are_named_and_touch_nothing
  - if name not in values and value[1:] not in values:
  + if False:
a tied flag is drawn in the picture of a sweep
  run.experiment.sweeping: test_sweeps.py::test_each_run_of_a_sweep_has_a_flat_row
  - if first[:1] == TIE and not more
  + if False
a table of runs leaves out seeds
  run.experiment.sweeping: test_sweeps.py::test_each_run_of_a_sweep_has_a_flat_row
  - for i, score in enumerate(final_scores(row["scores"]))
  + for i, score in enumerate(final_scores(row["scores"])[:1])
numbers of a sweep are texts
  run.experiment.sweeping: test_sweeps.py::test_each_run_of_a_sweep_has_a_flat_row
  - {name: made.given[name] for name in combination}
  + dict(combination)
a sweep whose numbers are texts is damaged
  run.experiment.sweeping: test_sweeps.py::test_sweep_with_numbers_as_texts_resumes
  - search_space.as_written(flags.current(row["flags"], sections))
  + flags.current(row["flags"], sections)
the best combination is confirmed on the seeds of the search
  run.experiment.sweeping: test_sweeps.py::test_best_combination_is_confirmed_on_fresh_seeds
  - "seed": options.seed + 1
  + "seed": options.seed
a confirmation compares the default with the best combination
  run.experiment.sweeping: test_sweeps.py::test_best_combination_is_confirmed_on_fresh_seeds
  - [scores[False], scores[True]]
  + [scores[True], scores[False]]
a map of two numbers shows the best seeds
  run.figures.plotting: test_plotting.py::test_two_drawn_numbers_are_a_map
  - np.mean(np.asarray(scores, np.float64))
  + np.max(np.asarray(scores, np.float64))
a run that is resumed from Python cannot grow
  run.experiment.experiment:
    test_train_and_load.py::test_an_experiment_leaves_what_its_command_leaves
  - {"out": out, "resume": True, **more}
  + {"out": out, "resume": True}
of the metrics of a call, those of iterations that it had not are kept
  run.loop.programs: test_runner.py::test_chunk_is_split_into_timed_calls
  - lambda x, now=now: np.asarray(x)[:now]
  + lambda x: np.asarray(x)
every chunk begins with a call of one iteration
  run.loop.programs: test_runner.py::test_chunk_is_split_into_timed_calls
  - begun, done, rows = time.perf_counter(), 0, list[Metrics]()
  + begun, done, rows, size = time.perf_counter(), 0, list[Metrics](), 1
processes disagree on how many iterations a call has
  run.loop.programs:
    test_runner.py::test_processes_agree_on_call_length_and_stop
  - min(processes.gather_values(max(1, int(SECONDS_OF_CALL * done / took))))
  + max(1, int(SECONDS_OF_CALL * done / took))
the line of a chunk that was cut holds only what came after
  run.loop.runner:
    test_runner.py::test_run_stopped_within_a_chunk_equals_uninterrupted
  - aside = read_aside(
  + _ = read_aside(
what was set aside before is lost when the chunk is cut again
  run.loop.runner:
    test_runner.py::test_run_stopped_within_a_chunk_equals_uninterrupted
  - write_aside(self.folder / ASIDE, self.aside)
  + write_aside(self.folder / ASIDE, means)
a signal waits for the end of a chunk that is scored
  run.loop.programs: test_halves.py::test_resumed_with_a_reward_in_python_equals_uninterrupted
  -                 break
  -             try:
  +                 pass
  +             try:
a second hangup ends the run unsaved
  run.loop.signals: test_interrupts.py::test_interrupt_finishes_the_iteration_saves_and_says_so
  - signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL
  + signal.SIG_DFL
checkpoints on a disk that is not mounted count as none
  run.store.folder: test_folder.py::test_what_may_be_more_than_a_beginning_blocks
  -  or any(path.is_symlink() for path in held.values())
what compiling freed stays with the process
  run.devices.compilation: test_compilation.py::test_what_compiling_freed_is_returned_to_the_system
  -     return_freed_memory()
  -     return program
  +     return program
an iteration is traced again for its program
  run.devices.compilation:
    test_compilation.py::test_what_runs_seldom_on_a_small_state_is_compiled_at_little_effort
  - .lower(*bare)
  + .lower(*arguments)
what describes a large state is compiled at little effort
  run.loop.programs:
    test_compilation.py::test_what_runs_seldom_on_a_small_state_is_compiled_at_little_effort
  - light=is_cheap(like)
  + light=True
an error waits for what compiles beside it
  run.devices.compilation:
    test_compilation.py::test_programs_compile_side_by_side_and_the_first_error_is_raised_at_once
  - return_when=FIRST_EXCEPTION
  + return_when='ALL_COMPLETED'
minibatches are computed in parts where a device has several cores
  minibatches: test_minibatches.py::test_a_core_computes_at_least_256_slots_at_a_time
  - or target is None or not target.one_core_each
  + or target is None
a part of a minibatch may be smaller than what keeps a core busy
  minibatches: test_minibatches.py::test_a_core_computes_at_least_256_slots_at_a_time
  - min(rows, rows * slots // AT_A_TIME)
  + rows
rows that are read as whole groups are computed in parts
  algorithms.group_policy: test_shared_prompts.py::test_a_core_computes_whole_groups
  - slots=parts.slots if problem.fast_paths.grouped is None else None
  + slots=parts.slots
rows that are cut at the longest are computed in more parts
  updates: test_lengths.py::test_cut_rows_are_not_split_further
  - self.slots is not None and self.by_length is None
  + self.slots is not None
the critic's rows count as one slot each
  algorithms.critic_fit:
    test_minibatches.py::test_methods_name_the_slots_of_their_rows[reinforce-addition-expected3]
  - slots=rows.mask[0].size
  + slots=1
seeds begin with one key
  run.devices.seeds: test_seeds.py::test_each_seed_begins_samples_and_learns_alone
  - over(init, num_seeds, in_axes=(axes,), out_axes=STATE_AXES),
  + over(lambda start: init(jax.random.key(0)), num_seeds, in_axes=(axes,), out_axes=STATE_AXES),
groups of seeds are updated in another order
  run.devices.seeds: test_seeds.py::test_seeds_in_groups_keep_their_order_and_share_what_is_frozen
  - jax.lax.map(of_group, groups)
  + jax.lax.map(of_group, jax.tree.map(lambda x: x[::-1], groups))
seeds are updated in groups on every device
  run.devices.seeds: test_seeds.py::test_a_core_updates_at_most_eight_seeds_side_by_side
  - dividing[0] if dividing and target.one_core_each else num_seeds
  + dividing[0] if dividing else num_seeds
a seed without a number makes a state the best
  run.loop.runner: test_runner.py::test_row_with_a_nan_seed_is_not_best
  - score is not None and np.isfinite(scores).all()
  + score is not None
whatever has the shape of a masked slot is zeroed
  learner: test_halves.py::test_task_data_reaches_the_scorer_unchanged
  - return batch._replace(**{name: jax.tree.map(zero, getattr(batch, name)) for name in ZEROED})
  + like = lambda x: zero(x) if x.shape[:2] == batch.mask.shape else x
  +     return batch._replace(inputs=jax.tree.map(like, batch.inputs))
a column of slots keeps what is masked
  learner:
    test_group_policy.py::test_columns_of_ones_own_are_read_where_they_belong
    test_own_advantage.py::test_v_trace_on_completions_of_an_older_policy_is_its_equation
  - masked.zero(leaf, batch.mask) if leaf.ndim > 1 else leaf
  + masked.zero(leaf, batch.mask) if leaf.dtype != jnp.float32 else leaf
a surrogate is given the columns of rows
  types: test_group_policy.py::test_columns_of_ones_own_are_read_where_they_belong
  - .items() if x.ndim > 1
  + .items()
the KL is that before the update
  algorithms.actor_critic:
    test_algorithms.py::test_kl_is_of_the_whole_update[gspo-4]
  - divergences.k3(part.log_prob, policy(params, part).log_prob(part.action))
  + divergences.k3(part.log_prob, part.log_prob)
without a baseline returns are shifted and scaled, and shifted back unscaled
  algorithms.reinforce:
    test_family.py::test_without_a_baseline_returns_are_divided_by_their_std_and_not_shifted
  - advantage = advantage / (advantages.scale_of(mean, std) + 1e-8)
  + advantage = (advantage - mean) / (std + 1e-8) + mean
a std without a floor
  advantages:
    test_control.py::test_a_return_that_does_not_vary_is_scaled_by_its_mean
    test_family.py::test_a_constant_return_without_a_baseline_is_scaled_by_its_mean
  - jnp.maximum(std, 0.1 * jnp.abs(mean))
  + std
what is carried is stored up
  dynamic_sampling:
    test_dynamic_sampling.py::test_a_surplus_fills_up_after_the_first_fresh_batch_and_is_then_dropped
  - room = jnp.where(fill.rounds == 0, slots.wanted - filled, 0)
  + room = jnp.where(fill.rounds == 0, slots.wanted - filled + slots.generated, 0)
what is carried does not age
  dynamic_sampling: test_dynamic_sampling.py::test_what_is_trained_on_is_at_most_one_update_old
  - "age": spare.columns["age"] + 1
  + "age": spare.columns["age"]
every token is a step
  algorithms.grpo:
    test_group_policy.py::test_process_supervision_counts_the_steps_that_the_problem_names
  - estimator(*group, **settings)
  + estimator(*group[:2], **settings)
a process reward is due at every token
  language.problem: test_language_problem.py::test_the_task_says_where_a_process_reward_is_due
  - columns["step_end"] = is_last | step_end
  + pass
actions of a proposal as if the policy had drawn them
  algorithms.npg:
    test_groups_and_vines.py::test_kl_and_surrogate_of_a_vine_are_those_of_the_policy_and_not_of_the_proposal
  - policy_surrogate if problem.on_policy else proposal_surrogate
  + policy_surrogate
a proposal is admitted where nothing weighs it
  algorithms.actor_critic:
    test_groups_and_vines.py::test_actions_of_a_proposal_are_refused_where_nothing_weighs_them
  -     if not problem.on_policy:
  -         raise
  +     if False:
  +         raise
actions are drawn in half precision
  distributions: test_distributions.py::test_what_is_drawn_in_half_precision_is_what_is_scored
  - logits = _wide(self.logits)
  + logits = self.logits
a Gaussian is scored in half precision
  distributions: test_distributions.py::test_what_is_drawn_in_half_precision_is_what_is_scored
  -         mean, log_std = _wide(self.mean), _wide(self.log_std)
  -         z =
  +         mean, log_std = self.mean, self.log_std
  +         z =
a stride that starts anew in every part and on every device
  natural_updates: test_fisher.py::test_the_fisher_stride_counts_rows_over_devices_and_parts
  - first = -(device * num_parts + jnp.arange(num_parts)) * rows % stride
  + first = 0 * (device * num_parts + jnp.arange(num_parts))
the sampler's log-probabilities are the old policy's in half precision
  learner: test_old_policy.py::test_learner_pass_replaces_cached_pass
  - if not problem.log_prob_matches_sampler:
  + if False:
what is carried is scored by parameters that did not draw it
  learner: test_old_policy.py::test_what_is_recomputed_and_what_is_logged
  - jnp.where(fresh, recomputed, batch.log_prob)
  + recomputed
an episode that reaches its limit is overlong
  algorithms.dapo:
    test_groups_and_vines.py::test_dapo_on_control_keeps_the_episodes_that_reach_the_limit
  - if config.overlong_filtering and problem.truncated_is_overlong:
  + if config.overlong_filtering:
the KL of a surplus counts two updates
  types: test_dynamic_sampling.py::test_kl_is_of_this_update_and_not_of_the_one_before
  - self.mask if age is None else self.mask & (age == 0)[:, None]
  + self.mask
the KL is of what is trained on
  algorithms.group_policy: test_dynamic_sampling.py::test_kl_covers_what_the_loss_leaves_out
  - samples._replace(mask=batch.fresh()), batch.score
  + samples, batch.score
a short run is all warm-up
  run.experiment.settings:
    test_pretrained_input.py::test_adapters_have_settings_that_suit_them_and_a_warm_up_is_a_tenth
  - min(method.warm_up_iterations, iterations // 10)
  + method.warm_up_iterations
a completion that fills its budget is rewarded although an end is required
  run.data.scoring:
    test_answers.py::test_pattern_that_does_not_end_scores_0
  - np.where(cut, np.float32(0.0), x) for x in scored[:2]
  + x for x in scored[:2]
the first number of a text is its answer
  run.data.answers: test_answers.py::test_answers_are_found_in_texts
  - same(found[-1], right)
  + same(found[0], right)
a first evaluation of 0 ends without a word
  run.loop.runner: test_answers.py::test_a_first_evaluation_of_0_is_explained
  - and not np.any(row.get(self.score, 1.0))
  + and np.any(row.get(self.score, 1.0))
a demonstrated action is that of another step
  control.cloning: test_cloning.py::test_steps_are_drawn_with_their_actions_whatever_the_layout
  - observation[drawn], action[drawn]
  + observation[drawn], action[drawn - 1]
an overwritten sweep goes on with the programs of the one before
  run.store.folder: test_sweeps.py::test_an_overwritten_sweep_begins_anew
  - "table.txt", "programs")
  + "table.txt")
a run replaces one that it began with by way of another
  run.experiment.models: test_init_from.py::test_run_does_not_overwrite_its_initial_run
  - root(stored.get("init_from", ""), here, *seen)
  + root(stored.get("init_from", ""))
the first line that is left passes for that of the initial policy
  run.store.metrics: test_metrics.py::test_a_later_line_is_not_that_of_the_initial_policy
  - if initial and first["iteration"] == 0 else {}
  + if initial else {}
an empty answer is found in every text
  run.data.answers: test_answers.py::test_answers_are_found_in_texts
  - re.finditer(re.escape(word), text) if word)
  + re.finditer(re.escape(word), text))
the minus sign of Unicode is read past
  run.data.answers: test_answers.py::test_answers_are_found_in_texts
  - return MINUS.sub("-", text)
  + return text
a part of a number with separators is found in a text
  run.data.answers: test_answers.py::test_answers_are_found_in_texts
  - if NUMBER.fullmatch(word):
  + if False:
an export has float32 where training changed nothing
  cli.export: test_pretrained_runs.py::test_an_export_narrows_what_training_did_not_change
  - return before if np.array_equal(x, before.astype(x.dtype)) else x
  + return x
pass@n is given for powers of two alone
  language.evaluation: test_evaluation.py::test_evaluation_summarises_the_samples
  - dict.fromkeys([*powers, n])
  + powers
one row with an answer answers for all
  run.data.prompts: test_prompts.py::test_an_answer_may_be_null_where_functions_reward
  - return all(row.columns.get(ANSWER)
  + return any(row.columns.get(ANSWER)
a row on which a reward fails scores 0
  run.data.scoring: test_scoring.py::test_rows_with_failed_reward_leave_the_mean
  - np.where(pending & ~scores.failed, scores.values, values)
  + np.where(pending, scores.values, values)
a part of the rows selects a checkpoint
  run.loop.runner: test_runner.py::test_partial_mean_selects_no_checkpoint
  - -float(np.mean(row.get(FAILED, 0.0)))
  + 0.0
a failing evaluation ends the run
  run.loop.runner:
    test_rewarded_runs.py::test_a_function_that_fails_on_a_later_evaluation_loses_nothing[2-0]
  - isinstance(error, RewardError) and not last
  + False
a coroutine is no score
  run.data.scoring_worker: test_scoring.py::test_async_functions_are_awaited
  - if not (several or inspect.isawaitable(result)):
  + if True:
a list of rewards holds texts alone
  run.store.sources: test_scoring.py::test_functions_names_and_objects_may_be_listed
  - return source.value if listed else [source]
  + return [source]
a mixed number is a product
  run.data.mathematics: test_mathematics.py::test_a_mixed_number_is_a_sum
  - {mixed[2]}+\frac
  + {mixed[2]}\cdot\frac
a picture that fails is left half written
  run.figures.plotting:
    test_plotting.py::test_failed_picture_leaves_the_one_before
  - temporary.unlink(missing_ok=True)
  + pass
the last of two sizes of an axis is that of the mesh
  run.devices.parallel: test_parallel.py::test_bad_meshes_are_named
  -  and name not in axes
a surrogate that reads its minibatch is taken for row-wise
  algorithms.surrogates: test_surrogates.py::test_reading_other_rows_is_seen[none_far-12]
  - return data_flow.is_row_wise((trace(sizes[0], axis), whole), sizes)
  + return True
what a surrogate logs may read other rows
  algorithms.surrogates: test_surrogates.py::test_reading_other_rows_is_seen[logs_mean-12]
  - return elements, logged, pull_back(
  + return elements, pull_back(
a gradient may mix rows
  algorithms.surrogates: test_surrogates.py::test_gradients_that_mix_rows_are_seen
  - return elements, logged, pull_back(weight.astype(elements.dtype))
  + return elements, logged
rows are cut for a surrogate that reads their length
  algorithms.surrogates: test_surrogates.py::test_rows_of_what_reads_their_length_stay_whole
  - by_length if cut else None
  + by_length
a surrogate that reads its device alone is not reported
  algorithms.surrogates: test_surrogates.py::test_a_device_alone_is_reported_unless_reduced
  - num_parts == 1 and not several_devices
  + num_parts == 1
a field called mask is taken for a mask
  updates: test_updates.py::test_a_mask_of_own_samples_is_not_read
  - isinstance(rows, Samples)
  + hasattr(rows, "mask")
constants of a method of one's own are trained
  updates: test_updates.py::test_own_methods_leave_constants_as_they_are
  - params.without_frozen() if isinstance(params, ActorCritic) else params
  + params
a constant that differs with the number of rows passes for the same
  algorithms.data_flow: test_data_flow.py::test_operations_across_rows_mix_them
  - _equal(one.val, two.val)
  + True
a print counts as reading other rows
  algorithms.data_flow: test_data_flow.py::test_operations_within_a_row_keep_rows_apart
  - endswith("DebugEffect")
  + endswith("NoEffect")
a scan or a sort along the rows passes
  algorithms.data_flow: test_data_flow.py::test_operations_across_rows_mix_them
  - if any(after[0] in np.atleast_1d(axes) for axes in along):
  + if False:
a surrogate that asks for the distribution gets none
  algorithms.surrogates: test_surrogates.py::test_a_distribution_is_passed_by_name
  - given = {"distribution": distribution} if self.reads_distribution else {}
  + given = {}
an integer surrogate trains nothing
  algorithms.surrogates: test_surrogates.py::test_integer_elements_are_refused
  - if not jnp.issubdtype(elements.dtype, jnp.floating):
  + if False:
a surrogate replaces the entropy of the loss
  masked: test_surrogates.py::test_names_of_metrics_are_refused
  - for name in joined.keys() & metrics.keys():
  + for name in ():
a loss prints while its elements are counted
  updates: test_updates.py::test_a_loss_calls_back_once_per_step
  - minibatches.without_dead_code(counts, part)(part)
  + counts(part)
a jitted loss prints while its elements are counted
  minibatches: test_updates.py::test_a_loss_calls_back_once_per_step
  - params = {name: _unprinted(value) for name, value in x.params.items()}
  + params = x.params
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "a deterministic run follows the memory of the device",
        "run.experiment.prepare",
        "if options.deterministic or MICROBATCHES",
        "if MICROBATCHES",
        ("test_microbatches.py::test_no_number_is_chosen_if_given_or_deterministic",),
    ),
    Wrong(
        "a seed learns from the samples of another",
        "run.devices.seeds",
        "update if size == num_seeds else",
        "(lambda state, batch: update(state, jax.tree.map(lambda x: x[::-1], batch)))"
        " if size == num_seeds else",
        ("test_seeds.py::test_each_seed_begins_samples_and_learns_alone",),
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
        "a demonstrated reply is part of its own prompt",
        "run.data.prompts",
        "pairs = [{MESSAGES: messages[:i], ",
        "pairs = [{MESSAGES: messages[: i + 1], ",
        ("test_sft.py::test_rows_demonstrate_answers",),
    ),
    Wrong(
        "adapters are trained at the step size of a whole model",
        "run.experiment.presets",
        '(ADAPTERS, ANY, ANY): {"config.learning_rate": 5e-4, ',
        "(ADAPTERS, ANY, ANY): {",
        (
            "test_pretrained_input.py::"
            "test_adapters_have_settings_that_suit_them_and_a_warm_up_is_a_tenth",
        ),
    ),
]
