"""Tests the remaining numbers of every config by hand: sizes of steps, trust regions and targets.

Each test takes one step of an update, as in `test_coefficients`; the last test checks that every
number of every config has a test.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import test_coefficients  # noqa: F401  its tests register the numbers that they cover
import test_coefficients_of_groups  # noqa: F401  its tests do the same
from fields import CASES, shared_with_grpo
from one_step import (
    GROUPS,
    PPO,
    TESTED,
    WITH_CRITIC,
    assert_same,
    change,
    flat,
    gae,
    gradient,
    in_group,
    known,
    n_step,
    number,
    outcome,
    program,  # noqa: F401  conftest clears the caches that a test file imports
    situation,
    times,
    value_gradient,
    weights,
)

from jaxrl_po.algorithms import actor_critic, npg, ppo, ppo_penalty
from jaxrl_po.config import setting_of
from jaxrl_po.distributions import Categorical, DiagonalGaussian
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem

UNCLIPPED = (
    *("reinforce", "a2c", "npg", "trpo", "ppo_penalty"),
    *("rloo", "sapo", "pkpo", "kl_cov", "distillation"),
)

# Tests of the length of a step.


def first_step(algorithm, descent, learning_rate, max_grad_norm, epsilon=None):
    """Computes the first step of Adam, or of A2C's RMSProp, along a gradient clipped at a norm."""
    cut = jax.tree.map(
        lambda g: g * min(1.0, max_grad_norm / np.linalg.norm(flat(descent))), descent
    )
    root = 0.1 if algorithm == "a2c" else 1.0
    epsilon = epsilon or (1e-8 if algorithm in GROUPS else 1e-5)
    return jax.tree.map(lambda g: learning_rate * g / (root * jnp.abs(g) + epsilon), cut)


@number("learning_rate max_grad_norm optimizer_epsilon", "ppo", "a2c", "reinforce", "grpo")
def test_default_optimizer_steps_along_clipped_gradient(algorithm):
    descent = change(algorithm)
    joint = algorithm in ("ppo", "a2c")
    descent = descent if joint else descent.policy
    norm = np.linalg.norm(flat(descent))
    sizes = (1e-3, 1e3), (2e-3, 1e3), (2e-3, 2 * norm), (2e-3, 1e-5), (2e-3, 2e-5)
    epsilons = (1e-3, 1e3, 0.1), (1e-3, 1e3, 0.3)
    for learning_rate, max_grad_norm, *epsilon in (*sizes, *epsilons):
        changes = {"optimizer_epsilon": epsilon[0]} if epsilon else {}
        changes |= {"learning_rate": learning_rate, "max_grad_norm": max_grad_norm}
        moved = change(algorithm, plain=False, **changes)
        want = first_step(algorithm, descent, learning_rate, max_grad_norm, *epsilon)
        assert_same(moved if joint else moved.policy, want, 1e-3)


@number("value_learning_rate", "reinforce")
def test_the_critic_steps_by_its_own_learning_rate(algorithm):
    k = known(algorithm)
    up = value_gradient(algorithm, weights(algorithm) * (n_step(k, 0.99, 8) - k.value_now))
    for learning_rate in (1e-3, 2e-3):
        moved = change(algorithm, value_learning_rate=learning_rate)
        assert_same(moved.value, first_step(algorithm, up, learning_rate, np.inf), 1e-3)


# Tests of trust regions.


@functools.cache
def curvature():
    """Computes NPG's Fisher matrix by enumerating actions, and its ascent gradient, in float64."""
    problem, k = WITH_CRITIC, known("npg")
    params, _, batch = situation(problem)
    vector, unravel = jax.flatten_util.ravel_pytree(params.policy)

    def log_probs(x):
        return jax.nn.log_softmax(problem.apply(ActorCritic(unravel(x)), batch.inputs)[0].logits)

    jacobian = np.asarray(jax.jacobian(log_probs)(vector), np.float64)
    probability = np.exp(np.asarray(log_probs(vector), np.float64))
    fisher = np.einsum("bt,bta,btai,btaj->ij", weights("npg"), probability, jacobian, jacobian)
    return fisher, flat(gradient("npg", weights("npg") * k.ratio * gae(k, 0.99, 0.95)))


def conjugate_gradient(matrix, b, tolerance):
    """Runs textbook conjugate gradients, up to a relative residual."""
    x, residual = np.zeros_like(b), b
    direction = b
    while np.linalg.norm(residual) > tolerance * np.linalg.norm(b):
        product = matrix @ direction
        alpha = residual @ residual / (direction @ product)
        x, following = x + alpha * direction, residual - alpha * product
        direction, residual = (
            following + following @ following / (residual @ residual) * direction,
            following,
        )
    return x


def natural(damping=0.1, max_kl=0.01, tolerance=1e-9):
    fisher, uphill = curvature()
    damped = fisher + damping * np.eye(len(fisher))
    x = conjugate_gradient(damped, uphill, tolerance)
    return np.sqrt(2 * max_kl / (x @ damped @ x)) * x


