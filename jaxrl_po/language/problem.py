"""Defines language tasks as a `Problem`: an episode is one completion, a step is one token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import lengths, masked
from jaxrl_po.advantages import informative
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, check, static_value
from jaxrl_po.language import lora, sampling
from jaxrl_po.language.checks import check_budget
from jaxrl_po.language.mismatch import AUTO, Sampler
from jaxrl_po.language.networks import (
    LanguageNetworks,
    Sequences,
    make_networks,
    prompt_keys,
    shorten_after,
)
from jaxrl_po.language.settings import LanguageSettings
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks import Prompt, Task, finite
from jaxrl_po.language.tasks.types import check_shapes, reading
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.warm_start import WarmStart
from jaxrl_po.lengths import Shorten
from jaxrl_po.types import (
    ActorCritic,
    Batch,
    CollectorState,
    Columns,
    FastPaths,
    Metrics,
    Problem,
    PyTree,
    Samples,
)

SAMPLER_OF_LEARNER = Sampler()
Collect = Callable[[ActorCritic, CollectorState, jax.Array], tuple[CollectorState, Batch]]
CUT = 32  # smallest token budget at which microbatches are cut to their longest completion


def make_problem(
    task: Task,
    model: Transformer,
    *,
    num_prompts: int = 64,
    group_size: int = 8,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    process_reward: bool = False,
    verify: bool = True,
    prompt_set: int = 0,
    old_log_prob: str = AUTO,
    sampler: Sampler = SAMPLER_OF_LEARNER,
    critic: Transformer | None = None,
    initial: PyTree | None = None,
    warm: WarmStart | Callable[[PyTree, jax.Array], PyTree] | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a language problem with `num_prompts` prompts of `group_size` completions each.

    Each iteration draws new prompts and completions.

    The reward is the verifier's score, at the last generated token, or the verifier's credit for
    each token. The last token terminates the episode. Without EOS within the budget the last token
    is also marked as truncated, for overlong filtering, but nothing is bootstrapped.

    Args:
      task: prompts and their verifier, see `Task`.
      model: transformer of the policy.
      num_prompts: number of prompts P per iteration, over all devices.
      group_size: number G of completions per prompt.
      max_new_tokens: token budget T of a completion, EOS included; 0 stands for the length of the
        task's longest answer.
      temperature: divisor of the logits, above 0, in sampling and in `apply`.
      top_k: number of most likely tokens to sample from, see `sampling.truncate_logits`; 0 disables
        the filter. The policy that `apply` returns is restricted to the tokens that the filters
        kept, which the batch's inputs contain.
      top_p: probability that the most likely tokens to sample from must reach together; 1 disables
        the filter.
      min_p: smallest share of the largest probability for a token to be sampled; 0 disables the
        filter.
      process_reward: True to reward each token with the verifier's credit for the token, in place
        of the score at the end.
      verify: True to run the task's verifier. If `verify` is False, the reward is None and the
        score 0 until `give_reward` sets both between `Learner.sample` and `Learner.update`.
      prompt_set: size of a fixed set of training prompts, see `tasks.finite`; 0 draws fresh
        prompts. With a fixed set, a warm start still sees the complete train split.
      old_log_prob: source of the old policy's log-probabilities, see `LanguageSettings`; groups
        that dynamic sampling carries over always keep the sampler's log-probabilities.
      sampler: differences between the sampling policy and the learner's policy, see
        `mismatch.Sampler`.
      critic: transformer with one output, or None for a problem without critic, whose values are
        zeros.
      initial: initial parameters of the policy, the same for every key; None draws initial
        parameters. If the model has adapters (`lora`), the initial parameters are the base, which
        is frozen, and the adapters are drawn.
      warm: supervised warm start from the initial parameters, part of `init`, or a function
        `(params, key) -> params` in its place; None disables the warm start.
      target: hardware that the program is compiled for; None for `backend.here()`.

    Returns:
      `Problem` whose episodes are completions. The metrics are, with `verify`, `accuracy` (raw
      score), `wrong_length` (tokens of the completions with score 0) and, if G > 1, `dead_groups`
      (share of groups whose scores are all equal); `response_length` (tokens, EOS included);
      `truncated` (share of completions without EOS); if the task has `parses`, `malformed` (share
      of completions that do not parse).

    Raises:
      ConfigError: an argument is invalid; the message names the argument.

    Example:
      >>> from jaxrl_po.language.tasks import addition
      >>> task = addition(1)
      >>> model = Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
      >>> problem = make_problem(task, model, num_prompts=2, group_size=3)
      >>> start = jax.jit(problem.init)(jax.random.key(0))
      >>> _, batch = jax.jit(problem.collect)(*start, jax.random.key(1))
      >>> batch.action.shape, batch.score.shape
      ((6, 3), (2, 3))
    """
    budget, verify = check_budget(task, max_new_tokens), static_value("verify", verify, bool)
    check_shapes(task, scored=verify)
    settings = LanguageSettings(
        num_prompts=num_prompts,
        group_size=group_size,
        max_new_tokens=budget,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        old_log_prob=old_log_prob,
        process_reward=process_reward,
        prompt_set=prompt_set,
    )
    check(settings)
    if settings.process_reward and not verify:
        raise ConfigError(
            "process_reward",
            "has no effect unless the verifier gives the reward (reward = verifier, or verify)",
        )
    networks = make_networks(
        task, model, critic, settings, budget, sampler, initial=initial, warm=warm, target=target
    )
    collect = _make_collect(task, networks, settings, sampler, verify=verify)
    shorten = shorten_after(task.prompt_length) if budget >= CUT else None
    return as_token_problem(networks, collect, shorten)._replace(
        strata=_drawn_from(task, settings.prompt_set).strata, staleness=sampler.staleness
    )


