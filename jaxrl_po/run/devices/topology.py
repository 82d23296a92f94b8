"""Target machines, attached or not: the devices of a machine and the memory of each device."""

import difflib
import glob
import os
import re
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from jaxrl_po.config import ConfigError


class Chip(NamedTuple):
    """A generation of TPU chips, with numbers from the chip's page at cloud.google.com/tpu/docs.

    Attributes:
      memory: Bytes of HBM per chip.
      bounds: Number of chips of one host along each axis.
      sizes: Topologies that Google Cloud offers.
    """

    memory: int
    bounds: tuple[int, ...]
    sizes: tuple[str, ...]


FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
CUBES = (*("2x2x1", "2x2x2", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8"), *("8x8x16", "8x16x16"))
CHIPS = {
    "v5e": Chip(16_000_000_000, (2, 4, 1), FLAT),
    "v5p": Chip(95_000_000_000, (2, 2, 1), CUBES),
    "v6e": Chip(32_000_000_000, (2, 4, 1), FLAT),
}

DEVICES = "/dev/accel*", "/dev/vfio/[0-9]*"  # device files of attached TPU chips
# Environment variables that libtpu reads when it starts: query no metadata server, lock no TPU.
WITHOUT_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def silence_libtpu() -> None:
    """Keeps an installed libtpu from printing warnings on a machine without a TPU.

    The call must come after the import of JAX and before JAX starts a backend.
    """
    asked = "tpu" in os.environ.get("JAX_PLATFORMS", "") or "JAX_FORCE_TPU_INIT" in os.environ
    # JAX sets TPU_SKIP_MDS_QUERY if no TPU is found; on a TPU host, the user may have set it.
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1" and not any((asked, *map(glob.glob, DEVICES))):
        _pretend_tpu_host()


def _pretend_tpu_host() -> None:
    """Sets the environment variables of a TPU host that are still unset."""
    for variable, value in WITHOUT_TPU.items():
        os.environ.setdefault(variable, value)


class Machine(NamedTuple):
    """A target machine that programs are compiled for ahead of time.

    Attributes:
      name: Name of the machine, as in `--compile_for`.
      devices: Devices of the mesh.
      memory: Bytes of a device's memory; None if unknown.
    """

    name: str
    devices: tuple[Any, ...]
    memory: int | None


def parse_machine(name: str) -> Machine:
    """Returns the machine that a name describes: `tpu:v5e:4x4`, `cpu:8`, or `gpu` if attached.

    Raises:
      ConfigError: The name is unknown, reported with similar names, or a package is missing.
    """
    platform, _, rest = name.partition(":")
    if platform == "tpu":
        return _tpu(name, *rest.partition(":")[::2])
    if platform == "cpu" and re.fullmatch(r"[1-9]\d*", rest):
        devices = tuple(jax.devices("cpu"))
        if len(devices) < int(rest):
            raise ConfigError(
                "compile_for",
                f"{name} needs {rest} CPU devices, but this process has {len(devices)}; call "
                f'jax.config.update("jax_num_cpu_devices", {rest}) before JAX computes',
            )
        return Machine(name, devices[: int(rest)], None)
    if name == "gpu":
        try:
            devices = tuple(jax.devices("gpu"))
        except RuntimeError:
            raise ConfigError("compile_for", "gpu needs an attached GPU") from None
        return Machine(name, devices, (devices[0].memory_stats() or {}).get("bytes_limit"))
    raise ConfigError("compile_for", f"must read like tpu:v5e:4x4, cpu:8 or gpu, got {name!r}")


def _tpu(name: str, generation: str, size: str) -> Machine:
    if generation not in CHIPS:
        raise ConfigError("compile_for", f"must name a chip ({', '.join(CHIPS)}), got {name}")
    chip = CHIPS[generation]
    _pretend_tpu_host()
    sides = [int(n) for n in re.findall(r"\d+", size)]
    bounds = tuple(min(a, b) for a, b in zip((*sides, 1, 1), chip.bounds, strict=False))
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{generation}:{size}", chips_per_host_bounds=bounds
        )
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("INVALID_ARGUMENT"):
            raise ConfigError("compile_for", f"{name}: {error}") from None
        near = difflib.get_close_matches(size, chip.sizes, 3, 0) or chip.sizes[:3]
        names = ", ".join(f"tpu:{generation}:{other}" for other in near)
        raise ConfigError(
            "compile_for", f"{name} is no topology of libtpu; near ones are {names}"
        ) from None
    return Machine(name, tuple(found.devices), chip.memory)
