"""Tests properties of every algorithm on every kind of problem, see `learners.py`."""

import dataclasses
from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import ppo_reference
import pytest
from learners import ALGORITHMS, CASES, FIT, PROBLEMS, jitted, make
from probes import norm, tabular_problem
from tables import cases, slow

from jaxrl_po.algorithms import group_policy, grpo, npg, ppo, ppo_penalty, reinforce, sft
from jaxrl_po.config import as_arrays
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement


def arrays(algorithm):
    return as_arrays(ALGORITHMS[algorithm][1])


# Programs that take seconds to compile, with methods and problems that other cases cover, below or
# in `IN_DOUBLE`.
HEAVY = [
    *(("trpo", problem) for problem in ("everything", "addition", "CartPole", "vine")),
    *(("ppo", problem) for problem in ("everything", "addition")),
    *((method, "dialogue") for method in ("ppo-turn", "grpo-turn", "dapo")),
    *(("grpo", "addition"), ("npg", "Pendulum")),
]


# The fixture has module scope, so that the tests of a case run one after the other and the case's
# programs can be freed afterwards.
@pytest.fixture(
    params=[
        pytest.param(case, marks=[pytest.mark.slow] * (case in HEAVY), id="-".join(case))
        for case in CASES
    ],
    scope="module",
)
def case(request):
    return request.param


def test_finite_and_moving(case):
    init, step = jitted(*case)
    state = init(jax.random.key(0))
    after, metrics = step(arrays(case[0]), state)
    chex.assert_tree_all_finite((after.params, after.opt_state))
    assert not np.array_equal(
        jax.tree.leaves(after.params.policy)[0], jax.tree.leaves(state.params.policy)[0]
    )
    assert float(metrics["skipped"].value()) == 0.0
    assert float(metrics["frac_masked"].value()) < 1.0
    for name in ("kl", "entropy", "grad_norm", "policy_loss"):
        assert np.isfinite(metrics[name].metric()), name


def test_second_step_does_not_recompile(case):
    init, step = jitted(*case)
    state = init(jax.random.key(0))
    before = step._cache_size()
    for _ in range(3):
        state, _ = step(arrays(case[0]), state)
    assert step._cache_size() <= max(before, 1)


def test_ratio_is_one_before_the_first_update(case):
    """Sampler and learner agree: at step size zero, KL and clip fractions remain zero."""
    init, step = jitted(*case)
    config = arrays(case[0])
    tiny = {key: jnp.float32(1e-30) for key in ("learning_rate", "max_kl") if key in vars(config)}
    _, metrics = step(dataclasses.replace(config, **tiny), init(jax.random.key(0)))
    assert abs(float(metrics["kl"].value())) < 1e-6
    for name in ("clip_fraction_low", "clip_fraction_high", "approximate_kl"):
        assert name not in metrics or abs(float(metrics[name].value())) < 1e-6


ONE_KL = dict.fromkeys(
    ("ppo-all-switches", "ppo-penalty", "reinforce", "a2c", "npg", "trpo"), 1
) | dict.fromkeys(
    ("grpo-process", "dr_grpo", "rloo", "reinforce_pp", "gspo", "cispo"), group_policy.KL_STRIDE
)


@cache
def batch_of_the_table():
    """Returns the batch of every method's first step on the tabular problem."""
    problem = PROBLEMS["table"](None)
    state = jitted("trpo", "table")[0](jax.random.key(0))
    collect_key = jax.random.split(state.key)[1]
    return problem, jax.jit(problem.collect)(state.params, state.collector, collect_key)[1]


@pytest.mark.parametrize(("algorithm", "stride"), ONE_KL.items())
def test_kl_is_of_the_whole_update(algorithm, stride):
    """The metric is k3 of KL(old ‖ new) after the last step; without a critic over every n-th
    group."""
    init, step = jitted(algorithm, "table")
    after, metrics = step(arrays(algorithm), init(jax.random.key(0)))
    problem, batch = batch_of_the_table()
    log_prob = problem.apply(after.params, batch.inputs)[0].log_prob(batch.action)
    num_groups, size = batch.score.shape
    measured = np.repeat(np.arange(num_groups) % stride == 0, size)[:, None]
    slots = np.asarray(batch.mask) & measured
    difference = np.float64(batch.log_prob - log_prob)[slots]  # log-ratio log(old / new)
    assert (stride == 1) == (slots.sum() == batch.mask.sum())
    k3 = np.mean(np.expm1(-difference) + difference)
    assert k3 > 1e-9
    np.testing.assert_allclose(metrics["kl"].value(), k3, rtol=1e-2, atol=1e-9)


def minus(a, b):
    return jax.tree.map(lambda x, y: np.asarray(x, np.float64) - np.asarray(y, np.float64), a, b)


