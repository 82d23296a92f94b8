"""PPO: what each field does, golden loss, probe environments with known answers."""

import dataclasses

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import AlwaysTerminated, AlwaysTruncated, CueReward, MatchCue, MatchCueContinuous, NanReward

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import ConfigError, as_arrays

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


STATIC_CHANGES = {
    "num_epochs": 1,
    "num_minibatches": 4,
    "num_microbatches": 2,
    "normalize_advantage": False,
    "clip_value": True,
    "early_stop": True,
    "decay_iterations": 2,
}
NUMERIC_CHANGES = {
    "learning_rate": 1e-3,
    "gamma": 0.5,
    "lambda_": 0.5,
    "epsilon_low": 0.01,
    "epsilon_high": 0.01,
    "value_coefficient": 2.0,
    "entropy_coefficient": 1.0,
    "max_grad_norm": 1e-3,
    "target_kl": 1e-7,
}
BASE = ppo.Config(learning_rate=3e-2, num_epochs=3, num_minibatches=2, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def outcome():
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=16)
    numeric = {}

    def run(config):
        # Numbers are traced, so that all of their changes share one program; None marks the static part as the key.
        static = jax.tree.structure(config)
        if static not in numeric:

            @jax.jit
            def two_steps(config, key):
                learner = ppo.make(config, problem)
                state = learner.step(learner.step(learner.init(key))[0])[0]
                return state.params

            numeric[static] = two_steps
        params = numeric[static](as_arrays(config), jax.random.key(0))
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])

    return run


def test_every_field_has_a_test():
    named = {f.name for f in dataclasses.fields(ppo.Config)}
    assert named == set(STATIC_CHANGES) | set(NUMERIC_CHANGES) | {"axis_name"}


@pytest.mark.parametrize("field", [*STATIC_CHANGES, *NUMERIC_CHANGES])
def test_every_field_does_something(outcome, field):
    base = dataclasses.replace(BASE, early_stop=True, target_kl=1e6) if field == "target_kl" else BASE
    if field == "early_stop":
        changed = dataclasses.replace(base, early_stop=True, target_kl=1e-7)
    else:
        changed = dataclasses.replace(base, **{field: (STATIC_CHANGES | NUMERIC_CHANGES)[field]})
    before, after = outcome(base), outcome(changed)
    if field == "num_microbatches":
        np.testing.assert_allclose(before, after, rtol=1e-3, atol=1e-4)  # splits the work and changes no number
        assert not np.array_equal(before, after)
    else:
        assert np.abs(before - after).max() > 1e-5


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"gamma": 1.1}, r"gamma must lie in \[0, 1\], got 1.1"),
        ({"lambda_": -0.1}, "lambda_"),
        ({"epsilon_high": 1.0}, "epsilon_high"),
        ({"epsilon_low": 1.0}, "epsilon_low"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": jnp.array([1e-3, -1.0])}, "learning_rate"),
        ({"num_epochs": 0}, "num_epochs"),
        ({"num_minibatches": -4}, "num_minibatches"),
        ({"num_minibatches": 2.0}, "num_minibatches must be of type int"),
        ({"decay_iterations": -1}, "decay_iterations"),
        ({"target_kl": 0.5}, "target_kl has no effect unless early_stop is on"),
    ],
)
def test_bad_fields_are_named(changes, match):
    problem = control.make_problem(gymnax.make("CartPole-v1")[0])
    with pytest.raises(ConfigError, match=match):
        ppo.make(dataclasses.replace(ppo.Config(), **changes), problem)


def test_any_optimizer_fits():
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=8)
    learner = ppo.make(ppo.Config(), problem, optimizer=optax.lion(1e-3))
    _, metrics = jax.jit(learner.step)(jax.jit(learner.init)(jax.random.key(0)))
    assert float(metrics["updates"].value()) == 1.0


def test_early_stop_saves_updates():
    config = dataclasses.replace(BASE, early_stop=True, target_kl=1e-5)
    _, _, metrics = train(gymnax.make("CartPole-v1")[0], config, 2)
    assert (np.asarray(metrics["updates"].value()) < 1.0).all()
