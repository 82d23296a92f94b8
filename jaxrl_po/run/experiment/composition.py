"""The learner of a language run: its models, its problem and its method."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_po import language
from jaxrl_po.algorithms import reference
from jaxrl_po.algorithms.teacher import TEACHER, with_teacher
from jaxrl_po.config import Json
from jaxrl_po.language import demonstrations, lora, unembedding
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.dialogues.recorded import recorded_problem
from jaxrl_po.language.settings import Sampling
from jaxrl_po.language.tasks.types import DATA, reading
from jaxrl_po.language.transformer import Transformer
from jaxrl_po.run.devices import parallel, sharding
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags, models, rewarding
from jaxrl_po.run.experiment.language_config import LanguageConfig, ProblemSettings
from jaxrl_po.run.experiment.registry import MethodConfig
from jaxrl_po.types import ActorCritic, FastPaths, Learner, Problem, PyTree

SENTENCE = 64  # tokens of a completion of a pretrained model, unless the task's answers are longer


def problem_settings(
    config: LanguageConfig, task: TaskLike, base: models.Base | None = None
) -> ProblemSettings:
    """`--problem.*`, with a token budget for the longest answer.

    A pretrained model answers in sentences, and soft overlong punishment needs room.
    """
    settings = config.problem
    if settings.max_new_tokens or isinstance(task, Dialogue) or config.run.tools:
        return settings
    budget = task.answer_length
    if base is not None:
        room = base.text.context - task.prompt_length if base.text.context else SENTENCE
        budget = max(budget, min(SENTENCE, room))
    if config.run.entry.needs_room(config.method):
        budget = language.rewards.budget_with_room(budget)
    return dataclasses.replace(settings, max_new_tokens=budget)


def filtered(settings: ProblemSettings, model: Transformer) -> tuple[str, ...]:
    """A line where a filter keeps fewer tokens than it asks for."""
    decoding, vocabulary = settings.decoding, model.vocabulary
    if not decoding.filters or decoding.top_k or vocabulary <= unembedding.HELD:
        return ()
    return (
        f"--problem.top_p and --problem.min_p keep at most {unembedding.LISTED} of the "
        f"{vocabulary:,} tokens, as with --problem.top_k={unembedding.LISTED}",
    )


class Composition(NamedTuple):
    """What the learner of a language run is made of.

    Attributes:
      config: Settings of the run.
      placement: on devices.
      start: task, policy and initial parameters.
      settings: `--problem.*`, with its token budget.
      teacher: see `models.teacher`.
      verify: whether the program gives the reward.
      columns: of the recordings of dialogues on the host; None without such.
      policy: the transformer, as it is sharded.
      critic: likewise, or None.
      make: `make` of the method, with the user's loss.
    """

    config: LanguageConfig
    placement: Placement
    start: models.Start
    settings: ProblemSettings
    teacher: models.Teacher | None
    verify: bool
    columns: int | None
    policy: Transformer
    critic: Transformer | None
    make: Callable[..., Learner]

    @property
    def given(self) -> PyTree:
        """Parameters and prompts that all seeds begin with; empty for none.

        An argument of the programs: as constants they would be part of their text.
        """
        task = self.start.task
        data = None if isinstance(task, Dialogue) or self.columns is not None else task.data
        given = dict(self.start.params or {}) | ({} if data is None else {DATA: data})
        return given | ({} if self.teacher is None else {TEACHER: ActorCritic(self.teacher.params)})

    @property
    def learned(self) -> tuple[int, int]:
        """See `Setup.learned`; rows that are shuffled, or lack some members, share no prompt."""
        method, group = self.config.method, self.settings.group_size
        prompts, members = self.config.run.entry.learned(method, self.settings.num_prompts, group)
        parts = method.num_parts // method.num_microbatches
        together = members if parts == 1 and members == group else 1
        return prompts * members // (self.placement.data_devices * parts), together

    def learner(self, warm_start: object, method: MethodConfig | None = None) -> Learner:
        """The learner with a warm start and the settings of its method, by default those given.

        Where there is something `given`, its `init` takes `(key, given)`.
        """
        method = self.config.method if method is None else method
        given = self.given
        learner = self._compose(method, warm_start, given)
        if not given:
            return learner
        return learner._replace(
            init=lambda pair: self._compose(method, warm_start, pair[1]).init(pair[0])
        )

    def _compose(self, method: MethodConfig, warm_start: object, given: PyTree) -> Learner:
        problem = self._problem(warm_start, given)
        if self.teacher is not None:
            kind: Any = language.dialogues if isinstance(self.start.task, Dialogue) else language
            problem = with_teacher(
                problem,
                given[TEACHER],
                kind.make_problem(self.start.task, self.teacher.model, **vars(self.settings)).apply,
                num_parts=method.num_parts,
            )
        if self.placement.cuts_params:  # the prompts of some devices would be read on others
            problem = problem._replace(fast_paths=FastPaths())
        axis = self.placement.axis_name
        placed = dataclasses.replace(method, axis_name=axis)
        learner = self.make(placed, problem)
        of_reference = self.config.reference
        if of_reference is not None and of_reference.enabled:
            learner = reference.with_reference_kl(
                learner, problem, of_reference, num_parts=method.num_parts, axis_name=axis
            )
        return learner

    def _problem(self, warm_start: object, given: PyTree) -> Problem:
        config, task, policy, settings = self.config, self.start.task, self.policy, self.settings
        initial = {lora.BASE: given[lora.BASE]} if self.start.params else None
        shared: Json = {"initial": initial, "target": self.placement.target}
        own: Json = {"critic": self.critic, "warm": warm_start, "sampler": config.sampler}
        own |= shared | vars(settings)
        if self.columns is not None:
            assert isinstance(task, language.Task)
            assert isinstance(settings, Sampling)
            return recorded_problem(
                task._replace(data=None),  # drawn from on the host
                policy,
                settings,
                columns=self.columns,
                critic=self.critic,
                **shared,
            )
        if isinstance(task, Dialogue):
            return language.dialogues.make_problem(task, policy, **own)
        source = reading(task, given)
        if config.run.entry.supervised:
            return demonstrations.make_problem(
                source, policy, num_prompts=settings.num_prompts, **shared
            )
        problem = language.make_problem(source, policy, **own, verify=self.verify)
        if rewarding.is_model(config.run):
            settled = dataclasses.replace(config, problem=settings)
            problem = rewarding.with_reward_model(problem, settled, source, policy)
        return problem


def sharded(
    config: LanguageConfig, start: models.Start, placement: Placement
) -> tuple[Transformer, Transformer | None]:
    """The policy and, for the methods that have one, the critic; raises ConfigError."""
    policy, critic = start.policy, None
    if config.run.entry.has_critic:
        section, sizes = ("critic", config.critic) if start.base else ("model", config.model)
        assert isinstance(sizes, language.ModelSettings)
        with flags.locating({section: type(sizes)}):
            critic = sizes.build(start.task.tokenizer.size, outputs=1)
    if placement.cuts_params:
        models.require_shares(start, placement)
        mesh = parallel.make_mesh(placement)
        rows, over_rows = sharding.rows_over_data(mesh), sharding.over_rows(mesh)
        policy = policy.clone(constrain=rows, over_rows=over_rows)
        critic = critic and critic.clone(constrain=rows)
    return policy, critic
