"""Tests rollouts on the host: recording, training on recordings, and evaluation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from clock import ignore, problem_of, started
from tables import cases

from jaxrl_po.algorithms import a2c, ppo, trpo
from jaxrl_po.config import ConfigError
from jaxrl_po.control import recorded
from jaxrl_po.control.statistics import OBSERVATION_STATISTICS, RETURN_STATISTICS, ROLLING_RETURN
from jaxrl_po.run.devices import seeds as seeds_lib


def test_a_recording_holds_what_the_environments_did():
    made = []
    _, state, rollouts = started(problem_of(2, 6, made))
    state, recording = rollouts.record(state, ignore)
    time = [0, 1, 2, 3, 0, 1, 2]
    for env in range(2):
        assert recording.observation[0, env, :, 1].tolist() == time
        assert recording.mask[0, env].tolist() == [True, True, True, False, True, True]
        assert recording.terminated[0, env].tolist() == [False, False, True, False, False, False]
        assert recording.reward[0, env].tolist() == [1, 2, 3, 0, 1, 2]
        assert recording.episode_return[0, env, 2] == 6
        assert recording.episode_length[0, env, 2] == 3
    assert not recording.truncated.any()
    # The stored action is the sampled action; the environment receives the action in the box's
    # units, clipped.
    played = np.stack(made[0].played, axis=1)[None]
    np.testing.assert_allclose(played, np.clip(2.0 * recording.action, -2.0, 2.0), rtol=1e-6)
    # The next iteration begins where this iteration ended.
    _, following = rollouts.record(state, ignore)
    assert following.observation[0, 0, :, 1].tolist() == [2, 3, 0, 1, 2, 3, 0]
    assert following.mask[0, 0].tolist() == [True, False, True, True, True, False]
    assert following.episode_return[0, 0, 0] == 6


@cases("cut", False, True)
def test_the_batch_bootstraps_from_the_true_final_observation(cut):
    hosted = problem_of(2, 6, cut=cut)
    _, state, rollouts = started(hosted)
    state, recording = rollouts.record(state, ignore)
    one = jax.tree.map(lambda x: jnp.asarray(x[0]), recording)
    of_one = seeds_lib.select_seed(state)
    collector, batch = jax.jit(hosted.problem.collect)(
        of_one.params, of_one.collector.add(sharded={recorded.RECORDING: one}), jax.random.key(0)
    )
    _, value = hosted.problem.apply(of_one.params, one.observation)
    np.testing.assert_allclose(batch.value, value[:, :-1], rtol=1e-6)
    # the value of the observation at time 3
    np.testing.assert_allclose(batch.next_value[:, 2], value[:, 3], rtol=1e-6)
    assert batch.truncated[:, 2].all() == cut
    assert batch.terminated[:, 2].all() != cut
    distribution, _ = hosted.problem.apply(of_one.params, batch.inputs)
    np.testing.assert_allclose(batch.log_prob, distribution.log_prob(one.action), rtol=1e-6)
    assert recorded.RECORDING not in collector.sharded
    assert float(batch.metrics["episode_return"].metric()) == 6.0
    assert float(batch.metrics["episode_return"].count) == 2.0
    assert float(batch.metrics["frac_nonfinite"].metric()) == 0.0


SIZES = {
    "a2c": {},
    "trpo": {"value_minibatches": 2, "value_epochs": 2},
    "ppo": {"num_minibatches": 2, "num_epochs": 2},
}


@cases("name", "a2c", "trpo", "ppo")
def test_a_slot_that_holds_no_sample_changes_nothing(name):
    algorithm = {"a2c": a2c, "trpo": trpo, "ppo": ppo}[name]
    hosted = problem_of(2, 6, statistics=True)
    config = algorithm.Config(**SIZES[name])
    learner, state, rollouts = started(hosted, algorithm=algorithm, config=config)
    state, recording = rollouts.record(state, ignore)
    hidden = ~recording.mask

    def garbage(x, value):
        return np.where(hidden.reshape(*hidden.shape, *[1] * (x.ndim - 3)), value, x)

    changed = recording._replace(action=garbage(recording.action, np.float32(37.0)))
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))
    plain, other = (step(state, each)[0] for each in (recording, changed))
    jax.tree.map(np.testing.assert_array_equal, plain.params, other.params)
    assert np.all(np.isfinite(jax.tree.leaves(plain.params.policy)[0]))


def test_statistics_are_those_of_the_samples():
    learner, state, rollouts = started(problem_of(2, 6, statistics=True))
    state, recording = rollouts.record(state, ignore)
    after = jax.jit(learner.sample)(recorded.with_recording(state, recording))[0]
    kept = recording.observation[0, :, :-1][recording.mask[0]]
    found = jax.tree.map(lambda x: x[0], after.collector.replicated[OBSERVATION_STATISTICS])
    assert float(found.seen) == 10
    np.testing.assert_allclose(found.mean, kept.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(found.std(), kept.std(axis=0), rtol=1e-4, atol=1e-5)
    rolling = [1.0, 2.99, 5.9601]
    rolling = [rolling + rolling[:2]] * 2
    returns = jax.tree.map(lambda x: x[0], after.collector.replicated[RETURN_STATISTICS])
    np.testing.assert_allclose(returns.mean, np.mean(rolling), rtol=1e-5)
    np.testing.assert_allclose(after.collector.sharded[ROLLING_RETURN], [[2.99, 2.99]], rtol=1e-5)


def test_nonfinite_reward_is_counted_and_its_update_skipped():
    learner, state, rollouts = started(problem_of(2, 4, statistics=True), (0, 7))
    state, recording = rollouts.record(state, ignore)
    bad = recording._replace(reward=recording.reward.copy())
    bad.reward[1, 1, 1] = np.nan
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))
    after, metrics = step(state, bad)
    for before, now in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(after.params), strict=True
    ):
        assert np.any(before[0] != now[0])
        np.testing.assert_array_equal(before[1], now[1])
    np.testing.assert_array_equal(metrics["skipped"].metric(), [0.0, 1.0])
    np.testing.assert_allclose(metrics["frac_nonfinite"].metric(), [0.0, 1.0 / 6.0])
    for leaf in jax.tree.leaves(after.collector):
        assert np.all(np.isfinite(leaf))
    # The next good iteration trains again.
    later, metrics = step(after, recording)
    np.testing.assert_array_equal(metrics["skipped"].metric(), [0.0, 0.0])
    assert np.all(np.isfinite(jax.tree.leaves(later.params)[0]))


@cases("normalised", False, True)
def test_nonfinite_observation_spoils_only_its_update(normalised):
    learner, state, rollouts = started(problem_of(2, 6, statistics=normalised))
    state, recording = rollouts.record(state, ignore)
    step = jax.jit(lambda state, recording: learner.step(recorded.with_recording(state, recording)))

    def with_value(t, value):
        observation = recording.observation.copy()
        observation[0, 1, t, 0] = value
        return step(state, recording._replace(observation=observation))

    after, metrics = with_value(2, np.inf)
    assert float(metrics["skipped"].metric()[0]) == 1.0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.collector))
    # The value of a terminal state has no effect, and the policy does not act on its observation.
    after, metrics = with_value(3, np.nan)
    assert float(metrics["skipped"].metric()[0]) == 0.0
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(after.params))


def test_further_seeds_keep_environments_of_the_first():
    made = []
    hosted = problem_of(2, 4, made)
    for seeds in ((0,), (0, 1)):
        _, state, rollouts = started(hosted, seeds)
        rollouts.record(state, ignore)
    first, second = (pool.seeds.tolist() for pool in made)
    assert second[:2] == first
    assert len(set(second)) == 4


def test_vmapped_seeds_equal_a_loop():
    hosted = problem_of(2, 6, statistics=True)
    config = ppo.Config(num_minibatches=2, num_epochs=1)
    steps = {}  # a compiled step for each number of seeds

    def run(seeds):
        learner, state, rollouts = started(hosted, seeds, ppo, config)
        step = steps.setdefault(
            len(seeds),
            jax.jit(lambda s, recording: learner.step(recorded.with_recording(s, recording))),
        )
        for _ in range(2):
            state = step(*rollouts.record(state, ignore))[0]
        return state

    both = run((0, 3))
    for i, seed in enumerate((0, 3)):
        jax.tree.map(
            lambda x, y, i=i: np.testing.assert_allclose(x[i], y[0], rtol=2e-4, atol=2e-5),
            both._replace(key=None),
            run((seed,))._replace(key=None),
        )


def test_greedy_evaluation_repeats_the_same_whole_episodes():
    made = []
    _, state, rollouts = started(problem_of(2, 4, made), (0, 1))
    found = [rollouts.evaluate(state) for _ in range(2)]
    for each in found:
        np.testing.assert_array_equal(each["greedy_return"], np.full((2, 2), 6.0))
        np.testing.assert_array_equal(each["greedy_length"], np.full((2, 2), 3.0))
    first, second = (pool.seeds.tolist() for pool in made)
    assert first == second
    assert first[:2] == first[2:]  # all seeds of the run play the same episodes
    rollouts.evaluate(state, 5)  # a later evaluation, with the seed of the run
    assert not set(made[-1].seeds) & set(first)
    assert all(pool.closed for pool in made)


def test_program_without_recording_names_what_is_missing():
    learner, state, _ = started(problem_of(2, 4))
    with pytest.raises(
        ConfigError, match=r"recording: must be put .*: the environments of .* run outside"
    ):
        jax.eval_shape(learner.sample, state)
