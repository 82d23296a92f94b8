"""Several processes that run one program: start-up, agreement on decisions, and host arrays.

Every process runs the same code on its own devices; the first process writes the files. Values
that may differ between processes (a signal, the state of the file system) are exchanged, so that
all processes take the same branches and enter the same collectives. With a single process, every
function of this module returns at once.
"""

import atexit
import contextlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils

from jaxrl_po.config import ConfigError, Json, Values
from jaxrl_po.run.errors import UsageError, spell

Value = TypeVar("Value")
ABSENT = "absent"
GLOO = re.compile(
    rb"(\s|\d|\[Gloo\] Rank|is connected to|peer ranks\.|"
    rb"Expected number of connected peer ranks|is :)*"
)


def join_processes(
    *, coordinator: str = "", num_processes: int = 0, process_id: int = -1, timeout: int = 120
) -> None:
    """Joins the processes of a run; must be called before any computation of JAX.

    The cluster (SLURM, Kubernetes, a TPU pod, Open MPI) provides any arguments that are left out.

    Args:
      coordinator: `host:port` where process 0 listens; empty to ask the cluster.
      num_processes: number of processes in the run; 0 to ask the cluster.
      process_id: number of this process, from 0; -1 to ask the cluster.
      timeout: seconds to wait for all processes to join, and later for a heartbeat of a process.

    Raises:
      ConfigError: the cluster is unknown, or not all processes joined in time.
    """
    host, _, port = coordinator.rpartition(":")
    if coordinator and not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            "coordinator", f"must read like host:port, e.g. 10.0.0.1:1234, got {coordinator!r}"
        )
    if num_processes and process_id >= num_processes:
        raise ConfigError(
            "process_id",
            f"must be below num_processes = {num_processes}, got {process_id}; the first is 0",
        )
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # JAX's preemption service would intercept SIGTERM, which the runner handles itself.
    jax.config.update("jax_enable_preemption_service", False)
    failures: list[Exception] = []

    def join() -> None:
        try:
            jax.distributed.initialize(
                coordinator or None,
                num_processes or None,
                None if process_id < 0 else process_id,
                initialization_timeout=2 * timeout,
                heartbeat_timeout_seconds=timeout,
                shutdown_timeout_seconds=timeout,
            )
        except Exception as error:
            failures.append(error)

    # JAX's own timeout, twice as long, aborts the process with a stack trace; the timeout of
    # `thread.join` expires first and abandons the thread.
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(timeout)
    if thread.is_alive():
        place = f", which must run at coordinator = {coordinator}" if coordinator else ""
        raise ConfigError(
            "distributed",
            f"not all processes met within coordinator_timeout = {timeout} s; start every "
            f"process_id from 0 to num_processes - 1 once, and let all reach process 0{place}",
        )
    for error in failures:
        if coordinator and num_processes and process_id >= 0:
            why = f"{coordinator} cannot be used by process {process_id}: {error}"
            raise ConfigError("coordinator", why) from None
        raise ConfigError(
            "distributed",
            "found no cluster (SLURM, Kubernetes, TPU pod, Open MPI) to tell the rest: give "
            f"coordinator (host:port), num_processes and process_id ({error})",
        ) from None
    hide_gloo()


def hide_gloo() -> None:
    """Drops the lines that Gloo writes to standard output, piece by piece and from C++.

    Lines of other libraries and of child processes pass; Python's own output is not filtered. At
    exit, standard output is as before.
    """
    stream, shown, (source, sink) = sys.stdout, os.dup(1), os.pipe()
    raw: Any = io.FileIO(shown, "w", False)
    with contextlib.suppress(OSError, AttributeError):  # a stream of a notebook or a test
        if stream.fileno() == 1:
            stream.flush()
            kind: Any = type(getattr(stream.buffer, "raw", stream.buffer))
            raw = kind(shown, "w", False)
            sys.stdout = io.TextIOWrapper(raw, stream.encoding, "replace", line_buffering=True)
    os.dup2(sink, 1)
    os.close(sink)

    def forward() -> None:
        with open(source, "rb") as lines, contextlib.suppress(OSError):
            for line in drop_gloo(lines):
                raw.write(line)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()

    def restore() -> None:
        os.dup2(shown, 1)
        thread.join(1.0)

    atexit.register(restore)


