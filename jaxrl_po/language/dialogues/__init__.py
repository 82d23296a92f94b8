"""Dialogues: episodes of several turns, where an environment replies to the policy's messages."""

from collections.abc import Callable

from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.dialogues.calculator import CalculatorSettings, calculator
from jaxrl_po.language.dialogues.evaluation import make_describe, make_evaluate, render
from jaxrl_po.language.dialogues.game import game
from jaxrl_po.language.dialogues.higher_lower import HigherLowerSettings, higher_lower
from jaxrl_po.language.dialogues.mastermind import MastermindSettings, mastermind
from jaxrl_po.language.dialogues.problem import make_problem

DIALOGUES: dict[str, tuple[type, Callable[..., Dialogue]]] = {
    "mastermind": (MastermindSettings, mastermind),
    "higher_lower": (HigherLowerSettings, higher_lower),
    "calculator": (CalculatorSettings, calculator),
}
"""Map `{name: (settings, make)}`: for each dialogue the record of its flags and the function that
builds the dialogue from their values.
"""

__all__ = [
    "DIALOGUES",
    "Dialogue",
    "Reply",
    "calculator",
    "game",
    "higher_lower",
    "make_describe",
    "make_evaluate",
    "make_problem",
    "mastermind",
    "render",
]
