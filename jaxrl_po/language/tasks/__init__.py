"""Lists tasks whose prompts are generated and whose answers are verified under jit.

A task is a tuple of pure functions of one example, which callers `vmap`; user-defined tasks have
the same form.
"""

from collections.abc import Callable

from jaxrl_po.language.tasks.addition import AdditionSettings, addition
from jaxrl_po.language.tasks.countdown import Countdown, CountdownSettings, countdown
from jaxrl_po.language.tasks.finite import finite
from jaxrl_po.language.tasks.multiplication import MultiplicationSettings, multiplication
from jaxrl_po.language.tasks.random_prompts import random_prompts
from jaxrl_po.language.tasks.running_sum import RunningSumSettings, running_sum
from jaxrl_po.language.tasks.sorting import SortingSettings, sorting
from jaxrl_po.language.tasks.split import HELD_OUT, is_held_out
from jaxrl_po.language.tasks.table import Example, table
from jaxrl_po.language.tasks.text import MAX_DIGITS
from jaxrl_po.language.tasks.types import Prompt, Task
from jaxrl_po.language.tasks.verify import exact_match, token_match

TASKS: dict[str, tuple[type, Callable[..., Task]]] = {
    "addition": (AdditionSettings, addition),
    "multiplication": (MultiplicationSettings, multiplication),
    "sorting": (SortingSettings, sorting),
    "countdown": (CountdownSettings, countdown),
    "running_sum": (RunningSumSettings, running_sum),
}
"""Map `{name: (settings, make)}`: for each task the record of its flags and the function that
builds the task from their values.
"""

__all__ = [
    "HELD_OUT",
    "MAX_DIGITS",
    "TASKS",
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
