"""What the numbers of a run depend on beside its settings, and what it takes to have them again to the last bit.

XLA gives the same bits for the same program on the same machine, in the same layout, with the same
versions; on a GPU only if it is asked for kernels that add in a fixed order, and then it chooses
them by rule and not by timing them.
"""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.metrics import strict
from jaxrl_po.version import __version__

PACKAGES = ("jax", "jaxlib", "numpy", "flax", "optax", "gymnax")
NUMERICS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)
FLAG = "--xla_gpu_deterministic_ops"
CPU_DEVICES = "jax_num_cpu_devices"
OTHER_STATES = ("0.1.", "0.2.")  # versions whose runs cannot be resumed
PACKAGE = Path(__file__).parent.parent


def describe(placement: str) -> dict[str, Any]:
    """Names to what JSON can hold: layout, devices, machine, versions and code of this process.

    Args:
      placement: what lies on which device, in words.
    """
    several = f" in {jax.process_count()} processes" if jax.process_count() > 1 else ""
    return {
        "placement": placement,
        "device": f"{jax.device_count()} × {jax.devices()[0].device_kind}{several}",
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_config": {name: getattr(jax.config, name) for name in NUMERICS},
        "versions": versions(),
        "source": source(PACKAGE),
        "revision": revision(),
    }


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    return {
        "python": platform.python_version(),
        "jaxrl_po": __version__,
        **{name: version(name) for name in PACKAGES},
    }


def processor() -> str:
    """The processor, in its maker's words where they can be had."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def source(*folders: Path) -> str:
    """A digest of the Python code below some folders, whether or not it is under version control."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            digest.update(
                path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0"
            )
    return digest.hexdigest()[:16]


def revision(package: Path = PACKAGE) -> dict[str, Any] | None:
    """`{"commit": …, "dirty": …}` of the checkout that the package belongs to; None without one, or without git."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(package), *arguments]
        return subprocess.run(
            command, check=True, capture_output=True, text=True, timeout=20, env=environment
        ).stdout.strip()

    try:
        git(
            "ls-files", "--error-unmatch", "__init__.py"
        )  # an installed package may lie in a checkout of something else
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return None


def require_readable(before: Mapping[str, Any], out: str) -> None:
    """Refuses to resume a run of an older version, whose states or random numbers were others.

    Args:
      before: what a run that is resumed has stored; empty where none is.
      out: the value of `--out`.

    Raises:
      UsageError: names the version.
    """
    began = str(before.get("versions", {}).get("jaxrl_po", __version__))
    if began.startswith(OTHER_STATES):
        raise UsageError(
            f"--resume: the run in --out={out} is of jaxrl_po {began}, which names its states or "
            "draws its random numbers otherwise; resume it with that version, or start another "
            "from its policy with --init_from (jaxrl-po language)"
        )


def differences(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    """Where `describe` tells something else now than before, as `name: before → now`; what it did not tell then is passed over.

    Example:
      >>> differences({"cores": 4, "versions": {"jax": "2", "numpy": "1"}}, {"cores": 2, "versions": {"jax": "1", "numpy": "1"}})
      ['cores: 2 → 4', 'jax: 1 → 2']
    """
    found = []
    for name, value in now.items():
        was = before.get(name, value)
        if isinstance(value, Mapping) and isinstance(was, Mapping):
            found += differences(value, was)
        elif strict(value) != was:
            found.append(f"{name}: {was} → {value}")
    return found


def go_on(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What `describe` tells now, and under `before` what it told at each earlier start of the run that was not the same.

    Args:
      now: see `describe`.
      before: the same of the run that is resumed, as this function made it; empty for a new one.
    """
    former = list(before.get("before", []))
    if differences(now, before):
        former.append({name: before[name] for name in now if name in before})
    return {**now, **({"before": former} if former else {})}


def ask_for_determinism() -> None:
    """Has XLA use kernels of a GPU that add in a fixed order; call it before the backend starts.

    Raises:
      UsageError: the environment says the opposite, or it is too late.
    """
    given = os.environ.get("XLA_FLAGS", "").split()
    asked = [flag for flag in given if flag.partition("=")[0] == FLAG]
    if asked and asked[-1].lower() not in (FLAG, f"{FLAG}=true", f"{FLAG}=1"):
        raise UsageError(
            f"--deterministic must not be contradicted by {asked[-1]} in XLA_FLAGS: leave "
            "one of them out"
        )
    if asked:
        return
    if not _backend_runs():
        os.environ["XLA_FLAGS"] = " ".join([*given, f"{FLAG}=true"])
    elif jax.default_backend() != "cpu":
        raise UsageError(
            "--deterministic must be asked for before JAX starts its "
            f"{jax.default_backend()}, which runs already: start Python with "
            f"XLA_FLAGS={FLAG}=true in the environment"
        )


def _backend_runs() -> bool:
    count = getattr(jax.config, CPU_DEVICES)
    try:
        jax.config.update(CPU_DEVICES, 2 if count == 1 else 1)  # which a backend that runs refuses
    except RuntimeError:
        return True
    jax.config.update(CPU_DEVICES, count)
    return False


def require_same(now: Mapping[str, Any], before: Mapping[str, Any], out: str) -> None:
    """Refuses to go on with a deterministic run where other bits must be expected; another commit of the same code is none.

    Args:
      now: see `describe`.
      before: the same, of the run in the folder.
      out: the value of `--out`.

    Raises:
      UsageError: names all that differs.
    """
    told = {name: value for name, value in now.items() if name != "revision"}
    found = differences(told, {**dict.fromkeys(told), **before} if before else {})
    if found:
        raise UsageError(
            "--deterministic promises the same bits only on the same machine, devices and "
            f"versions as those of the run in {out}; there differ {'; '.join(found)}. "
            "Resume it there, or begin another without --deterministic"
        )
