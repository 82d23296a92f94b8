"""Tests PPO: the effect of each field, golden loss, probe environments with known answers."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import (
    AlwaysTerminated,
    AlwaysTruncated,
    CueReward,
    MatchCue,
    MatchCueContinuous,
    NanReward,
    tabular_problem,
)

from jaxrl_po import control
from jaxrl_po.algorithms import actor_critic, ppo, reference, surrogates
from jaxrl_po.config import ConfigError, as_arrays, check
from jaxrl_po.types import Learner

FAST = ppo.Config(learning_rate=1e-2, num_epochs=4, num_minibatches=1)


def train(env, config, iterations, *, num_envs=16, num_steps=20, **options):
    problem = control.make_problem(env, num_envs=num_envs, num_steps=num_steps, **options)
    learner = ppo.make(as_arrays(config), problem)

    @jax.jit
    def run(key):
        return jax.lax.scan(
            lambda state, _: learner.step(state), learner.init(key), None, length=iterations
        )

    state, metrics = run(jax.random.key(0))
    return problem, state, metrics


def values(problem, state, observations=((-1.0,), (1.0,))):
    return np.asarray(problem.apply(state.params, jnp.array(observations))[1])


def test_time_limit_bootstraps():
    """The reward is 1 forever, truncated every 5 steps: V = 1 / (1 − γ) = 5.

    Treating truncation as termination would give 3.4 at most.
    """
    problem, state, _ = train(AlwaysTruncated(), dataclasses.replace(FAST, gamma=0.8), 60)
    assert_allclose(values(problem, state), 5.0, atol=0.4)


def test_termination_does_not_bootstrap():
    """The reward is 1 and the episode ends: V = 1, although the critic's next value is not 0."""
    problem, state, _ = train(AlwaysTerminated(), dataclasses.replace(FAST, gamma=0.8), 40)
    assert_allclose(values(problem, state), 1.0, atol=0.05)


@pytest.mark.slow
def test_critic_reads_the_observation():
    problem, state, _ = train(CueReward(), FAST, 40)
    assert_allclose(values(problem, state), [-1.0, 1.0], atol=0.1)


def test_policy_learns_the_cue():
    problem, state, _ = train(MatchCue(), FAST, 40)
    probabilities = jax.nn.softmax(
        problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].logits
    )
    assert float(probabilities[0, 0]) > 0.95
    assert float(probabilities[1, 1]) > 0.95


@pytest.mark.slow
def test_continuous_policy_learns_the_mean():
    problem, state, _ = train(MatchCueContinuous(), FAST, 80)
    mean = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    assert_allclose(mean, [-0.5, 0.5], atol=0.12)


@pytest.mark.slow
def test_cart_pole_improves():
    problem, state, _ = train(
        gymnax.make("CartPole-v1")[0],
        ppo.Config(learning_rate=1e-3),
        12,
        num_envs=16,
        num_steps=128,
    )
    evaluate = jax.jit(
        control.make_evaluate(gymnax.make("CartPole-v1")[0], problem, num_episodes=16)
    )
    assert (
        float(evaluate(state.params, state.collector, jax.random.key(1))["return"].mean()) > 195.0
    )


def test_nan_rewards_skip_every_update():
    _, state, metrics = train(NanReward(), FAST, 2)
    assert metrics["skipped"].value().tolist() == [1.0, 1.0]
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


BASE = ppo.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2)
TABLE = tabular_problem(num_prompts=8, num_steps=8)
PLAIN = ppo.Config(learning_rate=3e-2, num_epochs=2, num_minibatches=2)


def test_any_optimizer_fits():
    learner = ppo.make(ppo.Config(num_minibatches=2), TABLE, optimizer=optax.lion(1e-3))
    _, metrics = jax.jit(learner.step)(learner.init(jax.random.key(0)))
    assert float(metrics["updates"].value()) == 1.0


def test_early_stop_saves_updates():
    _, metrics = steps(dataclasses.replace(BASE, early_stop=True, target_kl=1e-5), 2)
    assert all(float(row["updates"].value()) < 1.0 for row in metrics)


def learner(config, settings):
    made = ppo.make(config, TABLE)
    return made if settings is None else reference.with_reference_kl(made, TABLE, settings)


@jax.jit
def step(config, settings, state):
    return learner(config, settings).step(state)


def steps(config, number, settings=None):
    """Returns states after each of `number` iterations, after the initial state, and the metrics of
    each iteration."""
    config, settings = as_arrays(config), settings and as_arrays(settings)
    state = learner(config, settings).init(jax.random.key(0))
    states, metrics = [state], []
    for _ in range(number):
        state, logged = step(config, settings, state)
        states.append(state)
        metrics.append(logged)
    return states, metrics


