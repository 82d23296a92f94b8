"""The command line: `jaxrl-po COMMAND`, also `python -m jaxrl_po COMMAND`."""

from collections.abc import Sequence
from typing import NoReturn

from jaxrl_po.run import flags
from jaxrl_po.run.commands import control, evaluate, language, plot, render, report, sweep
from jaxrl_po.run.flags import UsageError

COMMANDS = {
    "control": control.main,
    "language": language.main,
    "sweep": sweep.main,
    "evaluate": evaluate.main,
    "plot": plot.main,
    "report": report.main,
    "render": render.main,
}
SUMMARY = """Policy optimisation in JAX, from REINFORCE to DAPO.

usage: jaxrl-po COMMAND --flag=value …     (jaxrl-po COMMAND --help lists its flags)

  control    train a method on a gymnax environment
  language   train a transformer on a task whose answers are verified
  sweep      search the hyperparameters of a method on an environment
  evaluate   evaluate the policies of a finished run again
  plot       compare runs in a figure and a table
  report     write an HTML page about one or several runs
  render     show an episode of a run as a GIF"""


def main(argv: Sequence[str]) -> int:
    """Runs the command that the first argument names; returns its exit status.

    Raises:
      UsageError: there is no such command.
    """
    if not argv or argv[0] in ("--help", "-h", "help"):
        print(SUMMARY)
        return 0 if argv else 2
    name, *arguments = argv
    if name not in COMMANDS:
        raise UsageError(f"jaxrl-po has no command {name!r}{flags.suggest(name, COMMANDS)}")
    return COMMANDS[name](arguments)


def entry() -> NoReturn:
    """What the installed command starts."""
    flags.entry(main)


if __name__ == "__main__":
    entry()
