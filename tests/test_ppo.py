"""Tests PPO on probes with known answers, and a KL penalty to a reference in its rewards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import (
    AlwaysTruncated,
    MatchCue,
    accuracy,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    tabular_problem,
    train,
)

from jaxrl_po import control
from jaxrl_po.algorithms import actor_critic, ppo, reference, surrogates
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.types import Learner

FAST = ppo.Config(learning_rate=1e-2, num_epochs=4, num_minibatches=1)


def test_time_limit_bootstraps():
    """The reward is 1 forever, truncated every 5 steps: V = 1 / (1 − γ) = 5.

    Treating truncation as termination would give 3.4 at most.
    """
    problem = control.make_problem(AlwaysTruncated(), num_envs=16, num_steps=20)
    state, _, _ = train(ppo, dataclasses.replace(FAST, gamma=0.8), problem, 60)
    assert_allclose(problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[1], 5.0, atol=0.4)


def test_policy_learns_the_cue():
    problem = control.make_problem(MatchCue(), num_envs=16, num_steps=20)
    state, _, _ = train(ppo, FAST, problem, 40)
    assert accuracy(problem, state.params)[1] > np.log(0.95)


TABLE = tabular_problem(num_prompts=8, num_steps=8)
PLAIN = ppo.Config(learning_rate=3e-2, num_epochs=2, num_minibatches=2)


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


def test_clip_without_effect_is_refused():
    with pytest.raises(
        ConfigError, match="epsilon_low: has no effect unless the surrogate is the clipped one"
    ):
        ppo.make(ppo.Config(epsilon_low=0.1), TABLE, surrogate=surrogates.plain)


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
