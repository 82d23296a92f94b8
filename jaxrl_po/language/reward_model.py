"""Learns a reward: a Bradley–Terry model fitted to noisy comparisons, and a problem that uses it.

Between two completions of a prompt, the verifier prefers the higher score; a comparison is flipped
with a known probability. The model sees only comparisons, never a score.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import losses, masked, variables
from jaxrl_po.config import (
    COUNT,
    POSITIVE,
    UNIT,
    ConfigError,
    Interval,
    Number,
    check,
    common,
    record,
    static,
    with_field_docs,
)
from jaxrl_po.language import lora, sampling
from jaxrl_po.language.checks import check_budget, check_parameters, check_vocabulary
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.tasks.types import Sequences, reading
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem, PyTree

# Number of comparisons that measure the accuracy, rounded up to a multiple of the batch size.
FRESH = 512


@record
class Preferences:
    """Settings of the comparisons and of the reward model's fit to them."""

    comparisons: int = static(8192, "number of pairs of completions", within=COUNT)
    flip: float = static(
        0.1, "probability that a comparison is flipped", within=Interval(0.0, 0.5, open_high=True)
    )
    demonstrations: float = static(
        0.25,
        "share of pairs in which one completion is a demonstration; all other completions are "
        "sampled from the initial policy",
        within=UNIT,
    )
    epochs: int = static(4, "passes over the comparisons", within=COUNT)
    batch_size: int = static(64, "comparisons per step, a divisor of comparisons", within=COUNT)
    learning_rate: float = common.static(
        3e-3, "Adam's initial step size; it decays linearly to 0", within=POSITIVE
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or a batch size that does not divide."""
        check(self)
        if self.comparisons % self.batch_size:
            raise ConfigError(
                "batch_size", f"must divide comparisons = {self.comparisons}, got {self.batch_size}"
            )


class Comparisons(NamedTuple):
    """Comparisons of N pairs of completions of the same prompt, the preferred completion first.

    Attributes:
      inputs: prompts and completions, tokens `[N, 2, L + T]` and pad `[N, 2]`.
      mask: True for the tokens of a completion, EOS included, `[N, 2, T]`, bool.
      differ: True if the two scores differ, `[N]`, bool; in a tie neither completion is preferred.
    """

    inputs: Sequences
    mask: jax.Array
    differ: jax.Array


@with_field_docs
class RewardModel(NamedTuple):
    """Fitted reward model, whose reward is `(output − mean) / std`.

    Attributes:
      params: parameters of the model's transformer.
      mean: mean of the transformer's output over the completions of the training comparisons, `[]`.
      std: standard deviation (ddof 0) of the transformer's output over the same completions, `[]`.
      accuracy: share of fresh, unflipped comparisons that the model orders like the verifier, `[]`.
    """

    params: PyTree
    mean: jax.Array
    std: jax.Array
    accuracy: jax.Array


# Name of the frozen `RewardModel` in the collector's replicated state.
REWARD_MODEL = "reward_model"


def compare(
    task: Task,
    policy: Transformer,
    params: PyTree,
    key: jax.Array,
    num_pairs: int,
    *,
    flip: Number = 0.0,
    demonstrations: float = 0.25,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
) -> Comparisons:
    """Compares pairs by the verifier.

    A pair is two samples of the policy, or a demonstration and a sample.

    Args:
      task: task whose verifier compares.
      policy: transformer that samples the completions.
      params: parameters of `policy`.
      key: random key, consumed.
      num_pairs: number of pairs N; the prompts are from the train split.
      flip: probability that the preference is inverted.
      demonstrations: share of the pairs with a demonstration.
      max_new_tokens: token budget T of a completion; 0 stands for the task's longest answer.
      temperature: temperature of the samples.

    Returns:
      Comparisons of all pairs.
    """
    variables.require_module("policy", policy)
    budget = check_budget(task, max_new_tokens)
    pad_token, ends = task.tokenizer.pad, ends_of(task.tokenizer)
    prompt_key, sample_key, demonstration_key, flip_key = jax.random.split(key, 4)
    prompts = jax.vmap(lambda key: task.sample(key, False))(jax.random.split(prompt_key, num_pairs))
    sampled = sampling.generate(
        policy,
        params,
        prompts.tokens,
        prompts.pad,
        jax.random.split(sample_key, num_pairs),
        group_size=2,
        decoding=sampling.Decoding(budget, temperature),
        eos=ends,
        pad_token=pad_token,
    ).tokens.reshape(num_pairs, 2, budget)
    answers = jax.vmap(task.demonstrate)(prompts.problem)
    answers = jnp.pad(
        answers, ((0, 0), (0, budget - task.answer_length)), constant_values=pad_token
    )
    demonstrated = jax.random.bernoulli(demonstration_key, demonstrations, (num_pairs, 1))
    pairs = sampled.at[:, 0].set(jnp.where(demonstrated, answers, sampled[:, 0]))

    score = jax.vmap(jax.vmap(task.score, in_axes=(None, 0)))(prompts.problem, pairs)
    swap = (score[:, 1] > score[:, 0]) ^ jax.random.bernoulli(flip_key, flip, (num_pairs,))
    pairs = jnp.where(swap[:, None, None], pairs[:, ::-1], pairs)
    prompt, pad = (jnp.repeat(x[:, None], 2, axis=1) for x in (prompts.tokens, prompts.pad))
    # The mask is True up to and including the first end.
    is_end = ends.mark(pairs.reshape(-1, budget)).reshape(pairs.shape)
    mask = jnp.cumsum(is_end, axis=-1) - is_end == 0
    return Comparisons(
        Sequences(jnp.concatenate([prompt, pairs], axis=-1), pad), mask, score[:, 0] != score[:, 1]
    )


def rate(model: Transformer, params: PyTree, inputs: Sequences, mask: jax.Array) -> jax.Array:
    """Computes the output at the last token of each completion: EOS, or the budget's last token.

    Args:
      model: transformer with one output.
      params: parameters of the transformer.
      inputs: B prompts with completions of T tokens.
      mask: True for the tokens of a completion, `[B, T]`, bool; attention is causal, so masked
        tokens after a completion have no effect.

    Returns:
      Outputs, `[B]`.
    """
    outputs, _ = model.apply(params, inputs.tokens, inputs.pad, last=mask.shape[1])
    # A row without a valid token uses index 0.
    last = jnp.maximum(mask.sum(axis=1, keepdims=True) - 1, 0)
    return jnp.take_along_axis(outputs[..., 0], last, axis=1)[:, 0]


def rate_pairs(model: Transformer, params: PyTree, pairs: Comparisons) -> jax.Array:
    """Computes the outputs for both completions of each pair, `[N, 2]`."""
    inputs, mask = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (pairs.inputs, pairs.mask))
    return rate(model, params, inputs, mask).reshape(-1, 2)


def fit(
    model: Transformer,
    task: Task,
    policy: Transformer,
    params: ActorCritic,
    key: jax.Array,
    *,
    settings: Preferences,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
) -> RewardModel:
    """Fits a reward model to comparisons of the policy's samples with Adam, as a pure function.

    The loss is the mean of `−log σ(r_w − r_l)` over pairs whose scores differ.

    Args:
      model: transformer with one output that is fitted.
      task: task whose verifier compares.
      policy: transformer that samples the completions.
      params: parameters of the problem; `params.policy` are the parameters of `policy`.
      key: random key, consumed.
      settings: numbers of comparisons and settings of Adam, see `Preferences`.
      max_new_tokens: token budget of a completion; 0 stands for the task's longest answer.
      temperature: temperature of the samples.

    Returns:
      Fitted `RewardModel`. Source: Christiano et al. 2017 (arXiv:1706.03741), eq. 1; Ouyang et al.
      2022 (arXiv:2203.02155), eq. 1.
    """
    settings.validate()
    check_model(task, model)
    variables.require_module("policy", policy)
    task = reading(task, params.frozen)
    init_key, pairs_key = jax.random.split(key)
    steps, fresh = settings.comparisons // settings.batch_size, -(-FRESH // settings.batch_size)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))

    def sample(key_and_flip: tuple[jax.Array, jax.Array]) -> Comparisons:
        key, flip = key_and_flip
        return compare(
            task,
            lora.over(policy, params.frozen),
            params.policy,
            key,
            settings.batch_size,
            flip=flip,
            demonstrations=settings.demonstrations,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
        )

    def loss(reward_params: PyTree, pairs: Comparisons) -> jax.Array:
        output = rate_pairs(model, {**reward_params, **constants}, pairs)
        return masked.mean(losses.bradley_terry(output[:, 0], output[:, 1]), pairs.differ)

    def step(carry: tuple[PyTree, PyTree], i: jax.Array) -> tuple[tuple[PyTree, PyTree], None]:
        reward_params, opt_state = carry
        pairs = jax.tree.map(lambda x: x[i % steps], batches)
        gradient = jax.grad(loss)(reward_params, pairs)
        updates, opt_state = optimizer.update(gradient, opt_state, reward_params)
        rest = 1.0 - i / (settings.epochs * steps)  # decay factor of the step size
        updates = jax.tree.map(lambda update: rest * update, updates)
        after = optax.apply_updates(reward_params, updates), opt_state
        # In a batch without any preference, only Adam's momentum would move the parameters.
        some = pairs.differ.any()
        return jax.tree.map(lambda new, old: jnp.where(some, new, old), after, carry), None

    # One batch at a time is sampled: the cache for all samples at once would be the largest array
    # of the run. The last `fresh` batches, whose preferences are not flipped, only measure the
    # accuracy.
    flips = jnp.where(jnp.arange(steps + fresh) < steps, settings.flip, 0.0)
    batches = jax.lax.map(sample, (jax.random.split(pairs_key, steps + fresh), flips))
    made = model.init(init_key, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    start, constants = variables.split(model, made)
    constants = constants or {}
    (fitted, _), _ = jax.lax.scan(
        step, (start, optimizer.init(start)), jnp.arange(settings.epochs * steps)
    )

    fitted = {**fitted, **constants}
    output = jax.lax.map(lambda pairs: rate_pairs(model, fitted, pairs), batches)
    mean, std = masked.moments(output[:steps])
    accuracy = masked.mean(output[steps:, :, 0] > output[steps:, :, 1], batches.differ[steps:])
    return RewardModel(fitted, mean, jnp.maximum(std, 1e-6), accuracy)


def learned_reward(
    problem: Problem,
    task: Task,
    model: Transformer,
    fit: Callable[[ActorCritic, jax.Array], RewardModel],
) -> Problem:
    """Replaces a problem's reward by the reward of a frozen model, at the last token.

    `score` remains the verifier's score.

    Args:
      problem: language problem.
      task: task of the problem.
      model: transformer of the reward model, with one output and the task's vocabulary.
      fit: `fit(params, key) -> RewardModel`, called in `init`: `reward_model.fit` on the initial
        policy, or a function that returns a model fitted earlier.

    Returns:
      `Problem` with the learned reward, for any method. The problem adds the metrics `reward_model`
      (the reward, mean over completions; 0 is the mean of the completions that the model was fitted
      to, and 1 is their std) and `reward_model_accuracy` (see `RewardModel`).

    Raises:
      ConfigError: the model's vocabulary or outputs do not fit, or the parameters belong to another
        model.
    """
    check_model(task, model)

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        problem_key, fit_key = jax.random.split(key)
        params, collector = problem.init(problem_key)
        fitted = fit(params, fit_key)
        check_parameters(model, fitted.params, name="reward_model")
        return params, collector.add(replicated={REWARD_MODEL: fitted})

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        fitted = collector.replicated[REWARD_MODEL]
        collector, batch = problem.collect(params, collector.remove(REWARD_MODEL), key)
        reward = (rate(model, fitted.params, batch.inputs, batch.mask) - fitted.mean) / fitted.std
        metrics = {
            "reward_model": masked.total(reward, batch.mask.any(axis=1)),
            "reward_model_accuracy": masked.total(fitted.accuracy),
        }
        batch = batch._replace(
            reward=jnp.where(batch.terminated, reward[:, None], 0.0),
            columns={**batch.columns, "step_end": batch.terminated},
            metrics={**batch.metrics, **metrics},
        )
        return collector.add(replicated={REWARD_MODEL: fitted}), batch

    return problem._replace(init=init, collect=collect)


def check_model(task: Task, model: Transformer) -> None:
    """Raises ConfigError unless the model has the task's vocabulary and one output."""
    variables.require_module("reward_model", model, "vocabulary", "outputs")
    check_vocabulary(task, model, name="reward_model")
    if model.outputs != 1:
        raise ConfigError("reward_model", f"must have outputs = 1, got {model.outputs}")
