"""Every number of every config by hand: the term that it scales, its sign and its size.

Each test takes one step of gradient descent: unless the default optimizer is tested, it is
`sgd(1)`, so that the change of the parameters is a gradient. The parameters are not those that
sampled the batch, so that ratios are not 1, and the reference differs from both. The expected
gradient is computed in numpy, from the weight of every step on `∇ log π`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import tabular_problem
from test_fields import CASES, shared_with_grpo

from jaxrl_po.algorithms import npg
from jaxrl_po.config import as_arrays
from jaxrl_po.types import ActorCritic

WITH_CRITIC = tabular_problem(num_prompts=8, num_steps=8)
IN_GROUPS = tabular_problem(num_prompts=4, group_size=4, dense=False)
GROUPS = ("grpo", "dapo", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo")
# One program per method: numbers set in the tests are traced, these settings are static.
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1}
FIT = {"value_epochs": 1, "value_minibatches": 1, "normalize_advantage": False}
BASE = {
    "ppo": ONE_STEP | {"normalize_advantage": False},
    "a2c": {"entropy_coefficient": 0.0},
    "reinforce": FIT,
    "npg": FIT | {"cg_iterations": 60, "cg_tolerance": 1e-6},
    "trpo": FIT,
    **{name: ONE_STEP | {"use_reference": True, "kl_coefficient": 0.0} for name in GROUPS},
}
BASE["dapo"] |= {"dynamic_sampling": "off", "overlong_filtering": False, "overlong_cache": 6}
TESTED: set[tuple[str, str]] = set()


def number(fields, *algorithms):
    """Parametrises a test over methods and records which of their fields it covers."""
    TESTED.update((name, field) for name in algorithms for field in fields.split())
    return pytest.mark.parametrize("algorithm", algorithms)


def problem_of(algorithm):
    return IN_GROUPS if algorithm in GROUPS else WITH_CRITIC


def perturbed(params, size, seed):
    leaves, treedef = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        treedef,
        [x + size * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)],
    )


@functools.cache
def situation(problem):
    """The parameters to improve, the reference, and the batch that other parameters sampled."""
    old, collector = problem.init(jax.random.key(0))
    key = jax.random.key(24 if problem is IN_GROUPS else 1)  # ratios on all sides of the clips
    batch = jax.jit(problem.collect)(old, collector, key)[1]
    assert 0.2 < float((~batch.mask).mean()) < 0.8
    return perturbed(old, 0.4, 2), perturbed(old, 0.6, 3).policy, batch


def config_of(algorithm, **changes):
    return CASES[algorithm][0].Config(**(BASE[algorithm] | changes))


@functools.cache
def program(algorithm, structure, plain):
    del structure
    problem = problem_of(algorithm)
    params, reference, _ = situation(problem)

    @jax.jit
    def update(config, batch, step, beta):
        options = (
            {"optimizer": optax.sgd(1.0)}
            if plain and "trpo" not in algorithm and algorithm != "npg"
            else {}
        )
        learner = CASES[algorithm][0].make(config, problem, **options)
        state = learner.init(jax.random.key(0))
        held = reference if jax.tree.leaves(state.reference_params) else state.reference_params
        state = state._replace(params=params, reference_params=held, step=step)
        state = state._replace(kl_coefficient=jnp.where(beta < 0, state.kl_coefficient, beta))
        after, metrics = learner.step.update(state, batch)
        return (
            jax.tree.map(jnp.subtract, after.params, params),
            {k: m.value() for k, m in metrics.items()},
            after.kl_coefficient,
        )

    return update


def outcome(algorithm, *, plain=True, step=0, beta=-1.0, **changes):
    """Change of the parameters, metrics, and β after one update."""
    config = config_of(algorithm, **changes)
    config.validate()
    batch = situation(problem_of(algorithm))[2]
    update = program(algorithm, jax.tree.structure(config), plain)
    return update(as_arrays(config), batch, jnp.int32(step), jnp.float32(beta))


def change(algorithm, **changes):
    return outcome(algorithm, **changes)[0]


def flat(tree):
    return np.concatenate(
        [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
    )


def assert_same(got, want, tolerance=1e-4):
    got, want = flat(got), flat(want)
    assert np.linalg.norm(want) > 1e-4
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def times(scale, tree):
    return jax.tree.map(lambda x: scale * x, tree)


def minus(a, b):
    return jax.tree.map(jnp.subtract, a, b)


# Building blocks of the expected values.


@functools.partial(jax.jit, static_argnums=0)
def _gradients(problem, policy, reference, batch, weight):
    def distribution(params):
        return problem.apply(ActorCritic(params), batch.inputs)[0]

    far = jax.lax.stop_gradient(distribution(reference))
    return {
        "log_prob": jax.grad(lambda p: jnp.sum(weight * distribution(p).log_prob(batch.action)))(
            policy
        ),
        "entropy": jax.grad(lambda p: jnp.sum(weight * distribution(p).entropy()))(policy),
        "kl": jax.grad(lambda p: jnp.sum(weight * far.kl(distribution(p))))(policy),
    }


def gradient(algorithm, weight, of="log_prob", at=None, frm=None):
    """`∇ Σ w x` for the policy; x is log π of the action, the entropy, or KL(`frm` ‖ policy)."""
    params, reference, batch = situation(problem_of(algorithm))
    policy, frm = params.policy if at is None else at, reference if frm is None else frm
    return _gradients(problem_of(algorithm), policy, frm, batch, jnp.asarray(weight, jnp.float32))[
        of
    ]


def value_gradient(algorithm, weight):
    """`∇ Σ w v` over the critic's parameters."""
    problem = problem_of(algorithm)
    params, _, batch = situation(problem)
    weight = jnp.asarray(weight, jnp.float32)
    return jax.grad(
        lambda v: jnp.sum(weight * problem.apply(params._replace(value=v), batch.inputs)[1])
    )(params.value)


