"""Tests dynamic sampling: the selected groups, their order, and the result without any groups."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import tabular_problem
from tables import cases

from jaxrl_po import divergences, masked
from jaxrl_po.algorithms import dapo, group_policy, grpo
from jaxrl_po.config import ConfigError
from jaxrl_po.dynamic_sampling import dynamic_sampling, informative
from jaxrl_po.types import CollectorState

GROUPS, SIZE = 4, 2


def counted(problem):
    """Returns a problem that counts its batches in the collector's state."""

    def init(key):
        params, collector = problem.init(key)
        return params, collector.add(replicated={"batches": jnp.int32(0)})

    def collect(params, collector, key):
        batches = collector.replicated["batches"]
        collector, batch = problem.collect(params, collector.remove("batches"), key)
        return collector.add(replicated={"batches": batches + 1}), batch

    return problem._replace(init=init, collect=collect)


INNER = counted(tabular_problem(num_prompts=GROUPS, group_size=SIZE, dense=False))
INNER_COLLECT = jax.jit(INNER.collect)
STATE = INNER.init(jax.random.key(0))
KEY = jax.random.key(5)


def groups_of(batch):
    """Returns the actions of each group, which identify the group."""
    return np.asarray(batch.action).reshape(*batch.score.shape, -1)


def by_hand(key, batches):
    """Returns the informative groups of a number of batches, in the order of their generation."""
    kept = []
    for i in range(batches):
        _, batch = INNER_COLLECT(*STATE, jax.random.fold_in(key, i))
        score = np.asarray(batch.score)
        kept += [
            group for group, s in zip(groups_of(batch), score, strict=True) if s.max() != s.min()
        ]
    return kept


@functools.cache
def sampler(max_generation_batches=20, **options):
    problem = dynamic_sampling(INNER, max_generation_batches, **options)
    return problem.init(jax.random.key(0)), jax.jit(problem.collect)


def collect(key=KEY, collector=None, **options):
    (params, fresh), sample = sampler(**options)
    return sample(params, fresh if collector is None else collector, key)


def test_groups_divide_over_devices_by_the_named_setting():
    learner = dapo.make(dapo.Config(train_prompts=3, axis_name="data"), INNER)
    with pytest.raises(ConfigError, match=r"^train_prompts: must be a multiple of the 2 devices"):
        jax.eval_shape(
            jax.vmap(learner.sample, None, axis_name="data", axis_size=2), learner.init(KEY)
        )


@cases("num_groups", 0, 2, 7)
def test_the_first_informative_groups_are_kept_in_order(num_groups):
    _, batch = collect(num_groups=num_groups)
    wanted = num_groups or GROUPS
    rounds = int(batch.metrics["generation_batches"].value())
    expected = by_hand(KEY, rounds)
    # the last generated batch was needed
    assert len(by_hand(KEY, rounds - 1)) < wanted <= len(expected)
    assert_array_equal(groups_of(batch), expected[:wanted])
    assert batch.score.shape == (wanted, SIZE)
    assert informative(batch.score).all()
    assert float(batch.metrics["filled"].value()) == 1.0
    assert_allclose(
        batch.metrics["acceptance"].value(), len(expected) / (rounds * GROUPS), rtol=1e-6
    )


def test_surplus_is_dropped_or_carried():
    dropped, first = collect(num_groups=2)
    expected = by_hand(KEY, int(first.metrics["generation_batches"].value()))
    assert len(expected) > 2  # the case has a surplus
    later = jax.random.key(8)
    _, second = collect(later, dropped, num_groups=2)
    assert_array_equal(groups_of(second), by_hand(later, 20)[:2])


BOUNDED = {"num_groups": GROUPS, "carry_surplus": True, "max_generation_batches": 2}


