"""Trains a transformer on a task: `jaxrl-po language --task=addition --out=runs/addition`."""

import functools
from collections.abc import Callable
from typing import Any

from jaxrl_po import config as config_lib
from jaxrl_po import language
from jaxrl_po.algorithms import reference
from jaxrl_po.config import ConfigError, Json, Values
from jaxrl_po.language import Transformer, demonstrations
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.settings import Computation, Sampling
from jaxrl_po.language.tasks.table import Rows
from jaxrl_po.language.tasks.types import selecting
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.run.data.scoring import HostScore, Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import (
    assembly,
    composition,
    conversations,
    flags,
    models,
    presets,
    rewarding,
    user_code,
)
from jaxrl_po.run.experiment.assembly import Script
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
from jaxrl_po.run.experiment.options import InitialModel
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.loop import supervised
from jaxrl_po.run.store import sources
from jaxrl_po.types import PyTree


def build(config: LanguageConfig, placement: Placement, world: None = None) -> assembly.Setup:
    """Builds the method on the task, with a policy and, if it needs one, a critic."""
    del world
    options = config.run
    make = user_code.with_loss(options.entry.make, vars(options))
    start = models.start(SCRIPT, config, answers=rewarding.needs_answers(options))
    task, settings = start.task, composition.problem_settings(config, start.task, start.base)
    rewarded = rewarding.host_score(config, task, placement)
    hosted = None
    if options.tools:
        hosted = conversations.make(config, start, rewarded, placement)
    else:
        require_room(config, start)
    policy, critic = composition.sharded(config, start, placement)
    verify, columns = rewarded is None, None if hosted is None else hosted.columns
    teacher = models.teacher(SCRIPT, config, task)
    composed = composition.Composition(
        config, placement, start, settings, teacher, verify, columns, policy, critic, make
    )
    filtered = composition.filtered(settings, policy)
    data = None if isinstance(task, Dialogue) else task.data
    whole = functools.partial(
        assembly.Setup,
        score="greedy_accuracy",
        initial="warm_start_accuracy",
        rewarded=rewarded,
        axes=LOGICAL_AXES,
        dtype=policy.dtype,
        given=composed.given or None,
        base=start.digest,
        prompts="" if data is None else models.digest(plain(data), None),
    )
    if hosted is not None:
        return whole(composed.learner(None), evaluate=None, host=hosted, notes=filtered)
    if options.entry.supervised:
        shown = demonstrated(options, task)
        measure = functools.partial(
            demonstrations.make_evaluate, model=policy, num_prompts=options.eval_prompts or None
        )
        return whole(
            composed.learner(None),
            measure(selecting(shown)),
            score="held_out_log_prob",
            curves=(Series("loss", "training"), Series("held_out_loss", "held-out")),
            y_label="cross entropy of an answer (nats per token)",
            initial="",
            notes=epochs(shown, options.total_steps),
            test=measure(shown),
            examples=examples(task, policy, settings, options.show),
            learner_of=functools.partial(composed.learner, None),
            learned=composed.learned,
        )
    assert config.warm_start is not None
    return whole(
        composed.learner(config.warm_start),
        **evaluations(composed, rewarded),
        notes=(*notes(task, settings, start.base), *filtered),
        explain=None if start.base is None else rewarding.explain_zero,
        warm=supervised.in_parts(composed.learner, config.warm_start, task, policy),
        learner_of=functools.partial(composed.learner, config.warm_start),
        learned=composed.learned,
    )


def examples(
    task: TaskLike,
    policy: Transformer,
    settings: ProblemSettings,
    show: int,
    judged: Callable[[PyTree], PyTree] = lambda x: x,
) -> Examples | None:
    """Completions of held-out prompts, to be shown; None for 0 prompts."""
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    if not show:
        return None
    return Examples(
        kind.make_describe(seen(task), model=policy, decoding=settings.decoding, num_prompts=show),
        lambda answers: kind.render(task, judged(answers)),
    )


def plain(data: PyTree) -> PyTree:
    """Returns the data of a task without what follows from it and the tokenizer, for a digest."""
    return data._replace(texts=None) if isinstance(data, Rows) else data


def seen(task: TaskLike) -> TaskLike:
    """The task without the rows that must not select a checkpoint."""
    return task if isinstance(task, Dialogue) else selecting(task)


