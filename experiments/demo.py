"""Runs the demo: control tasks and a transformer, by the same code in a few minutes on two cores.

The demo trains PPO on CartPole-v1 and on two-digit addition (`demo.png`), GRPO and DAPO on the same
addition task (`groups.png`), and the other control methods on CartPole-v1 (`family.png`). Writes
one folder per run under `runs/demo/`, and replaces an earlier demo. The exit status is 0 only if
all parts of the demo reach their targets.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

sys.path.append(str(Path(__file__).parent / "studies"))

import comparison
import family
from comparison import Result

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import static
from jaxrl_po.run.experiment import control, flags, language
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.store import statistics


@config.record
class Options:
    """Folder of the demo's results."""

    out: str = static("runs/demo", "folder for the results; an earlier demo in it is replaced")


class Part(NamedTuple):
    """One run of the demo.

    Attributes:
      name: name of the run's folder.
      title: title of the part in the picture.
      domain: domain of the run, control or language.
      main: function `main` of the command that runs the part.
      arguments: flags of the run.
      score: key in `summary.json` whose value has one number per seed.
      aggregate: function that aggregates the seeds.
      target: smallest aggregate that counts as success.
    """

    name: str
    title: str
    domain: Domain[Any]
    main: Callable[[Sequence[str]], int]
    arguments: tuple[str, ...]
    score: str
    aggregate: Callable[[npt.ArrayLike], npt.NDArray[np.float64]]
    target: float


CARTPOLE = Part(
    name="cartpole",
    title="PPO on CartPole-v1, 16 seeds",
    domain=control,
    main=launch.control,
    arguments=(
        *("--env=CartPole-v1", "--seeds=16", "--total_steps=100000"),
        *("--problem.num_envs=16", "--problem.num_steps=128"),
    ),
    score="greedy_return",
    aggregate=statistics.interquartile_mean,
    target=475.0,
)


def on_addition(algorithm: str, *arguments: str) -> Part:
    """Builds a part: a method on two-digit addition, warm-started to half of the answers."""
    shared = (
        *("--task=addition", "--task.num_digits=2", "--seeds=4", "--total_steps=64000"),
        *("--model.width=32", "--model.mlp_width=96", "--warm_start.steps=2000"),
        *("--warm_start.accuracy=0.45", "--warm_start.learning_rate=5e-3"),
        "--config.learning_rate=2e-3",
        "--config.num_epochs=2",
        "--eval_every=5",
    )
    return Part(
        name="addition" if algorithm == "ppo" else algorithm,
        title=f"{algorithm.upper()} on two-digit addition, 4 seeds",
        domain=language,
        main=launch.language,
        arguments=(f"--algorithm={algorithm}", *shared, *arguments),
        score="greedy_accuracy",
        aggregate=statistics.nan_mean,
        target=0.9,
    )


ADDITION = on_addition(
    "ppo",
    *("--problem.num_prompts=128", "--problem.group_size=1", "--config.decay_iterations=500"),
    *("--config.entropy_coefficient=0.05", "--config.epsilon_high=0.3"),
    "--config.num_minibatches=4",
)
IN_GROUPS = (
    *("--problem.num_prompts=32", "--problem.group_size=4", "--config.decay_iterations=500"),
    *("--config.entropy_coefficient=0.02", "--config.num_minibatches=2"),
)
GRPO = on_addition("grpo", *IN_GROUPS, "--config.use_reference=false")
DAPO = on_addition("dapo", *IN_GROUPS)
PARTS = (CARTPOLE, ADDITION, GRPO, DAPO)

# Methods to compare with PPO, which is already a part; a sweep found their settings.
FAMILY = family.Options(methods="reinforce,a2c,trpo", seeds=8, total_steps=100_000)


def learned(part: Part, result: Result) -> bool:
    """Returns whether a part reached its target; prints the verdict."""
    scores = [-np.inf if score is None else score for score in result.summary[part.score]]
    reached = float(part.aggregate(scores))
    verdict = "learned" if reached >= part.target else "NOT LEARNED"
    print(f"{part.title}: {part.score} {reached:.4g}, wanted {part.target:g}: {verdict}")
    return reached >= part.target


def groups(results: Sequence[Result]) -> list[plotting.Panel]:
    """Builds panels of accuracy, entropy and tokens with an advantage, for runs on addition.

    The methods are PPO, GRPO and DAPO; the last panel is drawn without PPO.
    """
    ppo, *others = results
    named, steps = [ppo._replace(name="ppo"), *others], "completions trained on, each seed"
    title = "two-digit addition: held-out greedy accuracy"
    signal = "tokens with a nonzero advantage"
    return [
        comparison.panel(named, "greedy_accuracy", title, steps, "accuracy", 0.9),
        comparison.panel(named, "entropy", "entropy of the policy", steps, "nats a token"),
        comparison.panel(named, "signal", signal, steps, "share of the batch"),
    ]


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 if all parts reach their targets.

    Raises:
      UsageError: a run did not finish.
    """
    begun = time.perf_counter()
    summary = "Trains PPO, GRPO and DAPO on addition, and PPO and its family on CartPole-v1."
    options = flags.ask(argv, "demo.py", summary, Options)
    if options is None:
        return 0
    out = Path(options.out)
    results = [
        comparison.run_each(part.main, {part.name: part.arguments}, (), out)[0] for part in PARTS
    ]
    curves = [
        plotting.Panel(
            result.rows,
            part.domain.CURVES,
            part.title,
            f"{part.domain.UNIT}, each seed",
            part.domain.Y_LABEL,
            part.target,
        )
        for part, result in zip(PARTS, results, strict=True)
    ]
    plotting.save_panels(curves[:2], out / "demo.png")
    plotting.save_panels(groups(results[1:]), out / "groups.png")
    methods = [*family.compare(FAMILY, out / "family"), results[0]._replace(name="ppo")]
    plotting.save_panels(family.panels(methods, FAMILY), out / "family.png")
    print(f"CartPole-v1, {FAMILY.seeds} seeds (ppo: 16)")
    print(family.table(methods, FAMILY), end="")
    verdicts = [learned(part, result) for part, result in zip(PARTS, results, strict=True)]
    print(f"{time.perf_counter() - begun:.0f} s in all; see {out}/{{demo,groups,family}}.png")
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    flags.run_script(main)