def as_token_problem(
    networks: LanguageNetworks, collect: Collect, shorten: Shorten | None = None
) -> Problem:
    """Builds a problem that collects fresh samples, from its networks and `Problem.collect`."""
    return Problem(
        networks.init,
        collect,
        networks.apply,
        keep_rows,
        log_prob_matches_sampler=networks.log_prob_matches_sampler,
        linearizable=networks.linearizable,
        hidden_matrices=networks.hidden_matrices,
        fast_paths=FastPaths(shorten and lengths.by_length(shorten), networks.grouped),
        target=networks.target,
        steps=networks.num_completions,
        unit="completions",
    )


def _drawn_from(task: Task, prompt_set: int) -> Task:
    return finite(task, prompt_set) if prompt_set else task


def _make_collect(
    task: Task,
    networks: LanguageNetworks,
    settings: LanguageSettings,
    sampler: Sampler,
    *,
    verify: bool,
) -> Collect:
    """Builds `Problem.collect`, which samples prompts and completions and scores them."""

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        source = _drawn_from(reading(task, params.frozen), settings.prompt_set)
        keys = prompt_keys(collector, key)
        prompts: Prompt = jax.vmap(lambda key: source.sample(key, False))(keys[:, 0])
        completions = sampling.generate(
            lora.over(sampler.of(networks.model), params.frozen),
            params.variables("policy"),
            prompts.tokens,
            prompts.pad,
            keys[:, 1],
            group_size=settings.group_size,
            decoding=settings.decoding,
            eos=ends_of(task.tokenizer),
            noise=sampler.noise,
            with_kept=True,
            pad_token=task.tokenizer.pad,
        )
        members: Prompt = jax.tree.map(lambda x: jnp.repeat(x, settings.group_size, 0), prompts)
        position = jnp.arange(settings.max_new_tokens)[None, :]
        mask = position < completions.length[:, None]
        is_last = position == completions.length[:, None] - 1
        score, reward, metrics, columns = _judged(
            source, members, completions, is_last, settings, verify
        )
        metrics["response_length"] = masked.total(completions.length)
        metrics["truncated"] = masked.total(~completions.ended)
        if not networks.log_prob_matches_sampler:
            columns["sampler_log_prob"] = completions.log_prob
        tokens = jnp.concatenate([members.tokens, completions.tokens], axis=1)
        # Only the problem is passed on, without the number in the prompt set that `finite` adds to
        # the problem.
        problem = members.problem[1] if settings.prompt_set else members.problem
        unscored = None if verify else problem
        inputs = Sequences(tokens, members.pad, unscored, kept=completions.kept)
        values = networks.value(params, inputs)
        return collector, Batch(
            inputs=inputs,
            action=completions.tokens,
            log_prob=completions.log_prob,
            reward=reward,
            value=values,
            next_value=jnp.where(is_last, 0.0, jnp.roll(values, -1, axis=1)),
            terminated=is_last,
            truncated=is_last & ~completions.ended[:, None],
            mask=mask,
            score=score.reshape(-1, settings.group_size),
            metrics=metrics,
            columns=columns,
        )

    return collect


