"""Reward functions in Python: called on text, between `sample` and `update` of a learner.

Each reward function runs in its own process, `scoring_worker`, so that a call that exceeds its time
limit can be killed, which is impossible in a thread. As in TRL's GRPOTrainer, a function is called
with keyword arguments (prompts, completions, columns of the task) and returns a number per
completion.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, Json, PythonObject, check_number
from jaxrl_po.language.evaluation import Answers
from jaxrl_po.language.problem import give_reward
from jaxrl_po.language.tasks import Task
from jaxrl_po.masked import Mean
from jaxrl_po.run.data import scoring_worker, workers
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.store import sources
from jaxrl_po.types import Batch, Metrics, PyTree

FAILURES, FAILED = "reward_failures", "evaluation_failures"  # metric of training, of evaluations
ABSENT = ""  # key under which the message about completions that no function scored is stored

Columns = Mapping[str, Sequence[Any]]
"""Columns by name: a list with one JSON value per completion."""
Floats = npt.NDArray[np.float32]


@runtime_checkable
class Scorer(Protocol):
    """A reward that is computed on the host, between `sample` and `update` of a learner.

    If a scorer is a context manager, its context lasts from the start to the end of the run.
    """

    def score_batch(
        self, batch: Batch, *, first: bool, report: Callable[[str], None]
    ) -> tuple[Batch, Metrics]:
        """Returns the batch with `score` and `reward` filled in, and metrics `[S]`.

        Args:
          batch: batch stacked over S seeds, without a reward; see `language.give_reward`.
          first: whether the batch is the first of the run, whose failures should end the run.
          report: `(line) -> None`, called with each line that the user should see.
        """


def opened(scorer: Scorer | None) -> contextlib.AbstractContextManager[object]:
    """Returns the scorer itself if it is a context manager, or else a null context."""
    if isinstance(scorer, contextlib.AbstractContextManager):
        return scorer
    return contextlib.nullcontext()


class RewardError(RunError):
    """A reward function failed or cannot be loaded; the message names the function."""


class Reward(NamedTuple):
    """A reward function and its weight.

    Attributes:
      source: name of the function, `file.py:function` or `module:function`.
      weight: factor of the function's score in the reward, which is the sum over functions.
      arguments: keyword arguments of each call, besides the columns.
    """

    source: str
    weight: float = 1.0
    arguments: Mapping[str, Any] = {}

    @property
    def name(self) -> str:
        """Returns the name of the function, which also names the function's metrics."""
        return self.source.rpartition(":")[2]


class Scores(NamedTuple):
    """Result of one call of a reward function.

    Attributes:
      values: scores `[B]`: 0 if the function failed, NaN if the function returned None instead.
      failed: `[B]`, bool, true for the completions on which the function failed.
      why: reason of the failure; empty if the call succeeded.
    """

    values: Floats
    failed: npt.NDArray[np.bool_]
    why: str = ""


class ScoredCompletions(NamedTuple):
    """Scores of completions by all reward functions, `[S, B]`.

    Attributes:
      raw: raw scores; NaN, as in the other fields, if every function returned None.
      reward: weighted sum over the functions that returned a score.
      measures: values `[S, B]` by name of the metric; the log contains their means.
    """

    raw: Floats
    reward: Floats
    measures: dict[str, npt.NDArray[Any]]


