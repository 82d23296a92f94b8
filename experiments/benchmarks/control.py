"""Measures the throughput of PPO or TRPO training, on CartPole-v1 or another environment.

64 × 64 tanh networks.

`python experiments/benchmarks/control.py` measures the whole table, one process per row; with
`--envs --steps --seeds --total_steps` it measures one row, and `--json` prints that row last. PPO
trains for 4 epochs of 4 minibatches per iteration. `--algorithm=random` takes random actions
without learning, which measures the speed of the environment itself, an upper bound for every
method.
"""

import dataclasses
import resource
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import timing

from jaxrl_po import config, control
from jaxrl_po.algorithms import ppo, trpo
from jaxrl_po.config import COUNT, ConfigError, static
from jaxrl_po.control import modules
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.spaces import Observation
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.experiment import flags, suites
from jaxrl_po.types import Batch, Learner, Metrics, Problem, PyTree, TrainState

# Environments, steps, seeds, total steps per seed: the sizes at which the other libraries report
# throughput.
TABLE = (
    (4, 128, 1, 500_000),
    (64, 128, 1, 1_000_000),
    (2048, 10, 1, 1_000_000),
    (4, 128, 8, 100_000),
    (4, 128, 32, 50_000),
    (4, 128, 128, 20_000),
)
REPETITIONS = 3
# Settings of PPO in the peers' benchmarks.
PPO = ppo.Config(learning_rate=2.5e-4, entropy_coefficient=0.01, num_epochs=4, num_minibatches=4)


@config.record
class Options:
    """Settings of one measurement."""

    algorithm: str = static(
        "ppo", "method to time; random does not learn", choices=("ppo", "trpo", "random")
    )
    env: str = static("CartPole-v1", "JAX environment, named as in `jaxrl-po control --env`")
    normalize_observations: bool = static(False, "normalise observations by running mean and std")
    fisher_stride: int = static(1, "for trpo: Fisher products read every n-th row", within=COUNT)
    envs: int = static(
        0, "environments of each seed; 0 measures the whole table", within=config.NON_NEGATIVE
    )
    steps: int = static(
        128, "steps of each environment in one iteration", unit="steps", within=COUNT
    )
    seeds: int = static(1, "parallel seeds", within=COUNT)
    total_steps: int = static(500_000, "environment steps of each seed", unit="steps", within=COUNT)
    devices: str = static("auto", "devices; auto on a CPU: one per core")
    updates: int = static(
        0,
        "time n updates of TRPO and PPO alternately, not whole loops; 0 times loops",
        within=config.NON_NEGATIVE,
    )
    json: bool = static(False, "print one JSON object as the last line")


def make_ppo(options: Options, problem: Problem, axis_name: str | None) -> Learner:
    """Builds PPO with the settings of the peers' benchmarks."""
    settings = dataclasses.replace(PPO, axis_name=axis_name)
    return ppo.make(config.as_arrays(settings), problem)


def make_trpo(options: Options, problem: Problem, axis_name: str | None) -> Learner:
    """Builds TRPO as in sb3-contrib: 15 Fisher products, 10 critic epochs, minibatches of 128."""
    settings = trpo.Config(
        cg_iterations=15,
        cg_tolerance=0.0,
        value_epochs=10,
        value_minibatches=16,
        fisher_stride=options.fisher_stride,
        axis_name=axis_name,
    )
    return trpo.make(config.as_arrays(settings), problem)


