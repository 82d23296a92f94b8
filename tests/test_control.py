"""Tests the adapter, the unroll, normalisation and evaluation of control problems."""

import functools

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose
from probes import AlwaysTerminated, AlwaysTruncated, MatchCueContinuous, NanReward, Params
from tables import cases

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import ConfigError
from jaxrl_po.control import normalizer
from jaxrl_po.distributions import DiagonalGaussian
from jaxrl_po.types import CollectorState

CART_POLE = gymnax.make("CartPole-v1")[0]
PENDULUM = gymnax.make("Pendulum-v1")[0]
TRUNCATED = AlwaysTruncated()


@functools.cache
def one_batch(env, **options):
    problem = control.make_problem(env, **({"num_envs": 4, "num_steps": 12} | options))
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    collector, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    return problem, params, collector, batch


@cases(
    "name, shape, actions",
    ("CartPole-v1", (4,), 2),
    ("FrozenLake-misc", (16,), 4),
    ("Breakout-MinAtar", (10, 10, 4), 3),
    ("Catch-bsuite", (10, 5), 3),
)
def test_adapter_knows_gymnax_environments(name, shape, actions):
    environment = control.adapt(gymnax.make(name)[0])
    assert environment.spaces.observation.shape == shape
    assert environment.spaces.num_actions == actions
    observation, state = jax.eval_shape(environment.reset, jax.random.key(0))
    after, transition = jax.eval_shape(environment.step, jax.random.key(1), state, jnp.int32(0))
    assert observation.dtype == transition.final_observation.dtype == jnp.float32
    # A weak type that reset returns, but step does not, would compile the second iteration again.
    assert jax.tree.structure(state) == jax.tree.structure(after)
    assert jax.tree.leaves(state) == jax.tree.leaves(after)


def test_next_value_uses_final_observation_of_same_episode():
    problem, params, _, batch = one_batch(TRUNCATED)
    cue = np.asarray(batch.inputs[..., 0])
    ends = np.asarray(batch.truncated)
    redrawn = ends[:, :-1] & (cue[:, 1:] != cue[:, :-1])
    assert redrawn.any()  # the cue of the next episode differs somewhere
    # the cue is constant throughout an episode
    want = jax.jit(problem.apply)(params, batch.inputs)[1]
    assert_allclose(batch.next_value, want, rtol=1e-5)


def test_values_and_log_probs_are_those_of_apply():
    """The test checks the second iteration, which normalises by the statistics of the first
    iteration.

    The next value of a step is the value of the following step.
    """
    problem, params, actor, _ = one_batch(PENDULUM, normalize_observations=True)
    batch = jax.jit(problem.collect)(params, actor, jax.random.key(2))[1]
    assert not batch.truncated.any()
    assert_allclose(batch.next_value[:, :-1], batch.value[:, 1:], rtol=1e-5, atol=1e-6)
    distribution, value = jax.jit(problem.apply)(params, batch.inputs)
    assert_allclose(distribution.log_prob(batch.action), batch.log_prob, rtol=1e-4, atol=1e-5)
    assert_allclose(value, batch.value, rtol=1e-5, atol=1e-6)


def test_unclipped_action_is_stored_and_clipped_is_played():
    class Wide:
        """Policy whose actions lie far outside the box."""

        def init(self, key, observation):
            return {}

        def apply(self, params, observation):
            return DiagonalGaussian(
                jnp.full((*observation.shape[:-1], 1), 7.0), jnp.zeros((*observation.shape[:-1], 1))
            )

    _, _, _, batch = one_batch(MatchCueContinuous(), policy=Wide())
    assert (batch.action > 2.0).all()
    cue = batch.inputs[..., 0]
    # the environment receives the action as 1, the bound
    assert_allclose(batch.reward, -jnp.square(1.0 - 0.5 * cue), rtol=1e-5)
    want = Wide().apply({}, batch.inputs).log_prob(batch.action)
    assert_allclose(batch.log_prob, want, rtol=1e-5)


