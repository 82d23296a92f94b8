"""A sum whose answer may follow a scratch of any length."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import Interval
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import MAX_LENGTH, Piece, literal, write_answer, write_prompt
from jaxrl_po.language.tasks.types import Prompt, Task, check_size
from jaxrl_po.language.tasks.verify import after_scratch, at_end, last_token_only
from jaxrl_po.language.tokenizer import make_tokenizer

MAX_FILLER = 256  # dots of a demonstration

Problem = tuple[jax.Array, jax.Array]


def running_sum(length: int, *, modulus: int = 10, max_filler: int = 8) -> Task:
    """The sum of a list of digits modulo `modulus`, after as long a scratch as the policy likes.

    `3141=` is answered by `#9` and EOS, by `3489#9` with the sums so far, by `...3489#9`, or by any
    other text of the alphabet before the last `#`: only what follows that `#` is scored. The length
    of a right answer is therefore free. Its scratch pays (each sum so far needs but one addition),
    its filler does not: a demonstration opens with 0 to `max_filler` dots, their number drawn with
    the problem, so that a policy warm-started on them is wordy, and overlong shaping has something
    to do.

    `credit` is the score, at EOS: no part of a free scratch is right or wrong. One multiset of
    digits in ten is held out.

    Args:
      length: digits of a list, in [2, 64]; grades the difficulty.
      modulus: of the sums, in [2, 10].
      max_filler: most dots of a demonstration, tokens, in [0, 256].

    Returns:
      The task; its problem is the list, `[length]`, and the dots of the demonstration.

    Raises:
      ConfigError: an argument outside its range.

    Example:
      >>> task = running_sum(4)
      >>> problem = (jnp.array([3, 1, 4, 1], jnp.uint32), jnp.int32(2))
      >>> task.tokenizer.decode(task.demonstrate(problem).tolist())
      '..3489#9'
    """
    check_size("length", length, Interval(2, MAX_LENGTH))
    check_size("modulus", modulus, Interval(2, 10))
    check_size("max_filler", max_filler, Interval(0, MAX_FILLER))
    tokenizer = make_tokenizer("0123456789=#.")
    zero, dots = tokenizer.ids["0"], literal("." * max_filler, tokenizer)
    draw = make_draw([(0, 10)] * length, canonical=jnp.sort, advice="raise length")

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        draw_key, filler_key = jax.random.split(key)
        values, filler = (
            draw(draw_key, held_out),
            jax.random.randint(filler_key, (), 0, max_filler + 1),
        )
        text = Piece(zero + values.astype(np.int32), length)
        return write_prompt(
            [text, literal("=", tokenizer)], length + 1, tokenizer, (values, filler)
        )

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
