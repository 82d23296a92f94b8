"""Tests that microbatches, computed up to their longest row, give the same numbers from fewer
slots."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import tabular_problem
from tables import cases, slow
from traced import equations

from jaxrl_po import language, lengths, minibatches, updates
from jaxrl_po.algorithms import a2c, actor_critic, dr_grpo, grpo, ppo
from jaxrl_po.backend import Target
from jaxrl_po.distributions import Categorical
from jaxrl_po.language import Transformer, dialogues
from jaxrl_po.language.tasks import addition
from jaxrl_po.masked import Mean
from jaxrl_po.run.devices import parallel
from jaxrl_po.types import ActorCritic, FastPaths, Samples

TASK = addition(2)
SHALLOW = Transformer(TASK.tokenizer.size, width=8, layers=1, heads=2, mlp_width=8, gated=False)
DEEP = SHALLOW.clone(layers=5)
BUDGET = 40
ROWS = [3, 40, 1, 12, 9, 0, 25, 10]  # lengths of the rows; rows are cut to 10, 20 or 40 slots


def samples_of(rows, steps=BUDGET):
    mask = jnp.arange(steps)[None, :] < jnp.array(rows)[:, None]
    values = jnp.where(mask, jnp.arange(mask.size, dtype=jnp.float32).reshape(mask.shape), 0.0)
    return Samples(None, values, values, values, mask)


def shorten(samples, steps):
    return jax.tree.map(lambda x: x[:, :steps], samples)


def count(samples):
    """Returns the number of computed slots and their sum."""
    return jnp.float32(samples.mask.shape[1]), jnp.sum(samples.action, where=samples.mask)


@cases("longest, computed", (0, 10), (10, 10), (11, 20), (21, 40), (40, 40))
def test_rows_are_cut_to_the_next_length(longest, computed):
    samples = samples_of([0, longest, 1])
    slots, total = jax.jit(lengths.cut(count, shorten))(samples)
    assert (slots, total) == (computed, count(samples)[1])


def test_a_gap_counts():
    samples = samples_of([1, 1])._replace(mask=jnp.zeros((2, BUDGET), bool).at[0, 14].set(True))
    assert lengths.lengths(samples).tolist() == [15, 0]


def test_vmapped_rows_are_cut_to_the_longest():
    """A branch for each length would be run for all lengths under `vmap`."""
    stacked = jax.tree.map(lambda *x: jnp.stack(x), samples_of([3, 4]), samples_of([2, 15]))
    function = jax.vmap(lengths.cut(count, shorten))
    slots, totals = function(stacked)
    assert slots.tolist() == [20, 20]
    assert totals.tolist() == [float(count(samples_of(rows))[1]) for rows in ([3, 4], [2, 15])]
    twice = jax.tree.map(lambda x: jnp.stack([x, x]), stacked)
    assert jax.vmap(function)(twice)[0].tolist() == [[20, 20], [20, 20]]

    program = jax.make_jaxpr(function)(stacked)
    assert "cond" in {equation.primitive.name for equation in equations(program.jaxpr)}


@functools.cache
def slots(in_order=False, **options):
    """Returns a program that maps a key to the slots that the updates of `ROWS` compute."""

    def loss(params, samples):
        slots, _ = count(samples)
        mean = Mean(params * samples.mask.sum(), samples.mask.sum().astype(float))
        return (mean,), {"slots": Mean(slots, jnp.float32(1.0))}

    by_length = functools.partial(lengths.by_length(shorten), in_order=in_order)
    update = updates.gradient_update(loss, optax.sgd(0.1), by_length=by_length, **options)
    params = jnp.float32(1.0)
    begun = params, optax.sgd(0.1).init(params), samples_of(ROWS)
    return jax.jit(lambda key: update(*begun, key)[2]["slots"].total)


def slots_of(key=0, **options):
    return float(slots(**options)(jax.random.key(key)))


def test_microbatches_are_of_rows_of_like_length():
    assert slots_of(num_microbatches=4) == 10 + 10 + 20 + 40  # 0 1 | 3 9 | 10 12 | 25 40
    assert slots_of(num_microbatches=4, in_order=True) == 40 + 20 + 10 + 40
    assert slots_of(num_microbatches=1) == 40
    assert slots_of(num_microbatches=2, num_epochs=3) == 3 * (10 + 40)


ONE_CORE_EACH = Target("cpu", devices=2, cores=2)


def test_cut_rows_are_not_split_further(monkeypatch):
    monkeypatch.setattr(minibatches, "AT_A_TIME", 40)
    assert slots_of(num_microbatches=2, slots=BUDGET, target=ONE_CORE_EACH) == 10 + 40
    assert slots_of(num_microbatches=1, slots=BUDGET, target=ONE_CORE_EACH) == 8 * 40


@pytest.mark.parametrize("seed", range(3))
def test_shuffled_rows_are_sorted_within_their_minibatch(seed):
    key = jax.random.split(jax.random.key(seed), 1)[0]
    computed = 0
    for order in minibatches.shuffle(key, len(ROWS), 2).tolist():
        _, shorter, _, longest = sorted(ROWS[row] for row in order)
        computed += sum(next(n for n in (10, 20, 40) if n >= each) for each in (shorter, longest))
    assert slots_of(seed, num_microbatches=2, num_minibatches=2) == computed


def problem_of(model, budget=BUDGET, **options):
    return language.make_problem(
        TASK, model, num_prompts=4, group_size=2, max_new_tokens=budget, **options
    )


def learner_of(name, placement, *, whole=False):
    """Builds a learner of completions, which are cut to their lengths or complete."""
    make, config, model, critic = METHODS[name]
    problem = problem_of(model, critic=None if critic is None else critic.clone(outputs=1))
    config = dataclasses.replace(config, axis_name=placement.axis_name)
    problem = problem._replace(fast_paths=FastPaths()) if whole else problem
    return parallel.over_devices(make(config, problem), placement)


@functools.cache
def sampled(name, seeds):
    """Returns a state, and completions of very different lengths."""
    learner = learner_of(name, parallel.Placement(seeds, 1, 1))
    keys = jax.random.split(jax.random.key(1), seeds)
    state, batch = jax.jit(lambda keys: learner.sample(learner.init(keys)))(keys)
    assert np.unique(batch.mask.sum(-1)).size > 3
    reward = jax.random.normal(jax.random.key(2), batch.mask.shape)
    return state, batch._replace(reward=jnp.where(batch.terminated, reward, 0.0))


@functools.cache
def trained(name, placement, *, whole=False):
    """Returns parameters and metrics after an update on the sampled completions."""
    learner = learner_of(name, placement, whole=whole)
    state, metrics = jax.jit(learner.update)(*sampled(name, placement.num_seeds))
    assert float(metrics["kl"].value().min()) > 1e-9
    return state.params.policy, state.params.value, {n: m.value() for n, m in metrics.items()}


MICROBATCHES = {"num_microbatches": 2}
SHUFFLED = {"num_minibatches": 2, "num_microbatches": 2}
METHODS = {
    "in groups": (grpo.make, grpo.Config(**MICROBATCHES), DEEP, None),
    "sorted": (grpo.make, grpo.Config(**MICROBATCHES), SHALLOW, None),
    "divided by the budget": (dr_grpo.make, dr_grpo.Config(**SHUFFLED), SHALLOW, None),
    "critic": (ppo.make, ppo.Config(**SHUFFLED, num_epochs=2), SHALLOW, SHALLOW),
    "a2c": (a2c.make, a2c.Config(**MICROBATCHES), SHALLOW, SHALLOW),
}


@pytest.fixture
def halves(monkeypatch):
    """Cuts rows to half or not at all, which saves compiling a program."""
    monkeypatch.setattr(lengths, "PARTS", (2, 1))


@pytest.mark.usefixtures("halves")
@cases(
    "name, seeds, devices",
    ("in groups", 1, 1),
    ("divided by the budget", 1, 1),
    ("a2c", 1, 2),
    slow("sorted", 2, 1),
    slow("critic", 1, 1),
)
def test_an_update_is_that_of_whole_rows(name, seeds, devices):
    """The case is on one device; on two devices, each device cuts its own rows."""
    found = trained(name, parallel.Placement(seeds, 1, devices))
    whole = trained(name, parallel.Placement(seeds, 1, 1), whole=True)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5), found, whole)


def test_short_budgets_and_dialogues_are_not_cut():
    assert problem_of(SHALLOW, budget=16).fast_paths.by_length is None
    game = dialogues.higher_lower(8, max_turns=3)
    model = SHALLOW.clone(vocabulary=game.tokenizer.size)
    assert (
        dialogues.make_problem(game, model, num_prompts=2, group_size=2).fast_paths.by_length
        is None
    )


def test_parts_of_kl_are_within_their_size():
    """Eight rows in at least three parts are processed two rows at a time."""
    seen = []

    def apply(params, inputs):
        seen.append(inputs.shape[0])
        return Categorical(jnp.zeros((*inputs.shape, 2))), inputs

    table = tabular_problem()._replace(apply=apply)
    zeros = jnp.zeros((8, 3))
    samples = Samples(zeros, zeros.astype(jnp.int32), zeros, zeros, zeros == 0.0)
    assert actor_critic.update_kl(table, ActorCritic(None, None), samples, num_parts=3)["kl"].count
    assert set(seen) == {2}
