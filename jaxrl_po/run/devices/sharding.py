"""Where each array of a state lies on a mesh, and the learner whose parameters are sharded.

A table of logical axes and rules from those to mesh axes decide. Parameters, reference and
optimizer state are looked up in one table, by the ends of their paths.
"""

from collections.abc import Callable, Mapping

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import KeyPath
from jax.typing import DTypeLike

from jaxrl_po.optimizers import FLAT_UP_TO
from jaxrl_po.run.devices.seeds import over_seeds
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, TrainState

LogicalAxes = Mapping[tuple[str, ...], tuple[str, ...]]
"""The last two names of a parameter's path to its logical axes; others are not sharded."""
Rules = Mapping[str, str]
"""Logical axis to mesh axis; an axis that is left out is not sharded."""

FULLY_SHARDED: Rules = {"embed": "data"}
TENSOR_PARALLEL: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def partition(
    path: KeyPath, shape: tuple[int, ...], mesh: Mesh, axes: LogicalAxes, rules: Rules
) -> P:
    """The partition of one array of a state.

    A dimension that its mesh axis does not divide is replicated, as is an array whose path ends
    like a parameter's but which has another number of dimensions.

    Args:
      path: of the leaf, as `jax.tree_util` gives it. The path of an Adam moment ends with that of
        its parameter.
      shape: of the leaf.
      mesh: see `make_mesh`.
      axes: see `LogicalAxes`.
      rules: see `Rules`.

    Returns:
      The partition; empty if the array is not in the table.

    Example:
      >>> from jax.tree_util import DictKey
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> path, axes = (DictKey("up"), DictKey("kernel")), {("up", "kernel"): ("embed", "mlp")}
      >>> partition(path, (8, 6), mesh, axes, {"embed": "data", "mlp": "model"})
      P('data', 'model')
    """
    logical = logical_of(path, axes)
    if len(logical) != len(shape):
        return P()
    pairs = zip(map(rules.get, logical), shape, strict=True)
    return P(*(name if name and size % mesh.shape[name] == 0 else None for name, size in pairs))


def logical_of(path: KeyPath, axes: LogicalAxes) -> tuple[str, ...]:
    """The logical axes of the array at a path; empty if it is not in the table."""
    return axes.get(tuple(jax.tree_util.keystr((key,), simple=True) for key in path[-2:]), ())


def shardings(state: TrainState, mesh: Mesh, axes: LogicalAxes, rules: Rules) -> TrainState:
    """The sharding of every leaf of a stacked state.

    Args:
      state: stacked over seeds, leaves (or shapes) `[S, …]`.
      mesh: see `make_mesh`.
      axes: see `LogicalAxes`.
      rules: see `Rules`.

    Returns:
      A tree like `state` of `NamedSharding`s: seeds over `seed`; within a seed, parameters,
      reference and optimizer state by their logical axes, `collector.sharded` over `data`, all else
      replicated.
    """
    placed: TrainState = by_axes(state, mesh, axes, rules)
    # Frozen parameters have no seed axis.
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition(path, leaf.shape, mesh, axes, rules)),
        state.params.frozen,
    )
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P("seed", "data")), state.collector.sharded)
    return placed.with_frozen(frozen)._replace(collector=placed.collector._replace(sharded=rows))


def by_axes(tree: PyTree, mesh: Mesh, axes: LogicalAxes, rules: Rules) -> PyTree:
    """The sharding of every leaf `[S, …]` of a tree: seeds over `seed`, and by its logical axes."""

    def of(path: KeyPath, leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P("seed", *partition(path, leaf.shape[1:], mesh, axes, rules)))

    return jax.tree_util.tree_map_with_path(of, tree)


