"""Parameters cut over devices: one table of logical axes, rules from those to mesh axes, and XLA's partitioner does the rest.

The learner is the same, made without a device axis: under `jit` every statistic is global, and
where a sum needs other devices the compiler communicates. Parameters, reference and optimizer state
follow one table by the ends of their paths.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_po.run import parallel
from jaxrl_po.run.parallel import Placement
from jaxrl_po.types import Batch, Learner, Metrics, TrainState

LogicalAxes = Mapping[tuple[str, ...], tuple[str, ...]]
"""The last two names of a parameter's path to a name for each of its dimensions; a parameter that is left out is not cut."""
Rules = Mapping[str, str]
"""Logical axis to mesh axis; an axis that is left out is not cut."""

FULLY_SHARDED: Rules = {"embed": "data"}
TENSOR_PARALLEL: Rules = {"heads": "model", "kv_heads": "model", "mlp": "model", "vocab": "model"}


def rules_of(placement: Placement) -> Rules:
    """Tensor parallel over `model`, and fully sharded over `data` where the placement says so."""
    return {**TENSOR_PARALLEL, **(FULLY_SHARDED if placement.shard_params else {})}


def partition(path: Any, shape: tuple[int, ...], mesh: Mesh, axes: LogicalAxes, rules: Rules) -> P:
    """How one array of a state is cut.

    A dimension that its mesh axis does not divide stays whole, as does an array whose path ends
    like a parameter's but which has other dimensions.

    Args:
      path: of the leaf, as `jax.tree_util` gives it. Adam's moments carry that of their parameter
        at their end.
      shape: of the leaf.
      mesh: see `parallel.make_mesh`.
      axes: see `LogicalAxes`.
      rules: see `Rules`.

    Returns:
      The partition; without names where all is whole.

    Example:
      >>> from jax.tree_util import DictKey
      >>> mesh = jax.make_mesh((1, 1), ("data", "model"))
      >>> axes = {("up", "kernel"): ("embed", "mlp")}
      >>> partition((DictKey("up"), DictKey("kernel")), (8, 6), mesh, axes, {"embed": "data", "mlp": "model"})
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
    """Where every leaf of a stacked state lies.

    Args:
      state: stacked seeds, leaves (or shapes) `[S, …]`.
      mesh: see `parallel.make_mesh`.
      axes: see `LogicalAxes`.
      rules: see `Rules`.

    Returns:
      A tree like `state` of `NamedSharding`s: seeds over `seed`; of each seed, parameters,
      reference and optimizer state by their axes, `collector.sharded` over `data`, all else whole.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        return NamedSharding(mesh, P("seed", *partition(path, leaf.shape[1:], mesh, axes, rules)))

    placed: TrainState = jax.tree_util.tree_map_with_path(of, state)
    frozen = jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, partition(path, leaf.shape, mesh, axes, rules)),
        state.params.frozen,
    )
    placed = placed._replace(params=placed.params._replace(frozen=frozen))
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P("seed", "data")), state.collector.sharded)
    return placed._replace(collector=placed.collector._replace(sharded=rows))


def rows_over_data(placement: Placement) -> Callable[[jax.Array], jax.Array]:
    """Cuts the leading axis of activations over `data`, for `Transformer.constrain`: this is what decides who works on what.

    With it the compiler gathers a block's parameters where the block uses them and scatters their
    gradient; without it, it may leave the parameters where they are and cut the width of the
    activations, with all rows on every device. Caches and batches follow from it. Arrays that the
    devices do not divide (a lone row of `init`) are left open.

    Args:
      placement: see `parallel.choose`.
    """
    rows = NamedSharding(parallel.make_mesh(placement), P("data"))

    def constrain(x: jax.Array) -> jax.Array:
        return (
            x if x.shape[0] % placement.data_devices else jax.lax.with_sharding_constraint(x, rows)
        )

    return constrain


def over_mesh(learner: Learner, placement: Placement, axes: LogicalAxes) -> Learner:
    """The learner over stacked seeds, with its parameters cut over the mesh.

    Args:
      learner: of one seed, made without a device axis, of a model that constrains its activations
        to `rows_over_data`.
      placement: see `parallel.choose`.
      axes: see `LogicalAxes`.

    Returns:
      The learner, to be jitted, with leaves that lead with `[S]`. The numbers do not depend on the
      placement, but for the order of floating-point sums.
    """
    mesh, rules = parallel.make_mesh(placement), rules_of(placement)
    stacked = parallel.over_seeds(learner, placement.num_seeds, spmd_axis_name="seed")

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

    return Learner(lambda keys: place(stacked.init(keys)), sample, update)
