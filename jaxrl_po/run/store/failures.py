"""What the system refuses, in one line: the file, why, and what helps."""

import asyncio
import errno
import functools
import logging
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

from jaxrl_po.version import FORMATS, __version__

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def code(error: Exception) -> int | None:
    """The number of an error of Python or tensorstore; None where the system gave none."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if found else getattr(error, "errno", None)


def reason(error: Exception) -> str:
    """The system's short message for an error of Python or tensorstore.

    Example:
      >>> reason(ValueError("OUT_OF_RANGE: Failed to write 9 bytes [os_error_code='27']"))
      'File too large'
    """
    number = code(error)
    return str(error) if number is None else os.strerror(number)


def line(error: OSError, place: str | Path = "", then: str = "") -> str:
    """One line on a failure.

    Args:
      error: its file is named; after a write it has none.
      place: named instead.
      then: what to do once that is mended.

    Example:
      >>> line(OSError(errno.ENOSPC, ""), "runs/a", "--resume continues")
      'runs/a: No space left on device; free some space there, then --resume continues'
      >>> line(PermissionError(errno.EACCES, "", "a.json"))
      'a.json: Permission denied'
    """
    what = ": ".join(filter(None, [str(error.filename or place), reason(error)]))
    advice = ", then ".join(filter(None, ["free some space there" * is_full(error), then]))
    return "; ".join(filter(None, [what, advice]))


def is_full(error: Exception) -> bool:
    """Whether room would have helped."""
    return code(error) in FULL


def silence_orbax() -> None:
    """Keeps what orbax and tensorstore say about a failed write, beside its exception, from stderr.

    Orbax logs it, and closes its event loop while tensorstore still wants to tell it of each array.
    """
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    tell = sys.unraisablehook
    if not (isinstance(tell, functools.partial) and tell.func is _unless_of_a_loop):
        sys.unraisablehook = functools.partial(_unless_of_a_loop, tell)
        warnings.filterwarnings("ignore", r"coroutine '(\w+Handler|run_sync)\..*never awaited")


def _unless_of_a_loop(tell: Any, what: Any) -> None:
    closed = "Event loop is closed" in str(what.exc_value)
    if not closed and what.object is not asyncio.BaseEventLoop.__del__:
        tell(what)


def unread(number: Any) -> str:
    """Why a folder or a checkpoint with this format number is not read; empty where it is."""
    if number in FORMATS:
        return ""
    reads = f"and jaxrl_po {__version__} reads {', '.join(map(str, FORMATS))}"
    if number is None:
        remedy = "begin the run anew, or use the version that wrote it"
        return f"has no format number, as before version 0.4, {reads}; {remedy}"
    return f"has format {number}, {reads}; install a later version"
