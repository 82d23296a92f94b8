"""The demo: PPO on CartPole-v1 and on two-digit addition with a transformer, by the same code; a few minutes on two cores.

Leaves `runs/demo/{cartpole,addition}/` and one picture of both, `runs/demo/demo.png`, in place of an earlier demo's. The exit
status is 0 only if both have learned.
"""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import control
import language
import numpy as np
import numpy.typing as npt

from jaxrl_po import config, flags, metrics, plotting
from jaxrl_po.config import static


@config.record
class Options:
    """Where the results go."""

    out: str = static("runs/demo", "folder for the results; an earlier demo in it is replaced")


class Part(NamedTuple):
    """One of the runs.

    Attributes:
      name: its folder.
      title: in the picture.
      script: which one runs it.
      main: that script's.
      arguments: its flags.
      score: in `summary.json`, one number a seed.
      aggregate: of the seeds.
      target: what the aggregate must reach.
    """

    name: str
    title: str
    script: common.Script
    main: Callable[[Sequence[str]], int]
    arguments: tuple[str, ...]
    score: str
    aggregate: Callable[[npt.ArrayLike], npt.NDArray[np.float64]]
    target: float


PARTS = (
    Part(
        name="cartpole",
        title="PPO on CartPole-v1, 16 seeds",
        script=control.SCRIPT,
        main=control.main,
        arguments=(
            "--env=CartPole-v1",
            "--seeds=16",
            "--total_steps=100000",
            "--problem.num_envs=16",
            "--problem.num_steps=128",
        ),
        score="greedy_return",
        aggregate=metrics.interquartile_mean,
        target=475.0,
    ),
    Part(
        name="addition",
        title="PPO on two-digit addition, 4 seeds",
        script=language.SCRIPT,
        main=language.main,
        arguments=(
            "--task=addition",
            "--task.num_digits=2",
            "--seeds=4",
            "--total_steps=40960",
            "--problem.num_prompts=128",
            "--problem.group_size=1",
            "--model.width=32",
            "--model.mlp_width=96",
            "--warm_start.steps=2000",
            "--warm_start.accuracy=0.35",
            "--warm_start.learning_rate=5e-3",
            "--config.learning_rate=2e-3",
            "--config.decay_iterations=320",
            "--config.entropy_coefficient=0.05",
            "--config.epsilon_high=0.3",
            "--config.num_epochs=2",
            "--config.num_minibatches=4",
            "--config.gamma=1",
            "--config.lambda_=1",
            "--eval_every=2",
        ),
        score="greedy_accuracy",
        aggregate=metrics.mean,
        target=0.9,
    ),
)


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 when both parts reach their targets."""
    begun = time.perf_counter()
    sections = {"": Options}
    if {"--help", "-h"} & set(argv):
        print(flags.usage("demo.py", "Trains PPO on CartPole-v1 and on addition.", sections))
        return 0
    out = Path(flags.parse(argv, sections)[""].out)
    panels, lines = [], []
    for part in PARTS:
        folder = out / part.name
        status = part.main([*part.arguments, f"--out={folder}", "--overwrite"])
        if status or not (folder / "summary.json").exists():
            return status or 1
        panels.append(common.panel(part.script, part.title, metrics.read(folder / "metrics.jsonl"), part.target))
        scores = json.loads((folder / "summary.json").read_text())[part.score]
        reached = float(part.aggregate([-np.inf if score is None else score for score in scores]))
        verdict = "learned" if reached >= part.target else "NOT LEARNED"
        lines.append((reached >= part.target, f"{part.title}: {part.score} {reached:.4g}, wanted {part.target:g}: {verdict}"))
    plotting.save(panels, out / "demo.png")
    print(*(line for _, line in lines), f"{time.perf_counter() - begun:.0f} s in all; see {out / 'demo.png'}", sep="\n")
    return 0 if all(learned for learned, _ in lines) else 1


if __name__ == "__main__":
    flags.entry(main)
