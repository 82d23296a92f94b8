"""Tests which log-probabilities stand for the old policy if sampler and learner use bfloat16."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import tabular_problem

from jaxrl_po import language
from jaxrl_po.algorithms import dapo, grpo, gspo, ppo
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.learner import recompute_log_prob

TASK = language.tasks.addition(2)
SIZES = language.ModelSettings(
    width=16, layers=1, heads=2, kv_heads=1, mlp_width=16, dtype="bfloat16"
)
POLICY = SIZES.build(TASK.tokenizer.size)
# The parameters do not move, so that every ratio equals the first step's ratio.
STILL = 1e-30


def make(**options):
    problem = language.make_problem(
        TASK, POLICY, num_prompts=8, group_size=4, process_reward=True, **options
    )
    return rounded(problem)


def rounded(problem):
    """Returns a sampler with bfloat16's error per token, however this machine computes bfloat16."""

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        off = 0.01 * jnp.sin(1e4 * batch.log_prob)
        return collector, batch._replace(
            log_prob=batch.log_prob + off,
            columns={**batch.columns, "sampler_log_prob": batch.log_prob + off},
        )

    return problem._replace(collect=collect)


def tabular():
    """Returns a small problem whose sampler is as far from the learner as with bfloat16."""
    problem = rounded(tabular_problem(num_prompts=8, group_size=4))
    return problem._replace(log_prob_matches_sampler=False)


@functools.cache
def first():
    """Returns a state, a batch, the same batch scored again, and the compiled update."""
    problem = make()
    learner = gspo.make(as_arrays(gspo.Config(learning_rate=STILL)), problem)

    @jax.jit
    def sample(key):
        state, batch = learner.sample(learner.init(key))
        again, _ = recompute_log_prob(problem, state.params, batch, num_parts=1, axis_name=None)
        return state, batch, again

    return *sample(jax.random.key(0)), jax.jit(learner.update)


def test_learner_pass_replaces_cached_pass():
    """A clip of 3e-4 is narrower than bfloat16's rounding: most sequences would start outside the
    clip."""
    state, batch, _, update = first()
    _, metrics = update(state, batch)
    assert [float(metrics[f"clip_fraction_{x}"].value()) for x in ("low", "high")] == [0.0, 0.0]
    assert abs(float(metrics["kl"].value())) < 1e-9
    assert 1e-5 < float(metrics["sampler_kl"].value()) < 1e-4
    assert 1.005 < float(metrics["sampler_max_ratio"].value()) < 1.02
    _, theirs = update(state, batch._replace(log_prob=batch.columns["sampler_log_prob"]))
    outside = float(theirs["clip_fraction_low"].value() + theirs["clip_fraction_high"].value())
    assert outside > 0.1  # otherwise the case would not test the property
    trusting = gspo.make(gspo.Config(), make(old_log_prob="sampler"))
    _, batch = jax.eval_shape(lambda key: trusting.sample(trusting.init(key)), jax.random.key(0))
    assert "sampler_kl" not in batch.metrics


def test_the_batch_already_holds_the_learners_own():
    """A reader before the update, such as a KL penalty, then does not need a second pass."""
    _, batch, again, _ = first()
    assert_allclose(batch.log_prob, again.log_prob, atol=1e-3)
    assert np.abs(batch.log_prob - batch.columns["sampler_log_prob"]).max() > 5e-3
    assert float(batch.metrics["sampler_kl"].value()) > 1e-5


def test_auto_recomputes_only_in_low_precision():
    in_float32 = SIZES.build(TASK.tokenizer.size).clone(dtype=jnp.dtype("float32"))
    sizes = {"num_prompts": 2, "group_size": 2}
    assert language.make_problem(TASK, in_float32, **sizes).log_prob_matches_sampler
    assert not language.make_problem(
        TASK, in_float32, old_log_prob="learner", **sizes
    ).log_prob_matches_sampler
    assert not language.make_problem(TASK, POLICY, **sizes).log_prob_matches_sampler
    with pytest.raises(ConfigError, match="old_log_prob: must be one of auto, sampler, learner"):
        language.make_problem(TASK, POLICY, old_log_prob="both", **sizes)


