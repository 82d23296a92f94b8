"""Trains a transformer on a task: `jaxrl-po language --task=addition --out=runs/addition`."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_po import config, language
from jaxrl_po.algorithms import reference
from jaxrl_po.config import NON_NEGATIVE, POSITIVE, ConfigError, number
from jaxrl_po.language import demonstrations
from jaxrl_po.language.dialogue import AnyTask, Dialogue
from jaxrl_po.language.settings import Computation, Sampling
from jaxrl_po.language.tasks.table import Rows
from jaxrl_po.language.tasks.types import DRAWN, selecting
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.run.data.scoring import HostScore
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import (
    assembly,
    composition,
    conversations,
    methods,
    models,
    presets,
    rewarding,
    tasks,
)
from jaxrl_po.run.experiment.assembly import Script
from jaxrl_po.run.experiment.options import Options as RunOptions
from jaxrl_po.run.experiment.options import option
from jaxrl_po.run.experiment.rewarding import MODEL, VERIFIER
from jaxrl_po.run.experiment.tasks import TASKS
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.loop import supervised
from jaxrl_po.run.store import sources


@config.record
class Options(RunOptions):
    """The run as a whole."""

    task: str = option(
        "addition",
        f"one of {', '.join(TASKS)}, or a function of your own as file.py:name",
        common=True,
    )
    init_from: str = option(
        "",
        "folder or GGUF file of a pretrained model, or folder of an earlier run of this script "
        "(the latest policy of its first seed), with which every seed begins; empty for none",
        common=True,
    )
    teacher: str = option(
        "",
        "folder of an earlier run of this script, whose policy (the latest of its first seed) is "
        f"the teacher of --algorithm={models.DISTILLATION}; empty for none",
    )
    tools: str = option(
        "",
        "class whose methods are tools of a pretrained model, as file.py:Class; each dialogue has "
        "an instance; empty for none",
        common=True,
        was=("environment",),
    )
    reward: str = option(
        VERIFIER,
        f"reward to optimise: `{VERIFIER}`, of the task; `{MODEL}`, a reward model fitted to "
        "comparisons by the verifier (--reward_model.*, --preferences.*); "
        "`math`, whether a completion has, in \\boxed{} or after ####, what equals the answer as "
        "mathematics; `last_number` or `contains`, whether its last number is the answer, or the "
        "answer stands in it; `regex:PATTERN`, whether the last match, or its first group, is the "
        "answer; or Python functions that score completions, as in "
        "rewards.py:nearly,package.module:other, of which the first gives the accuracy and decides "
        "which groups are informative",
        common=True,
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
    reward_weights: str = option("", "weights of the functions, as in 1,0.2; empty is 1 for each")
    reward_timeout: float = number(
        60.0,
        "time limit of one call of a function",
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
    )
    show: int = option(
        4,
        "held-out prompts whose completions by the first seed, greedy and sampled, are "
        "written to samples.jsonl at each evaluation",
        unit="prompts",
        within=NON_NEGATIVE,
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        if not self.tools:
            return
        if self.algorithm in methods.SUPERVISED:
            raise ConfigError("tools", f"must be left out with algorithm = {self.algorithm}")
        beside = f"with tools = {self.tools}"
        if self.distributed:
            raise ConfigError("distributed", f"must be false {beside}: there is one process")
        if self.task != "file":
            raise ConfigError("task", f"must be file {beside}, got {self.task}")


def build(records: Mapping[str, Any], algorithm: Any, placement: Placement) -> assembly.Setup:
    """The setup: the method on the task, with a policy and, if it needs one, a critic."""
    options = records[""]
    start = models.start(SCRIPT, records, answers=rewarding.needs_answers(options))
    task, settings = start.task, composition.problem_settings(records, start.task, start.base)
    rewarded = rewarding.host_score(records, task, placement)
    hosted = None
    if options.tools:
        hosted = conversations.make(records, start, rewarded, placement)
    else:
        require_room(records, start)
    policy, critic = composition.sharded(records, start, placement)
    verify, columns = rewarded is None, None if hosted is None else hosted.scene.columns
    teacher = models.teacher(SCRIPT, records, task)
    composed = composition.Composition(
        records, algorithm, placement, start, settings, teacher, verify, columns, policy, critic
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
    if options.algorithm in methods.SUPERVISED:
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
            notes=tasks.epochs(shown, options.total_steps),
            test=measure(shown),
            examples=examples(task, policy, settings, options.show),
            learner_of=functools.partial(composed.learner, None),
            learned=composed.learned,
        )
    return whole(
        composed.learner(records["warm_start"]),
        **evaluations(composed, rewarded),
        notes=(*notes(task, settings, start.base), *filtered),
        explain=None if start.base is None else rewarding.explain_zero,
        warm=supervised.in_parts(composed.learner, records["warm_start"], task, policy),
        learner_of=functools.partial(composed.learner, records["warm_start"]),
        learned=composed.learned,
    )


def examples(
    task: AnyTask, policy: Any, settings: Any, show: int, judged: Callable[[Any], Any] = lambda x: x
) -> Examples | None:
    """Completions of held-out prompts, to be shown; None for 0 prompts."""
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    if not show:
        return None
    return Examples(
        kind.make_describe(seen(task), model=policy, decoding=settings.decoding, num_prompts=show),
        lambda answers: kind.render(task, judged(answers)),
    )


def plain(data: Any) -> Any:
    """Returns the data of a task without what follows from it and the tokenizer, for a digest."""
    return data._replace(texts=None) if isinstance(data, Rows) else data


def seen(task: AnyTask) -> AnyTask:
    """The task without the rows that must not select a checkpoint."""
    return task if isinstance(task, Dialogue) else selecting(task)


def evaluations(composed: composition.Composition, rewarded: HostScore | None) -> dict[str, Any]:
    """The fields of `Setup` on evaluations: by the verifier, or by functions on the host."""
    options, task, settings = composed.records[""], composed.start.task, composed.settings
    kind: Any = language.dialogues if isinstance(task, Dialogue) else language
    measure, judge, judged = kind.make_evaluate, None, lambda answers: answers
    pretrained = composed.start.base is not None
    if rewarded is not None and rewarding.judges(options, task, pretrained=pretrained):
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


def demonstrated(options: Options, task: AnyTask) -> language.Task:
    """The task of supervised training; raises ConfigError for a dialogue, and unused options."""
    if isinstance(task, Dialogue):
        raise ConfigError(
            "task",
            f"must not be a dialogue with algorithm = {options.algorithm}, got {options.task}",
        )
    for name in ("reward", "eval_samples"):
        config.require_effect(options, name, False, "the method samples completions")
    return task


def notes(task: AnyTask, settings: Any, base: models.Base | None) -> tuple[str, ...]:
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


def require_room(records: Mapping[str, Any], start: models.Start) -> None:
    """Raises ConfigError for a completion that has no budget, or no room in the model's context."""
    options, task = records[""], start.task
    if rewarding.unanswered(options, task):
        if not (records["problem"].max_new_tokens or start.base):
            raise ConfigError(
                "problem.max_new_tokens", "must be given where prompts have no answers"
            )
        if records["warm_start"].steps:
            raise ConfigError("warm_start.steps", "must be 0 where the prompts have no answers")
    context = start.base.text.context if start.base else 0
    budget = (
        composition.problem_settings(records, task, start.base).max_new_tokens or task.answer_length
    )
    longest = task.longest(budget) if isinstance(task, Dialogue) else budget
    whole = task.prompt_length + longest
    if 0 < context < whole:
        raise ConfigError(
            "problem.max_new_tokens",
            f"the longest prompt and completion have {whole} tokens together, more than "
            f"{context}, the context of init_from = {options.init_from}",
        )


