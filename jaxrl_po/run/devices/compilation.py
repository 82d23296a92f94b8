"""How programs are compiled, and where they are kept between runs."""

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

SMALL = 2**28  # bytes of arguments up to which a GPU program may use more memory to be faster
LIGHT = 2**24  # bytes of a state up to which a program that runs seldom costs more to compile
# XLA's emitters of fusions, of which jaxlib 0.10 still has the older ones, which compile faster.
OLDER_EMITTERS = jaxlib.version.__version_info__ < (0, 11)

Result = TypeVar("Result", covariant=True)
_tracing = threading.Lock()  # threads that traced in turns would delay the first one


class Program(Protocol[Result]):
    """Compiled function, a `jax.stages.Compiled` that knows the type of its result."""

    @property
    def output_shardings(self) -> Any:
        """Shardings of the result."""

    def __call__(self, *arguments: Any) -> Result:
        """Runs the program."""


def compiled(
    function: Callable[..., Result], *arguments: Any, light: bool = False, **options: Any
) -> Program[Result]:
    """The function as a program for these arguments, ahead of time.

    Args:
      function: what is compiled.
      arguments: arrays or their shapes, and shardings.
      light: compile it at little effort: it runs seldom, on little data, see `is_light`.
      options: further arguments of `jax.jit`.
    """
    asked = os.environ.get("XLA_FLAGS", "")
    suit = suited(arguments, light=light)
    settings = {name: value for name, value in suit.items() if name not in asked}
    # Without shardings, shapes are those of an earlier trace, which JAX then takes.
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


def is_light(state: PyTree) -> bool:
    """Whether what runs seldom on a state of these shapes is compiled at little effort."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) <= LIGHT


def side_by_side(*calls: Callable[[], Any]) -> list[Any]:
    """The results of calls that compile, in threads, of which the first traces first.

    Raises:
      Exception: that of a call that failed, without waiting for the others.
    """
    # Several processes must compile in one order.
    pool = ThreadPoolExecutor(1 if processes.several() else len(calls))
    begun = [pool.submit(call) for call in calls]
    wait(begun, return_when=FIRST_EXCEPTION)
    pool.shutdown(wait=False, cancel_futures=True)
    failed = [each for each in begun if each.done() and not each.cancelled() and each.exception()]
    return [each.result() for each in failed or begun]


def return_freed_memory() -> None:
    """Returns freed memory, which the C library would keep, to the system.

    After a training program is compiled this is 300 – 400 MB, and takes some 100 ms.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def suited(arguments: PyTree, *, light: bool) -> dict[str, str | bool]:
    """XLA's settings for a program with these arguments, unless `XLA_FLAGS` says otherwise."""
    here = backend.here()
    if here.on_cpu and light:
        older = {"xla_cpu_use_fusion_emitters": False} if OLDER_EMITTERS else {}
        return {"xla_backend_optimization_level": "0", **older}
    if here.on_cpu:
        # LLVM's second and third level take a fifth of the compile time and make nothing faster:
        # XLA has already fused and vectorised.
        return {"xla_backend_optimization_level": "1"}
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    if here.platform == "gpu" and size < SMALL:
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
        place = default_folder() if folder == "auto" else Path(folder)
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
