"""Holding dialogues: a loop on the host around the compiled steps, all seeds at once."""

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
from jaxrl_po.language.dialogues.problem import Recording
from jaxrl_po.language.settings import Sampling
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.transcript import Conversations
from jaxrl_po.masked import Mean
from jaxrl_po.run.devices.seeds import STATE_AXES, stack
from jaxrl_po.types import ActorCritic, TrainState

Array = npt.NDArray[Any]
PARAMS = STATE_AXES.params
Reporter = Callable[[str], None]


class Episode(NamedTuple):
    """A dialogue to be held.

    Attributes:
      row: of the prompts.
      seeds: of Python's random numbers, before the environment is reset and after.
    """

    row: int
    seeds: tuple[int, int]


class Outcome(NamedTuple):
    """How N dialogues ended.

    Attributes:
      reward: `[N]`, float32.
      score: `[N]`, float32, the raw outcome.
      ended: `[N]`, bool, whether they ended by themselves.
      measures: name to what is pooled, `[N]` each.
    """

    reward: npt.NDArray[np.float32]
    score: npt.NDArray[np.float32]
    ended: npt.NDArray[np.bool_]
    measures: dict[str, Mean]


class DialogueEnv(Protocol):
    """Answers the messages of N rows, S seeds one after another; None for a row without a dialogue.

    Attributes:
      names: of the measures of an `Outcome`.
    """

    names: tuple[str, ...]

    def begin(self, episodes: Sequence[Episode | None], num_seeds: int) -> list[list[int]]:
        """Ids of each prompt."""

    def answer(self, messages: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Ids of each reply; None where a dialogue has ended."""

    def finish(self, *, first: bool, report: Reporter) -> Outcome:
        """How they ended; a failure is an error in the `first` ones."""

    def close(self) -> None:
        """Frees what is held."""


class Scene(NamedTuple):
    """Who talks, and how long.

    Attributes:
      task: its prompts are rows of the environment's.
      model: the policy.
      environment: see `DialogueEnv`.
      settings: P, G and how messages are sampled; their budget is T.
      max_turns: K, messages of a dialogue.
      prompt_length: L, tokens of the longest prompt.
      reply_length: R, tokens of the longest reply, below L.
    """

    task: Task
    model: Transformer
    environment: DialogueEnv
    settings: Sampling
    max_turns: int
    prompt_length: int
    reply_length: int

    @property
    def columns(self) -> int:
        """N, see `dialogue.longest`."""
        return longest(self.max_turns, self.settings.max_new_tokens, self.reply_length)

    @property
    def rows(self) -> int:
        """B = P·G."""
        return self.settings.num_prompts * self.settings.group_size


class DialogueEngine:
    """The compiled steps of S seeds with B rows each, and the loop around them.

    Args:
      scene: see `Scene`.
      num_seeds: S.
    """

    def __init__(self, scene: Scene, num_seeds: int):
        self._scene, self._shape, self._proven = scene, (num_seeds, scene.rows), False
        settings, model, tokenizer = scene.settings, scene.model, scene.task.tokenizer

        def program(
            step: Callable[..., Any], arrays: int, donated: Any = (), **options: Any
        ) -> Callable[..., Any]:
            def call(params: ActorCritic, *given: Any) -> Any:
                read = params.variables("policy")
                return step(lora.over(model, params.frozen), read, *given, **options)

            of_all = stack(call, num_seeds, in_axes=(PARAMS, *[0] * arrays), out_axes=0)
            return jax.jit(of_all, donate_argnums=donated)

        decoding, ends = settings.decoding, ends_of(tokenizer)
        self._begin = program(
            steps.begin, 3, columns=scene.columns, pad_token=tokenizer.pad, decoding=decoding
        )
        self._write = {
            greedy: program(steps.write, 2, 1, decoding=decoding, ends=ends, greedy=greedy)
            for greedy in (False, True)
        }
        self._read = program(steps.read, 3, 1)
        finish = functools.partial(steps.finish, most=scene.max_turns * settings.max_new_tokens)
        self._finish = jax.jit(stack(finish, num_seeds, in_axes=(0, 0, 0, 0), out_axes=0))

    def recording(self) -> Recording:
        """Shapes and dtypes of a recording, `[S, B, …]`."""
        shape: Any = jax.ShapeDtypeStruct
        scene, rows = self._scene, self._shape
        sampled = *rows, scene.max_turns * scene.settings.max_new_tokens
        number = shape(rows, np.float32)
        kept = jax.eval_shape(
            lambda logits: sampling.no_tokens(logits, scene.settings.decoding, sampled[-1]),
            shape((*rows, scene.model.vocabulary), np.float32),
        )
        return Recording(
            prompt=shape((*rows, scene.prompt_length), np.int32),
            pad=shape(rows, np.int32),
            held=Conversations(
                tokens=shape((*rows, scene.columns), np.int32),
                position=shape(sampled, np.int32),
                action=shape(sampled, np.int32),
                log_prob=shape(sampled, np.float32),
                mask=shape(sampled, np.bool_),
                message_end=shape(sampled, np.bool_),
                reward=shape(sampled, np.float32),
                state=None,
                ended=shape(rows, np.bool_),
                turns=shape(rows, np.int32),
                kept=kept,
            ),
            score=number,
            measures={name: Mean(number, number) for name in scene.environment.names},
        )

    def close(self) -> None:
        """Ends the environments."""
        self._scene.environment.close()

    def compile(self, like: TrainState) -> None:
        """Compiles the steps that begin and write; `like` are the shapes of the state."""
        params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), policy_of(like))
        prompt, no = np.zeros(self.recording().prompt.shape, np.int32), np.zeros(self._shape, bool)
        keys = jnp.broadcast_to(jax.random.key(0), self._shape)
        rows = self._begin(params, prompt, np.zeros(self._shape, np.int32), keys)
        for write in self._write.values():
            rows = write(params, rows, no)[0]
        jax.block_until_ready(rows)

    def hold(
        self,
        params: ActorCritic,
        episodes: Sequence[Episode | None],
        keys: jax.Array,
        *,
        greedy: bool,
        report: Reporter,
    ) -> tuple[Recording, float]:
        """Holds S·B dialogues.

        Args:
          params: of the policy, leaves `[S, …]`.
          episodes: seed by seed; None for a row without a dialogue.
          keys: `[S, B]`, typed, consumed; see `conversation_steps.Rows`.
          greedy: write the most likely tokens.
          report: called with a line for the user.

        Returns:
          The recording, leaves `[S, B, …]`, and the seconds that were spent outside programs.

        Raises:
          PoolError, RewardError: see `DialogueEnv`.
        """
        begun, inside = time.perf_counter(), 0.0
        scene, environment, shape = self._scene, self._scene.environment, self._shape

        def compute(program: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal inside
            called = time.perf_counter()
            result = jax.block_until_ready(program(*arguments))
            inside += time.perf_counter() - called
            return result

        prompt, pad = left_padded(
            environment.begin(episodes, shape[0]), scene.prompt_length, scene.task.tokenizer.pad
        )
        prompt, pad = prompt.reshape(*shape, -1), pad.reshape(shape)
        rows = compute(self._begin, params, prompt, pad, keys)
        writes = np.array([episode is not None for episode in episodes])
        turns = np.zeros(writes.shape, np.int32)
        for turn in range(scene.max_turns):
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
            if turn + 1 == scene.max_turns or not writes.any():
                break
            reply, length = right_padded([each or [] for each in replies], scene.reply_length)
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
        made: Any = Recording
        held = jax.device_get(held)  # to be placed as the update wants it
        recording = made(prompt, pad, held, outcome.score.reshape(shape), measures)
        return recording, max(time.perf_counter() - begun - inside, 0.0)


def policy_of(state: TrainState) -> ActorCritic:
    """Returns the parameters that act."""
    return state.params._replace(value=None)


def left_padded(rows: Sequence[Sequence[int]], length: int, pad: int) -> tuple[Array, Array]:
    """Ids `[N, length]` and the padding tokens on the left `[N]`."""
    padding = np.array([length - len(row) for row in rows], np.int32)
    tokens = np.array([[pad] * n + list(row) for n, row in zip(padding, rows, strict=True)])
    return tokens.astype(np.int32), padding


def right_padded(rows: Sequence[Sequence[int]], most: int) -> tuple[Array, Array]:
    """Ids `[N, R]` and lengths `[N]`; R is a power of two, of which few are compiled, or `most`."""
    lengths = np.array([len(row) for row in rows], np.int32)
    width = min(1 << max(int(lengths.max()) - 1, 0).bit_length(), most)
    tokens = np.array([list(row) + [0] * (width - len(row)) for row in rows], np.int32)
    return tokens, lengths