def test_surplus_fills_first_fresh_batch_then_is_dropped():
    """A batch takes fresh groups, then the surplus of the last iteration, then groups of a second
    batch.

    The test follows the surplus by hand, even where two batches and a surplus do not suffice.
    """
    collector, surplus, cases = None, [], set()
    for i in range(25, 39):
        key = jax.random.key(i)
        collector, batch = collect(key, collector, **BOUNDED)
        first = by_hand(key, 1)
        carried = surplus[: max(GROUPS - len(first), 0)]
        rounds, buffer = 1, [*first, *carried]
        if len(buffer) < GROUPS:
            rounds, buffer = 2, [*buffer, *by_hand(key, 2)[len(first) :]]
        kept = buffer[:GROUPS]
        assert_array_equal(groups_of(batch)[: len(kept)], kept)
        valid = np.arange(GROUPS) < len(kept)
        assert_array_equal(batch.mask.reshape(GROUPS, -1).any(axis=1), valid)
        assert float(batch.metrics["filled"].value()) == valid.mean()
        assert float(batch.metrics["generation_batches"].value()) == rounds
        assert float(batch.metrics["acceptance"].count) == rounds * GROUPS
        assert_allclose(batch.metrics["sample_age"].value(), len(carried) / len(kept), rtol=1e-6)
        assert int(batch.columns["age"].sum()) == len(carried) * SIZE
        cases |= {"dropped"} if len(carried) < len(surplus) else set()
        cases |= {"used and not enough"} if carried and rounds == 2 else set()
        cases |= {"unfilled with some used"} if carried and len(kept) < GROUPS else set()
        surplus = buffer[GROUPS:]
        assert int(collector.replicated["surplus_count"]) == len(surplus)
    assert cases == {"dropped", "used and not enough", "unfilled with some used"}


def test_four_devices_equal_one():
    problem = dynamic_sampling(INNER, 2, num_groups=GROUPS, carry_surplus=True, axis_name="data")
    parts = CollectorState(0, None)
    over = functools.partial(jax.vmap, axis_name="data")
    shared = jax.jit(over(problem.collect, (None, parts, None), (parts, 0)))
    params, whole = problem.init(jax.random.key(0))
    split = whole._replace(
        sharded=jax.tree.map(lambda x: x.reshape(4, -1, *x.shape[1:]), whole.sharded)
    )
    alone, cases = None, set()
    for i in range(25, 39):
        key = jax.random.key(i)
        split, each = shared(params, split, key)
        alone, batch = collect(key, alone, **BOUNDED)
        named, expected = ({**x._asdict(), **x.columns} for x in (each, batch))
        for name in ("action", "log_prob", "mask", "score", "age"):
            assert_allclose(np.concatenate(named[name]), expected[name], rtol=1e-6)
        for name, mean in batch.metrics.items():
            of_all = jax.tree.map(lambda x: x.sum(), each.metrics[name]).value()
            assert_allclose(of_all, mean.value(), rtol=1e-6)
        cases.add(int(alone.replicated["surplus_count"]))
    assert cases >= {0, 1, 2}


def test_training_batch_is_at_most_one_update_old():
    """A surplus does not accumulate, even if batches have more groups than an update takes."""
    params, before = STATE[0], None
    (_, collector), sample = sampler(carry_surplus=True, num_groups=3)
    ages = []
    for i in range(10):
        # The added number changes the policy, as an update would.
        params = params._replace(policy=jax.tree.map(lambda x: 1.05 * x, params.policy))
        collector, batch = sample(params, collector, jax.random.key(100 + i))
        assert float(batch.metrics["generation_batches"].value()) >= 1.0
        assert np.isfinite(batch.metrics["accuracy"].metric())
        for age, policy in ((0, params), (1, before)):
            rows = np.asarray(batch.columns["age"]) == age
            if rows.any():
                log_prob = INNER.apply(policy, batch.inputs)[0].log_prob(batch.action)
                assert_allclose(batch.log_prob[rows], log_prob[rows], rtol=1e-5, atol=1e-6)
        ages += np.asarray(batch.columns["age"]).tolist()
        before = params
    assert set(ages) == {0, 1}


