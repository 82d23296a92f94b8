"""The table of the papers: PPO, TRPO and NPG on MuJoCo at a million steps.

`python experiments/benchmarks/mujoco.py` trains each method in each environment by `jaxrl-po
control`, with one setting of each method for all environments, and prints the greedy returns beside
published ones. Started again with the same `--out`, it continues: finished runs are kept.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, static
from jaxrl_po.run import comparison, flags, metrics
from jaxrl_po.run.commands import control
from jaxrl_po.run.comparison import Result
from jaxrl_po.run.flags import UsageError

ENVIRONMENTS = (
    "HalfCheetah",
    "Hopper",
    "Walker2d",
    "Swimmer",
    "InvertedPendulum",
    "InvertedDoublePendulum",
    "Reacher",
)
METHODS = ("ppo", "trpo", "npg")
# Tianshou's benchmark (v3 of the first four environments, v2 of the others): the largest average
# over 10 seeds at any point of the first million steps.
TIANSHOU = {
    "ppo": (5784, 2609, 3589, 67),
    "trpo": (4471, 2046, 3827, 41),
    "npg": (3485, 1915, 2503, 32),
}


@config.record
class Options:
    """The table as a whole."""

    envs: str = static(",".join(ENVIRONMENTS), "environments of MuJoCo, separated by commas")
    methods: str = static(",".join(METHODS), "methods, separated by commas")
    suite: str = static(
        "envpool", "where the environments come from", choices=("envpool", "gymnasium")
    )
    version: str = static("v4", "their version")
    seeds: int = static(5, "runs of each method in each environment", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=NON_NEGATIVE)
    total_steps: int = static(
        1_000_000, "length of each run", unit="environment steps", within=COUNT
    )
    devices: str = static("auto", "devices to shard seeds over")
    eval_episodes: int = static(
        10, "greedy episodes per evaluation and seed", unit="episodes", within=COUNT
    )
    out: str = static("runs/mujoco", "folder for the results; finished runs in it are kept")


def train(options: Options, method: str, env: str) -> Result:
    """Trains one method in one environment; continues what was begun, with the same flags."""
    out, name = Path(options.out), f"{method}-{env}"
    place = out / name
    shared = ("seeds", "seed", "total_steps", "devices", "eval_episodes")
    arguments = [
        f"--algorithm={method}",
        f"--env={options.suite}:{env}-{options.version}",
        *(f"--{key}={getattr(options, key)}" for key in shared),
        f"--out={place}",
    ]
    begun = (place / "config.json").exists()
    status = control.main([*arguments, "--resume"] if begun else arguments)
    if status or not (place / "summary.json").exists():
        raise UsageError(f"{name} did not finish; see {place}, and start again to continue")
    return comparison.read(out, name)


def largest_mean(result: Result) -> float:
    """The largest mean over seeds of the greedy return at any evaluation, as Tianshou reports."""
    _, values = metrics.curve(result.rows, "greedy_return")
    return float(np.nanmax(values.mean(axis=0)))


def published(method: str, env: str) -> str:
    """Tianshou's number, or a dash."""
    numbers = dict(zip(ENVIRONMENTS, TIANSHOU.get(method, ()), strict=False))
    return f"{numbers[env]:,}" if env in numbers else "–"


def table(results: dict[tuple[str, str], Result]) -> str:
    """One line for each method and environment; KL is the largest that a line of a run logged."""
    lines = [
        (
            f"{'':>22} {'method':>6} {'final, 95 % interval':>28} {'largest':>9} {'Tianshou':>9} "
            f"{'worst':>8} {'KL':>7} {'steps/s':>8}"
        )
    ]
    for (method, env), result in results.items():
        final = np.asarray(result.summary["greedy_return"], np.float64)
        low, high = metrics.bootstrap_interval([final], statistic=lambda x: x.mean(axis=0))
        measured = "exact_kl" if "exact_kl" in result.rows[-1] else "kl"
        kl = float(np.nanmax(metrics.curve(result.rows, measured)[1]))
        whole = f"{final.mean():,.5g} [{float(low):,.5g}, {float(high):,.5g}]"
        lines.append(
            f"{env:>22} {method:>6} {whole:>28} {largest_mean(result):>9,.5g} "
            f"{published(method, env):>9} {final.min():>8,.5g} {kl:>7.4f} "
            f"{result.summary['steps_per_second']:>8,.0f}"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(argv, "mujoco.py", "PPO, TRPO and NPG on MuJoCo, as the papers.", Options)
    if options is None:
        return 0
    envs, methods = options.envs.split(","), options.methods.split(",")
    for env in envs:
        flags.lookup("envs", env, dict.fromkeys(control.pools.MUJOCO))
    for method in methods:
        flags.lookup("methods", method, dict.fromkeys(METHODS))
    results = {(method, env): train(options, method, env) for env in envs for method in methods}
    out = Path(options.out)
    panels = [
        comparison.panel(
            [result._replace(name=method) for (method, of), result in results.items() if of == env],
            "greedy_return",
            f"{env}-{options.version}: greedy return",
            "environment steps, each seed",
            "return",
        )
        for env in envs
    ]
    heading = (
        f"{options.seeds} seeds, {options.total_steps:,} steps, {options.eval_episodes} episodes"
    )
    comparison.leave(out, "mujoco", panels, heading, table(results))
    return 0


if __name__ == "__main__":
    flags.entry(main)