@number("max_kl damping", "npg")
def test_natural_step_equals_that_of_dense_matrix(algorithm):
    for damping, max_kl in ((0.1, 0.01), (0.1, 0.04), (0.2, 0.01), (1.0, 0.01)):
        moved = change(algorithm, damping=damping, max_kl=max_kl).policy
        assert_same(moved, natural(damping, max_kl), 2e-3)


@number("cg_tolerance", "npg")
def test_conjugate_gradient_stops_at_share_of_gradient(algorithm):
    steps = []
    for tolerance in (0.6, 0.3, 0.1, 0.01):
        moved, metrics, _ = outcome(algorithm, cg_tolerance=tolerance)
        steps.append(natural(tolerance=tolerance))
        assert_same(moved.policy, steps[-1], 2e-3)
        assert float(metrics["residual"]) <= tolerance
    assert len({float(step[0]) for step in steps}) >= 3


@number("backtrack", "trpo")
def test_each_refusal_shortens_the_step_by_that_factor(algorithm):
    settings = {"damping": 1e-3, "max_kl": 0.5, "cg_iterations": 10}
    fulls = change("npg", **settings, cg_tolerance=1e-5).policy
    for backtrack in (0.8, 0.5):
        moved, metrics, _ = outcome(algorithm, backtrack=backtrack, **settings)
        refused = float(metrics["backtracks"])
        assert metrics["accepted"] == 1.0
        assert refused >= 1
        assert_same(moved.policy, times(backtrack**refused, fulls), 1e-3)


# Targets.


@number("target_kl", "ppo")
def test_the_target_is_what_an_early_stop_admits(algorithm):
    """The KL after the first of two full-batch steps decides whether the second step is stopped."""
    k = known(algorithm)
    stop = {"early_stop": True, "num_epochs": 2}
    kl = float((weights(algorithm) * (np.expm1(k.now - k.old) - (k.now - k.old))).sum())
    shares = [
        float(outcome(algorithm, target_kl=share * kl, **stop)[1]["updates"])
        for share in (0.98, 1.02)
    ]
    assert shares[0] == 0.0
    assert shares[1] > 0.0


@number("target_kl", "ppo_penalty")
def test_the_target_is_what_the_penalty_aims_at(algorithm):
    adapt = {"penalty": "adaptive", "num_epochs": 2, "kl_coefficient": 1.0}
    kl = float(outcome(algorithm, **adapt)[1]["exact_kl"])
    for share, beta in ((0.98 / 1.5, 2.0), (1.02 / 1.5, 1.0), (0.98 * 1.5, 1.0), (1.02 * 1.5, 0.5)):
        assert float(outcome(algorithm, target_kl=share * kl, **adapt)[2]) == beta


# Cases: policies before and after a step; actions of the first policy; KL(old ‖ new) and KL(new ‖
# old) by hand, and the mean of k3; a target, and the factors that change β in both directions.
STEPS = {
    "categorical": (
        Categorical(jnp.zeros(2)),  # probabilities ½, ½
        Categorical(jnp.log(jnp.array([0.25, 0.75]))),
        jnp.array([[0], [1]]),
        (0.143841, 0.130812),  # the two KLs are ½ log 4/3; ¼ log ½ + ¾ log 3/2
        0.143841,
        (0.0915, 2.0, 1.0),  # 1.5 × .0915 = .137
    ),
    "gaussian": (
        DiagonalGaussian(jnp.zeros(1), jnp.zeros(1)),  # N(0, 1)
        DiagonalGaussian(jnp.ones(1), jnp.log(jnp.full(1, 2.0))),  # N(1, 2²)
        jnp.array([[[-1.0]], [[1.0]]]),
        (0.443147, 1.306853),  # the two KLs are log 2 − ¼; 2 − log 2
        0.105327,  # log 2 − ¼ − 1 + (½ + ½ √e) / 2
        (0.8, 0.5, 2.0),  # .8 / 1.5 = .533; .8 × 1.5 = 1.2
    ),
}


@pytest.mark.parametrize("direction", ["old_new", "new_old"])
@pytest.mark.parametrize("family", STEPS)
def test_the_penalty_is_the_kl_in_its_direction(family, direction):
    """The loss is the penalty, with one state and no rewards; the optimizer steps to `new`."""
    old, new, action, kls, k3, (target, *factors) = STEPS[family]
    way = ppo_penalty.DIRECTIONS.index(direction)

    def apply(params, inputs):
        policy = jax.tree.map(lambda x: jnp.broadcast_to(x, inputs.shape + x.shape), params.policy)
        return policy, jnp.zeros(inputs.shape)

    def rows(samples):
        return jax.tree.map(lambda x: x.reshape(2, *x.shape[2:]), samples)

    first = ActorCritic(old)
    problem = Problem(lambda key: (first, CollectorState({})), None, apply, rows)
    zeros, true = jnp.zeros((2, 1)), jnp.ones((2, 1), bool)
    batch = Batch(
        inputs=zeros,
        action=action,
        log_prob=apply(first, zeros)[0].log_prob(action),
        **dict.fromkeys(("reward", "value", "next_value", "score"), zeros),
        **dict.fromkeys(("terminated", "mask"), true),
        truncated=~true,
        metrics={},
    )
    step = optax.GradientTransformation(
        lambda params: (),
        lambda g, s, params: (jax.tree.map(jnp.subtract, ActorCritic(new), params), s),
    )
    config = ppo_penalty.Config(
        kl_direction=direction,
        kl_coefficient=0.5,
        target_kl=target,
        num_epochs=2,
        num_minibatches=1,
        normalize_advantage=False,
    )
    learner = ppo_penalty.make(config, problem, step)
    state, metrics = jax.jit(learner.update)(learner.init(jax.random.key(0)), batch)
    assert float(state.kl_coefficient) == 0.5 * factors[way]
    # At the first of the two losses no parameter has moved.
    wanted = {"exact_kl": kls[way], "policy_loss": 0.5 * 0.5 * kls[way]}
    wanted |= {"kl": k3, "approximate_kl": 0.5 * k3}  # estimates of KL(old ‖ new) for both losses
    got = {name: float(metrics[name].value()) for name in wanted}
    assert got == pytest.approx(wanted, rel=1e-5)


