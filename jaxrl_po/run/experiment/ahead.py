"""An experiment compiled for a machine that need not be here; nothing is trained or written."""

import dataclasses
from collections.abc import Iterator

from jaxrl_po.run import errors
from jaxrl_po.run.ahead import report, topology
from jaxrl_po.run.ahead.report import Report
from jaxrl_po.run.ahead.topology import Machine
from jaxrl_po.run.devices.memory import Memory
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.experiment import SCRIPTS, Experiment
from jaxrl_po.run.experiment.plan import Plan, prepare, sections_of
from jaxrl_po.run.loop.microbatches import choose_microbatches
from jaxrl_po.run.loop.programs import Job


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
    with flags.as_arguments():
        yield from reports(experiment, machine)


def reports(experiment: Experiment, machine: str) -> Iterator[Report]:
    """Yields the reports of `compile_for`, for a command; raises UsageError, which names flags."""
    script = SCRIPTS[experiment.script]
    options = flags.fill(experiment.settings, {"": script.options})[""]
    if machine.startswith("tpu:"):
        errors.require("compile_for", "libtpu", "tpu-compile")
    settings = {
        name: value for name, value in experiment.settings.items() if name != "compilation_cache"
    }
    with flags.blame(sections_of(script, options)):
        described = topology.describe(machine)
        # A cache would keep programs that this machine cannot run.
        plan = prepare(script, settings | {"compilation_cache": ""}, described=described.devices)
        if plan.placement.num_devices != len(described.devices):
            raise UsageError(
                f"--mesh must use all {len(described.devices)} devices of --compile_for={machine}"
            )
        yield from _fitting(plan, described)


def _fitting(plan: Plan, machine: Machine) -> Iterator[Report]:
    """Yields the reports of a plan with the fewest microbatches whose update fits."""
    found = list[Report]()

    def compile_job(job: Job, number: int = 1) -> Memory:
        suffix = f" in {number} microbatches" if number > 1 else ""
        each = report.reports(job, plan.placement, plan.setup.axes, machine)
        found[:] = [dataclasses.replace(x, program=x.program + suffix) for x in each]
        sizes = found[-1].memory
        return Memory(sizes.get("state", 0), sizes.get("peak"), sizes.get("state", 0))

    memory = compile_job(plan.job)
    try:
        if plan.job.rebuild is not None and machine.chip is not None:
            choose_microbatches(plan.job, memory, compile_job, int(machine.chip.memory))
    finally:
        yield from found
