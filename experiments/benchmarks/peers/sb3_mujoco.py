"""Measures steps per second of Stable-Baselines3's PPO, or sb3-contrib's TRPO, on EnvPool.

Install and run in a separate environment:

    python -m venv sb3 && sb3/bin/pip install torch==2.13.0 stable-baselines3 sb3-contrib envpool
    sb3/bin/python experiments/benchmarks/peers/sb3_mujoco.py --algorithm=ppo --env=HalfCheetah-v4

Sizes, epochs, minibatches and normalisation equal jaxrl_po's settings for MuJoCo. The script does
not import jaxrl_po.
"""

import argparse
import json
import os
import time
from typing import Any

import envpool
import numpy as np
import torch
from sb3_contrib import TRPO
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import VecEnv, VecNormalize


class Pool(VecEnv):
    """EnvPool for Stable-Baselines3.

    An environment whose episode ended is reset in the same step.
    """

    def __init__(self, name: str, num_envs: int, seed: int):
        self.pool = envpool.make(
            name, env_type="gymnasium", num_envs=num_envs, seed=seed, num_threads=os.cpu_count()
        )
        spaces = self.pool.spec
        super().__init__(
            num_envs, spaces.gymnasium_observation_space, spaces.gymnasium_action_space
        )

    def reset(self) -> Any:
        """See `VecEnv`."""
        return self.pool.reset()[0].astype(np.float32)

    def step_async(self, actions: Any) -> None:
        """See `VecEnv`."""
        self.actions = actions.astype(np.float64)

    def step_wait(self) -> Any:
        """See `VecEnv`."""
        observation, reward, terminated, truncated, _ = self.pool.step(self.actions)
        observation = observation.astype(np.float32)
        ended = terminated | truncated
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for i in np.flatnonzero(ended):
            infos[i]["terminal_observation"] = observation[i].copy()
            infos[i]["TimeLimit.truncated"] = bool(truncated[i] and not terminated[i])
            observation[i] = self.pool.reset(np.array([i]))[0][0]
        return observation, reward, ended, infos

    def close(self) -> None:
        """See `VecEnv`."""
        self.pool.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> Any:
        """See `VecEnv`."""
        return [None] * self.num_envs

    # `VecEnv` declares the two methods `set_attr` and `env_method` abstract; neither PPO nor TRPO
    # calls them.
    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """See `VecEnv`."""
        raise TypeError("the environments of EnvPool have no Python attributes")

    def env_method(self, method_name: str, *arguments: Any, **keywords: Any) -> Any:
        """See `VecEnv`."""
        raise TypeError("the environments of EnvPool have no Python methods")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
        """See `VecEnv`."""
        return [False] * self.num_envs


class Clock(BaseCallback):
    """Callback that stores the time at the end of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_start(self) -> None:
        self.times.append(time.perf_counter())


def main() -> None:
    """Trains one seed and prints one JSON object."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--algorithm", choices=("ppo", "trpo"), default="ppo")
    parser.add_argument("--env", default="HalfCheetah-v4")
    parser.add_argument("--total_steps", type=int, default=60_000)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    envs = VecNormalize(Pool(options.env, 16, 0))
    if options.algorithm == "ppo":
        model = PPO(
            "MlpPolicy", envs, n_steps=128, batch_size=64, n_epochs=10, device="cpu", seed=0
        )
        rows = 16 * 128
    else:
        model = TRPO(
            "MlpPolicy",
            envs,
            n_steps=64,
            batch_size=128,
            n_critic_updates=20,
            cg_max_steps=10,
            device="cpu",
            seed=0,
        )
        rows = 16 * 64
    clock = Clock()
    model.learn(options.total_steps, callback=clock)
    seconds = np.diff(clock.times)[1:]  # the first iteration does not count
    print(json.dumps({"steps_per_second": rows / float(np.median(seconds))}))


if __name__ == "__main__":
    main()
