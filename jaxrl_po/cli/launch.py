"""Common part of the training commands: arguments become an experiment and an exit status."""

import functools
import json
import sys
from collections.abc import Sequence
from typing import Any

import jax

from jaxrl_po.run.experiment import flags, settings, training
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment
from jaxrl_po.run.experiment.options import RunOptions
from jaxrl_po.run.experiment.settings import Domain


def main(domain: Domain[Any], argv: Sequence[str]) -> int:
    """Runs a training command on its arguments; returns the exit status.

    The exit status is 0 if the run is done, or was interrupted and saved. The exit status is 1 if
    the run diverged, a reward function failed on the first batch, an environment failed, or the
    folder could no longer be written.

    Raises:
      ConfigError: a flag is invalid, raised before a program is compiled or the folder is changed;
        or a resumed run has no usable checkpoint, raised later.
    """
    asks, words = flags.help_of(argv)
    given = flags.tokenize(words, {"": domain.OPTIONS})
    if asks:
        print(settings.format_usage(domain, given, everything=flags.EVERYTHING in argv))
        return 0
    options = settings.options_of(domain.OPTIONS, given)
    if options.compile_for:
        return _compile(Experiment.of(domain, given), options)
    job = training.prepare_experiment(domain, given, options)
    try:
        training.run_job(job, leave_early=True)
    except training.FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: {training.broken_off(options.out, error)}", file=sys.stderr)
        return 1
    return 0


def _compile(experiment: Experiment, options: RunOptions) -> int:
    """Prints the memory of each program; returns 1 if a program does not fit, else 0."""
    from jaxrl_po.run import aot

    platform, _, count = options.compile_for.partition(":")
    if platform != "gpu":
        jax.config.update("jax_platforms", "cpu")
    if platform == "cpu" and count.isdecimal():
        jax.config.update("jax_num_cpu_devices", int(count))
    fits = True
    for program in aot.compile_for(experiment, options.compile_for):
        fits = fits and program.fits
        print(json.dumps(program.as_json()) if options.json else program.describe(), flush=True)
    return 0 if fits else 1


control = functools.partial(main, DOMAINS["control"])
language = functools.partial(main, DOMAINS["language"])