def drop_gloo(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Drops Gloo's lines; a number or an empty line is Gloo's only after a line with its words."""
    hidden = False
    for line in lines:
        hidden = bool(GLOO.fullmatch(line) and (hidden or re.search(rb"[a-z]", line)))
        if not hidden:
            yield line


def is_multi_process() -> bool:
    """Returns whether this process is one of several processes of a run."""
    return jax.distributed.is_initialized() and jax.process_count() > 1


def is_writer() -> bool:
    """Returns whether this process writes files and prints progress, as only the first does."""
    return not is_multi_process() or jax.process_index() == 0


def any_of(flag: bool) -> bool:
    """Returns whether the flag is true in any process; all processes must call this function."""
    return any(multihost_utils.process_allgather(np.int32(flag))) if is_multi_process() else flag


def gather_values(value: Value) -> list[Value]:
    """Returns the values of all processes, in process order; all processes must call `gather`.

    Args:
      value: value of the calling process, of any type that JSON supports.

    Example:
      >>> gather_values({"seed": 1})
      [{'seed': 1}]
    """
    if not is_multi_process():
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    of_all = multihost_utils.process_allgather
    lengths = of_all(np.int32(text.size))  # the gather needs equal shapes, so texts are padded
    texts = of_all(np.pad(text, (0, int(lengths.max()) - text.size)))
    return [json.loads(bytes(row[:length])) for row, length in zip(texts, lengths, strict=True)]


def on_first_process(function: Callable[[], Value], error: type[Exception] = UsageError) -> Value:
    """Calls `function` in the first process only and returns the result in every process.

    Args:
      function: `() -> value`, with a result that JSON supports.
      error: exception type that `function` may raise with one message; all processes raise it.
    """
    if not is_multi_process():
        return function()
    result: Any = None
    raised = None
    if is_writer():
        try:
            result = function()
        except error as caught:
            raised = caught
    result, message = gather_values([result, raised and str(raised)])[0]
    if raised is not None:
        raise raised
    if message is not None:
        raise error(message)
    return result


@contextlib.contextmanager
def collective_errors() -> Iterator[Callable[[Values], None]]:
    """Context that all processes leave together: a usage error of one process is raised in all.

    Yields:
      `require_same(settings)`, to be called in the context with the flag names and values that must
      be equal in all processes.

    Raises:
      UsageError, ConfigError: an error raised in the context by this or another process.
      ConfigError: a setting differs between processes; the message names the first such setting.
    """
    settings: dict[str, Any] = {}
    raised: Exception | None = None
    try:
        yield settings.update
    except (UsageError, ConfigError) as caught:
        raised = caught
    if is_multi_process():
        parts = [raised.field, raised.message] if isinstance(raised, ConfigError) else [str(raised)]
        reports: list[Any] = gather_values([settings, raised and parts])
        _compare([report[0] for report in reports if report[0]])
        for i, (_, parts) in enumerate(reports):
            if raised is None and parts is not None:
                message = f"process {i}: {parts[-1]}"
                raise ConfigError(parts[0], message) if len(parts) > 1 else UsageError(message)
    if raised is not None:
        raise raised


def _compare(settings: list[Json]) -> None:
    for i, other in enumerate(settings[1:], 1):
        for name in settings[0] | other:
            first, its = settings[0].get(name, ABSENT), other.get(name, ABSENT)
            if first != its:
                raise ConfigError(
                    name,
                    f"must be the same in all processes, but is {spell(first)} in process 0 and "
                    f"{spell(its)} in process {i}",
                )


def gather_array(array: npt.ArrayLike) -> npt.NDArray[Any]:
    """Returns a host copy of an array; processes that share its shards must all call `whole`."""
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated
    ):
        return np.asarray(multihost_utils.process_allgather(array, tiled=True))
    return np.array(array)


def place_array(array: npt.NDArray[Any], sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Puts a host array on devices; each process puts the shards of its own devices.

    Args:
      array: array with its global shape, identical in all processes.
      sharding: sharding of the result, or None for the default device.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
