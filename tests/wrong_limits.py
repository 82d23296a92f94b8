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
    Wrong(
        "swapped bounds of actions are clipped to the upper one",
        "control.spaces",
        "(pairs[:, 0] <= pairs[:, 1]) & ",
        "",
        (f"{TESTS}test_a_space_without_an_action_is_refused",),
    ),
    Wrong(
        "bounds that are infinite on the wrong side",
        "control.spaces",
        " & (pairs[:, 0] < np.inf) & (pairs[:, 1] > -np.inf)",
        "",
        (f"{TESTS}test_a_space_without_an_action_is_refused",),
    ),
    Wrong(
        "a box that fixes an action is refused",
        "control.spaces",
        "pairs[:, 0] <= pairs[:, 1]",
        "pairs[:, 0] < pairs[:, 1]",
        (f"{TESTS}test_infinite_bounds_and_single_actions_keep_their_meaning",),
    ),
    Wrong(
        "a choice of no actions is one among several",
        "control.spaces",
        'check_size(f"env {name}: each n of nvec {of_actions}", n)',
        "int(n)",
        (f"{TESTS}test_choices_and_spaces_given_by_hand_hold_actions",),
    ),
    Wrong(
        "an observation needs no elements",
        "control.spaces",
        "if not sum(math.prod(x.shape)",
        "if not sum(1 + math.prod(x.shape)",
        (f"{TESTS}test_an_observation_with_nothing_in_it_is_refused[vector]",),
    ),
    Wrong(
        "an empty array beside others is refused",
        "control.spaces",
        "if not sum(math.prod(x.shape)",
        "if not math.prod(math.prod(x.shape)",
        (f"{TESTS}test_an_observation_with_nothing_in_it_is_refused[vector]",),
    ),
]
