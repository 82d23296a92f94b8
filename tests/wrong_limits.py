"""Wrong programs of limits, bounds, and environments that break their contract in silence."""

from wrong import Wrong

TESTS = "test_limits.py::"
WRONG = [
    Wrong(
        "an evaluation of no steps has return 0",
        "control.evaluation",
        'check_size("max_steps", max_steps)',
        "int(max_steps)",
        (f"{TESTS}test_no_size_is_refused_wherever_it_is_given[0]",),
    ),
    Wrong(
        "a size may be a fraction",
        "config",
        "size = operator.index(value)",
        "size = int(value)",
        (f"{TESTS}test_no_size_is_refused_wherever_it_is_given[2.5]",),
    ),
    Wrong(
        "a gymnax environment may have episodes of no steps",
        "control.environment",
        'return check_size(f"env {name}: max_steps_in_episode", whole)',
        "return whole",
        (
            f"{TESTS}test_an_episode_has_a_whole_number_of_steps[0]",
            f"{TESTS}test_limits_of_a_command_are_one_line[environment]",
        ),
    ),
    Wrong(
        "a warm start of fewer than no steps",
        "language.networks",
        "check(warm)",
        "pass",
        (f"{TESTS}test_warm_starts_and_budgets_are_checked",),
    ),
]
