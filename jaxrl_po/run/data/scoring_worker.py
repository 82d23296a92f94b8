"""Worker process that runs one reward function."""

import asyncio
import concurrent.futures
import faulthandler
import functools
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxrl_po.run.data import workers
from jaxrl_po.run.data.guard import Guard
from jaxrl_po.run.data.workers import Json

# Columns of text by a model, or by its partner in a dialogue; all other columns are data.
WRITTEN = ("completions", "messages")
GRACE = 10.0  # seconds past the time limit after which a worker that was not killed ends itself


class ResultError(Exception):
    """A reward function returned something other than a list of scores."""


def texts(value: object) -> Iterator[str]:
    """Yields all strings inside a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            if type(item) in (str, dict, list):  # most items are token ids, which contain no text
                yield from texts(item)


def parse_scores(result: Any, count: int) -> list[float | None]:
    """Converts a reward's result to `count` floats or Nones; keeps NaN; 10⁴⁰⁰ becomes infinite.

    Raises:
      ResultError: the result does not consist of `count` numbers.

    Example:
      >>> parse_scores((1, True, None), 3)
      [1.0, 1.0, None]
    """
    wanted = f"where a list of {count} numbers is wanted"
    if isinstance(result, str | bytes | dict | set | frozenset):
        raise ResultError(f"returned {type(result).__name__} {wanted}")
    try:
        values = iter(result)
    except TypeError:
        raise ResultError(f"returned {type(result).__name__} {wanted}") from None
    scores = [parse_score(value) for value in values]
    if len(scores) != count:
        raise ResultError(f"returned {len(scores)} numbers for {count} completions")
    return scores


def parse_score(value: Any) -> float | None:
    """Converts a single score to a float or None; see `parse_scores`."""
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
    """Returns the event loop of all calls: clients and locks of a module belong to one loop."""
    return asyncio.Runner()


@functools.cache
def _thread() -> concurrent.futures.Executor:
    return concurrent.futures.ThreadPoolExecutor(max_workers=1)


def awaited(result: Any) -> Any:
    """Awaits a coroutine, or the coroutines in a list; returns any other value unchanged."""
    several = isinstance(result, list | tuple) and any(map(inspect.isawaitable, result))
    if not (several or inspect.isawaitable(result)):
        return result

    async def wait() -> object:
        return await (asyncio.gather(*result) if several else result)

    try:
        asyncio.get_running_loop()  # a running loop exists, for example, in a notebook's thread
    except RuntimeError:
        return _runner().run(wait())
    return _thread().submit(_runner().run, wait()).result()


def answer_request(function: Callable[..., object], guard: Guard | None, request: Json) -> Json:
    """Computes the reply to one call: `{"scores": [...]}` or `{"error": text}`."""
    count = len(request["completions"])  # counted first, since the function may change the list
    given, written = (
        list(texts([column for name, column in request.items() if (name in WRITTEN) == wrote]))
        for wrote in (False, True)
    )
    try:
        # The guard includes the conversion, since a generator's code runs only while it is read.
        def call() -> list[float | None]:
            return parse_scores(awaited(function(**request)), count)

        scores = call() if guard is None else guard.call(call, given, written)
        reply = {"scores": scores}
    except ResultError as error:
        reply = {"error": str(error)}
    except BaseException as error:
        reply = {"error": f"raised {workers.describe_error(error)}"}
    if guard is not None and guard.refused:
        return {
            "error": (
                "tried to run text as code (eval or exec), which is refused while a completion "
                "is scored"
            )
        }
    return reply


def serve(pipe: Connection, function: Callable[..., object], start: Json) -> None:
    """Answers calls of a reward function until the pipe is closed.

    Args:
      pipe: pipe for requests and replies, see `answer_request`.
      function: reward function; a function of this package may define `harmless`, see `Guard`.
      start: first message: `source` and further `arguments` of the function, and the `timeout` of
        a call.
    """
    ours = start["source"].startswith("jaxrl_po.")
    guard = Guard(vars(sys.modules[function.__module__]).get("harmless") if ours else None)
    function = functools.partial(function, **start["arguments"])
    workers.send(pipe, {})
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        while True:
            request = workers.receive(pipe)
            # A watchdog ends a call that hangs if the run was killed and can no longer kill it.
            faulthandler.dump_traceback_later(start["timeout"] + GRACE, exit=True, file=nowhere)
            reply = answer_request(function, guard, request)
            faulthandler.cancel_dump_traceback_later()
            workers.send(pipe, reply)
