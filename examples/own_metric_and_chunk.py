"""Adds a custom metric and a custom iteration, with work on the host around the compiled program.

`python examples/own_metric_and_chunk.py runs/own` trains PPO on CartPole-v1 with the metric and
the iteration of this file.
"""

import sys
import time

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_po import control, ppo, run
from jaxrl_po.masked import Mean


def with_norm(learner):
    """Returns the learner with a metric `norm`, the global norm of the policy's parameters."""

    def update(state, batch):
        state, metrics = learner.update(state, batch)
        norm = optax.tree.norm(state.params.policy)
        return state, metrics | {"norm": Mean(norm, jnp.float32(1.0))}

    return learner._replace(update=update)


def timed(step, state):
    """Runs one iteration as a call of its program; adds the call's time as the metric `seconds`."""
    begun = time.perf_counter()
    state, row = jax.block_until_ready(step(state))
    seconds = np.full(state.step.shape, time.perf_counter() - begun, np.float32)
    return state, row | {"seconds": Mean(seconds, np.ones_like(seconds))}


def main(out, iterations=50):
    """Trains two seeds; the output folder then has the same files as a run of the command."""
    env = gymnax.make("CartPole-v1")[0]
    problem = control.make_problem(env, num_envs=8, num_steps=32)
    learner = with_norm(ppo.make(ppo.Config(), problem))
    return run.train(
        learner,
        iterations,
        seeds=2,
        log_every=10,
        watch=["norm", "episode_return"],
        iterate=timed,
        out=out,
    )


if __name__ == "__main__":
    main(sys.argv[1])
