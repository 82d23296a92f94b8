"""Language as a `Problem`: an episode is one completion, a step is one token."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import backend, lengths, masked
from jaxrl_po.advantages import informative
from jaxrl_po.backend import Target
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    ConfigError,
    Interval,
    check,
    record,
    static,
)
from jaxrl_po.language import lora, sampling
from jaxrl_po.language.checks import check_budget, check_top_k
from jaxrl_po.language.mismatch import DTYPES, Sampler
from jaxrl_po.language.networks import (
    AUTO,
    OLD_LOG_PROBS,
    Networks,
    Sequences,
    make_networks,
    prompt_keys,
    shorten_after,
)
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks import Prompt, Task, finite
from jaxrl_po.language.tasks.types import check_lengths, reading
from jaxrl_po.language.transformer import Transformer, compiled_for
from jaxrl_po.language.warm_start import WarmStart
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Metrics, Problem, PyTree, Samples

SAMPLER_OF_LEARNER = Sampler()
CUT = 32  # smallest token budget at which microbatches are cut to their longest completion
NUCLEUS = Interval(0.0, 1.0, open_low=True)


@record
class Sampling:
    """Sizes of a language problem and how it is sampled: fields of tasks and dialogues."""

    num_prompts: int = static(64, "prompts per iteration, over all devices", within=COUNT)
    group_size: int = static(8, "completions per prompt", within=COUNT)
    max_new_tokens: int = static(
        0,
        "token budget of a completion, or of one message of a dialogue, EOS included; 0 takes the "
        "task's longest answer",
        unit="tokens",
    )
    temperature: float = static(
        1.0, "temperature of the policy, in sampling and in the loss", within=POSITIVE
    )
    top_k: int = static(
        0,
        "sample from the k most likely tokens only; 0 for all",
        unit="tokens",
        within=NON_NEGATIVE,
    )
    top_p: float = static(
        1.0,
        "sample from the most likely tokens that reach this probability together; 1 for all",
        within=NUCLEUS,
    )
    min_p: float = static(
        0.0,
        "sample from the tokens with at least this part of the largest probability; 0 for all",
        within=Interval(0.0, 1.0, open_high=True),
    )
    old_log_prob: str = static(
        AUTO,
        "source of the old policy's log-probabilities in the ratio: the sampler, or a forward "
        "pass of the learner before its first step; auto takes the learner where the two differ: "
        "if the model computes below float32, or an accelerator multiplies matrices in TF32",
        choices=OLD_LOG_PROBS,
    )

    @property
    def decoding(self) -> sampling.Decoding:
        """How completions are sampled."""
        filters = self.top_k, self.top_p, self.min_p
        return sampling.Decoding(self.max_new_tokens, self.temperature, *filters)

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range."""
        check(self)


@record
class Settings(Sampling):
    """Sizes and switches of a task's problem, as a record for command lines and logs."""

    process_reward: bool = static(
        False, "reward each correct token or step, in place of the whole answer at its end"
    )
    prompt_set: int = static(
        0,
        "size of a fixed set of training prompts, drawn once; 0 draws fresh prompts",
        unit="prompts",
        within=NON_NEGATIVE,
    )


@record
class Computation:
    """How a transformer is computed, whatever its sizes."""

    dtype: str = static("float32", "dtype of the matrix products", choices=tuple(DTYPES))
    remat: bool = static(
        False,
        "recompute the activations inside blocks in the backward pass: less memory, more time",
    )


