"""Placing a learner: seeds vmapped and sharded, or rows sharded, over devices."""

import contextlib
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_po.config import ConfigError
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Learner, PyTree, TrainState

MIN_ROWS = (
    16  # of a device, below which exchanging gradients costs more than sharing the work saves
)


class Placement(NamedTuple):
    """How seeds and rows lie on devices.

    Attributes:
      num_seeds: seeds, side by side.
      seed_devices: devices over which seeds are sharded.
      data_devices: devices over which the rows of each seed are sharded.
      model_devices: devices over which the parameters of each seed are cut (tensor parallel).
      shard_params: whether parameters are cut over the data devices as well (fully sharded data
        parallel).
    """

    num_seeds: int
    seed_devices: int
    data_devices: int
    model_devices: int = 1
    shard_params: bool = False

    @property
    def cuts_params(self) -> bool:
        """Whether no device holds all parameters: then `sharding` places the learner, and XLA communicates by itself."""
        return self.shard_params or self.model_devices > 1

    @property
    def axis_name(self) -> str | None:
        """The axis to hand to the config and the problem: `data` where rows are sharded under `shard_map`, else None."""
        return "data" if self.data_devices > 1 and not self.cuts_params else None

    @property
    def num_devices(self) -> int:
        """All devices that are used."""
        return self.seed_devices * self.data_devices * self.model_devices

    def describe(self) -> str:
        """One line for a person: what lies where."""
        if self.num_devices == 1:
            return f"{self.num_seeds} seed(s) on 1 device"
        if self.cuts_params:
            axes = {
                "seed": self.seed_devices,
                "data": self.data_devices,
                "model": self.model_devices,
            }
            over = [
                name
                for name, cut in (("data", self.shard_params), ("model", self.model_devices > 1))
                if cut
            ]
            mesh = " × ".join(f"{name} {size}" for name, size in axes.items())
            return (
                f"{self.num_seeds} seed(s) on {self.num_devices} devices ({mesh}), parameters "
                f"cut over {' and '.join(over)}"
            )
        if self.data_devices == 1:
            return (
                f"{self.num_seeds} seeds on {self.seed_devices} devices, "
                f"{self.num_seeds // self.seed_devices} on each"
            )
        rows = f"the rows of each sharded over {self.data_devices} devices"
        if self.seed_devices == 1:
            return f"{self.num_seeds} seed(s), {rows}"
        each = self.num_seeds // self.seed_devices
        return (
            f"{self.num_seeds} seeds in {self.seed_devices} shares of {each}, {rows}, "
            f"{self.num_devices} in all"
        )


def choose(
    devices: str | int,
    *,
    num_seeds: int,
    num_rows: int,
    mesh: str = "",
    shard_params: bool = False,
    num_processes: int = 1,
) -> Placement:
    """Decides how to use the devices; call it before anything runs, since it sets the number of CPU devices.

    Seeds are sharded where they divide evenly, since they need no communication; otherwise rows
    are. `auto` takes as many devices as are of use: on a CPU one for each core, because XLA keeps
    small batched matrix products to one core, but none for fewer than `MIN_ROWS` rows. A mesh says
    it all by hand.

    Args:
      devices: `auto`, or how many.
      num_seeds: seeds side by side.
      num_rows: rows (environments or prompts) of each seed.
      mesh: `seed:S,data:D,model:M`, devices of each axis, of which any may be left out; empty to
        choose.
      shard_params: cut parameters over the data devices; rows are then sharded rather than seeds.
      num_processes: share the devices, all of which they must use; 0 if the cluster alone knows.

    Returns:
      The placement.

    Raises:
      ConfigError: a count below 1, more devices than there are, a mesh of another number of
        devices, seeds or rows that do not divide, devices that do not divide among the processes.
    """
    placement = _choose(
        _parse_devices(devices), num_seeds, num_rows, mesh, shard_params, num_processes
    )
    if jax.process_count() > 1 and placement.num_devices != jax.device_count():
        raise ConfigError(
            f"devices must be all {jax.device_count()} of the {jax.process_count()} "
            f"processes, got {placement.num_devices}: let them divide the {num_seeds} seeds "
            f"or the {num_rows} rows (environments or prompts)"
        )
    return placement


