"""Supervised warm start of a policy on demonstrations of the train split."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import masked
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    UNIT,
    check,
    record,
    require_effect,
    static,
)
from jaxrl_po.distributions import Categorical
from jaxrl_po.language import sampling
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.transformer import Transformer

MEASURED = 256  # prompts per measurement of the accuracy
BETWEEN = 20  # steps between measurements


@record
class WarmStart:
    """Settings of the supervised warm start."""

    steps: int = static(
        0,
        "supervised steps on demonstrations before training, at most; 0 for none",
        unit="steps",
        within=NON_NEGATIVE,
    )
    accuracy: float = static(
        1.0,
        f"stop once the greedy accuracy on fresh prompts, measured every {BETWEEN} steps, "
        "reaches this; 1 runs all steps",
        within=UNIT,
    )
    batch_size: int = static(128, "demonstrations per step", within=COUNT)
    learning_rate: float = static(3e-3, "Adam's step size", within=POSITIVE)

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        check(self)
        require_effect(self, "accuracy", self.steps > 0, "steps is above 0")


def demonstration_loss(
    model: Transformer, params: Any, task: Task, key: jax.Array, batch_size: int
) -> jax.Array:
    """Cross-entropy of answer tokens, EOS included, over fresh demonstrations of the train split.

    Args:
      model: the policy.
      params: its parameters.
      task: where demonstrations come from.
      key: consumed.
      batch_size: number of demonstrations.

    Returns:
      The mean over tokens, nats.
    """
    prompts = jax.vmap(lambda key: task.sample(key, False))(jax.random.split(key, batch_size))
    answers = jax.vmap(task.demonstrate)(prompts.problem)
    tokens = jnp.concatenate([prompts.tokens, answers], axis=1)
    logits, _ = model.apply(params, tokens[:, :-1], prompts.pad, last=task.answer_length)
    # EOS is a target, the padding after it is not.
    length = jnp.argmax(answers == task.tokenizer.eos, axis=1) + 1
    mask = jnp.arange(task.answer_length)[None, :] < length[:, None]
    return masked.mean(-Categorical(logits).log_prob(answers), mask)


def greedy_accuracy(model: Transformer, params: Any, task: Task, key: jax.Array) -> jax.Array:
    """Mean score of the greedy answers to `MEASURED` fresh prompts of the train split.

    Scored by the verifier, since a correct answer need not be the demonstrated one. Consumes `key`.
    """
    # Greedy decoding draws nothing, so that the keys of the prompts can be passed on.
    keys = jax.random.split(key, MEASURED)
    prompts = jax.vmap(lambda key: task.sample(key, False))(keys)
    completions = sampling.generate(
        model,
        params,
        prompts.tokens,
        prompts.pad,
        keys,
        group_size=1,
        decoding=sampling.Decoding(task.answer_length),
        eos=task.tokenizer.eos,
        pad_token=task.tokenizer.pad,
        greedy=True,
    )
    return jax.vmap(task.score)(prompts.problem, completions.tokens).mean()


def warm_start(
    model: Transformer, params: Any, task: Task, settings: WarmStart, key: jax.Array
) -> Any:
    """Trains `params` on demonstrations with Adam until accurate enough; pure and jittable.

    Consumes `key`.

    Returns:
      Parameters after at most `settings.steps` steps (unchanged for 0).
    """
    if settings.steps == 0:
        return params
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))
    train_key, measure_key = jax.random.split(key)

    def step(i: jax.Array, carry: Any) -> Any:
        params, opt_state = carry
        gradient = jax.grad(demonstration_loss, argnums=1)(
            model, params, task, jax.random.fold_in(train_key, i), settings.batch_size
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    class Loop(NamedTuple):
        done: jax.Array
        accuracy: jax.Array
        carry: Any

    def unfinished(loop: Loop) -> jax.Array:
        return (loop.done < settings.steps) & (loop.accuracy < settings.accuracy)

    def train(loop: Loop) -> Loop:
        end = jnp.minimum(loop.done + BETWEEN, settings.steps)
        carry = jax.lax.fori_loop(loop.done, end, step, loop.carry)
        accuracy = greedy_accuracy(model, carry[0], task, jax.random.fold_in(measure_key, end))
        return Loop(end, accuracy, carry)

    start = params, optimizer.init(params)
    if settings.accuracy == 1.0:
        return jax.lax.fori_loop(0, settings.steps, step, start)[0]
    # An accuracy of −1: not measured yet, so that at least one round is trained.
    loop = Loop(jnp.int32(0), jnp.float32(-1.0), start)
    return jax.lax.while_loop(unfinished, train, loop).carry[0]