def test_the_widest_box_has_a_finite_half_range():
    largest = jnp.finfo(jnp.float32).max
    spaces = control.spaces.box_actions("widest", -largest, largest, (1,))
    assert_allclose(spaces.to_action(jnp.array([0.5])), [0.5 * largest], rtol=1e-6)


def test_episode_metrics_count_completed_episodes_only():
    _, _, _, batch = one_batch(TRUNCATED, num_steps=4)
    assert float(batch.metrics["episode_return"].count) == 0.0
    assert np.isnan(batch.metrics["episode_return"].metric())
    _, _, _, batch = one_batch(TRUNCATED, num_steps=12)
    assert float(batch.metrics["episode_return"].count) == 4 * 2
    assert float(batch.metrics["episode_return"].metric()) == 5.0
    assert float(batch.metrics["episode_length"].metric()) == 5.0


def test_normalizer_is_exact():
    rng = np.random.default_rng(0)
    parts = [jnp.asarray(rng.normal(3.0, 2.0, size=(n, 4, 2)), jnp.float32) for n in (3, 1, 7)]
    statistics = normalizer.empty((2,))
    for part in parts:
        statistics = normalizer.merge_batch(statistics, part)
    everything = np.concatenate(parts).reshape(-1, 2)
    assert_allclose(statistics.mean, everything.mean(0), rtol=1e-5)
    assert_allclose(statistics.std(), everything.std(0), rtol=1e-5)
    x = statistics.normalize(jnp.array([[3.0, 1e9]]))
    assert abs(float(x[0, 0])) < 1.0
    assert float(x[0, 1]) == 10.0


def test_normalized_values_are_divided_by_the_std():
    known = normalizer.Normalizer(jnp.int32(9), jnp.array([1.0, 2.0]), jnp.array([4.0, 0.25]))
    found = known.normalize(jnp.array([[3.0, 2.5], [-1.0, 0.0]]))
    assert_allclose(found, np.array([[2, 0.5], [-2, -2]]) / [2.0001, 0.5001], rtol=1e-6)


def test_masked_vectors_do_not_count():
    x, mask = jnp.array([[1.0], [jnp.nan], [9.0]]), jnp.array([True, False, True])
    found = normalizer.merge_batch(normalizer.empty((1,)), x, mask)
    assert [field.tolist() for field in found] == [2, [5.0], [16.0]]


def test_statistics_are_merged_over_devices():
    rows, nothing = jnp.array([[1.0], [2.0], [8.0], [11.0]]), normalizer.empty((1,))
    merge = functools.partial(normalizer.merge_batch, nothing, axis_name="data")
    found = jax.vmap(merge, axis_name="data")(rows[:, None])
    wanted = normalizer.merge_batch(nothing, rows)
    chex.assert_trees_all_close(found, jax.tree.map(lambda x: jnp.stack([x] * 4), wanted))


def test_std_is_one_only_before_data():
    nothing = normalizer.empty((2,))
    assert nothing.std().tolist() == [1.0, 1.0]
    assert normalizer.merge_batch(nothing, jnp.array([[2.0, 7.0]])).std().tolist() == [0.0, 0.0]


def test_reward_scale_is_std_of_rolling_return():
    _, _, collector, batch = one_batch(TRUNCATED, scale_rewards=True, reward_discount=0.5)
    rolling, r = [], 0.0
    for t in range(12):
        r = 0.5 * r + 1.0
        rolling.append(r)
        r = 0.0 if (t + 1) % 5 == 0 else r
    assert_allclose(batch.reward, 1.0 / np.std(rolling), rtol=1e-5)
    assert float(batch.metrics["episode_return"].metric()) == 5.0  # the logged return is not scaled
    assert_allclose(collector.sharded["rolling_return"], r, rtol=1e-6)


