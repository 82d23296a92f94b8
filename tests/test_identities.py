"""Tests exact identities of policy optimisation on random MDPs, in float64, with the library's
functions.

Each identity is stated for one MDP and checked on several MDPs at once.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tabular import (
    action_value,
    advantage,
    fisher,
    occupancy,
    performance,
    policy_gradient,
    random_mdps,
    state_transition,
    under,
    value,
)

from jaxrl_po import advantages, divergences, losses, trust_region
from jaxrl_po.distributions import Categorical

NUM_MDPS = 16
EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture(autouse=True)
def double_precision():
    with jax.enable_x64(True):
        yield


def on_random_mdps(identity):
    """Runs `identity(mdp, logits, other_logits)` on random MDPs; an identity returns two equal
    trees."""

    @functools.wraps(identity)
    def test():
        rng = np.random.default_rng(0)
        mdps, logits = random_mdps(rng, NUM_MDPS), rng.normal(size=(2, NUM_MDPS, 4, 3))
        left, right = jax.jit(jax.vmap(identity))(mdps, *logits)
        assert left.dtype == jnp.float64
        assert float(jnp.abs(left).max()) > 1e-3
        np.testing.assert_allclose(left, right, **EXACT)

    del test.__wrapped__  # pytest would treat the identity's arguments as fixtures
    return test


def log_softmax_at(logits):
    """Returns log-probabilities `[S, A]` of all actions and states, from the library."""
    return Categorical(logits).log_probs()


@on_random_mdps
def test_occupancy_is_the_discounted_visit_count(mdp, logits, other_logits):
    policy = jax.nn.softmax(logits)

    def visit(states, t):
        return states @ state_transition(mdp, policy), mdp.gamma**t * states

    # 0.8^200 is 4e-20.
    return occupancy(mdp, policy), jax.lax.scan(visit, mdp.initial, jnp.arange(200.0))[1].sum(0)


# 1
@on_random_mdps
def test_performance_difference(mdp, logits, other_logits):
    old, new = jax.nn.softmax(logits), jax.nn.softmax(other_logits)
    gain = occupancy(mdp, new) @ under(new, advantage(mdp, old))
    return performance(mdp, new) - performance(mdp, old), gain


# 2
@on_random_mdps
def test_softmax_policy_gradient(mdp, logits, other_logits):
    policy = jax.nn.softmax(logits)
    return policy_gradient(mdp, logits), occupancy(mdp, policy)[:, None] * policy * advantage(
        mdp, policy
    )


@on_random_mdps
def test_policy_loss_is_negative_gradient_with_any_baseline(mdp, logits, other_logits):
    policy = jax.nn.softmax(logits)
    weights = occupancy(mdp, policy)[:, None] * policy

    def loss(logits, baselined):
        return jnp.sum(weights * losses.policy_gradient(log_softmax_at(logits), baselined))

    gradients = [
        jax.grad(loss)(logits, x) for x in (advantage(mdp, policy), action_value(mdp, policy))
    ]
    return jnp.stack(gradients), -jnp.stack([policy_gradient(mdp, logits)] * 2)


# 3
@on_random_mdps
def test_surrogate_equals_performance_to_first_order(mdp, logits, other_logits):
    policy = jax.nn.softmax(logits)
    weights = occupancy(mdp, policy)[:, None] * policy
    old_log_prob = log_softmax_at(logits)

    def surrogate(new_logits):
        elements = losses.surrogate(
            log_softmax_at(new_logits), old_log_prob, advantage(mdp, policy)
        )
        return performance(mdp, policy) - jnp.sum(weights * elements)

    level, gradient = jax.value_and_grad(surrogate)(logits)
    exact = jnp.append(policy_gradient(mdp, logits), performance(mdp, policy))
    return jnp.append(gradient, level), exact


@on_random_mdps
def test_surrogate_weighs_by_the_ratio_elsewhere(mdp, logits, other_logits):
    old, new = jax.nn.softmax(logits), jax.nn.softmax(other_logits)
    elements = losses.surrogate(
        log_softmax_at(other_logits), log_softmax_at(logits), advantage(mdp, old)
    )
    occupied = occupancy(mdp, old)
    return occupied @ under(old, -elements), occupied @ under(new, advantage(mdp, old))


# 4
@on_random_mdps
def test_hessians_of_both_kls_are_the_fisher_matrix(mdp, logits, other_logits):
    occupied = occupancy(mdp, jax.nn.softmax(logits))
    old = Categorical(logits)
    forward = jax.hessian(lambda new: occupied @ old.kl(Categorical(new)))(logits)
    backward = jax.hessian(lambda new: occupied @ Categorical(new).kl(old))(logits)
    dense = fisher(occupied, logits).reshape(forward.shape)
    return jnp.stack([forward, backward]), jnp.stack([dense, dense])


@on_random_mdps
def test_fisher_vector_product_equals_the_dense_fisher(mdp, logits, vector):
    occupied = occupancy(mdp, jax.nn.softmax(logits))
    old = Categorical(logits)
    product = trust_region.fisher_vector_product(
        lambda new: occupied @ old.kl(Categorical(new)), logits, vector, damping=0.1
    )
    return product.ravel(), fisher(occupied, logits) @ vector.ravel() + 0.1 * vector.ravel()


# 5
@on_random_mdps
def test_compatible_approximation(mdp, logits, other_logits):
    """The least-squares fit of A by the scores is the natural gradient, with F under d = (1 − γ)
    ρ."""
    policy = jax.nn.softmax(logits)
    visits = (1 - mdp.gamma) * occupancy(mdp, policy)
    scores = jax.jacobian(log_softmax_at)(logits).reshape(12, 12)
    root = jnp.sqrt(visits[:, None] * policy).ravel()
    fit = jnp.linalg.pinv(root[:, None] * scores, rtol=1e-10) @ (
        root * advantage(mdp, policy).ravel()
    )
    natural = (
        jnp.linalg.pinv(fisher(visits, logits), rtol=1e-10) @ policy_gradient(mdp, logits).ravel()
    )
    return fit, (1 - mdp.gamma) * natural


# 6
@on_random_mdps
def test_natural_gradient_is_the_advantage(mdp, logits, other_logits):
    """Natural gradient and advantage are equal up to a constant in each state, which the softmax
    ignores."""
    policy = jax.nn.softmax(logits)
    visits = (1 - mdp.gamma) * occupancy(mdp, policy)
    old = Categorical(logits)

    def matvec(vector):
        return trust_region.fisher_vector_product(
            lambda new: visits @ old.kl(Categorical(new)), logits, vector
        )

    direction, _ = trust_region.conjugate_gradient(
        matvec, policy_gradient(mdp, logits), iterations=60, tolerance=1e-14
    )
    return direction - under(policy, direction)[:, None], advantage(mdp, policy) / (1 - mdp.gamma)


def on_many_mdps(bound, num_mdps=512, gamma=0.8):
    rng = np.random.default_rng(1)
    mdps, (logits, change) = (
        random_mdps(rng, num_mdps, gamma=gamma),
        rng.normal(size=(2, num_mdps, 4, 3)),
    )
    others = logits + 3.0 * rng.random((num_mdps, 1, 1)) * change
    return np.asarray(jax.jit(jax.vmap(bound))(mdps, logits, others))


def expected_surrogate(mdp, old, new):
    return performance(mdp, old) + occupancy(mdp, old) @ under(new, advantage(mdp, old))


# 7
def test_trpo_bound():
    """The bound is J(π') ≥ L − C · KL_max with C = 4εγ / (1 − γ)², ε = max |A|; L alone is not a
    bound."""

    def slack(mdp, logits, other_logits):
        old, new = jax.nn.softmax(logits), jax.nn.softmax(other_logits)
        divergence = Categorical(logits).kl(Categorical(other_logits)).max()
        penalty = (
            4 * jnp.abs(advantage(mdp, old)).max() * mdp.gamma / (1 - mdp.gamma) ** 2 * divergence
        )
        gap = performance(mdp, new) - expected_surrogate(mdp, old, new)
        return gap + penalty, gap

    with_penalty, without = on_many_mdps(lambda *args: jnp.stack(slack(*args))).T
    assert with_penalty.min() >= -1e-10
    assert without.min() < -1e-2


# 8
def test_mixture_bound():
    """The bound is J ≥ L − 2εγα² / (1 − γ)² with ε = max_s |E_{a ~ π⋆} A| of the *target* π⋆ of the
    mixture."""

    def slacks(mdp, logits, other_logits):
        old, target = jax.nn.softmax(logits), jax.nn.softmax(other_logits)

        def slack(alpha):
            mixture = (1 - alpha) * old + alpha * target
            gap = performance(mdp, mixture) - expected_surrogate(mdp, old, mixture)
            factor = 2 * mdp.gamma * alpha**2 / (1 - mdp.gamma) ** 2
            epsilons = [
                jnp.abs(under(policy, advantage(mdp, old))).max() for policy in (target, mixture)
            ]
            return jnp.stack([gap + factor * epsilon for epsilon in epsilons])

        return jax.vmap(slack)(jnp.array([0.01, 0.1, 0.5, 1.0]))

    for gamma in (0.5, 0.8):
        slack = on_many_mdps(slacks, gamma=gamma)
        assert slack[..., 0].min() >= -1e-10
        # The lecture note's ε, computed for the mixture itself, is α times as large: with that ε
        # the bound fails.
        assert slack[:, 0, 1].min() < -1e-9


# 9
def test_cpo_bound():
    """The bound is |J' − L| ≤ 2γε' / (1 − γ)² · E_{d_π}[TV], ε' = max_s |E_{a ~ π'} A|."""

    def slack(mdp, logits, other_logits):
        old, new = jax.nn.softmax(logits), jax.nn.softmax(other_logits)
        variation = 0.5 * jnp.abs(new - old).sum(1)
        epsilon = jnp.abs(under(new, advantage(mdp, old))).max()
        distance = (1 - mdp.gamma) * occupancy(mdp, old) @ variation
        gap = performance(mdp, new) - expected_surrogate(mdp, old, new)
        bound = 2 * mdp.gamma * epsilon / (1 - mdp.gamma) ** 2 * distance
        return jnp.stack([bound - jnp.abs(gap), jnp.abs(gap) / bound])

    slacks, tightness = on_many_mdps(slack).T
    assert slacks.min() >= -1e-10
    assert tightness.max() > 0.05


# 9b
def test_the_exact_gradient_weighs_states_by_the_discount():
    """In practice, and in this library, all visited states have equal weight; the exact ∇J has
    weights γᵗ."""

    def gradients(mdp, logits, other_logits):
        policy = jax.nn.softmax(logits)

        def visit(states, t):
            return states @ state_transition(mdp, policy), jnp.stack(
                [mdp.gamma**t * states, states]
            )

        visits = jax.lax.scan(visit, mdp.initial, jnp.arange(200.0))[1].sum(0)

        def loss(logits, visits):
            return visits @ under(
                policy, losses.policy_gradient(log_softmax_at(logits), advantage(mdp, policy))
            )

        discounted, plain = (jax.grad(loss)(logits, x) for x in visits)
        cosine = jnp.sum(discounted * plain) / jnp.sqrt(jnp.sum(discounted**2) * jnp.sum(plain**2))
        return jnp.append(discounted + policy_gradient(mdp, logits), cosine)

    *error, cosine = on_many_mdps(gradients, NUM_MDPS).T
    np.testing.assert_allclose(error, 0.0, atol=1e-10)
    assert cosine.min() < 0.999


# 10
GAMMA, LENGTH = 0.9, 7
N_STEP = jax.jit(
    lambda *args: jnp.stack(
        [advantages.n_step_returns(*args, gamma=GAMMA, n=n) for n in range(1, LENGTH + 1)]
    )
)


GAE = jax.jit(functools.partial(advantages.gae, gamma=GAMMA))


def random_stream(ends):
    rng = np.random.default_rng(0)
    reward, state_value, final_value = (jnp.asarray(rng.normal(size=LENGTH)) for _ in range(3))
    terminated, truncated = (jnp.isin(jnp.arange(LENGTH), jnp.array(at, int)) for at in ends)
    following = jnp.append(state_value[1:], final_value[-1])
    return (
        reward,
        state_value,
        jnp.where(terminated | truncated, final_value, following),
        terminated,
        truncated,
    )


@pytest.mark.parametrize("ends", [([], []), ([2], []), ([], [2]), ([4], [1, 4])])
def test_gae_is_the_mixture_of_n_step_advantages(ends):
    """GAE is (1 − λ) Σ_n λ^{n−1} Â⁽ⁿ⁾, with weight λ^{K−1} for the last of the K remaining steps.

    The number K counts the steps to the end of the episode or the segment.
    """
    reward, state_value, next_value, terminated, truncated = random_stream(ends)
    returns = N_STEP(reward, next_value, terminated, truncated)
    n_step = np.asarray(returns) - np.asarray(state_value)
    cuts = np.flatnonzero(np.asarray(terminated | truncated))
    for lambda_ in (0.0, 0.3, 0.95, 1.0):
        got = GAE(reward, state_value, next_value, terminated, truncated, lambda_=lambda_).tolist()
        for t in range(LENGTH):
            steps = min([c for c in cuts if c >= t], default=LENGTH - 1) - t + 1
            weights = [(1 - lambda_) * lambda_**k for k in range(steps - 1)] + [
                lambda_ ** (steps - 1)
            ]
            assert got[t] == pytest.approx(np.dot(weights, n_step[:steps, t]), rel=1e-10)


@pytest.mark.parametrize("ends", [([], []), ([2], []), ([], [2]), ([4], [1, 4])])
def test_gae_at_both_ends_of_lambda(ends):
    reward, state_value, next_value, terminated, truncated = random_stream(ends)
    zero, one = (
        GAE(reward, state_value, next_value, terminated, truncated, lambda_=lambda_)
        for lambda_ in (0.0, 1.0)
    )
    delta = reward + GAMMA * (1 - terminated) * next_value - state_value
    monte_carlo = advantages.discounted_returns(
        reward, next_value, terminated, truncated, gamma=GAMMA
    )
    np.testing.assert_allclose(zero, delta, **EXACT)
    np.testing.assert_allclose(one + state_value, monte_carlo, **EXACT)


def test_gae_with_exact_values_is_always_unbiased():
    """E[Â_t | s, a] is A(s, a) for V = V_π, enumerated over all paths of three steps."""
    mdp = jax.tree.map(
        lambda x: x[0], random_mdps(np.random.default_rng(3), 1, num_states=2, num_actions=2)
    )
    policy = jax.nn.softmax(jnp.array([[0.3, -0.4], [1.0, 0.2]]))
    state_values, exact = np.asarray(value(mdp, policy)), np.asarray(advantage(mdp, policy))
    paths = np.array(list(itertools.product(range(2), repeat=6)))  # a₀ s₁ a₁ s₂ a₂ s₃, from s₀ = 0
    states = np.concatenate([np.zeros((len(paths), 1), int), paths[:, 1::2]], axis=1)
    actions = paths[:, 0::2]
    reward = np.asarray(mdp.reward)[states[:, :-1], actions]
    probability = np.prod(
        np.asarray(mdp.transition)[states[:, :-1], actions, states[:, 1:]], axis=1
    )
    probability *= np.prod(np.asarray(policy)[states[:, 1:-1], actions[:, 1:]], axis=1)
    off = jnp.zeros((len(paths), 3), bool)

    @jax.jit
    def estimate(lambda_, *streams):
        return jax.vmap(lambda *of: advantages.gae(*of, gamma=mdp.gamma, lambda_=lambda_))(*streams)

    before, after = state_values[states[:, :-1]], state_values[states[:, 1:]]
    for lambda_ in (0.0, 0.7, 1.0):
        first = np.asarray(estimate(lambda_, reward, before, after, off, off))[:, 0]
        means = [np.sum((probability * first)[actions[:, 0] == a]) for a in range(2)]
        np.testing.assert_allclose(means, exact[0], **EXACT)


# 11
@on_random_mdps
def test_expected_k1_and_k3_are_the_kl(mdp, logits, reference_logits):
    log_prob, reference = log_softmax_at(logits), log_softmax_at(reference_logits)
    policy = jnp.exp(log_prob)
    estimates = jnp.stack(
        [under(policy, k(log_prob, reference)) for k in (divergences.k1, divergences.k3)]
    )
    exact = Categorical(logits).kl(Categorical(reference_logits))
    return estimates, jnp.stack([exact, exact])


@functools.partial(jax.jit, static_argnums=0)
def sampled_gradient(k, logits, reference_logits):
    """Computes the expected gradient of an estimator as a loss, with constant sample weights."""
    policy = jax.nn.softmax(logits)
    return jax.grad(
        lambda x: jnp.sum(policy * k(log_softmax_at(x), log_softmax_at(reference_logits)))
    )(logits)


@on_random_mdps
def test_expected_k2_gradient_equals_kl_gradient(mdp, logits, reference_logits):
    exact = jax.grad(lambda x: Categorical(x).kl(Categorical(reference_logits)).sum())(logits)
    return sampled_gradient(divergences.k2, logits, reference_logits), exact


@on_random_mdps
def test_expected_k3_gradient_equals_reversed_kl_gradient(mdp, logits, reference_logits):
    exact = jax.grad(lambda x: Categorical(reference_logits).kl(Categorical(x)).sum())(logits)
    return sampled_gradient(divergences.k3, logits, reference_logits), exact


def test_expected_k1_gradient_is_zero_and_k2_biased():
    logits, reference_logits = jnp.asarray(np.random.default_rng(0).normal(size=(2, 4, 3)))
    np.testing.assert_allclose(
        sampled_gradient(divergences.k1, logits, reference_logits), np.zeros((4, 3)), atol=1e-12
    )
    estimate = under(
        jax.nn.softmax(logits),
        divergences.k2(log_softmax_at(logits), log_softmax_at(reference_logits)),
    )
    exact = Categorical(logits).kl(Categorical(reference_logits))
    assert float(jnp.abs(estimate - exact).max()) > 1e-2
