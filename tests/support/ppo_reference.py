"""Defines PPO with a KL penalty to a reference as one method, for suites that run over all
methods."""

import dataclasses

from jaxrl_po import config as config_lib
from jaxrl_po.algorithms import ppo, reference, surrogates
from jaxrl_po.config import Number, number, static


@config_lib.record
class Config(ppo.Config):
    """The fields of PPO, plus the fields of `reference.ReferenceSettings`."""

    clip: bool = static(True, "the clipped surrogate, or the plain one")
    reference_kl_coefficient: Number = number(0.05, "β")
    adapt_reference_kl: bool = static(False, "adapt β")
    reference_target_kl: Number = number(0.1, "target of the KL")


def make(config, problem, optimizer=None):
    own = {field.name: getattr(config, field.name) for field in dataclasses.fields(ppo.Config)}
    surrogate = None if config.clip else surrogates.plain
    return reference.with_reference_kl(
        ppo.make(ppo.Config(**own), problem, optimizer, surrogate=surrogate),
        problem,
        reference.ReferenceSettings(
            enabled=True,
            kl_coefficient=config.reference_kl_coefficient,
            adapt=config.adapt_reference_kl,
            target_kl=config.reference_target_kl,
        ),
        num_parts=config.num_parts,
        axis_name=config.axis_name,
    )