@functools.cache
def arrays(problem):
    """The batch in numpy, with log-probabilities of current and reference policy, and values."""
    params, reference, batch = situation(problem)
    distribution, value = problem.apply(params, batch.inputs)
    names = ("reward", "value", "next_value", "terminated", "truncated", "mask", "score", "stratum")
    known = {name: np.asarray(getattr(batch, name), np.float64) for name in names}
    known["old"], known["now"] = (
        np.asarray(x, np.float64) for x in (batch.log_prob, distribution.log_prob(batch.action))
    )
    far = problem.apply(ActorCritic(reference), batch.inputs)[0].log_prob(batch.action)
    known["reference"], known["value_now"] = (
        np.asarray(far, np.float64),
        np.asarray(value, np.float64),
    )
    known["ratio"], known["entropy"] = (
        np.exp(known["now"] - known["old"]),
        np.asarray(distribution.entropy(), np.float64),
    )
    return known


def known(algorithm):
    return type("Known", (), arrays(problem_of(algorithm)))


def weights(algorithm):
    """Weight of one step in the mean: equal for all, equal for rows, or over a constant."""
    mask = known(algorithm).mask
    if algorithm in ("grpo", "gspo"):
        return mask / mask.sum(1, keepdims=True) / len(mask)
    if algorithm == "dr_grpo":
        return mask / mask.size
    return mask / (len(mask) if algorithm == "rloo" else mask.sum())


def gae(k, gamma, lambda_, reward=None):
    reward = k.reward if reward is None else reward
    delta = reward + gamma * (1 - k.terminated) * k.next_value - k.value
    advantage, following = np.zeros_like(delta), 0.0
    for t in reversed(range(delta.shape[1])):
        following = (
            delta[:, t]
            + gamma * lambda_ * (1 - np.maximum(k.terminated, k.truncated)[:, t]) * following
        )
        advantage[:, t] = following
    return advantage


def n_step(k, gamma, n):
    rows, steps = k.reward.shape
    returns = np.zeros((rows, steps))
    for b in range(rows):
        for t in range(steps):
            for i, u in enumerate(range(t, min(t + n, steps))):
                returns[b, t] += gamma**i * k.reward[b, u]
                last = u == min(t + n, steps) - 1 or k.terminated[b, u] or k.truncated[b, u]
                if last:
                    returns[b, t] += (
                        gamma ** (i + 1) * (1 - k.terminated[b, u]) * k.next_value[b, u]
                    )
                    break
    return returns


def in_group(k, outcome, epsilon=1e-6):
    """`(R − mean) / (std + ε)` of each group, for every step."""
    groups = outcome.reshape(k.score.shape)
    relative = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + epsilon)
    return np.broadcast_to(relative.reshape(-1, 1), k.mask.shape)


def unclipped(ratio, advantage, low, high):
    """1 where the clipped surrogate has a gradient."""
    return ~(((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low)))


def whitened(x, mask):
    inside = x[mask > 0]
    return mask * (x - inside.mean()) / (inside.std() + 1e-8)


