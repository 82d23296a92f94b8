"""The memory that there is for a run."""

import re
from collections.abc import Callable
from pathlib import Path

import jax
from rich import filesize

from jaxrl_po import backend
from jaxrl_po.run.devices.compilation import Memory

GROUP = Path("/sys/fs/cgroup")  # of a container


def held() -> int:
    """Bytes that this process holds in the machine's memory; 0 where the system does not say."""
    return _kilobytes("/proc/self/status", "VmRSS") or 0


def free() -> int | None:
    """Bytes that this process may still take: of all its CPU devices, or of one other device.

    Devices of a CPU share the machine's memory, and the limit of a container. None where the system
    does not say.
    """
    if not backend.here().on_cpu:
        stats = jax.local_devices()[0].memory_stats() or {}
        limit = stats.get("bytes_limit")
        return None if limit is None else int(limit - stats.get("bytes_in_use", 0))
    known = [_kilobytes("/proc/meminfo", "MemAvailable"), _of_group()]
    return min((each for each in known if each is not None), default=None)


def _kilobytes(path: str, entry: str) -> int | None:
    """An entry in kB of a file of the system, in bytes."""
    try:
        found = re.search(
            rf"^{entry}:\s+(\d+) kB", Path(path).read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        return None
    return None if found is None else 1024 * int(found[1])


def _of_group() -> int | None:
    """What the limit of a container leaves; pages of files, which give way, count as free."""
    try:
        limit, used, stat = (
            (GROUP / f"memory.{name}").read_text(encoding="utf-8")
            for name in ("max", "current", "stat")
        )
        left = int(limit) - int(used)
    except (OSError, ValueError):  # no such limit is written `max`
        return None
    found = re.search(r"^inactive_file (\d+)", stat, re.MULTILINE)
    return left + (0 if found is None else int(found[1]))


def describe(memory: Memory, devices: int, space: Callable[[], int | None] = free) -> str:
    """One line for the user: what the process needs, beside what it holds; else of a device.

    Args:
      memory: of one device, where nothing of it is allocated yet.
      devices: of this process that are in use.
      space: see `free`.
    """
    left = space()
    if not backend.here().on_cpu or memory.peak is None or left is None or not held():
        return memory.describe()
    need, there = held() + devices * memory.peak, held() + left
    return (
        f"this run needs about {filesize.decimal(need)} of the {filesize.decimal(there)} that are "
        "free"
    )
