"""Supervised warm start: a policy that already answers some prompts, from demonstrations of the train split."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import masked
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, UNIT, check, record, static
from jaxrl_po.distributions import Categorical
from jaxrl_po.language.tasks import Task
from jaxrl_po.language.transformer import Transformer


@record
class WarmStart:
    """Settings of the supervised warm start."""

    steps: int = static(
        0, "supervised steps on demonstrations before training, at most; 0 for none", unit="steps", within=NON_NEGATIVE
    )
    accuracy: float = static(
        1.0, "stop once the greedy accuracy on fresh demonstrations (averaged over about 10 steps) reaches it", within=UNIT
    )
    batch_size: int = static(128, "demonstrations of one step", within=COUNT)
    learning_rate: float = static(3e-3, "Adam's step size", within=POSITIVE)

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range."""
        check(self)


def demonstration_loss(
    model: Transformer, params: Any, task: Task, key: jax.Array, batch_size: int
) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of answer tokens, EOS included, over fresh demonstrations of the train split.

    Args:
      model: the policy.
      params: its parameters.
      task: where demonstrations come from.
      key: consumed.
      batch_size: demonstrations.

    Returns:
      The mean over tokens, nats, and the share of prompts whose whole answer is the most likely token at every step: the greedy
      accuracy, since a greedy completion is right exactly then.
    """
    prompts = jax.vmap(lambda key: task.sample(key, False))(jax.random.split(key, batch_size))
    answers = jax.vmap(task.demonstrate)(prompts.problem)
    tokens = jnp.concatenate([prompts.tokens, answers], axis=1)
    logits, _ = model.apply(params, tokens[:, :-1], prompts.pad, last=task.answer_length)
    distribution = Categorical(logits)
    # EOS ends an answer: it belongs to what is learnt, whatever follows does not.
    length = jnp.argmax(answers == task.tokenizer.eos, axis=1) + 1
    mask = jnp.arange(task.answer_length)[None, :] < length[:, None]
    right = jnp.all((distribution.mode() == answers) | ~mask, axis=1)
    return masked.mean(-distribution.log_prob(answers), mask), right.mean()


def warm_start(model: Transformer, params: Any, task: Task, settings: WarmStart, key: jax.Array) -> Any:
    """Trains `params` on demonstrations with Adam until accurate enough, pure and jittable; consumes `key`.

    Returns:
      Parameters after at most `settings.steps` steps (unchanged for 0).
    """
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))

    def unfinished(carry: Any) -> jax.Array:
        step, accuracy, _, _ = carry
        return (step < settings.steps) & (accuracy < settings.accuracy)

    def train(carry: Any) -> Any:
        step, accuracy, params, opt_state = carry

        def loss(params: Any) -> tuple[jax.Array, jax.Array]:
            return demonstration_loss(model, params, task, jax.random.fold_in(key, step), settings.batch_size)

        gradient, right = jax.grad(loss, has_aux=True)(params)
        proposal, opt_state = optimizer.update(gradient, opt_state, params)
        return step + 1, 0.9 * accuracy + 0.1 * right, optax.apply_updates(params, proposal), opt_state

    start = (jnp.int32(0), jnp.float32(0.0), params, optimizer.init(params))
    return jax.lax.while_loop(unfinished, train, start)[2]
