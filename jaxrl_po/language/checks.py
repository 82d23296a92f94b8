"""Checks that a task or dialogue, a model and its parameters fit each other."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import variables
from jaxrl_po.backend import Target
from jaxrl_po.config import NON_NEGATIVE, ConfigError, check, check_size
from jaxrl_po.language import lora, unembedding
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.types import PyTree


def check_budget(task: TaskLike, max_new_tokens: int) -> int:
    """Returns the token budget; a budget of 0 stands for the length of the task's longest answer.

    Raises:
      ConfigError: the budget is below the longest answer, or is not a whole number.
    """
    budget = check_size("max_new_tokens", max_new_tokens, NON_NEGATIVE) or task.answer_length
    if budget < task.answer_length:
        raise ConfigError(
            "max_new_tokens",
            f"must be at least {task.answer_length}, the longest answer of {task.name} with its "
            f"EOS, got {budget}",
        )
    return budget


def check_decoding(task: TaskLike, model: Transformer, decoding: Decoding) -> Decoding:
    """Returns the decoding with its budget; raises ConfigError unless it fits task and model."""
    settings = SamplingSettings(**decoding._asdict())
    check(settings)
    check_vocabulary(task, model)
    check_top_k(settings.top_k, model)
    budget = check_budget(task, settings.max_new_tokens)
    return settings.decoding._replace(max_new_tokens=budget)


def check_vocabulary(task: TaskLike, model: Transformer, name: str = "model") -> None:
    """Raises ConfigError unless the model, called `name`, has the tokenizer's vocabulary."""
    variables.require_module(name, model, "vocabulary")
    if model.vocabulary != task.tokenizer.size:
        raise ConfigError(
            name,
            f"vocabulary must be {task.tokenizer.size}, as in {task.name}, got {model.vocabulary}",
        )


def check_parameters(model: Transformer, params: PyTree, name: str = "initial") -> None:
    """Raises ConfigError if parameters, given as argument `name`, do not fit the model."""
    expected_shapes = dict(model.parameter_shapes())
    expected_shapes.pop(lora.ADAPTERS, None)
    shapes = [
        {
            jax.tree_util.keystr(path): leaf.shape
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        }
        for tree in (params, expected_shapes)
    ]
    for path in sorted(shapes[0].keys() | shapes[1].keys()):
        given, expected = (shape.get(path, "nothing") for shape in shapes)
        if given != expected:
            raise ConfigError(
                name, f"must be parameters of the model: {path} must be {expected}, got {given}"
            )


def check_adapters(model: Transformer) -> None:
    """Raises ConfigError if a model's adapters are invalid or target matrices that it lacks."""
    adapters: lora.Lora | None = getattr(model, "lora", None)
    if adapters is None:
        return
    adapters.validate()
    if not jax.tree.leaves(model.parameter_shapes().get(lora.ADAPTERS)):
        raise ConfigError(
            "targets",
            f"must name matrices of the model, which has no {', '.join(adapters.targets)}",
        )


def check_attention(model: Transformer | None, target: Target) -> None:
    """Raises ConfigError if fused attention is requested and the target lacks a kernel."""
    if model is None or not getattr(model, "fused_attention", False):
        return
    found = model.clone(target=target).fused
    if isinstance(found, str):
        raise ConfigError("fused_attention", f"must be left out here: {found}")


def check_module(task: TaskLike, model: Any, name: str) -> None:
    """Raises ConfigError if a custom module `name` draws numbers or writes variables in `apply`."""
    if isinstance(model, Transformer) or not variables.is_flax(model):
        return
    given = jnp.zeros((1, task.prompt_length), jnp.int32), jnp.zeros(1, jnp.int32)
    with variables.applied(name):
        jax.eval_shape(lambda key: model.apply(model.init(key, *given), *given), jax.random.key(0))


def check_top_k(top_k: int, model: Transformer) -> None:
    """Raises ConfigError if `top_k` exceeds the vocabulary, or `LISTED` with a large vocabulary."""
    if top_k > model.vocabulary:
        raise ConfigError(
            "top_k", f"must be at most {model.vocabulary}, the vocabulary, got {top_k}"
        )
    if model.vocabulary > unembedding.HELD and top_k > unembedding.LISTED:
        raise ConfigError(
            "top_k",
            f"must be at most {unembedding.LISTED} with a vocabulary of {model.vocabulary}, got "
            f"{top_k}",
        )
