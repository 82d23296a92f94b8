"""Trains a transformer on a task: `jaxrl-po language --task=addition --out=runs/addition`."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_po import config as config_lib
from jaxrl_po import language
from jaxrl_po.algorithms import reference
from jaxrl_po.algorithms.teacher import TEACHER, with_teacher
from jaxrl_po.config import ConfigError, Json, Values
from jaxrl_po.language import Transformer, demonstrations, lora, unembedding
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.dialogues.recorded import recorded_problem
from jaxrl_po.language.settings import Computation, SamplingSettings
from jaxrl_po.language.tasks.table import TableRows
from jaxrl_po.language.tasks.types import DATA, reading, selecting
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.run.data.scoring import HostScore, Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import parallel, sharding
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import conversations, flags, models, rewarding, user_code
from jaxrl_po.run.experiment import presets as presets_lib
from jaxrl_po.run.experiment.language_config import (
    Adapters,
    LanguageConfig,
    LanguageOptions,
    ProblemSettings,
    RewardSettings,
    ToolSettings,
    is_dialogue,
    require_task_flags,
    task_entry,
)
from jaxrl_po.run.experiment.models import RunModels
from jaxrl_po.run.experiment.options import InitialModel
from jaxrl_po.run.experiment.registry import MethodConfig
from jaxrl_po.run.experiment.settings import length_of
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.loop.job import Display, Evaluation, Layout, TrainJob, build_job, with_settings
from jaxrl_po.run.loop.programs import split_warm_start
from jaxrl_po.run.store import provenance, sources
from jaxrl_po.types import ActorCritic, FastPaths, Learner, Problem, PyTree

NAME, UNIT = "language", "completions"
SUMMARY = "Trains a small transformer on a task whose answers are verified."
OPTIONS, CONFIG = LanguageOptions, LanguageConfig
CURVES: Sequence[Series] = (
    Series("accuracy", "training"),
    Series("greedy_accuracy", "held-out greedy"),
)
Y_LABEL = "accuracy (share right)"
DOMAIN: Any = sys.modules[__name__]
SENTENCE = 64  # default token budget of a pretrained model, unless answers of the task are longer

initial_model = models.initial_model
presets, tuned = presets_lib.language_presets, presets_lib.of_pretrained


def open_world(config: LanguageConfig) -> None:
    """Returns None: `build` makes the task, together with the model whose tokens the task has."""


def rows(config: LanguageConfig) -> int:
    """Returns the number of prompts of one seed, which are sharded over devices."""
    return config.problem.num_prompts


def steps(config: LanguageConfig, world: None = None) -> int:
    """Returns the number of completions in one iteration."""
    del world
    return config.problem.num_prompts * config.problem.group_size


def build(
    config: LanguageConfig,
    placement: Placement,
    world: None = None,
    methods: Sequence[MethodConfig] = (),
) -> TrainJob:
    """Builds the job that trains the method on the task, with a policy and perhaps a critic."""
    del world
    options = config.run
    make = user_code.with_loss(options.entry.make, vars(options))
    start = models.make_models(DOMAIN, config, answers=rewarding.needs_answers(options))
    task, data = start.task, None if isinstance(start.task, Dialogue) else start.task.data
    settings = problem_settings(config, task, start.base)
    scorer = rewarding.host_score(config, task, placement)
    hosted = None
    if options.tools:
        hosted = conversations.make_dialogues(config, start, scorer, placement)
    else:
        require_room(config, start)
    start = sharded(config, start, placement)
    start = start._replace(teacher=models.teacher(DOMAIN, config, task))
    config = dataclasses.replace(config, problem=settings)
    given = dict(start.params or {})
    given |= {} if data is None or hosted is not None else {DATA: data}
    given |= {} if start.teacher is None else {TEACHER: ActorCritic(start.teacher.params)}
    problem_of = functools.partial(
        make_problem, config, placement, start, scorer is None, hosted and hosted.columns
    )

    def learner_of(method: MethodConfig, warm_start: object = config.warm_start) -> Learner:
        def compose(given: PyTree) -> Learner:
            problem = problem_of(given, warm_start)
            return make_learner(config, placement, start, given, problem, method, make)

        learner = compose(given)
        if not given:
            return learner
        return learner._replace(init=lambda pair: compose(pair[1]).init(pair[0]))

    said = filtered(settings, start.policy)
    display, warm = Display(title(config), UNIT, CURVES, Y_LABEL, said), None
    evaluation = Evaluation(score="greedy_accuracy", initial="warm_start_accuracy")
    shown = make_supervised_task(options, task) if options.entry.supervised else None
    learner, *_ = map(learner_of, methods or [config.method])  # each checks its numbers
    if shown is not None:
        evaluation, display = supervised(config, start, shown, display)
    elif hosted is None:
        evaluation = evaluated(config, start, scorer, evaluation)
        display = display._replace(notes=(*notes(task, settings, start.base), *said))
        assert config.warm_start is not None

        def of_warm_start(warm_start: object) -> Learner:
            own = functools.partial(learner_of, warm_start=warm_start)
            return with_settings(own, alone=not given) if methods else own(config.method)

        warm = split_warm_start(of_warm_start, config.warm_start, task, start.policy)
    prompts = "" if data is None else models.digest_base(plain_data(data), None)
    return build_job(
        learner,
        Layout(placement, LOGICAL_AXES),
        length_of(options, steps(config)),
        seed=options.seed,
        dtype=start.policy.dtype,
        method=config.method,
        methods=methods,
        learner_of=learner_of,
        evaluation=evaluation,
        given=given or None,
        warm=warm,
        host=hosted,
        scorer=scorer,
        learned=learned(config, placement) if hosted is None else None,
        display=display,
        digests={provenance.BASE: start.digest, provenance.PROMPTS: prompts},
    )


def make_learner(
    config: LanguageConfig,
    placement: Placement,
    start: RunModels,
    given: PyTree,
    problem: Problem,
    method: MethodConfig,
    make: Callable[..., Learner],
) -> Learner:
    """Returns the learner of one seed, with its teacher and its reference policy."""
    if start.teacher is not None:
        kind: Any = language.dialogues if isinstance(start.task, Dialogue) else language
        problem = with_teacher(
            problem,
            given[TEACHER],
            kind.make_problem(start.task, start.teacher.model, **vars(config.problem)).apply,
            num_parts=method.num_parts,
        )
    if placement.cuts_params:  # fast paths would read prompts of one device on other devices
        problem = problem._replace(fast_paths=FastPaths())
    axis = placement.axis_name
    learner = make(dataclasses.replace(method, axis_name=axis), problem)
    own = config.reference
    if own is not None and own.enabled:
        learner = reference.with_reference_kl(
            learner, problem, own, num_parts=method.num_parts, axis_name=axis
        )
    return learner


def make_problem(
    config: LanguageConfig,
    placement: Placement,
    start: RunModels,
    verify: bool,
    columns: int | None,
    given: PyTree,
    warm_start: object,
) -> Problem:
    """Makes the problem of a run.

    Args:
      config: Settings of the run, with the token budget of completions.
      placement: Placement on devices.
      start: Task and models, with their sharding.
      verify: Whether the compiled program computes the reward.
      columns: Number of token columns in recordings of dialogues on the host; None without
        dialogues on the host.
      given: Parameters and prompts, see `TrainJob.given`.
      warm_start: Argument `warm` of `language.make_problem`.
    """
    task, policy, settings = start.task, start.policy, config.problem
    initial = {lora.BASE: given[lora.BASE]} if start.params else None
    shared: Json = {"initial": initial, "target": placement.target}
    own: Json = {"critic": start.critic, "warm": warm_start, "sampler": config.sampler}
    own |= shared | vars(settings)
    if columns is not None:
        assert isinstance(task, language.Task)
        assert isinstance(settings, SamplingSettings)
        drawn = task._replace(data=None)  # prompts are drawn on the host
        return recorded_problem(
            drawn, policy, settings, columns=columns, critic=start.critic, **shared
        )
    if isinstance(task, Dialogue):
        return language.dialogues.make_problem(task, policy, **own)
    source = reading(task, given)
    if config.run.entry.supervised:
        return demonstrations.make_problem(
            source, policy, num_prompts=settings.num_prompts, **shared
        )
    problem = language.make_problem(source, policy, **own, verify=verify)
    if rewarding.is_model(config.run):
        problem = rewarding.with_reward_model(problem, config, source, policy)
    return problem


def problem_settings(
    config: LanguageConfig, task: TaskLike, base: models.PretrainedBase | None = None
) -> ProblemSettings:
    """Returns the settings `--problem.*`, with a token budget for the longest answer.

    A pretrained model answers in sentences, and soft overlong punishment needs additional tokens.
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
    """Returns a line for the user if a filter keeps fewer tokens than the settings ask for."""
    decoding, vocabulary = settings.decoding, model.vocabulary
    if not decoding.filters or decoding.top_k or vocabulary <= unembedding.HELD:
        return ()
    return (
        f"--problem.top_p and --problem.min_p keep at most {unembedding.LISTED} of the "
        f"{vocabulary:,} tokens, as with --problem.top_k={unembedding.LISTED}",
    )


