"""Evaluates on held-out prompts: greedy accuracy, avg@n, pass@k, and completions for a reader."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import NON_NEGATIVE, Interval, check_size
from jaxrl_po.language import lora, sampling
from jaxrl_po.language.checks import check_decoding
from jaxrl_po.language.sampling import PLAIN, Decoding
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks import Prompt, Task
from jaxrl_po.language.tasks.types import DRAWN, held_out, num_asked, reading
from jaxrl_po.language.tokenizer import PAD
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import ActorCritic, CollectorState, PyTree

GREEDY, SAMPLED = "greedy", "sampled"

Evaluate = Callable[[ActorCritic, CollectorState, jax.Array], dict[str, jax.Array]]
Describe = Callable[[ActorCritic, CollectorState, jax.Array], dict[str, Any]]


class Answers(NamedTuple):
    """Completions of P held-out prompts, n completions of each prompt.

    Attributes:
      prompt: tokens of the prompts, `[P, L]`, int32, left-padded.
      pad: padding tokens on the left of each prompt, `[P]`, int32.
      problem: problems of the prompts, leaves `[P, …]`, see `Prompt`.
      tokens: tokens of the completions, `[P, n, T]`, int32; PAD after EOS.
      length: number of tokens of each completion, EOS included, `[P, n]`, int32.
      ended: True if EOS came within the budget, `[P, n]`, bool.
      score: verifier's score, `[P, n]`, float32 in [0, 1].
      expected: right answer, EOS included, then PAD, `[P, answer_length]`, int32.
    """

    prompt: jax.Array
    pad: jax.Array
    problem: PyTree
    tokens: jax.Array
    length: jax.Array
    ended: jax.Array
    score: jax.Array
    expected: jax.Array


def make_answer(
    task: Task, model: Transformer, *, num_prompts: int | None, decoding: Decoding = PLAIN
) -> Callable[[ActorCritic, jax.Array, int], Answers]:
    """Builds `answer(params, key, n) -> Answers`.

    N samples per held-out prompt, where n = 0 is greedy.

    Args:
      task: task to evaluate on.
      model: transformer of the policy.
      num_prompts: number of prompts P. A finite set gives its first P test rows, or all rows if it
        has fewer. None stands for all test rows of a finite set, and for `DRAWN` prompts of other
        tasks.
      decoding: budget, temperature and filters of sampling.

    Returns:
      Function `answer`, which consumes `key`. With the same key `answer` uses the same prompts for
      every n, and the first of these prompts for a smaller `num_prompts`.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    count, budgeted = num_asked(task, num_prompts), check_decoding(task, model, decoding)

    def answer(params: ActorCritic, key: jax.Array, n: int) -> Answers:
        source = reading(task, params.frozen)
        keys = jax.vmap(jax.random.split)(jax.random.split(key, count))
        prompts = held_out(source, keys[:, 0])

        def complete(prompts: Prompt, keys: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            completions = sampling.generate(
                lora.over(model, params.frozen),
                params.variables("policy"),
                prompts.tokens,
                prompts.pad,
                keys,
                group_size=max(n, 1),
                decoding=budgeted,
                eos=ends_of(task.tokenizer),
                pad_token=task.tokenizer.pad,
                greedy=n == 0,
            )
            return completions.tokens, completions.length, completions.ended

        tokens, length, ended = apply_in_parts(complete, prompts, keys[:, 1])
        score = jax.vmap(jax.vmap(source.score, in_axes=(None, 0)))(prompts.problem, tokens)
        expected = jax.vmap(source.demonstrate)(prompts.problem)
        return Answers(*prompts, tokens, length, ended, score, expected)

    return answer


def apply_in_parts(function: Callable[..., PyTree], *rows: PyTree) -> PyTree:
    """Applies a function to the prompts of an evaluation, at most `DRAWN` at a time.

    Args:
      function: `(*rows [p, …]) -> results [p·n, …]`, n results for each of p prompts.
      rows: prompts and keys, leaves `[P, …]`; the last part is filled up with the last row, whose
        extra results are cut.

    Returns:
      Results of all prompts, `[P, n, …]`.
    """
    total = len(jax.tree.leaves(rows)[0])
    parts = -(-total // DRAWN)
    if parts == 1:
        return jax.tree.map(lambda x: x.reshape(total, -1, *x.shape[1:]), function(*rows))
    index = jnp.arange(parts * -(-total // parts)).clip(max=total - 1)
    made = jax.lax.map(
        lambda i: function(*jax.tree.map(lambda x: x[i], rows)), index.reshape(parts, -1)
    )
    return jax.tree.map(lambda x: x.reshape(index.size, -1, *x.shape[2:])[:total], made)


def make_evaluate(
    task: Task,
    model: Transformer,
    *,
    num_prompts: int | None = None,
    num_samples: int = 0,
    decoding: Decoding = PLAIN,
) -> Evaluate:
    """Builds `evaluate(params, collector, key) -> {name: [P]}` on P prompts of the held-out split.

    Args:
      task: task to evaluate on.
      model: transformer of the policy.
      num_prompts: number of held-out prompts, see `make_answer`.
      num_samples: number n of samples per prompt; 0 for the greedy answers only.
      decoding: budget, temperature and filters of sampling.

    Returns:
      Function `evaluate`; the same key gives the same prompts and random numbers, and with a finite
      set any key gives each row once. The metrics are `greedy_accuracy`, `greedy_length` (tokens,
      EOS included) and, with samples, `avg@n`, the mean score of the n samples, and `pass@k` for k
      = 1, 2, 4, … up to n, where a sample of score 1 is correct.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    write = make_describe(
        task, model, num_prompts=num_prompts, num_samples=num_samples, decoding=decoding
    )
    return lambda params, collector, key: measure(write(params, collector, key))


def samples_metrics(score: jax.Array) -> dict[str, jax.Array]:
    """Computes `avg@n` and `pass@k`, k = 1, 2, 4, … and n, from scores `[…, n]`; 1 is correct."""
    n = score.shape[-1]
    correct = jnp.sum(score >= 1.0, axis=-1)
    powers = [2**i for i in range(n.bit_length())]
    passed = {f"pass@{k}": estimate_pass_at_k(correct, n, k) for k in dict.fromkeys([*powers, n])}
    return {f"avg@{n}": jnp.mean(score, axis=-1), **passed}


def measure(answers: Mapping[str, Answers]) -> dict[str, jax.Array]:
    """Computes the metrics of `make_evaluate`, `[…, P]` each, from answers with leading axes."""
    greedy = answers[GREEDY]
    values = {"greedy_accuracy": greedy.score[..., 0], "greedy_length": greedy.length[..., 0]}
    if SAMPLED in answers:
        values |= samples_metrics(answers[SAMPLED].score)
    return values


def estimate_pass_at_k(correct: jax.Array, n: int, k: int) -> jax.Array:
    """Estimates, without bias, the probability that at least one of k samples is correct.

    The estimate is 1 − C(n − c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374, eq. 1), as the
    product ∏ (1 − k / i) over i = n − c + 1 … n, where no binomial can overflow.

    Args:
      correct: number c of correct samples among n, `E*`, whole numbers in [0, n].
      n: number of samples.
      k: number of samples in the estimated event, in [1, n].

    Returns:
      Estimates `E*`, in [0, 1]. The expectation of the estimate is 1 − (1 − p)^k, which 1 − (1 − c
      / n)^k underestimates.

    Raises:
      ConfigError: k is outside its range.

    Example:
      >>> print(round(float(estimate_pass_at_k(jnp.array(2), 8, 4)), 4))  # 1 − C(6, 4) / C(8, 4)
      0.7857
    """
    check_size("k", k, Interval(1, n))
    i = jnp.arange(1, n + 1).reshape(*[1] * correct.ndim, n)
    # Factors with i < k are negative, but the product then also has the factor for i = k, which is
    # 0. Clamped to 0, negative factors cannot overflow before the factor for i = k.
    factor = jnp.maximum(1.0 - k / i, 0.0)
    return 1.0 - jnp.prod(jnp.where(i > n - correct[..., None], factor, 1.0), axis=-1)


def make_describe(
    task: Task,
    model: Transformer,
    *,
    num_prompts: int | None = 4,
    num_samples: int = 1,
    decoding: Decoding = PLAIN,
) -> Describe:
    """Builds `describe(params, collector, key) -> {"greedy": Answers, "sampled": Answers}`.

    The output is passed to `render` or `measure`.

    Args:
      task: task to evaluate on.
      model: transformer of the policy.
      num_prompts: number of held-out prompts; the same key gives an evaluation's first prompts.
      num_samples: samples per prompt; 0 for the greedy answers only.
      decoding: budget, temperature and filters of sampling.

    Returns:
      Function that describes the policy.

    Raises:
      ConfigError: an argument is invalid; the message names the argument.
    """
    answer = make_answer(task, model, num_prompts=num_prompts, decoding=decoding)
    return by_decoding(answer, num_samples)


def by_decoding(answer: Callable[[ActorCritic, jax.Array, int], Any], num_samples: int) -> Describe:
    """Builds `describe`, which calls `answer` with n = 0 (greedy) and, if > 0, `num_samples`.

    Raises:
      ConfigError: `num_samples` is not a whole number of at least 0.
    """
    num_samples = check_size("num_samples", num_samples, NON_NEGATIVE)

    def describe(params: ActorCritic, collector: CollectorState, key: jax.Array) -> dict[str, Any]:
        del collector
        written = {GREEDY: answer(params, key, 0)}
        return written | ({SAMPLED: answer(params, key, num_samples)} if num_samples else {})

    return describe


def render(task: Task, answers: Mapping[str, Answers]) -> list[dict[str, Any]]:
    """Turns the output of `describe` into one row per completion, on the host, prompt by prompt.

    A sampled PAD is shown as `PAD`, so that a text has one character per token before EOS.

    Args:
      task: task whose tokenizer decodes the tokens.
      answers: answers by decoding, "greedy" or "sampled".
    """
    decode = task.tokenizer.decode
    first = next(iter(answers.values()))
    tokens, pad = np.asarray(first.prompt), np.asarray(first.pad)
    # The prompt is shown completely, not only up to its first end: a chat has an end after each
    # message.
    prompts = task.tokenizer.decode_rows(tokens, np.arange(tokens.shape[1]) >= pad[:, None])
    return [
        {
            "decoding": decoding,
            "prompt": prompt,
            "completion": decode(answer.tokens[p, i, : answer.length[p, i]].tolist(), pad=PAD),
            "expected": decode(answer.expected[p].tolist()),
            "length": int(answer.length[p, i]),
            "score": float(answer.score[p, i]),
            "ended": bool(answer.ended[p, i]),
            **({"note": task.note} if task.note else {}),
        }
        for p, prompt in enumerate(prompts)
        for decoding, answer in answers.items()
        for i in range(answer.tokens.shape[1])
    ]
