"""Wrong programs of settings that are traced, text, bools, or numbers of NumPy and JAX."""

from wrong import Wrong

TESTS = "test_static_values.py::"
WRONG = [
    Wrong(
        "a traced static field passes",
        "config",
        'raise ConfigError(name, "is static: build one program for each value")',
        "return value",
        (
            f"{TESTS}test_traced_static_fields_are_named[ppo]",
            f"{TESTS}test_factories_follow_the_rule_of_records[control]",
        ),
    ),
    Wrong(
        "text counts as the number that it reads as",
        "config",
        "if not _is_number(value):",
        "if isinstance(value, list):",
        (f"{TESTS}test_text_and_bools_are_no_numbers[ppo]",),
    ),
    Wrong(
        "True counts as 1 among the choices of a number",
        "config",
        "if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):",
        "if not isinstance(value, kind):",
        (f"{TESTS}test_text_and_bools_are_no_numbers[grpo]",),
    ),
    Wrong(
        "a static float32 is widened to a double",
        "config",
        "value = float(str(value))",
        "value = value.item()",
        (f"{TESTS}test_numpy_values_are_python_values[jaxrl_po.control.problem.Settings]",),
    ),
    Wrong(
        "a static field takes no whole number of NumPy",
        "config",
        "elif _is_number(value) or value.dtype == bool:",
        "elif value.dtype == bool:",
        (f"{TESTS}test_numpy_values_are_python_values[ppo]",),
    ),
    Wrong(
        "a switch of a factory may be any object",
        "dynamic_sampling",
        'carry_surplus = static_value("carry_surplus", carry_surplus, bool)',
        "carry_surplus = bool(carry_surplus)",
        (f"{TESTS}test_factories_follow_the_rule_of_records[refill]",),
    ),
    Wrong(
        "a run of a learner is stored with numbers of NumPy",
        "run.experiment.prepare",
        "config_lib.static_value(x, value, int)",
        "value",
        (f"{TESTS}test_train_takes_numpy_numbers",),
    ),
    Wrong(
        "an experiment takes text for numbers",
        "run.experiment.flags",
        "if isinstance(value, str | tuple | list) or isinstance",
        "if isinstance(value, tuple | list) or isinstance",
        (f"{TESTS}test_an_experiment_follows_the_rule_of_records",),
    ),
    Wrong(
        "weights of rewards may be text",
        "run.experiment.experiment",
        'config.check_number("reward_weights", weight)',
        "pass",
        (f"{TESTS}test_an_experiment_follows_the_rule_of_records",),
    ),
    Wrong(
        "a scalar of JAX is no number over an experiment",
        "run.experiment.experiment",
        "{name: config.static_value(name, value) for name, value in values.items()}",
        "dict(values)",
        (f"{TESTS}test_scalars_over_an_experiment_are_numbers",),
    ),
    Wrong(
        "a sweep takes lists of text for numbers",
        "run.experiment.sweeping",
        "flags.convert(with_names({name: value}), sections)",
        "{name: value}",
        (f"{TESTS}test_a_sweep_takes_arrays_and_lists_of_scalars",),
    ),
    Wrong(
        "parameters of gymnax are ignored",
        "run.experiment.suites",
        "return with_params(name, env, env_params) if env_params else env",
        "return env",
        (
            "test_suites.py::test_parameters_of_gymnax_environments_are_set",
            "test_suites.py::test_parameters_of_own_environments_are_set",
        ),
    ),
    Wrong(
        "conditions of effect are not checked",
        "config",
        "if setting.when:",
        "if False:",
        ("test_effects.py::test_a_field_without_effect_is_refused",),
    ),
]
