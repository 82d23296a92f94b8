"""Takes one step of gradient descent with any method, and computes the weights of its terms in
NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fields import CASES
from fields import IN_GROUPS as GROUPS
from probes import imprecise, tabular_problem, taught

from jaxrl_po.algorithms.reference import COEFFICIENT
from jaxrl_po.config import as_arrays
from jaxrl_po.types import ActorCritic

WITH_CRITIC = tabular_problem(num_prompts=8, num_steps=8)
IN_GROUPS = taught(imprecise(tabular_problem(num_prompts=4, group_size=4, dense=False)))
# Each method has one program: numbers that the tests set are traced, and these settings are static.
ONE_STEP = {"num_epochs": 1, "num_minibatches": 1}
FIT = {"value_epochs": 1, "value_minibatches": 1, "normalize_advantage": False}
BASE = {
    "ppo": ONE_STEP | {"normalize_advantage": False},
    "ppo_penalty": ONE_STEP | {"normalize_advantage": False, "kl_coefficient": 0.0},
    "ppo_reference": ONE_STEP | {"normalize_advantage": False, "reference_kl_coefficient": 0.0},
    "a2c": {"entropy_coefficient": 0.0},
    "reinforce": FIT,
    "npg": FIT | {"cg_iterations": 60, "cg_tolerance": 1e-6},
    "trpo": FIT,
    **{name: ONE_STEP | {"use_reference": True, "kl_coefficient": 0.0} for name in GROUPS},
}
BASE["pkpo"] |= {"k": 2}
BASE["dapo"] |= {"dynamic_sampling": "off", "overlong_filtering": False, "overlong_cache": 6}
PPO = ("ppo", "ppo_penalty", "ppo_reference")
TESTED: set[tuple[str, str]] = set()


def number(fields, *algorithms):
    """Parametrises a test over methods and records which of the methods' fields it covers."""
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
    """Returns parameters to improve, reference parameters, and a batch that other parameters
    sampled."""
    old, collector = problem.init(jax.random.key(0))
    # the ratios exceed both bounds of every clip
    key = jax.random.key(24 if problem is IN_GROUPS else 1)
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
        after, metrics = learner.update(state, batch)
        return (
            jax.tree.map(jnp.subtract, after.params, params),
            {k: m.value() for k, m in metrics.items()},
            after.collector.replicated.get(COEFFICIENT, after.kl_coefficient),
        )

    return update


def outcome(algorithm, *, plain=True, step=0, beta=-1.0, **changes):
    """Returns the change of the parameters, the metrics, and β after one update."""
    config = config_of(algorithm, **changes)
    config.validate()
    batch = situation(problem_of(algorithm))[2]
    update = program(algorithm, jax.tree.structure(config), plain)
    return update(as_arrays(config), batch, jnp.int32(step), jnp.float32(beta))


def change(algorithm, **changes):
    return outcome(algorithm, **changes)[0]


def flat(tree):
    return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(tree)])


def assert_same(got, want, tolerance=1e-4):
    got, want = flat(got), flat(want)
    assert np.linalg.norm(want) > 1e-4
    assert np.linalg.norm(got - want) <= tolerance * np.linalg.norm(want)


def assert_moves(algorithm, weight, **settings):
    """Asserts that a step with these settings is the gradient with that weight on every sample."""
    want = gradient(algorithm, weights(algorithm) * weight)
    assert_same(change(algorithm, **settings).policy, want)


def times(scale, tree):
    return jax.tree.map(lambda x: scale * x, tree)


def minus(a, b):
    return jax.tree.map(jnp.subtract, a, b)


# Building blocks of the expected gradients.


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
    """Computes the gradient `∇ Σ w x` for the policy.

    The symbol x is log π of the action, the entropy, or KL(`frm` ‖ policy).
    """
    params, reference, batch = situation(problem_of(algorithm))
    policy, frm = params.policy if at is None else at, reference if frm is None else frm
    return _gradients(problem_of(algorithm), policy, frm, batch, jnp.asarray(weight, jnp.float32))[
        of
    ]


def value_gradient(algorithm, weight):
    """Computes the gradient `∇ Σ w v` over the parameters of the critic."""
    problem = problem_of(algorithm)
    params, _, batch = situation(problem)
    weight = jnp.asarray(weight, jnp.float32)
    return jax.grad(
        lambda v: jnp.sum(weight * problem.apply(params._replace(value=v), batch.inputs)[1])
    )(params.value)


@functools.cache
def arrays(problem):
    """Returns the batch in NumPy, with values and with current and reference log-probabilities."""
    params, reference, batch = situation(problem)
    distribution, value = problem.apply(params, batch.inputs)
    names = ("reward", "value", "next_value", "terminated", "truncated", "mask", "score")
    known = {name: np.asarray(getattr(batch, name), np.float64) for name in names}
    for name, x in batch.columns.items():
        known[name.removesuffix("_log_prob")] = np.asarray(x, np.float64)
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
    """Computes a step's weight in the mean: equal for all steps, equal for all rows, or divided by
    a constant."""
    mask = known(algorithm).mask
    if algorithm in ("grpo", "gspo", "sapo", "gmpo"):
        return mask / mask.sum(1, keepdims=True) / len(mask)
    if algorithm == "dr_grpo":
        return mask / mask.size
    return mask / (len(mask) if algorithm in ("rloo", "pkpo") else mask.sum())


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
    """Computes `(R − mean) / (std + ε)` within each group, for every step."""
    groups = outcome.reshape(k.score.shape)
    relative = (groups - groups.mean(1, keepdims=True)) / (groups.std(1, keepdims=True) + epsilon)
    return np.broadcast_to(relative.reshape(-1, 1), k.mask.shape)


def unclipped(ratio, advantage, low, high):
    """Returns 1 where the clipped surrogate has a gradient, and 0 elsewhere."""
    return ~(((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low)))


def whitened(x, mask):
    inside = x[mask > 0]
    return mask * (x - inside.mean()) / (inside.std() + 1e-8)
