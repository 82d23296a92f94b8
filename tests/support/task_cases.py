"""Describes every task by an independent version in plain Python: patterns, answers, a verifier."""

import functools
import re
from collections.abc import Callable, Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.language import tasks


def texts(task, tokens):
    return [task.tokenizer.decode(row) for row in tokens.tolist()]


class Case(NamedTuple):
    """Task with an independent description: pattern of prompts, right answers, equal problems."""

    task: tasks.Task
    prompt: str  # pattern that every prompt matches
    answer: Callable[[re.Match], str] | None  # None if a problem has several right answers
    problem: Callable[[re.Match], Hashable]
    shape: str = r"\d+"  # pattern that every answer matches
    scratch: bool = False


def reverse(value, width):
    return str(value)[::-1].ljust(width, "0")


def pair(found):
    return tuple(sorted(map(int, found.groups())))


def multiset(found):
    return tuple(sorted(found[1]))


def product(found):
    return int(found[1]) * int(found[2])


def numbers(found):
    return tuple(sorted(map(int, found[1].split(","))))


def sum_of_digits(found):
    return sum(map(int, found[1]))


@functools.cache
def cases():
    return {
        "addition": Case(
            tasks.addition(3),
            r"(\d{3})\+(\d{3})=",
            lambda m: reverse(sum(pair(m)), 4),
            pair,
        ),
        "addition, ragged": Case(
            tasks.addition(9, zero_pad=False, reverse=False),
            r"(\d{1,9})\+(\d{1,9})=",
            lambda m: str(sum(pair(m))),
            pair,
        ),
        "multiplication": Case(
            tasks.multiplication(3),
            r"(\d{3})\*(\d{3})=",
            lambda m: reverse(product(m), 6),
            pair,
            scratch=True,
        ),
        "sorting": Case(
            tasks.sorting(6, symbols=3),
            r"([0-2]{6})=",
            lambda m: "".join(multiset(m)),
            multiset,
            shape="[0-2]+",
        ),
        "countdown": Case(
            tasks.countdown(3, max_number=15), r"((?:\d\d,){2}\d\d)>(\d{3})=", None, numbers
        ),
        "running sum": Case(
            tasks.running_sum(4),
            r"(\d{4})=",
            lambda m: str(sum_of_digits(m) % 10),
            multiset,
            scratch=True,
        ),
        "running sum, terse": Case(
            tasks.running_sum(5, modulus=7, max_filler=0),
            r"(\d{5})=",
            lambda m: str(sum_of_digits(m) % 7),
            multiset,
            scratch=True,
        ),
    }


EVERY = pytest.mark.parametrize("name", cases())


def postfix(text, width):
    """Returns the numbers and the value of a postfix expression, or None if the text is not a
    postfix expression."""
    stack, used = [], []
    while text:
        if re.match(rf"\d{{{width}}}", text):
            used.append(int(text[:width]))
            stack.append(used[-1])
            text = text[width:]
        elif text[0] in "+-*" and len(stack) > 1:
            b, a = stack.pop(), stack.pop()
            stack.append({"+": a + b, "-": a - b, "*": a * b}[text[0]])
            text = text[1:]
        else:
            return None
    return (tuple(sorted(used)), stack[0]) if len(stack) == 1 else None


def judge(case, prompt, row):
    """Returns whether a completion parses, and whether the completion is right."""
    eos, pad = case.task.tokenizer.eos, case.task.tokenizer.pad
    row = row.tolist()
    if eos not in row or pad in row[: row.index(eos)] or set(row[row.index(eos) + 1 :]) - {pad}:
        return False, False
    text, found = case.task.tokenizer.decode(row), re.fullmatch(case.prompt, prompt)
    if case.answer is None:
        result = postfix(text, found[1].find(","))
        return result is not None, result == (numbers(found), int(found[2]))
    if case.scratch:
        text = text.rpartition("#")[2] if "#" in text else ""
    return re.fullmatch(case.shape, text) is not None, text == case.answer(found)


COUNT = 200


@functools.cache
def sampler(name):
    task = cases()[name].task

    def draw(keys, held_out):
        prompts = jax.vmap(lambda key: task.sample(key, held_out))(keys)
        return prompts, jax.vmap(task.demonstrate)(prompts.problem)

    return jax.jit(
        lambda keys: jax.tree.map(
            lambda *x: jnp.concatenate(x), draw(keys, False), draw(keys, True)
        )
    )


@functools.cache
def drawn(name, seed=0):
    """Returns `COUNT` prompts and demonstrations of each split, the train split first."""
    # the default generator, Threefry, takes three times as long to compile
    keys = jax.random.split(jax.random.key(seed, impl="unsafe_rbg"), COUNT)
    return jax.tree.map(np.asarray, sampler(name)(keys))


@functools.cache
def verifier(name):
    task = cases()[name].task
    return jax.jit(
        jax.vmap(
            lambda problem, tokens: [
                f(problem, tokens) for f in (task.score, task.credit, task.parses)
            ]
        )
    )
