"""Tests sharded parameters: the same numbers, one shard per device, checkpoints that fit any
mesh."""

import functools
from functools import cache
from typing import Any, NamedTuple

import chex
import hlo_counts
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from numpy.testing import assert_array_equal
from probes import norm
from tables import slow

from jaxrl_po import language, optimizers
from jaxrl_po.algorithms import grpo, ppo
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.language.unembedding import Unembedded
from jaxrl_po.run.devices import parallel, sharding
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import over_seeds
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.types import TrainState

TASK = language.tasks.addition(1, zero_pad=False)
SIZES = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=2, mlp_width=12)
MOVED = {"grpo": ("policy",), "ppo": ("policy", "value")}
ALONE, SQUARE, ROW = (
    Placement(1, 1, 1),
    Placement(1, 1, 2, 2, shard_params=True),
    Placement(1, 1, 4, shard_params=True),
)
SEEDS = Placement(2, 2, 2, 1, shard_params=True)


def learner(algorithm, placement):
    """Builds a learner of one seed; Adam has one leaf per parameter even for small networks, to
    shard moments."""
    model, critic = SIZES.build(TASK.tokenizer.size), SIZES.build(TASK.tokenizer.size, outputs=1)
    if placement.cuts_params:
        model, critic = (
            each.clone(constrain=sharding.rows_over_data(parallel.make_mesh(placement)))
            for each in (model, critic)
        )
    sizes = {"num_prompts": 8, "group_size": 2, "process_reward": True}
    optimizer = optimizers.adam(1e-2, max_grad_norm=1.0, flat_up_to=0)
    if algorithm == "grpo":
        return grpo.make(
            grpo.Config(num_minibatches=2), language.make_problem(TASK, model, **sizes), optimizer
        )
    problem = language.make_problem(TASK, model, critic=critic, **sizes)
    return ppo.make(ppo.Config(num_epochs=1, num_minibatches=1), problem, optimizer)


def over_mesh(learner, placement, **options):
    mesh, rules = parallel.make_mesh(placement), parallel.rules_of(placement)
    seeds = {"num_seeds": placement.num_seeds}
    return sharding.over_mesh(learner, mesh, LOGICAL_AXES, rules, **seeds, **options)


class Run(NamedTuple):
    """Results of one iteration over stacked seeds: compiled step, states before and after the
    step."""

    step: Any
    before: TrainState
    after: TrainState


@cache
def run(algorithm, placement):
    one = learner(algorithm, placement)
    if placement.cuts_params:
        placed = over_mesh(one, placement, flat_up_to=0)
    else:
        placed = over_seeds(one, placement.num_seeds)
    before = jax.jit(placed.init)(jax.random.split(jax.random.key(0), 2)[: placement.num_seeds])
    step = jax.jit(placed.step).lower(before).compile()
    return Run(step, before, step(before)[0])


def moved(one, seed=0):
    """Returns the changes of the parameters made by the step, by role."""
    return jax.tree.map(
        lambda a, b: np.asarray(b)[seed] - np.asarray(a)[seed], one.before.params, one.after.params
    )._asdict()


def held(leaf):
    """Returns the share of an array that one device stores."""
    return leaf.addressable_shards[0].data.size / leaf.size


@pytest.mark.parametrize(
    ("algorithm", "placement"),
    [("grpo", SQUARE), slow("grpo", ROW), slow("grpo", SEEDS), slow("ppo", SQUARE)],
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value[1:4])),
)
def test_numbers_are_those_of_one_device(algorithm, placement):
    one, alone = run(algorithm, placement), run(algorithm, ALONE)
    jax.tree.map(
        lambda a, b: assert_array_equal(a[0], b[0]), one.before.params, alone.before.params
    )
    want, got = moved(alone), moved(one)
    for role in MOVED[algorithm]:
        assert norm(want[role]) > 0
        assert norm(jax.tree.map(np.subtract, got[role], want[role])) <= 1e-4 * norm(want[role]), (
            role
        )


