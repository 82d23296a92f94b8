"""Digests of `--reproducible` runs by number of devices and cores, and the cost of the flag.

`python experiments/benchmarks/reproducible.py --algorithm=trpo` trains the same run in processes of
their own, on 1, 2, 4 and 8 CPU devices, on one core and on all, and prints a digest of everything
that the last checkpoint holds; then the time of the run against one without the flag, both on
`--compared` devices.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.store.checkpoint import Store


@config.record
class Options:
    """What is run."""

    algorithm: str = static("ppo", "method of jaxrl-po control")
    env: str = static("CartPole-v1", "environment")
    envs: int = static(64, "environments; 8 must divide them", within=COUNT)
    steps: int = static(128, "steps of each in one iteration", unit="steps", within=COUNT)
    iterations: int = static(100, "iterations of each run", within=COUNT)
    devices: tuple[int, ...] = static((1, 2, 4, 8), "numbers of devices")
    compared: int = static(2, "devices on which the cost is measured", within=COUNT)


def train(options: Options, out: Path, devices: int, *more: str, cores: int | None = None) -> None:
    """One run in a process of its own, on the first `cores` cores or on all."""
    settings = {
        "algorithm": options.algorithm,
        "env": options.env,
        "seeds": 1,
        "problem.num_envs": options.envs,
        "problem.num_steps": options.steps,
        "total_steps": options.iterations * options.envs * options.steps,
        "devices": devices,
        "out": out,
    }
    command = [sys.executable, "-m", "jaxrl_po", "control", *more]
    command += [f"--{name}={value}" for name, value in settings.items()]
    free = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(free)[:cores])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    os.sched_setaffinity(0, free)


def digest(out: Path) -> str:
    """Of every array of the last checkpoint."""
    with Store(out / "checkpoints" / "latest") as store:
        arrays = store.read(store.iterations()[-1])
    content = hashlib.sha256()
    for name in sorted(arrays):
        content.update(name.encode() + np.asarray(arrays[name]).tobytes())
    return content.hexdigest()[:16]


def speed(out: Path) -> float:
    """Environment steps per second, compile time apart."""
    return float(json.loads((out / "summary.json").read_text(encoding="utf-8"))["steps_per_second"])


def main(argv: Sequence[str]) -> int:
    """Prints a line for each layout, and the cost; returns the exit status."""
    summary = "Digests of --reproducible runs by devices and cores, and the cost of the flag."
    options = flags.ask(argv, "reproducible.py", summary, Options)
    if options is None:
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        for devices in options.devices:
            for cores in (1, None):
                out = Path(scratch) / f"{devices}-{cores}"
                train(options, out, devices, "--reproducible", cores=cores)
                print(f"{devices} devices, {cores or 'all'} cores: {digest(out)}", flush=True)
        speeds = []
        for more in ([], ["--reproducible"]):
            out = Path(scratch) / f"cost-{len(more)}"
            train(options, out, options.compared, *more)
            speeds.append(speed(out))
        print(f"cost on {options.compared} devices: {speeds[0] / speeds[1]:.2f} x the time")
    return 0


if __name__ == "__main__":
    flags.entry(main)
