"""Defines a dialogue that records the messages of the policy, and a small model."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import language
from jaxrl_po.language.dialogue import Reply
from jaxrl_po.language.tasks import Prompt

TOKENIZER = language.make_tokenizer("0123456789+=?")
MODEL = language.Transformer(TOKENIZER.size, width=16, layers=1, heads=2, mlp_width=16, gated=False)


class Said(NamedTuple):
    """State of a dialogue that records its messages."""

    messages: jax.Array
    written: jax.Array
    turns: jax.Array


def parrot(*, turns, budget, reply_length=0, garbage=0, ends_at=None, heard=lambda n, first: n):
    """Returns a dialogue whose replies have `heard(turn, first token)` tokens, followed by
    `garbage`.

    The reward of turn k is k; a dialogue is done after `ends_at` turns, or never.
    """

    def reset(key, held_out):
        tokens = 2 + jax.random.randint(key, (3,), 0, 10)
        messages = jnp.zeros((turns, budget), jnp.int32)
        return Prompt(tokens, jnp.int32(0)), Said(
            messages, jnp.zeros(turns, jnp.int32), jnp.int32(0)
        )

    def respond(state, message, written, key):
        state = Said(
            state.messages.at[state.turns].set(message),
            state.written.at[state.turns].set(written),
            state.turns + 1,
        )
        length = jnp.minimum(heard(state.turns, message[0]), reply_length).astype(jnp.int32)
        said = jnp.where(jnp.arange(reply_length) < length, 2 + state.turns, garbage)
        done = jnp.bool_(False) if ends_at is None else state.turns >= ends_at
        return state, Reply(said.astype(jnp.int32), length), state.turns * 1.0, done

    return language.Dialogue(
        name="parrot",
        tokenizer=TOKENIZER,
        prompt_length=3,
        message_length=budget,
        reply_length=reply_length,
        max_turns=turns,
        reset=reset,
        respond=respond,
        accuracy=lambda state: (state.turns >= turns).astype(jnp.float32),
    )
