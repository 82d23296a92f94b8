"""The standard streams of a command: one that fails, or lacks a character, ends nothing."""

import contextlib
import errno
import io
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator
from typing import Any, ClassVar, TextIO


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
def outlived() -> Iterator[None]:
    """Inside, work goes on that a closed pipe does not end: it is then said."""
    before, Stream.goes_on = Stream.goes_on, True
    try:
        yield
    finally:
        Stream.goes_on = before


def wrapped(text: str, *, indent: str = "") -> str:
    """Lines no longer than the terminal's, or 80 characters, which end between words."""
    width = shutil.get_terminal_size().columns
    return textwrap.fill(
        text,
        max(width, 40),
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
