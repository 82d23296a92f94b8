"""Tests that many seeds under vmap sample in one loop: all seeds share the loop's counter."""

import math

import jax
import pytest
from learners import dialogue_problem, language_problem
from traced import equations


def places(jaxpr):
    """Returns the number of places that each write into an array goes to, in a program at any
    depth."""
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name == "dynamic_update_slice":
            found.append(1)
        if equation.primitive.name == "scatter":
            found.append(math.prod(equation.invars[1].aval.shape[:-1]))
    return found


@pytest.mark.parametrize("make", [language_problem, dialogue_problem])
def test_seeds_write_in_one_slice(make):
    """A counter for each seed would turn every write to the cache into a scatter over seeds."""
    problem = make()

    def collect(key):
        init_key, key = jax.random.split(key)
        return problem.collect(*problem.init(init_key), key)[1].action

    keys = jax.random.split(jax.random.key(0), 3)
    alone, together = (
        places(jax.make_jaxpr(program)(key).jaxpr).count(1)
        for program, key in ((collect, keys[0]), (jax.vmap(collect), keys))
    )
    assert together == alone > 0
