"""Planted mistakes in the Python interface: hooks, user-defined objects, policies."""

from wrong import table

WRONG = table("""
a hook holds the line itself and may change it
  run.loop.progress: test_hooks.py::test_hook_gets_each_row_and_adds_numbers
  - on_row(copy.deepcopy(row))
  + on_row(row)
a run that a hook ends lacks its last evaluation
  run.loop.runner: test_hooks.py::test_hook_ends_run_saved_evaluated_and_resumable
  - row |= {} if evaluated else self.evaluation(place)
  + row |= {}
a run whose step size has decayed is told to change its decay
  run.experiment.settings:
    test_script_flags.py::test_decayed_run_is_not_extended
  -         if resumed:
  -
  +         if resumed and origins[DECAY] == "stored":
  +
a study tunes beyond the range of its flag
  experiments.studies.claims.trial: test_studies.py::test_sweep_stays_within_range_of_flag
  - asked = list(filter(runs.admits, further))
  + asked = further
a run that begins with another forgets what that saw of observations
  run.experiment.earlier:
    test_init_from.py::test_control_seeds_start_from_earlier_first_seed
  - return begins, collector._replace(replicated={**collector.replicated, **of_run})
  + return begins, collector
a class that is given is imported a second time
  run.experiment.user_code:
    test_own_objects.py::test_what_other_processes_can_import_is_named_by_its_file
  - if isinstance(source, PythonObject):
  -         return
  + if isinstance(source, PythonObject) and not in_file(source):
  +         return
a method ignores an argument that it lacks
  run.experiment.user_code: test_own_losses.py::test_what_a_method_cannot_take_is_named
  - if source and name not in parameters:
  + if False:
values that were found for another optimizer stay
  run.experiment.user_code: test_own_losses.py::test_tuned_values_of_replaced_parts_are_omitted
  - for name, value in values.items() if name not in fields}
  + for name, value in values.items()}
a policy needs the loss of its run
  run.experiment.earlier: test_own_losses.py::test_policy_with_own_loss_needs_no_loss
  - dict.fromkeys(sources.LOSS, "")
  + {}
a vine has a body for policy and critic
  run.experiment.control: test_own_losses.py::test_what_a_method_cannot_take_is_named
  - for name in ("critic", "actor_critic") if
  + for name in ("critic",) if
an error about the user's optimizer names a setting of the method
  run.experiment.flags: test_own_losses.py::test_what_a_method_cannot_take_is_named
  - if isinstance(error, UserCodeError):
  + if False:
an error about the method's optimizer names the user's
  run.experiment.flags: test_own_losses.py::test_what_a_method_cannot_take_is_named
  - sorted(sections.items(), key=lambda section: not section[0])
  + sections.items()
an object of Python is known by its name alone
  run.store.sources:
    test_changed_objects.py::test_changed_object_is_named_on_resume
    test_changed_objects.py::test_digest_follows_the_code_that_is_used
  - if isinstance(source, PythonObject) and not in_file(source):
  + if False:
an object without source passes for the same
  run.store.provenance:
    test_changed_objects.py::test_changed_object_is_named_on_resume
    test_changed_objects.py::test_deterministic_run_refuses_object_never_read
  - elif name in before and sources.OWN in f"{was} {value}":
  + elif False:
a sweep resumes with other code and is silent
  run.experiment.sweeping: test_changed_objects.py::test_sweep_names_a_changed_object
  - provenance.note(provenance.differences(code, stored.get("resolved", {})))
  + ()
a learner resumes under other versions and is silent
  run.experiment.prepare:
    test_train_and_load.py::test_learner_resumes_under_other_versions_with_a_line
  - notes=provenance.note(provenance.differences(now, before))
  + notes=[]
the functions of a loaded policy do not pickle
  run.experiment.policies: test_pickled_policies.py::test_policy_with_a_python_environment_pickles
  - rebuild=(acting_of, (config, state))
  + rebuild=()
a training state shows its arrays
  types: test_reprs.py::test_training_state_has_a_short_text
  - _record.__repr__ = short_repr
  + _record.__str__ = short_repr
an error of a section has no prefix
  run.experiment.flags: test_flags.py::test_located_error_has_the_prefix_of_its_section
  - return ConfigError(join(prefix, error.field), error.message)
  + return error
a saved policy has the variances of observations
  control.acting: test_acting.py::test_policies_of_a_run_and_of_its_problem_act_alike
  - of_statistics(lambda each: each.divisor())
  + of_statistics(lambda each: each.variance)
a saved policy divides a constant observation by zero
  control.acting: test_acting.py::test_arrays_of_a_policy_know_bounds_and_first_actions
  - of_statistics(lambda each: each.divisor())
  + of_statistics(lambda each: each.std())
a saved bound that is infinite is the largest float
  control.acting: test_acting.py::test_arrays_of_a_policy_know_bounds_and_first_actions
  - np.where(action == np.float32(far), far * np.inf, action)
  + action
a list of as many observations as components is transposed
  control.acting: test_acting.py::test_lists_of_observations_are_batches
  - np.asarray(observation) if type(observation) in (list, tuple) else observation
  + observation
an export of control is the first seed's
  cli.export: test_acting.py::test_policies_of_a_run_and_of_its_problem_act_alike[plain]
  - acting_of(config, select_seed(state, options.seed_index))
  + acting_of(config, select_seed(state))
lines of gloo pass
  run.devices.processes: test_processes.py::test_lines_of_others_pass_where_gloo_is_hidden
  - if not hidden:
  + if True:
a number that a child process writes is lost
  run.devices.processes: test_processes.py::test_lines_of_others_pass_where_gloo_is_hidden
  - (hidden or re.search(rb"[a-z]", line))
  + True
a run without a score has no best checkpoint
  run.experiment.earlier:
    test_train_and_load.py::test_run_without_a_score_loads_its_latest_checkpoint
  - kind = "latest"
  + pass
the final policy is another seed's
  run.experiment.training: test_train_and_load.py::test_learner_leaves_command_files_and_resumes
  - state, select=select_seed, settings
  + state, select=lambda state: select_seed(state, -1), settings
a given environment of gymnasium stands for all
  run.host.vector_envs:
    test_host_runs.py::test_own_environment_of_gymnasium_needs_no_registration[3]
  - copy.deepcopy(found) if copies
  + found if copies
a function that returns one environment twice is accepted
  run.host.vector_envs:
    test_host_runs.py::test_gymnasium_objects_where_they_cannot_run_are_told_the_way
  - if made is env:
  + if False:
a class of gymnasium has no time limit
  run.host.vector_envs:
    test_host_runs.py::test_own_environment_of_gymnasium_needs_no_registration[2]
  - return made if limit is None else wrappers.TimeLimit(made, limit)
  + return made
a class of gymnasium is asked to return to a state
  run.experiment.control:
    test_host_runs.py::test_gymnasium_objects_where_they_cannot_run_are_told_the_way
  - _require_trajectories(options, chosen_sampling(options))
  + pass
steps of a resumed run come from the problem
  run.experiment.prepare:
    test_train_and_load.py::test_steps_of_an_iteration_come_from_the_problem
  - stored.get("steps_per_iteration", known)
  + known
a resumed run forgets the unit of its steps
  run.experiment.prepare:
    test_train_and_load.py::test_steps_of_an_iteration_come_from_the_problem
  - stored.get("unit", "iterations" if steps == 1 else "steps")
  + "iterations" if steps == 1 else "steps"
other steps have the unit of the problem
  run.experiment.prepare:
    test_train_and_load.py::test_steps_of_an_iteration_come_from_the_problem
  - if problem is not None and steps == known:
  + if problem is not None:
a vine counts its trunks alone
  control.vine: test_train_and_load.py::test_problems_count_the_steps_that_commands_count
  - steps, spaces = sizes.steps(branches), environment.spaces
  + steps, spaces = num_envs * sizes.num_steps, environment.spaces
a notebook keeps each line about progress
  run.loop.progress: test_progress.py::test_notebook_updates_one_line_and_keeps_reports
  - if self._in_place and not stays:
  + if False:
a quiet run shows its line in a notebook
  run.loop.progress: test_progress.py::test_notebook_updates_one_line_and_keeps_reports
  - kernel and not quiet, None
  + kernel, None
texts of a call in Python name flags
  run.loop.progress: test_progress.py::test_texts_name_flags_only_in_a_command
  - line = FLAG.sub("", line)
  + pass
a batch of observations is acted on with one random number
  control.acting:
    test_own_objects.py::test_what_was_given_in_python_is_told_and_given_again
  - axes = (None, 0, None if key is None else 0)
  + keys, axes = key, (None, 0, None)
Muon takes the norms of stacked blocks, and Adam their matrices
  language.transformer: test_optimization.py::test_muon_takes_the_blocks_of_a_transformer[scanned]
  - name == "blocks" and x.ndim == 3
  + name == "blocks" and x.ndim == 2
Muon takes embedding and output
  language.transformer: test_optimization.py::test_muon_takes_the_blocks_of_a_transformer[unrolled]
  - name == "blocks" and x.ndim == 3
  + x.ndim >= 2
Muon takes every matrix of a control network
  control.networks:
    test_optimization.py::test_muon_takes_hidden_matrices_of_control[mlp]
    test_optimization.py::test_muon_takes_all_convolutions_but_the_first
  - _mark(layer, name != first)
  + _mark(layer, True)
Muon takes the head
  control.networks: test_optimization.py::test_muon_takes_hidden_matrices_of_control[shared]
  - _mark(layers[name], False)
  + _mark(layers[name], True)
Muon takes the table of position biases
  control.memory: test_optimization.py::test_muon_takes_hidden_matrices_of_control[transformer]
  - return leaf.ndim == 2 and inner and names[1:] != ["bias"]
  + return leaf.ndim == 2 and inner
Muon takes the matrices of a user's layers
  control.networks: test_optimization.py::test_muon_refuses_networks_of_a_user[torso]
  - if type(torso) is not Torso:
  + if not isinstance(torso, Torso):
Muon takes the matrices of a user's transformer
  language.networks: test_optimization.py::test_muon_refuses_networks_of_a_user[model]
  - type(each) is Transformer
  + isinstance(each, Transformer)
Muon ignores a critic of a user
  control.actor: test_optimization.py::test_muon_refuses_networks_of_a_user[critic]
  - or (critic is not None and of_value is None)
an optimizer is named and given
  optimizers: test_optimization.py::test_optimizer_fields_without_effect_are_refused[grpo]
  - if config.optimizer != AUTO:
  + if False:
a schedule without a decay is silent
  optimizers: test_optimization.py::test_optimizer_fields_without_effect_are_refused[reinforce]
  - decays = config.schedule == CONSTANT or bool(config.decay_iterations)
  + decays = True
help describes the fields of the class itself alone
  config: test_optimization.py::test_every_step_size_has_optimizer_and_schedule[a2c]
  - for each in fields)
  + for each in fields if each.name in vars(cls).get("__annotations__", ()))
a control run is read by way of the one that it began from
  run.experiment.earlier: test_init_from.py::test_control_run_outlives_its_initial_run
  - config = config.continued()
  + pass
a name that a notebook imports is gone
  language.rewards: test_names.py::test_every_name_of_the_package_exists[notebooks/04_dapo.ipynb]
  - def soft_overlong(
  + def overlong(
a loaded policy forgets the statistics of observations
  control.acting: test_acting.py::test_policies_of_a_run_and_of_its_problem_act_alike
  - actor.act(params, collector, *row)
  + actor.act(params, collector._replace(replicated={}), *row)
an actor without memory reads raw observations
  control.actor: test_acting.py::test_policies_of_a_run_and_of_its_problem_act_alike[plain]
  - inputs = normalize(collector, observation)
  + inputs = observation
a field is on no page
  algorithms.npg: test_documented_fields.py::test_every_field_of_a_method_is_documented[npg]
  - cg_iterations: int = static(
  + fisher_rows: int = static(1, "rows")
  +     cg_iterations: int = static(
a shared field has another name than the page says
  algorithms.critic_fit: test_documented_fields.py::test_a_shared_row_holds_for_its_methods
  - value_epochs: int = static(
  + critic_epochs: int = static(
a new state shares its arrays
  learner:
    test_donation.py::test_leaves_of_a_new_state_are_distinct[grpo-addition]
    test_donation.py::test_a_pretrained_policy_and_reward_model_are_copied
  - jnp.copy(leaf) if hasattr(leaf, "dtype") else leaf
  + leaf
the reference of a reward shares the policy's arrays
  algorithms.reference: test_donation.py::test_a_reference_by_reward_is_distinct
  - reference_params=jax.tree.map(jnp.copy, state.params.policy)
  + reference_params=state.params.policy
an adapted coefficient is the user's array
  algorithms.reference: test_donation.py::test_a_reference_by_reward_is_distinct
  - beta = jnp.array(settings.kl_coefficient, jnp.float32)
  + beta = jnp.asarray(settings.kl_coefficient, jnp.float32)
the prompts of a state are the user's arrays
  language.networks: test_donation.py::test_prompts_are_copied
  - jax.tree.map(jnp.array, source.data)
  + jax.tree.map(jnp.asarray, source.data)
a frozen base is copied
  learner: test_donation.py::test_frozen_parameters_stay_out_of_donations
  - (frozen=undonated(params.frozen))
  + (frozen=unshared(params.frozen))
a state begins with frozen parameters that were donated
  learner: test_donation.py::test_frozen_parameters_stay_out_of_donations[teacher]
  - (frozen=undonated(params.frozen))
  + (frozen=params.frozen)
a problem begins with a base that was donated
  language.networks: test_donation.py::test_a_warm_start_refuses_a_donated_base
  - undonated(initial)
  + initial
a learner with another initial policy is another program
  run.store.provenance: test_provenance.py::test_of_arrays_only_frozen_ones_are_the_program
  - strict=True) if used)
  + strict=True))
a method of the user's is looked up among ours
  run.experiment.user_code: test_own_entries.py::test_wrong_entry_is_named
  - if not is_source(name):
  -         return errors.lookup
  + if True:
  +         return errors.lookup
a memory of the user's is its text
  run.experiment.flags: test_own_entries.py::test_memory_of_a_file_is_its_object
  - values[field] = user_code.find_object(names[field], values[field])
  + pass
an object that scores batches is called with texts
  run.experiment.rewarding: test_own_entries.py::test_scorer_is_the_reward_itself
  - return value if is_one else None
  + return None
""")
