"""Weak scaling: time of an iteration against the number of devices, and the cost of sharding.

`python experiments/benchmarks/scaling.py --out=runs/scaling` times PPO on CartPole and GRPO on
addition with fixed work per device. All programs live in one process and are timed in alternation.
CPU devices share the cores: beyond as many devices as cores, the time must grow with the number of
devices, and only `per core` shows the cost of sharding itself.
"""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

sys.path.append(str(Path(__file__).parents[1] / "studies"))

import comparison
import timing

from jaxrl_po import config, control, language
from jaxrl_po.algorithms import grpo, ppo
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import over_seeds
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.figures.plotting import Panel, Series
from jaxrl_po.run.store import folder
from jaxrl_po.types import Learner, TrainState

PLAIN, SHARDED = "plain", "sharded"


@config.record
class Options:
    """What is measured."""

    out: str = static("", "folder for table.txt, scaling.json and scaling.png")
    devices: tuple[int, ...] = static((1, 2, 4), "device counts, in ascending order")
    iterations: int = static(
        20, "timed iterations of each program, after one for warm-up", within=COUNT
    )
    envs: int = static(64, "control: environments of each device", within=COUNT)
    steps: int = static(64, "control: steps of each in one iteration", unit="steps", within=COUNT)
    prompts: int = static(16, "language: prompts of each device", within=COUNT)
    group_size: int = static(8, "language: completions of each prompt", within=COUNT)
    width: int = static(64, "language: width of the transformer, of two blocks", within=COUNT)


def control_learner(options: Options, devices: int, axis_name: str | None) -> Learner:
    """PPO on CartPole."""
    import gymnax  # here, because it starts the backend, whose devices are chosen first

    problem = control.make_problem(
        gymnax.make("CartPole-v1")[0],
        num_envs=options.envs * devices,
        num_steps=options.steps,
        axis_name=axis_name,
    )
    return ppo.make(
        config.as_arrays(ppo.Config(num_epochs=4, num_minibatches=4, axis_name=axis_name)), problem
    )


def language_learner(options: Options, devices: int, axis_name: str | None) -> Learner:
    """GRPO with a reference on addition of three digits."""
    task = language.tasks.addition(3)
    model = language.ModelSettings(width=options.width, mlp_width=2 * options.width).build(
        task.tokenizer.size
    )
    problem = language.make_problem(
        task,
        model,
        num_prompts=options.prompts * devices,
        group_size=options.group_size,
    )
    return grpo.make(config.as_arrays(grpo.Config(num_epochs=2, axis_name=axis_name)), problem)


WORK = {"ppo on CartPole-v1": control_learner, "grpo on addition": language_learner}


def sharded_step(learner: Learner, placement: Placement) -> Callable[[TrainState], Any]:
    """A step under `jax.shard_map`, also on one device, where `parallel` itself leaves it out."""
    spec = parallel.state_spec()
    return jax.shard_map(
        over_seeds(learner, 1).step,
        mesh=parallel.make_mesh(placement),
        in_specs=(spec,),
        out_specs=(spec, P("seed")),
        check_vma=False,
    )


def programs(
    make: Callable[..., Learner], options: Options
) -> dict[tuple[str, int], Callable[[], float]]:
    """Maps `(plain or sharded, devices)` to a function that times one iteration in seconds."""
    keys = jax.random.split(jax.random.key(0), 1)
    clocks = {}
    for kind, devices in [(PLAIN, 1), *((SHARDED, devices) for devices in options.devices)]:
        placement = Placement(1, 1, devices)
        learner = make(options, devices, None if kind == PLAIN else "data")
        stacked = over_seeds(learner, 1)
        step = jax.jit(stacked.step if kind == PLAIN else sharded_step(learner, placement))
        clocks[kind, devices] = timing.stepper(step, jax.jit(stacked.init)(keys))
    return clocks


def measure(make: Callable[..., Learner], options: Options) -> dict[str, Any]:
    """Times all programs in alternation.

    Returns:
      `seconds`: devices to the median; `overhead`: of sharding on one device, the median ratio
      of measurements adjacent in time, minus 1.
    """
    timed = timing.in_turns(programs(make, options), options.iterations)
    pairs = zip(timed[SHARDED, 1], timed[PLAIN, 1], strict=True)
    return {
        "plain": median(timed[PLAIN, 1]),
        "seconds": {devices: median(timed[SHARDED, devices]) for devices in options.devices},
        "overhead": median(a / b for a, b in pairs) - 1.0,
    }


def table(results: Mapping[str, Mapping[str, Any]], cores: int) -> str:
    """Times, throughput against one device, and the overhead, as text."""
    lines = [f"{'':<20} {'devices':>7} {'s / iteration':>14} {'work / s':>9} {'per core':>9}"]
    for name, result in results.items():
        for devices, seconds in result["seconds"].items():
            gain = devices * result["seconds"][1] / seconds
            lines.append(
                f"{name:<20} {devices:>7} {seconds:>14.4f} {gain:>8.2f}× "
                f"{gain / min(devices, cores):>8.0%}"
            )
        lines.append(
            f"{name:<20} sharded on one device costs {result['overhead']:+.1%} "
            f"(plain {result['plain']:.4f} s)"
        )
    return "\n".join(lines) + "\n"


def panels(results: Mapping[str, Mapping[str, Any]]) -> list[Panel]:
    """Time of an iteration, relative to one device."""
    curves = []
    for name, result in results.items():
        rows = [
            {"step": n, "time": [s / result["seconds"][1]]} for n, s in result["seconds"].items()
        ]
        curves.append(Series("time", name, rows))
    title = f"Fixed work for each device, {os.cpu_count()} cores"
    return [
        Panel(
            [], curves, title, "devices", "time of an iteration, of one device's", 1.0, seeds=False
        )
    ]


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(
        argv,
        "benchmarks/scaling.py",
        "Weak scaling, and what sharding costs on one device.",
        Options,
    )
    if options is None:
        return 0
    folder.inspect(options.out, resume=False, overwrite=True)
    if (
        not options.devices
        or options.devices[0] != 1
        or list(options.devices) != sorted(set(options.devices))
    ):
        raise UsageError(
            f"--devices={flags.shown(options.devices)} must start with 1 and ascend, as in 1,2,4"
        )
    with flags.blame({"": Options}):
        parallel.choose(options.devices[-1], num_seeds=1, num_rows=options.devices[-1])
    with folder.claim(options.out, overwrite=False) as out:
        results = {name: measure(make, options) for name, make in WORK.items()}
        cores = os.cpu_count() or 1 if jax.default_backend() == "cpu" else options.devices[-1]
        folder.write_json(out / "scaling.json", {"cores": cores, "results": results})
        comparison.leave(out, "scaling", panels(results), "Weak scaling:", table(results, cores))
    return 0


if __name__ == "__main__":
    flags.entry(main)
