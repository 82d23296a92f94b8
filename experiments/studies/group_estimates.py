"""Do better estimates of a group's mean and standard deviation help GRPO?

`python experiments/studies/group_estimates.py` tests the notes' "potential extension": samples that
only enter the statistics, running estimates for recurring prompts (or for a difficulty), and a
larger group whose sum is divided by √G. Every variant generates the same number of completions per
iteration, starts from the same policy, and trains on the same finite set of prompts (or on fresh
ones, as its name says). Writes a folder per variant, `table.txt` and `estimates.png` under `--out`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import ablation
import comparison
import numpy as np
from comparison import Result

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, POSITIVE, SEED, UNIT, static
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.figures.plotting import Panel
from jaxrl_po.run.store import metrics


class Variant(NamedTuple):
    """A row of the table.

    Attributes:
      group_size: completions of a prompt.
      switches: of GRPO.
      fresh: prompts are drawn afresh, not from the finite set.
    """

    group_size: int
    switches: tuple[str, ...] = ()
    fresh: bool = False


RUNNING = "running_statistics=true"
VARIANTS = {
    "G = 4": Variant(4),
    "G = 8": Variant(8),
    "4 of 8, 4 for statistics": Variant(8, ("extra_samples=4",)),
    "G = 4, running": Variant(4, (RUNNING,)),
    "G = 1, running": Variant(1, (RUNNING,)),
    "G = 16": Variant(16),
    "G = 16, sum over √16": Variant(16, ("group_divisor=root_size",)),
    "all three, 4 of 8": Variant(8, ("extra_samples=4", RUNNING, "group_divisor=root_size")),
    "fresh, G = 4": Variant(4, fresh=True),
    "fresh, running by carries": Variant(4, (RUNNING,), fresh=True),
}


@config.record
class Options:
    """The comparison as a whole."""

    variants: str = static(
        "", "numbers of the rows to run, from 1, separated by commas; empty for all"
    )
    num_digits: int = static(2, "digits of an operand of addition", within=COUNT)
    prompt_set: int = static(1024, "prompts of the finite set", unit="prompts", within=COUNT)
    batch: int = static(
        128, "completions of one iteration, a multiple of every group size", within=COUNT
    )
    seeds: int = static(4, "runs of each row", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    total_steps: int = static(51_200, "completions of each run", within=COUNT)
    decay: float = static(
        0.9,
        "factor on an outcome's weight in the running estimates per iteration",
        within=UNIT,
    )
    width: int = static(32, "width of the transformer", within=COUNT)
    layers: int = static(2, "its blocks", within=COUNT)
    learning_rate: float = static(
        1e-3,
        "peak step size of Adam: warm-up over the first tenth, then decay to 0",
        within=POSITIVE,
    )
    warm_start: float = static(
        0.45, "greedy accuracy at which the supervised warm start stops", within=UNIT
    )
    devices: str = static("auto", "devices to shard seeds over")
    out: str = static(
        "runs/group_estimates", "folder for the results; an earlier comparison in it is replaced"
    )


def chosen(options: Options) -> dict[str, Variant]:
    """The rows to run.

    Raises:
      UsageError: a number that no row has, or a batch that is no multiple of a group.
    """
    rows = {str(i + 1): name for i, name in enumerate(VARIANTS)}
    names = (
        [flags.lookup("variants", number, rows) for number in options.variants.split(",")]
        if options.variants
        else VARIANTS
    )
    for name in names:
        if options.batch % VARIANTS[name].group_size:
            raise UsageError(
                f"--batch={options.batch} must be a multiple of "
                f"{VARIANTS[name].group_size}, the group of {name!r}"
            )
    return {name: VARIANTS[name] for name in names}


def arguments(variant: Variant, options: Options) -> list[str]:
    """Flags of a variant's run."""
    decay = [f"running_decay={options.decay}"] if RUNNING in variant.switches else []
    return [
        f"--problem.num_prompts={options.batch // variant.group_size}",
        f"--problem.group_size={variant.group_size}",
        f"--problem.prompt_set={0 if variant.fresh else options.prompt_set}",
        *[f"--config.{switch}" for switch in (*variant.switches, *decay)],
    ]


def run(options: Options, out: Path) -> list[Result]:
    """Trains every row."""
    iterations = options.total_steps // options.batch
    shared = {
        "algorithm": "grpo",
        "task.num_digits": options.num_digits,
        "seed": options.seed,
        "devices": options.devices,
        "log_every": max(1, iterations // 40),
        "eval_every": 2,
        "model.width": options.width,
        "model.layers": options.layers,
        "model.mlp_width": 3 * options.width,
        "config.learning_rate": options.learning_rate,
        "config.warm_up_iterations": max(1, iterations // 10),
        "config.decay_iterations": iterations,
        "config.entropy_coefficient": 0.02,
        "config.use_reference": "false",
    }
    runs = {name: arguments(variant, options) for name, variant in chosen(options).items()}
    start = {"warm_start.accuracy": options.warm_start, "warm_start.learning_rate": 2e-3}
    rows = {"seeds": options.seeds, "total_steps": options.total_steps}
    return comparison.run_from_one(launch.language, runs, shared, start, rows, out)


def average(result: Result, metric: str) -> str:
    """Mean of a training metric over lines and seeds; a dash where it was not logged."""
    _, values = metrics.curve(result.rows, metric)
    return f"{np.nanmean(values):.3f}" if values.size else "–"


def table(results: Sequence[Result]) -> str:
    """One line for each row: accuracies, and how much of the generated data had a signal."""
    lines = [
        (
            f"{'':>26} {'final accuracy':>24} {'at equal tokens':>24} {'dead groups':>12} "
            f"{'signal':>7} {'tokens / 1000':>14}"
        )
    ]
    for result, row in zip(results, ablation.score(results), strict=True):
        of_run = (
            f"{average(result, 'dead_groups'):>12} {average(result, 'signal'):>7} "
            f"{row.generated.mean() / 1000:>14,.0f}"
        )
        lines.append(
            f"{row.name:>26} {ablation.interval(row.updates):>24} "
            f"{ablation.interval(row.tokens):>24} {of_run}"
        )
    return "\n".join(lines) + "\n"


def panels(results: Sequence[Result]) -> list[Panel]:
    """Accuracy and signal of every row."""
    steps = "completions generated, each seed"
    return [
        comparison.panel(results, "greedy_accuracy", "held-out greedy accuracy", steps, "accuracy"),
        comparison.panel(
            results, "signal", "tokens with an advantage", steps, "share of the trained"
        ),
    ]


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(
        argv, "group_estimates.py", "GRPO with better estimates of mean and std.", Options
    )
    if options is None:
        return 0
    chosen(options)
    out = Path(options.out)
    results = run(options, out)
    heading = (
        f"{options.num_digits}-digit addition, {options.seeds} seeds, "
        f"{options.total_steps:,} completions each, warm start at {options.warm_start}; "
        "IQM of the held-out greedy accuracy with 95 % intervals"
    )
    comparison.leave(out, "estimates", panels(results), heading, table(results))
    return 0


if __name__ == "__main__":
    flags.entry(main)
