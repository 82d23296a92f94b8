"""Names on the command line and their entries: methods, tasks, rewards and suites; data only.

A user's own entry is `file.py:name` or a Python object; see `user_code.find`. The entries of memory
cells are `MEMORIES` in `control.memory`, since that layer reads them.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from jaxrl_po import language
from jaxrl_po.algorithms import (
    a2c,
    cispo,
    dapo,
    distillation,
    dppo,
    dr_grpo,
    gmpo,
    grpo,
    gspo,
    kl_cov,
    npg,
    pkpo,
    ppo,
    ppo_penalty,
    reinforce,
    reinforce_pp,
    rloo,
    sapo,
    sft,
    trpo,
)
from jaxrl_po.config import with_field_docs
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.tasks.random_prompts import RandomPromptsSettings
from jaxrl_po.run.data import tables
from jaxrl_po.types import Learner


@runtime_checkable
class Record(Protocol):
    """A dataclass of settings."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


class MethodConfig(Record, Protocol):
    """Hyperparameters of a method: the fields that the run layer reads of every method."""

    @property
    def num_microbatches(self) -> int:
        """Returns the number of parts of a minibatch, accumulated to bound memory."""

    @property
    def num_parts(self) -> int:
        """Returns the number of microbatches in a whole batch."""

    @property
    def axis_name(self) -> str | None:
        """Returns the name of the device axis that batch rows are sharded over, or None."""


C = TypeVar("C", bound=MethodConfig)


def _all(_: MethodConfig, prompts: int, members: int) -> tuple[int, int]:
    return prompts, members


def _never(_: MethodConfig) -> bool:
    return False


@with_field_docs
class MethodEntry(NamedTuple, Generic[C]):
    """A method of policy optimisation.

    Attributes:
      Config: Record class of the method's hyperparameters, the flags `--config.*`.
      make: `(config, problem) -> Learner`, makes the learner of one seed.
      has_critic: Whether the method trains a critic.
      compares_groups: Whether the method compares the completions of a prompt, or the episodes of a
        state.
      supervised: Whether the method learns from demonstrations and samples no completions.
      has_teacher: Whether the method learns from the policy of an earlier run.
      clips: Whether a clip, gate or penalty bounds the distance from the policy that sampled.
      in_branches: Whether the method's surrogate is normalised over the branches of a vine.
      learned: `(config, prompts, members) -> (prompts, members)`, the part of a batch of groups
        that an update learns from.
      needs_room: `(config) -> bool`, whether the token budget must exceed the longest answer.
      refills: `(config) -> bool`, whether sampling depends on scores inside the compiled program.
      control: Default values in control environments, by flag name.
      language: Default values with a language model, by flag name.
      functions: Default values with a language model that is scored on the host, by flag name.
    """

    Config: type[C]
    make: Callable[..., Learner]
    has_critic: bool = False
    compares_groups: bool = False
    supervised: bool = False
    has_teacher: bool = False
    clips: bool = True
    in_branches: bool = False
    learned: Callable[[C, int, int], tuple[int, int]] = _all
    needs_room: Callable[[C], bool] = _never
    refills: Callable[[C], bool] = _never
    control: Mapping[str, object] = {}
    language: Mapping[str, object] = {}
    functions: Mapping[str, object] = {}


METHODS: dict[str, MethodEntry[Any]] = {
    "reinforce": MethodEntry(reinforce.Config, reinforce.make, has_critic=True),
    "a2c": MethodEntry(
        a2c.Config, a2c.make, has_critic=True, language={"config.estimator": "monte_carlo"}
    ),
    "npg": MethodEntry(npg.Config, npg.make, has_critic=True, in_branches=True),
    "trpo": MethodEntry(
        trpo.Config, trpo.make, has_critic=True, in_branches=True, language={"config.max_kl": 0.02}
    ),
    "ppo": MethodEntry(ppo.Config, ppo.make, has_critic=True),
    "ppo_penalty": MethodEntry(ppo_penalty.Config, ppo_penalty.make, has_critic=True),
    "grpo": MethodEntry(
        grpo.Config,
        grpo.make,
        compares_groups=True,
        learned=lambda config, prompts, members: (prompts, members - config.extra_samples),
    ),
    "dapo": MethodEntry(
        dapo.Config,
        dapo.make,
        compares_groups=True,
        learned=lambda config, prompts, members: (config.train_prompts or prompts, members),
        needs_room=lambda config: bool(config.soft_overlong),
        refills=lambda config: config.dynamic_sampling == dapo.REFILL,
        # An episode that lasts until its time limit is not too long.
        control={"config.overlong_filtering": False, "config.soft_overlong": False},
        # A refill needs the scores inside the compiled program.
        functions={"config.dynamic_sampling": dapo.REWEIGHT},
    ),
    "dr_grpo": MethodEntry(dr_grpo.Config, dr_grpo.make, compares_groups=True),
    "rloo": MethodEntry(rloo.Config, rloo.make, compares_groups=True, clips=False),
    "reinforce_pp": MethodEntry(reinforce_pp.Config, reinforce_pp.make, compares_groups=True),
    "gspo": MethodEntry(gspo.Config, gspo.make, compares_groups=True),
    "cispo": MethodEntry(cispo.Config, cispo.make, compares_groups=True),
    "sapo": MethodEntry(sapo.Config, sapo.make, compares_groups=True),
    "gmpo": MethodEntry(gmpo.Config, gmpo.make, compares_groups=True),
    "dppo": MethodEntry(dppo.Config, dppo.make, compares_groups=True),
    "pkpo": MethodEntry(pkpo.Config, pkpo.make, compares_groups=True, clips=False),
    "kl_cov": MethodEntry(kl_cov.Config, kl_cov.make, compares_groups=True),
    "distillation": MethodEntry(
        distillation.Config, distillation.make, compares_groups=True, clips=False, has_teacher=True
    ),
    "sft": MethodEntry(
        sft.Config, sft.make, supervised=True, learned=lambda _, prompts, members: (prompts, 1)
    ),
}


