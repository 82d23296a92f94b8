"""Defines the interface of a task, and checks a task's sizes."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po.config import ConfigError, check_size, with_field_docs
from jaxrl_po.language.tokenizer import AnyTokenizer
from jaxrl_po.types import PyTree

DATA = "data"
"""Name of the entry of `ActorCritic.frozen` that contains `Task.data`."""

DRAWN = 512
"""Default number of prompts of an evaluation, for a task that draws its prompts."""


@with_field_docs
class Prompt(NamedTuple):
    """Prompt with its problem.

    Attributes:
      tokens: tokens of the prompt, `[L]`, int32, left-padded.
      pad: padding tokens on the left, `[]`, int32.
      problem: data that the verifier needs; None in a dialogue.
    """

    tokens: jax.Array
    pad: jax.Array
    problem: PyTree = None


@with_field_docs
class Sequences(NamedTuple):
    """Inputs of `Problem.apply`, rows of a prompt and its completion.

    Attributes:
      tokens: left-padded prompt, then the completion, from column L in every row, `[B, L + N]`,
        int32.
      pad: padding tokens on the left, `[B]`, int32.
      problem: problems of the prompts, leaves `[B, …]`, see `Prompt`; None unless the reward is
        computed on the host.
      position: positions of the sampled tokens in the completion, `[B, S]`, int32 below N; None if
        all tokens are sampled.
      kept: tokens that each token was drawn from, and that restrict the policy, see
        `sampling.kept_tokens`, `[B, S, …]`; None for all.
    """

    tokens: jax.Array
    pad: jax.Array
    problem: PyTree = None
    position: jax.Array | None = None
    kept: jax.Array | None = None


@with_field_docs
class Task(NamedTuple):
    """Task whose answers can be verified.

    Attributes:
      name: name for logs and plots.
      tokenizer: tokenizer of prompts and answers.
      prompt_length: number L of tokens in a prompt, padding included.
      answer_length: number of tokens in the longest demonstration, EOS included.
      sample: `sample(key, held_out) -> Prompt`; consumes `key`. The two splits do not have a
        problem in common.
      demonstrate: `demonstrate(problem) -> tokens [answer_length]`, returns a correct answer with
        EOS, then PAD.
      score: `score(problem, tokens [T]) -> []` float32 in [0, 1], returns the raw accuracy of a
        completion, T ≥ answer_length.
      credit: `credit(problem, tokens [T]) -> [T]` float32, returns each token's share of a process
        reward, at most 1 in all.
      parses: `parses(problem, tokens [T]) -> []` bool, returns True for a well-formed completion,
        correct or not: the alphabet and shape of an answer, EOS, then only padding. The field is
        None if the task does not check the form.
      columns: `columns(problems [B, …]) -> {name: B values}`, runs on the host and returns
        arguments of a reward function in Python besides prompts and completions. The field is None
        to pass the demonstration.
      strata: number of strata; 0 disables strata.
      stratum: `stratum(problem) -> []` int32 below `strata`, returns the problem's number in a
        finite set, or its difficulty. The field is None without strata.
      step_end: `step_end(problem, tokens [T]) -> [T]` bool, returns True for tokens that end a
        step, where a process reward is due, even if it is 0. The last token of a completion always
        ends a step. The field is None if every token is a step.
      row: `row(i) -> Prompt`, returns the prompt of row i of a finite set. The field is None for an
        unlimited number of prompts, which an evaluation draws by `sample`.
      test: held-out rows of a finite set; an evaluation asks each row once.
      validation: rows that replace `test` in the evaluations that select a checkpoint.
      data: arrays that the functions above receive by `functools.partial(function, data)`. The
        training state contains the arrays, so that they are an argument of the programs, not a
        constant in the programs' code. The field is None for a task without data.
      note: remark for a reader on the notation of answers; empty for a task without remark.
    """

    name: str
    tokenizer: AnyTokenizer
    prompt_length: int
    answer_length: int
    sample: Callable[[jax.Array, bool], Prompt]
    demonstrate: Callable[[PyTree], jax.Array]
    score: Callable[[PyTree, jax.Array], jax.Array]
    credit: Callable[[PyTree, jax.Array], jax.Array]
    parses: Callable[[PyTree, jax.Array], jax.Array] | None = None
    columns: Callable[[PyTree], dict[str, list[Any]]] | None = None
    strata: int = 0
    stratum: Callable[[PyTree], jax.Array] | None = None
    step_end: Callable[[PyTree, jax.Array], jax.Array] | None = None
    row: Callable[[jax.Array], Prompt] | None = None
    test: range = range(0)
    validation: range = range(0)
    data: PyTree = None
    note: str = ""


def selecting(task: Task) -> Task:
    """Returns the task for evaluations that select a checkpoint: validation rows replace `test`.

    Args:
      task: any task.
    """
    return task._replace(test=task.validation)


def num_asked(task: Any, num_prompts: int | None) -> int:
    """Returns the number of prompts of an evaluation, at most the test rows of a finite set.

    Args:
      task: task, or dialogue, which draws its prompts.
      num_prompts: requested number; None for all test rows of a finite set, otherwise `DRAWN`.

    Raises:
      ConfigError: `num_prompts` is below 1, or a finite set lacks test rows.
    """
    finite = getattr(task, "row", None) is not None
    if finite and not task.test:
        raise ConfigError("task", f"{task.name} must have test rows, and for a run validation rows")
    if num_prompts is None:
        return len(task.test) if finite else DRAWN
    asked = check_size("num_prompts", num_prompts)
    return min(asked, len(task.test)) if finite else asked


def held_out(task: Task, keys: jax.Array) -> Prompt:
    """Returns the prompts of an evaluation, `[P, …]`: the first P test rows, or drawn prompts.

    Args:
      task: any task; a finite set must have at least P test rows.
      keys: random keys, `[P]`; consumed if prompts are drawn.
    """
    if task.row is None:
        return jax.vmap(lambda key: task.sample(key, True))(keys)
    rows = jnp.array(task.test[: len(keys)], jnp.int32)
    asked: Prompt = jax.vmap(task.row)(rows)
    return asked


def reading(task: Task, frozen: PyTree) -> Task:
    """Returns the task whose data are taken from a training state.

    Args:
      task: any task.
      frozen: `ActorCritic.frozen` of the state; without an entry `DATA` the task is unchanged.
    """
    if task.data is None or not frozen or DATA not in frozen:
        return task
    data = frozen[DATA]
    readers: dict[str, Any] = {
        name: functools.partial(field.func, data, *field.args[1:], **field.keywords)
        for name, field in task._asdict().items()
        if isinstance(field, functools.partial) and field.args[:1] and field.args[0] is task.data
    }
    return task._replace(data=data, **readers)


def check_shapes(task: Task, *, scored: bool) -> None:
    """Raises ConfigError if a prompt, a demonstration or, if `scored`, a score has a bad shape."""
    prompt = jax.eval_shape(lambda key: task.sample(key, False), jax.random.key(0))
    answer = jax.ShapeDtypeStruct((task.answer_length,), jnp.int32)
    demonstration = jax.eval_shape(task.demonstrate, prompt.problem)
    score = jax.eval_shape(task.score, prompt.problem, answer) if scored else prompt.pad

    def tokens(field: str) -> str:
        return f"tokens of the shape [{getattr(task, field)}], its {field}, padding included"

    for name, given, shape, valid in (
        ("sample", prompt.tokens, (task.prompt_length,), tokens("prompt_length")),
        ("sample", prompt.pad, (), "a pad of the shape []"),
        ("demonstrate", demonstration, answer.shape, tokens("answer_length")),
        ("score", score, (), "a number of the shape []"),
    ):
        if getattr(given, "shape", None) != shape:
            got = list(given.shape) if hasattr(given, "shape") else given
            raise ConfigError("task", f"{name} of {task.name} must give {valid}, got {got}")
