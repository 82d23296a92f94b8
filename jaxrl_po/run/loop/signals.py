"""Signals and standard streams: what ends a run, and what does not.

At a signal a run ends after its iteration, saved; before the first one, at once. A standard stream
that fails, or lacks a character, ends nothing.
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TextIO, TypeVar

from jaxrl_po.run.devices import processes
from jaxrl_po.run.errors import RunError, format_error

Result = TypeVar("Result")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IGNORED = signal.SIGHUP, signal.SIG_IGN  # as `nohup` has it
NOTHING_NEW = "\ninterrupted before the first iteration: nothing new to save\n"
SHOW_CURSOR = b"\x1b[?25h"
FINISHING = "\nfinishing the files of this run; all iterations are saved\n"
SAVING = "\nfinishing this iteration, then saving; interrupt again to quit without saving\n"


class Interrupted(KeyboardInterrupt):
    """An interrupt of `run.train`, `run.resume` or `run.sweep`, after the iteration and saved.

    Attributes:
      trained: the `Trained` that `run.train` or `run.resume` would have returned, or None.
      swept: the `SweepResult` that `run.sweep` would have returned, with the evaluations so far,
        or None.
    """

    def __init__(self, message: str = "", *, trained: Any = None, swept: Any = None):
        name = "trained" if swept is None else "swept"
        super().__init__(message or f"the result so far is .{name}, or sys.last_value.{name}")
        self.trained, self.swept = trained, swept


@contextlib.contextmanager
def _handled(handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Context with a handler for `SIGNALS`; restores the earlier handlers.

    Only the main thread may set handlers. A handler of C code could not be restored, and stays.
    """
    with contextlib.ExitStack() as stack:  # restores all of them, also if a signal comes meanwhile
        for each in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            before = signal.getsignal(each)
            if before is not None and (each, before) != IGNORED:
                stack.callback(signal.signal, each, before)
                signal.signal(each, handler)
        yield


@contextlib.contextmanager
def handle_signals(started: threading.Event | None, leave_early: bool) -> Iterator[threading.Event]:
    """Context whose event is set at the first of `SIGNALS`; a second one ends the work immediately.

    A terminal that closes may send SIGHUP twice, by its shell and by the system: the second one has
    no effect.

    Args:
      started: set once there is something to save; None if there is. Before that, while programs
        compile and the state is initialised, the first signal ends a single process's work
        immediately; several processes end together.
      leave_early: end the process, as a command does; else the work ends by a KeyboardInterrupt,
        and a notebook keeps its kernel.
    """
    stop = threading.Event()

    def hear(number: int, frame: types.FrameType | None) -> None:
        early = started is not None and not started.is_set()
        at_once = early and not processes.is_multi_process()
        if not leave_early and (at_once or (stop.is_set() and number != signal.SIGHUP)):
            raise KeyboardInterrupt
        if at_once:
            say(NOTHING_NEW)  # printing is not safe in a handler
            _leave(128 + number)
        stop.set()
        for each in SIGNALS if leave_early else ():
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        say(NOTHING_NEW if early else SAVING if started is not None else FINISHING)

    with _handled(hear), ignore_broken_pipe():
        yield stop


@contextlib.contextmanager
def resumable_on_signal(out: Path, *, leave_early: bool = True) -> Iterator[None]:
    """Ends the process at a signal, whose status tells which, and says that it may be resumed.

    Args:
      out: its folder.
      leave_early: end it; False leaves signals to what runs inside.

    Raises:
      RunError: one line on what cannot be written.
    """

    def leave(number: int, frame: types.FrameType | None) -> None:
        say(f"\ninterrupted: what is done is kept; continue with --out={out} --resume\n")
        _leave(128 + number)

    try:
        with _handled(leave) if leave_early else contextlib.nullcontext(), ignore_broken_pipe():
            yield
    except OSError as error:
        then = f"resume with out = {out}: what is done is kept"
        raise RunError(format_error(error, out, then)) from None


def in_thread(function: Callable[..., Result], *arguments: Any) -> Result:
    """The result of a call in another thread: this one hears signals meanwhile."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        return result_of(worker.submit(function, *arguments))


def result_of(call: Future[Result]) -> Result:
    """The result of a call in another thread, once it is there.

    It is awaited in parts: a signal that comes just before a wait begins does not end it.
    """
    while not wait([call], timeout=0.2).done:
        pass
    return call.result()


def _leave(status: int) -> NoReturn:
    """Ends the process, with what it computes or compiles in another thread."""
    for stream in (1, 2):
        if os.isatty(stream):
            with contextlib.suppress(OSError):  # a terminal that was closed
                os.write(stream, SHOW_CURSOR)  # the progress bar hides it
    os._exit(status)


class Stream(io.FileIO):
    """A standard stream: what it does not take is dropped, which stderr says once."""

    goes_on: ClassVar[bool] = False  # whether a closed pipe is said as well
    _said = False

    def write(self, data: Any, /) -> int:
        """Writes all of it, or drops the rest."""
        rest = memoryview(data).cast("B")
        size = len(rest)
        try:
            while rest:
                written = super().write(rest)
                if written is None:  # the pipe or terminal is full, and does not block
                    select.select([], [self], [])
                rest = rest[written or 0 :]
        except OSError as error:
            if not self._said and (self.goes_on or error.errno != errno.EPIPE):
                self._said = True
                say(f"note: standard output: {error.strerror}; all goes on without it\n")
        return size


def say(text: str) -> None:
    """Writes to stderr at once, as a handler of signals may; or not, where nobody can hear it."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def guard() -> None:
    """Has standard output and errors drop what cannot be written."""
    # A closed descriptor would become that of the next file, and messages would be written to it.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def _guarded(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # closed, or a notebook's
        return stream
    try:
        raw = Stream(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # no file, as in a test
        return stream
    stream.flush()
    return io.TextIOWrapper(
        raw,
        encoding=stream.encoding,
        errors="replace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextlib.contextmanager
def ignore_broken_pipe() -> Iterator[None]:
    """Inside, work goes on that a closed pipe does not end: it is then said."""
    before, Stream.goes_on = Stream.goes_on, True
    try:
        yield
    finally:
        Stream.goes_on = before
