"""Builds environments of MuJoCo Playground, such as `playground:CheetahRun`, without wrappers."""

import subprocess
from typing import Any

import jax
from mujoco_playground import registry

from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.control.adapters.episodes import with_episodes
from jaxrl_po.control.adapters.states import unwrap_dynamics
from jaxrl_po.control.environment import Environment


def names() -> list[str]:
    """Returns the names of all environments: the DM-control suite, locomotion, manipulation."""
    suites = registry.dm_control_suite, registry.locomotion, registry.manipulation
    return [name for suite in suites for name in suite.ALL_ENVS]


def make(
    name: str, *, max_steps: int | None = None, reset_interval: int = 16, **config_overrides: Any
) -> Environment:
    """Builds an environment of Playground.

    Args:
      name: name of an environment, one of `names()`.
      max_steps: time limit of an episode; None stands for `episode_length` of the environment's
        config, divided by the config's `action_repeat`.
      reset_interval: number of steps between resets, see `with_episodes`. A value of 1 costs half
        of the speed of a rollout of CartpoleBalance (64 environments, two cores).
      **config_overrides: values of the environment's config; nested keys are written as
        "reward_config.scales". The entry `impl`, the implementation of the physics, is `jax` unless
        an override sets it to `warp`.

    Raises:
      ConfigError: assets are missing and cannot be downloaded, or the environment refuses a value.
      TypeError: the config does not have a field, or the field's value is of another type.
    """
    of_suite = f"playground:{name}"
    config = registry.get_default_config(name).lock()
    values = ({"impl": "jax"} if "impl" in config else {}) | config_overrides
    try:
        config.update_from_flattened_dict(values)
    except KeyError:
        unknown = ", ".join(key for key in values if key.split(".")[0] not in config)
        raise TypeError(
            f"its config has no {unknown or 'such nested field'}, only {', '.join(config)}"
        ) from None
    repeat = config.action_repeat
    if repeat not in COUNT:
        raise ConfigError("env", f"{of_suite}: action_repeat must lie in {COUNT}, got {repeat}")
    try:
        env = registry.load(name, config)
        jax.eval_shape(env.reset, jax.random.key(0))
    except (OSError, subprocess.SubprocessError) as error:
        raise ConfigError(
            "env",
            f"{of_suite} needs robots of MuJoCo Menagerie, which Playground downloads by git into "
            f"its own folder, and the download failed: {_one_line(error)}",
        ) from error
    # MJX raises one of the two for a missing feature.
    except (ValueError, NotImplementedError) as error:
        raise ConfigError("env", f"{of_suite}: {_one_line(error)}") from error
    return with_episodes(
        of_suite,
        unwrap_dynamics(env, action_repeat=repeat),
        max_steps=-(-config.episode_length // repeat) if max_steps is None else max_steps,
        reset_interval=reset_interval,
    )


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
