"""Measures brax's own PPO on one of its environments: steps per second and compile time.

Install and run in a separate environment:

    python -m venv brax && brax/bin/pip install -r experiments/benchmarks/peers/brax.txt
    brax/bin/python experiments/benchmarks/peers/brax_ppo.py --env=brax:inverted_pendulum

An iteration has the same work as in `control.py`: 4 epochs × 4 minibatches of the samples of
`--envs` environments over `--steps` steps, 64 × 64 tanh, a Gaussian with one scale, normalised
observations. brax trains in stretches of `--total_steps`: the first two stretches compile, and the
best of the other three counts. The last line is one JSON object. The script does not import
jaxrl_po.
"""

import argparse
import functools
import json
from typing import Any

import jax
import jax.numpy as jnp

# brax 0.14.2 calls a function that JAX has removed; this substitute assumes one device.
setattr(  # noqa: B010
    jax,
    "device_put_replicated",
    lambda tree, devices: jax.tree.map(lambda x: jnp.asarray(x)[None], tree),
)

from brax import envs  # noqa: E402
from brax.training.agents.ppo import networks  # noqa: E402
from brax.training.agents.ppo import train as ppo  # noqa: E402

LEGS = 5


def main() -> None:
    """Trains one seed and prints one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--env", default="brax:inverted_pendulum")
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--total_steps", type=int, default=500_000)
    options = parser.parse_args()
    speeds: list[float] = []
    legs: list[float] = []

    def note(step: int, metrics: dict[str, Any]) -> None:
        speeds.append(float(metrics["training/sps"]))
        legs.append(float(metrics["training/walltime"]))

    ppo.train(
        environment=envs.get_environment(options.env.partition(":")[2], backend="spring"),
        num_timesteps=LEGS * options.total_steps,
        episode_length=1000,
        num_envs=options.envs,
        unroll_length=options.steps,
        # In brax, `batch_size` is the number of trajectories in a minibatch.
        batch_size=options.envs // 4,
        num_minibatches=4,
        num_updates_per_batch=4,
        num_evals=LEGS + 1,
        run_evals=False,
        normalize_observations=True,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=(64, 64),
            value_hidden_layer_sizes=(64, 64),
            activation=jnp.tanh,
            distribution_type="normal",
            noise_std_type="log",
        ),
        progress_fn=note,
    )
    # The wall time that brax reports is a sum over stretches.
    seconds = [after - before for before, after in zip([0.0, *legs], legs, strict=False)]
    row = {
        "steps_per_second": round(max(speeds[2:])),
        "seconds": [round(each, 3) for each in seconds[2:]],
        "compile_seconds": round(sum(seconds[:2]) - 2 * min(seconds[2:]), 2),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
