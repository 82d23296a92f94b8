"""Tests XLand-MiniGrid and MiniGrid: observations of the policy, ends and time limits."""

import functools

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po.config import ConfigError

xminigrid = pytest.importorskip("xminigrid")
adapter = pytest.importorskip("jaxrl_po.control.adapters.xminigrid")

FORWARD, CLOCKWISE = 0, 1
RANDOM = functools.partial(adapter.make, "MiniGrid-EmptyRandom-8x8")
# path through the room Empty-5x5, from its start
TO_THE_GOAL = [FORWARD, FORWARD, CLOCKWISE, FORWARD, FORWARD]


def test_time_limit_truncates_and_reset_starts_next_episode():
    key, (fresh, _) = laws.cuts_by_time(RANDOM, CLOCKWISE)
    env, params = xminigrid.make("MiniGrid-EmptyRandom-8x8")
    raw = jax.jit(env.reset)(params, key).observation
    np.testing.assert_array_equal(fresh["image"][..., :13].argmax(-1), raw[..., 0])


@cases("max_steps", 5, 100)
def test_reaching_the_goal_terminates_even_at_the_limit(max_steps):
    environment = adapter.make("MiniGrid-Empty-5x5", max_steps=max_steps)
    running = laws.begun(environment, jax.random.key(0))
    states, transitions = laws.ends_by_itself(environment, running, TO_THE_GOAL)
    assert int(states[4].state.state.step_num) == 4
    # The reward is the paper's: 1 − 0.9 · steps / limit.
    np.testing.assert_allclose(transitions[-1].reward, 1 - 0.9 * 5 / max_steps, rtol=1e-6)
    laws.same(transitions[-1].observation, jax.jit(environment.reset)(jax.random.key(2))[0])


def test_images_and_directions_are_the_suites():
    name = "MiniGrid-DoorKey-5x5"
    environment = adapter.make(name, view_size=5)
    env, params = xminigrid.make(name, view_size=5)
    step = jax.jit(env.step)
    assert environment.spaces.observation["image"].shape == (5, 5, 13 + 12)
    actions = np.random.default_rng(0).integers(0, 6, size=20)

    def own(_, timestep, action):
        return (step(params, timestep, action),) * 2

    for _, transition, timestep in laws.follows(
        environment, own, lambda t, _: jnp.int32(actions[t])
    ):
        image = transition.final_observation["image"]
        np.testing.assert_array_equal(image[..., :13].argmax(-1), timestep.observation[..., 0])
        np.testing.assert_array_equal(image[..., 13:].argmax(-1), timestep.observation[..., 1])
        assert (image.sum(-1) == 2).all()
        direction = transition.final_observation["direction"]
        assert int(direction.argmax()) == int(timestep.state.agent.direction)


def test_ppo_learns_from_a_memory_task():
    laws.learns(adapter.make("MiniGrid-MemoryS8", max_steps=20, view_size=5))


def test_xland_draws_and_shows_a_task_per_episode(tmp_path):
    goals = pytest.importorskip("xminigrid.core.goals")
    benchmarks = pytest.importorskip("xminigrid.benchmarks")
    ball = jnp.array([3, 1], jnp.uint8)
    codes = jnp.stack([goals.AgentNearGoal(tile=ball).encode(), goals.EmptyGoal().encode()])
    benchmarks.save_bz2_pickle(
        {
            "goals": codes,
            "rules": jnp.zeros((2, 1, 7), jnp.uint8),
            "init_tiles": jnp.broadcast_to(ball, (2, 4, 2)),
            "num_rules": jnp.zeros(2, jnp.int32),
        },
        tmp_path / "tasks",
    )
    environment = adapter.make(
        "XLand-MiniGrid-R1-9x9", benchmark=str(tmp_path / "tasks"), max_steps=30
    )
    keys = jax.random.split(jax.random.key(0), 16)
    observation, running = jax.jit(jax.vmap(environment.reset))(keys)
    shown = observation["goal"].reshape(16, -1, 16).argmax(-1)
    near = shown[:, 0] == 3
    assert near.any()
    assert not near.all()
    np.testing.assert_array_equal(shown, codes[jnp.where(near, 0, 1)])
    step, ended = jax.jit(jax.vmap(environment.step)), jnp.zeros(16, bool)
    for t in range(29):
        action = jax.random.randint(jax.random.key(t), (16,), 0, 3)
        running, transition = step(jax.random.split(jax.random.key(t), 16), running, action)
        ended |= transition.terminated & (transition.final_observation["goal"][:, 3] == 1)
        # The agent cannot reach a goal in the empty task.
        assert not (transition.terminated & (transition.final_observation["goal"][:, 0] == 1)).any()
    assert ended.any()


@cases(
    "name, arguments, words",
    ("XLand-MiniGrid-R1-9x9", {}, "benchmark must be given"),
    ("XLand-MiniGrid-R1-9x9", {"benchmark": "/nowhere/x"}, "cannot be read"),
    ("MiniGrid-Empty-5x5", {"benchmark": "trivial-21k"}, "benchmark must be empty"),
    ("MiniGrid-Empty-5x5", {"view_size": 4}, "view_size must be odd"),
)
def test_what_cannot_work_is_refused_in_one_line(name, arguments, words):
    with pytest.raises(ConfigError, match=words):
        adapter.make(name, **arguments)