def learned(config: LanguageConfig, placement: Placement) -> tuple[int, int]:
    """Returns the numbers of rows in a minibatch on a data device, and of rows per prompt in it.

    The second number is 1 if rows are shuffled or lack some members of a group.
    """
    method, sizes = config.method, config.problem
    prompts, members = config.run.entry.learned(method, sizes.num_prompts, sizes.group_size)
    parts = method.num_parts // method.num_microbatches
    together = members if parts == 1 and members == sizes.group_size else 1
    return prompts * members // (placement.data_devices * parts), together


def sharded(config: LanguageConfig, start: RunModels, placement: Placement) -> RunModels:
    """Returns the start with a critic, if the method has one, and with sharded models.

    Raises:
      ConfigError: A model of these sizes cannot be built or sharded.
    """
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
    return start._replace(policy=policy, critic=critic)


def make_examples(
    task: TaskLike,
    policy: Transformer,
    settings: ProblemSettings,
    show: int,
    rescore: Callable[[PyTree], PyTree] = lambda x: x,
) -> Examples | None:
    """Returns completions of held-out prompts as examples; None if `show` is 0."""
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    if not show:
        return None
    return Examples(
        kind.make_describe(seen(task), model=policy, decoding=settings.decoding, num_prompts=show),
        lambda answers: kind.render(task, rescore(answers)),
    )


