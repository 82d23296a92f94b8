"""Compares methods on one language task at equal numbers of generated tokens.

Measures the lecture's table.

`python experiments/studies/language_family.py` trains PPO, TRPO, GRPO and DAPO by `language.py`,
from the same warm start. The script writes a folder for each method, `family.png` (accuracy against
generated tokens, KL of an update, entropy), `table.txt`, and the lecture's table as `lecture.md`
and `lecture.json`, all under the folder `--out`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ablation
import comparison
import lecture
import numpy as np
from comparison import Result
from rich import filesize

from jaxrl_po import config, language
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, SEED, UNIT, static
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures.plotting import Panel
from jaxrl_po.run.store import folder, metrics


@config.record
class Options:
    """Settings of the comparison."""

    methods: str = static("ppo,trpo,grpo,dapo", "methods, separated by commas")
    task: str = static(
        "addition",
        f"one of {', '.join(language.tasks.TASKS)}, with its default settings except --num_digits",
    )
    num_digits: int = static(2, "digits of an operand, if the task has operands", within=COUNT)
    seeds: int = static(4, "runs of each method", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    total_steps: int = static(51_200, "completions of each run that are trained on", within=COUNT)
    width: int = static(32, "width of the transformers", within=COUNT)
    layers: int = static(2, "blocks of the transformers", within=COUNT)
    warm_start: float = static(
        0.45, "greedy accuracy at which the supervised warm start stops", within=UNIT
    )
    warm_start_steps: int = static(2_000, "most warm-start steps", unit="steps", within=COUNT)
    devices: str = static("auto", "devices to shard seeds over")
    out: str = static(
        "runs/language_family", "folder for the results; an earlier comparison in it is replaced"
    )


class Method(NamedTuple):
    """Settings of a method's run.

    Attributes:
      algorithm: name of the method in `language.py`.
      num_prompts: prompts per iteration.
      group_size: completions of each prompt.
      flags: further flags that differ from the defaults of `language.py`.
      decays: True if the step size falls to 0 at the end of the run.
    """

    algorithm: str
    num_prompts: int
    group_size: int
    flags: tuple[str, ...] = ()
    decays: bool = True


STEPS = ("config.learning_rate=1e-3", "config.num_epochs=2")
IN_GROUPS = (
    *STEPS,
    "config.num_minibatches=2",
    "config.entropy_coefficient=0.02",
    "config.warm_up_iterations=0",
)
METHODS = {
    "reinforce": Method("reinforce", 128, 1, decays=False),
    "a2c": Method("a2c", 128, 1),
    "npg": Method("npg", 256, 1, decays=False),
    "trpo": Method("trpo", 256, 1, decays=False),
    "ppo": Method(
        "ppo",
        128,
        1,
        (
            *STEPS,
            "config.num_minibatches=4",
            "config.entropy_coefficient=0.05",
            "config.epsilon_high=0.3",
        ),
    ),
    "grpo": Method("grpo", 32, 4, (*IN_GROUPS, "config.kl_coefficient=0.001")),
    "dapo": Method("dapo", 32, 4, IN_GROUPS),
}


def arguments(method: Method, options: Options) -> list[str]:
    """Returns the flags of a method's run."""
    iterations = options.total_steps // (method.num_prompts * method.group_size)
    given = [
        f"algorithm={method.algorithm}",
        f"problem.num_prompts={method.num_prompts}",
        f"problem.group_size={method.group_size}",
        f"log_every={max(1, iterations // 40)}",
        *method.flags,
    ]
    decay = [f"config.decay_iterations={iterations}"] if method.decays else []
    return [f"--{flag}" for flag in (*given, *decay)]


def run(options: Options, out: Path) -> list[Result]:
    """Trains every method."""
    digits = "num_digits" in vars(errors.lookup("task", options.task, language.tasks.TASKS)[0])
    shared = {
        "task": options.task,
        **({"task.num_digits": options.num_digits} if digits else {}),
        "seed": options.seed,
        "devices": options.devices,
        "eval_every": 2,
        "model.width": options.width,
        "model.layers": options.layers,
        "model.mlp_width": 3 * options.width,
    }
    start = {
        "warm_start.steps": options.warm_start_steps,
        "warm_start.accuracy": options.warm_start,
        "warm_start.learning_rate": 2e-3,
    }
    rows = {"seeds": options.seeds, "total_steps": options.total_steps}
    runs = {name: arguments(METHODS[name], options) for name in options.methods.split(",")}
    return comparison.run_from_one(launch.language, runs, shared, start, rows, out)


