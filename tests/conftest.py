"""Settings of every test: eight CPU devices, no silent rank promotion, compiled programs kept between runs.

Programs of tests are small and run for milliseconds: compiling is nearly all of the time. Without
the optimiser it is half of that, and with the older code generator of fusions half again.
"""

import ctypes
import functools
import gc
import os
import sys
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
    ]
)

# gymnax imports it, and nothing here draws with it; notebooks and the installed package import the
# real one.
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import jax
import pytest

# A traced program is many small objects, few of them garbage.
gc.set_threshold(100_000, 20, 20)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update(
    "jax_compilation_cache_dir",
    os.environ.get("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".jax_cache")),
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


LIBC = ctypes.CDLL(None)
ROOM = (
    1000  # MiB that a worker may hold between two tests; half of them are Python and JAX themselves
)


def held():
    """MiB of this process in memory, nothing where that is not told."""
    status = Path("/proc/self/statm")
    return (
        int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        if status.exists()
        else 0.0
    )


class Freeing:
    """What a module keeps ends with it, and compiled programs where they have become too many.

    Not oftener: small programs are shared by all tests, and compiling them again takes a second or
    two.
    """

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item, nextitem):
        result = yield
        if nextitem is None or nextitem.path != item.path:
            for value in vars(getattr(item, "module", None) or item).values():
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
        if held() > ROOM and nextitem is not None:
            jax.clear_caches()
            gc.collect()
            if hasattr(LIBC, "malloc_trim"):
                LIBC.malloc_trim(0)  # pages that are free go back to the system
        return result


def pytest_configure(config):
    """Of doctests as well: a hook of this file would be of what lies beside it."""
    config.pluginmanager.register(Freeing())


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """What coverage has seen is written now: a worker that takes ten seconds to free its programs is killed before it would."""
    if "coverage" in sys.modules:
        measuring = sys.modules["coverage"].Coverage.current()
        if measuring is not None:
            measuring.stop()
            measuring.save()


@pytest.fixture
def no_compilation(monkeypatch):
    """What a script refuses, it refuses before it compiles."""

    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr("jaxrl_po.run.programs.compile_programs", refuse)
