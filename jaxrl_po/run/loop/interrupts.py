"""SIGINT and SIGTERM: a run ends after its chunk, saved; before the first one, at once."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment.flags import RunError
from jaxrl_po.run.store import failures

NOTHING_NEW = b"\ninterrupted before the first iteration: nothing new to save\n"
SHOW_CURSOR = b"\x1b[?25h"
SAVING = b"\nfinishing this chunk, then saving; interrupt again to quit without saving\n"


@contextlib.contextmanager
def hear_signals(started: threading.Event, *, leave_early: bool) -> Iterator[threading.Event]:
    """Sets the event on SIGINT or SIGTERM; a second one finds the system's own handler.

    Before `started`, while programs compile and the state is initialised, there is nothing to save:
    a single process then ends immediately (`leave_early`), or a signal is a KeyboardInterrupt; of
    several, all end together.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return

    def hear(number: int, frame: Any) -> None:
        if not started.is_set() and not processes.several():
            if not leave_early:
                raise KeyboardInterrupt
            # Printing is not safe in a handler, and a compiler in another thread cannot be ended.
            for stream in (1, 2):
                if os.isatty(stream):
                    os.write(stream, SHOW_CURSOR)  # the progress bar hides it
            os.write(2, NOTHING_NEW)
            os._exit(128 + number)
        stop.set()
        for each in handlers:
            signal.signal(each, signal.SIG_DFL)
        os.write(2, SAVING if started.is_set() else NOTHING_NEW)

    handlers = {each: signal.signal(each, hear) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for each, before in handlers.items():
            signal.signal(each, before)


@contextlib.contextmanager
def kept(out: Path) -> Iterator[None]:
    """Says that a command may be resumed that is interrupted, with status 130, or cannot write.

    Raises:
      RunError: one line on what cannot be written.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(
            f"interrupted: what is done is kept; continue with --out={out} --resume",
            file=sys.stderr,
        )
        raise SystemExit(128 + signal.SIGINT) from None
    except OSError as error:
        then = f"continue with --out={out} --resume: what is done is kept"
        raise RunError(failures.line(error, out, then)) from None