def plain_data(data: PyTree) -> PyTree:
    """Returns the data of a task, for a digest, without values that follow from other data."""
    return data._replace(texts=None) if isinstance(data, TableRows) else data


def seen(task: TaskLike) -> TaskLike:
    """Returns the task without the rows that must not select a checkpoint."""
    return task if isinstance(task, Dialogue) else selecting(task)


def evaluated(
    config: LanguageConfig, start: RunModels, scorer: Scorer | None, evaluation: Evaluation
) -> Evaluation:
    """Returns the evaluation with its measures, by the verifier or by functions on the host."""
    options, task, settings = config.run, start.task, config.problem
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    measure, score, rescore = kind.make_evaluate, None, lambda answers: answers
    replaces = rewarding.replaces_verifier(options, task, pretrained=start.base is not None)
    if isinstance(scorer, HostScore) and replaces:
        measure, score = kind.make_describe, functools.partial(rewarding.score_evaluation, scorer)
        rescore = functools.partial(rewarding.rescore, scorer)
    measure = functools.partial(
        measure,
        model=start.policy,
        decoding=settings.decoding,
        num_prompts=options.eval_prompts or None,
        num_samples=options.eval_samples,
    )
    return evaluation._replace(
        measure=measure(seen(task)),
        test=measure(task),
        score_evaluation=score,
        examples=make_examples(task, start.policy, settings, options.show, rescore),
        explain=None if start.base is None else rewarding.explain_zero,
    )


def supervised(
    config: LanguageConfig, start: RunModels, shown: language.Task, display: Display
) -> tuple[Evaluation, Display]:
    """Returns the evaluation and the display of supervised training."""
    options, settings = config.run, config.problem
    measure = functools.partial(
        demonstrations.make_evaluate, model=start.policy, num_prompts=options.eval_prompts or None
    )
    evaluation = Evaluation(
        measure(selecting(shown)),
        measure(shown),
        score="held_out_log_prob",
        examples=make_examples(start.task, start.policy, settings, options.show),
    )
    return evaluation, display._replace(
        curves=(Series("loss", "training"), Series("held_out_loss", "held-out")),
        y_label="cross entropy of an answer (nats per token)",
        notes=epochs(shown, options.total_steps),
    )


