"""Tests pools of EnvPool and gymnasium: spaces, limits, ends of episodes, errors."""

import gymnasium
import jax
import numpy as np
import pytest
from clock import BOX, SEEN, ignore, started
from tables import cases

from jaxrl_po import control
from jaxrl_po.cli import render
from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.host import rollouts, vector_envs
from jaxrl_po.run.host.vector_envs import Pool, PoolError, PoolStep, wrap_pool_errors


class Shifted(gymnasium.Env):
    """Environment whose classes do not begin at 0, and which does not have its own time limit."""

    observation_space = gymnasium.spaces.Discrete(4, start=2)
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return 2, {}

    def step(self, action):
        assert self.action_space.contains(action)
        return 4, float(action), False, False, {}


gymnasium.register("Shifted-v0", entry_point=Shifted)


def test_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setattr(errors.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'jaxrl_po\[envpool\]'"):
        vector_envs.find_source("envpool:HalfCheetah-v4")


def test_classes_need_not_begin_at_zero():
    where = vector_envs.find_source("gymnasium:Shifted-v0", '{"max_episode_steps": 5}')
    assert where.max_steps == 5
    np.testing.assert_array_equal(where.spaces.observe(np.array([2, 4])), np.eye(4)[[0, 2]])
    settings = control.ControlSettings(num_envs=8, num_steps=12)
    problem = control.recorded_from_settings(where.spaces, settings)
    _, state, begun = started(rollouts.PoolProblem(where, problem, 8, 12, 1))
    _, recording = begun.record(state, ignore)
    kept = recording.mask[0]
    assert set(recording.action[0][kept].tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(recording.reward[0][kept], recording.action[0][kept] - 1.0)
    assert recording.truncated[0, :, 4].all()


SPACES = gymnasium.spaces


class Strict(gymnasium.Env):
    """Environment that accepts only actions in its space and returns only observations in its
    space."""

    observation_space, action_space = SEEN, BOX

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), repr(action)
        return self.observation_space.sample(), float(np.sum(action)), False, False, {}


gymnasium.register("Strict-v0", entry_point=Strict)


@cases(
    "acts, low",
    (SPACES.Box(np.array([-0.1, 0.3]), np.array([0.1, 0.7]), dtype=np.float64), 0.2),
    (SPACES.Box(-0.1, np.inf, (2,), np.float64), -0.2),
    (SPACES.Box(-0.1, 0.1, (1,), np.float16), -0.1),
    (SPACES.MultiDiscrete([3, 2], start=[-1, 0]), -1.0),
)
def test_actions_are_cast_and_stay_within_bounds(acts, low, monkeypatch):
    """In float32, the number 0.1 exceeds the bound 0.1."""
    monkeypatch.setattr(Strict, "action_space", acts)
    where = vector_envs.find_source("gymnasium:Strict-v0")
    of = where.spaces.action
    least = np.full((2, *of.shape), -9.0 if where.spaces.action_size else 0, of.dtype)
    played = np.asarray(jax.vmap(where.spaces.to_action)(least))
    camera = render.Camera(gymnasium.make("Strict-v0"), 1)
    for pool, actions in (where.open([1, 2]), played), (camera, played[:1]):
        pool.reset()
        np.testing.assert_allclose(pool.step(actions).reward, low, rtol=1e-3)


@cases(
    "seen",
    SPACES.Box(-3, 2**40, (3,), np.int64),
    SPACES.MultiBinary([3, 2]),
    SPACES.MultiDiscrete([3, 2, 9], start=[-1, 0, 4]),
    SPACES.Box(0, 1, (2,), np.bool_),
)
def test_whole_numbers_and_flags_are_observed_as_numbers(seen, monkeypatch):
    monkeypatch.setattr(Strict, "observation_space", seen)
    where = vector_envs.find_source("gymnasium:Strict-v0")
    settings = control.ControlSettings(num_envs=2, num_steps=2)
    problem = control.recorded_from_settings(where.spaces, settings)
    begun = rollouts.PoolProblem(where, problem, 2, 2, 1).open(0, [0])
    assert begun.recording().observation.shape == (1, 2, 3, *seen.shape)
    observed = where.open([1, 2]).reset().astype(where.dtype)
    assert where.spaces.observe(observed).dtype == where.spaces.observation.dtype == np.float32
    np.testing.assert_array_equal(where.spaces.observe(observed), observed)


@cases(
    "observations, actions",
    (SEEN, SPACES.MultiBinary(4)),
    (SEEN, SPACES.Box(0, 255, (2,), np.uint8)),
    (SPACES.Text(4), BOX),
    (SPACES.Dict({"action_mask": SEEN}), BOX),
)
def test_spaces_that_cannot_be_handled_are_named(observations, actions):
    with pytest.raises(ConfigError, match=r"^env: odd: (observations|actions|the policy) must"):
        control.spaces.read_spaces("odd", observations, actions)


def test_no_limit_is_none_and_not_a_number():
    assert (
        vector_envs.find_source("gymnasium:CartPole-v1", '{"max_episode_steps": -1}').max_steps
        is None
    )
    pytest.importorskip("envpool")
    assert vector_envs.find_source("envpool:CliffWalking-v0").max_steps is None


def test_pictures_show_the_trained_environment():
    pytest.importorskip("envpool")
    where = vector_envs.find_source("envpool:CartPole-v1", '{"max_episode_steps": 7}')
    camera, why = render._camera(where, 0)
    assert camera is None
    assert "arguments of envpool" in why


def test_gymnasium_gives_true_final_observations():
    pool = vector_envs.find_source("gymnasium:CartPole-v1").open([3, 4])
    seen, action = pool.reset(), np.array([1, 1])
    for _ in range(30):
        before, stepped = seen, pool.step(action)
        seen = stepped.observation
        if stepped.terminated[0]:
            break
    # the pole has fallen: the observation is not the first of an episode
    assert abs(seen[0, 2]) > 0.2
    assert np.all(np.abs(seen[0] - before[0]) < 1.5)
    following = pool.step(action)
    assert np.all(np.abs(following.observation[0]) <= 0.05)
    assert following.reward[0] == 0
    pool.close()


def test_envpool_gives_true_final_observations():
    pytest.importorskip("envpool")
    where = vector_envs.find_source("envpool:CartPole-v1", '{"max_episode_steps": 7}')
    assert where.max_steps == 7
    pool = where.open([3, 4])
    pool.reset()
    for _ in range(7):
        stepped = pool.step(np.array([0, 1]))
    assert stepped.truncated.all()
    assert not stepped.terminated.any()
    # The pole was pushed seven times in one direction.
    assert np.all(np.abs(stepped.observation[:, 1]) > 0.5)
    assert np.all(np.abs(pool.step(np.array([0, 1])).observation) <= 0.05)
    np.testing.assert_array_equal(where.open([4]).reset()[0], where.open([3, 4]).reset()[1])
    pool.close()


def test_envpool_refuses_what_it_does_not_have():
    pytest.importorskip("envpool")
    with pytest.raises(ConfigError, match="did you mean Hopper-v"):
        vector_envs.find_source("envpool:Hoper-v4")
    with pytest.raises(ConfigError, match="wings"):
        vector_envs.find_source("envpool:CartPole-v1", '{"wings": 2}')
    for threads in ("0", '"x"', "true"):
        with pytest.raises(ConfigError, match="num_threads must be a whole number of at least 1"):
            vector_envs.find_source("envpool:CartPole-v1", f'{{"num_threads": {threads}}}')
    with pytest.raises(ConfigError, match="seed is chosen by the run"):
        vector_envs.find_source("envpool:CartPole-v1", '{"seed": 2}')


def test_impossible_environment_gives_one_line():
    def lacking():
        raise FileNotFoundError("no map\nfor it")

    gymnasium.register("Lacking-v0", entry_point=lacking)
    with pytest.raises(
        ConfigError, match=r"^env: gymnasium:Lacking-v0: FileNotFoundError: no map for it$"
    ):
        vector_envs.find_source("gymnasium:Lacking-v0")


def test_frames_of_atari_come_with_their_channels_last():
    pytest.importorskip("envpool")
    where = vector_envs.find_source("envpool:Pong-v5")
    assert where.spaces.observation.shape == (84, 84, 4)
    frame = where.open([1]).reset()
    assert frame.shape == (1, 84, 84, 4)
    assert frame.dtype == where.dtype == np.uint8


@cases(
    "field, shape, valid",
    ("observation", [3, 2], r"\[2, 2\]"),
    ("reward", [2, 2], r"\[2\]"),
    ("terminated", [1], r"\[2\]"),
    ("truncated", [3], r"\[2\]"),
)
def test_shapes_of_a_vector_environment_are_named(field, shape, valid):
    shapes = {name: [2] for name in PoolStep._fields} | {field: shape}
    results = PoolStep(**{name: np.zeros(each) for name, each in shapes.items()})

    def open_pool(seeds):
        return Pool(lambda: results.observation, lambda action: results, lambda: None)

    pool = wrap_pool_errors("mine", open_pool)([1, 2])
    got = str(shape).replace("[", r"\[")
    with pytest.raises(
        PoolError, match=f"^env mine: .* {field} of step must be {valid}, got {got}"
    ):
        pool.step(np.zeros((2, 1)))
