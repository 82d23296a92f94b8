"""Overhead of a Python reward, compared with a verifier inside the program.

`python experiments/benchmarks/reward.py` times both in alternation on three-digit addition with
GRPO. The reward function is nearly free, so the difference is the overhead: tokens to the host,
texts to the worker and back, and two programs instead of one.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import numpy as np
import timing

from jaxrl_po import config, language
from jaxrl_po.algorithms import grpo
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.data.scoring import HostScore, Reward
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags
from jaxrl_po.types import Learner, TrainState

REWARD = Path(__file__).parent.parent.parent / "examples" / "reward.py"


@config.record
class Options:
    """What is measured."""

    width: int = static(64, "width of the transformer", within=COUNT)
    num_prompts: int = static(64, "prompts of an iteration of each seed", within=COUNT)
    group_size: int = static(8, "completions of each prompt", within=COUNT)
    num_minibatches: int = static(2, "updates of an iteration", within=COUNT)
    seeds: int = static(1, "parallel seeds", within=COUNT)
    rounds: int = static(20, "iterations of each that are timed", within=COUNT)
    devices: str = static("auto", "devices; auto on a CPU: one per core")
    json: bool = static(False, "print one JSON object as the last line")


def make_learner(
    options: Options, task: language.Task, placement: Placement, *, verify: bool
) -> Learner:
    """GRPO on the task, with the verifier inside the program or without."""
    sizes = language.ModelSettings(width=options.width, mlp_width=4 * options.width)
    problem = language.make_problem(
        task,
        sizes.build(task.tokenizer.size),
        num_prompts=options.num_prompts,
        group_size=options.group_size,
        verify=verify,
    )
    settings = grpo.Config(num_minibatches=options.num_minibatches, axis_name=placement.axis_name)
    return grpo.make(config.as_arrays(settings), problem)


def measure(options: Options) -> dict[str, Any]:
    """Medians of both over the same number of iterations, in alternation."""
    placement = parallel.choose(
        options.devices, num_seeds=options.seeds, num_rows=options.num_prompts
    )
    task = language.tasks.addition(3)
    inside, outside = (
        make_learner(options, task, placement, verify=verify) for verify in (True, False)
    )
    keys = jax.random.split(jax.random.key(0), options.seeds)
    state = jax.jit(parallel.over_devices(inside, placement).init)(keys)
    split = parallel.over_devices(outside, placement)
    sample, update = jax.jit(split.sample), jax.jit(split.update)
    parts: dict[str, list[float]] = {"sample": [], "score": [], "update": []}

    with HostScore([Reward(f"{REWARD}:digits")], task) as give:

        def apart(state: TrainState) -> tuple[TrainState, Any]:
            state, batch = timed("sample", sample, state)
            (batch, _), _ = timed(
                "score", lambda batch: (give(batch, first=False, report=print), None), batch
            )
            return timed("update", update, state, batch)

        def timed(part: str, function: Callable[..., Any], *args: Any) -> Any:
            seconds, result = timing.clock(function, *args)
            parts[part].append(seconds)
            return result

        one = jax.jit(parallel.over_devices(inside, placement).step)
        clocks = {
            "one program": timing.stepper(one, state),
            "two programs": timing.stepper(apart, state),
        }
        seconds = timing.in_turns(clocks, options.rounds)
    ratios = np.divide(seconds["two programs"], seconds["one program"])
    return {
        **{name.replace(" ", "_"): round(median(values), 4) for name, values in seconds.items()},
        "ratio": round(float(np.median(ratios)), 3),
        **{part: round(median(values[2:]), 4) for part, values in parts.items()},
        "placement": placement.describe(),
    }


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Times a reward in Python against a verifier in the program."
    return timing.measured(argv, "benchmarks/reward.py", summary, Options, measure)


if __name__ == "__main__":
    flags.entry(main)
