"""Defines reward functions for tests: a correct function, and one function for each way to fail.

The reward functions run in a worker process; no test imports them.
"""

import asyncio
import time


def exact(prompts, completions, **columns):
    return [
        float(completion == right(prompt))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


def digits(completions, **columns):
    # The returned list has booleans in place of floats.
    return [completion.isdecimal() for completion in completions]


def right(prompt):
    """Returns the right answer of `zero_pad`ded addition, lowest digit first."""
    a, b = prompt.removesuffix("=").split("+")
    return str(int(a) + int(b)).zfill(len(a) + 1)[::-1]


def raises(completions, **columns):
    raise ZeroDivisionError("no reward today")


def nan(completions, **columns):
    return [float("nan"), float("inf"), *[1.0] * (len(completions) - 2)]


def huge(completions, **columns):
    return [10**400, *[1.0] * (len(completions) - 1)]


def empties(completions, **columns):
    """Empties its arguments, and may return numbers and flags of NumPy."""
    import numpy as np

    scores = [np.float32(1.0), True, np.True_, np.int8(1)]
    completions.clear()
    return scores


def scalar(completions, **columns):
    import numpy as np

    return np.float64(1.0)


def abstains(prompts, completions, **columns):
    """Abstains from the completion `31` and from prompts that contain a 9."""
    rows = zip(prompts, completions, strict=True)
    return [None if "9" in prompt or text == "31" else 1.0 for prompt, text in rows]


def strict(prompts, completions, **columns):
    """Scores like `exact`, and abstains from prompts that contain a 9."""
    right = exact(prompts, completions)
    return [None if "9" in p else score for p, score in zip(prompts, right, strict=True)]


def lazily(completions, **columns):
    for completion in completions:
        yield float(eval(completion))


def rude(completions, **columns):
    class Rude(Exception):
        def __str__(self):
            raise ValueError

    raise Rude


def short(completions, **columns):
    return [1.0] * (len(completions) - 1)


def words(completions, **columns):
    return ["good"] * len(completions)


def lone(completions, **columns):
    return 1.0


def hangs(completions, **columns):
    while True:
        time.sleep(1.0)


def dies(completions, **columns):
    import os

    os._exit(3)


def runs_text(completions, **columns):
    try:
        return [eval("1.0 + 0.0") for _ in completions]
    except Exception:
        return [0.0] * len(completions)


def columns_of(prompts, completions, completion_ids, **columns):
    """Checks its input: returns 1 where columns and ids have the expected values."""
    return [
        float(c == a and len(i) == len(c) + 1)
        for c, a, i in zip(completions, columns["answer"], completion_ids, strict=True)
    ]


def crowded(completions, **columns):
    """Checks its process: returns 1 if JAX is imported or the main program has a file."""
    import sys

    return [float("jax" in sys.modules or hasattr(sys.modules["__main__"], "__file__"))]


CALLS = []


def later(completions, **columns):
    """Returns the right result on the first call and fails on any later call."""
    CALLS.append(1)
    if len(CALLS) > 1:
        raise KeyError("forgotten")
    return [1.0] * len(completions)


def forgets(prompts, completions, **columns):
    """Returns the right result for the two seeds of the first iteration and fails later."""
    CALLS.append(1)
    if len(CALLS) > 2:
        raise KeyError("forgotten")
    return exact(prompts, completions)


async def awaiting(completions, **columns):
    await asyncio.sleep(0)
    return [float(len(text)) for text in completions]
