"""Planted mistakes in settings that are traced, text, bools, or numbers of NumPy and JAX."""

from wrong import table

WRONG = table("""
a traced static field passes
  config:
    test_static_values.py::test_traced_static_fields_are_named[ppo]
    test_static_values.py::test_factories_follow_the_rule_of_records[control]
  - raise ConfigError(name, "is static: build one program for each value")
  + return value
text counts as the number that it reads as
  config: test_static_values.py::test_text_and_bools_are_no_numbers[ppo]
  - if not _is_number(value):
  + if isinstance(value, list):
True counts as 1 among the choices of a number
  config: test_static_values.py::test_text_and_bools_are_no_numbers[grpo]
  - if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
  + if not isinstance(value, kind):
a static float32 is widened to a double
  config:
    test_static_values.py::test_numpy_values_are_python_values[jaxrl_po.control.problem.ControlSettings]
  - value = float(str(value))
  + value = value.item()
a static field takes no whole number of NumPy
  config: test_static_values.py::test_numpy_values_are_python_values[ppo]
  - elif _is_number(value) or value.dtype == bool:
  + elif value.dtype == bool:
a switch of a factory may be any object
  dynamic_sampling: test_static_values.py::test_factories_follow_the_rule_of_records[refill]
  - carry_surplus = static_value("carry_surplus", carry_surplus, bool)
  + carry_surplus = bool(carry_surplus)
a run of a learner is stored with numbers of NumPy
  run.experiment.prepare: test_static_values.py::test_train_takes_numpy_numbers
  - config_lib.static_value(x, value, int)
  + value
an experiment takes text for numbers
  run.experiment.flags: test_static_values.py::test_an_experiment_follows_the_rule_of_records
  - if isinstance(value, str | tuple | list) or isinstance
  + if isinstance(value, tuple | list) or isinstance
weights of rewards may be text
  run.experiment.experiment: test_static_values.py::test_an_experiment_follows_the_rule_of_records
  - config.check_number("reward_weights", weight)
  + pass
a scalar of JAX is no number over an experiment
  run.experiment.experiment: test_static_values.py::test_scalars_over_an_experiment_are_numbers
  - {name: config.static_value(name, value) for name, value in values.items()}
  + dict(values)
a sweep takes lists of text for numbers
  run.experiment.sweeping: test_static_values.py::test_a_sweep_takes_arrays_and_lists_of_scalars
  - flags.convert(with_names({name: value}), sections)
  + {name: value}
parameters of gymnax are ignored
  run.experiment.suites:
    test_suites.py::test_parameters_of_gymnax_environments_are_set
    test_suites.py::test_parameters_of_own_environments_are_set
  - return with_params(name, env, env_params) if env_params else env
  + return env
conditions of effect are not checked
  config: test_effects.py::test_a_field_without_effect_is_refused
  - if setting.when:
  + if False:
""")
