"""Tests step sizes over iterations; parameters as one flat vector or as one leaf each."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from probes import tabular_problem

from jaxrl_po import optimizers
from jaxrl_po.algorithms import a2c, distillation, grpo, ppo, ppo_penalty, reinforce, sft


def shapes_of_state(optimizer, params):
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(optimizer.init, params))]


def test_flat_adam_equals_leafwise_adam():
    params = {"a": jnp.ones((2, 3)), "b": jnp.full(4, 2.0)}
    gradient = jax.tree.map(lambda x: 3.0 * x, params)
    flat = optimizers.adam(0.1, max_grad_norm=0.5)
    leafwise = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1, eps=1e-5))

    def updated(optimizer):
        return jax.jit(lambda: optimizer.update(gradient, optimizer.init(params), params)[0])()

    got = updated(flat)
    large = optimizers.adam(0.1, max_grad_norm=0.5, flat_up_to=9)  # the problem has ten parameters
    assert shapes_of_state(flat, params) == [(), (10,), (10,)]
    assert shapes_of_state(large, params) == [(), (2, 3), (4,), (2, 3), (4,)]
    chex.assert_trees_all_close(got, updated(large), rtol=1e-6)
    chex.assert_trees_all_close(got, updated(leafwise), rtol=1e-5)


@pytest.mark.parametrize(("more", "arrays"), [(0, 3), (1, 5)])
def test_state_is_one_vector_up_to_limit(more, arrays):
    """Stored runs have this layout: a count and two moments, vectors up to 2²⁰ parameters."""
    params = [jax.ShapeDtypeStruct((2**19 + n,), jnp.float32) for n in (0, more)]
    assert len(shapes_of_state(optimizers.adam(0.1, max_grad_norm=0.5), params)) == arrays


MANY = {"num_epochs": 2, "num_minibatches": 2}
# Methods, with their gradient steps per iteration.
STEPPING = {a2c: 1, ppo: 4, ppo_penalty: 4, reinforce: 1, grpo: 4, sft: 4, distillation: 4}


def factor(step, schedule):
    """Computes the factor of an iteration's updates, over a warm-up of 4 and a decay of 8
    iterations."""
    done = min(step / 8, 1.0)
    decay = 0.5 * (1.0 + np.cos(np.pi * done)) if schedule == "cosine" else 1.0 - done
    return decay * min(1.0, (step + 1) / 4)


def always_one():
    """Builds an optimizer that proposes 1 for each parameter: a step then shows its scale."""
    return optax.GradientTransformation(
        lambda params: (), lambda g, s, p=None: (jax.tree.map(jnp.ones_like, g), s)
    )


def moved(module, config, steps, optimizer):
    """Returns how far the policy's parameters move in one iteration that starts at each step."""
    problem = tabular_problem(num_prompts=4, group_size=1 if module in CRITICS else 4)
    if module is distillation:
        problem = with_constant_teacher(problem)
    learner = module.make(config, problem, optimizer=optimizer)
    state = learner.init(jax.random.key(0))
    step = jax.jit(learner.step)
    found = []
    for k in steps:
        after, metrics = step(state._replace(step=jnp.int32(k)))
        pairs = zip(*(jax.tree.leaves(s.params.policy) for s in (after, state)), strict=True)
        found.append([np.asarray(new - old) for new, old in pairs])
    return found, metrics


CRITICS = (a2c, ppo, ppo_penalty, reinforce)


def with_constant_teacher(problem):
    """Returns the problem with a column of constant teacher log-probabilities."""

    def collect(*given):
        collector, batch = problem.collect(*given)
        columns = {**batch.columns, "teacher_log_prob": jnp.zeros(batch.mask.shape)}
        return collector, batch._replace(columns=columns)

    return problem._replace(collect=collect)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
@pytest.mark.parametrize("module", STEPPING, ids=lambda module: module.__name__.split(".")[-1])
def test_step_sizes_follow_iterations(module, schedule):
    """Step sizes do not follow gradient steps; an optimizer passed as an object is scaled too."""
    many = {} if module in (a2c, reinforce) else MANY
    config = module.Config(schedule=schedule, decay_iterations=8, warm_up_iterations=4, **many)
    steps = (0, 1, 3, 4, 6, 9)
    found, metrics = moved(module, config, steps, always_one())
    if "updates" in metrics:
        assert float(metrics["updates"].value()) == 1.0
    for step, leaves in zip(steps, found, strict=True):
        wanted = STEPPING[module] * factor(step, schedule)
        for leaf in leaves:
            np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-5)


def test_a_cosine_outlives_resets_of_the_optimizer():
    """GRPO resets the optimizer state; each update is the constant step size's update times the
    factor."""
    fields = {"optimizer": "lion", "reset_iterations": 2, "max_grad_norm": 1e3}
    cosine = grpo.Config(schedule="cosine", decay_iterations=6, **fields)
    problem = tabular_problem(group_size=4)
    learner = grpo.make(cosine, problem)
    step = jax.jit(learner.step)
    whole = jax.jit(grpo.make(grpo.Config(**fields), problem).step)
    state = learner.init(jax.random.key(0))
    for k in range(8):
        (scaled, _), (full, _) = step(state), whole(state)
        before, after, most = (ravel_pytree(x.params.policy)[0] for x in (state, scaled, full))
        factor = 0.5 * (1.0 + np.cos(np.pi * min(k / 6, 1.0)))
        np.testing.assert_allclose(after - before, factor * (most - before), atol=1e-6)
        assert jnp.abs(most - before).max() > 1e-4
        state = scaled
