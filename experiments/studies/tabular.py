"""Random tabular MDPs whose values, occupancies and gradients are exact to rounding."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class MDP(NamedTuple):
    """Markov decision process with states `S` and actions `A`, without terminal states.

    Attributes:
      transition: `[S, A, S]`, P(s' | s, a).
      reward: `[S, A]`, expected reward.
      initial: `[S]`, distribution of the first state.
      gamma: `[]`, discount, at most 0.999.
    """

    transition: jax.Array
    reward: jax.Array
    initial: jax.Array
    gamma: jax.Array


def random_mdps(
    rng: np.random.Generator,
    count: int,
    num_states: int = 4,
    num_actions: int = 3,
    gamma: float = 0.8,
) -> MDP:
    """Draws a stack of MDPs, leaves `[count, …]`, by NumPy, which needs no compilation."""
    transition = np.square(rng.normal(size=(count, num_states, num_actions, num_states)))
    initial = np.square(rng.normal(size=(count, num_states)))
    return MDP(
        jnp.asarray(transition / transition.sum(-1, keepdims=True)),
        jnp.asarray(rng.normal(size=(count, num_states, num_actions))),
        jnp.asarray(initial / initial.sum(-1, keepdims=True)),
        jnp.full(count, gamma),
    )


def under(policy: jax.Array, x: jax.Array) -> jax.Array:
    """Computes `E_{a ~ policy}[x(s, a)]`, `[S]`."""
    return jnp.sum(policy * x, axis=1)


def state_transition(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `P_π(s' | s)`, `[S, S]`."""
    return jnp.einsum("sa,sat->st", policy, mdp.transition)


def resolvent(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `(I − γ P_π)⁻¹ = Π_k (I + (γ P_π)^(2ᵏ))`, `[S, S]`.

    The product is exact once γ^(2ᵏ) underflows, and compiles far more quickly than a solve.
    """
    eye = jnp.eye(len(mdp.initial))
    power, product = mdp.gamma * state_transition(mdp, policy), eye
    for _ in range(16):  # 0.999^(2¹⁶) is 3e-29
        power, product = power @ power, product @ (eye + power)
    return product


def value(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `V = (I − γ P_π)⁻¹ r_π`, `[S]`."""
    return resolvent(mdp, policy) @ under(policy, mdp.reward)


def action_value(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `Q(s, a)`, `[S, A]`."""
    return mdp.reward + mdp.gamma * mdp.transition @ value(mdp, policy)


def advantage(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `A(s, a) = Q(s, a) − V(s)`, `[S, A]`."""
    return action_value(mdp, policy) - value(mdp, policy)[:, None]


def occupancy(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes the unnormalised `ρ(s) = Σ_t γᵗ P(S_t = s)`, `[S]`, whose sum is 1 / (1 − γ)."""
    return mdp.initial @ resolvent(mdp, policy)


def performance(mdp: MDP, policy: jax.Array) -> jax.Array:
    """Computes `J = Σ_s μ(s) V(s)`."""
    return mdp.initial @ value(mdp, policy)


def policy_gradient(mdp: MDP, logits: jax.Array) -> jax.Array:
    """Computes `∇_θ J` of the softmax policy, `[S, A]`, by differentiating the solve."""
    return jax.grad(lambda logits: performance(mdp, jax.nn.softmax(logits)))(logits)


def fisher(weights: jax.Array, logits: jax.Array) -> jax.Array:
    """Computes `Σ_s w(s) E_a[∇log π ∇log πᵀ]`, dense `[S·A, S·A]`, by enumeration."""
    policy = jax.nn.softmax(logits)
    scores = jax.jacobian(jax.nn.log_softmax)(logits).reshape(*logits.shape, -1)
    return jnp.einsum("s,sa,sai,saj->ij", weights, policy, scores, scores)
