"""How programs are compiled, and where they are kept from one run to the next."""

import contextlib
import ctypes
import hashlib
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl_po import backend
from jaxrl_po.run.experiment.options import AUTO
from jaxrl_po.types import PyTree

SMALL = 2**28  # bytes of arguments up to which a GPU program may use more memory to be faster


def compiled(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """The function as a program for these arguments, ahead of time.

    Args:
      function: what is compiled.
      arguments: arrays or their shapes, and shardings.
      options: further arguments of `jax.jit`.
    """
    asked = os.environ.get("XLA_FLAGS", "")
    settings = {name: value for name, value in suited(arguments).items() if name not in asked}
    program = (
        jax.jit(function, **options).lower(*arguments).compile(compiler_options=settings or None)
    )
    return_freed_memory()
    return program


def return_freed_memory() -> None:
    """Returns freed memory, which the C library would keep, to the system.

    After a training program is compiled this is 300 – 400 MB, and takes some 100 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def suited(arguments: PyTree) -> dict[str, str | bool]:
    """XLA's settings for a program with these arguments, unless `XLA_FLAGS` says otherwise."""
    if backend.on_cpu():
        # LLVM's second and third level take a fifth of the compile time and make nothing faster:
        # XLA has already fused and vectorised.
        return {"xla_backend_optimization_level": "1"}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    if jax.default_backend() == "gpu" and size < SMALL:
        # Independent kernels, such as actor's and critic's, run concurrently, and so share less
        # memory.
        return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    return {}


def keep_programs(folder: str) -> None:
    """Has JAX keep what it compiles in a folder, unless the environment or the program said where.

    Args:
      folder: as in `--compilation_cache`.
    """
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    with contextlib.suppress(RuntimeError):  # a user without a home has no cache
        place = default_folder() if folder == AUTO else Path(folder)
        jax.config.update("jax_compilation_cache_dir", str(place))


def default_folder() -> Path:
    """A folder of the user's cache, one for each kind of processor.

    Code that was compiled for one may not run on another.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxrl_po" / hashlib.sha256(_features().encode()).hexdigest()[:12]


def _features() -> str:
    """What the processor is and can do, as far as the system lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return "".join([platform.machine(), platform.processor(), *features])
