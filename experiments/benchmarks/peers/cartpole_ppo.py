"""Measures PPO on CartPole-v1 by rejax, or by PureJaxRL's loop: steps per second and compile time.

Install and run in a separate environment:

    python -m venv rejax && rejax/bin/pip install -r experiments/benchmarks/peers/rejax.txt
    rejax/bin/python experiments/benchmarks/peers/cartpole_ppo.py --library=rejax

PureJaxRL is not a package: `--source` is a clone of its repository. Settings and repetitions equal
those in `control.py`: 64 × 64 tanh, 4 epochs × 4 minibatches, the best of three runs. The last line
is one JSON object. The script does not import jaxrl_po.
"""

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

REPETITIONS = 3


def rejax(options: argparse.Namespace) -> tuple[Callable[[Any], Any], int]:
    """Returns rejax's training function for one seed, without evaluation, and its step count."""
    import gymnax
    from rejax.algos.ppo import PPO

    env, env_params = gymnax.make("CartPole-v1")
    algorithm = PPO.create(
        env=env,
        env_params=env_params,
        agent_kwargs={"activation": "tanh"},
        num_envs=options.envs,
        num_steps=options.steps,
        num_epochs=4,
        num_minibatches=4,
        learning_rate=2.5e-4,
        max_grad_norm=0.5,
        gamma=0.99,
        gae_lambda=0.95,
        clip_eps=0.2,
        ent_coef=0.01,
        vf_coef=0.5,
        total_timesteps=options.total_steps,
        eval_freq=options.total_steps,
        skip_initial_evaluation=True,
    ).replace(eval_callback=lambda *_: (jnp.zeros(1), jnp.zeros(1)))
    rows = options.envs * options.steps
    return algorithm.train, -(-options.total_steps // rows) * rows


def purejaxrl(options: argparse.Namespace) -> tuple[Callable[[Any], Any], int]:
    """Returns the training function of PureJaxRL's `ppo.py` for one seed, and its step count."""
    # PureJaxRL's wrappers import other environment suites, which CartPole does not need.
    wrappers = types.ModuleType("brax.envs.wrappers.training")
    wrappers.EpisodeWrapper = wrappers.AutoResetWrapper = object  # type: ignore[attr-defined]
    for name in ("brax", "brax.envs", "brax.envs.wrappers", "navix"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["brax"].envs = sys.modules["brax.envs"]  # type: ignore[attr-defined]
    sys.modules[wrappers.__name__] = wrappers
    sys.path.insert(0, f"{options.source}/purejaxrl")
    import ppo

    rows = options.envs * options.steps
    train = ppo.make_train(
        {
            "LR": 2.5e-4,
            "NUM_ENVS": options.envs,
            "NUM_STEPS": options.steps,
            "TOTAL_TIMESTEPS": options.total_steps,
            "UPDATE_EPOCHS": 4,
            "NUM_MINIBATCHES": 4,
            "GAMMA": 0.99,
            "GAE_LAMBDA": 0.95,
            "CLIP_EPS": 0.2,
            "ENT_COEF": 0.01,
            "VF_COEF": 0.5,
            "MAX_GRAD_NORM": 0.5,
            "ACTIVATION": "tanh",
            "ENV_NAME": "CartPole-v1",
            "ANNEAL_LR": False,
        }
    )
    # PureJaxRL would return metrics as arrays over all steps; jaxrl_po does not store such arrays,
    # so they are dropped.
    return lambda key: train(key)["runner_state"], options.total_steps // rows * rows


LIBRARIES = {"rejax": rejax, "purejaxrl": purejaxrl}


def main() -> None:
    """Trains the seeds side by side and prints one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=tuple(LIBRARIES), default="rejax")
    parser.add_argument("--source", default="")
    parser.add_argument("--envs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--total_steps", type=int, default=500_000)
    options = parser.parse_args()
    train, steps = LIBRARIES[options.library](options)
    keys = jax.random.split(jax.random.PRNGKey(30), options.seeds)
    begun = time.perf_counter()
    run = jax.jit(jax.vmap(train)).lower(keys).compile()
    compile_seconds = time.perf_counter() - begun
    seconds = []
    for _ in range(REPETITIONS):
        begun = time.perf_counter()
        jax.block_until_ready(run(keys))
        seconds.append(time.perf_counter() - begun)
    row = {
        "steps_per_second": round(options.seeds * steps / min(seconds)),
        "seconds": [round(each, 3) for each in seconds],
        "compile_seconds": round(compile_seconds, 2),
        "device": jax.devices()[0].device_kind,
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
