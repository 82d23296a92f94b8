"""Sharding of every array of a training state over a mesh, and a learner of sharded parameters.

A table maps parameters to logical axes, and rules map logical axes to mesh axes. Parameters,
reference and optimizer state are looked up in the same table, by the ends of their paths.
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
"""Maps the last two names of a parameter's path to logical axes; others are not sharded."""
Rules = Mapping[str, str]
"""Maps logical axes to mesh axes; an axis that is missing is not sharded."""

FULLY_SHARDED: Rules = {"embed": "data"}
TENSOR_PARALLEL: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def partition(
    path: KeyPath, shape: tuple[int, ...], mesh: Mesh, axes: LogicalAxes, rules: Rules
) -> P:
    """Returns the partition spec of one array of a state.

    A dimension is replicated if the size of its mesh axis does not divide it. An array is
    replicated if its path ends like a parameter's path but its number of dimensions differs.

    Args:
      path: path of the leaf, as `jax.tree_util` returns paths. The path of an Adam moment ends with
        the path of the moment's parameter.
      shape: shape of the leaf.
      mesh: mesh of the devices, see `make_mesh`.
      axes: logical axes of the parameters, see `LogicalAxes`.
      rules: mesh axes of the logical axes, see `Rules`.

    Returns:
      The partition spec; empty if the table `axes` does not contain the array.

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
    """Returns the logical axes of the array at a path; empty if the table lacks that path."""
    return axes.get(tuple(jax.tree_util.keystr((key,), simple=True) for key in path[-2:]), ())


def shardings(state: TrainState, mesh: Mesh, axes: LogicalAxes, rules: Rules) -> TrainState:
    """Returns the sharding of every leaf of a stacked state.

    Args:
      state: state stacked over seeds, with leaves (or shapes) `[S, …]`.
      mesh: mesh of the devices, see `make_mesh`.
      axes: logical axes of the parameters, see `LogicalAxes`.
      rules: mesh axes of the logical axes, see `Rules`.

    Returns:
      A tree like `state` of `NamedSharding`s: seeds over `seed`. Within a seed, parameters,
      reference and optimizer state follow their logical axes, `collector.sharded` is sharded over
      `data`, and every other leaf is replicated.
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
    """Returns shardings of leaves `[S, …]`: seeds over `seed`, other dimensions by logical axes."""

    def of(path: KeyPath, leaf: jax.Array) -> NamedSharding:
        return NamedSharding(mesh, P("seed", *partition(path, leaf.shape[1:], mesh, axes, rules)))

    return jax.tree_util.tree_map_with_path(of, tree)


def rows_over_data(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    """Returns a function that shards the batch rows of activations over `data`.

    The function serves as `Transformer.constrain`. The constraint decides how the work is split.
    With the constraint, the compiler all-gathers a block's parameters at the block that uses them
    and reduce-scatters their gradient. Without the constraint, the compiler may leave the
    parameters in place and shard the width of the activations, with all batch rows on every device.
    Caches and batches inherit the sharding. An array is not constrained if the devices do not
    divide its number of rows; the single row of `init` is an example.

    Args:
      mesh: mesh of the devices, see `parallel.make_mesh`.
    """
    rows = NamedSharding(mesh, P("data"))

    def constrain(x: jax.Array) -> jax.Array:
        whole = x.shape[0] % mesh.shape["data"]
        return x if whole else jax.lax.with_sharding_constraint(x, rows)

    return constrain


def over_rows(mesh: Mesh) -> Callable[[Callable[..., PyTree]], Callable[..., PyTree]]:
    """Returns a wrapper that runs a function of parameters and batch rows on the rows' devices.

    The wrapper serves as `Transformer.over_rows`. A loop over parts of the rows then gathers
    neither rows nor parameters, and sums no gradient over devices, in each iteration: gather and
    sum happen once, outside the loop. If the number of devices does not divide the number of rows,
    the compiler partitions the function.

    Args:
      mesh: mesh of the devices, see `parallel.make_mesh`.
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
    """Maps a learner over stacked seeds, with the learner's parameters sharded over the mesh.

    Args:
      learner: learner of a single seed, made without a device axis, with a model whose activations
        are constrained by `rows_over_data`.
      mesh: mesh of the devices, see `parallel.make_mesh`.
      axes: logical axes of the parameters, see `LogicalAxes`.
      rules: mesh axes of the logical axes, see `Rules`.
      num_seeds: number S of seeds over all devices.
      dtype: dtype of the matrix products in transformer blocks; the sampler may round the blocks'
        parameters to this dtype. None for the dtype of the parameters.
      start: prefix tree of the argument of `init`, see `over_seeds`.
      flat_up_to: largest number of parameters per seed that an update gathers on each device. The
        optimizer flattens so few parameters into one vector, see `optimizers.flat_if_small`;
        flattening shards instead would cost hundreds of permutations.

    Returns:
      The learner of all seeds, to be jitted; leaves lead with `[S]`. Results do not depend on the
      placement, except for the order of floating-point sums.
    """
    stacked = over_seeds(learner, num_seeds, start=start, spmd_axis_name="seed")

    def place(state: TrainState) -> TrainState:
        where = shardings(state, mesh, axes, rules)
        placed: TrainState = jax.lax.with_sharding_constraint(state, where)
        return placed

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        # The decode loop reads every parameter of the policy in each step: the parameters are
        # gathered once, before the loop, at the precision that the loop reads.
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
