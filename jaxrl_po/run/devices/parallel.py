"""Sharding over devices: of whole seeds, of a seed's batch rows, or of a seed's parameters.

Seeds on one device are vmapped. Parameters are sharded (see `sharding`) by building the same
learner without a device axis: under `jit`, arrays are global and the partitioner inserts the
communication.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices.seeds import over_seeds, stack
from jaxrl_po.run.devices.sharding import (
    FULLY_SHARDED,
    TENSOR_PARALLEL,
    LogicalAxes,
    Rules,
    by_axes,
    over_mesh,
)
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Learner, PyTree, TrainState

# With fewer batch rows per device, the all-reduce of gradients costs more than sharding saves.
MIN_ROWS = 16


class Placement(NamedTuple):
    """Placement of seeds, batch rows and parameters on devices.

    Attributes:
      num_seeds: number of seeds that train side by side.
      seed_devices: number of devices that seeds are sharded over.
      data_devices: number of devices that the batch rows of each seed are sharded over.
      model_devices: number of devices that the parameters of each seed are sharded over (tensor
        parallel).
      shard_params: whether parameters are also sharded over the data devices (fully sharded data
        parallel).
      described: Devices of a machine that is not attached, or the result of `core_devices`; empty
        to use the devices of the default backend.
    """

    num_seeds: int
    seed_devices: int
    data_devices: int
    model_devices: int = 1
    shard_params: bool = False
    described: tuple[Any, ...] = ()

    @property
    def target(self) -> Target:
        """Returns the machine that programs are compiled for."""
        if not self.described:
            return backend.here()
        return Target(self.described[0].platform, len(self.described), 1)

    @property
    def cuts_params(self) -> bool:
        """Returns whether parameters are sharded; `over_mesh` then replaces `shard_map`."""
        return self.shard_params or self.model_devices > 1

    @property
    def axis_name(self) -> str | None:
        """Returns the name `data` of the device axis if `shard_map` shards batch rows, or None."""
        return "data" if self.data_devices > 1 and not self.cuts_params else None

    @property
    def num_devices(self) -> int:
        """Returns the number of devices that the placement uses."""
        return self.seed_devices * self.data_devices * self.model_devices

    @property
    def is_one(self) -> bool:
        """Returns whether a single device computes everything."""
        return self.num_devices == 1

    def of_seeds(self, num_seeds: int) -> Self:
        """Returns a placement of fewer seeds; if devices are too many, several compute a seed."""
        devices = math.gcd(num_seeds, self.seed_devices)
        copies = self.data_devices * self.seed_devices // devices
        return self._replace(num_seeds=num_seeds, seed_devices=devices, data_devices=copies)

    def describe(self) -> str:
        """Returns a line for users about the placement of seeds on devices."""
        seeds = f"{self.num_seeds:,} seed" + "s" * (self.num_seeds != 1)
        each = self.num_seeds // self.seed_devices
        if self.is_one:
            return f"{seeds} on 1 device"
        if self.cuts_params:
            data, model = self.data_devices, self.model_devices
            mesh = f"seed {self.seed_devices} × data {data} × model {model}"
            over = " and ".join(["data"] * self.shard_params + ["model"] * (model > 1))
            return f"{seeds} on {self.num_devices} devices ({mesh}), parameters sharded over {over}"
        if self.data_devices == 1:
            return f"{self.num_seeds} seeds on {self.seed_devices} devices, {each} on each"
        rows = f"the rows of each sharded over {self.data_devices} devices"
        if self.seed_devices == 1:
            return f"{seeds}, {rows}"
        shares = f"{self.num_seeds} seeds in {self.seed_devices} shares of {each}"
        return f"{shares}, {rows}, {self.num_devices} in all"


def choose(
    devices: str | int,
    *,
    num_seeds: int,
    num_rows: int,
    mesh: str = "",
    shard_params: bool = False,
    num_processes: int = 1,
    described: tuple[Any, ...] = (),
) -> Placement:
    """Decides how to use the devices; must precede all computation, since it may split the CPU.

    Seeds are sharded if the number of devices divides the number of seeds, since sharded seeds
    need no communication; otherwise batch rows are sharded. `auto` uses as many devices as help: on
    a CPU one per core, because XLA runs small batched matrix products on a single core. Batch rows
    are sharded only with `MIN_ROWS` or more per device. A mesh overrides all these rules.

    Args:
      devices: `auto`, or the number of devices.
      num_seeds: number of seeds that train side by side.
      num_rows: number of batch rows (environments or prompts) of each seed.
      mesh: `seed:S,data:D,model:M`, the number of devices per axis; an axis that is left out
        counts 1, an empty text chooses automatically.
      shard_params: whether to shard parameters over the data devices; batch rows are then sharded,
        but seeds are not.
      num_processes: number of processes, which together must use all devices; 0 if only the
        cluster knows the number.
      described: devices that replace the backend's devices and are all used; see `Placement`.

    Returns:
      The placement of seeds, batch rows and parameters on devices.

    Raises:
      ConfigError: a count is below 1, more devices are wanted than exist, a mesh contradicts
        `devices`, seeds or batch rows are not divisible by their devices, or devices are not
        divisible by the processes.
    """
    wanted = len(described) or _parse_devices(devices)
    axes = _parse_mesh(mesh, wanted) if mesh else {}
    asked = math.prod(axes.values()) if axes else wanted
    available = _available(asked, num_processes, described)
    if axes:
        placement = _by_hand(mesh, axes, num_seeds, num_rows, available)
    else:
        placement = _choose(wanted, num_seeds, num_rows, shard_params, available)
    placement = placement._replace(shard_params=shard_params, described=described)
    if jax.process_count() > 1 and placement.num_devices != jax.device_count():
        raise ConfigError(
            "devices",
            f"must be all {jax.device_count()} of the {jax.process_count()} processes, got "
            f"{placement.num_devices}: let them divide the {num_seeds} seeds or the {num_rows} "
            "rows (environments or prompts)",
        )
    return placement


def core_devices(devices: str | int, num_seeds: int) -> tuple[jax.Device, ...]:
    """Returns one device per CPU core if JAX has already started with one CPU device, else none.

    JAX accepts another number of devices only before its first computation, and the import of
    gymnax already computes. The returned devices belong to a separate client of the CPU; programs
    compiled for these devices also accept arrays of JAX's own device.

    Args:
      devices: Number of devices; `auto` chooses the most cores that divide the seeds evenly.
      num_seeds: Number of seeds that train side by side.
    """
    wanted, here = _parse_devices(devices), backend.cores()
    count = wanted or next(n for n in range(here, 0, -1) if num_seeds % n == 0)
    split = _available(wanted, num_processes=1) > 1 or not backend.here().on_cpu
    return () if split or count == 1 else _cpu_devices(count)


@functools.cache
def _cpu_devices(count: int) -> tuple[jax.Device, ...]:
    """Returns the devices of a second client of the CPU; empty if jaxlib cannot create a client."""
    try:  # jaxlib does not document its clients
        from jaxlib import xla_client

        client: Any = xla_client.make_cpu_client(num_devices=count)
        return tuple(client.devices())
    except (ImportError, AttributeError, TypeError):
        return ()


def _choose(
    wanted: int | None, num_seeds: int, num_rows: int, shard_params: bool, available: int
) -> Placement:
    shardable = 1 if shard_params else num_seeds
    if wanted is None:
        wanted = next(
            n
            for n in range(available, 0, -1)
            if shardable % n == 0 or (num_rows % n == 0 and num_rows >= n * MIN_ROWS)
        )
    if wanted > available:
        raise ConfigError("devices", f"must be at most {available}, all there are, got {wanted}")
    if shardable % wanted == 0:
        return Placement(num_seeds, wanted, 1)
    if num_rows % wanted == 0:
        return Placement(num_seeds, 1, wanted)
    raise ConfigError(
        "devices",
        f"must divide the {num_seeds} seeds or the {num_rows} rows (environments or prompts), got "
        f"{wanted}",
    )


def _parse_mesh(mesh: str, devices: int | None) -> dict[str, int]:
    """Returns the number of devices along each axis of a mesh that a flag describes."""
    axes: dict[str, int] = {}
    for part in mesh.split(","):
        name, _, count = part.partition(":")
        known = name in ("seed", "data", "model") and name not in axes
        if not (known and count.isdecimal() and int(count) > 0):
            raise ConfigError(
                "mesh",
                "must read like seed:2,data:4,model:1, each axis once, with counts of at least 1, "
                f"got {mesh!r}",
            )
        axes[name] = int(count)
    if devices not in (None, total := math.prod(axes.values())):
        raise ConfigError("mesh", f"{mesh} has {total} devices, but devices = {devices}")
    return {"seed": 1, "data": 1, "model": 1} | axes


def _by_hand(
    mesh: str, axes: dict[str, int], num_seeds: int, num_rows: int, available: int
) -> Placement:
    placement = Placement(num_seeds, axes["seed"], axes["data"], axes["model"])
    if placement.num_devices > available:
        raise ConfigError(
            "mesh", f"{mesh} needs {placement.num_devices} devices, there are {available}"
        )
    rows = ("data", num_rows, "rows (environments or prompts)")
    for name, size, what in (("seed", num_seeds, "seeds"), rows):
        if size % axes[name]:
            raise ConfigError(
                "mesh", f"{name}:{axes[name]} must divide the {size} {what}, got {mesh}"
            )
    return placement


def _parse_devices(devices: str | int) -> int | None:
    if devices == "auto":
        return None
    if not str(devices).isdecimal() or int(devices) < 1:
        raise ConfigError("devices", f"must be auto or a positive number, got {devices!r}")
    return int(devices)


def _available(wanted: int | None, num_processes: int, described: tuple[Any, ...] = ()) -> int:
    """Counts devices after splitting a CPU into `wanted` devices, or into one device per core."""
    if described:
        return len(described)
    if wanted and num_processes and wanted % num_processes:
        raise ConfigError(
            "devices", f"must be a multiple of the {num_processes} processes, got {wanted}"
        )
    count = wanted // num_processes if wanted and num_processes else backend.cores()
    with contextlib.suppress(RuntimeError):  # a backend that already runs keeps its devices
        jax.config.update("jax_num_cpu_devices", count)
    return device_count()


def device_count() -> int:
    """Counts the devices of the default backend in all processes.

    Raises:
      ConfigError: the backend that the environment names is not available.
    """
    try:
        return jax.device_count()
    except (RuntimeError, AssertionError) as error:  # JAX asserts that it knows a plugin
        platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise ConfigError(
            "devices",
            f"JAX_PLATFORMS = {platforms} must name backends that are installed and have a "
            f"device, such as cpu: {str(error) or 'no device found'}",
        ) from None


SEEDS: Any = P("seed")


def on_devices(
    function: Callable[..., Any], placement: Placement, in_specs: Any, out_specs: Any = SEEDS
) -> Callable[..., Any]:
    """Runs a function on every device, each device on its own shard of the arguments."""
    # Replication is not checked: a result is replicated over `data` because the function reduces
    # over that axis, or because every device computes the same result.
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, mesh=make_mesh(placement), **specs, check_vma=False)


def spread(
    function: Callable[..., PyTree], placement: Placement, in_specs: Any = SEEDS
) -> Callable[..., PyTree]:
    """Runs a function of stacked seeds on the devices of each seed, without communication.

    Args:
      function: `([S, …]) -> [S, …]`, independent over seeds (vmapped).
      placement: placement of seeds on devices, see `choose`.
      in_specs: partition spec of the arguments; by default over the seed axis.
    """
    # With one seed device or sharded parameters, XLA partitions the function itself, according to
    # the shardings of the arguments.
    if placement.seed_devices == 1 or placement.cuts_params:
        return function
    return on_devices(function, placement, in_specs)


def specs_of(axes: PyTree) -> PyTree:
    """Returns partition specs for a prefix tree: 0 is sharded over seeds, None is replicated."""
    return jax.tree.map(
        lambda axis: P() if axis is None else SEEDS, axes, is_leaf=lambda x: x is None
    )


def each_seed(
    function: Callable[..., PyTree],
    placement: Placement,
    in_axes: Sequence[PyTree],
    axes: LogicalAxes | None = None,
) -> Callable[..., PyTree]:
    """Maps a function of one seed over stacked seeds, on the devices of each seed.

    Args:
      function: function of a single seed, without communication.
      placement: placement of seeds on devices, see `choose`.
      in_axes: prefix trees of the arguments: 0 if leaves lead with `[S]`, None if all seeds share
        the leaves.
      axes: logical axes of sharded parameters, see `over_devices`.
    """
    if axes is not None and placement.cuts_params:
        mesh, rules = make_mesh(placement), rules_of(placement)
        of_all = stack(function, placement.num_seeds, in_axes, 0, spmd_axis_name="seed")

        def placed(*arguments: PyTree) -> PyTree:
            made = of_all(*arguments)
            return jax.lax.with_sharding_constraint(made, by_axes(made, mesh, axes, rules))

        return placed
    stacked = stack(function, placement.num_seeds // placement.seed_devices, in_axes, 0)
    if placement.is_one:
        return stacked
    return on_devices(stacked, placement, specs_of(tuple(in_axes)))


def state_spec() -> PyTree:
    """Returns the partition of a training state stacked over seeds, with the seeds over `seed`.

    `collector.sharded` is also sharded over `data`; all other leaves are replicated over `data`.
    Frozen parameters are replicated over all devices.
    """
    rows: Any = P("seed", "data")
    return TrainState(*[SEEDS] * len(TrainState._fields))._replace(
        params=ActorCritic(SEEDS, SEEDS, P(), SEEDS), collector=CollectorState(rows, SEEDS)
    )


def whole_state_spec() -> PyTree:
    """Returns the partition of a stacked training state whose batch rows are not sharded."""
    return state_spec()._replace(collector=SEEDS)


def batch_spec() -> PyTree:
    """Returns the partition of a batch: seeds over `seed`, rows over `data`, metrics replicated."""
    rows: Any = P("seed", "data")
    return Batch(*[rows] * len(Batch._fields))._replace(metrics=SEEDS)


def make_mesh(placement: Placement) -> Mesh:
    """Returns the mesh `seed × data × model` over the first devices."""
    there = placement.described or jax.devices()
    devices = np.array(there[: placement.num_devices]).reshape(placement[1:4])
    return Mesh(devices, ("seed", "data", "model"), axis_types=(AxisType.Auto,) * 3)


def replicated(placement: Placement) -> NamedSharding:
    """Returns a sharding that copies an array to every device, readable in every process."""
    return NamedSharding(make_mesh(placement), P())


def over_devices(
    learner: Learner,
    placement: Placement,
    *,
    axes: LogicalAxes | None = None,
    dtype: DTypeLike | None = None,
    start: PyTree = 0,
) -> Learner:
    """Maps a learner of one seed over stacked seeds and devices.

    Under `jax.shard_map`, every device steps its own seeds on its own batch rows. The learner, made
    with `axis_name=placement.axis_name`, itself reduces means, statistics and gradients over
    `data`.

    Args:
      learner: learner of a single seed.
      placement: placement of seeds, batch rows and parameters, see `choose`.
      axes: logical axes of a model whose parameters the placement may shard, see `over_mesh`.
      dtype: dtype of the matrix products in transformer blocks, see `over_mesh`.
      start: prefix tree of the argument of `init`, see `over_seeds`.

    Returns:
      The learner of all seeds, to be jitted; leaves lead with `[S]`. Results do not depend on the
      placement, except for the order of floating-point sums.
    """
    if axes is not None and placement.cuts_params:
        return over_mesh(
            learner,
            make_mesh(placement),
            axes,
            rules_of(placement),
            num_seeds=placement.num_seeds,
            dtype=dtype,
            start=start,
        )
    if placement.is_one:
        return over_seeds(learner, placement.num_seeds, start=start, target=placement.target)
    each = placement.num_seeds // placement.seed_devices
    local = over_seeds(learner, each, start=start, target=placement.target)
    mesh, state, batch = make_mesh(placement), state_spec(), batch_spec()
    over = functools.partial(on_devices, placement=placement)
    # Each device initialises all batch rows of its seeds; the rows are sharded afterwards, so that
    # the random numbers do not depend on the mesh.
    init = over(local.init, in_specs=(specs_of(start),), out_specs=whole_state_spec())
    placed = jax.tree.map(functools.partial(NamedSharding, mesh), state)

    def init_sharded(start: PyTree) -> TrainState:
        made: TrainState = jax.lax.with_sharding_constraint(init(start), placed)
        return made

    return Learner(
        init_sharded,
        over(local.sample, in_specs=(state,), out_specs=(state, batch)),
        over(local.update, in_specs=(state, batch), out_specs=(state, SEEDS)),
    )


def rules_of(placement: Placement) -> Rules:
    """Returns rules: tensor parallel over `model`; if `shard_params`, fully sharded over `data`."""
    return {**TENSOR_PARALLEL, **(FULLY_SHARDED if placement.shard_params else {})}
