"""The process of one reward function, a worker: it refuses to run text as code."""

import asyncio
import concurrent.futures
import faulthandler
import functools
import inspect
import math
import os
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any

from jaxrl_po.run.data import workers

LIBRARY = sysconfig.get_path("stdlib")
# What a model has written, or was told in between; the other columns are data.
WRITTEN = ("completions", "messages")
GAP = r"(?:\s|\\|#.*\n)*"
# What a call names, or a call of what an expression gives, a decorator, an import, a class.
DEEDS = re.compile(
    rf"(?<!def )\b[^\W\d]\w*(?={GAP}\()|[)\]](?={GAP}\()|@|\b(?:import|class)\b{GAP}\w+"
)
GRACE = 10.0  # seconds past the time limit after which a worker that was not killed ends itself


class ResultError(Exception):
    """A function returned something that is no list of scores."""


class Guard:
    """Refuses `eval` and `exec` of text, except text of the data set, while a function runs.

    Code of the standard library and of installed packages may compile text, as named tuples, data
    classes and templates do, and so may a module while it is imported. But they may compile nothing
    that calls, imports or defines what a completion does, so that what a model writes does nothing.
    A refusal is recorded even if the function catches its exception.

    Args:
      harmless: `harmless(text, file) -> bool`, further text that a file may compile, for a function
        of ours, which then also handles refusals; None for none.
    """

    def __init__(self, harmless: Callable[[str, str], bool] | None = None) -> None:
        self._harmless = harmless
        self._given: frozenset[str] | None = None
        self._written: set[str] = set()
        self._untrusted: set[str | None] = set()
        self.refused = False
        sys.addaudithook(self._hear)

    def call(
        self, function: Callable[[], Any], given: Iterable[str], written: Iterable[str]
    ) -> Any:
        """`function()` under guard.

        Args:
          function: what to call.
          given: texts that may be run.
          written: texts of a model, which may not.
        """
        self._written = {deed for text in written for deed in deeds(text)}
        self._given, self.refused = frozenset(given), False
        self._untrusted.clear()
        try:
            return function()
        finally:
            self._given = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        # `eval` or `exec` of text raises two events: `compile` with the text, `exec` with the code,
        # which names the file that the text was said to be in; the name of a tree's is not heard.
        if self._given is None:
            return
        if event == "compile":
            source, filename = args
            text = source.decode(errors="replace") if isinstance(source, bytes) else source
            if text not in self._given and not self._trusts(text, sys._getframe(1)):
                self._untrusted.add(filename and str(filename))
        elif event == "exec" and self._untrusted & {args[0].co_filename, None}:
            self.refused = self._harmless is None
            raise PermissionError("a reward function must not run text as code")

    def _trusts(self, text: Any, frame: FrameType) -> bool:
        """Whether a call may compile a text, or a syntax tree, whose text was heard before."""
        file = frame.f_code.co_filename
        outer: FrameType | None = frame
        while outer and outer.f_code is not Guard.call.__code__:
            if outer.f_code.co_filename.startswith("<frozen importlib"):
                return True  # a module is imported, which knows of no completion
            outer = outer.f_back
        if self._harmless is not None and not _is_library(file):
            return isinstance(text, str) and self._harmless(text, file)
        if not (_is_library(file) or _is_installed(file)):
            return False
        if not isinstance(text, str):
            return not self._untrusted
        return self._written.isdisjoint(deeds(text))


def deeds(text: str) -> set[str]:
    r"""What a text calls, imports and defines, if it is code.

    Example:
      >>> sorted(deeds("import os\ndef f(x): return len (x)")), sorted(deeds("x**2 + 2*x"))
      (['import os', 'len'], [])
    """
    return {" ".join(re.findall(r"\w+", found)) or found for found in DEEDS.findall(text)}


def _is_library(filename: str) -> bool:
    """Whether code is of the standard library."""
    return filename.startswith(LIBRARY) and not _is_installed(filename)


