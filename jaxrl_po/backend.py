"""What programs are compiled for, as a value: what is fast on one platform is not on another."""

import os
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """What a program is compiled for.

    Every `make` of a method and of a problem takes one, so that a program for one platform can be
    traced on another. It decides how things are computed, never what.

    Attributes:
      platform: `cpu`, `gpu` or `tpu`, as JAX names it.
      devices: of the platform, in one process.
      cores: processor cores of that process.

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
        """Whether it is a CPU, whose small operations cost what they compute.

        On a GPU each is a kernel, of 1 µs and more: there, few operations are fast.
        """
        return self.platform == "cpu"

    @property
    def one_core_each(self) -> bool:
        """Whether each device is one core of a CPU: what it works on should stay in its cache.

        A device of several cores shares large operations out over them, and not what is cut up.
        """
        return self.on_cpu and self.devices >= self.cores

    def unroll(self, steps: int) -> int:
        """Steps of a short loop in one pass, for `jax.lax.scan`: 1 on a CPU, `steps` elsewhere.

        Elementwise steps become one kernel, and what several steps return is written by one. On a
        CPU the loop over generalised advantages would take 2.5 times as long.
        """
        return 1 if self.on_cpu else steps


def here() -> Target:
    """The backend of this process, which it starts: the target where none is given."""
    return Target(jax.default_backend(), jax.local_device_count(), cores())


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