def sections(options: Options) -> dict[str, type]:
    """Prefix to record class, besides the algorithm's."""
    hosted, pretrained = bool(options.tools), bool(models.root(options.init_from))
    samples = options.algorithm not in methods.SUPERVISED
    critic, judge = options.algorithm in methods.WITH_CRITIC, options.reward == MODEL
    problem: type = language.Settings
    if not samples:
        problem = demonstrations.Settings
    elif hosted or tasks.is_dialogue(options.task):
        problem = Sampling
    each = {
        "task": (True, tasks.entry(options.task).settings),
        "problem": (True, problem),
        "tools": (hosted, conversations.Settings),
        "model": (True, Computation if pretrained else language.ModelSettings),
        "critic": (critic and pretrained, language.ModelSettings),
        "sampler": (samples and not hosted, language.Sampler),
        "reward": (not hosted and rewarding.functions(options), rewarding.Settings),
        "lora": (True, models.Adapters),
        "warm_start": (samples, language.WarmStart),
        "reward_model": (judge, language.ModelSettings),
        "preferences": (judge, language.Preferences),
        "reference": (critic, reference.Settings),
    }
    return {prefix: record for prefix, (wanted, record) in each.items() if wanted}


def title(records: Mapping[str, Any]) -> str:
    """Returns the method, and the class of tools or the task."""
    options = records[""]
    return f"{options.algorithm} on {sources.short(options.tools or options.task)}"


SCRIPT = Script(
    name="language",
    summary="Trains a small transformer on a task whose answers are verified.",
    options=Options,
    defaults=presets.of_language,
    tuned=presets.of_pretrained,
    sections=sections,
    rows=lambda records: records["problem"].num_prompts,
    steps=lambda records: records["problem"].num_prompts * records["problem"].group_size,
    shards_params=lambda options: options.shard_params,
    build=build,
    title=title,
    unit="completions",
    curves=(Series("accuracy", "training"), Series("greedy_accuracy", "held-out greedy")),
    y_label="accuracy (share right)",
)
