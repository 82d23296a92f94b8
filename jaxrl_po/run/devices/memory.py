"""Memory that programs need, as the compiler reports it, and memory that a device can provide."""

import contextlib
import math
import platform
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich import filesize

from jaxrl_po import backend
from jaxrl_po.run.devices import processes
from jaxrl_po.types import PyTree

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes.

    Attributes:
      state: bytes of the device's shard of the training state.
      peak: bytes of state, metrics and temporaries while a program runs; None if the compiler does
        not report these bytes.
      fixed: bytes of arguments and outputs, which more microbatches do not reduce; 0 if unknown.
      floor: peak bytes of the sampling program, which runs separately from the update.
      refused: compiler's message if the program was refused for lack of memory; otherwise empty.
    """

    state: int
    peak: int | None
    fixed: int = 0
    floor: int = 0
    refused: str = ""

    def beside(self, sampling: "DeviceMemory") -> "DeviceMemory":
        """Combines the memory of an update with that of sampling, which microbatches do not reduce.

        Example:
          >>> DeviceMemory(1, 70, fixed=6).beside(DeviceMemory(1, 90, fixed=5))
          DeviceMemory(state=1, peak=90, fixed=6, floor=90, refused='')
        """
        if sampling.refused:
            return sampling
        if self.peak is None or sampling.peak is None:
            return self
        return self._replace(peak=max(self.peak, sampling.peak), floor=sampling.peak)

    def fits(self, space: int | None) -> bool:
        """Returns whether the compiler accepted the program, and the peak, if known, fits."""
        return not self.refused and (space is None or (self.peak or 0) <= space)

    def describe(self, space: int | None = None) -> str:
        """Returns a line for users about the memory of a device.

        Args:
          space: bytes of a device's memory that programs may use; None if unknown.

        Example:
          >>> DeviceMemory(3_100_000, 12_440_000).describe(space=8_000_000_000)
          'a device holds 3.1 MB of state and needs 12.4 MB of 8.0 GB'
        """
        text = f"a device holds {filesize.decimal(self.state)} of state"
        if self.peak is None:
            return text
        of_space = "" if space is None else f" of {filesize.decimal(space)}"
        return f"{text} and needs {filesize.decimal(self.peak)}{of_space}"


class ProgramMemory(NamedTuple):
    """Memory of one device for one program, in bytes, as the compiler reports it.

    Attributes:
      arguments: Bytes of the arguments.
      outputs: Bytes of the results that do not replace a donated argument.
      temporaries: Bytes of intermediate values.
      code: Bytes of machine code.
    """

    arguments: int
    outputs: int
    temporaries: int
    code: int

    @property
    def total(self) -> int:
        """Returns the sum of all four sizes."""
        return sum(self)


def program_memory(program: Any) -> ProgramMemory | None:
    """Returns the compiler's memory analysis of a program; None if the compiler offers none."""
    sizes = program.memory_analysis()
    if sizes is None:
        return None
    # The sizes of arguments and outputs include the buffer that a donated argument and its output
    # share.
    return ProgramMemory(
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        sizes.temp_size_in_bytes,
        sizes.generated_code_size_in_bytes,
    )


def measure_memory(program: Any, like: PyTree) -> DeviceMemory:
    """Computes the memory of one device: state from the shardings, the rest from the compiler.

    Args:
      program: compiled function of the training state.
      like: `jax.ShapeDtypeStruct`s of the training state, with shardings.
    """
    state = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(like)
    )
    sizes = program_memory(program)
    if sizes is None:
        return DeviceMemory(state, None)
    fixed = sizes.arguments + sizes.outputs
    return DeviceMemory(state, fixed + sizes.temporaries, fixed)


def refusal(error: Exception) -> DeviceMemory | None:
    """Returns the memory estimate in an out-of-memory error of the compiler.

    The result is None for any other error. Its peak is None if the message does not state a size.

    Example:
      >>> refusal(RuntimeError("RESOURCE_EXHAUSTED: Used 20.00G of 15.75G hbm.")).peak
      21474836480
    """
    message = str(error)
    if "RESOURCE_EXHAUSTED" not in message:
        return None
    found = re.search(r"(?:Used |temporaries \()([\d.]+)([KMGT])", message)
    peak = None
    if found is not None:
        peak = int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2])))
    return DeviceMemory(0, peak, refused=_excess(message))


def _excess(message: str) -> str:
    """Returns the part of a compiler's message that states by how much a program does not fit."""
    found = re.search(r"(Used|temporaries) \S*\d.*?(by [\d.]+\w|HBM \([^)]*\))", message)
    return found[0] if found else message.strip().splitlines()[0]


def available_bytes(devices: int) -> int | None:
    """Returns the bytes per device that programs may use; None if the system does not report them.

    All processes get the minimum over processes. The result is the memory of the device, minus its
    arrays and, on a CPU, minus everything else in the memory of the process. The CPU devices of a
    process share one memory, as do the processes of a run on one host. The memory of unrelated
    processes does not count, so that concurrent jobs never change the decisions of a run.

    Args:
      devices: number of devices that the calling process uses.
    """
    limit, host = limit_bytes(), platform.node()
    sharing = processes.gather_values(host).count(host)
    if limit is not None and backend.here().on_cpu:
        limit = (limit // sharing - resident_bytes()) // devices
    elif limit is not None:
        limit -= resident_bytes()
    known = [each for each in processes.gather_values(limit) if each is not None]
    return min(known, default=None)


def limit_bytes() -> int | None:
    """Returns a device's memory; on a CPU the machine's, or the container's limit if smaller."""
    if not backend.here().on_cpu:
        return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    machine = _kilobytes("/proc/meminfo", "MemTotal")
    return min([*container_limits(), *filter(None, [machine])], default=None)


def container_limits() -> list[int]:
    """Returns the memory limits of this process's control groups and of all their parents."""
    found, own = list[int](), ["0::/", "0:memory:/"]  # a container sees only its own root group
    with contextlib.suppress(OSError):
        own += OWN_CGROUPS.read_text(encoding="utf-8").splitlines()
    for _, kinds, path in (line.split(":", 2) for line in own):
        if kinds and "memory" not in kinds.split(","):
            continue
        name = "memory/memory.limit_in_bytes" if kinds else "memory.max"
        group = CGROUPS / name.rpartition("/")[0]
        for part in ["", *path.strip("/").split("/")]:
            group /= part
            with contextlib.suppress(OSError, ValueError):  # an unlimited group's file reads `max`
                found.append(int((group / name.rpartition("/")[2]).read_text(encoding="utf-8")))
    return found


def resident_bytes() -> int:
    """Returns the bytes that this process uses of the memory that `limit_bytes` counts."""
    if not backend.here().on_cpu:
        return int((jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use", 0))
    return _kilobytes("/proc/self/status", "VmRSS") or 0


def _kilobytes(path: str, entry: str) -> int | None:
    """Reads an entry in kB from a system file and returns the number of bytes."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(rf"^{entry}:\s+(\d+) kB", text, re.MULTILINE)
    return None if found is None else 1024 * int(found[1])