def test_greedy_evaluation_plays_the_mode_whatever_the_key():
    """MatchCueContinuous has one reward of −(a − cue / 2)²: there are two returns, one for each
    cue."""
    env = MatchCueContinuous()
    problem = control.make_problem(env, num_envs=2, num_steps=2)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    params = jax.tree.map(lambda x: x + 0.02, params)
    mode = jax.jit(problem.apply)(params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    want = -np.square(np.clip(mode, -1.0, 1.0) - np.array([-0.5, 0.5]))
    evaluate = jax.jit(control.make_evaluate(env, problem, num_episodes=16))
    for seed in (0, 1):
        got = np.asarray(evaluate(params, collector, jax.random.key(seed))["return"])
        nearest = np.abs(got[:, None] - want[None, :]).argmin(1)
        assert set(nearest.tolist()) == {0, 1}
        assert_allclose(got, want[nearest], rtol=1e-5)
    sampled = control.make_evaluate(env, problem, num_episodes=16, greedy=False)
    assert len(np.unique(jax.jit(sampled)(params, collector, jax.random.key(0))["return"])) > 2


def test_evaluation_plays_whole_episodes():
    problem, params, collector, _ = one_batch(TRUNCATED)
    longer = Params(max_steps_in_episode=7)
    evaluate = control.make_evaluate(TRUNCATED, problem, num_episodes=2, env_params=longer)
    found = jax.jit(evaluate)(params, collector, jax.random.key(0))
    assert found["length"].tolist() == [7.0, 7.0]


class Costs(AlwaysTruncated):
    """Environment in which each step costs 1."""

    def reward(self, state, action):
        return jnp.float32(-1.0)


CONSTANT = {"constant": (AlwaysTerminated(), 12), "first": (Costs(), 1)}


@pytest.mark.parametrize(("env", "num_steps"), CONSTANT.values(), ids=CONSTANT)
def test_constant_return_is_scaled_by_its_mean(env, num_steps):
    """The std is 0 up to rounding: dividing by this std once scaled a reward of 1 to 1e8."""
    _, _, _, batch = one_batch(env, scale_rewards=True, num_steps=num_steps)
    assert_allclose(np.abs(batch.reward), 10.0, rtol=1e-5)


def test_initial_log_std_is_that_of_the_policy():
    network = control.NetworkSettings(initial_log_std=-0.5)
    params, _ = jax.jit(control.make_problem(PENDULUM, network=network).init)(jax.random.key(0))
    assert params.policy["params"]["head"]["log_std"].tolist() == [-0.5]


def test_an_entry_of_the_collector_is_added_once():
    state = CollectorState({"a": 1}).add(sharded={"b": 2}, replicated={"c": 3})
    assert state.remove("b", "c") == CollectorState({"a": 1}, {})
    with pytest.raises(ConfigError, match="c: must be carried once"):
        state.add(sharded={"c": 0})


class InfiniteView(AlwaysTruncated):
    """Environment whose observation is infinite from the third step of an episode on."""

    def observation(self, state):
        return jnp.where(jnp.asarray(state.time) < 3, state.cue, jnp.inf)[None]


def test_nonfinite_numbers_are_counted_and_updates_skipped():
    *_, batch = one_batch(NanReward())
    assert float(batch.metrics["frac_nonfinite"].metric()) == 1.0
    *_, batch = one_batch(TRUNCATED)
    assert float(batch.metrics["frac_nonfinite"].metric()) == 0.0
    # Normalisation would clip the infinite observation to 10.
    problem = control.make_problem(
        InfiniteView(), num_envs=4, num_steps=10, normalize_observations=True
    )
    learner = ppo.make(ppo.Config(num_minibatches=1), problem)
    before = jax.jit(learner.init)(jax.random.key(0))
    after, metrics = jax.jit(learner.step)(before)
    # Steps 3, 4 and 5 of each episode of five steps lead to an infinite observation.
    assert float(metrics["frac_nonfinite"].metric()) == pytest.approx(3 / 5)
    assert float(metrics["skipped"].metric()) == 1.0
    chex.assert_trees_all_equal(before.params, after.params)
