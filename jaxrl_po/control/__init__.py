"""Control problems: gymnax environments, and any that speak their interface."""

from jaxrl_po.control.environment import Environment, Transition, adapt
from jaxrl_po.control.evaluation import make_evaluate
from jaxrl_po.control.problem import Settings, from_settings, make_problem

__all__ = ["Environment", "Settings", "Transition", "adapt", "from_settings", "make_evaluate", "make_problem"]
