"""Tests frozen parameters: used by the policy, not trained, not saved, one copy for all seeds."""

import chex
import jax
import jax.numpy as jnp
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import tabular_problem
from tables import cases
from test_runner import Silent
from toy_run import train_job

from jaxrl_po.algorithms import grpo, ppo, reference, reinforce, trpo
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import over_seeds, select_seed
from jaxrl_po.run.loop import runner
from jaxrl_po.run.store.checkpoint import Store

PLAIN = tabular_problem(num_prompts=4, num_steps=8)
FIT = {"value_epochs": 1, "value_minibatches": 2}
STEPS = {"num_epochs": 2, "num_minibatches": 2}
METHODS = {
    "ppo": lambda problem: ppo.make(ppo.Config(**STEPS), problem),
    "ppo_reference": lambda problem: reference.with_reference_kl(
        ppo.make(ppo.Config(**STEPS), problem), problem, reference.ReferenceSettings(enabled=True)
    ),
    "reinforce": lambda problem: reinforce.make(reinforce.Config(**FIT), problem),
    "trpo": lambda problem: trpo.make(trpo.Config(**FIT), problem),
    "grpo": lambda problem: grpo.make(grpo.Config(), problem),
}


def with_base(problem):
    """Returns the problem with its policy as an adapter: trained factors over a frozen base."""

    def init(key):
        params, collector = problem.init(key)
        base = jax.tree.map(lambda x: jnp.sin(jnp.arange(x.size)).reshape(x.shape), params.policy)
        return params._replace(frozen=base), collector

    def whole(params):
        policy = jax.tree.map(jnp.add, params.policy, params.frozen)
        return params._replace(policy=policy, frozen=None)

    return problem._replace(
        init=init,
        collect=lambda params, collector, key: problem.collect(whole(params), collector, key),
        apply=lambda params, inputs: problem.apply(whole(params), inputs),
    )


def problem_for(name):
    groups = tabular_problem(num_prompts=4, group_size=4, dense=False)
    return groups if name == "grpo" else PLAIN


@pytest.mark.parametrize("name", METHODS)
def test_a_frozen_base_is_read_and_not_trained(name):
    """The update equals an update of the sum of base and adapter, started at the sum; the base is
    unchanged to the bit."""
    problem = problem_for(name)
    learner, alone = METHODS[name](with_base(problem)), METHODS[name](problem)
    state, step = jax.jit(learner.init)(jax.random.key(0)), jax.jit(learner.step)
    after, metrics = step(state)
    jax.tree.map(assert_array_equal, after.params.frozen, state.params.frozen)
    assert float(metrics["skipped"].value()) == 0.0

    summed = jax.tree.map(jnp.add, state.params.policy, state.params.frozen)
    nothing = jax.tree.map(jnp.zeros_like, state.params.frozen)
    plain = state._replace(params=state.params._replace(policy=summed, frozen=nothing))
    if plain.reference_params is not None:
        plain = plain._replace(reference_params=summed)
    expected, plain_metrics = step(plain)
    moved = jax.tree.map(jnp.add, after.params.policy, after.params.frozen)
    chex.assert_trees_all_close(moved, expected.params.policy, rtol=1e-3, atol=2e-5)
    assert_allclose(metrics["grad_norm"].value(), plain_metrics["grad_norm"].value(), rtol=1e-3)
    without = jax.eval_shape(alone.init, jax.random.key(0))
    sizes = (sum(x.size for x in jax.tree.leaves(s.opt_state)) for s in (after, without))
    assert len(set(sizes)) == 1


@cases("placement", Placement(4, 1, 1), Placement(4, 2, 1))
def test_all_seeds_share_one_copy(placement):
    learner = parallel.over_devices(METHODS["ppo"](with_base(PLAIN)), placement)
    state = jax.eval_shape(learner.init, jax.random.split(jax.random.key(0), 4))
    after, _ = jax.eval_shape(learner.step, state)
    own = jax.eval_shape(PLAIN.init, jax.random.key(0))[0].policy
    for trained in (state, after):
        assert jax.tree.map(jnp.shape, trained.params.frozen) == jax.tree.map(jnp.shape, own)
        assert all(leaf.shape[0] == 4 for leaf in jax.tree.leaves(trained.params.without_frozen()))
    one = jax.eval_shape(lambda state: select_seed(state, 2).params, after)
    assert jax.tree.map(jnp.shape, one.policy) == jax.tree.map(jnp.shape, one.frozen)


def drawn(problem):
    """Returns the problem with a base on which the compiler's rounding has an effect."""
    problem = with_base(problem)

    def init(key):
        params, collector = problem.init(key)
        square = jax.nn.initializers.orthogonal()(jax.random.key(1), (32, 32)).ravel()
        base = jax.tree.map(lambda x: jnp.resize(jnp.tanh(square), x.shape), params.policy)
        return params._replace(frozen=base), collector

    return problem._replace(init=init)


def test_checkpoint_omits_frozen_parameters_and_resume_restores_them(tmp_path, monkeypatch):
    # The command compiles programs with more effort than this test.
    monkeypatch.setenv("XLA_FLAGS", "")
    learner = over_seeds(METHODS["ppo"](drawn(PLAIN)), 2)
    keys = jax.random.split(jax.random.key(0), 2)

    def run(folder, iterations, *, resume=False):
        folder.mkdir(exist_ok=True)
        job = train_job(learner, keys, iterations=iterations, steps_per_iteration=8)
        return runner.run(job, folder, Silent(), resume=resume).state

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "cut", 2)
    resumed = run(tmp_path / "cut", 4, resume=True)
    for left, right in zip(
        jax.tree.leaves(whole.params), jax.tree.leaves(resumed.params), strict=True
    ):
        assert_array_equal(left, right)
    with Store(tmp_path / "cut" / "checkpoints" / "latest") as store:
        assert not any("frozen" in name for name in store.read(4))
    again = run(tmp_path / "cut", 4, resume=True)  # the run has no iterations left
    assert again.params.frozen is not None


@cases("placement", Placement(2, 1, 1), Placement(2, 2, 1))
def test_base_that_depends_on_key_is_refused(placement):
    def init(key):
        params, collector = PLAIN.init(key)
        return params._replace(frozen=jax.random.normal(key, (3,))), collector

    learner = METHODS["ppo"](PLAIN._replace(init=init))
    with pytest.raises(ConfigError, match=r"^learner: must have frozen parameters that do not"):
        jax.eval_shape(
            parallel.over_devices(learner, placement).init, jax.random.split(jax.random.key(0), 2)
        )
