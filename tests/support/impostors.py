"""Runs tests on a changed module in a forked child, which has imported no module of this library.

The parent process imports third-party libraries once, except gymnax, which starts a backend when it
is imported: a process with threads cannot fork.
"""

import ast
import importlib.abc
import importlib.util
import math
import os
import resource
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import chex  # noqa: F401  imported once here, not by each child
import conftest
import flax.linen  # noqa: F401
import jax
import matplotlib.pyplot  # noqa: F401
import optax  # noqa: F401
import orbax.checkpoint  # noqa: F401
import PIL.Image  # noqa: F401
import pytest
import rich.progress  # noqa: F401
from hypothesis import settings

ROOT = Path(__file__).parents[2]
SCRIPTS = "experiments."
OPTIONS = ["-x", "-p", "no:cacheprovider", "-n", "0"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]


class Outcome(NamedTuple):
    """Outcome of the tests in a child process.

    Attributes:
      word: "passed", "failed", "late" (out of processor time), or "broken" (failed outside the
        tests).
      seconds: Seconds of processor time, which do not depend on the load of the machine.
    """

    word: str
    seconds: float


class Impostor(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer that loads a changed syntax tree whenever its module is imported."""

    def __init__(self, module: str, tree: ast.Module):
        self.module, self.tree = module, tree

    def find_spec(self, fullname, path, target=None):
        if fullname != name_of(self.module):
            return None
        return importlib.util.spec_from_file_location(fullname, path_of(self.module), loader=self)

    def exec_module(self, module):
        exec(compile(self.tree, path_of(self.module), "exec"), module.__dict__)


class Replace:
    """Pytest plugin that installs the impostor, if any, and a folder for compiled programs."""

    def __init__(self, impostor: Impostor | None, worker: str):
        self.impostor, self.worker = impostor, worker

    @pytest.hookimpl
    def pytest_collection(self):
        # The impostor precedes pytest's own importer, which loads the files named on pytest's
        # command line.
        if self.impostor is not None:
            sys.meta_path.insert(0, self.impostor)
        jax.config.update("jax_compilation_cache_dir", str(Path(conftest.CACHE, self.worker)))


def path_of(module: str) -> str:
    """Returns the file of a `jaxrl_po` module, or of an `experiments` module given by its full
    name."""
    place = "" if module.startswith(SCRIPTS) else "jaxrl_po/"
    return str(ROOT / f"{place}{module.replace('.', '/')}.py")


def name_of(module: str) -> str:
    """Returns the name under which a module is imported: scripts import modules beside them by
    plain names."""
    return module.rpartition(".")[2] if module.startswith(SCRIPTS) else f"jaxrl_po.{module}"


def prepare() -> None:
    """Applies the settings of the parent process."""
    # No thread of JAX runs at this point, because no backend has been started.
    warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
    settings.register_profile("mutants", derandomize=True, database=None, deadline=None)
    settings.load_profile("mutants")


def start(
    impostor: Impostor | None,
    tests: list[str],
    limit: float,
    *,
    worker: str = "",
    log: str = os.devnull,
) -> int:
    """Forks a child that runs tests up to the first failure; returns the child's process id.

    Args:
      impostor: Changed module, or None.
      tests: Test files or node ids.
      limit: Limit of processor time in seconds.
      worker: Name of the worker; children of one worker run one after another and share compiled
        programs.
      log: File for the child's output.
    """
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(limit), math.ceil(limit)))
        status = int(pytest.main([*OPTIONS, *tests], plugins=[Replace(impostor, worker)]))
    finally:
        os._exit(status)


def finished(child: int = -1) -> tuple[int, Outcome]:
    """Waits for a child process with an id, or for any child."""
    child, status, usage = os.wait4(child, 0)
    named = {pytest.ExitCode.OK: "passed", pytest.ExitCode.TESTS_FAILED: "failed"}
    word = "late" if os.WIFSIGNALED(status) else named.get(os.WEXITSTATUS(status), "broken")
    return child, Outcome(word, usage.ru_utime + usage.ru_stime)