@record
class ModelSettings(Computation):
    """Sizes of the transformer, shared by policy and critic (two models of these sizes)."""

    width: int = static(64, "width of the residual stream", within=COUNT)
    layers: int = static(2, "transformer blocks", within=COUNT)
    heads: int = static(4, "query heads; width / heads must be even", within=COUNT)
    kv_heads: int = static(4, "key and value heads, a divisor of heads", within=COUNT)
    mlp_width: int = static(256, "width of the hidden layer of each MLP", within=COUNT)
    gated: bool = static(True, "SwiGLU in place of GELU")
    tied: bool = static(False, "the output layer of the policy shares the embedding")

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or sizes that do not divide."""
        check(self)
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ConfigError(
                f"width / heads must be an even whole number, got {self.width} / {self.heads}"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(f"kv_heads must divide heads = {self.heads}, got {self.kv_heads}")

    def build(self, vocabulary: int, *, outputs: int = 0) -> Transformer:
        """The model: a policy with `outputs = 0`, a critic with 1."""
        self.validate()
        sizes = dict(vars(self), dtype=DTYPES[self.dtype])
        return Transformer(vocabulary=vocabulary, outputs=outputs, **sizes)


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
    """A language problem: per iteration `num_prompts` prompts with `group_size` completions each.

    The reward is the verifier's score, at the last generated token, or its credit for each token.
    The last token terminates the episode. Without EOS within the budget it is marked as truncated
    too, for overlong filtering, but nothing is bootstrapped.

    Args:
      task: see `Task`.
      model: the policy.
      num_prompts: P, over all devices.
      group_size: G.
      max_new_tokens: T, budget of a completion, EOS included; 0 takes the task's longest answer.
      temperature: above 0; it divides the logits in sampling and in `apply`.
      top_k: filters what is sampled, see `sampling.truncate`; 0 is off. The policy that `apply`
        gives is restricted to the tokens that were kept, which the batch's inputs hold.
      top_p: likewise; 1 is off.
      min_p: likewise; 0 is off.
      process_reward: reward each token with the verifier's credit for it, in place of the score at
        the end.
      verify: run the task's verifier. If False, the reward is None and the score 0 until both are
        set between `Learner.sample` and `Learner.update`, see `give_reward`.
      prompt_set: size of a fixed set of training prompts, see `tasks.finite`; 0 draws fresh ones. A
        warm start still sees the whole train split.
      old_log_prob: see `Settings`; groups that dynamic sampling carries over always keep the
        sampler's.
      sampler: how the policy that samples differs from the learner's; see `Sampler`.
      critic: transformer with one output, or None for no critic (values are then zeros).
      initial: initial parameters of the policy, the same for every key; None draws them. Where the
        model has adapters (`lora`), they are the base, which is frozen, and the adapters are drawn.
      warm: supervised warm start from the initial parameters, part of `init`, or a function in its
        place, from these and a key to other parameters; None for none.
      target: what the program is compiled for; None for `backend.here()`.

    Returns:
      The `Problem`. Metrics: with `verify`, `accuracy` (raw score), `wrong_length` (tokens of the
      completions with score 0) and, in groups, `dead_groups` (share of groups whose scores are all
      equal); `response_length` (tokens, EOS included); `truncated` (share of completions without
      EOS); where the task has `parses`, `malformed` (share of completions that do not parse).

    Raises:
      ConfigError: for an invalid argument, which the message names.

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
    decoding = sampling.Decoding(max_new_tokens, temperature, top_k, top_p, min_p)
    check(
        Settings(
            num_prompts=num_prompts,
            group_size=group_size,
            old_log_prob=old_log_prob,
            **decoding._asdict(),
        )
    )
    check(sampler)
    check_top_k(top_k, model)
    budget = check_budget(task, max_new_tokens)

    check_lengths(task)
    if process_reward and not verify:
        raise ConfigError(
            "process_reward has no effect unless the verifier gives the reward (--reward=verifier, "
            "or verify): it is its credit for each token"
        )

    model, critic = (compiled_for(target, each) for each in (model, critic))
    target = target or backend.here()
    networks = make_networks(
        task,
        model,
        critic,
        num_prompts=num_prompts,
        group_size=group_size,
        columns=budget,
        temperature=temperature,
        old_log_prob=old_log_prob,
        sampler=sampler,
        initial=initial,
        warm=warm,
        target=target,
    )

    collect = _make_collect(
        task,
        model,
        networks,
        decoding._replace(max_new_tokens=budget),
        sampler,
        group_size=group_size,
        prompt_set=prompt_set,
        verify=verify,
        process_reward=process_reward,
    )

    return Problem(
        networks.init,
        collect,
        networks.apply,
        rows,
        _drawn_from(task, prompt_set).strata,
        exact_sampler=networks.exact_sampler,
        by_length=lengths.by_length(shorten_after(task.prompt_length)) if budget >= CUT else None,
        grouped=networks.grouped,
        staleness=sampler.staleness,
        target=target,
    )