def means(metrics):
    return jax.tree.map(lambda m: m.value(), metrics, is_leaf=lambda x: hasattr(x, "metric"))


def assert_equal_on_every_device(params):
    for leaf in jax.tree.leaves(params):
        shards = {}
        for shard in leaf.addressable_shards:
            shards.setdefault(str(shard.index), []).append(np.asarray(shard.data))
        assert len(shards) < len(leaf.addressable_shards)
        for copies in shards.values():
            for copy in copies:
                np.testing.assert_array_equal(copy, copies[0])


# One problem of each kind that `IN_DOUBLE` does not have, except the learned reward; of CartPole,
# the placement with all devices for a seed.
SHARDED = [
    slow(("trpo", "vine"), (2, 4)),
    (("grpo", "groups"), (2, 4)),
    slow(("grpo-turn", "dialogue"), (2, 4)),
    (("ppo-all-switches", "table"), (2, 4)),
    (("a2c", "CartPole"), (1, 8)),
]


@cases("case, shape", *SHARDED, ids=lambda value: "-".join(map(str, value)), scope="module")
def test_vmapped_sharded_training_equals_a_loop(case, shape):
    """Four seeds, two of them vmapped per device, have rows sharded over 4 devices (or two seeds
    over 8)."""
    placement = Placement(2 * shape[0], *shape)
    init, step = jitted(*case)
    keys = jax.random.split(jax.random.key(0), placement.num_seeds)
    placed = parallel.over_devices(make(*case, axis_name=placement.axis_name), placement)

    @jax.jit
    def train(keys):
        def step(state, _):
            state, metrics = placed.step(state)
            return state, (state.params.without_frozen(), metrics)

        return jax.lax.scan(step, placed.init(keys), None, length=2)

    state, (params, metrics) = train(keys)
    assert metrics["kl"].total.shape == (2, placement.num_seeds)
    for i in (0, placement.num_seeds - 1):
        before = init(keys[i])
        alone, alone_metrics = step(arrays(case[0]), before)
        after = jax.tree.map(lambda x, i=i: x[0, i], params)
        # Reordering a single sum changes a step of a conjugate gradient by a few 1e-4.
        tolerance = 1e-3 if case[0] in ("npg", "trpo") else 1e-4
        trained = alone.params.without_frozen()
        assert norm(minus(after, trained)) <= tolerance * norm(
            minus(trained, before.params.without_frozen())
        )
        alone, _ = step(arrays(case[0]), alone)
        pick = jax.tree.map(
            lambda x, i=i: x[i],
            (state.params.without_frozen(), state.collector.replicated, state.step),
        )
        chex.assert_trees_all_close(pick[0], alone.params.without_frozen(), rtol=5e-3, atol=5e-4)
        chex.assert_trees_all_close(pick[1], alone.collector.replicated, rtol=1e-4, atol=1e-5)
        assert int(pick[2]) == 2
        first = jax.tree.map(lambda x, i=i: x[0, i], metrics)
        chex.assert_trees_all_close(means(first), means(alone_metrics), rtol=5e-3, atol=5e-4)
    assert_equal_on_every_device(state.params)


# One small problem for each algorithm, from control or language; the other cases take minutes to
# compile.
IN_DOUBLE = [
    *(
        (algorithm, "table")
        for algorithm in ("reinforce", "a2c", "npg", "trpo", "ppo", "dapo-carry", "dr_grpo", "rloo")
    ),
    *((algorithm, "table") for algorithm in ("reinforce_pp", "gspo", "cispo", "pkpo", "kl_cov")),
    *((algorithm, "mismatch") for algorithm in ("distillation", "lite_ppo-truncate")),
    ("trpo", "CartPole"),
    ("ppo", "everything"),
    ("grpo", "addition"),
]


