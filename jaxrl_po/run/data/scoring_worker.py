"""The process of one reward function: it can be killed, and it refuses to run text as code.

It is started as a script that imports the standard library only, so neither JAX nor the main
program is imported again. It exchanges JSON through a pipe: the first message loads the function,
each further one is a call.
"""

import faulthandler
import importlib
import importlib.util
import json
import os
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

LIBRARY = sysconfig.get_path("stdlib")
# What a model has written, or was told in between; the other columns are data.
WRITTEN = ("completions", "messages")
GRACE = 10.0  # seconds past the time limit after which a worker that was not killed ends itself


class Guard:
    """Refuses `eval` and `exec` of text, except text of the data set, while a function runs.

    What the standard library compiles stays allowed: imports, named tuples, data classes. A refusal
    is recorded even if the function catches its exception.

    Args:
      harmless: `harmless(text, file) -> bool`, further text that a file may compile, for a function
        of ours, which then also handles refusals; None for none.
    """

    def __init__(self, harmless: Callable[[str, str], bool] | None = None) -> None:
        self._harmless = harmless
        self._given: frozenset[str] | None = None
        self._untrusted: set[str] = set()
        self.refused = False
        sys.addaudithook(self._hear)

    def call(
        self, function: Callable[..., Any], given: frozenset[str], columns: dict[str, Any]
    ) -> Any:
        """`function(**columns)` under guard; `given` holds the texts that may be run."""
        self._given, self.refused = given, False
        self._untrusted.clear()
        try:
            return function(**columns)
        finally:
            self._given = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        # `eval` or `exec` of text raises two events: `compile` with the text, `exec` with the code,
        # which names the file that the text was said to be in.
        if self._given is None:
            return
        if event == "compile":
            source, filename = args
            text = source.decode(errors="replace") if isinstance(source, bytes) else source
            caller = sys._getframe(1).f_code.co_filename
            if text in self._given or _is_library(caller):
                return
            if self._harmless is None or not self._harmless(text, caller):
                self._untrusted.add(str(filename))
        elif event == "exec" and args[0].co_filename in self._untrusted:
            self.refused = self._harmless is None
            raise PermissionError("a reward function must not run text as code")


def _is_library(filename: str) -> bool:
    """Whether code is of the standard library, which compiles files and text of its own."""
    return filename.startswith("<frozen ") or (
        filename.startswith(LIBRARY) and "site-packages" not in filename
    )


def load(source: str) -> Callable[..., Any]:
    """The function that `file.py:function` or `module:function` names."""
    place, _, name = source.rpartition(":")
    if place.endswith(".py"):
        path = Path(place).resolve()
        sys.path.insert(0, str(path.parent))
        # Data classes look their module up by its name, which must not hide another module.
        given = path.stem if path.stem not in sys.modules else f"_user_{path.stem}"
        spec = importlib.util.spec_from_file_location(given, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{place} cannot be read")
        module = importlib.util.module_from_spec(spec)
        sys.modules[given] = module
        spec.loader.exec_module(module)
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
    if not callable(members[name]):
        raise ImportError(f"{name} in {place} is not a function")
    function: Callable[..., Any] = members[name]
    return function


def describe(error: BaseException) -> str:
    """The error, with the last line that led to it in the file that this one called."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)[1:]  # the first caught it
        if frame.filename != __file__ and not frame.filename.startswith("<frozen ")
    ]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {error}{where}"


def texts(value: Any) -> Iterator[str]:
    """All strings inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from texts(item)


def numbers(result: Any, count: int) -> list[float]:
    """The result of a reward function as `count` floats; NaN stays.

    Raises:
      TypeError, ValueError: it is not that many numbers.

    Example:
      >>> numbers((1, True, 0.5), 3)
      [1.0, 1.0, 0.5]
    """
    if isinstance(result, str | bytes | dict | set | frozenset):
        raise TypeError(
            f"returned {type(result).__name__} where a list of {count} numbers is wanted"
        )
    try:
        values = list(result)
    except TypeError:
        raise TypeError(
            f"returned {type(result).__name__} where a list of {count} numbers is wanted"
        ) from None
    if len(values) != count:
        raise ValueError(f"returned {len(values)} numbers for {count} completions")
    for value in values:
        if value is None or isinstance(value, str | bytes):
            raise TypeError(f"returned {value!r} where a number is wanted")
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError):
        raise TypeError(
            f"returned a list of {type(values[0]).__name__} where numbers are wanted"
        ) from None


def answer(function: Callable[..., Any], guard: Guard, request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one call: `{"scores": [...]}` or `{"error": text}`."""
    completions = request["completions"]
    given = frozenset(
        text for name, column in request.items() if name not in WRITTEN for text in texts(column)
    )
    try:
        result = guard.call(function, given, request)
    except BaseException as error:
        if not guard.refused:
            return {"error": f"raised {describe(error)}"}
    if guard.refused:
        return {
            "error": (
                "tried to run text as code (eval or exec), which is refused while a completion "
                "is scored"
            )
        }
    try:
        return {"scores": numbers(result, len(completions))}
    except (TypeError, ValueError) as error:
        return {"error": str(error)}


def serve(pipe: Connection) -> None:
    """Answers requests until the pipe is closed."""
    # Ctrl-C reaches every process of the terminal, but the run still needs this one for its chunk.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    start = json.loads(pipe.recv_bytes())
    sys.path[:] = start["path"]
    try:
        function = load(start["source"])
    except BaseException as error:
        pipe.send_bytes(json.dumps({"error": describe(error)}).encode())
        return
    ours = start["source"].startswith("jaxrl_po.")
    guard = Guard(vars(sys.modules[function.__module__]).get("harmless") if ours else None)
    pipe.send_bytes(b"{}")
    with Path(os.devnull).open("w") as nowhere:
        while True:
            request = json.loads(pipe.recv_bytes())
            # A watchdog: if the run was killed, it can no longer kill a call that hangs.
            faulthandler.dump_traceback_later(start["timeout"] + GRACE, exit=True, file=nowhere)
            reply = answer(function, guard, request)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(json.dumps(reply).encode())


def main() -> None:
    """Entry point: the first argument is the file descriptor of the pipe."""
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the run has ended, or has given up on this call


if __name__ == "__main__":
    main()