# Coefficients of terms.


@number("entropy_coefficient", "ppo", "a2c", "reinforce", *GROUPS)
def test_the_entropy_bonus_raises_entropy_in_proportion(algorithm):
    nothing = change(algorithm, entropy_coefficient=0.0).policy
    up = gradient(algorithm, weights(algorithm), "entropy")
    for c in (0.5, 1.0):
        assert_same(minus(change(algorithm, entropy_coefficient=c).policy, nothing), times(c, up))


@number("value_coefficient", "ppo", "a2c")
def test_the_value_loss_is_half_the_squared_error_times_its_coefficient(algorithm):
    k = known(algorithm)
    target = n_step(k, 0.99, 5) if algorithm == "a2c" else gae(k, 0.99, 0.95) + k.value
    towards = value_gradient(algorithm, weights(algorithm) * (target - k.value_now))
    policies = []
    for c in (0.5, 1.0):
        moved = change(algorithm, value_coefficient=c)
        assert_same(moved.value, times(c, towards))
        policies.append(moved.policy)
    np.testing.assert_array_equal(*map(flat, policies))


@number("kl_coefficient", "grpo", "dapo", "dr_grpo", "gspo", "cispo")
def test_the_penalty_pulls_towards_the_reference_in_proportion(algorithm):
    """k3 has the gradient (1 − π_ref / π) ∇ log π; along the step the exact KL(π_ref ‖ π) falls."""
    k = known(algorithm)
    towards = gradient(algorithm, weights(algorithm) * np.expm1(k.reference - k.now))
    nothing = change(algorithm, kl_coefficient=0.0).policy
    for c in (0.5, 1.0):
        assert_same(minus(change(algorithm, kl_coefficient=c).policy, nothing), times(c, towards))
    assert flat(gradient(algorithm, k.mask, "kl")) @ flat(towards) < 0


@number("kl_coefficient", "rloo")
def test_rloo_takes_the_distance_from_the_outcome(algorithm):
    k = known(algorithm)
    for c in (0.0, 0.5, 1.0):
        groups = (
            (k.reward * k.mask - c * k.mask * (k.old - k.reference)).sum(1).reshape(k.score.shape)
        )
        advantage = ((groups - groups.mean(1, keepdims=True)) * 4 / 3).reshape(-1, 1)
        assert_same(
            change(algorithm, kl_coefficient=c).policy,
            gradient(algorithm, weights(algorithm) * k.ratio * advantage),
        )


@number("kl_coefficient", "reinforce_pp")
def test_reinforce_pp_takes_the_distance_from_what_follows_or_adds_it_to_the_loss(algorithm):
    k = known(algorithm)
    for c in (0.5, 1.0):
        reward = k.mask * (k.reward - c * (k.old - k.reference))
        advantage = whitened(np.flip(np.cumsum(np.flip(reward, 1), 1), 1), k.mask)
        weight = weights(algorithm) * unclipped(k.ratio, advantage, 0.2, 0.2) * k.ratio * advantage
        assert_same(change(algorithm, kl_coefficient=c).policy, gradient(algorithm, weight))
    nothing = change(algorithm, kl_coefficient=0.0, group_baseline=True).policy
    for c in (0.5, 1.0):
        pulled = minus(change(algorithm, kl_coefficient=c, group_baseline=True).policy, nothing)
        assert_same(
            pulled, times(c, gradient(algorithm, weights(algorithm) * (k.reference - k.now)))
        )


@number("kl_coefficient", "ppo")
def test_ppo_is_pulled_back_to_where_the_update_began(algorithm):
    """No gradient in the first step of an update; in the second that of the exact KL(old ‖ new)."""
    k, params = known(algorithm), situation(WITH_CRITIC)[0].policy
    first = gradient(algorithm, weights(algorithm) * k.ratio * gae(k, 0.99, 0.95))
    after = jax.tree.map(jnp.add, params, first)
    away = gradient(algorithm, weights(algorithm), "kl", at=after, frm=params)
    settings = {"clip": False, "penalty": "fixed", "num_epochs": 2}
    nothing = change(algorithm, kl_coefficient=0.0, **settings).policy
    for c in (0.5, 1.0):
        assert_same(
            minus(change(algorithm, kl_coefficient=c, **settings).policy, nothing), times(-c, away)
        )


