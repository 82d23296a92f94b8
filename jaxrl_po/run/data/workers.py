"""Processes for code of the user's own, with which JSON is exchanged through a pipe.

Both ends are here, and import the standard library only: in a worker there is neither JAX nor
the main program, unless the user's code imports it. A process that takes too long is killed.
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
START_LIMIT = 120.0  # seconds for a process to import what it needs
PATIENCE = 1.0  # seconds for a process to exit by itself
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ROOT = Path(__file__).parents[3]
# At the end of the search path, so that nothing of the user's hides the standard library.
BEGIN = f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import main; main()"


class Ended(Exception):
    """The process has ended, or was killed as it took too long; the message says which."""


class Process:
    """A process that answers each message by another.

    Attributes:
      pipe: to it.
      pid: its number.
      deadline: of its next answer, as `time.monotonic`; None for none.
      close: ends it, also where it is forgotten, and gives its status.

    Args:
      pipe: see above.
      pid: of a child of this process.
      patience: seconds that it has to exit by itself when it is closed.
    """

    def __init__(self, pipe: Connection, pid: int, patience: float = 0.0):
        self.pipe, self.pid = pipe, pid
        self.deadline: float | None = None
        self._late = ""
        self.close = weakref.finalize(self, _end, pipe, pid, patience)

    def send(self, message: object, limit: float | None = None, late: str = "") -> None:
        """Sends a message; where nobody reads it, `receive` says so.

        Args:
          message: of JSON values.
          limit: of the answer, seconds from now; None for none.
          late: what `receive` says when it is over.
        """
        self.deadline, self._late = None if limit is None else time.monotonic() + limit, late
        with contextlib.suppress(OSError):
            say(self.pipe, message)

    def receive(self) -> Any:
        """The answer to the last message.

        Raises:
          Ended: there is none.
        """
        left = None if self.deadline is None else max(self.deadline - time.monotonic(), 0.0)
        try:
            if self.pipe.poll(left):
                return hear(self.pipe)
        except (EOFError, OSError):
            raise Ended(f"ended its process, with status {self.close()}") from None
        _kill(self.pid)  # a late answer would be taken for the next one's
        self.close()
        raise Ended(self._late)


def _end(pipe: Connection, pid: int, patience: float) -> int | None:
    """Closes a pipe, at which a worker exits, kills it after its patience; its status."""
    if pipe.closed:  # in a child, which inherits what is the worker's
        return None
    pipe.close()
    until = time.monotonic() + patience
    with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: it was reaped
        while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < until:
            time.sleep(0.002)
        _kill(pid, group_only=bool(ended[0]))
        return os.waitstatus_to_exitcode((ended if ended[0] else os.waitpid(pid, 0))[1])
    return None


def _kill(pid: int, *, group_only: bool = False) -> None:
    """Kills a process and the group that it leads, if it does."""
    for kill in (os.killpg,) if group_only else (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def spawn(module: str, start: Mapping[str, object]) -> tuple[Process, Json]:
    """A new worker and what it says of itself; see `main`.

    Args:
      module: whose `serve` it calls.
      start: for that; `source` names what is loaded.

    Raises:
      Ended: it cannot be used.
    """
    ours, theirs = Pipe()
    with theirs:
        # Not a fork, which is unsafe with JAX's threads, and not a spawn of `multiprocessing`,
        # which imports the main script again.
        started = subprocess.Popen(
            [sys.executable, "-P", "-c", BEGIN, str(theirs.fileno()), module],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
    started.returncode = 0  # `Process` waits for it
    process = Process(ours, started.pid, PATIENCE)
    late = f"could not be loaded within {START_LIMIT:g} s"
    process.send({**start, "path": sys.path}, START_LIMIT, late)
    found = process.receive()
    if "error" in found:
        process.close()
        raise Ended(found["error"])
    return process, found


def fork(serve: Callable[[Connection], None], others: Iterable[Connection]) -> Process:
    """A child of a worker, which has what that has imported.

    Args:
      serve: answers what comes through its pipe.
      others: pipes that it must not hold: their readers could not see that they have ended.
    """
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()  # what it starts is ended with it
            for pipe in (ours, *others):
                pipe.close()
            for each in SIGNALS:  # the worker's own would be inherited by what it starts
                signal.signal(each, signal.SIG_DFL)
            serve(theirs)
        finally:
            os._exit(0)  # whatever happens, it must not go on as the worker
    theirs.close()
    return Process(ours, pid)


def main() -> None:
    """Entry point of a worker; its arguments are the descriptor of the pipe, and a module."""
    pipe, module = Connection(int(sys.argv[1])), sys.argv[2]
    # Ctrl-C reaches every process of the terminal, but the run still needs this one for its chunk.
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    try:
        serve = importlib.import_module(module).serve
        start = hear(pipe)
        sys.path[:] = start["path"]
        try:
            loaded = load(start["source"])
            if not callable(loaded):
                place, _, name = start["source"].rpartition(":")
                raise ImportError(f"{name} in {place} is not a function")
        except BaseException as error:
            say(pipe, {"error": describe(error)})
        else:
            serve(pipe, loaded, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the run has ended, or has given up on this call


def say(pipe: Connection, message: object) -> None:
    """Sends JSON values."""
    pipe.send_bytes(json.dumps(message).encode())


def hear(pipe: Connection) -> Any:
    """Receives JSON values."""
    return json.loads(pipe.recv_bytes())


LOADING = list[str]()  # files of code of the user's own that are being imported


def load(source: str) -> object:
    """Returns what `file.py:name` or `module:name` names."""
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
    """Imports a file of the user's own, once for each content that it has."""
    del content
    sys.path.insert(0, str(path.parent))
    # Data classes look their module up by its name, which must not hide another module.
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


def describe(error: BaseException) -> str:
    """The error, with its last line in the file that was called where the error is caught."""
    every = traceback.extract_tb(error.__traceback__)
    ours = (__file__, guard.__file__, every[0].filename)
    frames = [f for f in every if f.filename not in ours and not f.filename.startswith("<frozen ")]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    try:
        said = " ".join(str(error).split())
    except Exception:  # code of the user's own too
        said = "(it has no message)"
    return f"{type(error).__name__}: {said}{where}"
