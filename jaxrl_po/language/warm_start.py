"""Supervised warm start of a policy on demonstrations of the train split."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxrl_po import optimizers, updates
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, UNIT, common, record, static
from jaxrl_po.language import conversation, cross_entropy, sampling
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.transformer import Transformer

MEASURED = 256  # number of prompts per measurement of the accuracy
BETWEEN = 20  # number of steps between measurements


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


def greedy_accuracy(model: Transformer, params: Any, task: TaskLike, key: jax.Array) -> jax.Array:
    """Computes the mean score of greedy answers to `MEASURED` fresh prompts of the train split.

    The verifier scores the answers, since a correct answer need not be the demonstrated answer. For
    a dialogue, the score is the accuracy of its last state. Consumes `key`.
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
    # Greedy decoding does not use random numbers, so it can receive the keys of the prompts.
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


class WarmStartState(NamedTuple):
    """State of a warm start after some of its steps.

    Attributes:
      params: parameters of the policy.
      opt_state: state of Adam.
      key: random key, which determines all random numbers together with the number of the step.
      accuracy: last measured accuracy, −1 before the first measurement, `[]`, float32.
    """

    params: Any
    opt_state: Any
    key: jax.Array
    accuracy: jax.Array


def begin_warm_start(settings: WarmStart, params: Any, key: jax.Array) -> WarmStartState:
    """Returns the warm start before its first step; consumes `key`."""
    return WarmStartState(params, make_optimizer(settings).init(params), key, jnp.float32(-1.0))


def make_optimizer(settings: WarmStart) -> optax.GradientTransformation:
    """Returns Adam with clipped gradients, leaf by leaf, since a flat norm rounds differently."""
    rate = settings.learning_rate
    return optimizers.adam(rate, max_grad_norm=1.0, epsilon=1e-8, flat_up_to=0)


def unfinished(settings: WarmStart, done: Any, accuracy: Any) -> Any:
    """Returns True if steps remain after `done` steps and the accuracy is below its target."""
    return (done < settings.steps) & (accuracy < settings.accuracy)


def advance(
    model: Transformer, task: TaskLike, settings: WarmStart, fit: WarmStartState, done: Any
) -> WarmStartState:
    """Takes `BETWEEN` further steps, or all that are left, and measures the accuracy.

    The accuracy is not measured if `settings.accuracy` is 1. A fit that is accurate enough does not
    change. The function is pure and jittable.

    Args:
      model: transformer of the policy.
      task: task or dialogue that gives the demonstrations.
      settings: number of steps, target accuracy and settings of Adam.
      fit: state after `done` steps.
      done: number of steps taken so far, `[]`, int32, below `settings.steps`.
    """
    optimizer = make_optimizer(settings)
    train_key, measure_key = jax.random.split(fit.key)
    end = jnp.minimum(done + BETWEEN, settings.steps)
    loss = cross_entropy.make_loss(functools.partial(cross_entropy.token_log_prob, model))

    def step(i: jax.Array, carry: Any) -> Any:
        key = jax.random.fold_in(train_key, i)
        batch = cross_entropy.draw_demonstrations(task, jax.random.split(key, settings.batch_size))

        def update(gradient: Any, state: Any, params: Any) -> Any:
            # All seeds share Adam's step count, so that powers of its decays round as in one loop.
            return optimizer.update(gradient, optax.tree_utils.tree_set(state, count=i), params)

        take = updates.gradient_update(loss, optax.GradientTransformation(optimizer.init, update))
        params, opt_state, _ = take(*carry, cross_entropy.to_samples(batch), key)
        return params, opt_state

    def train(fit: WarmStartState) -> WarmStartState:
        params, opt_state = jax.lax.fori_loop(done, end, step, (fit.params, fit.opt_state))
        accuracy = fit.accuracy
        if settings.accuracy < 1.0:
            measured = greedy_accuracy(model, params, task, jax.random.fold_in(measure_key, end))
            accuracy = measured.astype(fit.accuracy.dtype)
        return WarmStartState(params, opt_state, fit.key, accuracy)

    if settings.accuracy == 1.0:
        return train(fit)
    return jax.lax.cond(fit.accuracy < settings.accuracy, train, lambda fit: fit, fit)


def warm_start(
    model: Transformer, params: Any, task: TaskLike, settings: WarmStart, key: jax.Array
) -> Any:
    """Trains `params` on demonstrations with Adam until accurate enough, as a pure function.

    Consumes `key`.

    Returns:
      Parameters after at most `settings.steps` steps (unchanged for 0 steps).
    """
    if settings.steps == 0:
        return params

    # The loop counts by one, since XLA's CPU compiler drops `while done < 1: done += BETWEEN`.
    def body(loop: tuple[jax.Array, WarmStartState]) -> tuple[jax.Array, WarmStartState]:
        rounds, fit = loop
        return rounds + 1, advance(model, task, settings, fit, rounds * BETWEEN)

    _, fit = jax.lax.while_loop(
        lambda loop: unfinished(settings, loop[0] * BETWEEN, loop[1].accuracy),
        body,
        (jnp.int32(0), begin_warm_start(settings, params, key)),
    )
    return fit.params
