"""Tests the effect of methods without a critic on a batch, against gradients written out by
hand."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from group_steps import GROUPS, PROBLEM, SIZE, first_step, same, sampled
from probes import one_piece, tabular_problem
from toy_run import Silent, train_job

from jaxrl_po import advantages, losses
from jaxrl_po.algorithms import cispo, dr_grpo, group_policy, grpo, gspo, ppo, reinforce_pp, rloo
from jaxrl_po.config import ConfigError
from jaxrl_po.learner import zero_masked
from jaxrl_po.masked import Mean
from jaxrl_po.run.loop import runner
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import Samples


@pytest.fixture(scope="module")
def start():
    return sampled()


def gradient_of(module, config, problem=PROBLEM):
    return first_step(module, config, problem, with_metrics=False)[0]


def by_hand(start, loss):
    """Computes the gradient of a function `loss(log_prob [B, T], batch)`."""
    params, batch = start

    def of(policy):
        log_prob = PROBLEM.apply(params._replace(policy=policy), batch.inputs)[0].log_prob(
            batch.action
        )
        return loss(jnp.where(batch.mask, log_prob, 0.0), batch)

    return jax.jit(jax.grad(of))(params.policy)


def outcomes(batch):
    return np.asarray(batch.reward.sum(axis=1)).reshape(GROUPS, SIZE)


def test_grpo_averages_tokens_within_and_then_over_responses(start):
    r = outcomes(start[1])
    a = ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-6)).reshape(-1, 1)
    want = by_hand(start, lambda lp, b: -jnp.mean(jnp.sum(lp * a * b.mask, axis=1) / b.mask.sum(1)))
    same(gradient_of(grpo, grpo.Config(use_reference=False)), want)


def test_dr_grpo_divides_by_nothing_but_the_budget(start):
    r = outcomes(start[1])
    a = (r - r.mean(1, keepdims=True)).reshape(-1, 1)
    want = by_hand(start, lambda lp, b: -jnp.sum(lp * a * b.mask) / b.mask.size)
    same(gradient_of(dr_grpo, dr_grpo.Config()), want)


def test_rloo_is_reinforce_of_responses_against_the_others(start):
    r = outcomes(start[1])
    others = (r.sum(1, keepdims=True) - r) / (SIZE - 1)
    a = (r - others).reshape(-1, 1)
    want = by_hand(start, lambda lp, b: -jnp.mean(jnp.sum(lp * a * b.mask, axis=1)))
    same(gradient_of(rloo, rloo.Config(use_reference=False)), want)
    # With the policy itself as reference, k1 is 0, so that the penalty has no effect yet.
    same(gradient_of(rloo, rloo.Config(kl_coefficient=5.0)), want)


@pytest.mark.parametrize("group_baseline", [False, True])
def test_reinforce_pp_whitens_over_all_tokens(start, group_baseline):
    batch = start[1]
    mask, reward = np.asarray(batch.mask), np.asarray(batch.reward)
    if group_baseline:
        r = outcomes(batch)
        raw = np.broadcast_to((r - r.mean(1, keepdims=True)).reshape(-1, 1), mask.shape)
    else:
        raw = np.cumsum(reward[:, ::-1], axis=1)[:, ::-1]
    a = np.where(mask, (raw - raw[mask].mean()) / raw[mask].std(), 0.0)
    want = by_hand(start, lambda lp, b: -jnp.sum(lp * a * b.mask) / b.mask.sum())
    same(
        gradient_of(
            reinforce_pp, reinforce_pp.Config(use_reference=False, group_baseline=group_baseline)
        ),
        want,
    )


def test_reinforce_pp_ignores_rounding_of_the_sampler():
    """Outcomes are equal and the policy is the reference: whitened rounding once made a full
    step."""

    def collect(params, collector, key):
        collector, batch = PROBLEM.collect(params, collector, key)
        rounding = 4e-7 * jax.random.normal(key, batch.log_prob.shape)
        return collector, batch._replace(
            reward=0.0 * batch.reward, log_prob=batch.log_prob + rounding
        )

    moved = gradient_of(reinforce_pp, reinforce_pp.Config(), PROBLEM._replace(collect=collect))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(moved))


def test_same_rewards_at_other_steps_are_equal_outcomes():
    slots = np.random.default_rng(0).permuted(np.tile(np.arange(12), (16, 1)), axis=1)[:, :4]
    reward = np.zeros((1, 16, 12), np.float32)
    np.put_along_axis(reward[0], slots, np.float32([0.1, 0.2, 0.3, 0.7]), axis=1)
    mask = jnp.ones(reward.shape, bool)
    assert np.unique(jnp.asarray(reward).sum(-1)).size > 1
    for relative in (advantages.group_relative, advantages.leave_one_out):
        advantage = jax.jit(group_policy.outcome_advantage(relative))
        assert not np.any(advantage(jnp.asarray(reward), mask, mask))
        assert np.all(advantage(jnp.asarray(reward).at[0, 3, 0].add(1e-3), mask, mask))
        # NaN rewards are reported, so that the update is skipped
        for wrong in (jnp.nan, jnp.inf, -jnp.inf):
            spoiled = jnp.asarray(reward).at[0, 3, 0].set(wrong)
            assert not np.isfinite(advantage(spoiled, mask, mask)).any()


def test_on_policy_gspo_and_cispo_equal_grpo(start):
    same(gradient_of(gspo, gspo.Config()), gradient_of(grpo, grpo.Config(use_reference=False)))
    r = outcomes(start[1])
    a = ((r - r.mean(1, keepdims=True)) / (r.std(1, keepdims=True) + 1e-6)).reshape(-1, 1)
    want = by_hand(start, lambda lp, b: -jnp.sum(lp * a * b.mask) / b.mask.sum())
    same(gradient_of(cispo, cispo.Config()), want)


def process_gradient(start, scored):
    """Computes the gradient by hand; the tokens `scored` are compared within their group."""
    batch = start[1]
    reward, scored = (np.asarray(x).reshape(GROUPS, SIZE, -1) for x in (batch.reward, scored))
    a = np.zeros(scored.shape)
    for g in range(GROUPS):
        inside = reward[g][scored[g]]
        centred = np.where(scored[g], (reward[g] - inside.mean()) / (inside.std() + 1e-6), 0.0)
        a[g] = np.cumsum(centred[:, ::-1], axis=1)[:, ::-1]
    a = a.reshape(batch.mask.shape)
    return by_hand(start, lambda lp, b: -jnp.mean(jnp.sum(lp * a * b.mask, axis=1) / b.mask.sum(1)))


def test_process_supervision_credits_what_follows(start):
    want = process_gradient(start, start[1].mask)
    same(gradient_of(grpo, grpo.Config(use_reference=False, supervision="process")), want)


def test_reset_copies_policy_to_reference_and_restarts_optimizer():
    learner = grpo.make(grpo.Config(reset_iterations=2), PROBLEM)
    step = jax.jit(learner.step)
    first = jax.jit(learner.init)(jax.random.key(0))
    one, _ = step(first)
    same(one.reference_params, first.params.policy)
    two, _ = step(one)
    jax.tree.map(np.testing.assert_array_equal, two.reference_params, two.params.policy)
    jax.tree.map(np.testing.assert_array_equal, two.opt_state, first.opt_state)
    assert any((np.asarray(x) != 0).any() for x in jax.tree.leaves(one.opt_state))
    three, metrics = step(two)
    assert float(metrics["reference_kl"].value()) == pytest.approx(0.0, abs=1e-6)
    same(three.reference_params, two.params.policy)


def test_a_group_of_one_has_no_baseline():
    alone = tabular_problem(num_prompts=4, group_size=1)
    for module in (grpo, dr_grpo, rloo, gspo, cispo):
        learner = module.make(module.Config(), alone)
        with pytest.raises(
            ConfigError, match="group_size: must be at least 2: the group is the baseline"
        ):
            jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))
    # The batch is the baseline of the group.
    whitened = reinforce_pp.make(reinforce_pp.Config(), alone)
    jax.eval_shape(whitened.step, jax.eval_shape(whitened.init, jax.random.key(0)))


def hopeless(from_iteration):
    """Returns a learner whose responses all score equally from some iteration on."""
    learner = grpo.make(grpo.Config(use_reference=False), PROBLEM)

    def step(state):
        after, metrics = learner.step(state)
        gone = state.step >= from_iteration
        signal = metrics["signal"]
        return after, metrics | {"signal": Mean(jnp.where(gone, 0.0, signal.total), signal.count)}

    return one_piece(jax.vmap(learner.init), jax.vmap(step))


@pytest.mark.parametrize(("from_iteration", "ends"), [(3, 10), (99, 12)])
def test_a_run_without_a_signal_ends(tmp_path, from_iteration, ends):
    """Lines are of 2 iterations and the patience is 6.

    If the signal stops after iteration 3, the last line with a signal is the line of iteration 4.
    """
    job = train_job(
        hopeless(from_iteration),
        jax.random.split(jax.random.key(0), 2),
        iterations=12,
        steps_per_iteration=1,
        log_every=2,
        idle=6,
    )
    outcome = runner.run(job, tmp_path, Silent())
    assert (outcome.iteration, outcome.idle, outcome.interrupted) == (ends, ends < 12, False)
    assert read(tmp_path / "metrics.jsonl")[-1]["iteration"] == ends
    longer = dataclasses.replace(job, length=job.length._replace(iterations=14))
    again = runner.run(longer, tmp_path, Silent(), resume=True)
    # the resumed run remembers earlier iterations
    assert again.iteration == (ends + 2 if ends < 12 else 14)


@pytest.mark.parametrize("module", [grpo, ppo])
def test_nothing_behind_the_mask_reaches_the_parameters(module):
    problem = tabular_problem(num_prompts=4, group_size=4, dense=False)
    config = module.Config(num_epochs=1, num_minibatches=1)

    def poisoned(*arguments):
        collector, batch = problem.collect(*arguments)
        names = ("log_prob", "reward", "value", "next_value")
        return collector, batch._replace(
            **{n: jnp.where(batch.mask, getattr(batch, n), jnp.nan) for n in names}
        )

    learners = [module.make(config, own) for own in (problem, problem._replace(collect=poisoned))]
    after = []
    for state, metrics in jax.jit(lambda key: [one.step(one.init(key)) for one in learners])(
        jax.random.key(0)
    ):
        assert float(metrics["skipped"].value()) == 0.0
        assert float(metrics["frac_masked"].value()) > 0.1
        after.append(state.params)
    chex.assert_trees_all_close(*after, rtol=1e-5, atol=1e-7)


def test_process_supervision_counts_the_problems_named_steps(start):
    _, batch = start
    ends = batch.terminated | batch.truncated

    def collect(params, collector, key):
        collector, batch = PROBLEM.collect(params, collector, key)
        return collector, batch._replace(columns={"step_end": batch.terminated | batch.truncated})

    want = process_gradient(start, ends & batch.mask)
    config = grpo.Config(use_reference=False, supervision="process")
    same(gradient_of(grpo, config, PROBLEM._replace(collect=collect)), want)


@pytest.mark.parametrize("devices", [1, 2])
def test_every_fourth_group_is_counted_over_devices(devices):
    """One of ten groups of two is chosen, from the last five groups, which the second device
    holds."""
    rows = jnp.arange(20.0)[:, None]
    samples = Samples(rows, rows, rows, rows, mask=rows != 9.0)

    def chosen(samples):
        return group_policy.every_group(4, samples, 2, "data")

    mesh = jax.make_mesh((devices,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": jax.P("data"), "out_specs": jax.P("data"), "check_vma": False}
    found = jax.jit(jax.shard_map(chosen, mesh=mesh, **specs))(samples)
    assert found.inputs[found.mask].tolist() == [0.0, 1.0, 8.0, 16.0, 17.0]


def test_user_columns_are_read_where_they_belong(start):
    """Columns of slots are zeroed where masked and are passed to a surrogate.

    Columns of rows are neither zeroed nor passed.
    """
    _, batch = start
    own = {"of_row": jnp.arange(16.0), "of_slot": jnp.where(batch.mask, 2.0, jnp.nan)}
    zeroed = zero_masked(batch._replace(columns=own))
    np.testing.assert_array_equal(zeroed.columns["of_row"], own["of_row"])
    np.testing.assert_array_equal(zeroed.columns["of_slot"], 2.0 * batch.mask)
    read = []

    def surrogate(log_prob, samples):
        read.append(set(samples.columns))
        return log_prob * samples.columns["of_slot"], {}

    learner = group_policy.make(
        group_policy.GradientSteps(),
        PROBLEM,
        group_advantage=group_policy.outcome_advantage(advantages.leave_one_out),
        surrogate=surrogate,
        aggregate=losses.token_mean,
    )
    jax.eval_shape(learner.update, learner.init(jax.random.key(0)), zeroed)
    assert read[0] == {"of_slot"}
