"""Wrong programs of limits, bounds, and environments that break their contract in silence."""

from wrong import Wrong

TESTS, BROKEN = "test_limits.py::", "test_broken_environments.py::"
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
        "else operator.index(value)",
        "else int(value)",
        (f"{TESTS}test_no_size_is_refused_wherever_it_is_given[2.5]",),
    ),
    Wrong(
        "a gymnax environment may have episodes of no steps",
        "control.environment",
        'limit = check_size(f"env {name}: max_steps_in_episode", whole)',
        "limit = whole",
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
    Wrong(
        "episodes that the bound cuts have ended",
        "control.unroll",
        "playing.episode_length, ~playing.alive",
        "playing.episode_length, jnp.ones_like(playing.alive)",
        (f"{BROKEN}test_an_evaluation_says_which_episodes_ended",),
    ),
    Wrong(
        "classes inside of structures are not looked at",
        "control.spaces",
        "for each in _classes(parts[key], seen[key])]",
        "for each in _classes(parts[key], seen[key]) if not _parts(parts[key])]",
        (f"{BROKEN}test_classes_inside_of_structures_are_counted",),
    ),
    Wrong(
        "one class within its range excuses the others",
        "control.problem",
        "functools.reduce(jnp.logical_and, known)",
        "functools.reduce(jnp.logical_or, known)",
        (f"{BROKEN}test_classes_inside_of_structures_are_counted",),
    ),
    Wrong(
        "observations after the end of an episode are outside their range",
        "control.groups",
        "**frac_broken(spaces, trajectory.observation, mask)",
        "**frac_broken(spaces, trajectory.observation)",
        (f"{BROKEN}test_a_vine_and_groups_are_counted_alike",),
    ),
    Wrong(
        "bandits never reset",
        "run.loop.log",
        "single & self._longer,",
        "single,",
        (
            "test_doubts.py::test_bandits_have_episodes_of_one_step_by_design",
            f"{BROKEN}test_sound_environments_raise_no_doubt[bandit]",
        ),
    ),
    Wrong(
        "episodes that end together are of one step",
        "control.problem",
        "masked.total(ended & (trajectory.episode_length == 1.0))",
        "masked.total(ended)",
        (f"{BROKEN}test_sound_environments_raise_no_doubt[longer]",),
    ),
    Wrong(
        "a masked step of the host is an episode",
        "control.recorded",
        "masked.total(ended & (recording.episode_length == 1.0), mask)",
        "masked.total(ended & (recording.episode_length == 1.0))",
        (f"{BROKEN}test_environments_of_the_host_are_counted_by_their_mask",),
    ),
    Wrong(
        "an environment that never resets is reported in each line",
        "run.loop.log",
        "seeds.any() and self._is_new(name)",
        "seeds.any()",
        (
            "test_doubts.py::test_an_environment_that_never_resets_is_reported_once",
            "test_doubts.py::test_observations_outside_their_space_are_reported_once",
        ),
    ),
    Wrong(
        "an evaluation that never ends is reported where some episodes end",
        "run.loop.log",
        'share["greedy_ended"] == 0.0',
        'share["greedy_ended"] < 1.0',
        ("test_doubts.py::test_an_evaluation_without_an_end_is_reported_once",),
    ),
]
