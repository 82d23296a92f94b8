"""Compilation of programs, and the folder that caches compiled programs between runs."""

import contextlib
import ctypes
import hashlib
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jaxlib

from jaxrl_po import backend
from jaxrl_po.run.devices import processes
from jaxrl_po.types import PyTree

SMALL = 2**28  # bytes of arguments below which a GPU program may use more memory to be faster
LIGHT = 2**24  # bytes of state up to which a seldom-run program is compiled unoptimised
# Jaxlib 0.10 still includes XLA's older fusion emitters, which compile faster.
OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)

Result = TypeVar("Result", covariant=True)
_tracing = threading.Lock()  # interleaved tracing in several threads would delay the first program


class Program(Protocol[Result]):
    """A compiled function: `jax.stages.Compiled` with a typed result."""

    @property
    def output_shardings(self) -> Any:
        """Returns the shardings of the result."""

    def __call__(self, *arguments: Any) -> Result:
        """Runs the program."""


def compiled(
    function: Callable[..., Result], *arguments: Any, light: bool = False, **options: Any
) -> Program[Result]:
    """Compiles a function ahead of time for the shapes and shardings of its arguments.

    Args:
      function: function to compile.
      arguments: arrays to compile for, or their shapes and shardings.
      light: whether to compile with little optimisation, because the program runs seldom and on
        little data; see `is_cheap`.
      options: further keyword arguments of `jax.jit`.
    """
    asked = os.environ.get("XLA_FLAGS", "")
    suit = compiler_options(arguments, light=light)
    settings = {name: value for name, value in suit.items() if name not in asked}
    # Without shardings, the shapes match an earlier trace, which JAX then reuses.
    places = jax.tree.map(lambda x: x.sharding if _is_shape(x) else None, arguments)
    bare = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if _is_shape(x) else x, arguments
    )
    with _tracing:
        lowered = jax.jit(function, in_shardings=places, **options).lower(*bare)
    program: Program[Result] = lowered.compile(compiler_options=settings or None)
    return_freed_memory()
    return program


def _is_shape(x: object) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def is_cheap(state: PyTree) -> bool:
    """Returns whether a seldom-run program on the shapes of `state` is compiled unoptimised."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) <= LIGHT


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """Runs calls that compile, in threads, and returns their results; the first call traces first.

    Raises:
      Exception: error of a call that failed, raised without waiting for the other calls.
    """
    # Several processes must compile their programs in the same order.
    pool = ThreadPoolExecutor(1 if processes.is_multi_process() else len(calls))
    begun = [pool.submit(call) for call in calls]
    wait(begun, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False, cancel_futures=True)
    failed = [each for each in begun if each.done() and not each.cancelled() and each.exception()]
    return [each.result() for each in failed or begun]


def return_freed_memory() -> None:
    """Returns freed memory, which the C library would otherwise retain, to the operating system.

    After the compilation of a training program, this function frees 300 – 400 MB and takes about
    100 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def compiler_options(arguments: PyTree, *, light: bool) -> dict[str, str | bool]:
    """Returns XLA options for a program on `arguments`; `XLA_FLAGS` takes precedence."""
    here = backend.here()
    if here.on_cpu and light:
        older = {"xla_cpu_use_fusion_emitters": False} if OLDER_EMITTERS else {}
        return {"xla_backend_optimization_level": "0", **older}
    if here.on_cpu:
        # LLVM's second and third optimisation levels take a fifth of the compile time and do not
        # speed up a program that XLA has already fused and vectorised.
        return {"xla_backend_optimization_level": "1"}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    if here.platform == "gpu" and size < SMALL:
        # Independent kernels, such as the kernels of the actor and of the critic, run concurrently
        # and therefore share less memory.
        return {"xla_gpu_command_buffer_scheduling_mode": "CONCURRENT"}
    return {}


def keep_programs(folder: str) -> None:
    """Sets JAX's compilation cache, unless the environment or the program already set a cache.

    Args:
      folder: value of `--compilation_cache`.
    """
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    with contextlib.suppress(RuntimeError):  # without a home directory, programs are not cached
        place = default_folder() if folder == "auto" else Path(folder)
        jax.config.update("jax_compilation_cache_dir", str(place))


def default_folder() -> Path:
    """Returns a folder for compiled programs in the user's cache directory, one per processor kind.

    A program compiled for one kind of processor may not run on another.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxrl_po" / hashlib.sha256(_features().encode()).hexdigest()[:12]


def _features() -> str:
    """Returns the processor's architecture and features, as far as the system lists them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return "".join([platform.machine(), platform.processor(), *features])
