"""What suits the processor that programs are compiled for."""

import os

import jax


def on_cpu() -> bool:
    """Whether programs are compiled for a CPU, whose small operations cost what they compute.

    On a GPU each is a kernel, of 1 µs and more: there, few operations are fast.
    """
    return jax.default_backend() == "cpu"


def cores() -> int:
    """Processor cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def one_core_each() -> bool:
    """Whether each device is one core of a CPU: what it works on should then stay in its cache.

    A device of several cores shares large operations out over them, and not what is cut up.
    """
    return on_cpu() and jax.local_device_count() >= cores()


def unroll(steps: int) -> int:
    """Steps of a short loop in one pass, for `jax.lax.scan`: 1 on a CPU, `steps` elsewhere.

    Elementwise steps become one kernel, and what several steps return is written by one. On a CPU
    the loop over generalised advantages would take 2.5 times as long.
    """
    return 1 if on_cpu() else steps
