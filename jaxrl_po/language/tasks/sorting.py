"""Defines sorting a list of digits."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config
from jaxrl_po.config import Interval, check_size, common, static
from jaxrl_po.language.tasks.split import make_draw
from jaxrl_po.language.tasks.text import MAX_LENGTH, Piece, literal, write_answer, write_prompt
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import one_answer
from jaxrl_po.language.tokenizer import make_tokenizer


@config.record
class SortingSettings:
    """Settings of `--task=sorting`."""

    length: int = common.static(
        6, "digits of a list", unit="digits", within=Interval(2, MAX_LENGTH)
    )
    symbols: int = static(10, "digits to choose from", within=Interval(2, 10))


def sorting(length: int, *, symbols: int = 10) -> Task:
    """Builds the task of sorting digits, lowest first: `3142=` is answered by `1234` and EOS.

    One multiset in ten is held out, so that all orders of a list are in the same split.

    Args:
      length: number of digits in a list, in [2, 64]; sets the difficulty.
      symbols: number of different digits, in [2, 10].

    Returns:
      `Task` of sorting.

    Raises:
      ConfigError: an argument is outside its range, or lists so few that a split would be empty.

    Example:
      >>> task = sorting(4)
      >>> task.tokenizer.decode(task.demonstrate(jnp.array([3, 1, 4, 2], jnp.uint32)).tolist())
      '1234'
    """
    length = check_size("length", length, Interval(2, MAX_LENGTH))
    symbols = check_size("symbols", symbols, Interval(2, 10))
    tokenizer = make_tokenizer("0123456789"[:symbols] + "=")
    draw = make_draw([(0, symbols)] * length, canonical=jnp.sort, advice="raise length or symbols")

    def write(values: jax.Array) -> Piece:
        return Piece(tokenizer.ids["0"] + values.astype(np.int32), length)

    def sample(key: jax.Array, held_out: bool) -> Prompt:
        values = draw(key, held_out)
        return write_prompt([write(values), literal("=", tokenizer)], length + 1, tokenizer, values)

    def demonstrate(problem: jax.Array) -> jax.Array:
        return write_answer([write(jnp.sort(problem))], length + 1, tokenizer)

    return one_answer(
        f"sorting {length} digits",
        tokenizer,
        length + 1,
        length + 1,
        sample,
        demonstrate,
        symbols=symbols,
    )
