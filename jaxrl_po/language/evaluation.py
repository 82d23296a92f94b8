"""Evaluation of a language policy on held-out prompts."""

from collections.abc import Callable

import jax

from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.language import sampling
from jaxrl_po.language.problem import check_budget
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import Actor, ActorCritic

Evaluate = Callable[[ActorCritic, Actor, jax.Array], dict[str, jax.Array]]


def make_evaluate(
    task: Task,
    model: Transformer,
    *,
    num_prompts: int = 256,
    max_new_tokens: int = 0,
    temperature: float = 1.0,
    greedy: bool = True,
) -> Evaluate:
    """Builds `evaluate(params, actor, key) -> {"accuracy", "length"}`, each `[num_prompts]`, on the held-out split.

    Args:
      task: see `Task`.
      model: the policy.
      num_prompts: held-out prompts.
      max_new_tokens: token budget; 0 takes the task's longest answer.
      temperature: of sampling, where not greedy.
      greedy: take the most likely token at every step; otherwise sample.

    Returns:
      The function; the same key asks the same prompts.

    Raises:
      ConfigError: names the argument that cannot work.
    """
    if num_prompts not in COUNT:
        raise ConfigError(f"num_prompts must lie in {COUNT}, got {num_prompts}")
    budget = check_budget(task, max_new_tokens)

    def evaluate(params: ActorCritic, actor: Actor, key: jax.Array) -> dict[str, jax.Array]:
        del actor
        keys = jax.vmap(jax.random.split)(jax.random.split(key, num_prompts))
        prompts = jax.vmap(lambda key: task.sample(key, True))(keys[:, 0])
        completions = sampling.generate(
            model,
            params.policy,
            prompts.tokens,
            prompts.pad,
            keys[:, 1],
            group_size=1,
            max_new_tokens=budget,
            temperature=temperature,
            eos=task.tokenizer.eos,
            pad_token=task.tokenizer.pad,
            greedy=greedy,
        )
        accuracy = jax.vmap(task.score)(prompts.problem, completions.tokens)
        return {"accuracy": accuracy, "length": completions.length}

    return evaluate
