"""Sharded parameters: a table of logical axes, and rules from those to mesh axes.

The learner is the same one, made without a device axis: under `jit`, arrays are global and the
partitioner inserts the communication. Parameters, reference and optimizer state are looked up in
one table, by the ends of their paths.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import over_seeds, stack
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, TrainState

LogicalAxes = Mapping[tuple[str, ...], tuple[str, ...]]
"""The last two names of a parameter's path to its logical axes; others are not sharded."""
Rules = Mapping[str, str]
"""Logical axis to mesh axis; an axis that is left out is not sharded."""

FULLY_SHARDED: Rules = {"embed": "data"}
TENSOR_PARALLEL: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def rules_of(placement: Placement) -> Rules:
    """Tensor parallel over `model`, and with `shard_params` fully sharded over `data`."""
    return {**TENSOR_PARALLEL, **(FULLY_SHARDED if placement.shard_params else {})}


def partition(path: Any, shape: tuple[int, ...], mesh: Mesh, axes: LogicalAxes, rules: Rules) -> P:
    """The partition of one array of a state.

    A dimension that its mesh axis does not divide is replicated, as is an array whose path ends
    like a parameter's but which has another number of dimensions.

    Args:
      path: of the leaf, as `jax.tree_util` gives it. The path of an Adam moment ends with that of
        its parameter.
      shape: of the leaf.
      mesh: see `parallel.make_mesh`.
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
    logical = axes.get(tuple(jax.tree_util.keystr((key,), simple=True) for key in path[-2:]), ())
    if len(logical) != len(shape):
        return P()
    names = [rules.get(axis) for axis in logical]
    return P(
        *(
            name if name and size % mesh.shape[name] == 0 else None
            for name, size in zip(names, shape, strict=True)
        )
    )


def shardings(state: TrainState, mesh: Mesh, axes: LogicalAxes, rules: Rules) -> TrainState:
    """The sharding of every leaf of a stacked state.

    Args:
      state: stacked over seeds, leaves (or shapes) `[S, …]`.
      mesh: see `parallel.make_mesh`.
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
    placed = placed._replace(params=placed.params._replace(frozen=frozen))
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P("seed", "data")), state.collector.sharded)
    return placed._replace(collector=placed.collector._replace(sharded=rows))


def by_axes(tree: PyTree, mesh: Mesh, axes: LogicalAxes, rules: Rules) -> Any:
    """The sharding of every leaf `[S, …]` of a tree: seeds over `seed`, and by its logical axes."""

    def of(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("seed", *partition(path, leaf.shape[1:], mesh, axes, rules)))

    return jax.tree_util.tree_map_with_path(of, tree)


def rows_over_data(placement: Placement) -> Callable[[jax.Array], jax.Array]:
    """Shards the leading axis of activations over `data`, for `Transformer.constrain`.

    This constraint decides how the work is split. With it, the compiler all-gathers a block's
    parameters where the block uses them and reduce-scatters their gradient; without it, it may keep
    the parameters in place and shard the width of the activations, with all rows on every device.
    Caches and batches follow from it. Arrays whose rows the devices do not divide (the single row
    of `init`) are not constrained.

    Args:
      placement: see `parallel.choose`.
    """
    rows = NamedSharding(parallel.make_mesh(placement), P("data"))

    def constrain(x: jax.Array) -> jax.Array:
        return (
            x if x.shape[0] % placement.data_devices else jax.lax.with_sharding_constraint(x, rows)
        )

    return constrain


def over_mesh(
    learner: Learner, placement: Placement, axes: LogicalAxes, *, start: Any = 0
) -> Learner:
    """The learner over stacked seeds, with its parameters sharded over the mesh.

    Args:
      learner: of one seed, made without a device axis, of a model whose activations are constrained
        by `rows_over_data`.
      placement: see `parallel.choose`.
      axes: see `LogicalAxes`.
      start: see `seeds.over_seeds`.

    Returns:
      The learner, to be jitted; its leaves lead with `[S]`. Results do not depend on the placement,
      except for the order of floating-point sums.
    """
    mesh, rules = parallel.make_mesh(placement), rules_of(placement)
    stacked = over_seeds(learner, placement.num_seeds, start=start, spmd_axis_name="seed")

    def place(state: TrainState) -> TrainState:
        placed: TrainState = jax.lax.with_sharding_constraint(
            state, shardings(state, mesh, axes, rules)
        )
        return placed

    def sample(state: TrainState) -> tuple[TrainState, Batch]:
        state, batch = stacked.sample(place(state))
        return place(state), batch

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state, metrics = stacked.update(place(state), batch)
        return place(state), metrics

    return Learner(lambda start: place(stacked.init(start)), sample, update)


def each_seed(
    function: Callable[..., Any],
    placement: Placement,
    in_axes: Sequence[Any],
    axes: LogicalAxes,
) -> Callable[..., Any]:
    """A function of one seed over stacked seeds, its results sharded as `over_mesh` shards a state.

    Args:
      function: of one seed.
      placement: see `parallel.choose`.
      in_axes: prefix trees, 0 for what leads with `[S]`, None for what all seeds share.
      axes: see `LogicalAxes`.
    """
    mesh, rules = parallel.make_mesh(placement), rules_of(placement)
    stacked = stack(function, placement.num_seeds, in_axes, 0, spmd_axis_name="seed")

    def placed(*arguments: PyTree) -> PyTree:
        made = stacked(*arguments)
        return jax.lax.with_sharding_constraint(made, by_axes(made, mesh, axes, rules))

    return placed
