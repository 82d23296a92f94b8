"""What the training commands share: from flags to a run."""

import sys
from collections.abc import Sequence

from jaxrl_po.run.devices import processes
from jaxrl_po.run.experiment import control as control_experiment
from jaxrl_po.run.experiment import flags, models
from jaxrl_po.run.experiment import language as language_experiment
from jaxrl_po.run.experiment.plan import prepare, sections_of
from jaxrl_po.run.experiment.script import Script
from jaxrl_po.run.loop.execution import broken_off, carry_out


def main(script: Script, argv: Sequence[str]) -> int:
    """Runs a script from its arguments; returns its exit status.

    It is 0 if the run is done, or was interrupted and saved; 1 if it diverged, a reward function
    failed on the first batch, an environment failed, or the folder could no longer be written.

    Raises:
      UsageError: invalid flags, before anything is compiled or the folder is changed; or later, a
        resumed run none of whose checkpoints can be used.
    """
    if {"--help", "-help", "-h"} & set(argv):
        options = flags.parse(
            [a for a in argv if a.lstrip("-") not in ("h", "help")],
            {"": script.options},
            partial=True,
        )[""]
        sections = sections_of(script, options)
        print(
            flags.usage(
                f"jaxrl-po {script.name}", script.summary, sections, script.defaults(options)
            )
        )
        return 0

    options = flags.parse(argv, {"": script.options}, partial=True)[""]
    if options.distributed:
        processes.start(
            coordinator=options.coordinator,
            num_processes=options.num_processes,
            process_id=options.process_id,
            timeout=options.coordinator_timeout,
        )
    with processes.together() as require_same:
        plan = prepare(script, argv, options, require_same)
    options = plan.records[""]
    try:
        outcome = carry_out(script, plan)
    except OSError as error:
        print(f"error: {broken_off(options.out, error)}", file=sys.stderr)
        return 1
    return 1 if outcome is None else 0


def control(argv: Sequence[str]) -> int:
    """`jaxrl-po control`; returns its exit status."""
    return main(control_experiment.SCRIPT, argv)


def language(argv: Sequence[str]) -> int:
    """`jaxrl-po language`; returns its exit status."""
    models.require_effect(argv, language_experiment.Options)
    return main(language_experiment.SCRIPT, argv)
