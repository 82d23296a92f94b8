"""Evaluates held-out dialogues: greedy accuracy, avg@n, pass@k, and games for a reader."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_po import group_advantages
from jaxrl_po.language import conversation, lora
from jaxrl_po.language.checks import check_decoding
from jaxrl_po.language.dialogue import Dialogue, TaskLike, check_contract
from jaxrl_po.language.evaluation import (
    GREEDY,
    SAMPLED,
    Describe,
    Evaluate,
    apply_in_parts,
    by_decoding,
    samples_metrics,
)
from jaxrl_po.language.sampling import PLAIN, Decoding
from jaxrl_po.language.tasks.types import Prompt, num_asked
from jaxrl_po.language.tokenizer import PAD
from jaxrl_po.language.transcript import Conversations
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import ActorCritic, PyTree

SHOWN = 4
"""Default number of dialogues sampled per prompt for a reader, also the group of their advantages.
"""

_relative = jax.jit(jax.vmap(group_advantages.turn_relative))
"""`(reward, mask, message_end) -> advantages [P, n, S]`, for n dialogues of each of P prompts."""


class Games(NamedTuple):
    """Dialogues from P held-out starting states, n dialogues from each, leaves `[P, n, …]`.

    Attributes:
      prompt: tokens `[P, L]`, int32, left-padded.
      pad: padding tokens on the left of each prompt, `[P]`, int32.
      held: sampled dialogues as `Conversations`, whose `state` is None.
      accuracy: accuracy of each dialogue, `[P, n]`, float32.
      measures: further metrics of the dialogues by name, `[P, n]` each.
    """

    prompt: jax.Array
    pad: jax.Array
    held: Conversations
    accuracy: jax.Array
    measures: dict[str, jax.Array]


def make_play(
    dialogue: Dialogue, model: Transformer, *, num_prompts: int | None, decoding: Decoding = PLAIN
) -> Callable[[ActorCritic, jax.Array, int], Games]:
    """Builds `play(params, key, n) -> Games`: n dialogues per held-out prompt; n = 0 is greedy.

    Args:
      dialogue: environment that replies to the policy, see `Dialogue`.
      model: transformer of the policy.
      num_prompts: number of prompts P; None for `DRAWN`.
      decoding: sampling filters and the token budget of one message, see `sampling.Decoding`.

    Returns:
      Function `play`, which consumes `key`. With the same key `play` uses the same prompts for
      every n.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    count = num_asked(dialogue, num_prompts)
    check_contract(dialogue)
    budgeted = check_decoding(dialogue, model, decoding)

    def play(params: ActorCritic, key: jax.Array, n: int) -> Games:
        keys = jax.vmap(jax.random.split)(jax.random.split(key, count))
        prompts, states = jax.vmap(lambda key: dialogue.reset(key, True))(keys[:, 0])

        def hold(prompts: Prompt, states: PyTree, keys: jax.Array) -> tuple[PyTree, ...]:
            held = conversation.converse(
                lora.over(model, params.frozen),
                params.variables("policy"),
                dialogue,
                prompts,
                states,
                keys,
                group_size=max(n, 1),
                decoding=budgeted,
                greedy=n == 0,
            )
            accuracy = jax.vmap(dialogue.accuracy)(held.state)
            measures = {name: jax.vmap(f)(held.state) for name, f in dialogue.measures.items()}
            return held._replace(state=None), accuracy, measures

        held, accuracy, measures = apply_in_parts(hold, prompts, states, keys[:, 1])
        return Games(prompts.tokens, prompts.pad, held, accuracy, measures)

    return play


def make_evaluate(
    dialogue: Dialogue,
    model: Transformer,
    *,
    num_prompts: int | None = None,
    num_samples: int = 0,
    decoding: Decoding = PLAIN,
) -> Evaluate:
    """Builds `evaluate(params, collector, key) -> {name: [P]}`, like `language.make_evaluate`.

    The metrics are `greedy_accuracy`, `greedy_length` (tokens of all messages), `greedy_turns`, the
    dialogue's own metrics with the prefix `greedy_` and, with samples, `avg@n` and `pass@k`; see
    `language.make_evaluate`.
    """
    play = make_describe(
        dialogue, model, num_prompts=num_prompts, num_samples=num_samples, decoding=decoding
    )
    return lambda params, collector, key: measure(play(params, collector, key))


