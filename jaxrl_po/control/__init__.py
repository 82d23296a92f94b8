"""Control problems: environments with gymnax's interface, and recordings of other environments."""

from jaxrl_po.control.actor import Actor
from jaxrl_po.control.cloning import make_record, with_demonstrations
from jaxrl_po.control.environment import Environment, Transition, adapt
from jaxrl_po.control.evaluation import make_evaluate
from jaxrl_po.control.groups import GroupSettings, make_groups
from jaxrl_po.control.modules import NetworkSettings
from jaxrl_po.control.problem import ControlSettings, make_problem
from jaxrl_po.control.recorded import recorded_from_settings
from jaxrl_po.control.spaces import Observation, Spaces
from jaxrl_po.control.vine import VineSettings, make_vine

__all__ = [
    "Actor",
    "ControlSettings",
    "Environment",
    "GroupSettings",
    "NetworkSettings",
    "Observation",
    "Spaces",
    "Transition",
    "VineSettings",
    "adapt",
    "make_evaluate",
    "make_groups",
    "make_problem",
    "make_record",
    "make_vine",
    "recorded_from_settings",
    "with_demonstrations",
]
