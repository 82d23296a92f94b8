"""Tests better estimates of a group's mean and std: by hand, and through the switches of GRPO."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_steps import GROUPS, PROBLEM, SIZE, first_step, same, sampled
from numpy.testing import assert_allclose, assert_array_equal
from probes import tabular_problem

from jaxrl_po import control, language
from jaxrl_po.algorithms import grpo
from jaxrl_po.config import ConfigError
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.group_statistics import empty_moments, relative, update_moments

PLAIN = grpo.Config(use_reference=False)


def after_two_visits(decay):
    """Returns moments: stratum 1 of 3 sees 3.8 and 5.2, then (with stratum 2) 6.1 and 6.1; stratum
    0 sees no outcome."""
    one = update_moments(empty_moments(3), jnp.array([3.8, 5.2]), jnp.array([1, 1]), decay=decay)
    return one, update_moments(one, jnp.array([6.1, 0.5, 6.1]), jnp.array([1, 2, 1]), decay=decay)


def test_running_moments_by_hand():
    """The moments are mean 4.5 and variance .49; then, with decay ½, weight 1 + 2 and mean 4.5 + ⅔
    · 1.6.

    The second variance is ⅓ · .49 + ⅔ · ⅓ · 1.6².
    """
    one, two = after_two_visits(0.5)
    assert_allclose(one, [[0, 2, 0], [0, 4.5, 0], [0, 0.49, 0]], rtol=1e-5)
    assert_allclose(
        two, [[0, 3, 1], [0, 4.5 + 3.2 / 3, 0.5], [0, 0.49 / 3 + 5.12 / 9, 0]], rtol=1e-5
    )


def test_the_first_visit_is_the_groups_own_statistic():
    """The outcomes 3.8, 5.2, 6.1 give −1.30, .18, 1.13 with ddof 0 and −1.06, .14, .92 with ddof
    1."""
    outcome, stratum = jnp.array([3.8, 5.2, 6.1]), jnp.zeros(3, jnp.int32)
    running = update_moments(empty_moments(1), outcome, stratum, decay=0.9)
    assert_allclose(relative(running, outcome, stratum), [-1.30, 0.18, 1.13], atol=5e-3)
    assert_allclose(relative(running, outcome, stratum, ddof=1), [-1.06, 0.14, 0.92], atol=5e-3)
    assert_allclose(
        relative(running, outcome, stratum, scale="none"), outcome - 15.1 / 3, rtol=1e-4
    )


def test_equal_outcomes_are_exactly_zero_until_one_differs():
    """The number .1 has no exact mean in floating point; a later group of ones is above the mean,
    yet all its outcomes are equal."""
    tenth, stratum = jnp.full(7, 0.1), jnp.zeros(7, jnp.int32)
    running = empty_moments(1)
    for _ in range(3):
        running = update_moments(running, tenth, stratum, decay=0.9)
        assert float(running.variance[0]) == 0.0
        assert_array_equal(relative(running, tenth, stratum), np.zeros(7))
    ones = jnp.ones(2)
    running = update_moments(running, ones, stratum[:2], decay=1.0)
    assert (np.asarray(relative(running, ones, stratum[:2])) > 1.0).all()


def test_nan_outcomes_are_left_out_and_counted():
    outcome = jnp.array([1.0, jnp.nan, 0.0, jnp.inf])
    running = update_moments(empty_moments(2), outcome, jnp.array([0, 0, 0, 1]), decay=0.9)
    assert_allclose(running, [[2, 0], [0.5, 0], [0.25, 0]])
    advantage = np.asarray(relative(running, outcome, jnp.array([0, 0, 0, 1])))
    # The outcome remains NaN, so that the update is skipped.
    assert_array_equal(np.isfinite(advantage), [True, False, True, False])


def gradient_of(config, problem=PROBLEM):
    return first_step(grpo, config, problem)


def test_extra_samples_enter_the_statistics_and_nothing_else():
    """Mean and std are over all four samples, the gradient over the first three."""
    params, batch = sampled()
    r = np.asarray(jnp.where(batch.mask, batch.reward, 0.0).sum(axis=1)).reshape(GROUPS, SIZE)
    a = ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-6))[:, :3].reshape(-1, 1)

    def first(x):
        return x.reshape(GROUPS, SIZE, -1)[:, :3].reshape(GROUPS * 3, -1)

    inputs, action, mask = (first(x) for x in (batch.inputs, batch.action, batch.mask))

    def loss(policy):
        log_prob = PROBLEM.apply(params._replace(policy=policy), inputs)[0].log_prob(action)
        return -jnp.mean(jnp.sum(jnp.where(mask, log_prob * a, 0.0), axis=1) / mask.sum(axis=1))

    gradient, metrics = gradient_of(dataclasses.replace(PLAIN, extra_samples=1))
    same(gradient, jax.jit(jax.grad(loss))(params.policy))
    assert float(metrics["signal"].count) == mask.sum()


def test_root_of_trained_members_weighs_surrogate():
    plain, _ = gradient_of(PLAIN)
    same(
        gradient_of(dataclasses.replace(PLAIN, group_divisor="root_size"))[0], plain, np.sqrt(SIZE)
    )
    extra = dataclasses.replace(PLAIN, extra_samples=1)
    same(
        gradient_of(dataclasses.replace(extra, group_divisor="root_size"))[0],
        gradient_of(extra)[0],
        np.sqrt(SIZE - 1),
    )


def test_fresh_strata_are_plain_grpo():
    """Strata that differ by group leave GRPO's first step unchanged; a second visit differs."""
    apart = PROBLEM._replace(collect=lambda *args: number_groups(*args), strata=GROUPS)
    running = dataclasses.replace(PLAIN, running_statistics=True)
    same(gradient_of(running, apart)[0], gradient_of(PLAIN)[0])
    learner = grpo.make(running, apart)
    step = jax.jit(learner.step)
    state, metrics = step(jax.jit(learner.init)(jax.random.key(0)))
    assert float(metrics["revisited"].value()) == 0.0
    assert_array_equal(state.collector.replicated["outcome_statistics"].weight, [SIZE] * GROUPS)
    state, metrics = step(state)
    assert float(metrics["revisited"].value()) == 1.0
    assert_allclose(state.collector.replicated["outcome_statistics"].weight, [1.9 * SIZE] * GROUPS)