def rows_over_data(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Shards the leading axis of activations over `data`, for `Transformer.constrain`.

    This constraint decides how the work is split. With it, the compiler all-gathers a block's
    parameters where the block uses them and reduce-scatters their gradient; without it, it may keep
    the parameters in place and shard the width of the activations, with all rows on every device.
    Caches and batches follow from it. Arrays whose rows the devices do not divide (the single row
    of `init`) are not constrained.

    Args:
      mesh: see `parallel.make_mesh`.
    """
    rows = NamedSharding(mesh, P("data"))

    def constrain(x: jax.Array) -> jax.Array:
        whole = x.shape[0] % mesh.shape["data"]
        return x if whole else jax.lax.with_sharding_constraint(x, rows)

    return constrain


def over_rows(mesh: Mesh) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
    """Runs a function of parameters and rows where the rows are, for `Transformer.over_rows`.

    A loop over parts of the rows then gathers neither rows nor parameters, and sums no gradient
    over devices, in each turn: both are done once, outside it. What the devices do not divide is
    left to the compiler.

    Args:
      mesh: see `parallel.make_mesh`.
    """

    def over(function: Callable[..., PyTree]) -> Callable[..., PyTree]:
        local = jax.shard_map(
            function,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=P("data"),
            axis_names={"seed", "data"},
            check_vma=False,
        )

        def call(params: PyTree, rows: PyTree) -> PyTree:
            whole = jax.tree.leaves(rows)[0].shape[0] % mesh.shape["data"]
            return (function if whole else local)(params, rows)

        return call

    return over


def over_mesh(
    learner: Learner,
    mesh: Mesh,
    axes: LogicalAxes,
    rules: Rules,
    *,
    num_seeds: int,
    dtype: DTypeLike | None = None,
    start: PyTree = 0,
    flat_up_to: int = FLAT_UP_TO,
) -> Learner:
    """The learner over stacked seeds, with its parameters sharded over the mesh.

    Args:
      learner: of one seed, made without a device axis, of a model whose activations are constrained
        by `rows_over_data`.
      mesh: see `parallel.make_mesh`.
      axes: see `LogicalAxes`.
      rules: see `Rules`.
      num_seeds: S, over all devices.
      dtype: of the products in blocks, to which the sampler may round their parameters; None for
        that of the parameters.
      start: see `over_seeds`.
      flat_up_to: up to so many parameters are whole in an update: those of which the optimizer
        makes one vector, see `optimizers.flat_if_small`. Of shards it would cost hundreds of
        permutations.

    Returns:
      The learner, to be jitted; its leaves lead with `[S]`. Results do not depend on the placement,
      except for the order of floating-point sums.
    """
    stacked = over_seeds(learner, num_seeds, start=start, spmd_axis_name="seed")

    def place(state: TrainState) -> TrainState:
        where = shardings(state, mesh, axes, rules)
        placed: TrainState = jax.lax.with_sharding_constraint(state, where)
        return placed

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        # The decode loop reads every parameter of the policy in each step: they are gathered once,
        # before it, with as many bits as are read.
        state = place(state)
        read = state.params._replace(value=None)
        if dtype is not None:
            read = jax.tree_util.tree_map_with_path(rounded, read)
        gathered = shardings(state._replace(params=read), mesh, axes, TENSOR_PARALLEL)
        held = jax.lax.with_sharding_constraint(read, gathered.params)
        held = held._replace(value=state.params.value)
        sampled, batch = stacked.sample(state._replace(params=held))
        return place(sampled._replace(params=state.params)), batch

    def rounded(path: KeyPath, leaf: jax.Array) -> jax.Array:
        of_block = "layers" in logical_of(path, axes)
        return leaf.astype(dtype) if of_block else leaf

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        sizes = [leaf.size for leaf in jax.tree.leaves(state.params.without_frozen())]
        around = whole if sum(sizes) <= flat_up_to * num_seeds else place
        state, metrics = stacked.update(around(place(state)), batch)
        return place(around(state)), metrics

    def whole(state: TrainState) -> TrainState:
        where = shardings(state, mesh, axes, {}).params
        return state._replace(params=jax.lax.with_sharding_constraint(state.params, where))

    return Learner(lambda start: place(stacked.init(start)), sample, update)
