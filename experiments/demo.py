"""The demo: control tasks and a transformer by the same code; a few minutes on two cores.

PPO on CartPole-v1 and on two-digit addition (`demo.png`), GRPO and DAPO on addition from the same warm start (`groups.png`), and
all methods of the control family on CartPole-v1 (`family/family.png`). Leaves a folder for each run under `runs/demo/`, in place of
an earlier demo's. The exit status is 0 only if every part has learned.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import common
import comparison
import control
import family
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


SMALL_ADDITION = (
    "--task=addition",
    "--task.num_digits=2",
    "--seeds=4",
    "--model.width=32",
    "--model.mlp_width=96",
    "--warm_start.steps=2000",
    "--warm_start.accuracy=0.35",
    "--warm_start.learning_rate=5e-3",
    "--config.learning_rate=2e-3",
    "--config.num_epochs=2",
    "--eval_every=2",
)
IN_GROUPS = (*SMALL_ADDITION, "--problem.num_prompts=32", "--problem.group_size=8", "--config.num_minibatches=2")

CARTPOLE = Part(
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
)
ADDITION = Part(
    name="addition",
    title="PPO on two-digit addition, 4 seeds",
    script=language.SCRIPT,
    main=language.main,
    arguments=(
        *SMALL_ADDITION,
        "--total_steps=40960",
        "--problem.num_prompts=128",
        "--problem.group_size=1",
        "--config.decay_iterations=320",
        "--config.entropy_coefficient=0.05",
        "--config.epsilon_high=0.3",
        "--config.num_minibatches=4",
        "--config.gamma=1",
        "--config.lambda_=1",
    ),
    score="greedy_accuracy",
    aggregate=metrics.mean,
    target=0.9,
)
GRPO = Part(
    name="grpo",
    title="GRPO on two-digit addition, 4 seeds",
    script=language.SCRIPT,
    main=language.main,
    arguments=(*IN_GROUPS, "--algorithm=grpo", "--total_steps=40960", "--config.use_reference=false"),
    score="greedy_accuracy",
    aggregate=metrics.mean,
    target=0.9,
)
DAPO = Part(
    name="dapo",
    title="DAPO on two-digit addition, 4 seeds",
    script=language.SCRIPT,
    main=language.main,
    arguments=(*IN_GROUPS, "--algorithm=dapo", "--total_steps=25600", "--config.max_generation_batches=4"),
    score="greedy_accuracy",
    aggregate=metrics.mean,
    target=0.9,
)
PICTURES = {"demo.png": (CARTPOLE, ADDITION), "groups.png": (GRPO, DAPO)}

FAMILY = ("--methods=reinforce,a2c,npg,trpo,ppo_kl,ppo,grpo", "--env=CartPole-v1", "--seeds=8", "--total_steps=100000")


def run(part: Part, out: Path) -> tuple[plotting.Panel, bool]:
    """Trains a part; returns its picture, and whether it learned.

    Raises:
      UsageError: it did not finish.
    """
    (result,) = comparison.run_each(part.main, {part.name: part.arguments}, (), out)
    scores = [-np.inf if score is None else score for score in result.summary[part.score]]
    reached = float(part.aggregate(scores))
    learned = reached >= part.target
    print(f"{part.title}: {part.score} {reached:.4g}, wanted {part.target:g}: {'learned' if learned else 'NOT LEARNED'}")
    return common.panel(part.script, part.title, result.rows, part.target), learned


def main(argv: Sequence[str]) -> int:
    """Runs the demo; returns 0 when all parts reach their targets."""
    begun = time.perf_counter()
    sections = {"": Options}
    if {"--help", "-h"} & set(argv):
        print(flags.usage("demo.py", "Trains PPO, GRPO and DAPO, and all methods on CartPole-v1.", sections))
        return 0
    out = Path(flags.parse(argv, sections)[""].out)
    learned = []
    for picture, parts in PICTURES.items():
        panels = []
        for part in parts:
            panel, verdict = run(part, out)
            panels.append(panel)
            learned.append(verdict)
        plotting.save(panels, out / picture)
    status = family.main([*FAMILY, f"--out={out / 'family'}"])
    pictures = ", ".join(str(out / name) for name in (*PICTURES, "family/family.png"))
    print(f"{time.perf_counter() - begun:.0f} s in all; see {pictures}")
    return 0 if status == 0 and all(learned) else 1


if __name__ == "__main__":
    flags.entry(main)
