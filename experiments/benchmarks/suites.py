"""Compares methods on a suite of environments with each other and with published results.

`python experiments/benchmarks/suites.py --suite=mujoco` trains PPO, TRPO and NPG on MuJoCo for a
million steps, as in the papers' table. Each run is a run of `jaxrl-po control`: each method has one
setting for all environments of MuJoCo, and tuned settings for the other suites. Started again with
the same `--out`, the script continues: finished runs are not repeated.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "studies"))

import comparison
from comparison import Result

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, NON_NEGATIVE, SEED, ConfigError, static
from jaxrl_po.run import errors
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.store import metrics, statistics

METHODS = ("ppo", "trpo", "npg")


class Row(NamedTuple):
    """Environment of the table, with its settings and published results.

    Attributes:
      env: name of the environment for `jaxrl-po control --env`.
      steps: length of a run, in environment steps.
      arguments: further arguments of `jaxrl-po control`.
      published: published mean return of each method.
      variant: label that distinguishes rows of the same environment; empty for a single row.
    """

    env: str
    steps: int
    arguments: tuple[str, ...] = ()
    published: Mapping[str, float] = {}
    variant: str = ""

    @property
    def name(self) -> str:
        """Name of the environment with its variant, such as `Snake-v1, no masks`."""
        inner = self.env.partition(":")[2] or self.env
        return f"{inner}, {self.variant}" if self.variant else inner


def mujoco(name: str, *tianshou: float) -> Row:
    """Builds the row of an environment of EnvPool's MuJoCo, with Tianshou's published results.

    The published results are the largest average over 10 seeds at any point of the first million
    steps, on version v3 of the environment.
    """
    published = dict(zip(METHODS, tianshou, strict=False))
    return Row(f"envpool:{name}-v4", 1_000_000, (), published)


SMALL = ("--problem.num_envs=64", "--problem.num_steps=32", "--problem.normalize_observations")
SCALED = (*SMALL, "--problem.scale_rewards", "--config.gamma=0.997")
CRAFTAX = (*SMALL, "--network.width=128", "--config.gamma=0.925", "--config.lambda_=0.625")
BOARD = ("--problem.num_envs=64", "--problem.num_steps=32")
LONG = ("--problem.num_envs=64", "--problem.num_steps=64")
NO_MASK = '--env_params={"mask": false}'
GRU, NO_GRU = "--network.memory=gru", "--network.memory=none"

SUITES = {
    "mujoco": (
        mujoco("HalfCheetah", 5784, 4471, 3485),
        mujoco("Hopper", 2609, 2046, 1915),
        mujoco("Walker2d", 3589, 3827, 2503),
        mujoco("Swimmer", 67, 41, 32),
        mujoco("InvertedPendulum"),
        mujoco("InvertedDoublePendulum"),
        mujoco("Reacher"),
    ),
    "brax": (
        Row("brax:inverted_pendulum", 2_000_000, SMALL),
        Row("brax:inverted_double_pendulum", 3_000_000, SCALED),
        Row("brax:hopper", 3_000_000, SCALED),
    ),
    "playground": (Row("playground:CartpoleBalance", 3_000_000, SMALL),),
    "jumanji": (
        Row("jumanji:Snake-v1", 3_000_000, BOARD),
        Row("jumanji:Snake-v1", 3_000_000, (*BOARD, NO_MASK), {}, "no masks"),
        Row("jumanji:Game2048-v1", 3_000_000, BOARD),
        Row("jumanji:Game2048-v1", 3_000_000, (*BOARD, NO_MASK), {}, "no masks"),
    ),
    "craftax": (Row("craftax:Craftax-Symbolic-v1", 1_000_000, CRAFTAX),),
    "xminigrid": (
        Row("xminigrid:MiniGrid-Empty-8x8", 100_000, BOARD),
        Row("xminigrid:MiniGrid-MemoryS8", 10_000_000, (*LONG, GRU), {}, "memory"),
        Row("xminigrid:MiniGrid-MemoryS8", 10_000_000, (*LONG, NO_GRU), {}, "no memory"),
    ),
}


@config.record
class Options:
    """Settings of the table."""

    suite: str = static("mujoco", "suite of environments", choices=tuple(SUITES))
    envs: str = static("", "environments whose name has one of these words, a,b,…; empty for all")
    methods: str = static(",".join(METHODS), "methods, separated by commas")
    seeds: int = static(5, "runs of each method in each environment", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    total_steps: int = static(
        0,
        "length of each run; 0 takes the length of the environment's row",
        unit="environment steps",
        within=NON_NEGATIVE,
    )
    devices: str = static("auto", "devices to shard seeds over")
    eval_episodes: int = static(
        10, "greedy episodes per evaluation and seed", unit="episodes", within=COUNT
    )
    out: str = static(
        "", "folder for the results, which also keeps finished runs; runs/SUITE if empty"
    )


def train(options: Options, out: Path, method: str, row: Row) -> Result:
    """Trains one method in one environment; continues an unfinished run with the same flags."""
    name = f"{method}-{row.name}".replace(", ", "-").replace(" ", "-")
    place = out / name
    shared = ("seeds", "seed", "devices", "eval_episodes")
    arguments = [
        f"--algorithm={method}",
        f"--env={row.env}",
        f"--total_steps={options.total_steps or row.steps}",
        *(f"--{key}={getattr(options, key)}" for key in shared),
        *row.arguments,
        f"--out={place}",
    ]
    begun = (place / "config.json").exists()
    status = launch.control([*arguments, "--resume"] if begun else arguments)
    if status or not (place / "summary.json").exists():
        raise UsageError(f"{name} did not finish; see {place}, and start again to continue")
    return comparison.read(out, name)


def largest_mean(result: Result) -> float:
    """Returns the largest mean over seeds of the greedy return at an evaluation, as in Tianshou."""
    _, values = metrics.curve(result.rows, "greedy_return")
    return float(np.nanmax(values.mean(axis=0)))


def table(results: Sequence[tuple[Row, str, Result]]) -> str:
    """Formats a line per environment and method; KL is the largest KL that a run logged."""
    lines = [
        (
            f"{'':>32} {'method':>6} {'final, 95 % interval':>28} {'largest':>9} {'published':>9} "
            f"{'worst':>8} {'KL':>7} {'steps/s':>8}"
        )
    ]
    for row, method, result in results:
        final = np.asarray(result.summary["greedy_return"], np.float64)
        low, high = statistics.bootstrap_interval(final, statistic=lambda x: x.mean(axis=0))
        measured = "exact_kl" if "exact_kl" in result.rows[-1] else "kl"
        kl = float(np.nanmax(metrics.curve(result.rows, measured)[1]))
        whole = f"{final.mean():,.5g} [{float(low):,.5g}, {float(high):,.5g}]"
        published = f"{row.published[method]:,}" if method in row.published else "–"
        lines.append(
            f"{row.name:>32} {method:>6} {whole:>28} {largest_mean(result):>9,.5g} "
            f"{published:>9} {final.min():>8,.5g} {kl:>7.4f} "
            f"{result.summary['steps_per_second']:>8,.0f}"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(argv, "suites.py", "Methods side by side on a suite.", Options)
    if options is None:
        return 0
    words, methods = options.envs.split(","), options.methods.split(",")
    rows = [row for row in SUITES[options.suite] if any(word in row.name for word in words)]
    if not rows:
        known = "; ".join(row.name for row in SUITES[options.suite])
        raise ConfigError("envs", f"must hold a word of {known}, got {options.envs}")
    for method in methods:
        errors.lookup("methods", method, dict.fromkeys(METHODS))
    out = Path(options.out or f"runs/{options.suite}")
    results = {
        (row.name, method): train(options, out, method, row) for row in rows for method in methods
    }
    panels = [
        comparison.panel(
            [results[row.name, method]._replace(name=method) for method in methods],
            "greedy_return",
            f"{row.name}: greedy return",
            "environment steps, each seed",
            "return",
        )
        for row in rows
    ]
    heading = f"{options.seeds} seeds, {options.eval_episodes} episodes"
    shown = [(row, method, results[row.name, method]) for row in rows for method in methods]
    comparison.leave(out, options.suite, panels, heading, table(shown))
    return 0


if __name__ == "__main__":
    flags.run_script(main)
