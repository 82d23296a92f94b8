"""Dialogues with environments in Python, whose methods are tools: processes and replies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import Json, Values
from jaxrl_po.language.pretrained.tools import ASSISTANT, TOOL, USER, Call, Message, Tools
from jaxrl_po.masked import Mean
from jaxrl_po.run.data import workers
from jaxrl_po.run.data.scoring import Floats, HostScore, RewardError
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.host.dialogues import instances
from jaxrl_po.run.host.dialogues.engine import DialogueEpisode, DialogueOutcomes, Reporter
from jaxrl_po.run.host.vector_envs import PoolError

UNKNOWN = "unknown"  # placeholder for a call to an unknown tool
CALLS, FAILED, CUT, KILLED, FAILURES = MEASURES = (
    "calls",
    "failed_calls",
    "cut_replies",
    "killed",
    "environment_failures",
)


class ToolSpec(NamedTuple):
    """Tools of a user-defined class, and the optional parts of the class's interface.

    Attributes:
      tools: JSON schema of each tool.
      reward: whether the class has the method `get_reward`.
      takes: names of the prompt's columns that `reset` takes as arguments.
    """

    tools: tuple[Mapping[str, Any], ...]
    reward: bool
    takes: tuple[str, ...]


class Environments:
    """Instances of a user-defined class, by number, in child processes of a worker process.

    Args:
      source: name of the class, `file.py:Class`.
      timeout: time limit of each method call, in seconds.
    """

    def __init__(self, source: str, timeout: float):
        self.source = source
        self._timeout = timeout
        self._process: workers.Process | None = None

    def start(self, columns: Sequence[str]) -> ToolSpec:
        """Imports the class in the worker process and returns the tools of the class.

        Args:
          columns: Names of the columns of the prompts.

        Raises:
          UserCodeError: the class cannot be imported, or does not implement the tools' interface.
        """
        start = {"source": self.source, "timeout": self._timeout, "columns": list(columns)}
        try:
            self._process, found = workers.spawn(instances.__name__, start)
        except workers.ProcessEnded as error:
            raise UserCodeError("tools", f"{self.source}: {error}") from None
        return ToolSpec(tuple(found["tools"]), found["reward"], tuple(found["takes"]))

    def run(self, jobs: Mapping[int, Values]) -> dict[int, Values]:
        """Runs one job in each of several environments and returns the results.

        The job `{"reset": columns, "seeds": [before, after]}` starts an episode, with the seeds of
        the constructor and of the reset, and returns the first message, `{"said": text or None}`;
        `{"calls": [{"name", "arguments"}]}` returns `{"results": [{"content", "failed"}]}`; and
        `{"reward": True}` returns `{"reward": number}`. If a job fails, its result is
        `{"error": why}`, or `{"killed": why}` if the process had to be killed.

        Raises:
          PoolError: the worker process has ended.
        """
        if not jobs:
            return {}
        assert self._process is not None
        self._process.send(list(jobs.items()))  # the worker enforces the time limits
        try:
            return dict(zip(jobs, self._process.receive(), strict=True))
        except workers.ProcessEnded as error:
            raise PoolError(f"tools {self.source}: the worker {error}") from None

    def close(self) -> None:
        """Ends the worker process and all of its children."""
        if self._process is not None:
            self._process.close()


class Transcript:
    """Messages of a dialogue after its prompt, with counts of tool calls; empty for unused rows."""

    def __init__(self, episode: DialogueEpisode | None, dead: str = ""):
        self.held, self.row = episode is not None, 0 if episode is None else episode.row
        self.dead, self.failure, self.ended = dead, dead, bool(dead) or episode is None
        self.killed = False
        self.messages: list[dict[str, Any]] = []
        self.calls = self.failed = self.replies = self.cut = 0


class ToolEnv:
    """Environments of a user-defined class, whose public methods are tools.

    Args:
      environments: instances of the class, already started.
      spec: tools of the class.
      tools: format of tools in the chat template.
      rows: columns of each prompt, with the messages of the prompt as `prompt`.
      reply_length: maximal number R of tokens in a reply, and in the text that a reset adds to a
        prompt; longer texts are cut.
      reward_fn: functions of `--reward`, whose rewards are added to `get_reward`; None to disable.
    """

    def __init__(
        self,
        environments: Environments,
        spec: ToolSpec,
        tools: Tools,
        rows: Sequence[Values],
        *,
        reply_length: int,
        reward_fn: HostScore | None = None,
    ):
        self._environments, self._spec, self._tools = environments, spec, tools
        self._rows, self._reply_length, self._reward_fn = rows, reply_length, reward_fn
        self._transcripts: list[Transcript] = []
        self._num_seeds = 1
        self._reported: set[str] = set()
        self.names = (*MEASURES, *(reward_fn.measures if reward_fn else ()))

    def close(self) -> None:
        """Closes the environments."""
        self._environments.close()

    def begin(self, episodes: Sequence[DialogueEpisode | None], num_seeds: int) -> list[list[int]]:
        """Resets the environments; the text of a reset is added to the user's last message."""
        self._num_seeds = num_seeds
        results = self._environments.run(
            {
                number: {
                    "reset": {name: self._rows[episode.row][name] for name in self._spec.takes},
                    "seeds": list(episode.seeds),
                }
                for number, episode in enumerate(episodes)
                if episode is not None
            }
        )
        self._transcripts, prompts = [], []
        for number, episode in enumerate(episodes):
            result = results.get(number, {})
            why = result.get("error") or result.get("killed") or ""
            talk = Transcript(episode, f"reset {why}" if why else "")
            talk.killed = "killed" in result
            self._transcripts.append(talk)
            said = result.get("said") or ""
            prompts.append(self._prompt(talk, said) if talk.held else [self._tools.tokenizer.pad])
        return prompts

    def _prompt(self, talk: Transcript, said: str) -> list[int]:
        messages = self._rows[talk.row]["prompt"]
        limit = len(self._tools.prompt(messages)) + self._reply_length

        def written(texts: list[str]) -> list[int]:
            return self._tools.prompt(with_observation(messages, texts[0]))

        ids, cut = cut_to_fit(written, [said], limit, self._tools)
        talk.replies, talk.cut = talk.replies + bool(said), talk.cut + cut
        return ids

    def answer(self, messages: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Runs the tools that messages call; a message without a tool call ends its dialogue."""
        asked: dict[int, tuple[Sequence[int], list[Call]]] = {}
        for number, (message, talk) in enumerate(zip(messages, self._transcripts, strict=True)):
            if message is None:
                continue
            text = self._tools.text(message)
            talk.messages.append({"role": ASSISTANT, "content": text})
            calls = [] if talk.dead else self._tools.calls(text)
            talk.ended = not calls
            if calls:
                asked[number] = message, calls
        sound = {
            number: [{"name": c.name, "arguments": c.arguments} for c in calls if not c.error]
            for number, (_, calls) in asked.items()
        }
        results = self._environments.run(
            {number: {"calls": calls} for number, calls in sound.items() if calls}
        )
        return [
            self._reply(talk, *asked[number], results.get(number, {})) if number in asked else None
            for number, talk in enumerate(self._transcripts)
        ]

    def _reply(
        self, talk: Transcript, message: Sequence[int], calls: Sequence[Call], result: Values
    ) -> list[int] | None:
        talk.calls += len(calls)
        if why := result.get("killed") or result.get("error"):
            talk.dead, talk.killed, talk.ended, talk.failed = why, True, True, talk.failed + 1
            return None
        answers = iter(result.get("results", ()))
        said = []
        for call in calls:
            name = call.name if call.name in self._tools.names else UNKNOWN
            unread: Values = {"content": str({"error": call.error}), "failed": True}
            answer = unread if call.error else next(answers)
            talk.failed += answer["failed"]
            said.append({"role": TOOL, "name": name, "content": answer["content"]})
        talk.messages += said
        ids, cut = self._fitted(said)
        talk.replies, talk.cut = talk.replies + 1, talk.cut + cut
        ends = self._tools.tokenizer.ends
        # The reply starts with the end-of-message token, unless the policy has already written it.
        return ids[1:] if ids[0] in ends and message[-1] in ends else ids

    def _fitted(self, said: Sequence[Message]) -> tuple[list[int], bool]:
        """Shortens a reply to R tokens, last results first; returns whether it was shortened."""

        def written(texts: list[str]) -> list[int]:
            return self._tools.reply(
                [{**each, "content": text} for each, text in zip(said, texts, strict=True)]
            )

        ids, cut = cut_to_fit(
            written, [str(each["content"]) for each in said], self._reply_length, self._tools
        )
        if len(ids) > self._reply_length:
            return self._fitted(said[:-1])[0], True
        return ids, cut

    def finish(self, *, first: bool, report: Reporter) -> DialogueOutcomes:
        """Computes rewards, scores and measures of all dialogues; see `DialogueEnv`."""
        talks = self._transcripts
        living = [n for n, talk in enumerate(talks) if talk.held and not talk.dead]
        reward = np.zeros(len(talks), np.float32)
        if self._spec.reward:
            for number, result in self._environments.run(
                {number: {"reward": True} for number in living}
            ).items():
                if why := result.get("error") or result.get("killed"):
                    talks[number].failure = f"get_reward {why}"
                    talks[number].killed = "killed" in result
                else:
                    reward[number] = result["reward"]
        score = reward
        held = np.array([talk.held for talk in talks])
        calls = [talk.calls for talk in talks]
        measures = {
            CALLS: _mean(calls, held),
            FAILED: _mean([talk.failed for talk in talks], calls),
            CUT: _mean([talk.cut for talk in talks], [talk.replies for talk in talks]),
            KILLED: _mean([talk.killed for talk in talks], held),
            FAILURES: _mean([bool(talk.failure) for talk in talks], held),
        }
        if self._reward_fn is not None:
            raw, total, further = self._scored(self._reward_fn, first, report)
            alive = np.array([t.held and not t.dead and not t.failure for t in talks])
            raw, total = (np.where(alive, np.nan_to_num(x), np.float32(0.0)) for x in (raw, total))
            score = reward if self._spec.reward else raw
            reward = reward + total
            measures |= {
                name: _mean(np.nan_to_num(values), held & ~np.isnan(values))
                for name, values in further.items()
            }
        self._blame(first, report)
        return DialogueOutcomes(
            reward.astype(np.float32),
            score.astype(np.float32),
            np.array([talk.ended for talk in talks]),
            measures,
        )

    def _scored(
        self, reward_fn: HostScore, first: bool, report: Reporter
    ) -> tuple[Floats, Floats, Json]:
        """Scores the last message of each dialogue by the reward functions."""
        by_seed = np.array_split(np.arange(len(self._transcripts)), self._num_seeds)
        # A row without a dialogue is scored as a copy of another row, and the score is discarded.
        talks = self._transcripts
        spare = next(talk for talk in talks if talk.held)
        columns = []
        for numbers in by_seed:
            own = talks[numbers[0]] if talks[numbers[0]].held else spare
            some = [talks[n] if talks[n].held else own for n in numbers]
            rows = [self._rows[talk.row] for talk in some]
            said = [[m for m in t.messages if m["role"] == ASSISTANT] for t in some]
            columns.append(
                {
                    "prompts": [self._tools.render(row["prompt"]) for row in rows],
                    "completions": [each[-1]["content"] if each else "" for each in said],
                    "messages": [talk.messages for talk in some],
                    **{name: [row[name] for row in rows] for name in rows[0] if name != "prompt"},
                }
            )
        scored = reward_fn.score(columns, len(by_seed[0]), first=first, report=report)
        flat = {name: values.reshape(-1) for name, values in scored.measures.items()}
        return scored.raw.reshape(-1), scored.reward.reshape(-1), flat

    def _blame(self, first: bool, report: Reporter) -> None:
        source = self._environments.source
        for talk in self._transcripts:
            if talk.failure and first:
                raise RewardError(
                    f"tools {source}: {talk.failure}; these are the first dialogues, so the "
                    "run ends here"
                )
            for why, name in ((talk.failure, FAILURES), (talk.killed and talk.dead, KILLED)):
                if why and name not in self._reported:
                    self._reported.add(name)
                    report(
                        f"tools {source}: {why}; such dialogues end with reward 0 and are "
                        f"counted in {name}"
                    )


def with_observation(messages: Sequence[Message], said: str) -> list[Message]:
    """Returns the messages of a prompt with a text added to the user's last message.

    Example:
      >>> with_observation([{"role": "user", "content": "Go."}], " Left or right?")
      [{'role': 'user', 'content': 'Go. Left or right?'}]
    """
    last = max(i for i, message in enumerate(messages) if message["role"] == USER)
    added = {**messages[last], "content": messages[last]["content"] + said}
    return [*messages[:last], added, *messages[last + 1 :]]


def cut_to_fit(
    written: Callable[[list[str]], list[int]], texts: Sequence[str], limit: int, tools: Tools
) -> tuple[list[int], bool]:
    """Cuts texts until at most `limit` tokens remain; returns the ids and whether texts were cut.

    The number of ids may exceed the limit once all texts are empty. `?` replaces a token that the
    model does not have, since an environment may write any text.

    Args:
      written: `(texts) -> ids`, converts texts to all tokens that the policy reads.
      texts: texts that may be cut at their ends; the longest text is cut first.
      limit: maximal number of tokens.
      tools: format of the tools; the tokenizer of the format splits the texts.
    """
    texts = list(texts)
    for token in tools.foreign:
        texts = [text.replace(token, "?") for text in texts]
    ids, cut = written(texts), False
    while len(ids) > limit and any(texts):
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        ends = [end for _, end in tools.tokenizer.rules.encode(texts[longest]).offsets]
        kept = max(len(ends) - -(-(len(ids) - limit) // len(texts)), 0)
        end = ends[kept - 1] if kept else 0
        texts[longest] = texts[longest][: min(end, len(texts[longest]) - 1)]
        ids, cut = written(texts), True
    return ids, cut


def _mean(total: npt.ArrayLike, count: npt.ArrayLike) -> Mean:
    mean: Any = Mean
    return mean(np.asarray(total, np.float32), np.asarray(count, np.float32))
