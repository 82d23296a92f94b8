"""Runs scripts as a user does, and reads the files that a run has written."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from jaxrl_po.run.store import checkpoint
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import read

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"


def surroundings():
    """Returns the environment variables of a script: all processes share the compilation cache."""
    return {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def start(script, *arguments):
    """Starts a script in a separate process."""
    command = [sys.executable, str(EXPERIMENTS / f"{script}.py"), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, text=True, env=surroundings())


def finish(process):
    """Waits for a script; returns its exit status, standard output and errors."""
    output, errors = process.communicate(timeout=400)
    return process.returncode, output, errors


def lines(out, without="time/"):
    """Returns the metrics of a run's lines, without the names that begin with `without`."""
    rows = read(out / "metrics.jsonl")
    return [
        {name: value for name, value in row.items() if not name.startswith(without)} for row in rows
    ]


def saved(out):
    """Returns every stored checkpoint of a run, bit by bit."""
    stored = {}
    for kind in ("latest", "best"):
        with Store(out / "checkpoints" / kind) as store:
            for iteration in store.iterations():
                assert (
                    checkpoint.condition_of(out / "checkpoints" / kind / str(iteration)) == "intact"
                )
                arrays = store.read(iteration)
                stored[kind, iteration] = {
                    name: np.asarray(array).tobytes() for name, array in arrays.items()
                }
    return stored


def everything(out):
    """Returns the lines, checkpoints and samples of a run."""
    examples = out / "samples.jsonl"
    return lines(out), saved(out), examples.read_bytes() if examples.exists() else b""


def python(*arguments, **options):
    """Runs Python in a separate process; returns its status, output and errors."""
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)
