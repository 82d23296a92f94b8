"""Recorded episodes that `--demonstrations` names, in an .npz file."""

import zipfile

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import control
from jaxrl_po.config import ConfigError


def read(path: str, spaces: control.Spaces) -> tuple[jax.Array, jax.Array]:
    """Reads observations and actions `[N, …]` of recorded episodes.

    Raises:
      ConfigError: the file cannot be read, lacks an array, or fits only another environment.
    """
    try:
        with np.load(path, allow_pickle=False) as stored:
            arrays = [stored["observation"], stored["action"]]
        if not all(array.dtype.kind in "biuf" for array in arrays):
            raise TypeError("they hold no numbers")
    except (OSError, EOFError, TypeError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise ConfigError(
            "demonstrations",
            f"must be an .npz file with observation and action, got {path}: {error}",
        ) from None
    if not all(map(np.ndim, arrays)) or len(arrays[0]) != len(arrays[1]) or not len(arrays[0]):
        raise ConfigError("demonstrations", f"must have an action for each observation, got {path}")
    found = []
    for name, array, wanted in zip(
        ("observation", "action"), arrays, (spaces.observation, spaces.action), strict=True
    ):
        shape = getattr(wanted, "shape", None)
        if shape is None or array.shape[1:] != shape or not np.isfinite(array).all():
            raise ConfigError(
                "demonstrations",
                f"{name} must be finite and have the shape {[len(array), *(shape or ())]}, got "
                f"{list(array.shape)} in {path}; structured observations are not supported",
            )
        if np.issubdtype(wanted.dtype, np.integer) and (array % 1).any():
            raise ConfigError("demonstrations", f"{name} must be whole numbers in {path}")
        found.append(jnp.asarray(array, wanted.dtype))
    if spaces.num_actions and not (found[1].min() >= 0 and found[1].max() < spaces.num_actions):
        raise ConfigError(
            "demonstrations",
            f"action must lie in [0, {spaces.num_actions - 1}], got others in {path}",
        )
    return found[0], found[1]
