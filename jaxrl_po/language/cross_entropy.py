"""Trains by cross-entropy: draws demonstrations and computes the loss of their tokens.

The warm start and `algorithms.sft` minimise the same loss with `updates.gradient_update`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_po import losses
from jaxrl_po.language import conversation
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.tasks.types import Prompt, Sequences, Task
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.unembedding import next_tokens
from jaxrl_po.masked import Mean
from jaxrl_po.types import Batch, Metrics, PyTree, Samples, demonstration_batch
from jaxrl_po.updates import Loss


def draw_demonstrations(task: TaskLike, keys: jax.Array) -> Batch:
    """Draws demonstrations of the train split.

    Args:
      task: task that demonstrates answers, or dialogue that demonstrates messages.
      keys: random keys, `[B]`, consumed.

    Returns:
      Batch whose actions are answers `[B, A]` with EOS, or messages and replies.
    """
    if isinstance(task, Dialogue):
        return _join(*conversation.play_demonstrations(task, keys))
    return demonstrate(task, jax.vmap(lambda key: task.sample(key, False))(keys))


def demonstrate(task: Task, prompts: Prompt) -> Batch:
    """Demonstrates the answers to prompts, leaves `[B, …]`; see `draw_demonstrations`."""
    answers = jax.vmap(task.demonstrate)(prompts.problem)
    # EOS is a target of the loss, the padding after EOS is not.
    length = jnp.argmax(answers == task.tokenizer.eos, axis=1) + 1
    return _join(prompts, answers, jnp.arange(task.answer_length)[None, :] < length[:, None])


def _join(prompts: Prompt, tokens: jax.Array, mask: jax.Array) -> Batch:
    inputs = Sequences(jnp.concatenate([prompts.tokens, tokens], axis=1), prompts.pad)
    return demonstration_batch(inputs, tokens, mask)


def to_samples(batch: Batch) -> Samples:
    """Returns the samples of a batch, each with an advantage of 1."""
    advantage = jnp.ones(batch.mask.shape)
    return Samples(batch.inputs, batch.action, batch.log_prob, advantage, batch.mask)


def token_log_prob(model: Transformer, params: PyTree, samples: Samples) -> jax.Array:
    """Returns the model's log-probability of each demonstrated token, `[B, A]`, in nats."""
    tokens, pad = samples.inputs.tokens, samples.inputs.pad
    distribution = next_tokens(model, params, tokens[:, :-1], pad, last=samples.mask.shape[1])
    return distribution.log_prob(samples.action)


def make_loss(log_prob: Callable[[PyTree, Samples], jax.Array]) -> Loss:
    """Builds `loss(params, samples)`, the cross entropy `−log π(a | s)` of demonstrated actions.

    The loss equals the loss of REINFORCE with demonstrations in place of samples.

    Args:
      log_prob: `(params, samples) -> [B, T]`, `log π(a | s)` of the samples' actions.

    Returns:
      Loss function in the form of `updates.gradient_update`; its mean is over the mask, in nats.
    """

    def loss(params: PyTree, samples: Samples) -> tuple[tuple[Mean, ...], Metrics]:
        elements = losses.policy_gradient(log_prob(params, samples), samples.advantage)
        mean = losses.token_mean(elements, samples.mask)
        return (mean,), {"loss": mean}

    return loss
