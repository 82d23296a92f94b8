"""Dialogues on the host: iterations, evaluations and examples around the compiled steps."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.language import Task, Transformer, lora, sampling
from jaxrl_po.language import conversation_steps as steps
from jaxrl_po.language.dialogue import longest
from jaxrl_po.language.dialogues import recorded
from jaxrl_po.language.dialogues.evaluation import SHOWN, Games, measure, render
from jaxrl_po.language.dialogues.problem import DialogueRecording
from jaxrl_po.language.evaluation import GREEDY, SAMPLED
from jaxrl_po.language.networks import prompt_keys
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks.types import held_out, num_asked, selecting
from jaxrl_po.language.transcript import Conversations
from jaxrl_po.learner import next_key
from jaxrl_po.masked import Mean
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices.seeds import STATE_AXES, stack, typed_shape
from jaxrl_po.run.host.rollouts import seed_of
from jaxrl_po.types import ActorCritic, Metrics, PyTree, Row, TrainState

Array = npt.NDArray[Any]
PARAMS = STATE_AXES.params
Reporter = Callable[[str], None]


class DialogueEpisode(NamedTuple):
    """A dialogue that the engine should play.

    Attributes:
      row: index of the prompt of the dialogue.
      seeds: seeds of Python's random numbers, before the environment is reset and after.
    """

    row: int
    seeds: tuple[int, int]


class DialogueOutcomes(NamedTuple):
    """Results of N dialogues, one row per dialogue.

    Attributes:
      reward: rewards of the dialogues, `[N]`, float32.
      score: raw scores of the dialogues, `[N]`, float32.
      ended: `[N]`, bool, whether the dialogue ended before the limit of turns cut it.
      measures: means `[N]` by name of the measure, pooled later.
    """

    reward: npt.NDArray[np.float32]
    score: npt.NDArray[np.float32]
    ended: npt.NDArray[np.bool_]
    measures: dict[str, Mean]


class DialogueEnv(Protocol):
    """Environment that answers messages of N dialogues, ordered by seed; None for an unused row.

    Attributes:
      names: names of the measures in an `DialogueOutcomes`.
    """

    names: tuple[str, ...]

    def begin(self, episodes: Sequence[DialogueEpisode | None], num_seeds: int) -> list[list[int]]:
        """Starts the dialogues and returns the token ids of each prompt."""

    def answer(self, messages: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Returns the token ids of each reply; None if the dialogue has ended."""

    def finish(self, *, first: bool, report: Reporter) -> DialogueOutcomes:
        """Returns the results; a failure in the `first` dialogues of a run raises an error."""

    def close(self) -> None:
        """Frees the resources of the environment."""


class HostDialogues(NamedTuple):
    """Dialogues of a single seed, played on the host.

    Attributes:
      task: task whose prompts are the rows of data that dialogues start from.
      model: model of the policy.
      environment: environment that answers the policy, see `DialogueEnv`.
      settings: sampling of messages: P prompts, G dialogues per prompt, T tokens per message.
      max_turns: maximal number K of messages in a dialogue.
      prompt_length: number L of tokens in the longest prompt.
      reply_length: number R of tokens in the longest reply, below L.
      eval_prompts: number of held-out prompts in an evaluation; 0 for all held-out prompts.
      eval_samples: number of sampled dialogues per prompt besides the greedy dialogue.
      show: number of held-out prompts whose dialogues are shown as examples.
    """

    task: Task
    model: Transformer
    environment: DialogueEnv
    settings: SamplingSettings
    max_turns: int
    prompt_length: int
    reply_length: int
    eval_prompts: int = 0
    eval_samples: int = 0
    show: int = 0

    @property
    def columns(self) -> int:
        """Returns the number N of token columns of a dialogue, see `dialogue.longest`."""
        return longest(self.max_turns, self.settings.max_new_tokens, self.reply_length)

    @property
    def rows(self) -> int:
        """Returns the number B = P·G of dialogues per seed."""
        return self.settings.num_prompts * self.settings.group_size

    def open(self, base_seed: int, seeds: Sequence[int]) -> "DialogueEngine":
        """Returns the engine that plays the dialogues of the seeds `seeds`."""
        return DialogueEngine(self, base_seed, seeds)