def make_supervised_task(options: LanguageOptions, task: TaskLike) -> language.Task:
    """Returns the task of supervised training; raises ConfigError for dialogues, unused options."""
    if isinstance(task, Dialogue):
        raise ConfigError(
            "task",
            f"must not be a dialogue with algorithm = {options.algorithm}, got {options.task}",
        )
    for name in ("reward", "eval_samples"):
        config_lib.require_effect(options, name, False, "the method samples completions")
    return task


def epochs(task: language.Task, total_steps: int) -> tuple[str, ...]:
    """Returns the line about an epoch of supervised training; empty if the rows are endless."""
    held_out = [part.start for part in (task.test, task.validation) if part]
    if task.row is None or not held_out:
        return ()
    rows = min(held_out)  # the rows for training precede the held-out rows
    return (
        f"an epoch is {rows:,} completions, so that --total_steps={total_steps} makes "
        f"{total_steps / rows:.3g}",
    )


def notes(
    task: TaskLike, settings: ProblemSettings, base: models.PretrainedBase | None
) -> tuple[str, ...]:
    """Returns the lines about the task that are shown before the run."""
    if isinstance(task, Dialogue):
        return ()
    said = [task.note] if task.note else []
    if base is not None:
        said.append(
            f"completions have at most {settings.max_new_tokens} tokens "
            "(--problem.max_new_tokens), their end included"
        )
    return tuple(said)


def require_room(config: LanguageConfig, start: RunModels) -> None:
    """Raises ConfigError for a completion that has no token budget or exceeds the context."""
    options, task = config.run, start.task
    if rewarding.unanswered(options, task):
        if not (config.problem.max_new_tokens or start.base):
            raise ConfigError(
                "problem.max_new_tokens", "must be given where prompts have no answers"
            )
        if config.warm_start is not None and config.warm_start.steps:
            raise ConfigError("warm_start.steps", "must be 0 where the prompts have no answers")
    context = start.base.text.context if start.base else 0
    budget = problem_settings(config, task, start.base).max_new_tokens or task.answer_length
    longest = task.longest(budget) if isinstance(task, Dialogue) else budget
    whole = task.prompt_length + longest
    if 0 < context < whole:
        raise ConfigError(
            "problem.max_new_tokens",
            f"the longest prompt and completion have {whole} tokens together, more than "
            f"{context}, the context of init_from = {options.init_from}",
        )


def require_known(options: LanguageOptions, given: Values, initial: InitialModel) -> None:
    """Raises ConfigError for flags that the task, the adapters or the pretrained model rule out."""
    require_task_flags(options.task, given)
    rank = {name: value for name, value in given.items() if name == "lora.rank"}
    if 0 in flags.convert(rank, {"lora": Adapters}).values():
        raise ConfigError(
            "lora.rank", "must lie in [1, inf), got 0; leave it out to train all parameters"
        )
    for name in given if initial.pretrained else ():
        prefix, _, field = name.partition(".")
        if prefix == "model" and field not in vars(Computation()):
            raise ConfigError(
                name,
                f"has no effect with init_from = {options.init_from}: a pretrained model has its "
                "own sizes",
            )


def sections(options: LanguageOptions, initial: InitialModel) -> dict[str, type]:
    """Returns the record class of each section by prefix, except the record of the method."""
    hosted, pretrained = bool(options.tools), bool(initial.pretrained)
    samples, critic = not options.entry.supervised, options.entry.has_critic
    fitted = rewarding.is_model(options)
    problem: type = language.LanguageSettings
    if not samples:
        problem = demonstrations.SupervisedSettings
    elif hosted or is_dialogue(options.task):
        problem = SamplingSettings
    each = {
        "task": (True, task_entry(options.task).settings),
        "problem": (True, problem),
        "tools": (hosted, ToolSettings),
        "model": (True, Computation if pretrained else language.ModelSettings),
        "critic": (critic and pretrained, language.ModelSettings),
        "sampler": (samples and not hosted, language.Sampler),
        "reward": (not hosted and rewarding.functions(options), RewardSettings),
        "lora": (True, Adapters),
        "warm_start": (samples, language.WarmStart),
        "reward_model": (fitted, language.ModelSettings),
        "preferences": (fitted, language.Preferences),
        "reference": (critic, reference.ReferenceSettings),
    }
    return {prefix: record for prefix, (wanted, record) in each.items() if wanted}


def title(config: LanguageConfig) -> str:
    """Returns a title with the method, and its tools or task."""
    options = config.run
    return f"{sources.short(options.algorithm)} on {sources.short(options.tools or options.task)}"