def _choose(
    wanted: int | None,
    num_seeds: int,
    num_rows: int,
    mesh: str,
    shard_params: bool,
    num_processes: int,
) -> Placement:
    if mesh:
        return _by_hand(mesh, wanted, num_seeds, num_rows, num_processes)._replace(
            shard_params=shard_params
        )
    available = _available(wanted, num_processes)
    shares = 1 if shard_params else num_seeds
    if wanted is None:
        usable = [
            n
            for n in range(available, 0, -1)
            if shares % n == 0 or (num_rows % n == 0 and num_rows >= n * MIN_ROWS)
        ]
        wanted = usable[0]
    if wanted > available:
        raise ConfigError(f"devices must be at most {available}, the number there is, got {wanted}")
    if shares % wanted == 0:
        return Placement(num_seeds, wanted, 1, shard_params=shard_params)
    if num_rows % wanted == 0:
        return Placement(num_seeds, 1, wanted, shard_params=shard_params)
    raise ConfigError(
        f"devices={wanted} must divide the {num_seeds} seeds or the {num_rows} rows "
        "(environments or prompts)"
    )


def _by_hand(
    mesh: str, devices: int | None, num_seeds: int, num_rows: int, num_processes: int
) -> Placement:
    axes = {"seed": 1, "data": 1, "model": 1}
    for part in mesh.split(","):
        name, _, count = part.partition(":")
        if name not in axes or not count.isdecimal() or int(count) < 1:
            raise ConfigError(
                "mesh must read like seed:2,data:4,model:1, with counts of at least 1, got "
                f"{mesh!r}"
            )
        axes[name] = int(count)
    placement = Placement(num_seeds, axes["seed"], axes["data"], axes["model"])
    if devices is not None and devices != placement.num_devices:
        raise ConfigError(f"mesh={mesh} has {placement.num_devices} devices, but devices={devices}")
    available = _available(placement.num_devices, num_processes)
    if placement.num_devices > available:
        raise ConfigError(
            f"mesh={mesh} needs {placement.num_devices} devices, and there are {available}"
        )
    for name, number, what in (
        ("seed", num_seeds, "seeds"),
        ("data", num_rows, "rows (environments or prompts)"),
    ):
        if number % axes[name]:
            raise ConfigError(f"mesh={mesh}: {name}:{axes[name]} must divide the {number} {what}")
    return placement


def _parse_devices(devices: str | int) -> int | None:
    if devices == "auto":
        return None
    try:
        count = int(devices)
    except ValueError:
        count = 0
    if count < 1:
        raise ConfigError(f"devices must be 'auto' or a positive number, got {devices!r}")
    return count


def _available(wanted: int | None, num_processes: int) -> int:
    """Devices of the default backend in all processes; a CPU is split into as many as asked for, or one for each core."""
    if wanted and num_processes and wanted % num_processes:
        raise ConfigError(f"devices={wanted} must be a multiple of the {num_processes} processes")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with contextlib.suppress(RuntimeError):  # the backend runs already: take it as it is
        jax.config.update(
            "jax_num_cpu_devices", wanted // num_processes if wanted and num_processes else cores
        )
    return jax.device_count()


SEEDS = P("seed")

# The seed axis of a stacked state, as `jax.vmap` reads it: all seeds share what is frozen.
STATE_AXES: Any = TrainState(
    params=ActorCritic(0, 0, None),
    opt_state=0,
    reference_params=0,
    kl_coefficient=0,  # type: ignore[arg-type]
    collector=0,  # type: ignore[arg-type]
    key=0,  # type: ignore[arg-type]
    step=0,  # type: ignore[arg-type]
)


def over_seeds(learner: Learner, num_seeds: int, *, spmd_axis_name: str | None = None) -> Learner:
    """The same learner on a leading seed axis: keys, state, batch and metrics lead with `[S]`.

    One seed is not vmapped but only given its axis: batching alone would slow its sorts and
    gathers. `spmd_axis_name` is the mesh axis of the seeds, for sharding constraints inside the
    learner.
    """

    def over(function: Callable[..., Any], in_axes: Any, out_axes: Any) -> Callable[..., Any]:
        if num_seeds > 1:
            return jax.vmap(function, in_axes, out_axes, spmd_axis_name=spmd_axis_name)
        return lambda *trees: _each(
            out_axes,
            lambda x: x[None],
            function(
                *(
                    _each(axes, lambda x: x[0], tree)
                    for axes, tree in zip(in_axes, trees, strict=True)
                )
            ),
        )

    return Learner(
        over(learner.init, (0,), STATE_AXES),
        over(learner.sample, (STATE_AXES,), (STATE_AXES, 0)),
        over(learner.update, (STATE_AXES, 0), (STATE_AXES, 0)),
    )


