"""Worker for instances of a class: each in its own child process, with time limits for methods.

The worker imports the class once and forks a child process for each instance: a child that hangs is
killed, and the other children continue.
"""

import asyncio
import contextlib
import functools
import inspect
import math
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

from jaxrl_po.run.data import workers
from jaxrl_po.run.data.workers import Json
from jaxrl_po.run.host.dialogues import schemas

RESET, REWARD = "reset", "get_reward"
TEXT = "text"  # type of a content block that contains text
AT_ONCE = 64  # number of children that work at the same time
GRACE = 2.0  # seconds past its time limit after which a child is killed
START_LIMIT = 120.0  # seconds allowed for the first instance of a class


class OutOfTime(BaseException):
    """A method exceeded its time limit; not an `Exception`, which a method may catch."""


def serve(pipe: Connection, make: Callable[[], object], start: Json) -> None:
    """Answers requests of `Environments` until the pipe is closed.

    Args:
      pipe: pipe for requests and replies.
      make: `() -> instance`, usually the class itself.
      start: first message: the `columns` for `describe_environment`, and the `timeout` of a method
        call.
    """
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # the system may impose a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every child needs an open pipe
    children = Children(make, start["timeout"], pipe)
    try:
        workers.send(pipe, children.offer(start["columns"]))
        while True:
            workers.send(pipe, children.run(workers.receive(pipe)))
    finally:
        children.close()


class Children:
    """Child processes that each run one instance of the class, by number of the instance.

    Args:
      make: `() -> instance`, usually the class itself.
      limit: time limit of each method call, in seconds.
      pipe: pipe between the worker and the training process.
    """

    def __init__(self, make: Callable[[], object], limit: float, pipe: Connection):
        self._make, self._limit, self._pipe = make, limit, pipe
        self._held: dict[int, workers.Process] = {}

    def offer(self, columns: list[str]) -> object:
        """Calls `describe_environment` in a child: an instance may open files not to be shared.

        If the child fails, the result is an error instead of the description of the tools.
        """
        child = self._fork()
        child.send({"offer": columns}, START_LIMIT, f"took more than {START_LIMIT:g} s")
        try:
            return child.receive()
        except workers.ProcessEnded as error:
            return {"error": f"making an instance of it {error}"}
        finally:
            child.close()

    def run(self, jobs: list[tuple[int, Json]]) -> list[Json]:
        """Runs jobs of different instances, `AT_ONCE` at a time, and returns their results."""
        results: dict[int, dict[str, Any]] = {}
        late = f"did not stop {GRACE:g} s after its limit of {self._limit:g} s"
        waiting, running = jobs[::-1], dict[int, workers.Process]()
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, job = waiting.pop()
                if number not in self._held:
                    self._held[number] = self._fork()
                running[number] = self._held[number]
                running[number].send(job, limit_of(job, self._limit), late)
            first = min(child.deadline or 0.0 for child in running.values())
            pipes = [self._pipe, *(child.pipe for child in running.values())]
            ready = wait(pipes, max(first - time.monotonic(), 0.0))
            if self._pipe in ready:  # the run sends no request before the results, unless it ended
                raise EOFError
            for number, child in list(running.items()):
                if child.pipe in ready or (child.deadline or 0.0) <= time.monotonic():
                    del running[number]
                    try:
                        results[number] = child.receive()
                    except workers.ProcessEnded as error:
                        results[number] = {"killed": str(error)}
                        del self._held[number]
        return [results[number] for number, _ in jobs]

    def _fork(self) -> workers.Process:
        answers = functools.partial(answer_jobs, make=self._make, limit=self._limit)
        return workers.fork(answers, [self._pipe, *(child.pipe for child in self._held.values())])

    def close(self) -> None:
        """Ends all child processes."""
        for child in self._held.values():
            child.close()


def limit_of(job: Json, limit: float) -> float:
    """Returns the seconds after which a job has exceeded the time limits of all its calls."""
    return limit * max(len(job.get("calls", ())), 2 if "reset" in job else 1) + GRACE


def answer_jobs(pipe: Connection, make: Callable[[], object], limit: float) -> None:
    """Answers jobs in a child process until the pipe is closed; see `serve`."""
    signal.signal(signal.SIGALRM, _interrupt)
    held: list[Any] = []
    with contextlib.suppress(EOFError, OSError):
        while True:
            workers.send(pipe, _answer(workers.receive(pipe), held, make, limit))


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise OutOfTime


def _answer(job: Json, held: list[object], make: Callable[[], object], limit: float) -> Json:
    try:
        if "offer" in job:
            return describe_environment(make, job["offer"])
        if "reset" in job:
            if not held:
                seed(0)  # instances are identical, regardless of the time of their creation
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
    except schemas.ToolError as error:
        return {"error": str(error)}
    except BaseException as error:
        raised = f"raised {_reason(error, limit)}"
        return {"error": workers.describe_error(error) if "offer" in job else raised}


def describe_environment(make: Callable[[], object], columns: list[str]) -> Json:
    """Returns the schemas of an environment's tools, and the columns that its reset takes.

    Raises:
      ToolError: the environment lacks a required method or parameter, which the message names.
    """
    environment = make()
    methods = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in methods]
    if RESET not in names:
        raise schemas.ToolError(f"the class lacks the method {RESET}")
    takes = set[str]()
    for each in inspect.signature(getattr(environment, RESET)).parameters.values():
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL):
            takes.update(columns if each.kind is each.VAR_KEYWORD else ())
        elif each.name in columns:
            takes.add(each.name)
        elif each.default is each.empty:
            raise schemas.ToolError(
                f"{RESET} takes {each.name!r}, which is no column of the prompts: "
                f"{', '.join(columns)}"
            )
    tools = [
        schemas.schema_of(getattr(environment, name), name)
        for name in names
        if name[0] != "_" and name not in (RESET, REWARD)
    ]
    return {"tools": tools, "reward": REWARD in names, "takes": sorted(takes)}


def _call(environment: object, call: Json, limit: float) -> Json:
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
    """Returns the result of a function, or of a coroutine, within `limit` seconds.

    Raises:
      OutOfTime: the call took longer than `limit` seconds.
    """
    signal.setitimer(signal.ITIMER_REAL, limit)
    try:
        result = function(**arguments)
        return asyncio.run(result) if inspect.iscoroutine(result) else result
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def content(result: Any) -> str:
    """Converts a method's result to the text of a message; text blocks are concatenated.

    Example:
      >>> content(3), content([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
      ('3', 'ab')
    """
    blocks = isinstance(result, list) and result
    if blocks and all(isinstance(one, dict) and one.get("type") == TEXT for one in result):
        result = "".join(str(one[TEXT]) for one in result)
    return str(result).encode(errors="replace").decode()  # half a surrogate pair has no tokens


def seed(number: int) -> None:
    """Seeds `random`, and NumPy's generator if some module has imported NumPy."""
    random.seed(number)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(number % 2**32)
