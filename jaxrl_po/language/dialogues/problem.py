"""Defines dialogues as a `Problem`.

An episode is one dialogue, a step is one token of a message.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.advantages import informative
from jaxrl_po.backend import Target
from jaxrl_po.language import conversation, lora
from jaxrl_po.language.checks import check_budget
from jaxrl_po.language.dialogue import Dialogue, check_contract
from jaxrl_po.language.mismatch import AUTO, Sampler
from jaxrl_po.language.networks import LanguageNetworks, Sequences, make_networks, prompt_keys
from jaxrl_po.language.problem import SAMPLER_OF_LEARNER, Collect, as_token_problem
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.transcript import Conversations
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.warm_start import WarmStart
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Columns, Problem, PyTree


class DialogueRecording(NamedTuple):
    """Recorded dialogues, B = P·G dialogues in group-major order.

    Attributes:
      prompt: tokens `[B, L]`, int32, left-padded.
      pad: padding tokens on the left of each prompt, `[B]`, int32.
      held: recorded dialogues as `Conversations`, whose `state` is not used.
      score: raw outcome of each dialogue, `[B]`, float32, logged as the accuracy.
      measures: further metrics by name, `[B]` each, or `[]` for metrics already pooled over
        dialogues.
    """

    prompt: jax.Array
    pad: jax.Array
    held: Conversations
    score: jax.Array
    measures: dict[str, Mean]


def make_problem(
    dialogue: Dialogue,
    model: Transformer,
    *,
    num_prompts: int = 64,
    group_size: int = 8,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    old_log_prob: str = AUTO,
    sampler: Sampler = SAMPLER_OF_LEARNER,
    critic: Transformer | None = None,
    initial: PyTree | None = None,
    warm: WarmStart | Callable[[PyTree, jax.Array], PyTree] | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a problem of dialogues: `num_prompts` starting states, `group_size` dialogues each.

    A batch contains only the sampled tokens, `[B, S]`, S = K · T: replies are inputs, and neither
    advantages nor returns pass through them, so replies add no discounting. Rewards are placed at
    the ends of messages, which the column `step_end` marks. The last token terminates the episode;
    a dialogue that was not done within its turns is also marked as truncated, but nothing is
    bootstrapped.

    Args:
      dialogue: environment that replies to the policy, see `Dialogue`.
      model: transformer of the policy.
      num_prompts: number of prompts P per iteration, over all devices.
      group_size: number G of dialogues per prompt.
      max_new_tokens: token budget T of a message, its end included; 0 stands for the dialogue's
        `message_length`.
      temperature: divisor of the logits, above 0, in sampling and in `apply`.
      top_k: number of most likely tokens to sample from; 0 disables the filter.
        `language.make_problem` explains `top_k`.
      top_p: nucleus probability to sample from; 1 disables the filter. `language.make_problem`
        explains `top_p`.
      min_p: smallest share of the largest probability to sample from; 0 disables the filter.
        `language.make_problem` explains `min_p`.
      old_log_prob: source of the old policy's log-probabilities, see `language.make_problem`.
      sampler: differences between the sampling policy and the learner's policy, see
        `mismatch.Sampler`.
      critic: transformer with one output, or None; its value before a token is the value of the
        dialogue up to that token.
      initial: initial parameters of the policy, see `language.make_problem`.
      warm: supervised warm start from the dialogue's demonstrations, or a function in its place,
        see `language.make_problem`.
      target: hardware that the program is compiled for; None for `backend.here()`.

    Returns:
      `Problem` whose episodes are dialogues. The metrics are `accuracy`, `dead_groups` if G > 1
      (share of groups whose raw scores are all equal), `response_length` (tokens of all messages),
      `turns`, `truncated` (share of dialogues cut by the number of turns), and the dialogue's own
      metrics.

    Raises:
      ConfigError: an argument is invalid, or a function of the dialogue returns a wrong shape or
        dtype; the message names the argument or function.
    """
    check_contract(dialogue)
    settings = SamplingSettings(
        num_prompts=num_prompts,
        group_size=group_size,
        max_new_tokens=check_budget(dialogue, max_new_tokens),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        old_log_prob=old_log_prob,
    )
    longest = dialogue.longest(settings.max_new_tokens)
    networks = make_networks(
        *(dialogue, model, critic, settings, longest, sampler),
        initial=initial,
        warm=warm,
        target=target,
    )
    model = networks.model

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        keys = prompt_keys(collector, key)
        prompts, states = jax.vmap(lambda key: dialogue.reset(key, False))(keys[:, 0])
        held = conversation.converse(
            lora.over(sampler.of(model), params.frozen),
            params.variables("policy"),
            dialogue,
            prompts,
            states,
            keys[:, 1],
            group_size=group_size,
            decoding=settings.decoding,
            noise=sampler.noise,
            with_kept=True,
        )
        accuracy = jax.vmap(dialogue.accuracy)(held.state)
        score = accuracy if dialogue.score is None else jax.vmap(dialogue.score)(held.state)
        measures = {
            name: masked.total(jax.vmap(measure)(held.state))
            for name, measure in dialogue.measures.items()
        }
        prompt, pad = (jnp.repeat(x, group_size, axis=0) for x in (prompts.tokens, prompts.pad))
        recording = DialogueRecording(prompt, pad, held, accuracy, measures)
        return collector, dialogue_batch(networks, params, recording, score.reshape(-1, group_size))

    return problem_of_dialogues(networks, collect, staleness=sampler.staleness)


def problem_of_dialogues(
    networks: LanguageNetworks, collect: Collect, *, staleness: int = 0
) -> Problem:
    """Builds a problem whose episodes are dialogues, see `Problem`."""
    problem = as_token_problem(networks, collect)
    # A truncated dialogue is not overlong, since its messages may have been short.
    return problem._replace(truncated_is_overlong=False, has_turns=True, staleness=staleness)


def dialogue_batch(
    networks: LanguageNetworks, params: ActorCritic, recording: DialogueRecording, score: jax.Array
) -> Batch:
    """Builds the batch of B = P·G dialogues, which contains only the dialogues' sampled tokens.

    Args:
      networks: networks of the problem, which compute the values.
      params: parameters that the dialogues were sampled with.
      recording: recorded dialogues, with measures already pooled.
      score: raw outcomes of the dialogues, `[P, G]`.
    """
    held = recording.held
    metrics = {
        "accuracy": masked.total(recording.score),
        "response_length": masked.total(held.mask.sum(axis=1)),
        "turns": masked.total(held.turns),
        "truncated": masked.total(~held.ended),
    }
    if score.shape[1] > 1:
        metrics["dead_groups"] = masked.total(~informative(score))
    tokens = jnp.concatenate([recording.prompt, held.tokens], axis=1)
    inputs = Sequences(tokens, recording.pad, None, held.position, held.kept)
    values = networks.value(params, inputs)
    is_last = held.mask & ~jnp.roll(held.mask, -1, axis=1).at[:, -1].set(False)
    columns: Columns = {"step_end": held.message_end}
    if not networks.log_prob_matches_sampler:
        columns["sampler_log_prob"] = held.log_prob
    return Batch(
        inputs=inputs,
        action=held.action,
        log_prob=held.log_prob,
        reward=held.reward,
        value=values,
        next_value=jnp.where(is_last, 0.0, jnp.roll(values, -1, axis=1)),
        terminated=is_last,
        truncated=is_last & ~held.ended[:, None],
        mask=held.mask,
        score=score,
        metrics=metrics | recording.measures,
        columns=columns,
    )