def _is_installed(filename: str) -> bool:
    """Whether code is of an installed package."""
    return "site-packages" in filename or "dist-packages" in filename


def texts(value: Any) -> Iterator[str]:
    """All strings inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) in (str, dict, list):  # most are ids of tokens, which hold none
                yield from texts(item)


def numbers(result: Any, count: int) -> list[float | None]:
    """The result of a reward function as `count` floats; None and NaN stay, and 10⁴⁰⁰ is infinite.

    Raises:
      ResultError: it is not that many numbers.

    Example:
      >>> numbers((1, True, None), 3)
      [1.0, 1.0, None]
    """
    wanted = f"where a list of {count} numbers is wanted"
    if isinstance(result, str | bytes | dict | set | frozenset):
        raise ResultError(f"returned {type(result).__name__} {wanted}")
    try:
        values = iter(result)
    except TypeError:
        raise ResultError(f"returned {type(result).__name__} {wanted}") from None
    scores = [number(value) for value in values]
    if len(scores) != count:
        raise ResultError(f"returned {len(scores)} numbers for {count} completions")
    return scores


def number(value: Any) -> float | None:
    """One score; see `numbers`."""
    if value is None:
        return None
    if isinstance(value, str | bytes):
        raise ResultError(f"returned {value!r} where a number is wanted")
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise ResultError(f"returned {type(value).__name__} where a number is wanted") from None


@functools.cache
def _runner() -> asyncio.Runner:
    """Returns the loop of all calls: clients and locks of a module belong to one loop."""
    return asyncio.Runner()


@functools.cache
def _thread() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(max_workers=1)


def awaited(result: Any) -> Any:
    """Returns the result of a coroutine, or of each in a list, and any other value as it is."""
    several = isinstance(result, list | tuple) and any(map(inspect.isawaitable, result))
    if not (several or inspect.isawaitable(result)):
        return result

    async def wait() -> Any:
        return await (asyncio.gather(*result) if several else result)

    try:
        asyncio.get_running_loop()  # as the thread of a notebook has
    except RuntimeError:
        return _runner().run(wait())
    return _thread().submit(_runner().run, wait()).result()


def answer(
    function: Callable[..., Any], guard: Guard | None, request: dict[str, Any]
) -> dict[str, Any]:
    """The reply to one call: `{"scores": [...]}` or `{"error": text}`."""
    count = len(request["completions"])  # now: the function may change the list
    given, written = (
        list(texts([column for name, column in request.items() if (name in WRITTEN) == wrote]))
        for wrote in (False, True)
    )
    try:
        # Within the guard, since a generator runs when it is read.
        def call() -> list[float | None]:
            return numbers(awaited(function(**request)), count)

        scores = call() if guard is None else guard.call(call, given, written)
        reply = {"scores": scores}
    except ResultError as error:
        reply = {"error": str(error)}
    except BaseException as error:
        reply = {"error": f"raised {workers.describe(error)}"}
    if guard is not None and guard.refused:
        return {
            "error": (
                "tried to run text as code (eval or exec), which is refused while a completion "
                "is scored"
            )
        }
    return reply


def serve(pipe: Connection, function: Callable[..., Any], start: Mapping[str, Any]) -> None:
    """Answers calls of a function until the pipe is closed.

    Args:
      pipe: of requests and replies, see `answer`.
      function: see `Guard` for one of ours.
      start: its `source`, further `arguments`, and the `timeout` of a call.
    """
    ours = start["source"].startswith("jaxrl_po.")
    guard = Guard(vars(sys.modules[function.__module__]).get("harmless") if ours else None)
    function = functools.partial(function, **start["arguments"])
    workers.say(pipe, {})
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        while True:
            request = workers.hear(pipe)
            # A watchdog: if the run was killed, it can no longer kill a call that hangs.
            faulthandler.dump_traceback_later(start["timeout"] + GRACE, exit=True, file=nowhere)
            reply = answer(function, guard, request)
            faulthandler.cancel_dump_traceback_later()
            workers.say(pipe, reply)
