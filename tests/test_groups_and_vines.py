"""Tests groups of episodes and vines on control: several episodes that start in one state."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnax.environments import spaces
from probes import (
    AlwaysTerminated,
    AlwaysTruncated,
    MatchCue,
    MatchCueContinuous,
    accuracy,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    train,
)
from tables import cases

from jaxrl_po import control
from jaxrl_po.algorithms import a2c, dapo, grpo, ppo, reinforce, trpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, as_arrays

CART_POLE = gymnax.make("CartPole-v1")[0]


def collected(problem):
    """Returns parameters and a collected batch."""

    @jax.jit
    def run(key):
        params, collector = problem.init(key)
        return params, problem.collect(params, collector, jax.random.key(1))[1]

    return run(jax.random.key(0))


def test_group_advantages_reach_every_step_of_an_episode():
    _, batch = collected(control.make_groups(CART_POLE, num_prompts=3, group_size=4, num_steps=20))
    # Each group has one initial state, and different prompts have different initial states.
    start = np.asarray(batch.inputs[:, 0]).reshape(3, 4, -1)
    assert (start == start[:, :1]).all()
    assert len(np.unique(start[:, 0, 0])) == 3
    # An episode consists of the slots up to its end; CartPole has a reward of 1 per step.
    length = np.asarray(batch.mask.sum(1))
    np.testing.assert_array_equal(batch.score.reshape(-1), length)
    assert len(np.unique(length)) > 2
    terminated, truncated = np.asarray(batch.terminated), np.asarray(batch.truncated)
    for row in range(12):
        ended = terminated[row] | truncated[row]
        last = length[row] - 1
        assert ended[last]
        assert not ended[:last].any()
        # Episodes that reach the budget are truncated.
        assert truncated[row, last] == (last == 19 and not terminated[row, last])
    np.testing.assert_allclose(batch.metrics["episode_return"].value(), length.mean())
    assert (length == 20).any()


def test_grpo_is_held_by_its_reference():
    problem = control.make_groups(MatchCue(), num_prompts=8, group_size=8, num_steps=2)
    free, held = (
        train(grpo, grpo.Config(learning_rate=1e-2, kl_coefficient=beta), problem, 40)
        for beta in (0.0, 10.0)
    )
    assert accuracy(problem, held[0].params)[1] < accuracy(problem, free[0].params)[1] - 0.1
    assert float(held[1]["reference_kl"].value()[-1]) < float(free[1]["reference_kl"].value()[-1])


def test_groups_of_one_are_refused():
    problem = control.make_groups(MatchCue(), num_prompts=8, group_size=1, num_steps=2)
    learner = grpo.make(grpo.Config(), problem)
    with pytest.raises(ConfigError, match="group_size: must be at least 2"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))


def test_vine_tries_every_action_from_one_state():
    """MatchCue has a reward of 1 for the action that names the cue, and ends: enumeration yields Q
    = 0 or 1."""
    problem = control.make_vine(MatchCue(), num_envs=4, num_steps=6, num_states=3, horizon=5)
    params, batch = collected(problem)
    cue = np.asarray(batch.inputs).reshape(12, 2)
    np.testing.assert_array_equal(cue[:, 0], cue[:, 1])
    np.testing.assert_array_equal(batch.score, np.stack([cue[:, 0] < 0, cue[:, 0] > 0], axis=1))
    np.testing.assert_array_equal(batch.action.reshape(12, 2), np.tile([0, 1], (12, 1)))
    np.testing.assert_allclose(batch.columns["sampler_log_prob"], -np.log(2.0), rtol=1e-6)
    distribution = jax.jit(problem.apply)(params, batch.inputs)[0]
    np.testing.assert_allclose(batch.log_prob, distribution.log_prob(batch.action), rtol=1e-5)
    np.testing.assert_allclose(batch.value, 0.5, atol=0.02)  # the policy is nearly uniform
    assert batch.terminated.all()


class Noisy(AlwaysTruncated):
    """Environment with reward 1 plus small noise per step, which observes noise and time and lasts
    five steps."""

    def observation(self, state):
        return jnp.stack([state.time * 1.0, state.cue])

    def step_env(self, key, state, action, params):
        noise = jax.random.normal(key)
        state = state.replace(time=state.time + 1, cue=noise)
        return self.observation(state), state, 1.0 + 3e-3 * noise, jnp.bool_(False), {}

    def observation_space(self, params=None):
        return spaces.Box(-9.0, 9.0, (2,))


def test_branches_share_random_numbers_and_trunks_advance():
    """All branches of a state are identical, and their return is nearly a geometric sum."""
    sizes = {"num_envs": 4, "num_steps": 12, "num_states": 6, "num_branches": 3}
    problem = control.make_vine(Noisy(), **sizes, horizon=4, discount=0.5)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    collect = jax.jit(problem.collect)
    collector, batch = collect(params, collector, jax.random.key(1))
    score, seen = np.asarray(batch.score), np.asarray(batch.inputs).reshape(24, 3, 2)
    np.testing.assert_array_equal(score, np.repeat(score[:, :1], 3, axis=1))
    np.testing.assert_array_equal(seen, np.repeat(seen[:, :1], 3, axis=1))
    assert len(np.unique(score)) == 24
    # Each trunk visits different states, at different times, and never the same state twice.
    time, noise = seen[:, 0].reshape(4, 6, 2).transpose(2, 0, 1)
    assert all(len(set(zip(*row, strict=True))) == 6 for row in zip(time, noise, strict=True))
    assert len(np.unique(time, axis=0)) > 1
    # The limit of 5 steps cuts a branch from time t after 5 − t steps; the horizon cuts it after 4.
    sums = 2.0 - 0.5 ** (np.minimum(4, 5 - time) - 1.0)
    np.testing.assert_allclose(score[:, 0], sums.ravel(), atol=0.03)
    # The value is the mean over the branches of a state.
    np.testing.assert_allclose(batch.value.reshape(24, 3), score, rtol=1e-6)
    # Complete episodes of the trunks count; the next iteration continues the trunks.
    np.testing.assert_allclose(batch.metrics["episode_return"].value(), 5.0, atol=0.03)
    assert float(batch.metrics["episode_return"].count) == 4 * 2
    after, _ = collect(params, collector, jax.random.key(2))
    assert (after.sharded["environments"].episode_length == 24 % 5).all()


CONTINUOUS = {"num_envs": 8, "num_steps": 8, "num_states": 4, "num_branches": 8, "horizon": 2}


def test_vine_branches_begin_with_continuous_policy_actions():
    _, batch = collected(control.make_vine(MatchCueContinuous(), **CONTINUOUS))
    action, cue = (np.asarray(x)[..., 0] for x in (batch.action, batch.inputs))
    paid = -np.square(np.clip(action, -1.0, 1.0) - 0.5 * cue)
    np.testing.assert_allclose(np.ravel(batch.score), np.ravel(paid), rtol=1e-4, atol=1e-6)
    cue = cue.reshape(32, 8)
    np.testing.assert_array_equal(cue, np.repeat(cue[:, :1], 8, axis=1))
    assert len(np.unique(action)) == action.size


@cases(
    "env, options, match",
    (CART_POLE, {"num_branches": 1}, "num_branches: must be at least 2"),
    (MatchCueContinuous(), {}, "num_branches: must be at least 2 where actions are not one"),
    (CART_POLE, {"num_states": 9}, "num_states: must be at most num_steps = 8"),
    (CART_POLE, {"horizon": 0}, "horizon"),
    (CART_POLE, {"discount": 1.5}, "discount"),
)
def test_bad_vines_are_named(env, options, match):
    with pytest.raises(ConfigError, match=match):
        control.make_vine(env, **({"num_envs": 2, "num_steps": 8, "num_states": 2} | options))


def test_vine_needs_a_state_to_go_back_to():
    class Hidden(MatchCue):
        def reset(self, key, params=None):
            return jnp.zeros(1), ()

    with pytest.raises(ConfigError, match="goes back to visited states"):
        control.make_vine(Hidden())


@cases("module", reinforce, a2c, ppo, grpo)
def test_proposal_actions_are_refused_where_nothing_weighs_them(module):
    """A proposal that tries each action once is uniform, unlike the policy: −log π · A has another
    gradient."""
    enumerated, sampled = (
        control.make_vine(
            MatchCue(), num_envs=2, num_steps=8, num_states=2, horizon=2, num_branches=k
        )
        for k in (0, 2)
    )
    with pytest.raises(
        ConfigError, match=r"sampling: must be from the policy itself for this method.*num_branches"
    ):
        module.make(module.Config(), enumerated)
    module.make(module.Config(), sampled)


def test_vine_kl_and_surrogate_use_policy_not_proposal():
    problem = control.make_vine(MatchCue(), num_envs=8, num_steps=8, num_states=4, horizon=2)
    learner = trpo.make(as_arrays(trpo.Config(max_kl=0.05, normalize_advantage=False)), problem)

    @jax.jit
    def step(key):
        state = learner.init(key)
        # The policy is far from uniform, so that the KL from the proposal would be visible.
        policy = jax.tree.map(lambda x: 3.0 * x, state.params.policy)
        after, metrics = learner.step(state._replace(params=state.params._replace(policy=policy)))
        return after.params, metrics

    params, metrics = step(jax.random.key(0))
    assert params.value is None
    assert float(metrics["accepted"].value()) == 1.0
    assert float(metrics["exact_kl"].value()) <= 0.05
    # At the old policy the expectation of the advantage is 0 in every state.
    np.testing.assert_allclose(metrics["policy_loss"].value(), 0.0, atol=1e-5)
    # With all actions weighted by their probability, the k3 estimate is the exact KL.
    np.testing.assert_allclose(metrics["kl"].value(), metrics["exact_kl"].value(), rtol=1e-3)


class HalfWithoutNumber(AlwaysTerminated):
    """Environment with episodes of one step whose reward is 1, or NaN where the cue is −1."""

    def reward(self, state, action):
        return jnp.where(state.cue > 0, 1.0, jnp.nan)


@cases("make", "groups", "vine")
def test_rewards_after_episode_end_do_not_count(make):
    env = HalfWithoutNumber()
    problem = (
        control.make_groups(env, num_prompts=16, group_size=2, num_steps=4)
        if make == "groups"
        else control.make_vine(env, num_envs=8, num_steps=2, num_states=2, horizon=4)
    )
    _, batch = collected(problem)
    score = np.asarray(batch.score).ravel()
    good = np.asarray(jax.tree.leaves(batch.inputs)[0])[:, 0].ravel() > 0
    assert 0 < good.sum() < good.size
    np.testing.assert_array_equal(score[good], 1.0)
    assert np.isnan(score[~good]).all()


@cases("flag, algorithm", ("gamma=0.9", "trpo"), ("value_epochs=3", "npg"), ("gamma=0.9", "ppo"))
def test_a_vine_refuses_the_settings_of_a_critic(tmp_path, flag, algorithm):
    name, arguments = flag.split("=")[0], ["--sampling=vine", f"--algorithm={algorithm}"]
    with pytest.raises(ConfigError, match=rf"^config.{name}: has no effect with sampling = v"):
        launch.control([*arguments, f"--config.{flag}", f"--out={tmp_path}/run"])
    assert not (tmp_path / "run").exists()


def test_dapo_on_control_keeps_episodes_at_the_limit():
    """On CartPole episodes that reach the limit are the best: without them the policy has no
    signal."""
    problem = control.make_groups(CART_POLE, num_prompts=4, group_size=4, num_steps=12)
    _, metrics, _ = train(dapo, dapo.Config(dynamic_sampling="off"), problem, 1)
    assert float(metrics["truncated"].value()[0]) > 0.2
    assert float(metrics["signal"].count[0]) == float(metrics["episode_length"].total[0])
    with pytest.raises(ConfigError, match="overlong_cache: has no effect unless"):
        dapo.make(dapo.Config(overlong_cache=3), problem)