def test_it_gives_up_and_masks_what_is_empty():
    _, batch = collect(max_generation_batches=3, accept=lambda score: jnp.zeros(len(score), bool))
    assert not batch.mask.any()
    assert float(batch.metrics["generation_batches"].value()) == 3.0
    assert float(batch.metrics["filled"].value()) == 0.0
    _, partly = collect(max_generation_batches=1, num_groups=20)
    kept = len(by_hand(KEY, 1))
    assert 0 < kept < 20
    assert partly.mask.reshape(20, SIZE, -1).any(axis=(1, 2)).tolist() == [True] * kept + [
        False
    ] * (20 - kept)
    # Empty slots do not count in the std of the batch.
    reward, mask = (np.reshape(x, (20, SIZE, -1)) for x in (partly.reward, partly.mask))
    found = group_policy.batch_relative(0.0, None)(jnp.asarray(reward), jnp.asarray(mask), mask)
    outcome = reward[:kept].sum(axis=-1)
    want = (outcome - outcome.mean(axis=1, keepdims=True)) / outcome.std()
    assert_allclose(found[:kept, :, 0], want, rtol=1e-5)


def test_vmap_equals_the_lone_run():
    """Seeds that are full wait for the slowest seed and do not change meanwhile."""
    problem = dynamic_sampling(INNER, 20, num_groups=5)
    collector = problem.init(jax.random.key(0))[1]
    keys = jax.random.split(jax.random.key(3), 4)
    _, together = jax.jit(jax.vmap(lambda key: problem.collect(STATE[0], collector, key)))(keys)
    rounds = together.metrics["generation_batches"].value()
    assert len(set(rounds.tolist())) > 1  # otherwise the case would not test the property
    for i, key in enumerate(keys):
        _, alone = collect(key, num_groups=5)
        assert_array_equal(together.action[i], alone.action)
        assert float(alone.metrics["generation_batches"].value()) == float(rounds[i])


def test_two_calls_differ_and_cover_everything_generated():
    (collector, one), (_, other) = (collect(jax.random.key(i), num_groups=7) for i in (1, 2))
    assert not np.array_equal(one.action, other.action)
    rounds = int(one.metrics["generation_batches"].value())
    assert rounds > 1
    assert int(collector.replicated["batches"]) == rounds
    every = [INNER_COLLECT(*STATE, jax.random.fold_in(jax.random.key(1), i)) for i in range(rounds)]
    accuracy = [batch.metrics["accuracy"].value() for _, batch in every]
    assert_allclose(one.metrics["accuracy"].value(), np.mean(accuracy), rtol=1e-6)
    assert float(one.metrics["accuracy"].count) == rounds * GROUPS * SIZE


def changed(edit, problem=INNER):
    """Returns the same problem, every batch of which is edited."""

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        return collector, edit(batch)

    return problem._replace(collect=collect)


def step(module, config, problem=INNER, key=5):
    learner = module.make(config, problem)
    return jax.jit(learner.step)(learner.init(jax.random.key(key)))


def test_nothing_informative_leaves_parameters_and_optimizer_alone():
    blank = changed(lambda batch: batch._replace(score=0.0 * batch.score))
    learner = dapo.make(dapo.Config(max_generation_batches=2), blank)
    state = learner.init(jax.random.key(5))
    after, metrics = jax.jit(learner.step)(state)
    before, now = ((s.params, s.opt_state) for s in (state, after))
    jax.tree.map(assert_array_equal, now, before)
    assert [float(metrics[x].total) for x in ("updates", "skipped", "signal")] == [0.0] * 3


def test_reward_that_separates_everyone_does_not_decide():
    def shaped(params, collector, key):
        collector, batch = INNER.collect(params, collector, key)
        each = jnp.arange(batch.mask.shape[0], dtype=jnp.float32)[:, None]
        return collector, batch._replace(reward=batch.reward + 0.01 * each)

    problem = dynamic_sampling(INNER._replace(collect=shaped), 20, num_groups=7)
    got, want = (
        jax.jit(problem.collect)(*problem.init(jax.random.key(0)), KEY)[1],
        collect(num_groups=7)[1],
    )
    assert_array_equal(groups_of(got), groups_of(want))


OFF = {
    "clip_higher": False,
    "dynamic_sampling": "off",
    "token_level_loss": False,
    "overlong_filtering": False,
    "soft_overlong": False,
}


def test_dapo_with_all_off_is_grpo():
    ours, _ = step(dapo, dapo.Config(**OFF, num_epochs=2))
    theirs, _ = step(grpo, grpo.Config(use_reference=False, num_epochs=2))
    jax.tree.map(assert_array_equal, ours.params, theirs.params)


