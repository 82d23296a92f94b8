"""Tests time limits and new episodes on top of a suite's dynamics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from tables import cases

from jaxrl_po import control
from jaxrl_po.config import ConfigError
from jaxrl_po.control import spaces, unroll
from jaxrl_po.control.adapters import states
from jaxrl_po.control.adapters.episodes import Dynamics, where, with_episodes
from jaxrl_po.distributions import Categorical


def dynamics(ends_at):
    """Builds dynamics whose state is (number drawn at the start, time), and which observe both.

    Args:
      ends_at: Number of steps in an episode, or a function from the drawn number to this number.
    """

    def seen(state):
        return jnp.stack([state[0], state[1].astype(float)])

    def reset(key):
        state = jax.random.uniform(key), jnp.int32(0)
        return seen(state), state

    def step(key, state, action):
        state = state[0], state[1] + 1
        last = ends_at(state[0]) if callable(ends_at) else ends_at
        return seen(state), state, action * 1.0, state[1] == last

    return Dynamics(reset, step, spaces.Spaces(None, num_actions=2))


def played(environment, num_steps=24, num_envs=50, key=1, envs=None):
    def uniform(memory, observation):
        return memory, Categorical(jnp.zeros((observation.shape[0], 2)))

    if envs is None:
        envs = unroll.start(environment, jax.random.key(0), jnp.arange(num_envs, dtype=jnp.int32))
    run = jax.jit(
        lambda envs, key: unroll.unroll(environment, uniform, envs, key, num_steps=num_steps)
    )
    return run(envs, jax.random.key(key))


@cases("interval", 1, 4, 5)
def test_terminations_and_limits_are_told_apart(interval):
    """Episodes end before their limit of 3 steps, end at the limit, or would end after the
    limit."""
    before, beyond = 0.3, 0.7

    def last(number):
        return jnp.where(number < before, 2, jnp.where(number < beyond, 3, 7))

    environment = with_episodes("e", dynamics(last), max_steps=3, reset_interval=interval)
    _, trajectory = jax.tree.map(np.asarray, played(environment))
    transition = trajectory.transition
    number, time = np.moveaxis(trajectory.observation, -1, 0)
    ends = [
        (number < before) & (time == 1),
        (number >= before) & (number < beyond) & (time == 2),
        (number >= beyond) & (time == 2),
    ]
    assert all(kind.sum() > 50 for kind in ends)
    np.testing.assert_array_equal(transition.terminated, ends[0] | ends[1])
    np.testing.assert_array_equal(transition.truncated, ends[2])
    # The final observation belongs to the ended episode, the next observation to a new episode.
    over, final, following = (
        np.any(ends, axis=0),
        transition.final_observation,
        transition.observation,
    )
    np.testing.assert_array_equal(final[..., 0], number)
    np.testing.assert_array_equal(final[..., 1], time + 1)
    np.testing.assert_array_equal(following[over, 1], 0.0)
    assert (following[over, 0] != final[over, 0]).all()
    np.testing.assert_array_equal(following[~over], final[~over])


def starts(trajectory):
    """Returns the drawn number with which each episode of each environment began, `[B,
    episodes]`."""
    return np.asarray(trajectory.observation[:, ::3, 0])


def test_no_two_episodes_begin_with_the_same_start():
    environment = with_episodes("e", dynamics(3), max_steps=9, reset_interval=6)
    envs, trajectory = played(environment)
    drawn = starts(trajectory)
    assert len(np.unique(drawn)) == drawn.size
    _, again = played(environment, key=2, envs=envs)
    assert not set(starts(again)[:, 1:].ravel().tolist()) & set(drawn.ravel().tolist())


@cases("num_steps, rounds", (8, 0), (9, 1), (16, 2))
def test_a_start_is_drawn_where_one_was_used(num_steps, rounds):
    """Each fifth step ends an episode; steps 8 and 12 replace the starts that were used in the
    fifth steps."""
    drawn = []
    plain = dynamics(5)

    def reset(key):
        jax.debug.callback(lambda key: drawn.append(key), jax.random.key_data(key))
        return plain.reset(key)

    environment = with_episodes("e", plain._replace(reset=reset), max_steps=9, reset_interval=4)
    _, trajectory = played(environment, num_steps=num_steps, num_envs=3)
    jax.block_until_ready(trajectory)
    jax.effects_barrier()
    # Each environment starts with two drawn states.
    assert len(drawn) == 3 * (2 + rounds)


DRAWN = []


@jax.jit
@jax.vmap
@jax.vmap
def chosen(asked, x, old):
    """Returns values for rows of two seeds; `DRAWN` grows whenever a new value is drawn."""

    def new(x, y):
        jax.debug.callback(lambda _: DRAWN.append(1), x)
        return {"a": x + y, "b": jnp.arange(3) * x}

    return where(asked, new, (x, 0.5), old)  # the value y is the same for all rows


@cases("size", 1, 5, 16, 17)
@cases("share", 0.0, 0.1, 0.5, 1.0)
def test_where_is_a_choice_row_by_row(size, share):
    DRAWN.clear()
    asked = np.asarray(jax.random.bernoulli(jax.random.key(size), share, (2, size)))
    x = np.arange(2.0 * size, dtype=np.float32).reshape(2, size) + 1.0
    old = {"a": np.full((2, size), -1.0, np.float32), "b": np.zeros((2, size, 3), np.float32)}
    got = chosen(asked, x, old)
    jax.block_until_ready(got)
    jax.effects_barrier()
    np.testing.assert_array_equal(got["a"], np.where(asked, x + 0.5, -1.0))
    of_b = np.where(asked[..., None], np.arange(3) * x[..., None], 0.0)
    np.testing.assert_array_equal(got["b"], of_b)
    # Values are chosen for an eighth of the rows at a time, for both seeds, until no row is left.
    at_once = -(-size // 8)
    rounds = max(-(-int(n) // at_once) for n in asked.sum(axis=1))
    assert len(DRAWN) == 2 * at_once * rounds


def test_step_without_episode_end_draws_no_start():
    """The compiled program draws no start either, although XLA may move loop-invariant code out of
    a loop."""

    def reset(key):
        # this sort is the only sort in a step
        state = jnp.sort(jax.random.uniform(key, (4096,)))
        return state[:2], state

    def step(key, state, action):
        return state[:2], state + 1.0, action * 1.0, state[0] > 9.0

    environment = with_episodes(
        "e",
        Dynamics(reset, step, spaces.Spaces(None, num_actions=2)),
        max_steps=9,
        reset_interval=4,
    )
    keys = jax.random.split(jax.random.key(0), 3)
    _, running = jax.eval_shape(jax.vmap(environment.reset), keys)
    compiled = jax.jit(jax.vmap(environment.step)).lower(keys, running, jnp.zeros(3, int)).compile()
    computations = compiled.as_text().split("\n\n")
    (entry,) = [text for text in computations if text.lstrip().startswith("ENTRY")]
    assert any(" sort(" in text for text in computations)
    assert " sort(" not in entry
    assert " while(" in entry


def test_starts_have_the_distribution_of_reset():
    """The law is unbiased even if the start decides the length of the episode: 1 step or 32
    steps."""

    def reset(key):
        lasts = jnp.where(jax.random.bernoulli(key), 1, 32)
        return jnp.stack([lasts, 0]).astype(float), (lasts, jnp.int32(0))

    def step(key, state, action):
        lasts, time = state[0], state[1] + 1
        return jnp.stack([lasts, time]).astype(float), (lasts, time), action * 1.0, time >= lasts

    environment = with_episodes(
        "e",
        Dynamics(reset, step, spaces.Spaces(None, num_actions=2)),
        max_steps=99,
        reset_interval=16,
    )
    _, trajectory = played(environment, num_steps=512, num_envs=100)
    ended = np.asarray(trajectory.transition.terminated)
    short = np.asarray(trajectory.transition.observation[..., 0])[ended] == 1.0
    # Among episodes that begin in the rollout, half are short: two episodes take 33 steps.
    assert abs(short.mean() - 0.5) < 4.0 * 0.5 / np.sqrt(short.size)
    assert short.size > 100 * 512 / 33 * 1.5


def collected(problem):
    """Returns a collected batch."""
    run = jax.jit(lambda key: problem.collect(*problem.init(key), jax.random.key(1))[1])
    return run(jax.random.key(0))


def test_a_vine_of_one_step_needs_no_start():
    environment = with_episodes("e", dynamics(5), max_steps=9, reset_interval=4)
    vine = control.make_vine(environment, num_envs=2, num_steps=8, num_states=2, horizon=1)
    assert collected(vine).score.shape == (4, 2)


def test_noise_of_keyed_state_follows_step_key():
    class Noisy:
        """Environment with brax's interface, whose noise depends on the state's key."""

        action_size = 1

        def reset(self, rng):
            return State(jnp.zeros(1), jnp.zeros(()), jnp.zeros(()), {"rng": rng})

        def step(self, state, action):
            rng, noise = jax.random.split(state.info["rng"])
            return state.replace(reward=jax.random.normal(noise), info={"rng": rng})

    environment = with_episodes("n", states.unwrap_dynamics(Noisy()), max_steps=9, reset_interval=4)
    _, running = jax.jit(environment.reset)(jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), 3)
    step = jax.jit(jax.vmap(environment.step, in_axes=(0, None, None)))
    assert len(set(step(keys, running, jnp.zeros(1))[1].reward.tolist())) == 3


@struct.dataclass
class State:
    obs: jax.Array
    reward: jax.Array
    done: jax.Array
    info: dict


@cases(
    "changes, message",
    ({"max_steps": 0}, "max_steps must be a whole number in"),
    ({"reset_interval": 0}, "reset_interval must be"),
)
def test_counts_below_one_are_named(changes, message):
    with pytest.raises(ConfigError, match=message):
        with_episodes("e", dynamics(3), **({"max_steps": 3, "reset_interval": 1} | changes))
    with pytest.raises(ConfigError, match="env_params: must be None for an Environment"):
        control.adapt(with_episodes("e", dynamics(3), max_steps=3, reset_interval=1), {})
