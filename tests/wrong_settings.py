"""Planted mistakes in settings: how they are read, merged by origin, and named."""

from wrong import Wrong, table

TEXT = """
settings of a sweep replace those of the resumed run
  run.experiment.flags: test_settings.py::test_first_origin_with_a_value_wins
  - "given", "stored", "tuned"
  + "given", "tuned", "stored"
a given setting without effect is dropped
  run.experiment.flags: test_settings.py::test_only_tuned_and_preset_values_lose_effect_silently
  - origins.get(error.field) not in ("tuned", "preset")
  + error.field not in origins
an untuned run is tuned
  run.experiment.control: test_settings.py::test_untuned_run_has_the_config_of_its_method
  - if not options.tuned:
  + if False:
a resumed run takes other settings than it had
  run.experiment.settings:
    test_script_flags.py::test_resumed_run_names_the_flag_that_differs
  - if compares:
  + if False:
the environment of a run is made twice
  run.experiment.control: test_settings.py::test_arguments_and_environment_are_read_once
  - length_of(options, steps(config, world))
  + length_of(options, steps(config, open_world(config)))
arguments are read twice
  cli.launch: test_settings.py::test_arguments_and_environment_are_read_once
  - prepare_experiment(domain, given, options)
  + prepare_experiment(domain, flags.tokenize(words, {"": domain.OPTIONS}), options)
the start of a run is read twice
  run.experiment.models: test_pretrained_input.py::test_start_is_read_once_and_has_presets
  - base = read_base(config.initial.pretrained, config.model)
  -     task
  + base = read_base(root(config.run.init_from), config.model)
  +     task
presets of a pretrained start are not announced
  run.experiment.settings: test_pretrained_input.py::test_start_is_read_once_and_has_presets
  - if origins.get(name) in ("tuned", "preset")
  + if origins.get(name) == "tuned"
help does not show presets
  run.experiment.settings: test_script_flags.py::test_help_of_language_shows_defaults_and_presets
  - "preset": domain.presets(options, values, initial)}
  -     fields
  + }
  +     fields
former names of stored settings are not read
  run.experiment.flags: test_former_names.py::test_a_former_name_of_a_stored_run_is_read
  - for old in former_names(prefix, field):
  + for old in ():
former values of stored settings are not read
  run.experiment.flags: test_former_names.py::test_former_values_of_a_stored_run_load
  - for pair in setting.were:
  + for pair in ():
a renamed draw changes the draws of the others
  run.experiment.flags:
    test_settings.py::test_former_names_and_values_are_read
  - return {names.get(name, name): value for name, value in found.items()}
  + moved = [*(found.keys() - names.keys()), *(found.keys() & names.keys())]
  +     return {names.get(name, name): found[name] for name in moved}
flags lose the order of their arguments, and a sweep its draws
  run.experiment.flags: test_settings.py::test_flags_keep_the_order_of_arguments
  - write --name=value")
  -     return found
  + write --name=value")
  +     return dict(sorted(found.items()))
former sections of stored settings are not read
  run.experiment.flags: test_former_names.py::test_former_values_and_sections_become_present_ones
  - FORMER_SECTIONS = {"tools": "environment"}
  + FORMER_SECTIONS: dict[str, str] = {}
a former flag suggests nothing
  run.experiment.flags: test_former_names.py::test_a_former_flag_suggests_the_present_one
  - if name in former_names(prefix, each):
  + if False:
"""
WRONG = [
    *table(TEXT),
    Wrong(
        "a resumed run loses the origins of its settings",
        "run.experiment.prepare",
        '"origin": earlier.get("origin", {}) | ',
        '"origin": ',
        ("test_settings.py::test_config_json_keeps_origins_of_resumed_runs",),
    ),
]