@with_field_docs
class TaskEntry(NamedTuple):
    """A task or dialogue that the flag `--task` can name.

    Attributes:
      settings: Record class of the task's flags `--task.*`.
      make: `(settings, tables.TableReading) -> Task | Dialogue`, makes the task.
      is_dialogue: Whether `make` returns a dialogue.
      has_answers: Whether a new model can warm up on the task's answers.
      any_vocabulary: Whether a pretrained model's tokens can replace the task's own tokens.
      reads_file: Whether the task's prompts are the rows of a file, whose columns tools can read.
      reward: Function `module:name` on the host that scores completions, in place of a verifier;
        empty if the task has a verifier.
    """

    settings: type
    make: Callable[[Any, tables.TableReading], TaskLike]
    is_dialogue: bool = False
    has_answers: bool = True
    any_vocabulary: bool = False
    reads_file: bool = False
    reward: str = ""


def _generated(settings: type, make: Callable[..., TaskLike], *, is_dialogue: bool) -> TaskEntry:
    """Returns the entry of a task that is made only from the values of the task's flags."""
    return TaskEntry(settings, lambda own, _: make(**vars(own)), is_dialogue)


TASKS: dict[str, TaskEntry] = {
    **{x: _generated(*y, is_dialogue=False) for x, y in language.tasks.TASKS.items()},
    **{x: _generated(*y, is_dialogue=True) for x, y in language.dialogues.DIALOGUES.items()},
    "random": TaskEntry(
        RandomPromptsSettings, tables.make_random_prompts, has_answers=False, any_vocabulary=True
    ),
    "file": TaskEntry(tables.File, tables.from_file, any_vocabulary=True, reads_file=True),
    "reasoning_gym": TaskEntry(
        tables.ReasoningGym,
        tables.from_reasoning_gym,
        any_vocabulary=True,
        reward="jaxrl_po.run.data.reasoning:score_answer",
    ),
}


class RewardEntry(NamedTuple):
    """A reward that the flag `--reward` can name.

    Attributes:
      function: Function `module:name` on the host; empty if the program computes the reward.
      of_task: Whether the entry stands for the reward of the task.
      is_model: Whether the reward is a model fitted to comparisons by the verifier of the task.
      finds_answers: Whether the function looks for the answer to a prompt in a text.
      takes_pattern: Whether the function takes a `pattern`, which follows the name in the flag.
      needs: Package that the function imports, and the extra of jaxrl_po that has it; or empty.
    """

    function: str = ""
    of_task: bool = False
    is_model: bool = False
    finds_answers: bool = False
    takes_pattern: bool = False
    needs: tuple[str, ...] = ()


VERIFIER, REGEX = "verifier", "regex:"
REWARDS: dict[str, RewardEntry] = {
    VERIFIER: RewardEntry(of_task=True),
    "model": RewardEntry(is_model=True),
    "math": RewardEntry(
        "jaxrl_po.run.data.mathematics:correct", finds_answers=True, needs=("math_verify", "math")
    ),
    "last_number": RewardEntry("jaxrl_po.run.data.answers:last_number", finds_answers=True),
    "contains": RewardEntry("jaxrl_po.run.data.answers:contains", finds_answers=True),
    REGEX: RewardEntry("jaxrl_po.run.data.answers:regex", finds_answers=True, takes_pattern=True),
}

SUITES = {
    "brax": "brax",
    "playground": "mujoco_playground",
    "craftax": "craftax",
    "jumanji": "jumanji",
    "xminigrid": "xminigrid",
}
"""Maps the name of a suite of environments in JAX, and of its extra, to the needed package."""
