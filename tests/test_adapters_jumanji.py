"""Tests Jumanji: observations and legal actions of the policy, ends and time limits."""

import functools

import adapter_laws as laws
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import control
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import suites

pytestmark = pytest.mark.slow

jumanji = pytest.importorskip("jumanji")
adapter = pytest.importorskip("jaxrl_po.control.adapters.jumanji")

UP, DOWN = 0, 2
SNAKE = functools.partial(adapter.make, "Snake-v1")


def own_step(name):
    """Takes the suite's own step, with the key that `with_episodes` passes to the suite."""
    env = jumanji.make(name)
    return jax.jit(lambda key, state, action: env.step(state.replace(key=key), action))


def test_time_limit_truncates_and_reset_starts_next_episode():
    key, (fresh, _) = laws.cuts_by_time(SNAKE, DOWN, lambda seen: seen.policy["grid"])
    _, timestep = jax.jit(jumanji.make("Snake-v1").reset)(key)
    laws.same(fresh.policy["grid"], timestep.observation.grid)
    laws.same(fresh.legal, timestep.observation.action_mask)


def test_hitting_a_wall_terminates_even_at_the_limit():
    environment = SNAKE(num_rows=4, num_cols=4)
    running = laws.begun(environment, jax.random.key(0))
    rows_above = int(running.state.head_position.row)
    walk = [UP] * (rows_above + 1)
    for max_steps in (rows_above + 1, 100):
        environment = SNAKE(num_rows=4, num_cols=4, max_steps=max_steps)
        laws.ends_by_itself(environment, running, walk)


def test_time_limit_is_the_suites_or_a_default():
    assert adapter.make("Maze-v0").max_steps == 100
    assert adapter.make("Game2048-v1").max_steps == 10_000


def test_a_truncated_maze_is_not_terminated():
    environment = adapter.make("Maze-v0", time_limit=3, reset_interval=1)
    running = laws.begun(environment, jax.random.key(0))
    blocked = int((~jax.jit(environment.reset)(jax.random.key(0))[0].legal).argmax())
    _, transitions = laws.stepped(environment, running, [blocked] * 3, jax.random.key(1))
    assert [bool(t.truncated) for t in transitions] == [False, False, True]
    assert not any(bool(t.terminated) for t in transitions)
    np.testing.assert_allclose(
        [t.final_observation.policy["step_count"] for t in transitions], [1 / 3, 2 / 3, 1]
    )


def test_observations_rewards_and_masks_are_the_suites():
    environment, total = adapter.make("Game2048-v1", reset_interval=1), 0.0

    def choose(t, running):
        legal = running.state.action_mask
        return jnp.int32(np.flatnonzero(legal)[t % int(legal.sum())])

    for _, transition, timestep in laws.follows(environment, own_step("Game2048-v1"), choose):
        seen = transition.final_observation
        assert set(seen.policy) == {"board"}
        assert seen.policy["board"].dtype == jnp.float32
        laws.same(seen.policy["board"], timestep.observation.board.astype(float))
        laws.same(seen.legal, timestep.observation.action_mask)
        assert float(transition.reward) == float(timestep.reward)
        total += float(transition.reward)
    assert total > 0


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # ignores a warning of the suite
def test_flat_bin_pack_action_is_space_and_item():
    environment = adapter.make("BinPack-v2", reset_interval=1)
    seen, running = jax.jit(environment.reset)(jax.random.key(0))
    assert environment.spaces.num_actions == 40 * 20
    laws.same(seen.legal.reshape(40, 20), running.state.action_mask)
    assert environment.spaces.to_action(jnp.int32(3 * 20 + 7)).tolist() == [3, 7]


def test_ppo_learns_several_choices_with_legal_samples():
    environment = adapter.make("JobShop-v0", max_steps=20)
    assert environment.spaces.choices == (21,) * 10
    _, batch, _ = laws.learns(environment)
    legal, action = (np.asarray(x) for x in (batch.inputs.legal, batch.action))
    assert np.take_along_axis(legal.reshape(4, 4, 10, 21), action[..., None], axis=-1).all()
    assert not legal.all()


@cases(
    "name, num_actions, choices, action_size",
    ("Minesweeper-v0", 100, (), 0),
    pytest.param("RubiksCube-v0", 0, (6, 1, 3), 0, marks=pytest.mark.slow),
    ("Cleaner-v0", 0, (4, 4, 4), 0),
    ("MultiCVRP-v0", 0, (21, 21), 0),
    ("SearchAndRescue-v0", 0, (), 4),
    ("TSP-v1", 20, (), 0),
)
def test_actions_of_every_kind(name, num_actions, choices, action_size):
    """The program is traced to the end of a rollout, because the suite mixes ranks."""
    with jax.numpy_rank_promotion("allow"):
        environment = adapter.make(name)
        spaces = environment.spaces
        assert (spaces.num_actions, spaces.choices, spaces.action_size) == (
            num_actions,
            choices,
            action_size,
        )
        problem = control.make_problem(environment, num_envs=2, num_steps=2)
        params, collector = jax.eval_shape(problem.init, jax.random.key(0))
        batch = jax.eval_shape(problem.collect, params, collector, jax.random.key(0))[1]
    assert batch.reward.shape == (2, 2)
    floats = {x.dtype for x in jax.tree.leaves(spaces.observation.policy)}
    assert floats == {jnp.dtype("float32")}


def test_a_city_is_one_hot():
    seen = jax.jit(adapter.make("TSP-v1").reset)(jax.random.key(0))[0].policy
    assert seen["position"].shape == (20,)


def test_enclosed_snake_may_take_any_action():
    """This library's environment allows all actions where the suite allows none before the episode
    ends."""
    environment = SNAKE(num_rows=3, num_cols=3)
    observation, running = jax.jit(jax.vmap(environment.reset))(
        jax.random.split(jax.random.key(0), 64)
    )

    @jax.jit
    @jax.vmap
    def step(key, running, legal):
        action = jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))
        running, transition = environment.step(key, running, action)
        return running, transition.observation.legal

    legal, enclosed = observation.legal, 0
    for i in range(60):
        running, legal = step(jax.random.split(jax.random.key(i), 64), running, legal)
        offered, mask = np.asarray(legal), np.asarray(running.state.action_mask)
        none = ~mask.any(axis=1)
        enclosed += none.sum()
        assert offered[none].all()
        np.testing.assert_array_equal(offered[~none], mask[~none])
    assert enclosed


def test_policy_without_mask_may_act_illegally():
    assert SNAKE(num_rows=4, num_cols=4, mask=False).spaces.observation.legal is None


@cases("arguments", '{"num_rows": 0}', '{"num_rows": "x"}', '{"time_limit": 0}', '{"colour": 1}')
def test_arguments_that_cannot_work_are_one_line(arguments):
    with pytest.raises(ConfigError, match="jumanji:Snake-v1") as caught:
        suites.from_suite("jumanji:Snake-v1", arguments)
    assert "\n" not in str(caught.value)