@number("reference_target_kl", "ppo_reference")
def test_price_of_distance_moves_proportionally_to_error(algorithm):
    k = known(algorithm)
    kl = float((weights(algorithm) * (k.old - k.reference)).sum())
    settings = {"clip": False, "adapt_reference_kl": True, "reference_kl_coefficient": 0.3}
    assert kl > 0
    for error in (-0.5, -0.1, 0.05, 0.1, 0.5):
        _, metrics, beta = outcome(algorithm, reference_target_kl=kl / (1 + error), **settings)
        assert float(metrics["reference_kl_coefficient"]) == pytest.approx(0.3)
        assert float(beta) == pytest.approx(0.3 * (1 + 0.1 * np.clip(error, -0.2, 0.2)), rel=1e-4)


# Metrics that every method logs.


@pytest.mark.parametrize("algorithm", CASES)
def test_entropy_clips_and_gradient_norm_are_logged(algorithm):
    k, weight = known(algorithm), weights(algorithm)
    moved, metrics, _ = outcome(algorithm)
    wanted = {
        "entropy": (weight * k.entropy).sum(),
        "frac_masked": 1 - k.mask.mean(),
        "skipped": 0.0,
    }
    natural_steps = algorithm in ("npg", "trpo")
    wanted["grad_norm"] = np.linalg.norm(
        flat(moved if algorithm in (*PPO, "a2c") else moved.policy)
    )
    if natural_steps:
        wanted["grad_norm"] = np.linalg.norm(curvature()[1])
    if algorithm in GROUPS:
        wanted["extreme_ratio"] = (
            k.mask * (np.abs(np.log(k.ratio)) > np.log(2))
        ).sum() / k.mask.sum()
    if algorithm in ("ppo", "grpo", "dr_grpo"):
        advantage = gae(k, 0.99, 0.95) if algorithm == "ppo" else in_group(k, k.score)
        share = k.mask / k.mask.sum()
        wanted["clip_fraction_low"] = (share * ((advantage < 0) & (k.ratio < 0.8))).sum()
        wanted["clip_fraction_high"] = (share * ((advantage > 0) & (k.ratio > 1.2))).sum()
        assert wanted["clip_fraction_low"] > 0
        assert wanted["clip_fraction_high"] > wanted["clip_fraction_low"]
    got = {name: float(metrics[name]) for name in wanted}
    assert got == pytest.approx(wanted, rel=1e-3, abs=1e-6)
    assert np.isfinite(float(metrics["kl"]))
    assert ("clip_fraction_high" in metrics) == (algorithm not in UNCLIPPED)


# Numbers that a method passes to code which another method's tests cover.
HANDED_ON = {
    "reinforce": {"lambda_", "weight_decay"},
    "a2c": {"lambda_", "weight_decay"},
    "ppo": {"weight_decay"},
    "grpo": {"weight_decay"},
    "ppo_penalty": {f.name for f in dataclasses.fields(actor_critic.JointLoss)},
    "ppo_reference": {f.name for f in dataclasses.fields(ppo.Config)},
    "npg": {"gamma", "lambda_", "value_learning_rate"},
    "trpo": {f.name for f in dataclasses.fields(npg.Config)},
    **{
        name: shared_with_grpo(name) - {"entropy_coefficient", "kl_coefficient"}
        for name in GROUPS
        if name != "grpo"
    },
}
HANDED_ON["dapo"] -= {"epsilon_low", "epsilon_high"}
HANDED_ON["gspo"] -= {"epsilon_low", "epsilon_high"}


@pytest.mark.parametrize("algorithm", CASES)
def test_every_number_is_tested_or_handed_on(algorithm):
    numbers = {
        f.name for f in dataclasses.fields(CASES[algorithm][0].Config) if not setting_of(f).static
    }
    tested = {field for name, field in TESTED if name == algorithm}
    handed_on = numbers & HANDED_ON.get(algorithm, set())
    assert tested | handed_on == numbers
    assert not tested & handed_on
