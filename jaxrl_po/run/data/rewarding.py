"""What `--reward` names: the verifier, a reward model, or Python functions on the host."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxrl_po import config, language
from jaxrl_po.language.dialogue import AnyTask, Dialogue
from jaxrl_po.language.evaluation import Answers
from jaxrl_po.run.data import prompts, scoring
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import extras, flags, tasks
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.types import Problem

VERIFIER, MODEL, MATH = "verifier", "model", "math"
NAMED = (VERIFIER, MODEL, MATH)


def functions(options: Any) -> list[str]:
    """Sources of the reward functions on the host: from `--reward`, or those of the task."""
    own = tasks.entry(options.task).reward
    sources = {VERIFIER: own, MODEL: "", MATH: "jaxrl_po.run.data.mathematics:correct"}.get(
        options.reward, options.reward
    )
    return [source for source in sources.split(",") if source]


def host_score(options: Any, task: AnyTask, placement: Placement) -> scoring.HostScore | None:
    """The scorer that calls `functions`; None if the reward is computed in the program.

    Raises:
      ConfigError, UsageError: invalid or unsuitable functions; none is loaded yet.
    """
    sources = functions(options)
    for name in ("reward_weights", "reward_accuracy", "reward_timeout"):
        config.require_effect(options, name, bool(sources), "reward names functions")
    if isinstance(task, Dialogue):
        if options.reward == VERIFIER:
            return None
        raise UsageError(
            f"--reward={options.reward} must be left out with --task={options.task}: a dialogue "
            "gives its rewards itself"
        )
    if options.reward == MODEL and tasks.entry(options.task).reward:
        raise UsageError(
            f"--reward={MODEL} must be fitted to a verifier in the program; "
            f"--task={options.task} has none"
        )
    if not sources:
        return None
    if not all(":" in source for source in sources):
        near = flags.suggest(options.reward, NAMED)
        raise UsageError(
            f"--reward={options.reward} must be {', '.join(NAMED)}, or functions such as "
            f"rewards.py:nearly{near}"
        )
    if options.reward == MATH:
        extras.require("reward=math", "math_verify", "math")
    if options.distributed:
        raise UsageError(
            "--reward must be left out with --distributed: completions are scored in one process"
        )
    if placement.cuts_params:
        raise UsageError(
            "--reward must be left out where parameters are sharded over devices "
            "(--shard_params, model in --mesh)"
        )
    weights = options.reward_weights.split(",") if options.reward_weights else ["1"] * len(sources)
    if len(weights) != len(sources):
        raise UsageError(
            f"--reward_weights={options.reward_weights} must be {len(sources)} numbers, one "
            "for each function"
        )
    try:
        rewards = [
            scoring.Reward(source, float(weight))
            for source, weight in zip(sources, weights, strict=True)
        ]
    except ValueError:
        raise UsageError(
            f"--reward_weights must be numbers such as 1,0.2, got {options.reward_weights!r}"
        ) from None
    return scoring.HostScore(
        rewards, task, accuracy=options.reward_accuracy, timeout=float(options.reward_timeout)
    )


def judges(options: Any, task: AnyTask, *, pretrained: bool) -> bool:
    """Whether the functions of `--reward` score the evaluation too, in place of the verifier.

    They do where the equality of a completion with `answer` says little: a pretrained model writes
    free text, `math` reads the answer off a text, and rows may have no answer.

    Args:
      options: of the run.
      task: see `unanswered`.
      pretrained: whether the run began with a pretrained model.
    """
    return bool(functions(options)) and (
        pretrained or options.reward == MATH or unanswered(options, task)
    )


def unanswered(options: Any, task: AnyTask) -> bool:
    """Whether the prompts of the task have no answers."""
    if options.task != "file" or isinstance(task, Dialogue) or task.columns is None:
        return False
    return prompts.ANSWER not in task.columns(np.zeros(1, np.int32))


def judged(rewarded: scoring.HostScore, answers: Mapping[str, Answers]) -> dict[str, Answers]:
    """Answers of one seed with the scores of the functions."""
    return {name: rewarded.judge(each) for name, each in answers.items()}


def measure(rewarded: scoring.HostScore, answers: Mapping[str, Answers]) -> dict[str, Any]:
    """The metrics of an evaluation, `[S, P]`, from answers with the leading axis `[S]`.

    A prompt whose answers no function judges has the mean of the others.
    """
    seeds = range(len(next(iter(answers.values())).length))
    scored = [judged(rewarded, jax.tree.map(lambda x, i=i: x[i], dict(answers))) for i in seeds]
    stacked = jax.tree.map(lambda *each: np.stack(each), *scored)
    absent = np.any([np.isnan(each.score).any(axis=-1) for each in stacked.values()], axis=0)

    def filled(value: Any) -> Any:
        judged = np.ma.array(value, mask=absent).mean(axis=1, keepdims=True)
        return np.where(absent, np.ma.filled(judged, np.nan), value)

    measured = language.evaluation.measure(stacked)
    return {name: filled(value) for name, value in measured.items()} if absent.any() else measured


def with_reward_model(
    problem: Problem, records: Mapping[str, Any], task: language.Task, policy: language.Transformer
) -> Problem:
    """The problem with a reward model, fitted to comparisons of samples of the initial policy.

    Raises:
      UsageError: process rewards of the verifier were asked for as well.
    """
    settings = records["problem"]
    if settings.process_reward:
        raise UsageError(
            f"--problem.process_reward has no effect with --reward={MODEL}: the model "
            "rewards the last token"
        )
    model = (
        records["reward_model"]
        .build(task.tokenizer.size, outputs=1)
        .clone(constrain=policy.constrain)
    )
    fit = functools.partial(
        language.reward_model.fit,
        model,
        task,
        policy,
        settings=records["preferences"],
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
    )
    return language.learned_reward(problem, task, model, fit)
