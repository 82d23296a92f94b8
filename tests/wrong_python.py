"""Wrong programs of what is had from Python: hooks, objects of one's own, policies."""

from wrong import Wrong

WRONG = [
    Wrong(
        "a hook holds the line itself and may change it",
        "run.loop.hooks",
        "on_row(copy.deepcopy(row))",
        "on_row(row)",
        ("test_hooks.py::test_a_hook_gets_each_line_and_may_add_numbers",),
    ),
    Wrong(
        "a run that a hook ends lacks its last evaluation",
        "run.loop.runner",
        "row |= {} if evaluated else self.evaluation(place)",
        "row |= {}",
        ("test_hooks.py::test_a_hook_ends_a_run_saved_and_evaluated_and_it_goes_on",),
    ),
    Wrong(
        "a run whose step size has decayed is told to change its decay",
        "run.experiment.plan",
        "if resumed:",
        "if resumed and DECAY not in given:",
        ("test_script_flags.py::test_a_run_whose_step_size_has_decayed_is_not_extended",),
    ),
    Wrong(
        "a study tunes beyond the range of its flag",
        "cli.study",
        "asked = list(filter(runs.admits, further))",
        "asked = further",
        ("test_studies.py::test_a_sweep_stays_within_the_range_of_its_flag",),
    ),
    Wrong(
        "a cosine decays on top of the linear decay",
        "run.experiment.optimization",
        'plain["decay_iterations"] = 0',
        'plain["optimizer"] = AUTO',
        (
            "test_optimization.py::"
            "test_the_cosine_falls_to_zero_over_the_gradient_steps_of_its_iterations",
        ),
    ),
    Wrong(
        "a run that begins with another forgets what that saw of observations",
        "run.experiment.earlier",
        "return begins, collector._replace(replicated={**collector.replicated, **of_run})",
        "return begins, collector",
        (
            "test_init_from.py::"
            "test_every_seed_of_a_control_run_starts_where_the_first_of_the_earlier_one_stopped",
        ),
    ),
    Wrong(
        "a class that is given is imported a second time",
        "run.experiment.user_code",
        "return (given or workers.load(source))()",
        "return (workers.load(source) if in_file(source) else given)()",
        ("test_own_objects.py::test_what_other_processes_can_import_is_named_by_its_file",),
    ),
    Wrong(
        "a batch of observations is acted on with one random number",
        "run.experiment.policies",
        "axes = (None, 0, None if key is None else 0)",
        "keys, axes = key, (None, 0, None)",
        ("test_own_objects.py::test_what_was_given_in_python_is_told_and_given_again",),
    ),
    Wrong(
        "Muon takes the norms of stacked blocks, and Adam their matrices",
        "run.experiment.optimization",
        "leaf.ndim != 2 + stacked",
        "leaf.ndim != 2",
        ("test_optimization.py::test_muon_takes_the_matrices_of_a_transformer_and_nothing_else",),
    ),
    Wrong(
        "a control run is read by way of the one that it began from",
        "run.experiment.earlier",
        "        records = script.continued(records)\n",
        "",
        ("test_init_from.py::test_a_control_run_needs_the_run_that_it_began_from_no_more",),
    ),
    Wrong(
        "a name that a notebook imports is gone",
        "language.rewards",
        "def soft_overlong(",
        "def overlong(",
        ("test_names.py::test_every_name_of_the_package_exists[notebooks/04_dapo.ipynb]",),
    ),
    Wrong(
        "a loaded policy forgets the statistics of observations",
        "run.experiment.policies",
        "actor.act(state.params, state.collector, *row)",
        "actor.act(state.params, state.collector._replace(replicated={}), *row)",
        ("test_acting.py::test_documented_lines_act_as_the_loaded_policy",),
    ),
    Wrong(
        "an actor without memory reads raw observations",
        "control.actor",
        "inputs = normalize(collector, observation)",
        "inputs = observation",
        ("test_acting.py::test_documented_lines_act_as_the_loaded_policy[plain]",),
    ),
    Wrong(
        "a field is on no page",
        "algorithms.npg",
        "cg_iterations: int = static(",
        'fisher_rows: int = static(1, "rows")\n    cg_iterations: int = static(',
        ("test_documented_fields.py::test_every_field_of_a_method_is_documented[npg]",),
    ),
    Wrong(
        "a shared field has another name than the page says",
        "algorithms.critic_fit",
        "value_epochs: int = static(",
        "critic_epochs: int = static(",
        ("test_documented_fields.py::test_a_shared_row_holds_for_its_methods",),
    ),
]