def make_random(options: Options, problem: Problem, axis_name: str | None) -> Learner:
    """Builds a learner that takes random actions without learning."""

    def update(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        return state, batch.metrics

    return make_ppo(options, problem, axis_name)._replace(update=update)


METHODS = {"ppo": make_ppo, "trpo": make_trpo, "random": make_random}


class Blind(nn.Module):
    """Flax module that replaces observations, with batch axes `E*`, by constant features `[E*, 1]`.

    Attributes:
      rank: number of axes of the first array of one observation.
    """

    rank: int

    def __call__(self, observation: PyTree) -> jax.Array:
        """Returns zeros in place of features."""
        first = jax.tree.leaves(observation)[0]
        return jnp.zeros((*first.shape[: first.ndim - self.rank], 1))


def blind_networks(env: Any) -> dict[str, nn.Module]:
    """Builds actor and critic that ignore observations.

    Actions are uniform, or Gaussian with σ = 1.
    """
    spaces = adapt(env).spaces
    whole = spaces.observation
    seen = whole if isinstance(whole, Observation) else Observation(whole)
    reads = {"policy": seen.policy, "critic": seen.seen_by_critic()}
    made = modules.default_modules(spaces, modules.NetworkSettings())
    return {
        role: made[role].clone(torso=Blind(len(jax.tree.leaves(read)[0].shape)))
        for role, read in reads.items()
    }


def measure(options: Options) -> dict[str, Any]:
    """Compiles one training run, times it `REPETITIONS` times and reports the best.

    The training run has no logging and no evaluation.
    """
    placement = parallel.choose(options.devices, num_seeds=options.seeds, num_rows=options.envs)
    env = suites.make_env(options.env)
    nets = blind_networks(env) if options.algorithm == "random" else {}
    problem = control.make_problem(
        env,
        num_envs=options.envs,
        num_steps=options.steps,
        normalize_observations=options.normalize_observations,
        axis_name=placement.axis_name,
        policy=nets.get("policy"),
        critic=nets.get("critic"),
    )
    learner = parallel.over_devices(
        METHODS[options.algorithm](options, problem, placement.axis_name), placement
    )
    iterations = options.total_steps // (options.envs * options.steps)
    if iterations < 1:
        least = options.envs * options.steps
        raise ConfigError("total_steps", f"must be at least {least}, got {options.total_steps}")

    def train(keys: jax.Array) -> tuple[TrainState, jax.Array]:
        def iteration(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
            state, metrics = learner.step(state)
            return state, metrics["episode_return"].value()

        return jax.lax.scan(iteration, learner.init(keys), None, length=iterations)

    keys = jax.random.split(jax.random.key(30), options.seeds)
    start = time.perf_counter()
    run = compiled(train, keys)
    compile_seconds = time.perf_counter() - start
    seconds = []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        jax.block_until_ready(run(keys))
        seconds.append(time.perf_counter() - start)
    return {
        "envs": options.envs,
        "steps": options.steps,
        "seeds": options.seeds,
        "placement": placement.describe(),
        "steps_per_second": round(
            options.seeds * iterations * options.envs * options.steps / min(seconds)
        ),
        "seconds": [round(s, 3) for s in seconds],
        "compile_seconds": round(compile_seconds, 2),
        "device": jax.devices()[0].device_kind,
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def compare_updates(options: Options) -> dict[str, float]:
    """Measures the time of one update: 10 × 16 minibatches for PPO, 10 Fisher products for TRPO.

    PPO and TRPO update from the same number of rows. The time of an update is the median time of an
    iteration, in ms, minus the time of collection alone.
    """
    problem = control.make_problem(
        suites.make_env(options.env),
        num_envs=options.envs or 16,
        num_steps=options.steps,
        normalize_observations=options.normalize_observations,
    )

    def collect(state: TrainState) -> tuple[TrainState, Batch]:
        key, collect_key = jax.random.split(state.key)
        collector, batch = problem.collect(state.params, state.collector, collect_key)
        return state._replace(collector=collector, key=key), batch

    learners = {
        "ppo": ppo.make(config.as_arrays(ppo.Config(num_epochs=10, num_minibatches=16)), problem),
        "trpo": trpo.make(
            config.as_arrays(trpo.Config(cg_iterations=10, fisher_stride=1)), problem
        ),
    }
    clocks = {
        name: timing.stepper(jax.jit(learner.step), jax.jit(learner.init)(jax.random.key(0)))
        for name, learner in learners.items()
    }
    clocks["collect"] = timing.stepper(
        jax.jit(collect), jax.jit(learners["ppo"].init)(jax.random.key(0))
    )
    medians = {
        name: 1e3 * median(seconds)
        for name, seconds in timing.in_turns(clocks, options.updates).items()
    }
    updates = {name: medians[name] - medians["collect"] for name in learners}
    return {
        **{f"{name}_ms": round(x, 2) for name, x in updates.items()},
        "ratio": round(updates["trpo"] / updates["ppo"], 3),
    }


def table(devices: str) -> None:
    """Measures every row of `TABLE`.

    Each row has its own process, so that peak memory is measured per row.
    """
    print(
        f"{'envs × steps':>14} {'seeds':>6} {'steps/s':>10} {'compile s':>10} "
        f"{'peak MB':>8}  placement"
    )
    for envs, steps, seeds, total_steps in TABLE:
        numbers = [
            f"--envs={envs}",
            f"--steps={steps}",
            f"--seeds={seeds}",
            f"--total_steps={total_steps}",
        ]
        row = timing.measure_apart(__file__, [*numbers, f"--devices={devices}"])
        print(
            f"{envs:>7} × {steps:<4} {seeds:>6} {row['steps_per_second']:>10,} "
            f"{row['compile_seconds']:>10} {row['peak_memory_mb']:>8}  {row['placement']}",
            flush=True,
        )


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark from command-line arguments; returns the exit status."""
    options = flags.ask(
        argv,
        "benchmarks/control.py",
        "Times the training loop of PPO or TRPO.",
        Options,
    )
    if options is None:
        return 0
    if not (options.envs or options.updates):
        table(options.devices)
        return 0
    row = compare_updates(options) if options.updates else measure(options)
    timing.show(row, as_json=options.json)
    return 0


if __name__ == "__main__":
    flags.run_script(main)
