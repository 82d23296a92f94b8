"""PPO: what each field does, golden loss, probe environments with known answers."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import (
    AlwaysTerminated,
    AlwaysTruncated,
    CueReward,
    MatchCue,
    MatchCueContinuous,
    NanReward,
    tabular_problem,
)

from jaxrl_po import control, divergences
from jaxrl_po.algorithms import actor_critic, ppo, reference
from jaxrl_po.config import as_arrays
from jaxrl_po.types import Samples

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
    """Reward 1 forever, truncated every 5 steps: V = 1 / (1 − γ) = 5.

    Treating truncation as termination would give 3.4 at most.
    """
    problem, state, _ = train(AlwaysTruncated(), dataclasses.replace(FAST, gamma=0.8), 60)
    np.testing.assert_allclose(values(problem, state), 5.0, atol=0.4)


def test_termination_does_not_bootstrap():
    """Reward 1 and over: V = 1, although the critic's next value is not 0."""
    problem, state, _ = train(AlwaysTerminated(), dataclasses.replace(FAST, gamma=0.8), 40)
    np.testing.assert_allclose(values(problem, state), 1.0, atol=0.05)


def test_critic_reads_the_observation():
    problem, state, _ = train(CueReward(), FAST, 40)
    np.testing.assert_allclose(values(problem, state), [-1.0, 1.0], atol=0.1)


def test_policy_learns_the_cue():
    problem, state, _ = train(MatchCue(), FAST, 40)
    probabilities = jax.nn.softmax(
        problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].logits
    )
    assert float(probabilities[0, 0]) > 0.95
    assert float(probabilities[1, 1]) > 0.95


def test_continuous_policy_learns_the_mean():
    problem, state, _ = train(MatchCueContinuous(), FAST, 80)
    mean = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    np.testing.assert_allclose(mean, [-0.5, 0.5], atol=0.12)


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


def test_any_optimizer_fits():
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
    learner = ppo.make(ppo.Config(), problem, optimizer=optax.lion(1e-3))
    _, metrics = jax.jit(learner.step)(jax.jit(learner.init)(jax.random.key(0)))
    assert float(metrics["updates"].value()) == 1.0


def test_early_stop_saves_updates():
    config = dataclasses.replace(BASE, early_stop=True, target_kl=1e-5)
    _, _, metrics = train(gymnax.make("CartPole-v1")[0], config, 2)
    assert (np.asarray(metrics["updates"].value()) < 1.0).all()


TABLE = tabular_problem(num_prompts=8, num_steps=8)
REFERRED = ppo.Config(learning_rate=3e-2, num_epochs=2, num_minibatches=2, use_reference=True)


def steps(config, number):
    """States after each of `number` iterations, after the initial one, and the metrics of each."""
    learner = ppo.make(as_arrays(config), TABLE)
    state, step = learner.init(jax.random.key(0)), jax.jit(learner.step)
    states, metrics = [state], []
    for _ in range(number):
        state, logged = step(state)
        states.append(state)
        metrics.append(logged)
    return states, metrics


def test_price_of_a_token_by_hand():
    """r − β (log π − log π_ref) at every sampled token, and nothing behind the mask."""
    params, collector = TABLE.init(jax.random.key(0))
    frozen = jax.tree.map(lambda x: x + 0.3, params.policy)
    batch = TABLE.collect(params, collector, jax.random.key(1))[1]
    assert not batch.mask.all()
    state = steps(ppo.Config(), 0)[0][0]._replace(
        reference_params=frozen, kl_coefficient=jnp.float32(0.7)
    )

    def rewards(state, batch):
        return Samples((), (), (), batch.reward, (), (), (), batch.mask)

    policy = actor_critic.policy_of(TABLE)
    charged = reference.beside(
        rewards, policy, reward_kl=divergences.k1, coefficient=lambda state: state.kl_coefficient
    )
    got = charged(state, batch)
    log_softmax = [
        np.asarray(jax.nn.log_softmax(policy(p, batch).logits)) for p in (params.policy, frozen)
    ]
    now, before = (
        np.take_along_axis(x, np.asarray(batch.action)[..., None], -1)[..., 0] for x in log_softmax
    )
    want = np.where(batch.mask, batch.reward - 0.7 * (now - before), batch.reward)
    np.testing.assert_allclose(got.advantage, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got.reference_log_prob, before, rtol=1e-5, atol=1e-6)
    garbage = batch._replace(log_prob=jnp.where(batch.mask, batch.log_prob, 50.0))
    np.testing.assert_array_equal(charged(state, garbage).advantage, got.advantage)


def test_a_reference_that_is_off_is_neither_held_nor_computed():
    (state, after), (metrics,) = steps(ppo.Config(num_minibatches=2), 1)
    assert state.reference_params == after.reference_params == ()
    assert "reference_kl" not in metrics


def test_the_reference_is_the_initial_policy_and_stays():
    states, metrics = steps(REFERRED, 2)
    for state in states:
        jax.tree.map(np.testing.assert_array_equal, state.reference_params, states[0].params.policy)
    assert float(metrics[0]["reference_kl"].value()) == pytest.approx(0.0, abs=1e-6)
    assert abs(float(metrics[1]["reference_kl"].value())) > 1e-3
    without, _ = steps(dataclasses.replace(REFERRED, use_reference=False), 2)
    policies = [
        [np.asarray(jax.tree.leaves(s.params.policy)[0]) for s in run] for run in (states, without)
    ]
    np.testing.assert_allclose(policies[0][1], policies[1][1], rtol=1e-5, atol=1e-6)
    assert np.abs(policies[0][2] - policies[1][2]).max() > 1e-5


@pytest.mark.parametrize(("target", "second"), [(1e-6, 1.02), (1e6, 0.98)])
def test_the_price_adapts_both_ways(target, second):
    """At the reference the KL is 0 and β falls by 0.1 · 0.2; then the KL exceeds the low target."""
    states, metrics = steps(
        dataclasses.replace(REFERRED, adapt_reference_kl=True, reference_target_kl=target), 2
    )
    betas = [float(state.kl_coefficient) for state in states]
    np.testing.assert_allclose(betas, [0.05, 0.05 * 0.98, 0.05 * 0.98 * second], rtol=1e-5)
    np.testing.assert_allclose(
        [m["reference_kl_coefficient"].value() for m in metrics], betas[:2], rtol=1e-6
    )


def test_a_fixed_penalty_beside_an_adapted_price_keeps_its_own_coefficient():
    config = dataclasses.replace(
        REFERRED, adapt_reference_kl=True, penalty="fixed", kl_coefficient=3.0
    )
    states, metrics = steps(config, 2)
    assert [float(m["kl_coefficient"].value()) for m in metrics] == [3.0, 3.0]
    assert float(states[1].kl_coefficient) == pytest.approx(0.05 * 0.98)
