"""Wrong programs of settings: how they are read, merged by origin, and named."""

from wrong import Wrong

WRONG = [
    Wrong(
        "settings of a sweep replace those of the resumed run",
        "run.experiment.flags",
        '"given", "stored", "tuned"',
        '"given", "tuned", "stored"',
        ("test_settings.py::test_first_origin_with_a_value_wins",),
    ),
    Wrong(
        "a given setting without effect is dropped",
        "run.experiment.flags",
        'origins.get(error.field) not in ("tuned", "preset")',
        "error.field not in origins",
        ("test_settings.py::test_only_tuned_and_preset_values_lose_effect_silently",),
    ),
    Wrong(
        "an untuned run is tuned",
        "run.experiment.control",
        "if not options.tuned:",
        "if False:",
        ("test_settings.py::test_untuned_run_has_the_config_of_its_method",),
    ),
    Wrong(
        "a resumed run loses the origins of its settings",
        "run.experiment.prepare",
        '"origin": earlier.get("origin", {}) | ',
        '"origin": ',
        ("test_settings.py::test_config_json_has_the_origins_also_of_a_resumed_run",),
    ),
    Wrong(
        "a resumed run takes other settings than it had",
        "run.experiment.settings",
        "if compares:",
        "if False:",
        (
            "test_script_flags.py::"
            "test_a_resumed_run_names_the_flag_that_differs_and_not_one_that_follows_from_it",
        ),
    ),
    Wrong(
        "the environment of a run is made twice",
        "run.experiment.control",
        "length_of(options, steps(config, world))",
        "length_of(options, steps(config, open_world(config)))",
        ("test_settings.py::test_arguments_and_environment_are_read_once",),
    ),
    Wrong(
        "arguments are read twice",
        "cli.launch",
        "prepare_experiment(domain, given, options)",
        "prepare_experiment(domain, flags.tokenize(words, {: domain.OPTIONS}), options)",
        ("test_settings.py::test_arguments_and_environment_are_read_once",),
    ),
    Wrong(
        "the start of a run is read twice",
        "run.experiment.models",
        "base = read_base(config.initial.pretrained, config.model)\n    task",
        "base = read_base(root(config.run.init_from), config.model)\n    task",
        ("test_pretrained_input.py::test_start_is_read_once_and_has_presets",),
    ),
    Wrong(
        "presets of a pretrained start are not announced",
        "run.experiment.settings",
        'if origins.get(name) in ("tuned", "preset")',
        'if origins.get(name) == "tuned"',
        ("test_pretrained_input.py::test_start_is_read_once_and_has_presets",),
    ),
    Wrong(
        "help does not show presets",
        "run.experiment.settings",
        '"preset": domain.presets(options, values, initial)}\n    fields',
        "}\n    fields",
        ("test_script_flags.py::test_help_of_language_shows_defaults_and_presets",),
    ),
    Wrong(
        "former names of stored settings are not read",
        "run.experiment.flags",
        "for old in former_names(prefix, field):",
        "for old in ():",
        ("test_former_names.py::test_a_former_name_of_a_stored_run_is_read",),
    ),
    Wrong(
        "former values of stored settings are not read",
        "run.experiment.flags",
        "for pair in setting.were:",
        "for pair in ():",
        ("test_former_names.py::test_former_values_of_a_stored_run_load",),
    ),
    Wrong(
        "a renamed draw changes the draws of the others",
        "run.experiment.flags",
        "return {names.get(name, name): value for name, value in found.items()}",
        "moved = [*(found.keys() - names.keys()), *(found.keys() & names.keys())]\n"
        "    return {names.get(name, name): found[name] for name in moved}",
        ("test_settings.py::test_former_names_keep_their_place_and_former_values_are_read",),
    ),
    Wrong(
        "flags lose the order of their arguments, and a sweep its draws",
        "run.experiment.flags",
        'write --name=value")\n    return found',
        'write --name=value")\n    return dict(sorted(found.items()))',
        ("test_settings.py::test_flags_keep_the_order_of_arguments",),
    ),
    Wrong(
        "former sections of stored settings are not read",
        "run.experiment.flags",
        'FORMER_SECTIONS = {"tools": "environment"}',
        "FORMER_SECTIONS: dict[str, str] = {}",
        ("test_former_names.py::test_former_values_and_sections_become_present_ones",),
    ),
    Wrong(
        "a former flag suggests nothing",
        "run.experiment.flags",
        "if name in former_names(prefix, each):",
        "if False:",
        ("test_former_names.py::test_a_former_flag_suggests_the_present_one",),
    ),
]
