"""Worker processes for the user's code, which exchange JSON with the run through a pipe.

This module defines both ends of the pipe and imports only the standard library: a worker imports
neither JAX nor the main program, unless the user's code imports them. A worker that takes too long
is killed.
"""

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxrl_po.run.data import guard

Json = dict[str, Any]
START_LIMIT = 120.0  # seconds for a worker process to import its modules
PATIENCE = 1.0  # seconds for a worker process to exit by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ROOT = Path(__file__).parents[3]
# ROOT is appended to the search path, so that no file in ROOT hides the standard library.
BEGIN = f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import main; main()"


class ProcessEnded(Exception):
    """A process ended by itself, or was killed for taking too long; the message says which."""


class Process:
    """A child process that answers each message with another message.

    Attributes:
      pipe: connection to the child process.
      pid: process id of the child process.
      deadline: latest time of the next answer, as `time.monotonic`; None for no limit.
      close: `() -> status`, ends the process; also runs when the object is garbage-collected.

    Args:
      pipe: connection to the child process.
      pid: process id of a child of this process.
      patience: seconds that the child process has to exit by itself when it is closed.
    """

    def __init__(self, pipe: Connection, pid: int, patience: float = 0.0):
        self.pipe, self.pid = pipe, pid
        self.deadline: float | None = None
        self._late = ""
        self.close = weakref.finalize(self, _end, pipe, pid, patience)

    def send(self, message: object, limit: float | None = None, late: str = "") -> None:
        """Sends a message; if the process cannot receive messages, `receive` raises the error.

        Args:
          message: message of JSON values.
          limit: seconds from now until the answer is due; None for no limit.
          late: message of the error that `receive` raises after the limit.
        """
        self.deadline, self._late = None if limit is None else time.monotonic() + limit, late
        with contextlib.suppress(OSError):
            send(self.pipe, message)

    def receive(self) -> Any:
        """Returns the answer to the last message.

        Raises:
          ProcessEnded: the process ended or exceeded its time limit before it answered.
        """
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
        try:
            if self.pipe.poll(left):
                return receive(self.pipe)
        except (EOFError, OSError):
            raise ProcessEnded(f"ended its process, with status {self.close()}") from None
        _kill(self.pid)  # a late answer would count as an answer to the next message
        self.close()
        raise ProcessEnded(self._late)


def _end(pipe: Connection, pid: int, patience: float) -> int | None:
    """Closes the pipe, so that the worker exits; kills after `patience`; returns exit status."""
    if pipe.closed:  # a forked child has closed the worker's pipes
        return None
    pipe.close()
    until = time.monotonic() + patience
    with contextlib.suppress(ChildProcessError):  # ignoring SIGCHLD reaps children
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.002)
        _kill(pid, group_only=bool(ended[0]))
        return os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(pid, 0))[1])
    return None


def _kill(pid: int, *, group_only: bool = False) -> None:
    """Kills a process, and the process group whose leader the process is, if any."""
    for kill in (os.killpg,) if group_only else (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def spawn(module: str, start: Mapping[str, object]) -> tuple[Process, Json]:
    """Starts a worker process and returns the process with its first message; see `main`.

    Args:
      module: module whose function `serve` the worker calls.
      start: arguments of `serve`; `source` names the object to load.

    Raises:
      ProcessEnded: the worker process ended, or could not load the object that `source` names.
    """
    ours, theirs = Pipe()
    with theirs:
        # A fork would be unsafe with JAX's threads, and a spawn of `multiprocessing` would import
        # the main script again.
        started = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    started.returncode = 0  # Popen must not wait for the process, since `Process` does
    process = Process(ours, started.pid, PATIENCE)
    late = f"could not be loaded within {START_LIMIT:g} s"
    process.send({**start, "path": sys.path}, START_LIMIT, late)
    found = process.receive()
    if "error" in found:
        process.close()
        raise ProcessEnded(found["error"])
    return process, found


def fork(serve: Callable[[Connection], None], others: Iterable[Connection]) -> Process:
    """Forks a child of a worker; the child shares the modules that the worker has imported.

    Args:
      serve: `(pipe) -> None`, answers the requests that come through the pipe.
      others: pipes that the child closes, since an open copy would hide a pipe's end from readers.
    """
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # a new process group, so that the child's own children end with it
            for pipe in (ours, *others):
                pipe.close()
            for each in SIGNALS:  # the child's own children would inherit the worker's handlers
                signal.signal(each, signal.SIG_DFL)
            serve(theirs)
        finally:
            os._exit(0)  # a forked child must never continue to run the worker's code
    theirs.close()
    return Process(ours, pid)


def main() -> None:
    """Runs a worker; the command-line arguments are the pipe's file descriptor and a module."""
    pipe, module = Connection(int(sys.argv[1])), sys.argv[2]
    # Ctrl-C reaches every process of the terminal, but the run needs the worker for its last chunk.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    try:
        serve = importlib.import_module(module).serve
        start = receive(pipe)
        sys.path[:] = start["path"]
        try:
            loaded = load_source(start["source"])
            if not callable(loaded):
                place, _, name = start["source"].rpartition(":")
                raise ImportError(f"{name} in {place} is not a function")
        except BaseException as error:
            send(pipe, {"error": describe_error(error)})
        else:
            serve(pipe, loaded, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the run has ended, or has abandoned the call of this worker


def send(pipe: Connection, message: object) -> None:
    """Sends JSON values through a pipe."""
    pipe.send_bytes(json.dumps(message).encode())


def receive(pipe: Connection) -> Any:
    """Receives JSON values from a pipe."""
    return json.loads(pipe.recv_bytes())


LOADING = list[str]()  # files of the user's code that are being imported


def load_source(source: str) -> object:
    """Loads the object that `file.py:name` or `module:name` names."""
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        module = _import(path, path.read_bytes())
    else:
        module = importlib.import_module(place)
    members = vars(module)
    if name not in members:
        found = [
            key
            for key, value in members.items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        raise ImportError(f"{place} holds no {name!r}, but {', '.join(found) or 'no function'}")
    return members[name]


@functools.cache
def _import(path: Path, content: bytes) -> types.ModuleType:
    """Imports a file of the user's code, once per version of the file's content."""
    del content
    sys.path.insert(0, str(path.parent))
    # Data classes look their module up by name; the name must not shadow another module.
    given = path.stem if path.stem not in sys.modules else f"_user_{path.stem}"
    spec = importlib.util.spec_from_file_location(given, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    sys.modules[given] = module
    LOADING.append(str(path))
    try:
        spec.loader.exec_module(module)
    finally:
        LOADING.pop()
    return module


def describe_error(error: BaseException) -> str:
    """Formats an error with its last line in the user's file that was called."""
    every = traceback.extract_tb(error.__traceback__)
    ours = (__file__, guard.__file__, every[0].filename)
    frames = [f for f in every if f.filename not in ours and not f.filename.startswith("<frozen ")]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    try:
        said = " ".join(str(error).split())
    except Exception:  # the user's code may define `__str__`, which may raise, too
        said = "(it has no message)"
    return f"{type(error).__name__}: {said}{where}"