@number("reference_kl_coefficient", "ppo")
def test_ppo_takes_the_distance_to_the_reference_from_each_reward(algorithm):
    k = known(algorithm)
    for c in (0.0, 0.5, 1.0):
        reward = k.reward - c * k.mask * (k.old - k.reference)
        advantage = gae(k, 0.99, 0.95, reward)
        moved = change(algorithm, clip=False, use_reference=True, reference_kl_coefficient=c)
        assert_same(moved.policy, gradient(algorithm, weights(algorithm) * k.ratio * advantage))
        error = advantage + k.value - k.value_now
        assert_same(moved.value, times(0.5, value_gradient(algorithm, weights(algorithm) * error)))


# Estimation.


@number("gamma", "ppo", "a2c", "reinforce")
def test_gamma_discounts_what_follows(algorithm):
    k = known(algorithm)
    for gamma in (0.99, 0.5, 0.0):
        advantage = {
            "ppo": lambda g: (
                gae(k, g, 0.95) * k.ratio * unclipped(k.ratio, gae(k, g, 0.95), 0.2, 0.2)
            ),
            "a2c": lambda g: n_step(k, g, 5) - k.value,
            "reinforce": lambda g: n_step(k, g, 8) - k.value,
        }[algorithm](gamma)
        assert_same(
            change(algorithm, gamma=gamma).policy,
            gradient(algorithm, weights(algorithm) * advantage),
        )


@number("lambda_", "ppo")
def test_lambda_decays_what_follows(algorithm):
    k = known(algorithm)
    for lambda_ in (1.0, 0.5, 0.0):
        advantage = gae(k, 0.99, lambda_)
        weight = weights(algorithm) * k.ratio * advantage * unclipped(k.ratio, advantage, 0.2, 0.2)
        assert_same(change(algorithm, lambda_=lambda_).policy, gradient(algorithm, weight))


@number("std_epsilon", "grpo")
def test_std_epsilon_is_added_to_the_std_of_the_group(algorithm):
    k = known(algorithm)
    for epsilon in (0.1, 0.5, 1.0):
        advantage = in_group(k, k.score, epsilon)
        weight = weights(algorithm) * k.ratio * advantage * unclipped(k.ratio, advantage, 0.2, 0.2)
        assert_same(change(algorithm, std_epsilon=epsilon).policy, gradient(algorithm, weight))


@number("overlong_factor", "dapo")
def test_the_punishment_of_length_is_its_factor_times_the_share_of_the_cache(algorithm):
    k = known(algorithm)
    for factor in (0.5, 1.0, 2.0):
        reward = k.score.ravel() - factor * np.clip((k.mask.sum(1) - 2) / 6, 0, 1)
        advantage = in_group(k, reward)
        weight = weights(algorithm) * k.ratio * advantage * unclipped(k.ratio, advantage, 0.2, 0.28)
        assert_same(change(algorithm, overlong_factor=factor).policy, gradient(algorithm, weight))


@number("running_decay", "grpo")
def test_earlier_outcomes_keep_that_weight_in_each_iteration(algorithm):
    problem = problem_of(algorithm)

    @jax.jit
    def rewards(decay):
        learner = CASES[algorithm][0].make(
            as_arrays(config_of(algorithm, running_statistics=True, running_decay=decay)), problem
        )
        state = learner.init(jax.random.key(0))
        batches = []
        for key in jax.random.split(jax.random.key(7), 3):
            state, batch = learner.step.sample(state._replace(key=key))
            batches.append((batch.score.reshape(-1), batch.stratum, batch.reward.sum(1)))
        return batches

    for decay in (0.0, 0.5, 1.0):
        seen = [tuple(np.asarray(x, np.float64) for x in batch) for batch in rewards(decay)]
        outcome, stratum, relative = (np.concatenate(x) for x in zip(*seen, strict=True))
        weight = np.repeat(decay ** np.array([2.0, 1.0, 0.0]), len(seen[0][0]))
        varied = 0
        for s in np.unique(seen[2][1]):
            of, last = (weight * (stratum == s)), (seen[2][1] == s)
            mean = of @ outcome / of.sum()
            std = np.sqrt(of @ np.square(outcome - mean) / of.sum())
            want = np.where(std > 0, (seen[2][0][last] - mean) / (std + 1e-6), 0.0)
            np.testing.assert_allclose(relative[-len(last) :][last], want, rtol=1e-3, atol=1e-5)
            varied += std > 0
        assert varied


# Clips.


