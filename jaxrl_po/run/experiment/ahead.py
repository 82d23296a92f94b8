"""An experiment compiled for a machine that need not be here; nothing is trained or written."""

import dataclasses
from collections.abc import Iterator

from jaxrl_po.config import ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.ahead import report, topology
from jaxrl_po.run.ahead.report import Report
from jaxrl_po.run.ahead.topology import Machine
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment.experiment import SCRIPTS, Experiment
from jaxrl_po.run.experiment.microbatches import FLAG
from jaxrl_po.run.experiment.plan import Plan, prepare


def compile_for(experiment: Experiment, machine: str) -> Iterator[Report]:
    """Compiles the programs of an iteration, one after another.

    Args:
      experiment: what is to be run; its folder is neither read nor written.
      machine: `tpu:v5e:2x4` (also v5p and v6e, any topology that the installed libtpu knows),
        `cpu:8`, or `gpu` for the one attached.

    CPU devices must be made before JAX computes anything, and a libtpu beside a machine without a
    TPU is kept quiet by `JAX_PLATFORMS=cpu`: the command does both.

    Yields:
      What each needs of every chip.

    Raises:
      ConfigError: a machine that is not known, or whose chips do not divide seeds or rows.
      RunError: after the reports, where no number of microbatches makes it fit.
    """
    if machine.startswith("tpu:"):
        errors.require("compile_for", "libtpu", "tpu-compile")
    settings = {
        name: value for name, value in experiment.settings.items() if name != "compilation_cache"
    }
    described = topology.describe(machine)
    # A cache would keep programs that this machine cannot run.
    plan = prepare(
        SCRIPTS[experiment.script],
        settings | {"compilation_cache": ""},
        described=described.devices,
    )
    if plan.placement.num_devices != len(described.devices):
        raise ConfigError(
            "mesh", f"must use all {len(described.devices)} devices of compile_for = {machine}"
        )
    yield from _fitting(plan, described)


def _fitting(plan: Plan, machine: Machine) -> Iterator[Report]:
    """The reports of a plan, or of one with more microbatches where an update does not fit."""
    counted = {} if plan.counted is None else {"counted": plan.counted}
    number = plan.settings.get(FLAG, 1)
    found = list[Report]()
    for each in report.reports(plan.job, plan.placement, plan.setup.axes, machine):
        name = f"{each.program} in {number} microbatches" if number > 1 else each.program
        found.append(dataclasses.replace(each, program=name, memory=each.memory | counted))
        if each.fits or plan.refit is None or each.program == report.SAMPLING:
            continue
        try:
            smaller = plan.refit(each.memory.get("peak", 0))
        except RunError:
            yield from found
            raise
        if smaller is not None:
            yield from _fitting(smaller, machine)
            return
    yield from found