def test_leaving_groups_out_weighs_the_others_up():
    """The mean over informative groups is the naive mean times 1 / (1 − the share of omitted
    groups).

    Omitting groups and dividing by their share would apply the factor twice.
    """
    plain = dapo.Config(**OFF)
    _, naive = step(dapo, plain)
    _, reweighted = step(dapo, dapo.Config(**(OFF | {"dynamic_sampling": "reweight"})))
    state = dapo.make(plain, INNER).init(jax.random.key(5))
    _, collect_key, _ = jax.random.split(state.key, 3)
    share = float(
        informative(INNER.collect(state.params, state.collector, collect_key)[1].score).mean()
    )
    assert 0.0 < share < 1.0
    assert_allclose(reweighted["grad_norm"].value(), naive["grad_norm"].value() / share, rtol=1e-4)


def test_overlong_filtering_leaves_cut_rows_out():
    short = tabular_problem(num_prompts=GROUPS, group_size=SIZE, num_steps=4, dense=False)
    never = changed(lambda batch: batch._replace(truncated=jnp.zeros_like(batch.mask)), short)
    on = {"dynamic_sampling": "off", "overlong_filtering": True}
    _, filtered = step(dapo, dapo.Config(**on), short)
    _, unmarked = step(dapo, dapo.Config(**on), never)
    _, off = step(dapo, dapo.Config(**(on | {"overlong_filtering": False})), short)
    few, most, all_ = (float(x["signal"].count) for x in (filtered, off, unmarked))
    assert few < most == all_


@cases(
    "problem, options, match",
    (
        INNER,
        {"max_generation_batches": 2, "num_groups": -1},
        "num_groups: must be a whole number in",
    ),
    (
        tabular_problem(group_size=1),
        {"max_generation_batches": 2},
        "group_size: must be at least 2",
    ),
    ids=["groups", "alone"],
)
def test_bad_input(problem, options, match):
    def build():
        sampler = dynamic_sampling(problem, **options)
        jax.eval_shape(sampler.collect, *sampler.init(jax.random.key(0)), KEY)

    with pytest.raises(ConfigError, match=match):
        build()


def test_kl_belongs_to_this_update(monkeypatch):
    """An earlier policy sampled the surplus: its log π_old is not the log π_old of this update."""
    monkeypatch.setattr(group_policy, "KL_STRIDE", 1)  # every row is measured, also the surplus
    config = dapo.Config(
        carry_surplus=True, train_prompts=3, learning_rate=0.1, overlong_filtering=False
    )
    moving, still = (
        dapo.make(dataclasses.replace(config, learning_rate=rate), INNER) for rate in (0.1, 1e-30)
    )
    first, second = jax.jit(moving.step), jax.jit(still.step)
    for seed in range(10):
        metrics = second(first(moving.init(jax.random.key(seed)))[0])[1]
        if float(metrics["sample_age"].value()) > 0.0:
            break
    # Otherwise the case would not test the property.
    assert float(metrics["sample_age"].value()) > 0.0
    assert abs(float(metrics["kl"].value())) < 1e-10


def test_kl_covers_what_the_loss_leaves_out():
    short = tabular_problem(num_prompts=4 * GROUPS, group_size=SIZE, num_steps=4, dense=False)
    config = dapo.Config(dynamic_sampling="off", overlong_filtering=True, learning_rate=0.1)
    learner = dapo.make(config, short)
    state = learner.init(jax.random.key(5))
    after, metrics = jax.jit(learner.step)(state)
    _, collect_key, _ = jax.random.split(state.key, 3)
    batch = short.collect(state.params, state.collector, collect_key)[1]
    log_prob = short.apply(after.params, batch.inputs)[0].log_prob(batch.action)
    measured = (
        batch.mask & (jnp.arange(4 * GROUPS * SIZE) // SIZE % group_policy.KL_STRIDE == 0)[:, None]
    )
    want = masked.total(divergences.k3(batch.log_prob, log_prob), measured)
    trained = batch.mask & batch.terminated.any(axis=1)[:, None]
    assert metrics["kl"].count == want.count > (measured & trained).sum()
    assert_allclose(metrics["kl"].value(), want.value(), rtol=1e-3)
