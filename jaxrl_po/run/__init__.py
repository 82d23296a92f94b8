"""The impure part: devices, files, processes, progress, plots, and the command-line programs.

From Python: `run.train` runs an `Experiment` or trains a learner, `run.resume` resumes a run,
`run.load` returns its policy, and `run.sweep` searches hyperparameters. An `on_row` callback that
raises `run.Stop` ends a run. `run.TensorBoard` and `run.WeightsAndBiases` are exporters for
`run.train`; `run.MethodEntry`, `run.TaskEntry` and `run.Scorer` register user-defined methods,
tasks and rewards. If the user interrupts a function of this package, the function raises
`run.Interrupted`, which holds the result so far. Each name is imported at its first use, so that a
worker process does not import JAX.
"""

import importlib
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxrl_po.run.aot import CompiledProgram as CompiledProgram
    from jaxrl_po.run.aot import compile_for as compile_for
    from jaxrl_po.run.data.scoring import Scorer as Scorer
    from jaxrl_po.run.experiment.experiment import Experiment as Experiment
    from jaxrl_po.run.experiment.policies import ControlPolicy as ControlPolicy
    from jaxrl_po.run.experiment.policies import LanguagePolicy as LanguagePolicy
    from jaxrl_po.run.experiment.policies import load as load
    from jaxrl_po.run.experiment.registry import MethodEntry as MethodEntry
    from jaxrl_po.run.experiment.registry import TaskEntry as TaskEntry
    from jaxrl_po.run.experiment.sweeping import SweepResult as SweepResult
    from jaxrl_po.run.experiment.sweeping import sweep as sweep
    from jaxrl_po.run.experiment.training import Trained as Trained
    from jaxrl_po.run.experiment.training import resume as resume
    from jaxrl_po.run.experiment.training import train as train
    from jaxrl_po.run.loop.progress import Stop as Stop
    from jaxrl_po.run.loop.signals import Interrupted as Interrupted
    from jaxrl_po.run.store.exporters import Exporter as Exporter
    from jaxrl_po.run.store.exporters import TensorBoard as TensorBoard
    from jaxrl_po.run.store.exporters import WeightsAndBiases as WeightsAndBiases
    from jaxrl_po.run.store.exporters import scalars as scalars

if os.name != "posix":
    raise ImportError(
        "jaxrl_po.run needs fork, setsid and fcntl, which this system lacks: on Windows use WSL "
        "(learners, problems and losses work without it)"
    )

_NAMES = {
    "aot": ("CompiledProgram", "compile_for"),
    "data.scoring": ("Scorer",),
    "experiment.experiment": ("Experiment",),
    "experiment.policies": ("ControlPolicy", "LanguagePolicy", "load"),
    "experiment.registry": ("MethodEntry", "TaskEntry"),
    "experiment.sweeping": ("SweepResult", "sweep"),
    "experiment.training": ("Trained", "resume", "train"),
    "loop.signals": ("Interrupted",),
    "loop.progress": ("Stop",),
    "store.exporters": ("Exporter", "TensorBoard", "WeightsAndBiases", "scalars"),
}


if not TYPE_CHECKING:  # a type checker would accept any attribute name

    def __getattr__(name: str) -> object:
        for module, names in _NAMES.items():
            if name in names:
                return getattr(importlib.import_module(f"{__name__}.{module}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return [*globals(), *(name for names in _NAMES.values() for name in names)]
