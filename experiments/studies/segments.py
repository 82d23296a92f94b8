"""Samples segments of a tabular MDP, and computes all advantage estimates under several critics."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tabular
from tabular import MDP

from jaxrl_po import advantages, losses
from jaxrl_po.distributions import Categorical

Array = np.ndarray[Any, Any]

GROUPS = 16  # number of groups of segments, for jackknife standard errors


class Grid(NamedTuple):
    """Grid of estimators in this order: Monte Carlo, A3C(k), GAE(λ).

    All estimators are Σ_l cˡ δ_{t+l} over n steps or to the segment's end.

    Attributes:
      num_steps: T, steps of a segment.
      ks: values of k in A3C(k), which is the n-step estimator with n = k + 1.
      lambdas: values of λ in GAE.
    """

    num_steps: int
    ks: tuple[int, ...]
    lambdas: tuple[float, ...]

    def names(self) -> list[str]:
        """Returns the names of the estimators, `[E]`."""
        return [
            "MC",
            *(f"A3C({k})" for k in self.ks),
            *(f"GAE({lambda_:g})" for lambda_ in self.lambdas),
        ]

    def mixtures(self) -> Array:
        """Value of λ for each estimator, so that c = γλ, `[E]`."""
        return np.array([*(1.0 for _ in range(1 + len(self.ks))), *self.lambdas])

    def horizons(self) -> Array:
        """Value of n for each estimator, `[E]`."""
        return np.array(
            [self.num_steps, *(k + 1 for k in self.ks), *(self.num_steps for _ in self.lambdas)]
        )


class Setting(NamedTuple):
    """Policy in an MDP, with their exact quantities.

    Attributes:
      mdp: MDP whose first state is drawn from the stationary distribution.
      logits: `[S, A]`, logits of the policy.
      policy: `[S, A]`, probabilities of the policy.
      value: `[S]`, exact state values V.
      advantage: `[S, A]`, exact advantages A.
      gradient: `[S, A]`, exact policy gradient (1 − γ) ∇J.
      critics: `[C, S]`, values of each critic, in the order of `CRITICS`.
    """

    mdp: MDP
    logits: jax.Array
    policy: jax.Array
    value: jax.Array
    advantage: jax.Array
    gradient: jax.Array
    critics: jax.Array


@jax.jit
def solve(mdp: MDP, logits: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes V `[S]`, A `[S, A]` and (1 − γ) ∇J `[S, A]` of the softmax policy."""
    policy = jax.nn.softmax(logits)
    gradient = (1 - mdp.gamma) * tabular.policy_gradient(mdp, logits)
    return tabular.value(mdp, policy), tabular.advantage(mdp, policy), gradient


def stationary_distribution(transition: Array) -> Array:
    """Computes `d = d P`, `[S]`, for a chain `[S, S]` that has a stationary distribution."""
    size = len(transition)
    equations = np.vstack([transition.T - np.eye(size), np.ones(size)])
    return np.linalg.lstsq(equations, np.eye(size + 1)[-1], rcond=None)[0]


class Sums(NamedTuple):
    """Sums over all segments of a group; a cell is a position, a state and an action.

    Attributes:
      visits: `[T, S·A]`, number of visits to each cell.
      error: `[C, E, T, S·A]`, sums of Â − A.
      square: `[C, E, T, S·A]`, sums of (Â − A)².
      gradient: `[C, E, S·A]`, sums of the segments' policy gradients.
      gradient_square: `[C, E]`, sums of the squared norms of the segments' gradients.
    """

    visits: Any
    error: Any
    square: Any
    gradient: Any
    gradient_square: Any


def sample(
    mdp: MDP, logits: jax.Array, num_steps: int, key: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Samples states, actions and next states of one segment, each `[T]`; consumes `key`."""

    def step(
        state: jax.Array, key: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        action_key, state_key = jax.random.split(key)
        action = Categorical(logits[state]).sample(action_key)
        following = Categorical(jnp.log(mdp.transition[state, action])).sample(state_key)
        return following, (state, action, following)

    first_key, key = jax.random.split(key)
    first = Categorical(jnp.log(mdp.initial)).sample(first_key)
    return jax.lax.scan(step, first, jax.random.split(key, num_steps))[1]


def estimates(
    reward: jax.Array, value: jax.Array, next_value: jax.Array, gamma: jax.Array, grid: Grid
) -> jax.Array:
    """Computes the advantages Â of one segment by every estimator, `[E, T]`."""
    off = jnp.zeros(reward.shape, bool)
    stream = reward, next_value, off, off
    returns = [
        advantages.discounted_returns(*stream, gamma=gamma),
        *(advantages.n_step_returns(*stream, gamma=gamma, n=k + 1) for k in grid.ks),
    ]
    generalised = jax.vmap(
        lambda lambda_: advantages.gae(
            reward, value, next_value, off, off, gamma=gamma, lambda_=lambda_
        ),
    )(jnp.array(grid.lambdas))
    return jnp.concatenate([jnp.stack(returns) - value[None, :], generalised])


@functools.partial(jax.jit, static_argnames=("grid", "num_samples"))
def measure(setting: Setting, key: jax.Array, *, grid: Grid, num_samples: int) -> Sums:
    """Samples segments and sums the errors of every estimator under every critic.

    Args:
      setting: MDP, policy and critics.
      key: PRNG key, consumed.
      grid: estimators to compare.
      num_samples: number of segments, a multiple of `GROUPS`.

    Returns:
      Sums of each group of segments, leaves `[GROUPS, …]`.
    """
    mdp, logits = setting.mdp, setting.logits

    def gradient(state: jax.Array, action: jax.Array, advantage: jax.Array) -> jax.Array:
        def loss(logits: jax.Array) -> jax.Array:
            return losses.policy_gradient(
                Categorical(logits[state]).log_prob(action), advantage
            ).mean()

        return -jax.grad(loss)(logits).ravel()

    def group(key: jax.Array) -> Sums:
        keys = jax.random.split(key, num_samples // GROUPS)
        state, action, following = jax.vmap(lambda key: sample(mdp, logits, grid.num_steps, key))(
            keys
        )
        reward, advantage = mdp.reward[state, action], setting.advantage[state, action]
        cell = jax.nn.one_hot(state * logits.shape[1] + action, logits.size, dtype=reward.dtype)

        def under(critic: jax.Array) -> tuple[jax.Array, ...]:
            made = jax.vmap(estimates, in_axes=(0, 0, 0, None, None))(
                reward, critic[state], critic[following], mdp.gamma, grid
            )
            error = made - advantage[:, None, :]
            gradients = jax.vmap(jax.vmap(gradient, in_axes=(None, None, 0)))(state, action, made)
            return (
                jnp.einsum("net,ntc->etc", error, cell),
                jnp.einsum("net,ntc->etc", jnp.square(error), cell),
                gradients.sum(0),
                jnp.square(gradients).sum((0, 2)),
            )

        return Sums(cell.sum(0), *jax.lax.map(under, setting.critics))

    return jax.lax.map(group, jax.random.split(key, GROUPS))


def total(sums: Sums) -> Sums:
    """Adds the sums of all groups."""
    return Sums(*(x.sum(0) for x in sums))
