"""Processes for code of the user's own: a script with which JSON is exchanged through a pipe."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

START_LIMIT = 120.0  # seconds for a process to import what it needs
PATIENCE = 1.0  # seconds for a process to exit by itself


class Ended(Exception):
    """The process has ended; the message says with which status."""


class Process:
    """A script in a process of its own, which may be started again after it has ended.

    Args:
      script: its file; its argument is the file descriptor of the pipe.
    """

    def __init__(self, script: str):
        self._script = script
        self._pipe: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and, as far as is known, has not ended."""
        return self._pipe is not None

    def start(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """Starts the process; its reply to the first message, or `{"error": …}`.

        Args:
          first: the message, to which the search path of modules is added.
        """
        self._pipe, theirs = Pipe()
        with theirs:
            # Not a fork, which is unsafe with JAX's threads, and not a spawn of `multiprocessing`,
            # which imports the main script again.
            self._process = subprocess.Popen(
                [sys.executable, "-P", self._script, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + START_LIMIT
        try:
            self.send({**first, "path": sys.path})
        except Ended as error:
            return {"error": str(error)}
        return self.receive(deadline, f"could not be loaded within {START_LIMIT:g} s")

    def send(self, message: Mapping[str, Any]) -> None:
        """Sends a message.

        Raises:
          Ended: there is nobody to read it.
        """
        assert self._pipe is not None
        try:
            self._pipe.send_bytes(json.dumps(message).encode())
        except OSError:
            raise Ended(self._end()) from None

    def receive(self, deadline: float | None, late: str = "") -> dict[str, Any]:
        """The reply, or `{"error": …}`; at the deadline the process is killed.

        Args:
          deadline: as `time.monotonic`; None for none.
          late: the error in that case.
        """
        assert self._pipe is not None
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            if self._pipe.poll(left):
                reply: dict[str, Any] = json.loads(self._pipe.recv_bytes())
                return reply
        except (OSError, EOFError):
            return {"error": self._end()}
        self.close(patience=0.0)  # kills it: a late reply would be taken for the next one's
        return {"error": late}

    def _end(self) -> str:
        status = None if self._process is None else self._process.wait()
        self.close()
        return f"ended its process, with status {status}"

    def __del__(self) -> None:
        self.close()

    def close(self, patience: float = PATIENCE) -> None:
        """Closes the pipe, at which the process exits; kills it after `patience` seconds."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            try:
                self._process.wait(patience)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._process = self._pipe = None
