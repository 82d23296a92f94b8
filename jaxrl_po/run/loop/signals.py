"""Signals and standard streams: which events end a run, and which do not.

A signal ends a run after the current iteration, saved; before the first iteration, at once. A
standard stream that fails, or cannot encode a character, never ends a run.
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
IGNORED = signal.SIGHUP, signal.SIG_IGN  # signal and handler that `nohup` sets
NOTHING_NEW = "\ninterrupted before the first iteration: nothing new to save\n"
SHOW_CURSOR = b"\x1b[?25h"
FINISHING = "\nfinishing the files of this run; all iterations are saved\n"
SAVING = "\nfinishing this iteration, then saving; interrupt again to quit without saving\n"


class Interrupted(KeyboardInterrupt):
    """An interrupt of `run.train`, `run.resume` or `run.sweep`, raised after the state is saved.

    Attributes:
      trained: `Trained` that `run.train` or `run.resume` would have returned; None for `run.sweep`.
      swept: `SweepResult` that `run.sweep` would have returned, with the evaluations so far; None
        for `run.train` and `run.resume`.
    """

    def __init__(self, message: str = "", *, trained: Any = None, swept: Any = None):
        name = "trained" if swept is None else "swept"
        super().__init__(message or f"the result so far is .{name}, or sys.last_value.{name}")
        self.trained, self.swept = trained, swept


@contextlib.contextmanager
def _handled(handler: Callable[[int, types.FrameType | None], None]) -> Iterator[None]:
    """Context with a handler for `SIGNALS`; restores the earlier handlers at the end.

    Only the main thread may set handlers. A handler in C code could not be restored, and stays.
    """
    with contextlib.ExitStack() as stack:  # restores every handler, even if a signal arrives
        for each in SIGNALS if threading.current_thread() is threading.main_thread() else ():
            before = signal.getsignal(each)
            if before is not None and (each, before) != IGNORED:
                stack.callback(signal.signal, each, before)
                signal.signal(each, handler)
        yield


@contextlib.contextmanager
def handle_signals(started: threading.Event | None, leave_early: bool) -> Iterator[threading.Event]:
    """Context whose event is set at the first of `SIGNALS`; a second signal ends the work at once.

    A terminal that closes may send SIGHUP twice, by its shell and by the system: the second SIGHUP
    has no effect.

    Args:
      started: event that is set once the run has a state to save; None if the run already has one.
        Until the event is set, while programs compile and the state is made, a signal ends the
        work of a single process immediately; several processes end together.
      leave_early: whether to end the process, as a command does; if false, the work ends with a
        KeyboardInterrupt, and a notebook keeps its kernel.
    """
    stop = threading.Event()

    def hear(number: int, frame: types.FrameType | None) -> None:
        early = started is not None and not started.is_set()
        at_once = early and not processes.is_multi_process()
        if not leave_early and (at_once or (stop.is_set() and number != signal.SIGHUP)):
            raise KeyboardInterrupt
        if at_once:
            say(NOTHING_NEW)  # `print` is not safe in a signal handler
            _leave(128 + number)
        stop.set()
        for each in SIGNALS if leave_early else ():
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        say(NOTHING_NEW if early else SAVING if started is not None else FINISHING)

    with _handled(hear), ignore_broken_pipe():
        yield stop


@contextlib.contextmanager
def resumable_on_signal(out: Path, *, leave_early: bool = True) -> Iterator[None]:
    """Context in which a signal ends the process, with a note that the run may be resumed.

    The exit status of the process tells the number of the signal.

    Args:
      out: folder of the run, for the messages.
      leave_early: whether to end the process; if false, the code inside handles signals.

    Raises:
      RunError: a file cannot be written; the message is one line.
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
    """Returns the result of a call in another thread; the calling thread handles signals."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        return result_of(worker.submit(function, *arguments))


def result_of(call: Future[Result]) -> Result:
    """Returns the result of a call in another thread, once the result is available.

    The wait is repeated in short parts: a signal that arrives just before a wait would not end that
    wait.
    """
    while not wait([call], timeout=0.2).done:
        pass
    return call.result()


def _leave(status: int) -> NoReturn:
    """Ends the process immediately, including computations and compilations of other threads."""
    for stream in (1, 2):
        if os.isatty(stream):
            with contextlib.suppress(OSError):  # the terminal may have been closed
                os.write(stream, SHOW_CURSOR)  # the progress bar hides the cursor
    os._exit(status)


class Stream(io.FileIO):
    """A standard stream that drops text which cannot be written, and reports so once on stderr."""

    goes_on: ClassVar[bool] = False  # whether a closed pipe is reported, too
    _said = False

    def write(self, data: Any, /) -> int:
        """Writes all of the data, or drops the rest after an error."""
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
    """Writes to stderr at once, as a signal handler may do; ignores a stream that is closed."""
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))


def guard() -> None:
    """Replaces standard output and standard error by streams that drop unwritable text."""
    # A later file would get the number of a closed descriptor, and messages would go to that file.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    sys.stdout, sys.stderr = _guarded(sys.stdout), _guarded(sys.stderr)


def _guarded(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):  # the stream is closed, or belongs to a notebook
        return stream
    try:
        raw = Stream(stream.fileno(), "w", closefd=False)
    except io.UnsupportedOperation:  # the stream is not a file, as in a test
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
    """Context in which a closed stdout pipe is reported once and the work continues."""
    before, Stream.goes_on = Stream.goes_on, True
    try:
        yield
    finally:
        Stream.goes_on = before
