"""`Experiment`: what is to be run, as data."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from jaxrl_po import config
from jaxrl_po.config import ConfigError
from jaxrl_po.language.dialogue import AnyTask
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import control, flags, language, models, plan
from jaxrl_po.run.experiment.assembly import Script
from jaxrl_po.run.store import folder, sources
from jaxrl_po.run.store.sources import Given

SCRIPTS = {script.name: script for script in (control.SCRIPT, language.SCRIPT)}


@dataclasses.dataclass(frozen=True, init=False)
class Experiment:
    """What is to be run: method, problem, seeds, placement, evaluation, budget and folder, as data.

    Its keywords are the flags of `jaxrl-po language` where one of them is among these alone, such
    as `task`, and otherwise those of `jaxrl-po control`; flags with a dot stand in `over`. An
    environment, task, network or reward may be an object: a class or function is stored as
    `file.py:name` where it can be imported, any other as `python:name`, which must be given again
    to whoever reads the folder. Making an experiment computes nothing and starts no backend.

    Attributes:
      script: `control` or `language`.
      settings: flag name to value, of the flags given.

    Raises:
      ConfigError: an unknown keyword, or a value of the wrong type or out of its range; names it.

    Example:
      >>> Experiment(env="Pendulum-v1", seeds=4, over={"config.gamma": 0.9}, out="runs/pendulum")
      Experiment('control', out=runs/pendulum, seeds=4, env=Pendulum-v1, config.gamma=0.9)
    """

    script: str
    settings: Mapping[str, Any]

    def __init__(self, *, over: Mapping[str, Any] = MappingProxyType({}), **flags_: Any):
        if {"env", "task"} <= flags_.keys():
            raise ConfigError("env", "must be left out beside task: an experiment has one of them")
        given = with_names({**flags_, **over})
        own = {field.name for field in dataclasses.fields(language.Options)}
        shared = {field.name for field in dataclasses.fields(control.Options)}
        script = SCRIPTS["language" if flags_.keys() & own - shared else "control"]
        self._read(script, given)

    @classmethod
    def parse(cls, script: Script, argv: Sequence[str]) -> Self:
        """The experiment of a command's arguments; raises ConfigError."""
        made = object.__new__(cls)
        made._read(script, {}, argv)
        return made

    def _read(self, script: Script, given: Mapping[str, Any], argv: Sequence[str] = ()) -> None:
        argv = argv or flags.written(given)
        own = {name: value for name, value in given.items() if isinstance(value, Given)}
        if script is language.SCRIPT:
            models.require_effect(argv, language.Options)
        top = {"": script.options}
        asked = flags.given(argv, top, partial=True) | own
        options = flags.fill(asked, top)[""]
        stored = plan.stored(script, options) if options.resume else {}
        if options.resume:  # the method of the run that is resumed decides which flags there are
            options = flags.fill(asked, top, stored=stored)[""]
        settings = flags.given(argv, plan.sections_of(script, options)) | own
        flags.require_kinds(given, settings)
        plan.fill(script, settings, stored)
        object.__setattr__(self, "script", script.name)
        object.__setattr__(self, "settings", MappingProxyType(settings))

    def __getstate__(self) -> Any:
        return self.script, dict(self.settings)

    def __setstate__(self, state: Any) -> None:
        object.__setattr__(self, "script", state[0])
        object.__setattr__(self, "settings", MappingProxyType(state[1]))

    def __repr__(self) -> str:
        given = (f"{name}={errors.shown(value)}" for name, value in self.settings.items())
        return f"Experiment({', '.join([repr(self.script), *given])})"


def with_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of flags, with names for objects; raises ConfigError for one that no flag takes."""
    named = {name: config.static_value(name, value) for name, value in values.items()}
    weights = named.get("reward_weights")
    for weight in weights if isinstance(weights, list | tuple) else ():
        config.check_number("reward_weights", weight)
    for name, value in named.items():
        listed = name == "reward" and isinstance(value, list | tuple)  # functions, perhaps
        plain = isinstance(value, int | float | str | list | tuple | os.PathLike) and not listed
        if not plain or isinstance(value, AnyTask):
            if name not in sources.FLAGS:
                raise ConfigError(
                    name,
                    f"must be a number or text, got {type(value).__name__}: objects are for "
                    f"{', '.join(sources.FLAGS)}; a loss, an advantage or an optimizer goes to "
                    "the method's make, and its learner to run.train",
                )
            named[name] = sources.named(name, value)
    return named


def of_folder(out: str, **more: Any) -> Experiment:
    """The experiment that goes on with the run in a folder.

    Raises:
      ConfigError: it holds no run of a command.
    """
    stored = folder.inspect(out, resume=True, overwrite=False)
    if stored.get("script") not in SCRIPTS:
        raise ConfigError("out", f"must hold a run of jaxrl-po {' or '.join(SCRIPTS)}, got {out}")
    made = object.__new__(Experiment)
    made._read(SCRIPTS[stored["script"]], with_names({"out": out, "resume": True, **more}))
    return made