def test_price_of_a_token_by_hand():
    """The price is r − β (log π − log π_ref) at every sampled token, and 0 in masked slots."""
    params, collector = TABLE.init(jax.random.key(0))
    frozen = jax.tree.map(lambda x: x + 0.3, params.policy)
    batch = TABLE.collect(params, collector, jax.random.key(1))[1]
    assert not batch.mask.all()
    state = steps(ppo.Config(), 0)[0][0]._replace(reference_params=frozen)
    seen = []
    inner = Learner(None, None, lambda state, batch: (seen.append(batch.reward), (state, {}))[1])
    settings = reference.ReferenceSettings(enabled=True, kl_coefficient=0.7)
    charged = reference.with_reference_kl(inner, TABLE, settings).update
    charged(state, batch)
    policy = actor_critic.make_policy(TABLE)
    log_softmax = [
        np.asarray(jax.nn.log_softmax(policy(p, batch).logits))
        for p in (params, params._replace(policy=frozen))
    ]
    now, before = (
        np.take_along_axis(x, np.asarray(batch.action)[..., None], -1)[..., 0] for x in log_softmax
    )
    want = np.where(batch.mask, batch.reward - 0.7 * (now - before), batch.reward)
    assert_allclose(seen[0], want, rtol=1e-5, atol=1e-6)
    garbage = batch._replace(log_prob=jnp.where(batch.mask, batch.log_prob, 50.0))
    charged(state, garbage)
    assert_array_equal(seen[1], seen[0])


def test_disabled_reference_is_not_computed():
    (state, after), (metrics,) = steps(PLAIN, 1)
    assert state.reference_params is after.reference_params is None
    assert "reference_kl" not in metrics


def test_the_reference_is_the_initial_policy_and_stays():
    states, metrics = steps(PLAIN, 2, reference.ReferenceSettings(enabled=True))
    for state in states:
        jax.tree.map(assert_array_equal, state.reference_params, states[0].params.policy)
    assert float(metrics[0]["reference_kl"].value()) == pytest.approx(0.0, abs=1e-6)
    assert abs(float(metrics[1]["reference_kl"].value())) > 1e-3
    without, _ = steps(PLAIN, 2)
    policies = [
        [np.asarray(jax.tree.leaves(s.params.policy)[0]) for s in run] for run in (states, without)
    ]
    assert_allclose(policies[0][1], policies[1][1], rtol=1e-5, atol=1e-6)
    assert np.abs(policies[0][2] - policies[1][2]).max() > 1e-5


@pytest.mark.parametrize(("target", "second"), [(1e-6, 1.02), (1e6, 0.98)])
def test_the_price_adapts_both_ways(target, second):
    """At the reference the KL is 0 and β falls by 0.1 · 0.2; later the KL exceeds the low
    target."""
    settings = reference.ReferenceSettings(enabled=True, adapt=True, target_kl=target)
    states, metrics = steps(PLAIN, 2, settings)
    betas = [float(state.collector.replicated[reference.COEFFICIENT]) for state in states]
    assert_allclose(betas, [0.05, 0.05 * 0.98, 0.05 * 0.98 * second], rtol=1e-5)
    assert_allclose([m["reference_kl_coefficient"].value() for m in metrics], betas[:2], rtol=1e-6)


def test_user_surrogate_replaces_the_clipped_one():
    config = dataclasses.replace(BASE, num_epochs=6)
    clipped, plain, same = (
        jax.jit(made.step)(made.init(jax.random.key(0)))[0].params.policy
        for made in (
            ppo.make(config, TABLE),
            ppo.make(config, TABLE, surrogate=surrogates.plain),
            ppo.make(config, TABLE, surrogate=surrogates.clipped(0.2, 0.2)),
        )
    )
    jax.tree.map(assert_array_equal, clipped, same)
    difference = jax.tree.map(lambda a, b: np.abs(a - b).max(), clipped, plain)
    assert max(jax.tree.leaves(difference)) > 1e-4
    with pytest.raises(
        ConfigError, match="epsilon_low: has no effect unless the surrogate is the clipped one"
    ):
        ppo.make(dataclasses.replace(BASE, epsilon_low=0.1), TABLE, surrogate=surrogates.plain)


def test_reference_coefficient_is_not_negative():
    with pytest.raises(ConfigError, match=r"^kl_coefficient: must lie in"):
        check(reference.ReferenceSettings(enabled=True, kl_coefficient=-1.0))


def test_a_second_reference_and_a_proposal_are_refused():
    settings = reference.ReferenceSettings(enabled=True)
    once = reference.with_reference_kl(ppo.make(PLAIN, TABLE), TABLE, settings)
    twice = reference.with_reference_kl(once, TABLE, settings)
    with pytest.raises(ConfigError, match="use_reference: must be off"):
        jax.eval_shape(twice.init, jax.random.key(0))
    proposed = TABLE._replace(on_policy=False)
    with pytest.raises(ConfigError, match="from the policy itself for a KL penalty"):
        reference.with_reference_kl(ppo.make(PLAIN, TABLE), proposed, settings)


def test_nothing_sampled_leaves_the_coefficient_alone():
    settings = reference.ReferenceSettings(enabled=True, adapt=True)
    learner = reference.with_reference_kl(ppo.make(PLAIN, TABLE), TABLE, settings)
    state, batch = learner.sample(learner.init(jax.random.key(0)))
    after, _ = jax.jit(learner.update)(state, batch._replace(mask=jnp.zeros_like(batch.mask)))
    assert float(after.collector.replicated[reference.COEFFICIENT]) == pytest.approx(0.05)


def test_a_step_is_one_function_and_compiles_once():
    learner, traced = ppo.make(PLAIN, TABLE), []
    counted = learner._replace(sample=lambda s: (traced.append(1), learner.sample(s))[1])
    state = learner.init(jax.random.key(0))
    for _ in range(3):
        state, _ = jax.jit(counted.step)(state)
    assert len(traced) == 1