def by_tokens(result: Result) -> Result:
    """Returns a run's lines with generated tokens (mean over seeds) in place of completions."""
    tokens = ablation.generated(result).mean(axis=0)
    return result._replace(
        rows=[{**row, "step": float(step)} for row, step in zip(result.rows, tokens, strict=True)]
    )


def panels(results: Sequence[Result], options: Options) -> list[Panel]:
    """Builds panels of accuracy, KL and entropy against generated tokens, a curve per method."""
    counted, tokens = [by_tokens(result) for result in results], "tokens generated, each seed"
    title = f"{options.task}: held-out greedy accuracy"
    return [
        comparison.panel(counted, "greedy_accuracy", title, tokens, "accuracy"),
        comparison.panel(counted, "kl", "KL(old ‖ new) of an update", tokens, "nats a token"),
        comparison.panel(counted, "entropy", "entropy of the policy", tokens, "nats a token"),
    ]


def table(results: Sequence[Result]) -> str:
    """Formats a line per method: accuracy at the end and at equal tokens, and KL of updates."""
    lines = [
        (
            f"{'':>10} {'warm start':>11} {'final accuracy':>24} {'at equal tokens':>24} "
            f"{'tokens / 1000':>14} {'KL':>8} {'most':>8}"
        )
    ]
    for result, row in zip(results, ablation.score(results), strict=True):
        warm, kl = np.mean(result.rows[0]["greedy_accuracy"]), metrics.curve(result.rows, "kl")[1]
        lines.append(
            f"{row.name:>10} {warm:>11.3f} {ablation.interval(row.updates):>24} "
            f"{ablation.interval(row.tokens):>24} {row.generated.mean() / 1000:>14,.0f} "
            f"{np.nanmedian(kl):>8.4f} {np.nanmax(kl):>8.4f}"
        )
    return "\n".join(lines) + "\n"


Cells = Mapping[str, Any]


def held(cells: Cells) -> str:
    """Formats the list of models in memory with their bytes."""
    return ", ".join(f"{name} {filesize.decimal(size)}" for name, size in cells["models"].items())


def shown(name: str, write: Callable[[Any], str]) -> Callable[[Cells], str]:
    """Returns a function that formats a cell by its name.

    A dash stands for a missing measurement.
    """
    return lambda cells: "–" if cells[name] is None else write(cells[name])


LECTURE: dict[str, Callable[[Cells], str]] = {
    "models in memory": lambda cells: f"{len(cells['models'])}: {held(cells)}",
    "optimizer state": shown("optimizer bytes", filesize.decimal),
    "most memory in an iteration (compiler)": shown(
        "peak bytes", lambda x: filesize.decimal(round(x))
    ),
    "completions of an iteration": shown("completions per iteration", "{:,}".format),
    "samples generated for each prompt": shown("samples per prompt", "{:.1f}".format),
    "dead groups, share of the generated": shown("dead groups", "{:.0%}".format),
    "tokens generated for each useful step": shown("tokens per useful step", "{:,.0f}".format),
    "length bias, d log(token weight) / d log(length)": shown("length slope", "{:+.2f}".format),
    "time of an iteration, all seeds": shown("seconds per iteration", "{:.2f} s".format),
    "tokens generated": shown("tokens generated", "{:,.0f}".format),
    "KL(old ‖ new) of an update, nats a token: mean, largest line": lambda cells: (
        "{:.4f}, {:.4f}".format(*cells["kl"])
    ),
    "accuracy, warm start": shown("warm start", "{:.3f}".format),
    "accuracy, final (IQM)": shown("final accuracy", "{:.3f}".format),
}


def markdown(columns: Mapping[str, Cells]) -> str:
    """Returns the lecture's table: a column for each method."""
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {title} | {' | '.join(write(cells) for cells in columns.values())} |"
        for title, write in LECTURE.items()
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Compares methods on a language task at equal generated tokens."
    options = flags.ask(argv, "language_family.py", summary, Options)
    if options is None:
        return 0
    for name in options.methods.split(","):
        errors.lookup("methods", name, METHODS)
    out = Path(options.out)
    results = run(options, out)
    columns = {result.name: lecture.measure(result, out) for result in results}
    folder.write_json(out / "lecture.json", columns)
    (out / "lecture.md").write_text(markdown(columns), encoding="utf-8")
    heading = (
        f"{options.task}, {options.seeds} seeds, IQM of the held-out greedy accuracy "
        "with 95 % intervals"
    )
    comparison.leave(out, "family", panels(results, options), heading, table(results))
    print(markdown(columns), end="")
    return 0


if __name__ == "__main__":
    flags.run_script(main)
