"""Machines that are described, not attached: their devices and what their chips can do."""

import difflib
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError


class Chip(NamedTuple):
    """Public figures of one chip, from its page at cloud.google.com/tpu/docs.

    Attributes:
      kind: as JAX names it.
      peak: FLOP/s of bfloat16 products.
      memory: bytes of HBM.
      bandwidth: bytes/s between HBM and the chip.
      links: bytes/s to other chips, in one direction.
      unit: rows and columns that a matrix unit multiplies at once.
      clock: cycles/s, the peak over what all units multiply in a cycle.
      bounds: chips of one host along each axis.
      sizes: topologies on offer.
    """

    kind: str
    peak: float
    memory: float
    bandwidth: float
    links: float
    unit: int
    clock: float
    bounds: tuple[int, ...]
    sizes: tuple[str, ...]


FLAT = ["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"]
CHIPS = {
    "v5e": Chip("TPU v5 lite", 197e12, 16e9, 819e9, 200e9, 128, 1.50e9, (2, 4, 1), tuple(FLAT)),
    "v5p": Chip(
        "TPU v5",
        459e12,
        95e9,
        2765e9,
        600e9,
        128,
        1.75e9,
        (2, 2, 1),
        ("2x2x1", "2x2x2", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"),
    ),
    "v6e": Chip("TPU v6 lite", 918e12, 32e9, 1638e9, 400e9, 256, 1.75e9, (2, 4, 1), tuple(FLAT)),
}


# Read by libtpu as it starts: ask no server of metadata, and lock no TPU.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class Machine(NamedTuple):
    """What a program is compiled for ahead of time.

    Attributes:
      name: as it was asked for.
      devices: that the mesh is made of.
      target: see `Target`.
      chip: its figures; None where there are no public ones.
    """

    name: str
    devices: tuple[Any, ...]
    target: Target
    chip: Chip | None


def describe(name: str) -> Machine:
    """The machine of a name: `tpu:v5e:4x4`, `cpu:8`, or `gpu` for the one attached.

    Raises:
      ConfigError: names that nothing has, with near ones; what must be installed.
    """
    platform, _, rest = name.partition(":")
    if platform == "tpu":
        return _tpu(name, *rest.partition(":")[::2])
    if platform == "cpu" and re.fullmatch(r"[1-9]\d*", rest):
        devices = tuple(jax.devices("cpu"))
        if len(devices) < int(rest):
            raise ConfigError(
                f"compile_for={name}: this process has {len(devices)} CPU devices; "
                f'jax.config.update("jax_num_cpu_devices", {rest}) comes before JAX computes'
            )
        devices = devices[: int(rest)]
        return Machine(name, devices, Target("cpu", len(devices), len(devices)), None)
    if name == "gpu":
        try:
            devices = tuple(jax.devices("gpu"))
        except RuntimeError:
            raise ConfigError(
                "compile_for=gpu needs a GPU that is attached: its compiler measures kernels on it"
            ) from None
        return Machine(name, devices, Target("gpu", len(devices), 1), None)
    raise ConfigError(f"compile_for must read like tpu:v5e:4x4, cpu:8 or gpu, got {name!r}")


def _tpu(name: str, generation: str, size: str) -> Machine:
    if generation not in CHIPS:
        raise ConfigError(f"compile_for={name} must name a chip: {', '.join(CHIPS)}")
    chip = CHIPS[generation]
    for variable, value in WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)
    sides = [int(n) for n in re.findall(r"\d+", size)]
    bounds = tuple(min(a, b) for a, b in zip((*sides, 1, 1), chip.bounds, strict=False))
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{generation}:{size}", chips_per_host_bounds=bounds
        )
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("INVALID_ARGUMENT"):
            raise ConfigError(f"compile_for={name}: {error}") from None
        near = difflib.get_close_matches(size, chip.sizes, 3, 0) or chip.sizes[:3]
        raise ConfigError(
            f"compile_for={name}: libtpu knows no such topology; near ones are "
            + ", ".join(f"tpu:{generation}:{other}" for other in near)
        ) from None
    devices = tuple(found.devices)
    return Machine(name, devices, Target("tpu", len(devices), 1), chip)