@pytest.mark.parametrize("num_parts", [1, 4])
def test_what_is_recomputed_and_what_is_logged(num_parts):
    """The test computes in float32, with a sampler that is off by a known amount."""
    problem = tabular_problem(num_prompts=8, group_size=4)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    batch = batch._replace(log_prob=jnp.where(batch.mask, batch.log_prob, 0.0))
    own, off = batch.log_prob, 0.01 * jax.random.normal(jax.random.key(2), batch.mask.shape)
    old = jnp.arange(32) % 4 == 0
    batch = batch._replace(
        log_prob=own + off, columns={"age": old.astype(jnp.int32), "sampler_log_prob": own + off}
    )
    again, metrics = jax.jit(
        lambda batch: recompute_log_prob(
            problem, params, batch, num_parts=num_parts, axis_name=None
        )
    )(batch)
    fresh = np.asarray(batch.mask & ~old[:, None])
    assert_allclose(np.asarray(again.log_prob)[fresh], np.asarray(own)[fresh], rtol=1e-4, atol=1e-5)
    # The parameters that sampled the older rows are gone.
    assert_array_equal(again.log_prob[old], batch.log_prob[old])
    assert_array_equal(again.columns["sampler_log_prob"], batch.columns["sampler_log_prob"])
    distance = -np.asarray(off, np.float64)[fresh]
    assert_allclose(
        metrics["sampler_kl"].value(), np.mean(np.expm1(distance) - distance), rtol=1e-2
    )
    assert_allclose(metrics["sampler_max_ratio"].value(), np.exp(np.abs(distance).max()), rtol=1e-4)


def graded(problem):
    """Returns scores that differ, so that groups are informative before any learning."""

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        return collector, batch._replace(score=batch.log_prob.sum(1).reshape(batch.score.shape))

    return problem._replace(collect=collect)


def test_a_surplus_keeps_what_its_sampler_gave():
    """Rows of the last update keep the log-probabilities of their own sampler."""
    problem = graded(tabular())
    config = as_arrays(
        dapo.Config(
            carry_surplus=True, train_prompts=12, learning_rate=1e-2, overlong_filtering=False
        )
    )
    learner = dapo.make(config, problem)
    again = jax.jit(
        lambda params, batch: (
            recompute_log_prob(problem, params, batch, num_parts=1, axis_name=None)[0].log_prob
        )
    )
    state, ages = jax.jit(learner.init)(jax.random.key(0)), []
    sample, update = jax.jit(learner.sample), jax.jit(learner.update)
    for _ in range(3):
        before, (state, batch) = state.params, sample(state)
        carried = np.asarray(batch.columns["age"]) == 1
        assert_array_equal(
            again(before, batch)[carried], batch.columns["sampler_log_prob"][carried]
        )
        ages.append(int(carried.sum()))
        state, metrics = update(state, batch)
        assert 0.0 < float(metrics["sampler_kl"].metric()) < 1e-2
        assert float(metrics["skipped"].value()) == 0.0
    # Two batches of 8 groups leave a surplus of 4 of 12; with the surplus one batch is enough, and
    # leaves no surplus.
    assert ages == [0, 16, 0]


@pytest.mark.parametrize("module", [ppo, grpo], ids=["ppo", "grpo"])
def test_other_methods_start_at_ratio_one(module):
    learner = module.make(as_arrays(module.Config(learning_rate=STILL)), tabular())
    _, metrics = jax.jit(lambda key: learner.step(learner.init(key)))(jax.random.key(0))
    assert float(metrics["sampler_kl"].value()) > 1e-6
    for name in ("clip_fraction_low", "clip_fraction_high", "kl"):
        assert abs(float(metrics[name].value())) < 1e-9