@pytest.mark.parametrize(
    ("algorithm", "placement"), [("grpo", SQUARE), ("grpo", ROW), slow("ppo", SQUARE)], ids=str
)
def test_each_device_holds_its_share_alone(algorithm, placement):
    one = run(algorithm, placement)
    tree = (one.after.params, one.after.reference_params, one.after.opt_state)
    shares = {
        jax.tree_util.keystr(path): held(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    blocks = [share for name, share in shares.items() if "kernel" in name and "output" not in name]
    # The count covers parameters, both moments of Adam and the reference.
    assert len(blocks) == {"grpo": 4, "ppo": 6}[algorithm] * 7
    assert set(blocks) == {1 / 4}
    ends = {share for name, share in shares.items() if "embedding" in name or "output" in name}
    assert ends <= {
        1 / placement.data_devices,
        1 / 4,
    }  # the single output of a critic is not sharded over the axis `model`
    whole, cut = (
        x.step.memory_analysis().argument_size_in_bytes for x in (run(algorithm, ALONE), one)
    )
    assert cut < 0.35 * whole


def test_rows_and_seeds_lie_over_their_axes():
    after = run("grpo", SEEDS).after
    assert after.collector.sharded["prompt_number"].sharding.shard_shape(
        after.collector.sharded["prompt_number"].shape
    ) == (1, 4)
    assert {
        leaf.sharding.shard_shape(leaf.shape)[0]
        for leaf in jax.tree.leaves((after.params, after.step))
    } == {1}


def test_a_checkpoint_fits_any_mesh(tmp_path):
    saved = run("grpo", SQUARE).before
    with Store(tmp_path) as store:
        store.save(0, saved)
        for placement, share in ((ALONE, 1.0), (ROW, 0.25)):
            one = run("grpo", placement)
            _, loaded = store.load(one.before)
            assert held(loaded.params.policy["params"]["blocks"]["mlp"]["up"]["kernel"]) == share
            jax.tree.map(assert_array_equal, loaded.params, saved.params)
            jax.tree.map(assert_array_equal, one.step(loaded)[0].params, one.after.params)


def test_rows_are_cut_through_sampling_and_training():
    """Each device caches and trains its own rows, and gathers parameters block by block."""
    program = run("grpo", ROW).step.as_text()
    rows, length = 16, TASK.prompt_length + TASK.answer_length - 1
    assert f"f32[{rows // 4},2,{length},4]" in program
    assert f"f32[{rows},2,{length},4]" not in program
    read = TASK.answer_length  # positions that each row has in the only block
    # Every pass is split into parts of a minibatch.
    batch, minibatch = rows * read, rows // 2 * read
    assert f"f32[{minibatch // 4},12]" in program
    for whole in (batch, minibatch):
        assert f"f32[{whole},12]" not in program


def test_sampling_parameters_are_rounded_but_trained_are_not():
    placed = over_mesh(learner("ppo", ROW), ROW, dtype=jnp.bfloat16)
    state = jax.eval_shape(placed.init, jax.random.split(jax.random.key(0), 1))
    program = str(jax.make_jaxpr(placed.sample)(state))
    width, hidden = SIZES.width, SIZES.mlp_width
    assert f"bf16[1,1,{width},{hidden}]" in program
    after = jax.eval_shape(placed.sample, state)[0]
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {jnp.dtype("float32")}


def test_logits_are_computed_where_their_rows_are():
    mesh, over = parallel.make_mesh(ROW), sharding.over_rows(parallel.make_mesh(ROW))
    keys = jax.random.split(jax.random.key(0), 3)
    hidden, matrix = jax.random.normal(keys[0], (8, 6, 4)), jax.random.normal(keys[1], (4, 32))
    weight = jax.random.normal(keys[2], (8, 6))

    def gradients(hidden, matrix, at_once, **own):
        def value(hidden, matrix):
            return (weight * Unembedded(hidden, matrix, at_once=at_once, **own).entropy()).sum()

        return jax.grad(value, argnums=(0, 1))(hidden, matrix)

    want = jax.jit(gradients, static_argnums=2)(hidden, matrix, 32 * 48)
    places = [jax.NamedSharding(mesh, axes) for axes in (P("data"), P("data", None))]
    placed = jax.device_put((hidden, matrix), tuple(places))
    found = []
    for rows in (12, 3):  # each device has 12 rows
        of_rows = functools.partial(gradients, at_once=32 * rows, over_rows=over)
        program = jax.jit(of_rows, out_shardings=tuple(places)).lower(*placed).compile()
        found.append(hlo_counts.Program(program.as_text()).counts().collectives)
        chex.assert_trees_all_close(program(*placed), want, rtol=1e-4, atol=1e-5)
    whole, parts = found
    assert parts == whole
    assert 0 < sum(transfer.count for transfer in whole.values()) <= 3


def test_transformer_table_has_every_matrix():
    for switches in ({}, {"gated": False, "tied": True, "kv_heads": 1}):
        model = language.ModelSettings(**{**vars(SIZES), **switches}).build(14)
        params = jax.eval_shape(
            model.init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32), jnp.zeros(1, jnp.int32)
        )
        for path, leaf in jax.tree_util.tree_leaves_with_path(params):
            logical = LOGICAL_AXES.get(tuple(key.key for key in path[-2:]), ())
            assert len(logical) == (0 if path[-1].key == "scale" else leaf.ndim), path


def test_what_does_not_divide_stays_whole():
    mesh = parallel.make_mesh(Placement(1, 1, 2, 4))
    path = (jax.tree_util.DictKey("output"), jax.tree_util.DictKey("kernel"))
    rules = sharding.FULLY_SHARDED | sharding.TENSOR_PARALLEL
    for shape, want in (
        ((8, 8), P("data", "model")),
        ((7, 8), P(None, "model")),
        ((8, 6), P("data", None)),
        ((8,), P()),
    ):
        assert sharding.partition(path, shape, mesh, LOGICAL_AXES, rules) == want
    assert sharding.partition(path[:1], (8, 8), mesh, LOGICAL_AXES, rules) == P()
    assert sharding.partition((), (8, 8), mesh, LOGICAL_AXES, rules) == P()
    assert parallel.rules_of(Placement(1, 1, 2)) == sharding.TENSOR_PARALLEL
