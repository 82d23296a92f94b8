"""Settings of a run of a language model."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

from jaxrl_po import config, language
from jaxrl_po.algorithms.reference import ReferenceSettings
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, ConfigError, number, static
from jaxrl_po.language import demonstrations, lora
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.settings import Computation, SamplingSettings
from jaxrl_po.language.tasks.types import DRAWN
from jaxrl_po.run.data import tables
from jaxrl_po.run.experiment import flags, user_code
from jaxrl_po.run.experiment.options import (
    NEW_MODEL,
    InitialModel,
    RunConfig,
    RunOptions,
    common_option,
    option,
)
from jaxrl_po.run.experiment.registry import METHODS, TASKS, VERIFIER, Record, TaskEntry
from jaxrl_po.run.store import sources

TAUGHT = [name for name, entry in METHODS.items() if entry.has_teacher]
ProblemSettings = language.LanguageSettings | SamplingSettings | demonstrations.SupervisedSettings


def task_entry(name: str) -> TaskEntry:
    """Returns the entry of a task by its name, or of a user-defined task, `file.py:name`.

    Raises:
      ConfigError: The name is unknown, or the file cannot be used.
    """
    if not sources.is_source(name):
        return user_code.find("task", name, TASKS)
    if isinstance(user_code.load("task", name), TaskEntry):
        entry = user_code.find("task", name, TASKS)
        return entry._replace(make=lambda *read: own_task(name, entry.make, *read))
    return TaskEntry(tables.NoSettings, lambda *_: own_task(name), any_vocabulary=True)


def own_task(source: str, make: Callable[..., TaskLike] | None = None, *read: object) -> TaskLike:
    """Makes a user-defined task; half of the test rows serve as missing validation rows.

    Args:
      source: Value of the flag `--task`.
      make: Function `make` of the user's `TaskEntry`; None for the object that `source` names.
      read: Arguments of `make`.

    Raises:
      ConfigError: The file cannot be used, or the object is not a task.
    """
    with user_code.naming("task", source):
        task = make(*read) if make else user_code.make("task", source)
    if not isinstance(task, TaskLike):
        raise ConfigError(
            "task", f"must be a jaxrl_po.language.Task or Dialogue, got {type(task).__name__}"
        )
    if isinstance(task, language.Task) and len(task.test) > 1 and not task.validation:
        task = task._replace(test=task.test[1::2], validation=task.test[::2])
    return task


def is_dialogue(name: str) -> bool:
    """Returns whether the task that `name` names is a dialogue."""
    is_object = sources.is_source(name) and not isinstance(user_code.load("task", name), TaskEntry)
    return (
        isinstance(own_task(name), language.Dialogue) if is_object else task_entry(name).is_dialogue
    )


def require_task_flags(name: str, given: Iterable[str]) -> None:
    """Raises ConfigError for a flag that only other tasks have; the message names these tasks.

    Example:
      >>> require_task_flags("addition", ["task.train"])
      Traceback (most recent call last):
      jaxrl_po...ConfigError: task.train: is not a setting of task = addition, but of task = file
    """
    own = flags.flag_fields([("task", task_entry(name).settings)])
    of_tasks = {task: flags.flag_fields([("task", each.settings)]) for task, each in TASKS.items()}
    for flag in given:
        others = [task for task, fields in of_tasks.items() if flag in fields]
        if others and flag not in own:
            raise ConfigError(
                flag, f"is not a setting of task = {name}, but of task = {' or '.join(others)}"
            )


@config.record
class LanguageOptions(RunOptions):
    """Options of a run of a language model."""

    task: str = common_option(
        "addition", f"one of {', '.join(TASKS)}, or a function or entry of your own as file.py:name"
    )
    init_from: str = common_option(
        "",
        "folder or GGUF file of a pretrained model, or folder of an earlier run of this script "
        "(the latest policy of its first seed), with which every seed begins; empty for none",
    )
    teacher: str = option(
        "",
        "folder of an earlier run of this script, whose policy (the latest of its first seed) is "
        f"the teacher of --algorithm={'|'.join(TAUGHT)}; empty for none",
    )
    tools: str = common_option(
        "",
        "class whose methods are tools of a pretrained model, as file.py:Class; each dialogue has "
        "an instance; empty for none",
        was=("environment",),
        sweep="absent",
    )
    reward: str = common_option(
        VERIFIER,
        f"reward to optimise: `{VERIFIER}`, of the task; `model`, a reward model fitted to "
        "comparisons by the verifier (--reward_model.*, --preferences.*); "
        "`math`, whether a completion has, in \\boxed{} or after ####, a result that equals the "
        "answer as mathematics; `last_number`, whether the last number in a completion is the "
        "answer; `contains`, whether a completion contains the answer; `regex:PATTERN`, whether "
        "the last match, or its first group, is the answer; or Python functions that score "
        "completions, as in rewards.py:nearly,package.module:other; the first function gives the "
        "accuracy and decides which groups are informative",
    )
    eval_prompts: int = option(
        0,
        "held-out prompts per evaluation and seed; 0 takes every row of a finite set, and "
        f"{DRAWN} of a task that makes them",
        unit="prompts",
        within=NON_NEGATIVE,
    )
    eval_samples: int = option(
        0,
        "samples per held-out prompt, for avg@n and pass@k; 0 evaluates greedily only",
        unit="samples",
        within=NON_NEGATIVE,
    )
    reward_weights: str = option("", "weights of reward functions, as in 1,0.2; empty for 1 each")
    reward_timeout: float = number(
        60.0,
        "time limit of one call of a reward function",
        unit="seconds",
        within=POSITIVE,
        resume="any",
        sweep="same",
    )
    shard_params: bool = option(
        False,
        "shard parameters, reference and optimizer state over the devices of the data axis "
        "instead of replicating them",
        resume="any",
        sweep="absent",
    )
    show: int = option(
        4,
        "held-out prompts whose completions by the first seed, greedy and sampled, are "
        "written to samples.jsonl at each evaluation",
        unit="prompts",
        within=NON_NEGATIVE,
    )

    @property
    def shards_params(self) -> bool:
        """Whether parameters are sharded over the devices of the data axis."""
        return self.shard_params

    def validate(self) -> None:
        """Raises ConfigError for a field that is out of its range or has no effect."""
        super().validate()
        if not self.tools:
            return
        if self.entry.supervised:
            raise ConfigError("tools", f"must be left out with algorithm = {self.algorithm}")
        beside = f"with tools = {self.tools}"
        if self.distributed:
            raise ConfigError("distributed", f"must be false {beside}: there is one process")
        if not task_entry(self.task).reads_file:
            reads = " or ".join(name for name, entry in TASKS.items() if entry.reads_file)
            raise ConfigError("task", f"must be {reads} {beside}, got {self.task}")


@config.record
class Adapters:
    """Low-rank adapters of the policy, in place of training all of its parameters."""

    rank: int = static(
        0,
        "rank of the adapters; left out, every parameter is trained",
        within=NON_NEGATIVE,
        common=True,
    )
    alpha: float = static(
        16.0, "adapters are scaled by alpha / rank", within=POSITIVE, when=("rank", COUNT)
    )
    targets: str = static(
        ",".join(lora.EVERY), "the matrices of a block that have adapters", when=("rank", COUNT)
    )

    def validate(self) -> None:
        """Raises ConfigError for target matrices that a block does not have."""
        if self.lora is not None:
            self.lora.validate()

    @property
    def lora(self) -> lora.Lora | None:
        """Returns the adapters as an argument of `Transformer`; None without adapters."""
        names = tuple(name for name in self.targets.split(",") if name)
        return lora.Lora(self.rank, self.alpha, names) if self.rank else None


@config.record
class RewardSettings:
    """Conditions on completions that Python rewards score."""

    require_end: bool = static(
        False,
        "a completion that does not end within its token budget scores 0, so that filling the "
        "budget is not learned",
    )


@config.record
class ToolSettings:
    """Settings of dialogues with tools in Python."""

    turns: int = static(
        8, "most messages of a dialogue, which is cut if it still calls tools", within=COUNT
    )
    reply_length: int = static(
        256,
        "most tokens of a reply of tools, and of the text that a reset adds to a prompt; longer "
        "texts are cut",
        unit="tokens",
        within=COUNT,
    )
    timeout: float = number(
        10.0, "time limit of one call of a method of the class", unit="seconds", within=POSITIVE
    )


class RewardModelSettings(NamedTuple):
    """Settings of a reward model that is fitted to comparisons.

    Attributes:
      reward_model: Sizes of the reward model.
      preferences: Comparisons that the reward model is fitted to.
    """

    reward_model: language.ModelSettings
    preferences: language.Preferences


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageConfig(RunConfig[LanguageOptions]):
    """All settings of a run of a language model; None for a section that the run lacks.

    Attributes:
      task: Settings of the task; the task's entry has the record class.
      problem: Sizes of an iteration, and the filters of the sampler.
      tools: Settings of dialogues with tools in Python.
      model: Settings of the model's computation and, for a new model, the model's sizes.
      critic: Sizes of the critic beside a pretrained policy.
      sampler: Differences between the sampler and the policy.
      reward: Settings of a reward in Python.
      lora: Settings of low-rank adapters.
      warm_start: Settings of training by cross-entropy before the method.
      fitted_reward: Settings of a reward model.
      reference: Settings of the KL penalty in the reward of a method with a critic.
    """

    task: Record
    problem: ProblemSettings
    tools: ToolSettings | None = None
    model: Computation | language.ModelSettings
    critic: language.ModelSettings | None = None
    sampler: language.Sampler | None = None
    reward: RewardSettings | None = None
    lora: Adapters
    warm_start: language.WarmStart | None = None
    fitted_reward: RewardModelSettings | None = None
    reference: ReferenceSettings | None = None

    @classmethod
    def of_sections(cls, sections: Mapping[str, Record], initial: InitialModel = NEW_MODEL) -> Self:
        """Makes the config from records by the prefix of their flags."""
        parts: Any = {x: sections[x] for x in RewardModelSettings._fields if x in sections}
        fitted = RewardModelSettings(**parts) if parts else None
        return dataclasses.replace(super().of_sections(sections, initial), fitted_reward=fitted)