def number_groups(params, collector, key):
    collector, batch = PROBLEM.collect(params, collector, key)
    return collector, batch._replace(columns={"stratum": jnp.repeat(jnp.arange(GROUPS), SIZE)})


def test_what_is_off_is_not_held():
    state = jax.eval_shape(grpo.make(PLAIN, PROBLEM).init, jax.random.key(0))
    assert state.collector.replicated == {}
    text = str(jax.make_jaxpr(grpo.make(PLAIN, PROBLEM).step)(state))
    assert "scatter-min" not in text
    on = grpo.make(dataclasses.replace(PLAIN, running_statistics=True), PROBLEM)
    # Otherwise the check above would not test the property.
    assert "scatter-min" in str(jax.make_jaxpr(on.step)(jax.eval_shape(on.init, jax.random.key(0))))


def test_with_running_statistics_a_group_may_be_alone():
    """Recurring prompts have a baseline; without running statistics a lone member is refused."""
    alone = tabular_problem(num_prompts=8, group_size=1, dense=True)
    learner = grpo.make(dataclasses.replace(PLAIN, running_statistics=True), alone)
    state, metrics = jax.jit(
        lambda key: jax.lax.scan(lambda s, _: learner.step(s), learner.init(key), None, length=3)
    )(jax.random.key(0))
    assert metrics["signal"].value()[-1] > 0.5
    assert np.isfinite(state.collector.replicated["outcome_statistics"].variance).all()


def test_dynamic_sampling_uses_extra_samples_without_strata():
    sparse = tabular_problem(num_prompts=GROUPS, group_size=SIZE, dense=False)
    chosen = dynamic_sampling(sparse, 20)
    learner = grpo.make(grpo.Config(extra_samples=2), chosen)
    _, metrics = jax.jit(lambda key: learner.step(learner.init(key)))(jax.random.key(0))
    assert float(metrics["filled"].value()) == 1.0
    # Two equal members differ from the two extra samples, which only count in the statistics.
    assert float(metrics["signal"].value()) == 1.0
    with pytest.raises(ConfigError, match="running_statistics: must have prompts that come again"):
        grpo.make(grpo.Config(running_statistics=True), chosen)


def test_problems_without_strata_are_refused():
    episodes = control.make_groups(
        pytest.importorskip("gymnax").make("CartPole-v1")[0],
        num_prompts=2,
        group_size=2,
        num_steps=4,
    )
    with pytest.raises(ConfigError, match="set prompt_set, or take a task with strata"):
        grpo.make(grpo.Config(running_statistics=True), episodes)


TASK = language.tasks.addition(2)


def test_strata_of_addition_are_carries():
    pairs = {(12, 34): 0, (5, 5): 1, (95, 5): 2, (99, 99): 2, (50, 60): 1, (0, 0): 0}
    for (a, b), carries in pairs.items():
        assert int(TASK.stratum((jnp.uint32(a), jnp.uint32(b)))) == carries < TASK.strata


def test_finite_set_repeats_prompts_and_holds_nothing_out():
    few = language.tasks.finite(TASK, 5)
    prompts = jax.jit(jax.vmap(lambda key: few.sample(key, False)))(
        jax.random.split(jax.random.key(0), 200)
    )
    number, (a, b) = prompts.problem
    assert {int(n) for n in number} == set(range(5))
    assert len({(int(n), int(x), int(y)) for n, x, y in zip(number, a, b, strict=True)}) == 5
    assert not language.tasks.is_held_out(a, b).any()
    demonstrate, score, parses, credit = (
        jax.jit(jax.vmap(f)) for f in (few.demonstrate, few.score, few.parses, few.credit)
    )
    answers = demonstrate(prompts.problem)
    assert (score(prompts.problem, answers) == 1.0).all()
    assert parses(prompts.problem, answers).all()
    assert_allclose(credit(prompts.problem, answers).sum(axis=1), 1.0, rtol=1e-6)
    keys = jax.random.split(jax.random.key(1), 20)
    held_out, of_task = (
        jax.jit(jax.vmap(lambda key, task=task: task.sample(key, True)))(keys)
        for task in (few, TASK)
    )
    ours, theirs = held_out.problem[1], of_task.problem
    assert_array_equal(ours, theirs)
    with pytest.raises(ConfigError, match="prompt_set: must be a whole number in"):
        language.tasks.finite(TASK, 0)


def test_finite_set_batch_names_its_prompts():
    model = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8).build(
        TASK.tokenizer.size
    )
    problem = language.make_problem(TASK, model, num_prompts=6, group_size=2, prompt_set=3)
    assert problem.strata == 3
    _, batch = jax.jit(lambda key: problem.collect(*problem.init(key), key))(jax.random.key(0))
    texts = {}
    for number, tokens in zip(
        np.asarray(batch.columns["stratum"]),
        np.asarray(batch.inputs.tokens[:, : TASK.prompt_length]),
        strict=True,
    ):
        texts.setdefault(int(number), set()).add(tuple(tokens))
    assert all(len(prompts) == 1 for prompts in texts.values())
    assert len(texts) > 1
    assert float(batch.metrics["dead_groups"].count) == 6.0
