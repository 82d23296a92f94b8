"""The process that holds the environments of a run, each in a child of its own.

It is started as a script, so that neither JAX nor the main program is imported. It imports the
user's class once and forks a child for each environment: one that hangs is killed, and the others
go on. It exchanges JSON through a pipe.
"""

import contextlib
import importlib.util
import inspect
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING or __name__ != "__main__":
    from jaxrl_po.run.data import scoring_worker
    from jaxrl_po.run.host.dialogues import child, schemas
else:  # by their files: the package `run` would import JAX

    def _beside(path: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"_{Path(path).stem}", HERE / path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    HERE = Path(__file__).parent
    scoring_worker = _beside("../../data/scoring_worker.py")
    child, schemas = _beside("child.py"), _beside("schemas.py")

AT_ONCE = 64  # environments that run at a time
GRACE = 2.0  # seconds past its limit after which an environment is killed
START_LIMIT = 120.0  # seconds for the first instance of a class


class Child(NamedTuple):
    """A forked process and our end of its pipe."""

    pid: int
    pipe: Connection


class Children:
    """The processes of the environments, by their numbers.

    Args:
      make: makes an environment.
      limit: of each call of a method, seconds.
      pipe: of the worker itself, which they close: else the run could not see that it has ended.
    """

    def __init__(self, make: Callable[[], Any], limit: float, pipe: Connection):
        self._make, self._limit, self._pipe = make, limit, pipe
        self._held: dict[int, Child] = {}

    def run(self, jobs: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
        """The results of jobs of different environments, `AT_ONCE` of them at a time."""
        results: dict[int, dict[str, Any]] = {}
        waiting, running = jobs[::-1], dict[Connection, tuple[int, float]]()
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number, job = waiting.pop()
                held = self._child(number)
                deadline = time.monotonic() + limit_of(job, self._limit)
                try:
                    held.pipe.send_bytes(json.dumps(job).encode())
                except OSError:
                    results[number] = self._end(number, None)
                else:
                    running[held.pipe] = number, deadline
            first = min((deadline for _, deadline in running.values()), default=0.0)
            for pipe in wait([*running, self._pipe], max(first - time.monotonic(), 0.0)):
                assert isinstance(pipe, Connection)
                if pipe is self._pipe:  # no request comes before the results: the run has ended
                    raise EOFError
                number, _ = running.pop(pipe)
                try:
                    results[number] = json.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    results[number] = self._end(number, None)
            for pipe, (number, deadline) in list(running.items()):
                if deadline <= time.monotonic():
                    del running[pipe]
                    results[number] = self._end(number, self._limit)
        return [results[number] for number, _ in jobs]

    def _child(self, number: int) -> Child:
        if number not in self._held:
            ours, theirs = Pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    ours.close()
                    self._pipe.close()
                    for other in self._held.values():
                        other.pipe.close()
                    child.serve(theirs, self._make, self._limit)
                finally:
                    os._exit(1)  # whatever happens, it must not go on as the worker
            theirs.close()
            self._held[number] = Child(pid, ours)
        return self._held[number]

    def _end(self, number: int, limit: float | None) -> dict[str, Any]:
        """Ends a child, with what it started; says why."""
        held = self._held.pop(number)
        held.pipe.close()
        status = end(held.pid)
        if limit is None:
            return {"killed": f"ended its process, with status {status}"}
        return {"killed": f"did not stop {GRACE:g} s after its limit of {limit:g} s"}

    def close(self) -> None:
        """Ends all."""
        for number in list(self._held):
            self._end(number, None)


def end(pid: int) -> int:
    """Kills a child and the group that it leads; its exit status."""
    for kill in (os.killpg, os.kill):
        # It may have ended, or have no group of its own yet.
        with contextlib.suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def limit_of(job: dict[str, Any], limit: float) -> float:
    """Seconds after which a job is past all of its limits."""
    return limit * max(len(job.get("calls", ())), 2 if "reset" in job else 1) + GRACE


def describe(make: Callable[[], Any], columns: list[str]) -> dict[str, Any]:
    """What an environment offers: schemas of its tools, and the columns that its reset takes.

    Raises:
      ToolError: names what it lacks.
    """
    environment = make()
    methods = inspect.getmembers(type(environment), inspect.isfunction)
    names = [name for name, _ in methods]
    if child.RESET not in names:
        raise schemas.ToolError(f"the class lacks the method {child.RESET}")
    parameters = inspect.signature(getattr(environment, child.RESET)).parameters.values()
    kinds = {each.kind for each in parameters}
    named = [
        each for each in parameters if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]
    takes = columns if inspect.Parameter.VAR_KEYWORD in kinds else []
    for each in named:
        if each.name in columns:
            takes = [*takes, each.name]
        elif each.default is each.empty:
            raise schemas.ToolError(
                f"{child.RESET} takes {each.name!r}, which is no column of the prompts: "
                f"{', '.join(columns)}"
            )
    tools = [
        schemas.schema_of(getattr(environment, name), name)
        for name in names
        if name[0] != "_" and name not in (child.RESET, child.REWARD)
    ]
    return {
        "tools": tools,
        "reward": child.REWARD in names,
        "takes": sorted(set(takes)),
    }


def inquire(make: Callable[[], Any], columns: list[str]) -> dict[str, Any]:
    """`describe` in a child, for the instance may open what must not be shared; or an error."""
    ours, theirs = Pipe()
    pid = os.fork()
    if pid == 0:
        os.setsid()  # what an instance starts is ended with it
        try:
            try:
                found = describe(make, columns)
            except schemas.ToolError as error:
                found = {"error": str(error)}
            except BaseException as error:
                found = {"error": scoring_worker.describe(error)}
            theirs.send_bytes(json.dumps(found).encode())
        finally:
            os._exit(0)
    theirs.close()
    try:
        if ours.poll(START_LIMIT):
            said: dict[str, Any] = json.loads(ours.recv_bytes())
            return said
        return {"error": f"no instance of it was made within {START_LIMIT:g} s"}
    except EOFError:
        return {"error": "making an instance of it ended its process"}
    finally:
        end(pid)


def serve(pipe: Connection) -> None:
    """Answers requests until the pipe is closed."""
    # Ctrl-C reaches every process of the terminal, but the run still needs this one for its chunk.
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # where the system has a lower limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a pipe for each environment
    start = json.loads(pipe.recv_bytes())
    sys.path[:] = start["path"]
    try:
        make = scoring_worker.load(start["source"])
    except BaseException as error:
        pipe.send_bytes(json.dumps({"error": scoring_worker.describe(error)}).encode())
        return
    found = inquire(make, start["columns"])
    pipe.send_bytes(json.dumps(found).encode())
    children = Children(make, start["timeout"], pipe)
    try:
        while True:
            request = json.loads(pipe.recv_bytes())
            results = children.run([(number, job) for number, job in request["jobs"]])
            pipe.send_bytes(json.dumps({"results": results}).encode())
    finally:
        children.close()


def main() -> None:
    """Entry point: the first argument is the file descriptor of the pipe."""
    try:
        serve(Connection(int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the run has ended


if __name__ == "__main__":
    main()
