"""Supervised warm start of a policy on demonstrations of the train split."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import masked
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, UNIT, common, record, static
from jaxrl_po.language import conversation, sampling
from jaxrl_po.language.dialogue import AnyTask, Dialogue
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.language.unembedding import next_tokens

MEASURED = 256  # prompts per measurement of the accuracy
BETWEEN = 20  # steps between measurements


@record
class WarmStart:
    """Settings of the supervised warm start."""

    steps: int = common.static(
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
        when=("steps", COUNT),
    )
    batch_size: int = static(128, "demonstrations per step", within=COUNT)
    learning_rate: float = common.static(3e-3, "Adam's step size", within=POSITIVE)


def drawn(task: AnyTask, keys: jax.Array) -> tuple[Prompt, jax.Array, jax.Array]:
    """Fresh demonstrations of the train split.

    Args:
      task: or dialogue, in which the tokens of messages are demonstrated.
      keys: `[B]`, consumed.

    Returns:
      Prompts, answers `[B, A]` with EOS, and which of their tokens are targets `[B, A]`.
    """
    if isinstance(task, Dialogue):
        return conversation.demonstrations(task, keys)
    return answered(task, jax.vmap(lambda key: task.sample(key, False))(keys))


def answered(task: Task, prompts: Prompt) -> tuple[Prompt, jax.Array, jax.Array]:
    """Prompts with their answers; see `drawn`."""
    answers = jax.vmap(task.demonstrate)(prompts.problem)
    # EOS is a target, the padding after it is not.
    length = jnp.argmax(answers == task.tokenizer.eos, axis=1) + 1
    return prompts, answers, jnp.arange(task.answer_length)[None, :] < length[:, None]


def demonstration_loss(
    model: Transformer, params: Any, task: AnyTask, key: jax.Array, batch_size: int
) -> jax.Array:
    """Cross-entropy of answer tokens, EOS included, over fresh demonstrations of the train split.

    In a dialogue these are the tokens of messages.

    Args:
      model: the policy.
      params: its parameters.
      task: where demonstrations come from.
      key: consumed.
      batch_size: number of demonstrations.

    Returns:
      The mean over tokens, nats.
    """
    prompts, answers, mask = drawn(task, jax.random.split(key, batch_size))
    tokens = jnp.concatenate([prompts.tokens, answers], axis=1)
    distribution = next_tokens(model, params, tokens[:, :-1], prompts.pad, last=answers.shape[1])
    return masked.mean(-distribution.log_prob(answers), mask)


def greedy_accuracy(model: Transformer, params: Any, task: AnyTask, key: jax.Array) -> jax.Array:
    """Mean score of the greedy answers to `MEASURED` fresh prompts of the train split.

    Scored by the verifier, since a correct answer need not be the demonstrated one. In a dialogue
    it is the accuracy of its last state. Consumes `key`.
    """
    keys = jax.random.split(key, MEASURED)
    decoding = sampling.Decoding(task.answer_length)
    if isinstance(task, Dialogue):
        keys = jax.vmap(jax.random.split)(keys)
        prompt, state = jax.vmap(lambda key: task.reset(key, False))(keys[:, 0])
        held = conversation.converse(
            *(model, params, task, prompt, state, keys[:, 1]),
            group_size=1,
            decoding=decoding,
            greedy=True,
        )
        return jax.vmap(task.accuracy)(held.state).mean()
    # Greedy decoding draws nothing, so that the keys of the prompts can be passed on.
    prompts = jax.vmap(lambda key: task.sample(key, False))(keys)
    completions = sampling.generate(
        model,
        params,
        prompts.tokens,
        prompts.pad,
        keys,
        group_size=1,
        decoding=decoding,
        eos=ends_of(task.tokenizer),
        pad_token=task.tokenizer.pad,
        greedy=True,
    )
    return jax.vmap(task.score)(prompts.problem, completions.tokens).mean()


class Fit(NamedTuple):
    """A warm start after some of its steps.

    Attributes:
      params: of the policy.
      opt_state: of Adam.
      key: all random numbers follow from it and the number of the step.
      accuracy: `[]`, float32, as last measured; −1 before that.
    """

    params: Any
    opt_state: Any
    key: jax.Array
    accuracy: jax.Array


def begin(settings: WarmStart, params: Any, key: jax.Array) -> Fit:
    """The warm start before its first step; consumes `key`."""
    return Fit(params, make_optimizer(settings).init(params), key, jnp.float32(-1.0))


def make_optimizer(settings: WarmStart) -> optax.GradientTransformation:
    """Adam on clipped gradients."""
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(settings.learning_rate))


def unfinished(settings: WarmStart, done: Any, accuracy: Any) -> Any:
    """Whether steps remain after `done` of them and the accuracy is below the wanted one."""
    return (done < settings.steps) & (accuracy < settings.accuracy)


def advance(model: Transformer, task: AnyTask, settings: WarmStart, fit: Fit, done: Any) -> Fit:
    """Takes the `BETWEEN` steps after `done`, or as many as are left, and measures the accuracy.

    The accuracy is not measured if all steps are wanted. A fit that is accurate enough does not
    change. Pure and jittable.

    Args:
      model: the policy.
      task: where demonstrations come from.
      settings: see `WarmStart`.
      fit: after `done` steps.
      done: `[]`, int32, below `settings.steps`.
    """
    optimizer = make_optimizer(settings)
    train_key, measure_key = jax.random.split(fit.key)
    end = jnp.minimum(done + BETWEEN, settings.steps)

    def step(i: jax.Array, carry: Any) -> Any:
        params, opt_state = carry
        gradient = jax.grad(demonstration_loss, argnums=1)(
            model, params, task, jax.random.fold_in(train_key, i), settings.batch_size
        )
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def train(fit: Fit) -> Fit:
        # All seeds share Adam's count, so that its powers round as in a single loop.
        begun = optax.tree_utils.tree_set(fit.opt_state, count=done)
        params, opt_state = jax.lax.fori_loop(done, end, step, (fit.params, begun))
        accuracy = fit.accuracy
        if settings.accuracy < 1.0:
            measured = greedy_accuracy(model, params, task, jax.random.fold_in(measure_key, end))
            accuracy = measured.astype(fit.accuracy.dtype)
        return Fit(params, opt_state, fit.key, accuracy)

    if settings.accuracy == 1.0:
        return train(fit)
    return jax.lax.cond(fit.accuracy < settings.accuracy, train, lambda fit: fit, fit)


def warm_start(
    model: Transformer, params: Any, task: AnyTask, settings: WarmStart, key: jax.Array
) -> Any:
    """Trains `params` on demonstrations with Adam until accurate enough; pure and jittable.

    Consumes `key`.

    Returns:
      Parameters after at most `settings.steps` steps (unchanged for 0).
    """
    if settings.steps == 0:
        return params

    # XLA's CPU compiler drops `while done < 1: done += BETWEEN`, so that the loop counts by one.
    def body(loop: tuple[jax.Array, Fit]) -> tuple[jax.Array, Fit]:
        rounds, fit = loop
        return rounds + 1, advance(model, task, settings, fit, rounds * BETWEEN)

    _, fit = jax.lax.while_loop(
        lambda loop: unfinished(settings, loop[0] * BETWEEN, loop[1].accuracy),
        body,
        (jnp.int32(0), begin(settings, params, key)),
    )
    return fit.params