def evaluations(composed: composition.Composition, rewarded: Scorer | None) -> Json:
    """The fields of `Setup` on evaluations: by the verifier, or by functions on the host."""
    options, task, settings = composed.config.run, composed.start.task, composed.settings
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    measure, judge, judged = kind.make_evaluate, None, lambda answers: answers
    judges = rewarding.judges(options, task, pretrained=composed.start.base is not None)
    if isinstance(rewarded, HostScore) and judges:
        measure, judge = kind.make_describe, functools.partial(rewarding.measure, rewarded)
        judged = functools.partial(rewarding.judged, rewarded)
    measure = functools.partial(
        measure,
        model=composed.policy,
        decoding=settings.decoding,
        num_prompts=options.eval_prompts or None,
        num_samples=options.eval_samples,
    )
    return {
        "evaluate": measure(seen(task)),
        "test": measure(task),
        "examples": examples(task, composed.policy, settings, options.show, judged),
        "judge": judge,
    }


def demonstrated(options: LanguageOptions, task: TaskLike) -> language.Task:
    """The task of supervised training; raises ConfigError for a dialogue, and unused options."""
    if isinstance(task, Dialogue):
        raise ConfigError(
            "task",
            f"must not be a dialogue with algorithm = {options.algorithm}, got {options.task}",
        )
    for name in ("reward", "eval_samples"):
        config_lib.require_effect(options, name, False, "the method samples completions")
    return task


def epochs(task: language.Task, total_steps: int) -> tuple[str, ...]:
    """Returns the line shown about an epoch of supervised training; empty for endless rows."""
    held_out = [part.start for part in (task.test, task.validation) if part]
    if task.row is None or not held_out:
        return ()
    rows = min(held_out)  # held-out rows follow those to learn from
    return (
        f"an epoch is {rows:,} completions, so that --total_steps={total_steps} makes "
        f"{total_steps / rows:.3g}",
    )


def notes(task: TaskLike, settings: ProblemSettings, base: models.Base | None) -> tuple[str, ...]:
    """The lines shown about the task before the run."""
    if isinstance(task, Dialogue):
        return ()
    said = [task.note] if task.note else []
    if base is not None:
        said.append(
            f"completions have at most {settings.max_new_tokens} tokens "
            "(--problem.max_new_tokens), their end included"
        )
    return tuple(said)


def require_room(config: LanguageConfig, start: models.Start) -> None:
    """Raises ConfigError for a completion that has no budget, or no room in the model's context."""
    options, task = config.run, start.task
    if rewarding.unanswered(options, task):
        if not (config.problem.max_new_tokens or start.base):
            raise ConfigError(
                "problem.max_new_tokens", "must be given where prompts have no answers"
            )
        if config.warm_start is not None and config.warm_start.steps:
            raise ConfigError("warm_start.steps", "must be 0 where the prompts have no answers")
    context = start.base.text.context if start.base else 0
    budget = (
        composition.problem_settings(config, task, start.base).max_new_tokens or task.answer_length
    )
    longest = task.longest(budget) if isinstance(task, Dialogue) else budget
    whole = task.prompt_length + longest
    if 0 < context < whole:
        raise ConfigError(
            "problem.max_new_tokens",
            f"the longest prompt and completion have {whole} tokens together, more than "
            f"{context}, the context of init_from = {options.init_from}",
        )


def require_known(options: LanguageOptions, given: Values, initial: InitialModel) -> None:
    """Raises ConfigError for flags of another task, rank 0, and sizes beside a pretrained model."""
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
    """Prefix to record class, besides the algorithm's."""
    hosted, pretrained = bool(options.tools), bool(initial.pretrained)
    samples, critic = not options.entry.supervised, options.entry.has_critic
    judge = rewarding.is_model(options)
    problem: type = language.Settings
    if not samples:
        problem = demonstrations.Settings
    elif hosted or is_dialogue(options.task):
        problem = Sampling
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
        "reward_model": (judge, language.ModelSettings),
        "preferences": (judge, language.Preferences),
        "reference": (critic, reference.Settings),
    }
    return {prefix: record for prefix, (wanted, record) in each.items() if wanted}


def title(config: LanguageConfig) -> str:
    """The method, and its tools or task."""
    options = config.run
    return f"{sources.short(options.algorithm)} on {sources.short(options.tools or options.task)}"


SCRIPT = Script(
    name="language",
    summary="Trains a small transformer on a task whose answers are verified.",
    options=LanguageOptions,
    config=LanguageConfig,
    require_known=require_known,
    presets=presets.of_language,
    tuned=presets.of_pretrained,
    sections=sections,
    open_world=lambda config: None,
    rows=lambda config: config.problem.num_prompts,
    steps=lambda config, world: config.problem.num_prompts * config.problem.group_size,
    shards_params=lambda options: options.shard_params,
    initial=models.initial_model,
    build=build,
    title=title,
    unit="completions",
    curves=(Series("accuracy", "training"), Series("greedy_accuracy", "held-out greedy")),
    y_label="accuracy (share right)",
)
