"""What suits the processor that programs are compiled for."""

import jax


def on_cpu() -> bool:
    """Whether programs are compiled for a CPU, whose small operations cost what they compute.

    On a GPU each is a kernel, of 1 µs and more: there, few operations are fast.
    """
    return jax.default_backend() == "cpu"


def unroll(steps: int) -> int:
    """Steps of a short loop in one pass, for `jax.lax.scan`: 1 on a CPU, `steps` elsewhere.

    Elementwise steps become one kernel, and what several steps return is written by one. On a CPU
    the loop over generalised advantages would take 2.5 times as long.
    """
    return 1 if on_cpu() else steps
