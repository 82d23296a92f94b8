"""Signals: a run ends after its iteration, saved; before the first one, at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment.flags import RunError
from jaxrl_po.run.loop import streams
from jaxrl_po.run.store import failures

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
IGNORED = signal.SIGHUP, signal.SIG_IGN  # as `nohup` has it
NOTHING_NEW = "\ninterrupted before the first iteration: nothing new to save\n"
SHOW_CURSOR = b"\x1b[?25h"
SAVING = "\nfinishing this iteration, then saving; interrupt again to quit without saving\n"


@contextlib.contextmanager
def _handled(handler: Callable[[int, Any], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    heard = [each for each in SIGNALS if (each, signal.getsignal(each)) != IGNORED]
    before = {each: signal.signal(each, handler) for each in heard}
    try:
        yield
    finally:
        for each, was in before.items():
            signal.signal(each, was)


@contextlib.contextmanager
def hear_signals(started: threading.Event, *, leave_early: bool) -> Iterator[threading.Event]:
    """Sets the event on one of `SIGNALS`; a second one finds the system's own handler.

    Before `started`, while programs compile and the state is initialised, there is nothing to save:
    a single process then ends immediately (`leave_early`), or a signal is a KeyboardInterrupt; of
    several, all end together.
    """
    stop = threading.Event()

    def hear(number: int, frame: Any) -> None:
        if not started.is_set() and not processes.several():
            if not leave_early:
                raise KeyboardInterrupt
            streams.say(NOTHING_NEW)  # printing is not safe in a handler
            _leave(128 + number)
        stop.set()
        for each in SIGNALS:  # a terminal that closes may send its signal twice
            signal.signal(each, signal.SIG_IGN if each == signal.SIGHUP else signal.SIG_DFL)
        streams.say(SAVING if started.is_set() else NOTHING_NEW)

    with _handled(hear), streams.outlived():
        yield stop


@contextlib.contextmanager
def kept(out: Path, *, leave_early: bool = True) -> Iterator[None]:
    """Ends the process at a signal, whose status tells which, and says that it may be resumed.

    Args:
      out: its folder.
      leave_early: end it; False leaves signals to what runs inside.

    Raises:
      RunError: one line on what cannot be written.
    """

    def leave(number: int, frame: Any) -> None:
        streams.say(f"\ninterrupted: what is done is kept; continue with --out={out} --resume\n")
        _leave(128 + number)

    try:
        with _handled(leave) if leave_early else contextlib.nullcontext(), streams.outlived():
            yield
    except OSError as error:
        then = f"continue with --out={out} --resume: what is done is kept"
        raise RunError(failures.line(error, out, then)) from None


def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in another thread: this one hears signals meanwhile."""
    with ThreadPoolExecutor(max_workers=1) as worker:
        return result_of(worker.submit(function, *arguments))


def result_of(call: Future[Any]) -> Any:
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
