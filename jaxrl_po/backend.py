"""Describes the platform that programs are compiled for, since fast code differs by platform."""

import contextlib
import os
from typing import NamedTuple

import jax

from jaxrl_po.config import with_field_docs


@with_field_docs
class Target(NamedTuple):
    """Platform and devices that a program is compiled for.

    Every `make` of a method and of a problem takes a target, so that a program for one platform can
    be traced on another platform. A target affects how results are computed, but not the results.

    Attributes:
      platform: name of the platform in JAX: `cpu`, `gpu` or `tpu`.
      devices: number of devices of the platform in one process.
      cores: number of processor cores of the process.

    Example:
      >>> Target("cpu", 8, 8).one_core_each, Target("cpu", 1, 8).one_core_each
      (True, False)
      >>> Target("cpu", 8, 8).unroll(16), Target("tpu", 4, 8).unroll(16)
      (1, 16)
    """

    platform: str
    devices: int
    cores: int

    @property
    def on_cpu(self) -> bool:
        """True on a CPU, where the cost of a small operation is its computation.

        On a GPU each operation is a kernel, which takes 1 µs or more: few operations are then fast.
        """
        return self.platform == "cpu"

    @property
    def one_core_each(self) -> bool:
        """True if each device is one core of a CPU, whose working set should stay in its cache.

        A device of several cores divides large operations among its cores, but not an operation
        that was cut into parts.
        """
        return self.on_cpu and self.devices >= self.cores

    def unroll(self, steps: int) -> int:
        """Returns the steps in one pass of a short `jax.lax.scan`: 1 on a CPU, `steps` elsewhere.

        On a GPU, elementwise steps become one kernel, and one kernel writes the results of several
        steps. On a CPU an unrolled loop over generalised advantages would take 2.5 times as long.
        """
        return 1 if self.on_cpu else steps


def here() -> Target:
    """Returns the default target, this process's JAX backend; starts the backend."""
    return Target(jax.default_backend(), jax.local_device_count(), cores())


def split_cpu() -> None:
    """Gives the CPU a device for each core, unless JAX has started or its number of devices is set.

    Must precede the import of a user's code, which may start JAX by computing.
    """
    if jax.config.jax_num_cpu_devices < 0:  # type: ignore[attr-defined]
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", cores())


def cores() -> int:
    """Returns the number of processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
