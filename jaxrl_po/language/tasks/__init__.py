"""Tasks whose prompts are generated and whose answers are verified under jit.

A task is a tuple of pure functions of one example, which callers `vmap`; your own is built the same
way.
"""

from jaxrl_po.language.tasks.addition import addition
from jaxrl_po.language.tasks.countdown import MAX_NUMBERS, Countdown, countdown
from jaxrl_po.language.tasks.finite import finite
from jaxrl_po.language.tasks.multiplication import multiplication
from jaxrl_po.language.tasks.random_prompts import random_prompts
from jaxrl_po.language.tasks.running_sum import MAX_FILLER, running_sum
from jaxrl_po.language.tasks.sorting import sorting
from jaxrl_po.language.tasks.split import HELD_OUT, is_held_out
from jaxrl_po.language.tasks.table import Example, table
from jaxrl_po.language.tasks.text import MAX_DIGITS, MAX_FACTOR_DIGITS, MAX_LENGTH
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import exact_match, token_match

__all__ = [
    "HELD_OUT",
    "MAX_DIGITS",
    "MAX_FACTOR_DIGITS",
    "MAX_FILLER",
    "MAX_LENGTH",
    "MAX_NUMBERS",
    "Countdown",
    "Example",
    "Prompt",
    "Task",
    "addition",
    "countdown",
    "exact_match",
    "finite",
    "is_held_out",
    "multiplication",
    "random_prompts",
    "running_sum",
    "sorting",
    "table",
    "token_match",
]
