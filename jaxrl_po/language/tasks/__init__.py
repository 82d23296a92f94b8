"""Tasks whose prompts are generated and whose answers are verified inside the program.

A task is a tuple of pure functions of one example, so that a user's own is made the same way; callers `vmap`.
"""

from jaxrl_po.language.tasks.addition import addition
from jaxrl_po.language.tasks.split import HELD_OUT, is_held_out
from jaxrl_po.language.tasks.text import MAX_DIGITS
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import exact_match, token_match

__all__ = [
    "HELD_OUT",
    "MAX_DIGITS",
    "Prompt",
    "Task",
    "addition",
    "exact_match",
    "is_held_out",
    "token_match",
]