class DialogueEngine:
    """Plays the dialogues of iterations and evaluations: S seeds with B dialogues each.

    The random numbers of environments follow from the base seed, the index of the seed, the
    iteration and the prompt; after a reset also from the index of the dialogue in its group.

    Args:
      host: dialogues of a single seed, see `HostDialogues`.
      base_seed: seed of the run.
      seeds: seed index of each row of the stacked training state.
    """

    def __init__(self, host: HostDialogues, base_seed: int, seeds: Sequence[int]):
        self._host, self._base, self._seeds = host, base_seed, list(seeds)
        self._shape, self._proven, self._outside = (len(seeds), host.rows), False, 0.0
        self._report: Reporter = lambda line: None
        settings, model, tokenizer = host.settings, host.model, host.task.tokenizer

        def program(
            step: Callable[..., Any], arrays: int, donated: Any = (), **options: Any
        ) -> Callable[..., PyTree]:
            def call(params: ActorCritic, *given: Any) -> PyTree:
                read = params.variables("policy")
                return step(lora.over(model, params.frozen), read, *given, **options)

            of_all = stack(call, len(seeds), in_axes=(PARAMS, *[0] * arrays), out_axes=0)
            return jax.jit(of_all, donate_argnums=donated)

        decoding, ends = settings.decoding, ends_of(tokenizer)
        self._begin = program(
            steps.begin, 3, columns=host.columns, pad_token=tokenizer.pad, decoding=decoding
        )
        self._write = {
            greedy: program(steps.write_messages, 2, 1, decoding=decoding, ends=ends, greedy=greedy)
            for greedy in (False, True)
        }
        self._read = program(steps.read_replies, 3, 1)
        finish = functools.partial(steps.finish, most=host.max_turns * settings.max_new_tokens)
        self._finish = jax.jit(stack(finish, len(seeds), in_axes=(0, 0, 0, 0), out_axes=0))
        self._draw = jax.jit(stack(self._drawn, len(seeds), in_axes=(STATE_AXES,), out_axes=0))

    def recording(self) -> DialogueRecording:
        """Returns the shapes and dtypes of a recording of dialogues, `[S, B, …]`."""
        host, rows = self._host, self._shape
        sampled = *rows, host.max_turns * host.settings.max_new_tokens
        number = typed_shape(rows, np.float32)
        kept = jax.eval_shape(
            lambda logits: sampling.no_tokens(logits, host.settings.decoding, sampled[-1]),
            typed_shape((*rows, host.model.vocabulary), np.float32),
        )
        return DialogueRecording(
            prompt=typed_shape((*rows, host.prompt_length), np.int32),
            pad=typed_shape(rows, np.int32),
            held=Conversations(
                tokens=typed_shape((*rows, host.columns), np.int32),
                position=typed_shape(sampled, np.int32),
                action=typed_shape(sampled, np.int32),
                log_prob=typed_shape(sampled, np.float32),
                mask=typed_shape(sampled, np.bool_),
                message_end=typed_shape(sampled, np.bool_),
                reward=typed_shape(sampled, np.float32),
                state=None,
                ended=typed_shape(rows, np.bool_),
                turns=typed_shape(rows, np.int32),
                kept=kept,
            ),
            score=number,
            measures={name: Mean(number, number) for name in host.environment.names},
        )

    def close(self) -> None:
        """Closes the environment of the dialogues."""
        self._host.environment.close()

    def compile(self, like: TrainState) -> None:
        """Compiles the programs that write messages, for a training state of the shapes `like`."""
        params: ActorCritic = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), policy_of(like))
        prompt, no = np.zeros(self.recording().prompt.shape, np.int32), np.zeros(self._shape, bool)
        keys = jnp.broadcast_to(jax.random.key(0), self._shape)
        rows = self._begin(params, prompt, np.zeros(self._shape, np.int32), keys)
        for write in self._write.values():
            rows = write(params, rows, no)[0]
        jax.block_until_ready(rows)

    def hold(
        self,
        params: ActorCritic,
        episodes: Sequence[DialogueEpisode | None],
        keys: jax.Array,
        *,
        greedy: bool,
        report: Reporter,
    ) -> tuple[DialogueRecording, float]:
        """Plays B dialogues for each of S seeds.

        Args:
          params: parameters of the policy, leaves `[S, …]`.
          episodes: dialogues to play, seed by seed; None for a row without a dialogue.
          keys: typed PRNG keys `[S, B]`, consumed; see `conversation_steps.DialogueRows`.
          greedy: whether to write the most likely tokens.
          report: `(line) -> None`, called with lines for the user.

        Returns:
          The recording of the dialogues, leaves `[S, B, …]`, and the seconds spent outside compiled
          programs.

        Raises:
          PoolError, RewardError: an environment or a reward function failed, see `DialogueEnv`.
        """
        begun, inside = time.perf_counter(), 0.0
        host, environment, shape = self._host, self._host.environment, self._shape

        def compute(program: Callable[..., PyTree], *arguments: Any) -> PyTree:
            nonlocal inside
            called = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            inside += time.perf_counter() - called
            return result

        prompt, pad = left_padded(
            environment.begin(episodes, shape[0]), host.prompt_length, host.task.tokenizer.pad
        )
        prompt, pad = prompt.reshape(*shape, -1), pad.reshape(shape)
        rows = compute(self._begin, params, prompt, pad, keys)
        writes = np.array([episode is not None for episode in episodes])
        turns = np.zeros(writes.shape, np.int32)
        for turn in range(host.max_turns):
            rows, message, written = compute(
                self._write[greedy], params, rows, writes.reshape(shape)
            )
            turns += writes
            lengths = np.asarray(written).reshape(-1)
            replies = environment.answer(
                [
                    ids[:length].tolist() if writing else None
                    for ids, length, writing in zip(
                        np.asarray(message).reshape(len(writes), -1), lengths, writes, strict=True
                    )
                ]
            )
            writes = np.array([reply is not None for reply in replies])
            if turn + 1 == host.max_turns or not writes.any():
                break
            reply, length = right_padded([each or [] for each in replies], host.reply_length)
            rows = compute(
                self._read, params, rows, reply.reshape(*shape, -1), length.reshape(shape)
            )
        outcome = environment.finish(first=not self._proven, report=report)
        self._proven = True
        held = compute(
            self._finish,
            rows,
            outcome.reward.reshape(shape),
            outcome.ended.reshape(shape),
            turns.reshape(shape),
        )
        measures = jax.tree.map(lambda x: x.reshape(shape), outcome.measures)
        made: Any = DialogueRecording
        held = jax.device_get(held)  # the update places host arrays on devices
        recording = made(prompt, pad, held, outcome.score.reshape(shape), measures)
        return recording, max(time.perf_counter() - begun - inside, 0.0)

    def with_recording(self, state: TrainState, recording: DialogueRecording) -> TrainState:
        """Adds a recording to the training state with `recorded.with_dialogues`."""
        return recorded.with_dialogues(state, recording)

    @property
    def examples(self) -> Examples | None:
        """Returns readable dialogues of the first seed, or None if no dialogues are shown."""
        task = self._host.task

        def shown(games: PyTree) -> list[Row]:
            return [{"seed": 0, **row} for row in render(task, games)]

        return Examples(self.describe, shown) if self._host.show else None

    def record(self, state: TrainState, report: Reporter) -> tuple[TrainState, DialogueRecording]:
        """Plays the dialogues of one iteration.

        Args:
          state: training state stacked over seeds.
          report: `(line) -> None`, called with lines for the user.

        Raises:
          PoolError: the process of the environments has ended.
          RewardError: a reset or a reward failed in the first dialogues of the run.
        """
        self._report = report  # stored for evaluations, which get no `report`
        iteration, group = int(np.max(state.step)), self._host.settings.group_size
        problem, keys = self._draw(self._acting(state))
        episodes = [
            self._episode(row, member, seed, iteration, number)
            for seed, rows in zip(self._seeds, np.asarray(problem), strict=True)
            for number, row in enumerate(rows)
            for member in range(group)
        ]
        made, self._outside = self.hold(
            self._params(state), episodes, keys, greedy=False, report=report
        )
        return state, made

    def metrics(self, seconds: float) -> Metrics:
        """Returns the share of an iteration's `seconds` spent outside compiled programs."""
        count: Any = np.ones(len(self._seeds), np.float32)
        return {"outside": Mean(count * np.float32(self._outside / seconds), count)}

    def evaluate(self, state: TrainState, later_seed: int | None = None) -> dict[str, Array]:
        """Computes metrics of dialogues that start with held-out prompts, `[S, prompts]` each.

        Args:
          state: training state stacked over seeds.
          later_seed: random seed of an evaluation after the run; None for evaluations of the run.
        """
        prompts, every = self._host.eval_prompts or None, range(len(self._seeds))
        found = {
            name: _games(self._held_out(state, later_seed, prompts, samples, every))
            for name, samples in ((GREEDY, 0), (SAMPLED, self._host.eval_samples))
            if samples or name == GREEDY
        }
        return jax.tree.map(np.asarray, measure(found))

    def describe(self, state: TrainState) -> dict[str, Games]:
        """Plays example dialogues of the first seed, for `dialogues.render`."""
        return {
            name: _games(
                jax.tree.map(
                    lambda x: x[0], self._held_out(state, None, self._host.show, samples, (0,))
                )
            )
            for name, samples in ((GREEDY, 0), (SAMPLED, SHOWN))
        }

    def _held_out(
        self,
        state: TrainState,
        later_seed: int | None,
        prompts: int | None,
        samples: int,
        seeds: Sequence[int],
    ) -> DialogueRecording:
        """Plays `samples` dialogues per held-out prompt, or one greedy: `[S, prompts, n, …]`.

        `samples` is 0 for the greedy dialogue; see `evaluate` for the other arguments.
        """
        if later_seed is None:
            task, key = selecting(self._host.task), jax.random.split(jax.random.key(self._base))[1]
        else:
            task, key = self._host.task, jax.random.key(later_seed)
        count, every = max(samples, 1), len(self._seeds)
        prompt_key, number_key = jax.random.split(key)
        asked = num_asked(task, prompts)
        pairs = jax.vmap(jax.random.split)(jax.random.split(prompt_key, asked))
        rows = np.repeat(np.asarray(held_out(task, pairs[:, 0]).problem), count)
        keys = sampling.member_keys(pairs[:, 1], count)
        drawn = int(jax.random.randint(number_key, (), 0, 2**31 - 1))
        size, parts = self._host.rows, []
        for first in range(0, len(rows), size):
            numbers = np.arange(first, first + size)
            within = numbers < len(rows)
            episodes = [
                self._episode(rows[n], n % count, drawn, n // count)
                if inside and seed in seeds
                else None
                for seed in range(every)
                for n, inside in zip(numbers.tolist(), within, strict=True)
            ]
            some = jnp.broadcast_to(keys[np.minimum(numbers, len(rows) - 1)], (every, size))
            made, _ = self.hold(
                self._params(state), episodes, some, greedy=samples == 0, report=self._report
            )
            parts.append(jax.tree.map(lambda x, within=within: np.asarray(x)[:, within], made))
        whole: DialogueRecording = jax.tree.map(lambda *each: np.concatenate(each, axis=1), *parts)
        shaped: DialogueRecording = jax.tree.map(
            lambda x: x.reshape(every, asked, count, *x.shape[2:]), whole
        )
        return shaped

    def _episode(self, row: np.int32, member: int, *entropy: int) -> DialogueEpisode:
        """Returns a dialogue of a group; `entropy` alone determines the resets of the group."""
        seeds = seed_of(self._base, *entropy), seed_of(self._base, *entropy, 1 + member)
        return DialogueEpisode(int(row), seeds)

    def _drawn(self, state: TrainState) -> tuple[jax.Array, jax.Array]:
        """Draws prompts `[P]` and keys `[B]` of an iteration, as single-turn sampling does."""
        keys = prompt_keys(state.collector, next_key(state)[1])
        sample = jax.vmap(lambda key: self._host.task.sample(key, False).problem)
        return sample(keys[:, 0]), sampling.member_keys(keys[:, 1], self._host.settings.group_size)

    def _acting(self, state: TrainState) -> TrainState:
        """Puts the part of a training state that `_draw` reads on one device."""
        part = state._replace(params=ActorCritic(None), opt_state=None, reference_params=None)
        moved: TrainState = jax.device_put(part, jax.devices()[0])
        return moved

    def _params(self, state: TrainState) -> ActorCritic:
        """Puts the policy's parameters on one device."""
        moved: ActorCritic = jax.device_put(policy_of(state), jax.devices()[0])
        return moved


def policy_of(state: TrainState) -> ActorCritic:
    """Returns the parameters of the policy, without the parameters of the critic."""
    return state.params._replace(value=None)


def left_padded(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Array, Array]:
    """Pads token rows on the left; returns ids `[N, length]` and padding lengths `[N]`."""
    padding = np.array([length - len(row) for row in rows], np.int32)
    tokens = np.array([[pad] * n + list(row) for n, row in zip(padding, rows, strict=True)])
    return tokens.astype(np.int32), padding


def right_padded(rows: Sequence[Sequence[int]], most: int) -> tuple[Array, Array]:
    """Pads token rows on the right to width R; returns ids `[N, R]` and lengths `[N]`.

    R is a power of two, so that few shapes are compiled, but at most `most`.
    """
    lengths = np.array([len(row) for row in rows], np.int32)
    width = min(1 << max(int(lengths.max()) - 1, 0).bit_length(), most)
    tokens = np.array([list(row) + [0] * (width - len(row)) for row in rows], np.int32)
    return tokens, lengths


def _games(found: DialogueRecording) -> Games:
    """Converts a recording to dialogues `[…, P, n, …]`, with means of the measures."""
    measures = {name: x.total / np.maximum(x.count, 1.0) for name, x in found.measures.items()}
    prompt, pad = found.prompt[..., 0, :], found.pad[..., 0]
    return Games(prompt, pad, found.held, found.score, measures)
