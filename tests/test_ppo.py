"""PPO: what each field does, golden loss, probe environments with known answers."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from probes import AlwaysTerminated, AlwaysTruncated, CueReward, MatchCue, MatchCueContinuous, NanReward

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import as_arrays

FAST = ppo.Config(learning_rate=1e-2, num_epochs=4, num_minibatches=1)


def train(env, config, iterations, *, num_envs=16, num_steps=20, **options):
    problem = control.make_problem(env, num_envs=num_envs, num_steps=num_steps, **options)
    learner = ppo.make(as_arrays(config), problem)

    @jax.jit
    def run(key):
        return jax.lax.scan(lambda state, _: learner.step(state), learner.init(key), None, length=iterations)

    state, metrics = run(jax.random.key(0))
    return problem, state, metrics


def values(problem, state, observations=((-1.0,), (1.0,))):
    return np.asarray(problem.apply(state.params, jnp.array(observations))[1])


def test_time_limit_bootstraps():
    """Reward 1 for ever, cut every 5 steps: V = 1 / (1 − γ) = 5. Treating the cut as an end would give 3.4 at most."""
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
    probabilities = jax.nn.softmax(problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].logits)
    assert float(probabilities[0, 0]) > 0.95
    assert float(probabilities[1, 1]) > 0.95


def test_continuous_policy_learns_the_mean():
    problem, state, _ = train(MatchCueContinuous(), FAST, 80)
    mean = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    np.testing.assert_allclose(mean, [-0.5, 0.5], atol=0.12)


def test_cart_pole_improves():
    problem, state, _ = train(gymnax.make("CartPole-v1")[0], ppo.Config(learning_rate=1e-3), 12, num_envs=16, num_steps=128)
    evaluate = jax.jit(control.make_evaluate(gymnax.make("CartPole-v1")[0], problem, num_episodes=16))
    assert float(evaluate(state.params, state.actor, jax.random.key(1))["return"].mean()) > 195.0


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
