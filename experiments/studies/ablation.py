"""Ablation of DAPO: adds its ingredients one after another, as in Table 1 of the paper.

Run the ablation by `python experiments/studies/ablation.py`. Each row of the table adds one
ingredient to the previous row. All seeds of all rows start from one warm start, as all rows in the
paper start from one pretrained model. Rows are compared after the same number of updates and after
the same number of generated tokens, since dynamic sampling generates more per update. Writes a
folder per row, `table.txt` and `ablation.png` under the folder `--out`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import comparison
import numpy as np
import numpy.typing as npt
from comparison import START, Result

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, SEED, UNIT, static
from jaxrl_po.language.tasks import running_sum
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures.plotting import Panel
from jaxrl_po.run.store import statistics

# Rows in the order of the paper's table: each row adds its switch to the switches of the rows
# above.
STEPS = {
    "naive GRPO": "",
    "+ overlong filtering": "overlong_filtering=true",
    "+ clip-higher": "clip_higher=true",
    "+ soft overlong": "soft_overlong=true",
    "+ token-level loss": "token_level_loss=true",
    "+ dynamic sampling": "dynamic_sampling=refill",
}
OFF = {
    "overlong_filtering": "false",
    "clip_higher": "false",
    "soft_overlong": "false",
    "token_level_loss": "false",
    "dynamic_sampling": "off",
}


@config.record
class Options:
    """Settings of the ablation."""

    length: int = static(5, "digits of a list that is summed up", within=COUNT)
    seeds: int = static(8, "runs of each row", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    updates: int = static(200, "iterations of each run", unit="iterations", within=COUNT)
    num_prompts: int = static(16, "prompts of one generated batch", within=COUNT)
    group_size: int = static(8, "completions of each prompt", within=COUNT)
    width: int = static(64, "width of the transformer", within=COUNT)
    layers: int = static(2, "blocks of the transformer", within=COUNT)
    learning_rate: float = static(
        3e-4,
        "peak step size of Adam: warm-up over 5 % of the updates, then decay to 0",
        within=POSITIVE,
    )
    warm_start: float = static(
        0.4,
        "greedy accuracy at which the supervised warm start stops",
        within=UNIT,
        when=("warm_start_steps", COUNT),
    )
    warm_start_steps: int = static(
        10_000,
        "maximum steps of the warm start; 0 starts from a random policy",
        unit="steps",
        within=NON_NEGATIVE,
    )
    devices: str = static("auto", "devices to shard seeds over")
    out: str = static(
        "runs/ablation", "folder for the results; an earlier ablation in it is replaced"
    )


class Scores(NamedTuple):
    """Scores of one row of the table; each field except the name is `[S]`.

    Attributes:
      name: name of the row.
      updates: held-out greedy accuracy after all updates.
      tokens: held-out greedy accuracy at the number of tokens that the cheapest row generated.
      generated: total number of generated tokens.
    """

    name: str
    updates: npt.NDArray[np.float64]
    tokens: npt.NDArray[np.float64]
    generated: npt.NDArray[np.float64]


def arguments() -> dict[str, list[str]]:
    """Maps the name of a row to the flags of its run."""
    switches, rows = dict(OFF), {}
    for name, step in STEPS.items():
        if step:
            switch, value = step.split("=")
            switches[switch] = value
        rows[name] = [f"--config.{switch}={value}" for switch, value in switches.items()]
    return rows


def run(options: Options, out: Path) -> list[Result]:
    """Trains one warm start, then every row from it."""
    batch = options.num_prompts * options.group_size
    shared = {
        "algorithm": "dapo",
        "task": "running_sum",
        "task.length": options.length,
        "seed": options.seed,
        "devices": options.devices,
        "log_every": max(1, options.updates // 40),
        "eval_every": 4,
        "eval_prompts": 256,
        "problem.num_prompts": options.num_prompts,
        "problem.group_size": options.group_size,
        # The demonstrations include the longest one, because the policy must learn the length.
        "problem.max_new_tokens": running_sum(options.length).answer_length,
        "model.width": options.width,
        "model.layers": options.layers,
        "config.learning_rate": options.learning_rate,
        "config.warm_up_iterations": options.updates // 20,
        "config.decay_iterations": options.updates,
        "config.entropy_coefficient": 0.0,
        "config.num_epochs": 1,
        "config.num_minibatches": 2,
    }
    start = {
        "warm_start.steps": options.warm_start_steps,
        "warm_start.accuracy": options.warm_start if options.warm_start_steps else 1.0,
    }
    rows = {"seeds": options.seeds, "total_steps": options.updates * batch}
    return comparison.run_from_one(launch.language, arguments(), shared, start, rows, out)


def generated(result: Result) -> npt.NDArray[np.float64]:
    """Computes generated tokens up to each line, `[S, lines]`: batches × completions × length."""
    batch = result.rows[-1]["step"] // result.rows[-1]["iteration"]
    rows = result.rows[1:]
    iterations = np.diff([row["iteration"] for row in result.rows])
    lengths = np.array([row["response_length"] for row in rows], np.float64)
    batches = np.array(
        [row.get("generation_batches", np.ones(lengths.shape[1])) for row in rows], np.float64
    )
    each = iterations[:, None] * batches * batch * lengths
    return np.concatenate([np.zeros((lengths.shape[1], 1)), np.cumsum(each, axis=0).T], axis=1)


def score(results: Sequence[Result]) -> list[Scores]:
    """Computes the accuracies of every row at equal updates and at equal tokens."""
    tokens = [generated(result) for result in results]
    budget = np.min([all[:, -1] for all in tokens], axis=0)  # token budget of each seed
    scores = []
    for result, all in zip(results, tokens, strict=True):
        evaluated = [i for i, row in enumerate(result.rows) if "greedy_accuracy" in row]
        accuracy = np.array([result.rows[i]["greedy_accuracy"] for i in evaluated], np.float64).T
        at_budget = [
            np.interp(budget[s], all[s, evaluated], accuracy[s]) for s in range(len(accuracy))
        ]
        scores.append(Scores(result.name, accuracy[:, -1], np.array(at_budget), all[:, -1]))
    return scores


def interval(values: npt.NDArray[np.float64]) -> str:
    """Formats the interquartile mean over seeds with its 95 % bootstrap interval."""
    low, high = statistics.bootstrap_interval(values)
    return (
        f"{float(statistics.interquartile_mean(values)):.3f} [{float(low):.3f}, {float(high):.3f}]"
    )


def table(results: Sequence[Result], scores: Sequence[Scores]) -> str:
    """Formats the table, one line for each row."""
    warm = np.asarray(results[0].summary["warm_start_accuracy"], np.float64)
    lines = [f"{'':>22} {'at equal updates':>24} {'at equal tokens':>24} {'tokens / 1000':>14}"]
    lines.append(f"{START:>22} {interval(warm):>24} {interval(warm):>24} {0:>14}")
    for row in scores:
        thousands = row.generated.mean() / 1000
        lines.append(
            f"{row.name:>22} {interval(row.updates):>24} {interval(row.tokens):>24} "
            f"{thousands:>14,.0f}"
        )
    return "\n".join(lines) + "\n"


def panels(results: Sequence[Result]) -> list[Panel]:
    """Builds panels of accuracy, entropy, length and truncation of every row."""
    titles = {
        "greedy_accuracy": "running_sum: held-out greedy accuracy",
        "entropy": "entropy, nats",
        "response_length": "response length, tokens",
        "truncated": "share truncated at the budget",
    }
    steps = "completions trained on, each seed"
    return [
        comparison.panel(results, metric, title, steps, title) for metric, title in titles.items()
    ]


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(argv, "ablation.py", "Adds DAPO's ingredients one after another.", Options)
    if options is None:
        return 0
    out = Path(options.out)
    results = run(options, out)
    text = table(results, score(results))
    heading = (
        f"running_sum, {options.seeds} seeds, IQM of the held-out greedy accuracy "
        "with 95 % intervals"
    )
    comparison.leave(out, "ablation", panels(results), heading, text)
    return 0


if __name__ == "__main__":
    flags.run_script(main)
