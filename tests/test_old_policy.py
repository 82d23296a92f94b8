"""Whose log-probabilities are the old policy's, where sampler and learner compute in bfloat16."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import divergences, language, masked, parallel
from jaxrl_po.algorithms import dapo, grpo, gspo, ppo
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.learner import recompute_log_prob
from jaxrl_po.parallel import Placement

TASK = language.tasks.addition(2)
SIZES = language.ModelSettings(width=16, layers=2, heads=2, kv_heads=1, mlp_width=16, dtype="bfloat16")
POLICY, CRITIC = SIZES.build(TASK.tokenizer.size), SIZES.build(TASK.tokenizer.size, outputs=1)


def make(module=gspo, config=None, *, axis_name=None, critic=None, **options):
    problem = language.make_problem(
        TASK, POLICY, num_prompts=8, group_size=4, process_reward=True, critic=critic, axis_name=axis_name, **options
    )
    config = as_arrays(module.Config(learning_rate=1e-30) if config is None else config)
    return problem, module.make(dataclasses.replace(config, axis_name=axis_name), problem)


def first_step(*arguments, **options):
    problem, learner = make(*arguments, **options)
    state = jax.jit(learner.init)(jax.random.key(0))
    after, metrics = jax.jit(learner.step)(state)
    return problem, state, after, metrics


def test_cached_and_whole_passes_differ_and_the_learners_own_are_taken():
    """A clip of 3e-4 is narrower than the rounding of bfloat16: most sequences would lie outside before any step."""
    _, _, _, metrics = first_step()
    assert float(metrics["clip_fraction_low"].value()) == float(metrics["clip_fraction_high"].value()) == 0.0
    assert abs(float(metrics["kl"].value())) < 1e-9
    assert 1e-8 < float(metrics["sampler_kl"].value()) < 1e-2
    assert 1.0005 < float(metrics["sampler_max_ratio"].value()) < 2.0
    _, _, _, theirs = first_step(old_log_prob="sampler")
    outside = float(theirs["clip_fraction_low"].value() + theirs["clip_fraction_high"].value())
    assert outside > 0.1  # the case shows something
    assert "sampler_kl" not in theirs


def test_auto_computes_again_only_where_precision_asks_for_it():
    in_float32 = SIZES.build(TASK.tokenizer.size).clone(dtype=jnp.dtype("float32"))
    sizes = {"num_prompts": 2, "group_size": 2}
    assert language.make_problem(TASK, in_float32, **sizes).exact_sampler
    assert not language.make_problem(TASK, in_float32, old_log_prob="learner", **sizes).exact_sampler
    assert not language.make_problem(TASK, POLICY, **sizes).exact_sampler
    with pytest.raises(ConfigError, match="old_log_prob must be one of auto, sampler, learner"):
        language.make_problem(TASK, POLICY, old_log_prob="both", **sizes)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_what_is_recomputed_and_what_is_logged(num_parts):
    problem, _ = make()
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    old = jnp.arange(32) % 4 == 0
    batch = batch._replace(age=old.astype(jnp.int32), log_prob=jnp.where(batch.mask, batch.log_prob, 0.0))
    again, metrics = jax.jit(lambda batch: recompute_log_prob(problem, params, batch, num_parts=num_parts, axis_name=None))(
        batch
    )
    own = problem.apply(params, batch.inputs)[0].log_prob(batch.action)
    fresh = np.asarray(batch.mask & ~old[:, None])
    np.testing.assert_allclose(np.asarray(again.log_prob)[fresh], np.asarray(own)[fresh], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(again.log_prob[old], batch.log_prob[old])  # the parameters that drew these are gone
    np.testing.assert_array_equal(again.sampler_log_prob, batch.sampler_log_prob)
    kl = masked.mean(divergences.k3(batch.sampler_log_prob, own), fresh)
    np.testing.assert_allclose(metrics["sampler_kl"].value(), kl, rtol=1e-2)
    largest = np.exp(np.abs(np.asarray(own - batch.sampler_log_prob))[fresh].max())
    np.testing.assert_allclose(metrics["sampler_max_ratio"].value(), largest, rtol=1e-4)


def test_a_surplus_keeps_what_its_sampler_gave():
    """Of dynamic sampling in bfloat16: rows of the last update are weighed by the policy that drew them."""
    problem, _ = make()
    sampler = dynamic_sampling(problem, 4, carry_surplus=True, num_groups=7)
    assert not sampler.exact_sampler
    learner = dapo.make(as_arrays(dapo.Config(carry_surplus=True, train_prompts=7, learning_rate=1e-2)), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    step = jax.jit(learner.step)
    for _ in range(4):
        state, metrics = step(state)
        assert np.isfinite(metrics["sampler_kl"].metric())
        assert float(metrics["skipped"].value()) == 0.0


@pytest.mark.parametrize(("module", "critic"), [(ppo, CRITIC), (grpo, None)], ids=["ppo", "grpo"])
def test_other_methods_start_at_a_ratio_of_one_as_well(module, critic):
    _, _, _, metrics = first_step(module, critic=critic)
    for name in ("clip_fraction_low", "clip_fraction_high", "kl"):
        assert abs(float(metrics[name].value())) < 1e-9


def test_devices_agree_on_the_distance():
    _, alone = make()
    _, cut = make(axis_name="data")
    placed = parallel.over_devices(cut, Placement(1, 1, 4))
    keys = jax.random.split(jax.random.key(3), 1)
    metrics = jax.jit(placed.step)(jax.jit(placed.init)(keys))[1]
    want = jax.jit(alone.step)(jax.jit(alone.init)(keys[0]))[1]
    for name in ("sampler_kl", "sampler_max_ratio"):
        np.testing.assert_allclose(metrics[name].value()[0], want[name].value(), rtol=0.1)
