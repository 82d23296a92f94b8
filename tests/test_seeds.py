"""Tests seeds in one program: against runs one after another, and updated in groups."""

import chex
import gymnax
import jax
import jax.numpy as jnp
from learners import language_problem
from probes import tabular_problem
from tables import cases, slow

from jaxrl_po import backend, control
from jaxrl_po.algorithms import ppo
from jaxrl_po.backend import Target
from jaxrl_po.config import as_arrays
from jaxrl_po.run.devices.seeds import (
    STATE_AXES,
    group_size,
    over_seeds,
    select_seed,
    update_in_groups,
)

TABLE = tabular_problem(num_prompts=4, num_steps=8)


def test_core_updates_at_most_eight_seeds_at_once():
    numbers = (1, 3, 8, 10, 11, 16, 20, 22, 63, 64)
    sizes = [group_size(n, Target("cpu", 2, 2)) for n in numbers]
    assert sizes == [1, 3, 8, 5, 11, 8, 5, 22, 7, 8]
    assert [group_size(n, Target("cpu", 1, 2)) for n in numbers] == list(numbers)


def test_grouped_seeds_keep_order_and_share_frozen_values():
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=2)
    state = jax.eval_shape(ppo.make(ppo.Config(), problem).init, jax.random.key(0))
    scale = jnp.arange(1.0, 4.0)
    state = jax.tree.map(lambda x: jnp.zeros(6), state)
    state = state._replace(step=jnp.arange(6), params=state.params._replace(frozen=scale))

    def update(state, batch):
        moved = state.step * (state.params.frozen @ batch)
        return state._replace(step=moved), {"moved": moved}

    stacked = jax.vmap(update, (STATE_AXES, 0), (STATE_AXES, 0))
    batch = jax.random.normal(jax.random.key(1), (6, 3))
    whole, parts = stacked(state, batch), update_in_groups(stacked, 2)(state, batch)
    chex.assert_trees_all_equal(whole, parts)
    assert parts[0].params.frozen.shape == (3,)


def test_grouped_seeds_learn_as_if_at_once(monkeypatch):
    monkeypatch.setattr(backend, "here", lambda: Target("cpu", 2, 2))
    learner = ppo.make(as_arrays(ppo.Config(num_minibatches=2)), TABLE)
    seeds = over_seeds(learner, 16)
    keys = jax.random.split(jax.random.key(0), 16)
    state, batch = jax.jit(seeds.sample)(jax.jit(seeds.init)(keys))
    grouped = jax.jit(seeds.update)(state, batch)
    whole = jax.jit(jax.vmap(learner.update))(state, batch)
    chex.assert_trees_all_close(grouped[0].params, whole[0].params, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_equal(grouped[0].key, whole[0].key)
    loops = [
        equation.params["length"]
        for equation in jax.make_jaxpr(seeds.update)(state, batch).eqns
        if equation.primitive.name == "scan"
    ]
    assert loops == [2]


@cases("problem", TABLE, slow(language_problem()), ids=["table", "language"])
def test_each_seed_begins_samples_and_learns_alone(problem):
    learner = ppo.make(as_arrays(ppo.Config(num_minibatches=2)), problem)
    seeds = over_seeds(learner, 3)
    keys = jax.random.split(jax.random.key(0), 3)
    state = jax.jit(seeds.init)(keys)
    sampled, batch = jax.jit(seeds.sample)(state)
    after, metrics = jax.jit(seeds.update)(sampled, batch)
    init, sample, update = map(jax.jit, learner)
    for i, key in enumerate(keys):
        begun = init(key)
        chex.assert_trees_all_equal(begun.key, select_seed(state, i).key)
        chex.assert_trees_all_close(begun.params, select_seed(state, i).params, rtol=1e-6)
        of_one = sample(select_seed(state, i))
        own = jax.tree.map(lambda x, i=i: x[i], batch)
        chex.assert_trees_all_equal(of_one[0].key, select_seed(sampled, i).key)
        chex.assert_trees_all_equal(of_one[1].action, own.action)
        changed, of_update = update(select_seed(sampled, i), own)
        chex.assert_trees_all_close(
            changed.params, select_seed(after, i).params, rtol=1e-5, atol=1e-6
        )
        measured = jax.tree.map(lambda x, i=i: x[i], metrics)
        chex.assert_trees_all_close(of_update, measured, rtol=1e-4, atol=1e-5)
