"""`Experiment`: all settings of a run, as data."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from jaxrl_po import config
from jaxrl_po.config import ConfigError, Json, Values
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import control, earlier, flags, language, settings
from jaxrl_po.run.experiment.control_config import ControlOptions
from jaxrl_po.run.experiment.language_config import LanguageOptions
from jaxrl_po.run.experiment.settings import Domain, Settings
from jaxrl_po.run.store import sources

UNSET: Any = type("Unset", (), {"__repr__": lambda _: "…"})()  # value of a keyword that is left out
DOMAINS: dict[str, Domain[Any]] = {control.NAME: control, language.NAME: language}
CONTROL, LANGUAGE = (
    {field.name for field in dataclasses.fields(record)}
    for record in (ControlOptions, LanguageOptions)
)


@dataclasses.dataclass(frozen=True, init=False)
class Experiment:
    """A run as data: method, problem, seeds, placement, evaluation, budget and folder.

    A keyword that only `jaxrl-po language` has, such as `task`, selects `language`; otherwise the
    command is `control`. Flags with a dot in their name are passed in `over`. An environment, task,
    network, reward, surrogate, advantage or optimizer may be an object: a class or function is
    stored as `file.py:name` if it can be imported, and any other object as `python:name`; code that
    later reads the folder must pass such an object again. Making an experiment computes nothing and
    starts no backend.

    Attributes:
      script: `control` or `language`, the command that the experiment runs.
      settings: values of the given flags, by flag name.

    Raises:
      ConfigError: a keyword is unknown, or a value has the wrong type or is out of its range; the
        error names the keyword.

    Example:
      >>> Experiment(env="Pendulum-v1", seeds=4, over={"config.gamma": 0.9}, out="runs/pendulum")
      Experiment('control', out=runs/pendulum, seeds=4, env=Pendulum-v1, config.gamma=0.9)
    """

    script: str
    settings: Mapping[str, Any]

    def __init__(
        self,
        *,
        over: Values = MappingProxyType({}),
        algorithm: Any = UNSET,
        surrogate: Any = UNSET,
        advantage: Any = UNSET,
        optimizer: Any = UNSET,
        out: str | os.PathLike[str] = UNSET,
        seeds: int = UNSET,
        seed: int = UNSET,
        total_steps: int = UNSET,
        devices: int | str = UNSET,
        mesh: str = UNSET,
        log_every: int = UNSET,
        eval_every: int = UNSET,
        checkpoint_every: int = UNSET,
        deterministic: bool = UNSET,
        compilation_cache: str = UNSET,
        tensorboard: bool = UNSET,
        wandb: str = UNSET,
        exporter: str = UNSET,
        resume: bool = UNSET,
        overwrite: bool = UNSET,
        compile_for: str = UNSET,
        json: bool = UNSET,
        distributed: bool = UNSET,
        coordinator: str = UNSET,
        num_processes: int = UNSET,
        process_id: int = UNSET,
        coordinator_timeout: int = UNSET,
        env: Any = UNSET,
        env_params: str | Values = UNSET,
        policy: Any = UNSET,
        critic: Any = UNSET,
        actor_critic: Any = UNSET,
        init_from: str | os.PathLike[str] = UNSET,
        demonstrations: str | os.PathLike[str] = UNSET,
        sampling: str = UNSET,
        tuned: bool = UNSET,
        eval_episodes: int = UNSET,
        task: Any = UNSET,
        teacher: str | os.PathLike[str] = UNSET,
        tools: Any = UNSET,
        reward: Any = UNSET,
        eval_prompts: int = UNSET,
        eval_samples: int = UNSET,
        reward_weights: str | Sequence[float] = UNSET,
        reward_timeout: float = UNSET,
        shard_params: bool = UNSET,
        show: int = UNSET,
        **unknown: Any,
    ):
        found = {**locals(), "self": UNSET, "over": UNSET, "unknown": UNSET}
        given = {name: value for name, value in found.items() if value is not UNSET}
        if {"env", "task"} <= given.keys():
            raise ConfigError("env", "must be left out beside task: an experiment has one of them")
        of_language = given.keys() & (LANGUAGE - CONTROL)
        domain = DOMAINS["language" if of_language else "control"]
        self._read(domain, with_names({**given, **unknown, **over}))

    @classmethod
    def parse(cls, domain: Domain[Any], argv: Sequence[str]) -> Self:
        """Returns the experiment that a command's arguments describe."""
        return cls.of(domain, flags.tokenize(argv, {"": domain.OPTIONS}))

    @classmethod
    def of(cls, domain: Domain[Any], given: Values) -> Self:
        """Returns the experiment of a command's flags, given as texts or values by name."""
        made = object.__new__(cls)
        made._read(domain, given)
        return made

    def _read(self, domain: Domain[Any], given: Values) -> None:
        read = settings.merge_settings(domain, given)
        object.__setattr__(self, "script", domain.NAME)
        object.__setattr__(self, "settings", MappingProxyType(read.given))

    def read(self) -> Settings[Any]:
        """Returns the merged settings, with the stored settings of a resumed run."""
        return settings.merge_settings(DOMAINS[self.script], self.settings)

    def __hash__(self) -> int:
        return hash((self.script, *sorted(self.settings.items())))

    def __getstate__(self) -> tuple[str, Json]:
        return self.script, dict(self.settings)

    def __setstate__(self, state: tuple[str, Json]) -> None:
        object.__setattr__(self, "script", state[0])
        object.__setattr__(self, "settings", MappingProxyType(state[1]))

    def __repr__(self) -> str:
        given = filter(None, [repr(self.script), errors.spell_all(self.settings)])
        return f"Experiment({', '.join(given)})"


def with_names(values: Values) -> Json:
    """Returns the values of flags, with names for objects; raises ConfigError for other objects."""
    named = {name: config.static_value(name, value) for name, value in values.items()}
    weights = named.get("reward_weights")
    for weight in weights if isinstance(weights, list | tuple) else ():
        config.check_number("reward_weights", weight)
    if isinstance(params := named.get("env_params"), Mapping):
        named["env_params"] = json.dumps(params)
    for name, value in named.items():
        listed = name != "reward" and type(value) in (list, tuple)  # a reward may list functions
        if not (listed or isinstance(value, int | float | str | os.PathLike)):
            if name not in sources.FLAGS:
                raise ConfigError(
                    name,
                    f"must be a number or text, got {type(value).__name__}: objects are for "
                    f"{', '.join(sources.FLAGS)}",
                )
            named[name] = sources.name_object(name, value)
    return named


def read_experiment(out: str, **more: Any) -> Experiment:
    """Returns the experiment that continues the run in a folder.

    Raises:
      ConfigError: The folder holds no run of a command.
    """
    domain, _ = earlier.maker(DOMAINS.values(), "out", out)
    return Experiment.of(domain, with_names({"out": out, "resume": True, **more}))
