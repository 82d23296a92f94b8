"""Tests the contract of a dialogue: types with 64 bits, and the part that breaks it."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from parrot import MODEL, parrot
from tables import cases

from jaxrl_po import language
from jaxrl_po.algorithms import grpo
from jaxrl_po.config import ConfigError
from jaxrl_po.language import dialogues


def wide():
    """Returns a dialogue that counts and answers in the widest integers and floats."""
    narrow = parrot(turns=2, budget=2, reply_length=2, heard=lambda n, first: n)

    def respond(*given):
        state, reply, reward, done = narrow.respond(*given)
        state, reply = jax.tree.map(lambda x: x.astype(int), (state, reply))
        return state, reply, jnp.asarray(reward, float), done

    return narrow._replace(respond=respond, demonstrate=lambda state, key: 2 + jnp.arange(2))


@cases(
    "make",
    wide,
    dialogues.mastermind,
    dialogues.higher_lower,
    dialogues.calculator,
    functools.partial(language.tasks.multiplication, 1),
)
def test_programs_fit_together_with_64_bits(make):
    """The programs are traced only: warm start, a step that returns the types of its arguments, an
    evaluation."""
    with jax.enable_x64(True):
        task = make()
        model = MODEL.clone(vocabulary=task.tokenizer.size)
        of_task = isinstance(task, language.Task)
        factory = language.make_problem if of_task else dialogues.make_problem
        warm = language.WarmStart(steps=2, accuracy=0.5, batch_size=2)
        given = {"num_prompts": 2, "group_size": 2, "warm": warm}
        learner = grpo.make(grpo.Config(), factory(task, model, **given))
        state = jax.eval_shape(learner.init, jax.random.key(0))
        chex.assert_trees_all_equal_dtypes(state, jax.eval_shape(learner.step, state)[0])
        kind = language if of_task else dialogues
        evaluate = kind.make_evaluate(task, model, num_prompts=2)
        jax.eval_shape(evaluate, state.params, state.collector, jax.random.key(0))
        if of_task:
            scored = grpo.make(grpo.Config(), language.make_problem(task, model, verify=False))
            state = jax.eval_shape(scored.init, jax.random.key(0))
            assert jax.eval_shape(scored.sample, state)[1].score.dtype == jnp.float32


def wrong(name, change):
    return pytest.param(change, name, id=name.replace(" ", "_"))


@cases(
    "change, names",
    wrong("respond: reward", lambda d: respond_with(d, 2, lambda x: jnp.int32(0))),
    wrong("respond: done", lambda d: respond_with(d, 3, lambda x: jnp.int32(0))),
    wrong("respond: state", lambda d: respond_with(d, 0, lambda x: (x, x))),
    wrong(
        "respond: tokens of the reply",
        lambda d: respond_with(d, 1, lambda x: x._replace(tokens=jnp.zeros(9, jnp.int32))),
    ),
    wrong("accuracy", lambda d: d._replace(accuracy=lambda state: jnp.zeros(2))),
    wrong("reset: tokens of the prompt", lambda d: d._replace(prompt_length=5)),
    wrong("max_turns", lambda d: d._replace(max_turns=0)),
    wrong(
        "demonstrate", lambda d: d._replace(demonstrate=lambda state, key: jnp.zeros(9, jnp.int32))
    ),
)
def test_a_broken_contract_is_named(change, names):
    dialogue = parrot(turns=2, budget=2, reply_length=1)
    with pytest.raises(ConfigError, match=names):
        dialogues.make_problem(change(dialogue), MODEL)


def respond_with(dialogue, index, change):
    def respond(*given):
        found = list(dialogue.respond(*given))
        found[index] = change(found[index])
        return tuple(found)

    return dialogue._replace(respond=respond)
