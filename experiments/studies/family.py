"""Compares all methods on one environment.

`python experiments/studies/family.py --env=CartPole-v1 --seeds=8 --total_steps=200000` runs each
method by `jaxrl-po control` in its own folder, with the settings that a sweep found for the method.
One figure (return against steps, KL of each update, entropy) and one table (final return, steps to
a threshold, speed, time of an update) compare the methods.
"""

from collections.abc import Sequence
from pathlib import Path

import comparison
import numpy as np
from comparison import Result

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, SEED, static
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags, registry
from jaxrl_po.run.figures.plotting import Panel
from jaxrl_po.run.store import metrics
from jaxrl_po.types import Row


@config.record
class Options:
    """Settings of the comparison."""

    env: str = static("CartPole-v1", "a registered gymnax environment")
    methods: str = static(
        "reinforce,a2c,npg,trpo,ppo_penalty,ppo,grpo",
        "methods, separated by commas",
    )
    seeds: int = static(8, "runs of each method", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    total_steps: int = static(200_000, "length of each run", unit="environment steps", within=COUNT)
    threshold: float = static(
        475.0, "greedy return whose first crossing the table reports", unit="reward units"
    )
    devices: str = static("auto", "devices to shard seeds over")
    out: str = static(
        "runs/family", "folder for the results; an earlier comparison in it is replaced"
    )


# Flags of each method that differ from the method's defaults.
APART = {"ppo_penalty": ["--config.target_kl=0.01"]}


def compare(options: Options, out: Path) -> list[Result]:
    """Runs every method; an error in one run ends the comparison."""
    names = options.methods.split(",")
    shared = [
        f"--{key}={getattr(options, key)}"
        for key in ("env", "seeds", "seed", "total_steps", "devices")
    ]
    runs = {name: [f"--algorithm={name}", *APART.get(name, [])] for name in names}
    return comparison.run_each(launch.control, runs, [*shared, "--eval_every=2"], out)


def panels(results: Sequence[Result], options: Options) -> list[Panel]:
    """Builds panels of return, KL and entropy against steps, a curve for each method."""
    steps, title = "environment steps, each seed", f"{options.env}: greedy return"
    return [
        comparison.panel(results, "greedy_return", title, steps, "return", options.threshold),
        comparison.panel(results, "kl", "KL(old ‖ new) of an update", steps, "nats"),
        comparison.panel(results, "entropy", "entropy of the policy", steps, "nats"),
    ]


def steps_to(rows: Sequence[Row], threshold: float) -> float:
    """Finds the number of steps at which the mean greedy return reached the threshold.

    Infinity if it did not.
    """
    step, values = metrics.curve(rows, "greedy_return")
    reached = np.flatnonzero(values.mean(axis=0) >= threshold)
    return float(step[reached[0]]) if reached.size else np.inf


def table(results: Sequence[Result], options: Options) -> str:
    """Formats the table, one line for each method."""
    reached = f"steps to {options.threshold:g}"
    lines = [
        (
            f"{'method':>10} {'mean':>8} {'IQM':>8} {'worst':>8} {reached:>14} {'steps/s':>10} "
            f"{'ms/iteration':>13}"
        )
    ]
    for name, rows, summary in results:
        scores = np.asarray(summary["greedy_return"], np.float64)
        iterations = rows[-1]["iteration"]
        milliseconds = 1e3 * sum(row.get("time/seconds", 0.0) for row in rows) / iterations
        lines.append(
            f"{name:>10} {scores.mean():>8.1f} {summary['greedy_return_iqm']:>8.1f} "
            f"{scores.min():>8.1f} {steps_to(rows, options.threshold):>14,.0f} "
            f"{summary['steps_per_second']:>10,.0f} {milliseconds:>13.1f}"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(argv, "family.py", "Compares all methods on one environment.", Options)
    if options is None:
        return 0
    for name in options.methods.split(","):
        errors.lookup("methods", name, registry.METHODS)
    out = Path(options.out)
    results = compare(options, out)
    heading = (
        f"{options.env}, {options.seeds} seeds, {options.total_steps:,} environment steps each"
    )
    comparison.leave(out, "family", panels(results, options), heading, table(results, options))
    return 0


if __name__ == "__main__":
    flags.run_script(main)
