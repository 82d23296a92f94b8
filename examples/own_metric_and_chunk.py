"""A custom metric, and a custom way to run the iterations between two lines of metrics.

`python examples/own_metric_and_chunk.py runs/own` trains PPO on CartPole-v1 with both.
"""

import sys
import time
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_po import control, ppo
from jaxrl_po.masked import Mean
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.devices.memory import memory_of
from jaxrl_po.run.experiment import assembly
from jaxrl_po.run.experiment.options import Options
from jaxrl_po.run.loop import programs, runner
from jaxrl_po.run.loop.progress import Progress


def with_norm(learner):
    """The learner with the metric `norm`: the global norm of the policy's parameters."""

    def update(state, batch):
        state, metrics = learner.update(state, batch)
        norm = optax.tree.norm(state.params.policy)
        return state, metrics | {"norm": Mean(norm, jnp.float32(1.0))}

    return learner._replace(update=update)


def one_by_one(job, like, placed):
    """A chunk whose iterations are calls of one program; the metric `seconds` times each."""
    step = compiled(
        job.learner.step, like, donate_argnums=0, out_shardings=(placed, job.replicated)
    )

    def chunk(state, n, report, stop):
        rows = []
        while len(rows) < n and not (rows and stop.is_set()):
            begun = time.perf_counter()
            state, row = jax.block_until_ready(step(state))
            seconds = np.full(job.num_seeds, time.perf_counter() - begun, np.float32)
            rows.append(row | {"seconds": Mean(seconds, np.ones_like(seconds))})
        return state, programs.stacked(rows), len(rows)

    return chunk, memory_of(step, like)


def main(out, iterations=50):
    """Trains two seeds; the folder then holds what a run of a command holds."""
    env = gymnax.make("CartPole-v1")[0]
    problem = control.make_problem(env, num_envs=8, num_steps=32)
    learner = with_norm(ppo.make(ppo.Config(), problem))
    setup = assembly.Setup(learner, evaluate=None, score="", compile_chunk=one_by_one)
    job = assembly.make_job(
        setup,
        Options(seeds=2),
        parallel.choose("auto", num_seeds=2, num_rows=1),
        iterations=iterations,
        steps_per_iteration=8 * 32,
        log_every=10,
    )
    Path(out).mkdir(parents=True, exist_ok=True)
    with Progress("own", iterations * 8 * 32, watch=["norm", "seconds"], num_seeds=2) as progress:
        return runner.run(job, Path(out), progress)


if __name__ == "__main__":
    main(sys.argv[1])
