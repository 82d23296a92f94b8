"""The process of one environment: it runs its methods, each within a time limit.

The module is read by a worker process, so it imports the standard library only.
"""

import asyncio
import inspect
import json
import math
import os
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

RESET, REWARD = "reset", "get_reward"
TEXT = "text"  # type of a block of content that holds text


class OutOfTime(BaseException):
    """A method took too long; not an `Exception`, which a method may catch."""


def serve(pipe: Connection, make: Callable[[], Any], limit: float) -> None:
    """Answers jobs until the pipe is closed; never returns.

    Args:
      pipe: of JSON messages, jobs to results.
      make: makes the environment, at the first job.
      limit: of each call of a method, seconds.
    """
    os.setsid()  # what a tool starts is ended with it
    for each in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # the worker's own would be inherited
        signal.signal(each, signal.SIG_DFL)
    signal.signal(signal.SIGALRM, _interrupt)
    held: list[Any] = []
    try:
        while True:
            job = json.loads(pipe.recv_bytes())
            pipe.send_bytes(json.dumps(_answer(job, held, make, limit)).encode())
    except (EOFError, OSError):
        os._exit(0)


def _interrupt(number: int, frame: Any) -> None:
    raise OutOfTime


def _answer(
    job: dict[str, Any], held: list[Any], make: Callable[[], Any], limit: float
) -> dict[str, Any]:
    try:
        if "reset" in job:
            if not held:
                seed(0)  # instances are alike, whenever they are made
                held.append(timed(limit, make))
            seed(job["seeds"][0])
            said = timed(limit, getattr(held[0], RESET), **job["reset"])
            seed(job["seeds"][1])
            return {"said": None if said is None else content(said)}
        if "calls" in job:
            return {"results": [_call(held[0], call, limit) for call in job["calls"]]}
        reward = float(timed(limit, getattr(held[0], REWARD)))
        if not math.isfinite(reward):
            return {"error": f"{REWARD} returned {reward}"}
        return {"reward": reward}
    except BaseException as error:
        return {"error": f"raised {_reason(error, limit)}"}


def _call(environment: Any, call: dict[str, Any], limit: float) -> dict[str, Any]:
    try:
        result = timed(limit, getattr(environment, call["name"]), **call["arguments"])
        return {"content": content(result), "failed": False}
    except BaseException as error:
        plain = isinstance(error, Exception)
        return {
            "content": str({"error": str(error) if plain else _reason(error, limit)}),
            "failed": True,
        }


def _reason(error: BaseException, limit: float) -> str:
    if isinstance(error, OutOfTime):
        return f"no result within {limit:g} seconds"
    return f"{type(error).__name__}: {error}"


def timed(limit: float, function: Callable[..., Any], /, **arguments: Any) -> Any:
    """The result of a function, or of a coroutine, within `limit` seconds.

    Raises:
      OutOfTime: it took longer.
    """
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        result = function(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def content(result: Any) -> str:
    """What a method returned, as the text of a message; that of blocks of text is joined.

    Example:
      >>> content(3), content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
      ('3', 'ab')
    """
    blocks = isinstance(result, list) and result
    if blocks and all(isinstance(one, dict) and one.get("type") == TEXT for one in result):
        result = "".join(str(one[TEXT]) for one in result)
    return str(result).encode(errors="replace").decode()  # half a character cannot be tokenised


def seed(number: int) -> None:
    """Seeds `random`, and NumPy's where a file has imported it."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
