"""Tests decisions that must not depend on rounding: equal outcomes, constant data, small steps,
small sets."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import tabular_problem
from tables import cases

from jaxrl_po import advantages, compensated, group_advantages, group_statistics, trust_region
from jaxrl_po.algorithms import dapo, group_policy, grpo, trpo
from jaxrl_po.control import normalizer
from jaxrl_po.distributions import Categorical, DiagonalGaussian
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.language import lora
from jaxrl_po.language.sampling import truncate_logits

CANCELLING = list(itertools.permutations([100.1, -100.1, 0.3]))
SHARES = list(itertools.permutations([0.1, 0.3, 0.4]))
LONG = np.random.default_rng(0).normal(size=1000) * 100
LONG = np.r_[1e6 * LONG, -1e6 * LONG[::-1], 0.3].astype(np.float32)
PERMUTED = [LONG, LONG[::-1], np.roll(LONG, 7), np.sort(LONG)]
DIFFERENT = [
    [[1e6, 0.0], [0.0, 1_000_001.0]],
    [[1000.0, 0.0], [0.0, 1000.001]],
    [[300.0, 0.0, 0.0], [100.0, 200.0005, 0.0]],
    [np.ones(1000), np.r_[np.ones(999), 1.1]],
    [[0.0, np.nan], [0.0, 0.0]],
    [[np.inf, 0.0], [0.0, 0.0]],
]


@jax.jit
def compared(rewards):
    """Returns outcomes of one group `[G, T]`, and the result of each comparison within the
    group."""
    mask = jnp.ones((1, *rewards.shape), bool)
    sums = jax.tree.map(lambda x: x[:, 0], compensated.sums_to_go(rewards))
    stratum = jnp.zeros(len(rewards), jnp.int32)
    running = group_statistics.update_moments(
        group_statistics.empty_moments(1), sums.value, stratum, decay=1.0
    )
    rounding = compensated.rounding(sums.value, sums.size, sums.terms, rewards.shape[1])
    outcome = group_advantages.outcomes(rewards)
    return outcome, {
        "informative": advantages.informative(outcome),
        "group": group_policy.outcome_advantage(advantages.group_relative)(
            rewards[None], mask, mask
        ),
        "batch": group_policy.batch_relative(1e-6, None)(rewards[None], mask, mask),
        "turn": group_advantages.turn_relative(rewards, mask[0], mask[0])[:, 0],
        "running": group_statistics.relative(running, sums.value, stratum, rounding=rounding),
    }


@cases("rewards", CANCELLING, SHARES, PERMUTED)
def test_same_rewards_in_other_order_are_equal_outcomes(rewards):
    rewards = np.array(rewards, np.float32)
    outcome, relative = compared(rewards)
    assert len(set(outcome.tolist())) == 1
    exact, size = (np.float64(x)[0].sum() for x in (rewards, np.abs(rewards)))
    error = rewards.shape[1] * np.finfo(np.float32).eps ** 2 * size
    np.testing.assert_allclose(outcome[0], exact, rtol=3e-7, atol=error)
    assert not any(np.any(x) for x in relative.values()), relative


@pytest.mark.parametrize("rewards", DIFFERENT)
def test_a_real_difference_is_a_full_advantage(rewards):
    outcome, relative = compared(np.array(rewards, np.float32))
    assert relative["informative"]
    if np.isfinite(outcome).all():
        for name in ("group", "batch", "turn", "running"):
            np.testing.assert_allclose(np.abs(relative[name]), 1.0, rtol=0.1, err_msg=name)


def ordered(rewards):
    """Returns a problem with two actions, whose rewards differ only in their order: `[P·G, T]`."""
    problem = tabular_problem(num_prompts=4, group_size=4, num_steps=3, dense=False)

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        paid = jnp.array(rewards, jnp.float32)[batch.action[:, 0] % 2]
        outcome = jax.vmap(group_advantages.outcomes)(paid.reshape(4, 4, 3))
        return collector, batch._replace(reward=paid, score=outcome, mask=jnp.ones_like(batch.mask))

    return problem._replace(collect=collect)


@cases("rewards", CANCELLING[:2], SHARES[:2])
def test_nothing_is_learned_from_the_order_of_rewards(rewards):
    problem = ordered(rewards)
    learner = grpo.make(grpo.Config(use_reference=False, learning_rate=0.1), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    after, metrics = jax.jit(learner.step)(state)
    assert float(metrics["signal"].value()) == 0.0
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    # the refill waits for an informative group that never appears
    _, batch = jax.jit(dynamic_sampling(problem, 2).collect)(
        *problem.init(jax.random.key(0)), jax.random.key(1)
    )
    assert float(batch.metrics["filled"].value()) == 0.0
    assert dapo.informative is advantages.informative


def test_a_constant_observation_is_normalised_to_zero():
    merge = jax.jit(normalizer.merge_batch)
    for constant in (9.81, 1e6 + 0.1, 0.1, -3e-5, 12345.678):
        statistics = normalizer.empty((2,))
        for count in (7, 128, 4096):
            x = np.stack([np.full(count, constant), np.linspace(-1, 1, count)], axis=1)
            statistics = merge(statistics, jnp.array(x, jnp.float32))
        assert statistics.normalize(jnp.full((1, 2), constant, jnp.float32))[0, 0] == 0.0
        assert float(statistics.std()[0]) < 1e-7
        assert float(statistics.std()[1]) == pytest.approx(3**-0.5, rel=0.02)


def test_a_billion_samples_do_not_stop_the_count():
    """The weight of one sample is below the rounding of the sums, and the std remains that of the
    data."""
    merge = jax.jit(normalizer.merge_batch)
    generator = np.random.default_rng(0)
    statistics = normalizer.Normalizer(jnp.int32(10**9), jnp.zeros(1), jnp.ones(1))
    for _ in range(300):
        statistics = merge(statistics, jnp.array(generator.normal(size=(32, 1)), jnp.float32))
    assert int(statistics.seen) == 10**9 + 9600
    assert float(statistics.std()[0]) == pytest.approx(1.0, abs=1e-3)
    full = merge(statistics._replace(seen=jnp.int32(normalizer.MOST)), jnp.full((8, 1), 5.0))
    assert int(full.seen) == normalizer.MOST
    assert float(full.mean[0]) >= float(statistics.mean[0])


@cases("step", 1e-2, 1e-3, 1e-4)
def test_the_exact_kl_of_a_small_step(step):
    generator = np.random.default_rng(1)
    mean, log_std = (np.float32(x) for x in (0.0, -0.5))
    gaussians = [
        DiagonalGaussian(jnp.full(17, mean + shift), jnp.full(17, log_std + shift))
        for shift in (np.float32(0.0), np.float32(step))
    ]
    moved = np.float64(np.float32(log_std + np.float32(step)))
    gap = 2 * (np.float64(log_std) - moved)
    exact = 8.5 * (np.expm1(gap) - gap + np.float64(np.float32(step)) ** 2 * np.exp(-2 * moved))
    assert float(gaussians[0].kl(gaussians[1])) == pytest.approx(exact, rel=0.05, abs=0.0)
    narrow, wide = (DiagonalGaussian(jnp.zeros(1), jnp.full(1, x)) for x in (0.0, 1e-2 * step))
    gap = -2 * np.float64(np.float32(1e-2 * step))
    assert float(narrow.kl(wide)) == pytest.approx((np.expm1(gap) - gap) / 2, rel=0.01, abs=0.0)
    for actions in (3, 50_000):
        logits = generator.normal(size=(20, actions)).astype(np.float32) * 2
        other = logits + (step * generator.normal(size=logits.shape)).astype(np.float32)
        kl = Categorical(jnp.array(logits)).kl(Categorical(jnp.array(other)))
        p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in np.float64([logits, other]))
        np.testing.assert_allclose(kl, (np.exp(p) * (p - q)).sum(axis=1), rtol=0.05)
        assert float(kl.min()) >= 0.0


def test_kl_counts_excluded_mass_and_may_be_infinite():
    some, all_ = Categorical(jnp.array([0.0, -jnp.inf])), Categorical(jnp.array([0.0, 0.0]))
    assert float(some.kl(all_)) == pytest.approx(np.log(2), rel=1e-6)
    assert float(all_.kl(some)) == np.inf
    assert float(some.kl(some)) == 0.0
    gradient = jax.grad(lambda x: some.kl(Categorical(jnp.array([0.0, 1.0]) * x)))(0.5)
    assert float(gradient) == pytest.approx(1 / (1 + np.exp(-0.5)), rel=1e-5)


@cases(
    "probabilities, top_p, kept",
    ([0.5, 0.3, 0.1, 0.1], 0.8, 2),
    ([0.5, 0.3, 0.1, 0.1], 0.81, 3),
    ([0.02] * 50, 0.5, 25),
    ([0.1] * 10, 0.3, 3),
    ([0.1] * 10, 1e-9, 1),
)
def test_nucleus_is_the_smallest_set_of_given_mass(probabilities, top_p, kept):
    truncated = truncate_logits(jnp.log(jnp.array(probabilities)), top_p=top_p)
    assert int(jnp.isfinite(truncated).sum()) == kept


def test_a_token_of_just_the_least_probability_stays():
    """In rounded logarithms, a fifth of 1 / 2 is 1 / 10, a seventh 1 / 14, and so on."""
    part = 1.0 / np.arange(2, 60)
    for least in part:
        pair = jnp.log(jnp.array([0.5, 0.5 * least], jnp.float32))
        assert bool(jnp.isfinite(truncate_logits(pair, min_p=float(least))).all())
        assert int(jnp.isfinite(truncate_logits(pair, min_p=float(least) * 1.0001)).sum()) == 1


def test_a_step_of_zero_is_no_gain():
    """The surrogate is a sum that another program would round differently."""
    terms = jnp.sin(jnp.arange(1000.0))

    def evaluate(x):
        return jnp.sum(terms * jnp.exp(x)), jnp.sum(jnp.square(x))

    search = jax.jit(
        lambda step: trust_region.line_search(evaluate, jnp.zeros(()), step, max_kl=1.0)
    )
    x, info = search(jnp.zeros(()))
    assert (float(x), bool(info.accepted), float(info.gain)) == (0.0, False, 0.0)
    uphill = jnp.sign(terms.sum()) * 0.5
    x, info = search(uphill)
    assert bool(info.accepted)
    assert float(x) == float(uphill)
    assert int(info.steps) == 0


def test_first_grpo_step_ignores_scale_of_loss():
    inner = tabular_problem(num_prompts=4, group_size=4, dense=False)

    @jax.jit
    def change(size):
        def collect(params, collector, key):
            collector, batch = inner.collect(params, collector, key)
            return collector, batch._replace(reward=size * batch.reward)

        config = grpo.Config(use_reference=False, scale="none", learning_rate=1e-2)
        learner = grpo.make(config, inner._replace(collect=collect))
        state = learner.init(jax.random.key(0))
        return jax.tree.map(jnp.subtract, learner.step(state)[0].params.policy, state.params.policy)

    large, small = (optax.tree.norm(change(size)) for size in (1.0, 1e-3))
    assert float(large) > 0.01
    assert float(small) == pytest.approx(float(large), rel=0.01)


def test_skipped_natural_step_counts_in_nothing_else():
    problem = tabular_problem(num_prompts=4, num_steps=8)
    learner = trpo.make(trpo.Config(value_epochs=1, value_minibatches=1, cg_iterations=2), problem)
    state, batch = learner.sample(learner.init(jax.random.key(0)))
    _, metrics = jax.jit(learner.update)(state, batch._replace(reward=batch.reward * jnp.nan))
    assert float(metrics["accepted"].value()) == 0.0
    assert float(metrics["accepted"].count) == 1.0
    for name in ("exact_kl", "gain", "predicted_gain", "step_size", "residual", "backtracks"):
        assert float(metrics[name].count) == 0.0, name
        assert np.isnan(metrics[name].metric()), name


def test_adapters_are_not_lost_in_bfloat16():
    """A change of 1e-3 beside a weight of 1 is less than half a step of bfloat16."""
    pair = {"a": jnp.full((2, 1), 1e-3), "b": jnp.ones((1, 2))}
    kernel = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    base = {"params": {"blocks": {"mlp": {"up": kernel}}}}
    model = SimpleNamespace(lora=SimpleNamespace(scale=1.0))
    merged = lora.merge_adapters(model, base, {lora.ADAPTERS: {"blocks": {"mlp": {"up": pair}}}})
    found = merged["params"]["blocks"]["mlp"]["up"]["kernel"]
    np.testing.assert_allclose(found, 1.001, rtol=1e-6)