@number("epsilon_low epsilon_high", "ppo", "grpo", "dapo")
def test_ratios_lose_their_gradient_outside_the_clip(algorithm):
    k = known(algorithm)
    if algorithm == "ppo":
        advantage = gae(k, 0.99, 0.95)
    else:
        shaped = k.score.ravel() - (algorithm == "dapo") * np.clip((k.mask.sum(1) - 2) / 6, 0, 1)
        advantage = in_group(k, shaped)
    kept = []
    for low, high in ((0.05, 0.2), (0.2, 0.2), (0.2, 0.9)):
        inside = unclipped(k.ratio, advantage, low, high)
        kept.append((inside * k.mask).sum())
        weight = weights(algorithm) * k.ratio * advantage * inside
        assert_same(
            change(algorithm, epsilon_low=low, epsilon_high=high).policy,
            gradient(algorithm, weight),
        )
    assert kept[0] < kept[1] < kept[2]


def test_the_value_is_clipped_at_epsilon_high():
    k = known("ppo")
    target = gae(k, 0.99, 0.95) + k.value
    for epsilon in (0.1, 0.6):
        inside = np.abs(k.value_now - k.value) <= epsilon
        bound = k.value + np.clip(k.value_now - k.value, -epsilon, epsilon)
        error = k.value_now - target
        weight = np.where(inside | (np.square(error) >= np.square(bound - target)), -error, 0.0)
        moved = change("ppo", clip_value=True, epsilon_low=0.1, epsilon_high=epsilon)
        assert_same(moved.value, times(0.5, value_gradient("ppo", weights("ppo") * weight)))


