"""Dialogues: episodes of several turns, in which an environment replies to messages."""

from jaxrl_po.language.dialogue import Dialogue, Reply
from jaxrl_po.language.dialogues.calculator import calculator
from jaxrl_po.language.dialogues.evaluation import make_describe, make_evaluate, render
from jaxrl_po.language.dialogues.game import game
from jaxrl_po.language.dialogues.higher_lower import higher_lower
from jaxrl_po.language.dialogues.mastermind import mastermind
from jaxrl_po.language.dialogues.problem import make_problem

__all__ = [
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
