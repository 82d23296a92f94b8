"""The table of methods, by their names on the command line, and facts about them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from jaxrl_po.algorithms import (
    a2c,
    cispo,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    kl_cov,
    npg,
    pkpo,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_pp,
    rloo,
    sapo,
    sft,
    trpo,
)


def _by_name(*modules: ModuleType) -> dict[str, ModuleType]:
    return {module.__name__.rpartition(".")[2]: module for module in modules}


WITH_CRITIC = _by_name(reinforce, a2c, npg, trpo, ppo, ppo_penalty)
IN_GROUPS = _by_name(
    *(grpo, dapo, dr_grpo, rloo, reinforce_pp, gspo, cispo, sapo, gmpo, dppo, pkpo, kl_cov),
    distillation,
)
SUPERVISED = _by_name(sft)
ALGORITHMS = WITH_CRITIC | IN_GROUPS | SUPERVISED
# Methods whose surrogate is not clipped, so that it is valid only near the old policy.
UNCLIPPED = ("rloo", "pkpo", "distillation")
WITH_TEACHER = ("distillation",)


class Facts(NamedTuple):
    """Facts about a method that follow from fields of its Config alone.

    Attributes:
      learned: `(config, prompts, members) -> (prompts, members)`, the part of a batch of groups
        that an update learns from.
      needs_room: `(config) -> bool`, whether the token budget must exceed the longest answer.
      refills: `(config) -> bool`, whether sampling goes by scores inside the program.
    """

    learned: Callable[[Any, int, int], tuple[int, int]] = lambda _, *sizes: sizes
    needs_room: Callable[[Any], bool] = lambda _: False
    refills: Callable[[Any], bool] = lambda _: False


FACTS = {
    "grpo": Facts(lambda config, prompts, members: (prompts, members - config.extra_samples)),
    "dapo": Facts(
        lambda config, prompts, members: (config.train_prompts or prompts, members),
        lambda config: bool(config.soft_overlong),
        lambda config: bool(config.dynamic_sampling == dapo.REFILL),
    ),
    "sft": Facts(lambda _, prompts, members: (prompts, 1)),
}


def facts(name: str) -> Facts:
    """Returns the facts about a method."""
    return FACTS.get(name, Facts())
