"""Defines the interface of a dialogue, and checks the dialogue's shapes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError, check_size, with_field_docs
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tokenizer import AnyTokenizer
from jaxrl_po.types import PyTree


class Reply(NamedTuple):
    """Answer of the environment to a message.

    Attributes:
      tokens: tokens of the reply, `[R]`, int32; read up to `length`.
      length: number of tokens in the reply, `[]`, int32, in [0, R].
    """

    tokens: jax.Array
    length: jax.Array


@with_field_docs
class Dialogue(NamedTuple):
    """Episode of several turns, as pure functions of one row with static shapes.

    In a turn the policy writes a message, which ends with one of the tokenizer's `ends` or at the
    token budget; the environment replies. The policy reads replies, but is not trained on them.

    Attributes:
      name: name for logs and plots.
      tokenizer: tokenizer of prompts, messages and replies.
      prompt_length: number L of tokens in a prompt, padding included.
      message_length: number M of tokens in the longest message needed, its end included.
      reply_length: number R of tokens in the longest reply; 0 if the environment never replies.
      max_turns: largest number K of messages; a dialogue that is not done after K messages is cut,
        which is a truncation.
      reset: `reset(key, held_out) -> (Prompt, state)`; consumes `key`. The field `problem` of the
        prompt is not used.
      respond: `respond(state, message [T], length [], key) -> (state, Reply, reward [], done [])`:
        T ≥ M is the token budget of a message, PAD follows its `length` tokens. `respond` consumes
        `key`.
      accuracy: `accuracy(state) -> []` float32 in [0, 1]: success of the dialogue, from its last
        state.
      demonstrate: `demonstrate(state, key) -> tokens [M]`, returns a good message for a warm start,
        with its end, then PAD. The field is None if the dialogue cannot be demonstrated.
      score: `score(state) -> []` float32, returns the raw outcome that decides whether a group is
        informative. The field is None if the accuracy is the raw outcome.
      measures: further metrics by name, each `measure(state) -> []` of the last state.
    """

    name: str
    tokenizer: AnyTokenizer
    prompt_length: int
    message_length: int
    reply_length: int
    max_turns: int
    reset: Callable[[jax.Array, bool], tuple[Prompt, PyTree]]
    respond: Callable[
        [PyTree, jax.Array, jax.Array, jax.Array], tuple[PyTree, Reply, jax.Array, jax.Array]
    ]
    accuracy: Callable[[PyTree], jax.Array]
    demonstrate: Callable[[PyTree, jax.Array], jax.Array] | None = None
    score: Callable[[PyTree], jax.Array] | None = None
    measures: Mapping[str, Callable[[PyTree], jax.Array]] = {}

    @property
    def answer_length(self) -> int:
        """Smallest token budget M of a message; `Task` has the same attribute."""
        return self.message_length

    def longest(self, budget: int) -> int:
        """Returns N, the tokens of the longest dialogue after its prompt, for a message budget."""
        return longest(self.max_turns, budget, self.reply_length)


TaskLike = Task | Dialogue


def longest(max_turns: int, budget: int, reply_length: int) -> int:
    """Returns N, the tokens of the longest dialogue after its prompt, without the last reply."""
    return max_turns * budget + (max_turns - 1) * reply_length


def like(new: PyTree, old: PyTree) -> PyTree:
    """Casts leaves to the dtypes of `old`; sums of integers widen if JAX has 64 bits enabled."""
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), new, old)


def check_contract(dialogue: Dialogue) -> None:
    """Raises ConfigError if a function of a dialogue returns a wrong shape or dtype."""
    for name, within in (
        ("prompt_length", COUNT),
        ("message_length", COUNT),
        ("reply_length", NON_NEGATIVE),
        ("max_turns", COUNT),
    ):
        check_size(name, getattr(dialogue, name), within)
    key = jax.random.key(0)
    prompt, state = jax.eval_shape(lambda key: dialogue.reset(key, False), key)
    budget = jax.ShapeDtypeStruct((dialogue.message_length,), jnp.int32)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    after, reply, reward, done = jax.eval_shape(dialogue.respond, state, budget, length, key)
    tokens, number, flag = (
        jax.ShapeDtypeStruct(*each)
        for each in (((dialogue.reply_length,), jnp.int32), ((), jnp.float32), ((), bool))
    )
    scalars: list[tuple[str, Any, Any]] = [
        ("accuracy", jax.eval_shape(dialogue.accuracy, state), number)
    ]
    if dialogue.score is not None:
        scalars.append(("score", jax.eval_shape(dialogue.score, state), number))
    if dialogue.demonstrate is not None:
        message = jax.eval_shape(dialogue.demonstrate, state, key)
        scalars.append(("demonstrate", message, budget))
    prompt_tokens = jax.ShapeDtypeStruct((dialogue.prompt_length,), jnp.int32)
    for name, given, wanted in (
        ("reset: tokens of the prompt", prompt.tokens, prompt_tokens),
        ("reset: pad of the prompt", prompt.pad, length),
        ("respond: state", after, state),
        ("respond: tokens of the reply", reply.tokens, tokens),
        ("respond: length of the reply", reply.length, length),
        ("respond: reward", reward, number),
        ("respond: done", done, flag),
        *scalars,
    ):
        got, expected = (
            jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}".replace("t64[", "t32["), tree)
            for tree in (given, wanted)
        )
        if got != expected:
            raise ConfigError(
                "task", f"{name} of dialogue {dialogue.name} must be {expected}, got {got}"
            )