@number("epsilon_low epsilon_high", "gspo")
def test_gspo_clips_the_geometric_mean_of_a_sequence(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    ratio = np.exp(
        (k.mask * (k.now - k.old)).sum(1, keepdims=True) / k.mask.sum(1, keepdims=True)
    ) * np.ones_like(k.mask)
    kept = []
    for low, high in ((0.1, 0.26), (0.25, 0.26), (0.25, 0.5)):
        inside = unclipped(ratio, advantage, low, high)
        kept.append((inside * k.mask).sum())
        weight = weights(algorithm) * ratio * advantage * inside
        assert_same(
            change(algorithm, epsilon_low=low, epsilon_high=high).policy,
            gradient(algorithm, weight),
        )
    assert kept[0] < kept[1] < kept[2]


@number("epsilon_low epsilon_high", "cispo")
def test_cispo_clips_the_weight_and_drops_nothing(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    for low, high in ((0.1, 0.2), (0.4, 0.2), (0.4, 0.6)):
        weight = weights(algorithm) * np.clip(k.ratio, 1 - low, 1 + high) * advantage
        assert_same(
            change(algorithm, epsilon_low=low, epsilon_high=high).policy,
            gradient(algorithm, weight),
        )


@number("dual_clip_ratio", "grpo")
def test_a_negative_advantage_admits_that_ratio_at_most(algorithm):
    k = known(algorithm)
    advantage = in_group(k, k.score)
    kept = []
    for most in (1.02, 1.2, 50.0):
        inside = unclipped(k.ratio, advantage, 0.2, 0.2) & ~((advantage < 0) & (k.ratio > most))
        kept.append((inside * k.mask).sum())
        weight = weights(algorithm) * k.ratio * advantage * inside
        assert_same(
            change(algorithm, dual_clip=True, dual_clip_ratio=most).policy,
            gradient(algorithm, weight),
        )
    assert kept[0] < kept[1] < kept[2]


# The length of a step.


def first_step(algorithm, descent, learning_rate, max_grad_norm):
    """Of Adam, or of A2C's RMSProp, along a gradient clipped at a norm."""
    cut = jax.tree.map(
        lambda g: g * min(1.0, max_grad_norm / np.linalg.norm(flat(descent))), descent
    )
    root = 0.1 if algorithm == "a2c" else 1.0
    return jax.tree.map(lambda g: learning_rate * g / (root * jnp.abs(g) + 1e-5), cut)


@number("learning_rate max_grad_norm", "ppo", "a2c", "reinforce", "grpo")
def test_the_default_optimizer_steps_by_its_learning_rate_along_a_gradient_that_is_cut(algorithm):
    descent = change(algorithm)
    joint = algorithm in ("ppo", "a2c")
    descent = descent if joint else descent.policy
    norm = np.linalg.norm(flat(descent))
    for learning_rate, max_grad_norm in (
        (1e-3, 1e3),
        (2e-3, 1e3),
        (2e-3, 2 * norm),
        (2e-3, 1e-5),
        (2e-3, 2e-5),
    ):
        moved = change(
            algorithm, plain=False, learning_rate=learning_rate, max_grad_norm=max_grad_norm
        )
        want = first_step(algorithm, descent, learning_rate, max_grad_norm)
        assert_same(moved if joint else moved.policy, want, 1e-3)


@number("value_learning_rate", "reinforce")
def test_the_critic_steps_by_its_own_learning_rate(algorithm):
    k = known(algorithm)
    up = value_gradient(algorithm, weights(algorithm) * (n_step(k, 0.99, 8) - k.value_now))
    for learning_rate in (1e-3, 2e-3):
        moved = change(algorithm, value_learning_rate=learning_rate)
        assert_same(moved.value, first_step(algorithm, up, learning_rate, np.inf), 1e-3)


# Trust regions.


@functools.cache
def curvature():
    """NPG's Fisher matrix by enumerating actions, and its ascent gradient, in float64."""
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
    """Textbook conjugate gradients, up to a relative residual."""
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
def test_the_natural_step_is_that_of_the_dense_matrix(algorithm):
    for damping, max_kl in ((0.1, 0.01), (0.1, 0.04), (0.2, 0.01), (1.0, 0.01)):
        moved = change(algorithm, damping=damping, max_kl=max_kl).policy
        assert_same(moved, natural(damping, max_kl), 2e-3)


@number("cg_tolerance", "npg")
def test_the_conjugate_gradient_stops_at_that_share_of_the_gradient(algorithm):
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
def test_the_target_is_what_an_early_stop_admits_and_what_the_penalty_aims_at(algorithm):
    """Two full-batch steps: what the first moved decides whether the second is stopped."""
    k = known(algorithm)
    stop = {"early_stop": True, "num_epochs": 2}
    kl = float((weights(algorithm) * (np.expm1(k.now - k.old) - (k.now - k.old))).sum())
    shares = [
        float(outcome(algorithm, target_kl=share * kl, **stop)[1]["updates"])
        for share in (0.98, 1.02)
    ]
    assert shares[0] == 0.0
    assert shares[1] > 0.0
    adapt = {"penalty": "adaptive", "clip": False, "num_epochs": 2, "kl_coefficient": 1.0}
    kl = float(outcome(algorithm, **adapt)[1]["exact_kl"])
    for share, beta in ((0.98 / 1.5, 2.0), (1.02 / 1.5, 1.0), (0.98 * 1.5, 1.0), (1.02 * 1.5, 0.5)):
        assert float(outcome(algorithm, target_kl=share * kl, **adapt)[2]) == beta


@number("reference_target_kl", "ppo")
def test_the_price_of_distance_moves_in_proportion_to_the_error(algorithm):
    k = known(algorithm)
    kl = float((weights(algorithm) * (k.old - k.reference)).sum())
    settings = {"clip": False, "use_reference": True, "adapt_reference_kl": True}
    assert kl > 0
    for error in (-0.5, -0.1, 0.05, 0.1, 0.5):
        beta = float(
            outcome(algorithm, reference_target_kl=kl / (1 + error), beta=0.3, **settings)[2]
        )
        assert beta == pytest.approx(0.3 * (1 + 0.1 * np.clip(error, -0.2, 0.2)), rel=1e-4)


# What is always logged.


@pytest.mark.parametrize("algorithm", CASES)
def test_entropy_clips_and_the_norm_of_the_gradient_are_logged(algorithm):
    k, weight = known(algorithm), weights(algorithm)
    moved, metrics, _ = outcome(algorithm)
    wanted = {
        "entropy": (weight * k.entropy).sum(),
        "frac_masked": 1 - k.mask.mean(),
        "skipped": 0.0,
    }
    natural_steps = algorithm in ("npg", "trpo")
    wanted["grad_norm"] = np.linalg.norm(
        flat(moved if algorithm in ("ppo", "a2c") else moved.policy)
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
    assert ("clip_fraction_high" in metrics) == (
        algorithm not in ("reinforce", "a2c", "npg", "trpo", "rloo")
    )


# Numbers that a method passes to code covered by another method's tests.
HANDED_ON = {
    "reinforce": {"lambda_"},
    "a2c": {"lambda_"},
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
        f.name for f in dataclasses.fields(CASES[algorithm][0].Config) if not f.metadata["static"]
    }
    tested = {field for name, field in TESTED if name == algorithm}
    handed_on = numbers & HANDED_ON.get(algorithm, set())
    assert tested | handed_on == numbers
    assert not tested & handed_on
