"""Where compiled programs are kept from one run to the next."""

import hashlib
import os
import platform
from pathlib import Path

import jax

from jaxrl_po.run.options import AUTO


def keep_programs(folder: str) -> None:
    """Has JAX keep what it compiles in a folder, unless the environment or the program said where.

    Args:
      folder: as in `--compilation_cache`.
    """
    if not folder or jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        return
    place = default_folder() if folder == AUTO else Path(folder)
    jax.config.update("jax_compilation_cache_dir", str(place))


def default_folder() -> Path:
    """A folder of the user's cache, one for each kind of processor.

    Code that was compiled for one may not run on another.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "jaxrl_po" / hashlib.sha256(_features().encode()).hexdigest()[:12]


def _features() -> str:
    """What the processor is and can do, as far as the system lists it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    features = sorted({line for line in lines if line.startswith(("flags", "Features"))})
    return "".join([platform.machine(), platform.processor(), *features])