@cases(
    "case",
    *IN_DOUBLE,
    *(slow(case) for case in CASES if case not in IN_DOUBLE),
    ids="-".join,
)
def test_in_double_precision_eight_devices_equal_one(case):
    """Two seeds have rows over four devices each: differences in float32 are rounding alone."""
    module, config = ALGORITHMS[case[0]]
    if module is npg:
        # Each product of a conjugate gradient amplifies rounding errors at least tenfold: 1e-8
        # allows for five products.
        config = dataclasses.replace(config, cg_iterations=5)

    def learner(axis_name):
        problem = PROBLEMS[case[1]](axis_name)

        def init(key):
            params, collector = problem.init(key)
            return jax.tree.map(lambda x: x.astype(jnp.float64), params), collector

        return module.make(
            dataclasses.replace(as_arrays(config), axis_name=axis_name), problem._replace(init=init)
        )

    with jax.enable_x64(True):
        alone, placed = learner(None), parallel.over_devices(learner("data"), Placement(2, 2, 4))
        init, step = jax.jit(alone.init), jax.jit(alone.step)
        keys = jax.random.split(jax.random.key(0), 2)
        befores = [init(key) for key in keys]
        together = jax.tree.map(lambda *leaves: jnp.stack(leaves), *befores)
        # seeds share the frozen parameters
        frozen = befores[0].params.frozen
        after, metrics = jax.jit(placed.step)(
            together._replace(params=together.params._replace(frozen=frozen))
        )
        assert_equal_on_every_device(after.params)
        after = after._replace(params=after.params.without_frozen())
        for i, before in enumerate(befores):
            want, want_metrics = step(before)
            got, got_metrics = jax.tree.map(lambda x, i=i: x[i], (after, metrics))
            change = norm(minus(want.params, before.params))
            assert change > 0
            assert norm(minus(got.params, want.params.without_frozen())) <= 1e-8 * change
            chex.assert_trees_all_close(
                got.collector.replicated, want.collector.replicated, rtol=1e-5
            )
            chex.assert_trees_all_close(
                means(got_metrics), means(want_metrics), rtol=1e-5, atol=1e-7
            )


# Statistics that a method pools itself, and that no fast case covers.
ONCE = {"num_epochs": 1, "num_minibatches": 2}
POOLED = {
    **{
        f"reinforce-{baseline}-{normalised}": (
            reinforce,
            {"baseline": baseline, "normalize_advantage": normalised} | FIT,
        )
        for baseline in reinforce.BASELINES
        for normalised in (False, True)
    },
    "ppo_penalty": (ppo_penalty, {"target_kl": 1e-6} | ONCE),
    "ppo_reference": (
        ppo_reference,
        {"adapt_reference_kl": True, "reference_target_kl": 0.1} | ONCE,
    ),
    "grpo": (grpo, {"running_statistics": True, "kl_coefficient": 0.1}),
    "sft": (sft, ONCE),
}


@pytest.mark.parametrize("name", POOLED)
def test_statistics_of_eight_devices_equal_one(name):
    """Each device has one row or group, and so local statistics; `vmap` pools as devices do."""
    module, settings = POOLED[name]
    problem = tabular_problem(num_prompts=8, group_size=2 if module is grpo else 1)
    alone, one_of = (
        module.make(module.Config(**settings, axis_name=axis), problem) for axis in (None, "data")
    )
    state = jax.jit(alone.init)(jax.random.key(0))
    # the policy has moved some way from the reference
    policy = jax.tree.map(lambda x: 1.5 * x, state.params.policy)
    state = state._replace(params=state.params._replace(policy=policy))

    def step(rows):
        return one_of.step(state._replace(collector=state.collector._replace(sharded=rows)))

    rows = jax.tree.map(lambda x: x.reshape(8, 1, *x.shape[1:]), state.collector.sharded)
    after, metrics = jax.jit(jax.vmap(step, axis_name="data"))(rows)
    want, want_metrics = jax.jit(alone.step)(state)
    change = norm(minus(want.params, state.params))
    for device in range(8):
        got, of_device = jax.tree.map(lambda x, i=device: x[i], (after, metrics))
        assert norm(minus(got.params, want.params)) <= 1e-3 * change
        kept = [(s.kl_coefficient, s.collector.replicated) for s in (got, want)]
        chex.assert_trees_all_close(*kept, rtol=1e-5)
        chex.assert_trees_all_close(means(of_device), means(want_metrics), rtol=1e-3, atol=1e-5)


def test_numbers_vmap_and_do_not_recompile():
    traces = []

    @jax.jit
    def train(config, key):
        traces.append(1)
        learner = ppo.make(config, PROBLEMS["table"](None))
        return learner.step(learner.init(key))[0].params

    base = as_arrays(ppo.Config(num_epochs=1, num_minibatches=2))
    train(base, jax.random.key(0))
    other = as_arrays(
        dataclasses.replace(
            base, learning_rate=1, epsilon_low=np.float32(0.1), epsilon_high=0.3, gamma=0.5
        )
    )
    train(other, jax.random.key(0))
    assert len(traces) == 1
    stacked = jax.tree.map(
        lambda a, b: jnp.stack([a, b]),
        base,
        dataclasses.replace(base, learning_rate=jnp.float32(1e-2)),
    )
    both = jax.jit(jax.vmap(lambda config, key: train(config, key), in_axes=(0, None)))(
        stacked, jax.random.key(0)
    )
    chex.assert_trees_all_close(
        jax.tree.map(lambda x: x[0], both), train(base, jax.random.key(0)), rtol=2e-3, atol=2e-4
    )
    assert not np.allclose(*jax.tree.leaves(both.policy)[0])