def measure(games: Mapping[str, Games]) -> dict[str, jax.Array]:
    """Computes the metrics of `make_evaluate`, `[…, P]` each, from dialogues `[…, P, n]`.

    Args:
      games: dialogues by decoding, "greedy" or "sampled"; leaves with leading axes `[…, P, n]`.
    """
    greedy = games[GREEDY]
    turns, length = greedy.held.turns, greedy.held.mask.sum(axis=-1)
    found = {"accuracy": greedy.accuracy, "length": length, "turns": turns} | greedy.measures
    values = {f"greedy_{name}": value[..., 0] for name, value in found.items()}
    return values | (samples_metrics(games[SAMPLED].accuracy) if SAMPLED in games else {})


def make_describe(
    dialogue: Dialogue,
    model: Transformer,
    *,
    num_prompts: int | None = 4,
    num_samples: int = SHOWN,
    decoding: Decoding = PLAIN,
) -> Describe:
    """Builds `describe(params, collector, key) -> {"greedy": Games, "sampled": Games}`.

    The output is passed to `render` or `measure`; see `language.make_describe`.
    """
    play = make_play(dialogue, model, num_prompts=num_prompts, decoding=decoding)
    return by_decoding(play, num_samples)


def render(dialogue: TaskLike, games: Mapping[str, Games]) -> list[dict[str, Any]]:
    """Turns the output of `describe` into one row per dialogue, on the host, prompt by prompt.

    For each message, `turns` has its text, the reply, the reward and, if the prompt has several
    dialogues, the advantage of its tokens: the rewards-to-go, relative to the prompt's other
    dialogues at the same turn.

    Args:
      dialogue: dialogue or task whose tokenizer decodes the tokens.
      games: dialogues by decoding, "greedy" or "sampled".
    """
    first = next(iter(games.values()))
    prompt, pad = np.asarray(first.prompt), np.asarray(first.pad)
    shown = np.arange(prompt.shape[1]) >= pad[:, None]
    prompts = dialogue.tokenizer.decode_rows(prompt, shown)
    advantages = {decoding: _advantages(game) for decoding, game in games.items()}
    return [
        {
            "decoding": decoding,
            "prompt": text,
            "turns": _turns(dialogue, game, advantages[decoding], p, i),
            "score": float(game.accuracy[p, i]),
            "length": int(game.held.mask[p, i].sum()),
            "ended": bool(game.held.ended[p, i]),
            **{name: float(value[p, i]) for name, value in game.measures.items()},
        }
        for p, text in enumerate(prompts)
        for decoding, game in games.items()
        for i in range(game.accuracy.shape[1])
    ]


def _advantages(game: Games) -> Any:
    """Computes the advantage of each token, `[P, n, S]`; None if a prompt has a single dialogue."""
    held = game.held
    if held.reward.shape[1] == 1:
        return None
    # Host copies are used: `_relative` of global arrays would need all processes, but a single
    # process may call this function.
    copies = [np.asarray(x) for x in (held.reward, held.mask, held.message_end)]
    return np.asarray(_relative(*copies))


def _turns(dialogue: TaskLike, game: Games, advantage: Any, p: int, i: int) -> list[dict[str, Any]]:
    held = game.held
    tokens, position, end, reward = (
        np.asarray(x[p, i]) for x in (held.tokens, held.position, held.message_end, held.reward)
    )
    count = int(held.mask[p, i].sum())
    ends = np.flatnonzero(end[:count])
    starts = [0, *(ends[:-1] + 1)]
    rows = []
    for start, last in zip(starts, ends, strict=True):
        after = position[last] + 1
        following = position[last + 1] if last + 1 < count else after
        rows.append(
            {
                "message": _text(dialogue, tokens[position[start] : after]),
                "reply": _text(dialogue, tokens[after:following]),
                "reward": float(reward[last]),
            }
            | ({} if advantage is None else {"advantage": float(advantage[p, i, last])})
        )
    return rows


def _text(dialogue: TaskLike, tokens: Any) -> str:
    """Decodes tokens without the ids in `ends`, which a reply may contain."""
    kept = [int(token) for token in tokens if int(token) not in dialogue.tokenizer.ends]
    return dialogue.tokenizer.decode(kept, pad=PAD)
