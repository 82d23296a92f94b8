"""Tests the control family on probes with known answers, and promises of each method."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import (
    AlwaysTruncated,
    CueReward,
    MatchCue,
    accuracy,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    tabular_problem,
    train,
)
from tables import cases

from jaxrl_po import control
from jaxrl_po.algorithms import a2c, actor_critic, grpo, npg, ppo, ppo_penalty, reinforce, trpo
from jaxrl_po.config import ConfigError, as_arrays

CART_POLE = gymnax.make("CartPole-v1")[0]
FIT = {"value_epochs": 4, "value_minibatches": 1, "value_learning_rate": 1e-2}


TABULAR = tabular_problem(num_prompts=16)


def replaced(problem, **fields):
    """Returns the problem with batches whose fields have constant numbers."""

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        return collector, batch._replace(
            **{name: jnp.full_like(getattr(batch, name), x) for name, x in fields.items()}
        )

    return problem._replace(collect=collect)


slow = pytest.mark.slow


@slow
@cases(
    "module, config",
    (reinforce, reinforce.Config(**FIT)),
    (a2c, a2c.Config(learning_rate=1e-2)),
    (trpo, trpo.Config(**FIT)),
    (ppo_penalty, ppo_penalty.Config(learning_rate=1e-2, num_epochs=4, num_minibatches=1)),
    ids=["reinforce", "a2c", "trpo", "ppo_penalty"],
)
def test_policy_learns_to_name_the_cue(module, config):
    problem = control.make_problem(MatchCue(), num_envs=16, num_steps=20)
    state, metrics, _ = train(module, config, problem, 40)
    assert accuracy(problem, state.params)[0] == 1.0
    assert np.isfinite(metrics["kl"].metric()).all()
    assert float(metrics["skipped"].value().max()) == 0.0


@slow
@cases(
    "module, config",
    (reinforce, reinforce.Config(**FIT)),
    (trpo, trpo.Config(**FIT)),
    (a2c, a2c.Config(learning_rate=1e-2, gamma=0.8, entropy_coefficient=0.0)),
)
def test_critics_learn_what_they_should(module, config):
    problem = control.make_problem(CueReward(), num_envs=16, num_steps=20)
    state, _, _ = train(module, config, problem, 100)
    value = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[1]
    assert_allclose(value, [-1.0, 1.0], atol=0.15)


def test_trpo_stays_within_its_region_and_gains():
    _, metrics, history = train(trpo, trpo.Config(max_kl=0.02, **FIT), TABULAR, 30)
    accepted = np.asarray(metrics["accepted"].value()) > 0
    assert accepted.mean() > 0.8
    assert (np.asarray(metrics["exact_kl"].value())[accepted] <= 0.02).all()
    assert (np.asarray(metrics["gain"].value())[accepted] > 0).all()
    assert (np.asarray(metrics["predicted_gain"].value())[accepted] > 0).all()
    # The reported KL compares the policies before and after the update, on the states of the batch.
    policy = np.asarray(jax.tree.leaves(history.policy)[0])
    moved = [not np.array_equal(*policy[i : i + 2]) for i in range(29)]
    assert_array_equal(moved, accepted[:29])


def test_natural_policy_gradient_takes_step_that_trpo_checks():
    """TRPO takes the same step as NPG if its line search accepts immediately."""
    shared = {**FIT, "max_kl": 1e-4, "damping": 1e-3}
    (_, natural, one), (_, searched, other) = (
        train(module, module.Config(**shared), TABULAR, 30) for module in (npg, trpo)
    )
    assert float(searched["backtracks"].value()[0]) == 0.0
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert_allclose(a[1], b[1], rtol=1e-5, atol=1e-7)
    # The quadratic model of the KL is accurate for so small a step.
    assert_allclose(natural["exact_kl"].value()[0], 1e-4, rtol=0.3)


def test_impossible_steps_leave_the_policy_bit_exact():
    """Every action always earns the same reward, and the critic predicts it: the gradient is
    zero."""
    problem = replaced(TABULAR, reward=1.0, value=1.0)
    config = trpo.Config(value_learning_rate=1e-30, normalize_advantage=False, gamma=0.0)
    state, metrics, history = train(trpo, config, problem, 2)
    assert metrics["accepted"].value().tolist() == [0.0, 0.0]
    assert metrics["exact_kl"].value().tolist() == [0.0, 0.0]
    for first, last in zip(
        jax.tree.leaves(history.policy), jax.tree.leaves(state.params.policy), strict=True
    ):
        assert_array_equal(first[0], last)


@cases("module", trpo, a2c, *(pytest.param(module, marks=slow) for module in (reinforce, grpo)))
def test_rewards_that_are_not_numbers_move_nothing(module):
    config = module.Config(num_epochs=1) if module is grpo else module.Config()
    problem = tabular_problem(group_size=4) if module is grpo else TABULAR
    nan = replaced(problem, reward=jnp.nan, score=jnp.nan)
    state, metrics, history = train(module, config, nan, 2)
    assert (np.asarray(metrics["skipped"].total) > 0).all()
    for first, last in zip(
        jax.tree.leaves(history.policy), jax.tree.leaves(state.params.policy), strict=True
    ):
        assert_array_equal(first[0], last)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_shared_parameters_are_refused_where_they_cannot_work():
    shared = control.make_problem(
        CART_POLE, num_envs=4, num_steps=8, network=control.NetworkSettings(shared_torso=True)
    )
    learner = trpo.make(trpo.Config(value_minibatches=1), shared)
    with pytest.raises(ConfigError, match="shared_torso: must be off"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))
    for module in (ppo, a2c):
        learner = module.make(module.Config(), shared)
        after = jax.eval_shape(
            lambda key, learner=learner: learner.step(learner.init(key))[0], jax.random.key(0)
        )
        assert after.params.value is None


def test_penalty_is_adapted_until_satisfied_or_the_cap():
    config = ppo_penalty.Config(
        penalty="satisfied", learning_rate=1e-2, num_epochs=4, target_kl=0.01, max_rounds=4
    )
    _, metrics, _ = train(ppo_penalty, config, TABULAR, 12)
    rounds, kl = (np.asarray(metrics[name].value()) for name in ("rounds", "exact_kl"))
    assert rounds.min() >= 1
    assert rounds.max() <= 4
    assert len(set(rounds.tolist())) > 1
    inside = (kl <= 0.015) & (kl >= 0.01 / 1.5)
    assert inside[rounds < 4].all()


def test_returns_without_baseline_are_scaled_but_not_shifted():
    """The formula `(G − m) / s + m` would make the constant part of the returns s times too
    large."""
    shared = {"baseline": "none", **FIT}
    configs = (reinforce.Config(normalize_advantage=on, **shared) for on in (False, True))
    (raw, _, first), (scaled, _, _) = (
        train(PlainGradient, config, TABULAR, 1) for config in configs
    )

    @jax.jit
    def returns(key):
        learner = reinforce.make(as_arrays(reinforce.Config(**shared)), TABULAR)
        batch = learner.sample(learner.init(key))[1]
        return actor_critic.estimate(actor_critic.estimator(reinforce.Config()), batch)[
            1
        ], batch.mask

    values, mask = map(np.asarray, returns(jax.random.key(0)))
    start = jax.tree.map(lambda x: x[0], first.policy)
    change = [jax.tree.map(jnp.subtract, x.params.policy, start) for x in (raw, scaled)]
    for one, other in zip(*map(jax.tree.leaves, change), strict=True):
        assert_allclose(other, one / values[mask].std(), rtol=1e-3, atol=1e-6)


class PlainGradient:
    """REINFORCE method whose step is the plain gradient."""

    @staticmethod
    def make(config, problem):
        return reinforce.make(config, problem, optax.sgd(1.0))


def test_constant_return_without_baseline_is_scaled_by_mean():
    config = reinforce.Config(baseline="none", gamma=0.0, entropy_coefficient=0.0, **FIT)
    problem = control.make_problem(AlwaysTruncated(), num_envs=4, num_steps=16)
    _, metrics, _ = train(reinforce, config, problem, 1)
    assert float(metrics["skipped"].value()[0]) == 0.0
    # the loss is −log π · 10, not −log π · 1e8
    assert abs(float(metrics["policy_loss"].value()[0])) < 10.0


@cases("module", reinforce, pytest.param(trpo, marks=slow))
def test_separate_jitted_policy_and_critic_share_no_body(module):
    jitted = TABULAR._replace(apply=jax.jit(TABULAR.apply))
    config = module.Config(value_minibatches=1, value_epochs=1)
    state, want = (train(module, config, problem, 1)[0] for problem in (jitted, TABULAR))
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True):
        assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    shared = control.make_problem(
        CART_POLE, num_envs=4, num_steps=8, network=control.NetworkSettings(shared_torso=True)
    )
    learner = module.make(
        module.Config(value_minibatches=1), shared._replace(apply=jax.jit(shared.apply))
    )
    with pytest.raises(ConfigError, match="shared_torso: must be off"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))
