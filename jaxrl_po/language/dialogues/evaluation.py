"""Held-out dialogues: greedy accuracy, avg@n, pass@k, and games to read."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import group_advantages
from jaxrl_po.config import NON_NEGATIVE, ConfigError, check
from jaxrl_po.language import conversation, lora
from jaxrl_po.language.checks import check_budget, check_top_k, check_vocabulary
from jaxrl_po.language.dialogue import AnyTask, Dialogue, check_contract
from jaxrl_po.language.evaluation import Describe, Evaluate, in_parts, samples_metrics
from jaxrl_po.language.sampling import PLAIN, Decoding
from jaxrl_po.language.settings import Sampling
from jaxrl_po.language.tasks.types import Prompt, num_asked
from jaxrl_po.language.tokenizer import PAD
from jaxrl_po.language.transcript import Conversations
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import ActorCritic, CollectorState, PyTree

SHOWN = 4
"""Dialogues of a prompt that are drawn for a person, the group of its advantages."""


class Games(NamedTuple):
    """Dialogues from P held-out starting states, n of each, leaves `[P, n, …]`.

    Attributes:
      prompt: `[P, L]`, int32, left-padded.
      pad: `[P]`, int32, padding tokens on the left.
      held: see `Conversations`; without its state.
      accuracy: `[P, n]`, float32.
      measures: name to `[P, n]`.
      advantage: `[P, n, S]`: rewards-to-go, relative to the other dialogues of the prompt at the
        same turn; zeros for n = 1.
    """

    prompt: jax.Array
    pad: jax.Array
    held: Conversations
    accuracy: jax.Array
    measures: dict[str, jax.Array]
    advantage: jax.Array


def make_play(
    dialogue: Dialogue, model: Transformer, *, num_prompts: int | None, decoding: Decoding = PLAIN
) -> Callable[[ActorCritic, jax.Array, int], Games]:
    """Builds `play(params, key, n) -> Games`: n dialogues per held-out prompt; n = 0 is greedy.

    Args:
      dialogue: see `Dialogue`.
      model: the policy.
      num_prompts: P; None for `DRAWN`.
      decoding: see `sampling.Decoding`; its budget is that of a message.

    Returns:
      The function; `key` is consumed. A key gives the same prompts whatever n is.

    Raises:
      ConfigError: for an invalid argument, which the message names.
    """
    check(Sampling(**decoding._asdict()))
    count = num_asked(dialogue, num_prompts)
    check_contract(dialogue)
    check_vocabulary(dialogue, model)
    check_top_k(decoding.top_k, model)
    budgeted = decoding._replace(max_new_tokens=check_budget(dialogue, decoding.max_new_tokens))

    def play(params: ActorCritic, key: jax.Array, n: int) -> Games:
        keys = jax.vmap(jax.random.split)(jax.random.split(key, count))
        prompts, states = jax.vmap(lambda key: dialogue.reset(key, True))(keys[:, 0])

        def hold(prompts: Prompt, states: PyTree, keys: jax.Array) -> tuple[PyTree, ...]:
            held = conversation.converse(
                lora.over(model, params.frozen),
                params.policy,
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

        held, accuracy, measures = in_parts(hold, prompts, states, keys[:, 1])
        advantage = jnp.zeros_like(held.reward)
        if n > 1:
            advantage = jax.vmap(group_advantages.turn_relative)(
                held.reward, held.mask, held.message_end
            )
        return Games(prompts.tokens, prompts.pad, held, accuracy, measures, advantage)

    return play


def make_evaluate(
    dialogue: Dialogue,
    model: Transformer,
    *,
    num_prompts: int | None = None,
    num_samples: int = 0,
    decoding: Decoding = PLAIN,
) -> Evaluate:
    """Builds `evaluate(params, collector, key) -> {name: [P]}`, as for a task.

    Its metrics are `greedy_accuracy`, `greedy_length` (tokens of all messages), `greedy_turns`, the
    dialogue's own with `greedy_` before them and, with samples, `avg@n` and `pass@k`; see
    `language.make_evaluate`.
    """
    if num_samples not in NON_NEGATIVE:
        raise ConfigError(f"num_samples must lie in {NON_NEGATIVE}, got {num_samples}")
    play = make_play(dialogue, model, num_prompts=num_prompts, decoding=decoding)

    def evaluate(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> dict[str, jax.Array]:
        del collector
        greedy = play(params, key, 0)
        values = {
            "greedy_accuracy": greedy.accuracy[:, 0],
            "greedy_length": greedy.held.mask[:, 0].sum(axis=-1),
            "greedy_turns": greedy.held.turns[:, 0],
        }
        values |= {f"greedy_{name}": value[:, 0] for name, value in greedy.measures.items()}
        if num_samples:
            values |= samples_metrics(play(params, key, num_samples).accuracy)
        return values

    return evaluate


def make_describe(
    dialogue: Dialogue,
    model: Transformer,
    *,
    num_prompts: int | None = 4,
    decoding: Decoding = PLAIN,
) -> Describe:
    """Builds `describe(params, collector, key) -> {"greedy": Games, "sampled": Games}`.

    One greedy dialogue and `SHOWN` samples per prompt, for `render`; see `language.make_describe`.
    """
    play = make_play(dialogue, model, num_prompts=num_prompts, decoding=decoding)

    def describe(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> dict[str, Games]:
        del collector
        return {"greedy": play(params, key, 0), "sampled": play(params, key, SHOWN)}

    return describe


def render(dialogue: AnyTask, games: Mapping[str, Games]) -> list[dict[str, Any]]:
    """Turns the output of `describe` into one row per dialogue, on the host, prompt by prompt.

    `turns` has for each message its text, the reply, the reward and, in a group, the advantage of
    its tokens.

    Args:
      dialogue: or task, whose tokenizer is used.
      games: name of the decoding to the dialogues.
    """
    first = next(iter(games.values()))
    prompt, pad = np.asarray(first.prompt), np.asarray(first.pad)
    shown = np.arange(prompt.shape[1]) >= pad[:, None]
    prompts = dialogue.tokenizer.decode_rows(prompt, shown)
    return [
        {
            "decoding": decoding,
            "prompt": text,
            "turns": _turns(dialogue, game, p, i),
            "score": float(game.accuracy[p, i]),
            "length": int(game.held.mask[p, i].sum()),
            "ended": bool(game.held.ended[p, i]),
            **{name: float(value[p, i]) for name, value in game.measures.items()},
        }
        for p, text in enumerate(prompts)
        for decoding, game in games.items()
        for i in range(game.accuracy.shape[1])
    ]


def _turns(dialogue: AnyTask, game: Games, p: int, i: int) -> list[dict[str, Any]]:
    tokens, position, end, reward, advantage = (
        np.asarray(x[p, i])
        for x in (
            game.held.tokens,
            game.held.position,
            game.held.message_end,
            game.held.reward,
            game.advantage,
        )
    )
    count = int(game.held.mask[p, i].sum())
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
            | ({"advantage": float(advantage[last])} if game.accuracy.shape[1] > 1 else {})
        )
    return rows


def _text(dialogue: AnyTask, tokens: Any) -> str:
    """Text without its ends; a reply may hold one."""
    kept = [int(token) for token in tokens if int(token) not in dialogue.tokenizer.ends]
    return dialogue.tokenizer.decode(kept, pad=PAD)
