"""Defines sums of digits whose answer may follow a scratchpad of any length."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import MAX_LENGTH, Piece, literal, write_answer, write_prompt
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import after_scratch, at_end, last_token_only
from jaxrl_po.language.tokenizer import make_tokenizer

MAX_FILLER = 256  # largest number of dots in a demonstration

Problem = tuple[jax.Array, jax.Array]


@config.record
class RunningSumSettings:
    """Settings of `--task=running_sum`."""

    length: int = common.static(
        6, "digits of a list", unit="digits", within=Interval(2, MAX_LENGTH)
    )
    modulus: int = static(10, "modulus of the sums", within=Interval(2, 10))
    max_filler: int = static(
        8,
        "maximum number of filler tokens in a demonstration",
        unit="tokens",
        within=Interval(0, MAX_FILLER),
    )


def running_sum(length: int, *, modulus: int = 10, max_filler: int = 8) -> Task:
    """Builds the task: sum a list of digits modulo `modulus`, after a scratchpad of any length.

    Correct answers to `3141=` are `#9` and EOS, `3489#9` with the partial sums, `...3489#9`, or any
    other text of the alphabet before the last `#`: only the text after the last `#` is scored, so
    that a correct answer can have any length. Partial sums help (each needs one addition), filler
    does not: a demonstration starts with 0 to `max_filler` dots, their number drawn with the
    problem, so that a policy warm-started on them is verbose and overlong shaping has something to
    shorten.

    `credit` is the score, at EOS: no part of a free scratchpad is right or wrong. One multiset of
    digits in ten is held out.

    Args:
      length: number of digits in a list, in [2, 64]; sets the difficulty.
      modulus: modulus of the sums, in [2, 10].
      max_filler: maximum number of dots in a demonstration, in [0, 256].

    Returns:
      `Task` whose problem is the list, `[length]`, and the number of dots.

    Raises:
      ConfigError: an argument is outside its range.

    Example:
      >>> task = running_sum(4)
      >>> problem = (jnp.array([3, 1, 4, 1], jnp.uint32), jnp.int32(2))
      >>> task.tokenizer.decode(task.demonstrate(problem).tolist())
      '..3489#9'
    """
    length = check_size("length", length, Interval(2, MAX_LENGTH))
    modulus = check_size("modulus", modulus, Interval(2, 10))
    max_filler = check_size("max_filler", max_filler, Interval(0, MAX_FILLER))
    tokenizer = make_tokenizer("0123456789=#.")
    zero, dots = tokenizer.ids["0"], literal("." * max_filler, tokenizer)
    draw = make_draw([(0, 10)] * length, canonical=jnp.sort, advice="raise length")

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        draw_key, filler_key = jax.random.split(key)
        values = draw(draw_key, held_out)
        filler = jax.random.randint(filler_key, (), 0, max_filler + 1)
        pieces = [Piece(zero + values.astype(np.int32), length), literal("=", tokenizer)]
        return write_prompt(pieces, length + 1, tokenizer, (values, filler))

    def sums(problem: Problem) -> jax.Array:
        return zero + (jnp.cumsum(problem[0], dtype=np.int32) % modulus)

    def demonstrate(problem: Problem) -> jax.Array:
        scratch = sums(problem)
        pieces = [
            Piece(dots.tokens, problem[1]),
            Piece(scratch, length),
            literal("#", tokenizer),
            Piece(scratch[-1:], 1),
        ]
        return write_answer(pieces, max_filler + length + 3, tokenizer)

    def answer(problem: Problem) -> jax.Array:
        return write_answer([Piece(sums(problem)[-1:], 1)], 2, tokenizer)

    score, parses = after_scratch(answer, tokenizer)

    def credit(problem: Problem, tokens: jax.Array) -> jax.Array:
        return at_end(score(problem, tokens), tokens, tokenizer)

    name = f"running sum of {length} digits modulo {modulus}"
    return Task(
        name,
        tokenizer,
        length + 1,
        max_filler + length + 3,
        sample,
        demonstrate,
        score,
        credit,
        parses,
        step_end=last_token_only,
    )
