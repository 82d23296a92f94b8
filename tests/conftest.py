"""Configures all tests: eight CPU devices, no silent rank promotion, a compilation cache.

Programs in the tests are small and run for milliseconds: nearly all of the time is compilation.
Disabling XLA's optimisation halves the compilation time, and the older code generator for fusions
halves it again.
"""

import ctypes
import functools
import gc
import os
import sys
from importlib.metadata import version
from pathlib import Path

os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        # By default, LLVM compiles a program in up to 32 parts, and each part has its own cost.
        "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1",
        # jaxlib 0.11 rejects this flag and does not start with it
        "--xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "",
    ]
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the tests need eight devices
# No test uses the source location of an operation, and recording locations takes time.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"

# The module gymnax imports seaborn, and no test draws with seaborn; notebooks and the installed
# package import the real seaborn.
sys.path.insert(0, str(Path(__file__).parent / "stubs"))

import costs
import finished as finished_runs
import jax
import pytest
import results
import shapes

# Tracing creates many small objects, few of them garbage, so that the collector may run less often.
gc.set_threshold(100_000, 20, 20)

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
# JAX writes a cache entry in place, and another worker that reads the entry meanwhile gets half of
# it: each worker has its own cache folder.
CACHE = os.environ.get("JAX_COMPILATION_CACHE_DIR", Path(__file__).parent.parent / ".jax_cache")
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
jax.config.update("jax_compilation_cache_dir", str(Path(CACHE, WORKER)))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


LIBC = ctypes.CDLL(None)
# memory in MiB that a worker may use between two tests; freed programs must be traced and loaded
# again
ROOM = 4000


def held():
    """Returns the resident memory of this process in MiB; 0 if the system does not report
    memory."""
    status = Path("/proc/self/statm")
    return (
        int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
        if status.exists()
        else 0.0
    )


@pytest.fixture
def memory_held():
    """Returns the function that reads resident memory in MiB, if the system reports memory."""
    if not held():
        pytest.skip("the system does not report what a process holds")
    return held


class Freeing:
    """Plugin that clears the caches of a module after its tests, and compiled programs when memory
    is high.

    The plugin does not clear caches more often: all tests share small programs, and compiling them
    takes a second or two.
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
                LIBC.malloc_trim(0)  # returns free pages to the system
        return result


def pytest_addoption(parser):
    parser.addoption("--strict-skips", action="store_true", help="fail on a skip not in costs.py")
    parser.addoption("--results", metavar="FILE", help="JSON file for the result, see results.py")


def pytest_configure(config):
    """Registers plugins, also for doctests: a hook function in this file would cover this folder
    only."""
    config.pluginmanager.register(Freeing())
    config.pluginmanager.register(costs.Costs(config.getoption("--strict-skips")))
    if config.getoption("--results") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(results.Results(config.getoption("--results")))


@pytest.fixture(scope="session", autouse=True)
def started_backend():
    """Starts the backend, whose number of devices a command would otherwise choose."""
    return jax.local_device_count()


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """Returns a function `finished(name, folder)`, which copies a finished run, see
    `finished.py`."""
    base = tmp_path_factory.getbasetemp()
    return finished_runs.Finished((base.parent if WORKER else base) / "finished")


@pytest.fixture
def trace_only(monkeypatch):
    """Replaces compilation by tracing, see `shapes.py`; the numbers of a traced run have no
    meaning."""
    shapes.trace_only(monkeypatch)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Saves coverage immediately: a worker that frees programs slowly is killed before the usual
    time."""
    if "coverage" in sys.modules:
        measuring = sys.modules["coverage"].Coverage.current()
        if measuring is not None:
            measuring.stop()
            measuring.save()


class Begun(Exception):
    """Raised once a run has written its configuration and would start training."""


@pytest.fixture
def written_down(monkeypatch):
    """Returns a function `written_down(main, arguments)`, which stops a run once `config.json` is
    written."""

    def stop(*_, **__):
        raise Begun

    def begin(main, arguments):
        with monkeypatch.context() as patch:
            patch.setattr("jaxrl_po.run.loop.programs.check_job", lambda job: None)
            patch.setattr("jaxrl_po.run.loop.runner.run", stop)
            with pytest.raises(Begun):
                main(arguments)

    return begin


@pytest.fixture
def no_compilation(monkeypatch):
    """Fails if a script compiles a program: the script must refuse bad input before compilation."""

    def refuse(job):
        raise AssertionError("compiled")

    monkeypatch.setattr("jaxrl_po.run.loop.programs.compile_programs", refuse)