def _drawn_from(task: Task, prompt_set: int) -> Task:
    return finite(task, prompt_set) if prompt_set else task


def _make_collect(
    task: Task,
    model: Transformer,
    networks: Networks,
    decoding: sampling.Decoding,
    sampler: Sampler,
    *,
    group_size: int,
    prompt_set: int,
    verify: bool,
    process_reward: bool,
) -> Callable[..., tuple[CollectorState, Batch]]:
    """`Problem.collect`: prompts, completions and their rewards."""

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        source = _drawn_from(reading(task, params.frozen), prompt_set)
        keys = prompt_keys(collector, key)
        prompts: Prompt = jax.vmap(lambda key: source.sample(key, False))(keys[:, 0])
        completions = sampling.generate(
            lora.over(sampler.of(model), params.frozen),
            params.policy,
            prompts.tokens,
            prompts.pad,
            keys[:, 1],
            group_size=group_size,
            decoding=decoding,
            eos=ends_of(task.tokenizer),
            noise=sampler.noise,
            with_kept=True,
            pad_token=task.tokenizer.pad,
        )
        members: Prompt = jax.tree.map(lambda x: jnp.repeat(x, group_size, axis=0), prompts)
        position = jnp.arange(decoding.max_new_tokens)[None, :]
        mask = position < completions.length[:, None]
        is_last = position == completions.length[:, None] - 1
        metrics: Metrics = {}
        score, reward = jnp.zeros(mask.shape[0], jnp.float32), None
        if verify:
            score = jax.vmap(source.score)(members.problem, completions.tokens)
            metrics["accuracy"] = masked.total(score)
            metrics["wrong_length"] = masked.total(completions.length, score == 0)
            if group_size > 1:
                metrics["dead_groups"] = masked.total(~informative(score.reshape(-1, group_size)))
            reward = jnp.where(is_last, score[:, None], 0.0)
        step_end: jax.Array | None = is_last
        if process_reward:
            reward = jax.vmap(source.credit)(members.problem, completions.tokens)
            step_end = None
            if source.step_end is not None:
                step_end = is_last | jax.vmap(source.step_end)(members.problem, completions.tokens)
        if source.parses is not None:
            metrics["malformed"] = masked.total(
                ~jax.vmap(source.parses)(members.problem, completions.tokens)
            )
        metrics["response_length"] = masked.total(completions.length)
        metrics["truncated"] = masked.total(~completions.ended)
        tokens = jnp.concatenate([members.tokens, completions.tokens], axis=1)
        # The problem as the task knows it, without its number in the set.
        problem = members.problem[1] if prompt_set else members.problem
        inputs = Sequences(tokens, members.pad, None if verify else problem, kept=completions.kept)
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
            score=score.reshape(-1, group_size),
            metrics=metrics,
            stratum=None if source.stratum is None else jax.vmap(source.stratum)(members.problem),
            sampler_log_prob=None if networks.exact_sampler else completions.log_prob,
            step_end=step_end,
        )

    return collect


def give_reward(batch: Batch, score: Any, reward: Any) -> Batch:
    """The batch with a score and a reward computed on the host; the reward is at the last token.

    Args:
      batch: see `make_problem`; leaves may have further leading axes, `[…, B, T]`.
      score: `[…, B]`, raw outcome of each completion, which decides whether a group is informative.
      reward: `[…, B]`, reward units. NaN, here and in `score`, for a completion that takes no part:
        it is masked, and in the statistics of its group it is the mean of the others.
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
    """Values by group `[…, P, G]`, where NaN the mean of the others in the group, or 0 without."""
    x = np.asarray(x, np.float32).reshape(shape)
    absent = np.isnan(x)
    if not absent.any():
        return x
    # From the lowest one on, so that the mean of equal values is exactly theirs.
    low = np.min(np.where(absent, np.inf, x), axis=-1, keepdims=True)
    low = np.where(np.isinf(low), np.float32(0.0), low)
    count = np.maximum(np.sum(~absent, axis=-1, keepdims=True, dtype=np.float32), 1.0)
    return np.where(absent, low + np.nansum(x - low, axis=-1, keepdims=True) / count, x)


def rows(samples: Samples) -> Samples:
    """The identity: attention mixes the tokens of a sequence, so a row is a whole sequence."""
    return samples