class InProcessFunction:
    """A function passed in Python, called in the training process: a hanging call never ends.

    Args:
      function: reward function, see `Reward`.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function, self._message = function, ""

    def send(self, message: object, limit: float | None = None, late: str = "") -> None:
        """Stores the request as JSON, as another process would receive the request."""
        self._message = json.dumps(message)

    def receive(self) -> Json:
        """Calls the function on the stored request and returns the reply."""
        return scoring_worker.answer_request(self._function, None, json.loads(self._message))

    def close(self) -> None:
        """Does nothing, since no process needs to end."""


class Worker:
    """A reward function in its own process, which is restarted after it was killed or died.

    Args:
      source: name of the function, see `Reward`; a function passed in Python runs in the training
        process.
      timeout: time limit of one call, in seconds.
      arguments: keyword arguments of each call, see `Reward`.
    """

    def __init__(self, source: str, timeout: float, arguments: Mapping[str, object] = {}):
        self._source, self._timeout, self._arguments = source, timeout, arguments
        self._process: workers.Process | InProcessFunction | None = None
        self._asked = (0, "")  # number of completions in the pending call, and reason of a failure

    def start(self) -> None:
        """Starts the process and loads the function, unless the process is already running.

        Raises:
          RewardError: the function cannot be loaded.
        """
        if isinstance(self._source, PythonObject):
            self._process = InProcessFunction(self._source.value)
        elif self._source.startswith(sources.OWN):
            raise RewardError(sources.missing("reward", self._source))
        if self._process is None:
            start = {"source": self._source, "timeout": self._timeout, "arguments": self._arguments}
            try:
                self._process, _ = workers.spawn(scoring_worker.__name__, start)
            except workers.ProcessEnded as error:
                raise RewardError(f"{self._source} cannot be loaded: {error}") from None

    def ask(self, columns: Columns, count: int) -> None:
        """Starts a call on `count` completions; the time limit of the call starts now."""
        self._asked = count, ""
        try:
            self.start()
        except RewardError as error:
            self._asked = count, str(error)
        if self._process is not None:
            late = f"did not return within {self._timeout:g} s"
            self._process.send(columns, self._timeout, late)

    def take(self) -> Scores:
        """Waits for the result of the pending call, at most until the time limit of the call."""
        count, why = self._asked
        reply = {"error": why}
        if self._process is not None:
            try:
                reply = self._process.receive()
            except workers.ProcessEnded as error:
                reply, self._process = {"error": str(error)}, None
        if "error" in reply:
            return Scores(np.zeros(count, np.float32), np.ones(count, bool), reply["error"])
        absent = np.array([score is None for score in reply["scores"]], bool)
        with np.errstate(over="ignore"):
            values = np.array(reply["scores"], np.float64).astype(np.float32)
        failed = ~np.isfinite(values) & ~absent
        why = (
            f"returned {values[failed][0]} for {failed.sum()} of {count} completions"
            if failed.any()
            else ""
        )
        return Scores(np.where(failed, np.float32(0.0), values), failed, why)

    def close(self) -> None:
        """Ends the process of the reward function."""
        if self._process is not None:
            self._process.close()
        self._process = None


class HostScore:
    """A `Scorer` that calls reward functions on the text of completions.

    The functions run concurrently. Each function is called once per seed, so that a seed's rewards
    do not depend on the other seeds. The reward is Σ weight · score, at the last token. The raw
    score is the first function's score; the raw scores decide which groups are informative.

    If a function fails (raises an error, exceeds its time limit, or returns something other than a
    finite number per completion), the score is 0. On the first batch of a run, a failure is an
    error instead. If a function returns None for a completion, only the other functions score that
    completion; if all functions return None, the completion is ignored; see `language.give_reward`.

    Args:
      rewards: at least one reward function, with different names.
      task: task whose columns are passed to the functions; if the task has no columns, its
        demonstration is passed as `answer`.
      timeout: time limit of one call, in seconds.
      require_end: whether raw score and reward are 0 for a completion that does not end within its
        token budget.

    Metrics:
      `accuracy` (the raw score), `wrong_length` (tokens of the completions with raw score 0),
      `dead_groups` (share of the groups whose raw scores are all equal), `reward/<name>` (score of
      each function), `reward` (weighted sum of the scores), `reward_failures` (share of the
      completions on which any function failed).

    Raises:
      ConfigError: an argument is invalid; the error names that argument.
    """

    def __init__(
        self,
        rewards: Sequence[Reward],
        task: Task,
        *,
        timeout: float = 60.0,
        require_end: bool = False,
    ):
        check_rewards(rewards)
        self._rewards, self._tokenizer = tuple(rewards), task.tokenizer
        self._columns = task.columns or demonstrated_answers(task)
        self._require_end = require_end
        self._workers = [Worker(each.source, timeout, each.arguments) for each in rewards]
        self._reported: set[str | tuple[str, str]] = set()
        self._say: Callable[[str], None] = functools.partial(print, flush=True)

    def __enter__(self) -> "HostScore":
        """Loads the functions; raises ConfigError if a function cannot be loaded."""
        try:
            for worker in self._workers:
                worker.start()
        except RewardError as error:
            self.__exit__()
            raise ConfigError("reward", str(error)) from None
        return self

    def __exit__(self, *failure: object) -> None:
        """Ends the worker processes of all functions."""
        for worker in self._workers:
            worker.close()

    def score_batch(
        self, batch: Batch, *, first: bool, report: Callable[[str], None]
    ) -> tuple[Batch, Metrics]:
        """Scores a batch as `Scorer` specifies; leaves of `batch` lead with `[S]`.

        Args:
          batch: batch stacked over seeds, without a reward.
          first: whether the batch is the first of the run.
          report: `(line) -> None`, called when a function fails for the first time.

        Raises:
          RewardError: a function fails on the first batch.
        """
        self._say = report
        tokens, pad, action, mask = (
            np.asarray(x) for x in (batch.inputs.tokens, batch.inputs.pad, batch.action, batch.mask)
        )
        problem = jax.tree.map(np.asarray, batch.inputs.problem)
        prompt_length = tokens.shape[2] - action.shape[2]
        columns = [
            self._read(
                tokens[seed, :, :prompt_length],
                pad[seed],
                action[seed],
                mask[seed],
                jax.tree.map(lambda x, seed=seed: x[seed], problem),
            )
            for seed in range(len(tokens))
        ]
        scored = self.score(columns, action.shape[1], first=first, report=report)
        if self._require_end:
            cut = np.asarray(batch.truncated).any(axis=2)
            raw, reward = (np.where(cut, np.float32(0.0), x) for x in scored[:2])
            scored = ScoredCompletions(raw, reward, scored.measures | {"reward": reward})
        means = {"accuracy": scored.raw, **scored.measures}
        if batch.score.shape[2] > 1:
            means["dead_groups"] = _equal(scored.raw.reshape(batch.score.shape))
        metrics = {name: _mean(values) for name, values in means.items()}
        metrics["wrong_length"] = _mean(mask.sum(axis=2), scored.raw == 0)
        return give_reward(batch, scored.raw, scored.reward), metrics

    def score(
        self, columns: Sequence[Columns], count: int, *, first: bool, report: Callable[[str], None]
    ) -> "ScoredCompletions":
        """Calls the reward functions, once per seed.

        Args:
          columns: keyword arguments of the functions, for each seed.
          count: number B of completions per seed.
          first: whether the batch is the first of the run, see `Scorer`.
          report: `(line) -> None`, called with lines for the user, see `Scorer`.

        Raises:
          RewardError: a function fails in the first call of the run.
        """
        by_seed = []
        for given in columns:
            # Send all requests before waiting for a reply, so that the functions run concurrently.
            for worker in self._workers:
                worker.ask(given, count)
            by_seed.append([worker.take() for worker in self._workers])
            for reward, scores in zip(self._rewards, by_seed[-1], strict=True):
                failure = f"reward function {reward.source} {scores.why}"
                if scores.why and first:
                    raise RewardError(f"{failure}; this is the first batch, so the run ends here")
                if scores.why:
                    counted = f"such completions score 0 and are counted in {FAILURES}"
                    self._once(reward.name, f"{failure}; {counted}", report)
        values = np.stack([[scores.values for scores in each] for each in by_seed], axis=1)
        failed = np.stack([np.any([scores.failed for scores in each], axis=0) for each in by_seed])
        absent = np.isnan(values).all(axis=0)
        if absent.any():
            which = f"{absent.sum()} of {absent.size} completions"
            why = "each returned None for them; they take no part"
            self._once(ABSENT, f"no reward function judges {which}: {why}", report)
        weights = np.array([reward.weight for reward in self._rewards], np.float32)
        summed = np.nansum(weights[:, None, None] * values, axis=0, dtype=np.float32)
        total = np.where(absent, np.float32(np.nan), summed)
        measures = {"reward": total, FAILURES: failed}
        measures |= {
            f"reward/{each.name}": x for each, x in zip(self._rewards, values, strict=True)
        }
        raw = functools.reduce(lambda a, b: np.where(np.isnan(a), b, a), values)
        return ScoredCompletions(raw, total, measures)

    @property
    def measures(self) -> tuple[str, ...]:
        """Returns the names of the measures that `score` computes."""
        return ("reward", FAILURES, *(f"reward/{reward.name}" for reward in self._rewards))

    def score_answers(self, answers: Answers) -> tuple[Answers, npt.NDArray[np.bool_]]:
        """Scores the answers of one seed by the first function, whose score is the raw score.

        Answers for which the first function returns None are scored by the next functions, in
        order.

        Returns:
          The answers, with score NaN if every function returned None or a function failed; and a
          mask of the failures, `[n, samples]`.

        Raises:
          RewardError: the function failed on all of the answers.
        """
        host: Any = jax.tree.map(np.asarray, answers)
        count, samples, budget = host.tokens.shape
        repeated: Any = jax.tree.map(lambda x: np.repeat(x, samples, axis=0), host)
        columns = self._read(
            repeated.prompt,
            repeated.pad,
            host.tokens.reshape(-1, budget),
            np.arange(budget) < host.length.reshape(-1, 1),
            repeated.problem,
        )
        values = np.full(count * samples, np.nan, np.float32)
        failed = np.zeros(count * samples, bool)
        for reward, worker in zip(self._rewards, self._workers, strict=True):
            if (pending := np.isnan(values) & ~failed).any():
                worker.ask(columns, count * samples)
                scores = worker.take()
                if scores.failed.all() and np.isnan(values).all():
                    raise RewardError(f"reward={reward.name} {scores.why} in an evaluation")
                if scores.why:
                    line = (
                        f"reward function {reward.source} {scores.why} in an evaluation; such rows "
                        f"are left out of its mean and counted in {FAILED}"
                    )
                    self._once((reward.name, FAILED), line, self._say)
                failed |= pending & scores.failed
                values = np.where(pending & ~scores.failed, scores.values, values)
        score = values.reshape(count, samples)
        if self._require_end:
            score = np.where(host.ended, score, np.float32(0.0))
            failed &= host.ended.reshape(-1)
        scored: Answers = host._replace(score=score)
        return scored, failed.reshape(count, samples)

    def _read(
        self,
        prompts: npt.NDArray[Any],
        pad: npt.NDArray[Any],
        tokens: npt.NDArray[Any],
        mask: npt.NDArray[np.bool_],
        problem: PyTree,
    ) -> Json:
        """Returns the functions' keyword arguments for one seed's completions, as lists `[B]`."""
        return {
            "prompts": self._tokenizer.decode_rows(
                prompts, np.arange(prompts.shape[1]) >= pad[:, None]
            ),
            "completions": self._tokenizer.decode_rows(tokens, mask),
            "completion_ids": [
                row[:n].tolist() for row, n in zip(tokens, mask.sum(axis=1), strict=True)
            ],
            **self._columns(problem),
        }

    def _once(self, key: str | tuple[str, str], line: str, report: Callable[[str], None]) -> None:
        if key not in self._reported:
            self._reported.add(key)
            report(line)


def demonstrated_answers(task: Task) -> Callable[[PyTree], Json]:
    """Returns `problem [B, …] -> {"answer": texts}`, for a task that has no columns."""
    demonstrate = jax.jit(jax.vmap(task.demonstrate))

    def columns(problem: PyTree) -> Json:
        tokens = np.asarray(demonstrate(problem))
        return {"answer": task.tokenizer.decode_rows(tokens, tokens != task.tokenizer.pad)}

    return columns


def check_rewards(rewards: Sequence[Reward]) -> None:
    """Raises ConfigError for invalid reward functions, without loading the functions."""
    names = [reward.name for reward in rewards]
    for reward in rewards:
        place = reward.source.rpartition(":")[0]
        if not (place and reward.name.isidentifier()):
            raise ConfigError(
                "reward",
                f"must read like file.py:function or module:function, got {reward.source!r}",
            )
        if place.endswith(".py") and not Path(place).is_file():
            raise ConfigError("reward", f"{reward.source}: there is no file {place}")
        check_number("reward_weights", reward.weight)
        if names.count(reward.name) > 1:
            raise ConfigError("reward", f"names {reward.name} twice: give different names")


def _equal(score: Floats) -> Floats:
    """Returns whether each group `[S, P, G]` has equal scores; NaN for a group without scores."""
    spread = np.fmax.reduce(score, axis=-1) - np.fmin.reduce(score, axis=-1)
    return np.where(np.isnan(spread), spread, spread == 0.0)


def _mean(values: npt.NDArray[Any], counted: npt.NDArray[np.bool_] | None = None) -> Mean:
    """Averages values `[S, B]` per seed where `counted` is true; by default, ignores only NaN."""
    counted = ~np.isnan(values) if counted is None else counted
    total = np.where(counted, values, 0).sum(axis=1, dtype=np.float32)
    return Mean(total, counted.sum(axis=1, dtype=np.float32))