def of_seed(state: TrainState, index: int = 0) -> TrainState:
    """The state of one seed of a stacked state."""
    taken: TrainState = _each(STATE_AXES, lambda x: x[index], state)
    return taken


def _each(axes: PyTree, function: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Applies a function to the leaves that have a seed axis, by a prefix tree of 0 and None."""
    return jax.tree.map(
        lambda axis, subtree: subtree if axis is None else jax.tree.map(function, subtree),
        axes,
        tree,
        is_leaf=lambda x: x is None,
    )


def spread(
    function: Callable[..., Any], placement: Placement, in_specs: Any = SEEDS
) -> Callable[..., Any]:
    """A function of arrays that lead with `[S]`, each seed where it lives; nothing is communicated.

    Args:
      function: arrays `[S, …]` to arrays `[S, …]`, each seed by itself (a vmapped function).
      placement: see `choose`.
      in_specs: partition of the arguments; each seed where it lives.
    """
    if (
        placement.seed_devices == 1 or placement.cuts_params
    ):  # XLA spreads what lies on a mesh by itself
        return function
    return jax.shard_map(
        function,
        mesh=make_mesh(placement),
        in_specs=in_specs,
        out_specs=P("seed"),
        check_vma=False,
    )


def state_spec() -> Any:
    """Partition of a stacked state: seeds over `seed`; of each seed, `collector.sharded` over `data`, all else on every device.

    What is frozen is one copy on every device.
    """
    each, rows = P("seed"), P("seed", "data")
    spec: Any = TrainState
    collector: Any = CollectorState
    return spec(
        params=ActorCritic(each, each, P()),
        opt_state=each,
        reference_params=each,
        kl_coefficient=each,
        collector=collector(sharded=rows, replicated=each),
        key=each,
        step=each,
    )


def whole_state_spec() -> Any:
    """Partition of a stacked state whose rows are not sharded: seeds over `seed`."""
    return state_spec()._replace(collector=P("seed"))


def batch_spec() -> Any:
    """Partition of a stacked batch: seeds over `seed`; of each seed, rows over `data`, metrics on every device."""
    each, rows = P("seed"), P("seed", "data")
    spec: Any = Batch
    return spec(**{name: each if name == "metrics" else rows for name in Batch._fields})


def make_mesh(placement: Placement) -> Mesh:
    """The mesh `seed × data × model` over the first devices of the default backend."""
    shape = placement.seed_devices, placement.data_devices, placement.model_devices
    devices = np.array(jax.devices()[: placement.num_devices]).reshape(shape)
    return Mesh(devices, ("seed", "data", "model"), axis_types=(AxisType.Auto,) * 3)


def replicated(placement: Placement) -> NamedSharding:
    """A copy on every device of the placement: what all processes can read."""
    return NamedSharding(make_mesh(placement), P())


def over_devices(learner: Learner, placement: Placement) -> Learner:
    """The learner over stacked seeds and devices.

    Every device steps its seeds on its rows under `jax.shard_map`; means, statistics and gradients
    are pooled over `data` by the learner itself, which was made with
    `axis_name=placement.axis_name`.

    Args:
      learner: of one seed.
      placement: see `choose`.

    Returns:
      The learner, to be jitted, with leaves that lead with `[S]`. The numbers do not depend on the
      placement, but for the order of floating-point sums.
    """
    if placement.num_devices == 1:
        return over_seeds(learner, placement.num_seeds)
    own = over_seeds(learner, placement.num_seeds // placement.seed_devices)
    mesh, state, batch = make_mesh(placement), state_spec(), batch_spec()

    def over(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    # Seeds are initialised where they live; rows are sharded afterwards, so that their numbers do
    # not depend on the mesh.
    init = over(own.init, (P("seed"),), whole_state_spec())
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), state, is_leaf=lambda x: isinstance(x, P)
    )

    def init_sharded(keys: jax.Array) -> TrainState:
        made = init(keys)
        placed: TrainState = jax.lax.with_sharding_constraint(made, _broadcast(shardings, made))
        return placed

    return Learner(
        init_sharded,
        over(own.sample, (state,), (state, batch)),
        over(own.update, (state, batch), (state, P("seed"))),
    )


def _broadcast(prefix: Any, state: TrainState) -> TrainState:
    return jax.tree.map(
        lambda sharding, subtree: jax.tree.map(lambda _: sharding, subtree),
        prefix,
        state,
        is_leaf=lambda x: isinstance(x, NamedSharding),
    )
