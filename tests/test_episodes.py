"""Time limits and new episodes over the dynamics of a suite."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import Params, Probe

from jaxrl_po import control
from jaxrl_po.config import ConfigError
from jaxrl_po.control import spaces, unroll
from jaxrl_po.control.adapters import older_gymnax
from jaxrl_po.control.adapters.episodes import Dynamics, with_episodes
from jaxrl_po.distributions import Categorical


def dynamics(ends_at):
    """The state is (number drawn at the start, time); the number is observed, with the time."""

    def seen(state):
        return jnp.stack([state[0], state[1].astype(float)])

    def reset(key):
        state = jax.random.uniform(key), jnp.int32(0)
        return seen(state), state

    def step(key, state, action):
        state = state[0], state[1] + 1
        return seen(state), state, action * 1.0, state[1] == ends_at

    actions = spaces.Spaces(None, num_actions=2)
    return Dynamics(reset, step, actions)


def played(environment, num_steps=24, num_envs=50, key=1):
    def uniform(memory, observation):
        return memory, Categorical(jnp.zeros((observation.shape[0], 2)))

    envs = unroll.start(environment, jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32))
    run = jax.jit(
        lambda envs, key: unroll.unroll(environment, uniform, envs, key, num_steps=num_steps)
    )
    return run(envs, jax.random.key(key))


@pytest.mark.parametrize("interval", [1, 4, 5, 100])
def test_ends_by_itself_and_by_the_limit_are_told_apart(interval):
    for ends_at, limit, terminated in ((3, 7, True), (7, 3, False), (3, 3, True)):
        environment = with_episodes(
            "e", dynamics(ends_at), max_steps=limit, reset_interval=interval
        )
        _, trajectory = played(environment)
        transition = trajectory.transition
        third = np.arange(24) % 3 == 2
        expected = np.broadcast_to(third, (50, 24))
        no = np.zeros_like(expected)
        np.testing.assert_array_equal(transition.terminated, expected if terminated else no)
        np.testing.assert_array_equal(transition.truncated, no if terminated else expected)
        # The final observation is that of the episode which ended, the next one that of a new one.
        final, following = transition.final_observation, transition.observation
        np.testing.assert_array_equal(final[:, third, 1], 3.0)
        np.testing.assert_array_equal(final[..., 0], trajectory.observation[..., 0])
        np.testing.assert_array_equal(following[:, third, 1], 0.0)
        np.testing.assert_array_equal(following[:, ~third], final[:, ~third])


def starts(trajectory):
    """The number with which each episode of each environment began, `[B, episodes]`."""
    return np.asarray(trajectory.observation[:, ::3, 0])


def test_each_step_draws_its_own_start_by_default():
    environment = with_episodes("e", dynamics(3), max_steps=9, reset_interval=1)
    assert environment.refresh is None
    drawn = starts(played(environment)[1])
    assert len(np.unique(drawn)) == drawn.size


@pytest.mark.parametrize("interval", [6, 7])
def test_starts_are_drawn_anew_once_in_an_interval(interval):
    environment = with_episodes("e", dynamics(3), max_steps=9, reset_interval=interval)
    envs, trajectory = played(environment)
    drawn = starts(trajectory)
    # Episode i > 0 begins after step 3 i − 1, in window (3 i − 1) // interval.
    window = (3 * np.arange(1, 8) - 1) // interval
    for row in drawn[:, 1:]:
        for w in set(window):
            assert len(np.unique(row[window == w])) == 1
        assert len(np.unique(row)) == len(set(window))
    # Not shared among environments, and not repeated by the next rollout.
    assert len(np.unique(drawn[:, 1:])) == 50 * len(set(window))
    _, again = jax.jit(
        lambda envs: unroll.unroll(
            environment,
            lambda memory, seen: (memory, Categorical(jnp.zeros((50, 2)))),
            envs,
            jax.random.key(2),
            num_steps=24,
        )
    )(envs)
    assert not set(starts(again)[:, 1:].ravel().tolist()) & set(drawn.ravel().tolist())


@pytest.mark.parametrize("interval", [1, 6])
def test_the_law_of_the_starts_is_that_of_reset(interval):
    environment = with_episodes("e", dynamics(3), max_steps=9, reset_interval=interval)
    drawn = np.sort(np.unique(starts(played(environment, num_envs=1000)[1])[:, 1:]))
    # Kolmogorov and Smirnov's distance to the uniform law; 1.95 / √n in one case of a thousand.
    distance = np.abs(drawn - (np.arange(drawn.size) + 0.5) / drawn.size).max()
    assert distance < 1.95 / np.sqrt(drawn.size)


def test_an_evaluation_and_groups_play_such_environments():
    environment = with_episodes("e", dynamics(5), max_steps=9, reset_interval=4)
    assert control.adapt(environment) is environment
    problem = control.make_problem(environment, num_envs=4, num_steps=8)
    params, collector = problem.init(jax.random.key(0))
    evaluate = control.make_evaluate(environment, problem, num_episodes=6)
    assert evaluate(params, collector, jax.random.key(0))["length"].tolist() == [5.0] * 6
    groups = control.make_groups(environment, num_prompts=3, group_size=2, num_steps=8)
    _, batch = jax.jit(groups.collect)(*groups.init(jax.random.key(0)), jax.random.key(1))
    np.testing.assert_array_equal(batch.mask.sum(axis=1), 5)
    first = np.asarray(batch.inputs[:, 0, 0]).reshape(3, 2)
    assert (first[:, 0] == first[:, 1]).all()
    assert len(np.unique(first)) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"max_steps": 0}, "max_steps must lie in"), ({"reset_interval": 0}, "reset_interval must")],
)
def test_counts_below_one_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        with_episodes("e", dynamics(3), **({"max_steps": 3, "reset_interval": 1} | changes))
    with pytest.raises(ConfigError, match="env_params must be None for an Environment"):
        control.adapt(with_episodes("e", dynamics(3), max_steps=3, reset_interval=1), {})


class Older(Probe):
    """gymnax's older interface: the time limit is part of `done`."""

    @property
    def default_params(self):
        return Params(max_steps_in_episode=3)

    def step_env(self, key, state, action, params):
        state = state.replace(time=state.time + 1)
        done = (state.time >= params.max_steps_in_episode) | (action == 1)
        return self.observation(state), state, state.cue, done, {}


def test_the_older_interface_of_gymnax_tells_its_limit_from_an_end():
    environment = older_gymnax.make(Older())
    assert environment.max_steps == 3
    assert environment.spaces.num_actions == 2
    _, running = environment.reset(jax.random.key(0))
    ends = []
    for t, action in enumerate((0, 0, 0, 0, 1)):
        running, transition = environment.step(jax.random.key(t), running, jnp.int32(action))
        ends.append((bool(transition.terminated), bool(transition.truncated)))
    no = (False, False)
    assert ends == [no, no, (False, True), no, (True, False)]
    problem = control.make_problem(environment, num_envs=4, num_steps=8)
    params, collector = problem.init(jax.random.key(0))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    assert bool(batch.truncated.any())
    with pytest.raises(ConfigError, match="max_steps must be given"):
        older_gymnax.make(Endless())


class Endless(Older):
    """Its parameters hold no limit."""

    @property
    def default_params(self):
        return types.SimpleNamespace()