def _judged(
    source: Task,
    members: Prompt,
    completions: sampling.Completions,
    is_last: jax.Array,
    settings: LanguageSettings,
    verify: bool,
) -> tuple[jax.Array, jax.Array | None, Metrics, Columns]:
    """Returns scores `[B]` and rewards `[B, T]` of the verifier, metrics and columns.

    Without the verifier, scores are 0 and rewards None. The columns are the strata of the prompts
    and `step_end`, which marks the tokens at which a reward is due.
    """
    metrics: Metrics = {}
    columns: Columns = {} if settings.process_reward else {"step_end": is_last}
    score, reward = jnp.zeros(is_last.shape[0], jnp.float32), None
    if verify:
        score = jax.vmap(source.score)(members.problem, completions.tokens)
        metrics["accuracy"] = masked.total(score)
        metrics["wrong_length"] = masked.total(completions.length, score == 0)
        if settings.group_size > 1:
            of_groups = score.reshape(-1, settings.group_size)
            metrics["dead_groups"] = masked.total(~informative(of_groups))
        reward = jnp.where(is_last, score[:, None], 0.0)
    if settings.process_reward:
        reward = jax.vmap(source.credit)(members.problem, completions.tokens)
    if settings.process_reward and source.step_end is not None:
        step_end = jax.vmap(source.step_end)(members.problem, completions.tokens)
        columns["step_end"] = is_last | step_end
    if source.stratum is not None:
        columns["stratum"] = jax.vmap(source.stratum)(members.problem)
    if source.parses is not None:
        parsed = jax.vmap(source.parses)(members.problem, completions.tokens)
        metrics["malformed"] = masked.total(~parsed)
    return score, reward, metrics, columns


def give_reward(batch: Batch, score: Any, reward: Any) -> Batch:
    """Sets a batch's score and reward, which the host computes; the reward goes to the last token.

    Args:
      batch: batch of a problem from `make_problem`; leaves may have further leading axes,
        `[…, B, T]`.
      score: raw outcome of each completion, `[…, B]`, which decides whether a group is informative.
      reward: reward of each completion, `[…, B]`, reward units. A NaN in `reward` or `score`
        excludes a completion: the completion is masked, and in the statistics of its group it
        counts as the mean of the other completions.
    """
    absent = np.isnan(np.asarray(reward, np.float32))
    score, reward = (_of_groups(x, batch.score.shape) for x in (score, reward))
    at_end = np.where(
        np.asarray(batch.terminated), reward.reshape(absent.shape)[..., None], np.float32(0.0)
    )
    given: Any = {"score": score, "reward": at_end}
    if absent.any():
        given["mask"] = np.asarray(batch.mask) & ~absent[..., None]
    return batch._replace(**given)


def _of_groups(x: Any, shape: tuple[int, ...]) -> Any:
    """Returns values by group `[…, P, G]`.

    A NaN becomes the mean of its group's other values, or 0.
    """
    x = np.asarray(x, np.float32).reshape(shape)
    absent = np.isnan(x)
    if not absent.any():
        return x
    # Offsets are taken from the lowest value, so that the mean of equal values is exactly their
    # value.
    low = np.min(np.where(absent, np.inf, x), axis=-1, keepdims=True)
    low = np.where(np.isinf(low), np.float32(0.0), low)
    count = np.maximum(np.sum(~absent, axis=-1, keepdims=True, dtype=np.float32), 1.0)
    return np.where(absent, low + np.nansum(x - low, axis=-1, keepdims=True) / count, x)


def keep_rows(samples: Samples) -> Samples:
    """Returns samples unchanged; attention mixes a sequence's tokens, so a row is a sequence."""
    return samples
