"""The environments of a run, seen from its main process."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_po.run.data import workers
from jaxrl_po.run.experiment.user_code import UserCodeError
from jaxrl_po.run.host.dialogues import instances
from jaxrl_po.run.host.vector_envs import PoolError

Job = Mapping[str, Any]
Result = Mapping[str, Any]


class Offer(NamedTuple):
    """What a class offers.

    Attributes:
      tools: schema of each tool.
      reward: whether it has `get_reward`.
      takes: the columns of a prompt that `reset` is given.
    """

    tools: tuple[Mapping[str, Any], ...]
    reward: bool
    takes: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tools."""
        return tuple(tool["function"]["name"] for tool in self.tools)


class Environments:
    """Instances of a class, by numbers, in children of a worker.

    Args:
      source: `file.py:Class`.
      timeout: limit of each call of a method, seconds.
    """

    def __init__(self, source: str, timeout: float):
        self.source = source
        self._timeout = timeout
        self._process: workers.Process | None = None

    def start(self, columns: Sequence[str]) -> Offer:
        """Imports the class.

        Args:
          columns: of the prompts.

        Raises:
          UserCodeError: it cannot be imported, or lacks what the contract asks for.
        """
        start = {"source": self.source, "timeout": self._timeout, "columns": list(columns)}
        try:
            self._process, found = workers.spawn(instances.__name__, start)
        except workers.Ended as error:
            raise UserCodeError(f"--environment={self.source}: {error}") from None
        return Offer(tuple(found["tools"]), found["reward"], tuple(found["takes"]))

    def run(self, jobs: Mapping[int, Job]) -> dict[int, Result]:
        """The results of one job for each of some environments.

        A job is `{"reset": columns, "seeds": [before, after]}`, to `{"said": text or None}`;
        `{"calls": [{"name", "arguments"}]}`, to `{"results": [{"content", "failed"}]}`; or
        `{"reward": True}`, to `{"reward": number}`. Where that cannot be had, the result is
        `{"error": why}`, or `{"killed": why}` if the process had to be ended.

        Raises:
          PoolError: the worker process has ended.
        """
        if not jobs:
            return {}
        assert self._process is not None
        self._process.send(list(jobs.items()))  # the worker keeps the limits
        try:
            return dict(zip(jobs, self._process.receive(), strict=True))
        except workers.Ended as error:
            raise PoolError(f"environment {self.source}: its worker {error}") from None

    def close(self) -> None:
        """Ends all processes."""
        if self._process is not None:
            self._process.close()
