"""Command line of the library: `jaxrl-po COMMAND`, also `python -m jaxrl_po COMMAND`."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

SUMMARY = """Policy optimisation in JAX, from REINFORCE to DAPO.

usage: jaxrl-po COMMAND --flag=value …     (jaxrl-po COMMAND --help lists its flags)

  control    train a method on an environment
  language   train a transformer on a task whose answers are verified
  sweep      search the hyperparameters of a method on an environment
  evaluate   evaluate the policies of a finished run again
  plot       compare runs in a figure and a table
  report     write an HTML page about one or several runs
  render     show an episode of a run as a GIF, or what a transformer wrote
  export     write the policy of a run for numpy or transformers"""


def main(argv: Sequence[str]) -> int:
    """Runs the command that the first argument names; returns the command's exit status.

    Raises:
      UsageError: the command is unknown.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(SUMMARY)
        return 0 if argv else 2
    from jaxrl_po.cli import evaluate, export, launch, plot, render, report, sweep
    from jaxrl_po.run import errors

    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "control": launch.control,
        "language": launch.language,
        "sweep": sweep.main,
        "evaluate": evaluate.main,
        "plot": plot.main,
        "report": report.main,
        "render": render.main,
        "export": export.main,
    }
    name, *arguments = argv
    if name not in commands:
        raise errors.UsageError(f"jaxrl-po has no command {name!r}{errors.suggest(name, commands)}")
    return commands[name](arguments)


def entry(*command: str) -> NoReturn:
    """Starts the installed command and the scripts of the repository.

    An interrupt while modules are being imported is reported in one line.
    """
    # An exception inside an import of JAX would surface as another exception.
    before = signal.signal(signal.SIGINT, _leave)
    try:
        from jaxrl_po.run.experiment import flags

        # The imports of JAX and other modules take seconds.
        importlib.import_module("jaxrl_po.run.experiment.training")
        importlib.import_module("jaxrl_po.run.devices.topology").silence_libtpu()
    except ValueError as error:  # raised by matplotlib while matplotlib is imported
        if "MPLBACKEND" not in os.environ:
            raise
        print(f"error: MPLBACKEND={os.environ['MPLBACKEND']}: {error}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        if os.name == "posix":
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    signal.signal(signal.SIGINT, before)
    sys.path.append("")  # `python -m jaxrl_po` finds the modules of the working folder too
    try:
        flags.run_script(lambda argv: main([*command, *argv]))
    except KeyboardInterrupt:
        print("interrupted: nothing was started", file=sys.stderr)
        sys.exit(130)


def _leave(number: int, frame: Any) -> None:
    with contextlib.suppress(OSError):  # the process that reads the pipe has ended
        os.write(2, b"\ninterrupted: nothing was started\n")
    os._exit(128 + number)


if __name__ == "__main__":
    entry()
