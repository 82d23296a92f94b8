"""Restricts a task's training prompts to a finite set, like a dataset."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po.config import COUNT, check_size
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.types import PyTree

Verdict = Callable[[PyTree, jax.Array], jax.Array]


def finite(task: Task, size: int, *, seed: int = 0) -> Task:
    """Limits a task to `size` fixed training prompts; the held-out split does not change.

    The prompts are from the task's train split. The set is never stored: prompt i is sampled with
    `fold_in(key(seed), i)`. Each draw takes one prompt, uniformly and with replacement. If the task
    has few problems, some problems are in the set more than once, under different numbers.

    Args:
      task: any task.
      size: number of prompts, at least 1.
      seed: random seed of the set.

    Returns:
      `Task` whose problem is `(number, problem)` and whose strata are the numbers (0 for held-out
      problems).

    Raises:
      ConfigError: `size` is below 1.

    Example:
      >>> from jaxrl_po.language.tasks import addition
      >>> few = finite(addition(2), 3)
      >>> keys = jax.random.split(jax.random.key(0), 100)
      >>> len({few.tokenizer.decode(few.sample(key, False).tokens.tolist()) for key in keys})
      3
    """
    size = check_size("prompt_set", size, COUNT)
    row = task.row

    def numbered(index: jax.Array, prompt: Prompt) -> Prompt:
        return prompt._replace(problem=(index, prompt.problem))

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        if held_out:
            return numbered(jnp.int32(0), task.sample(key, True))
        index = jax.random.randint(key, (), 0, size)
        drawn = jax.random.fold_in(jax.random.key(seed), index)
        return numbered(index, task.sample(drawn, False))

    def of_problem(function: Verdict | None) -> Verdict | None:
        return None if function is None else lambda problem, tokens: function(problem[1], tokens)

    return task._replace(
        sample=sample,
        demonstrate=lambda problem: task.demonstrate(problem[1]),
        score=lambda problem, tokens: task.score(problem[1], tokens),
        credit=lambda problem, tokens: task.credit(problem[1], tokens),
        parses=of_problem(task.parses),
        step_end=of_problem(task.step_end),
        row=None if row is None else lambda i: numbered(jnp.int32(0), row(i)),
        strata=size,
        stratum=lambda problem: problem[0],
    )
