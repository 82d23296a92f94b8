"""Rewards of `--reward`: the verifier, a reward model, or Python functions on the host."""

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_po import config as config_lib
from jaxrl_po import language
from jaxrl_po.config import ConfigError, Json, PythonObject, Values
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.evaluation import Answers
from jaxrl_po.run import errors
from jaxrl_po.run.data import answers, prompts, scoring
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.language_config import LanguageConfig, LanguageOptions, task_entry
from jaxrl_po.run.experiment.registry import REGEX, REWARDS, RewardEntry
from jaxrl_po.run.store import sources
from jaxrl_po.types import Problem, PyTree

NAMED = [name for name, entry in REWARDS.items() if not entry.takes_pattern]


def entries(options: LanguageOptions) -> list[RewardEntry]:
    """Returns the entry of each name in `--reward`; a user's own entry has only a function.

    A pattern may contain a comma, so no other reward can follow it. A reward that the compiled
    program computes cannot be listed with other rewards.
    """
    reward = options.reward
    if reward.startswith(REGEX):
        return [REWARDS[REGEX]]
    named, known = sources.list_parts(reward), REWARDS
    if len(named) > 1:
        known = {name: entry for name, entry in REWARDS.items() if entry.function}
    return [known.get(name, RewardEntry(name)) for name in named if name]


def functions(options: LanguageOptions) -> list[str]:
    """Returns the names of reward functions on the host: from `--reward`, or from the task."""
    if own_scorer(options) is not None:
        return []
    found = [
        task_entry(options.task).reward if entry.of_task else entry.function
        for entry in entries(options)
    ]
    return list(filter(None, found))


def own_scorer(options: LanguageOptions) -> scoring.Scorer | None:
    """Returns the Python object that scores whole batches; None for any other reward."""
    value = options.reward.value if isinstance(options.reward, PythonObject) else None
    is_one = isinstance(value, scoring.Scorer) and not isinstance(value, type)
    return value if is_one else None


def scores_on_host(options: LanguageOptions) -> bool:
    """Returns whether the reward is computed on the host, outside the compiled program."""
    return bool(own_scorer(options) or functions(options))


def is_model(options: LanguageOptions) -> bool:
    """Returns whether the reward is a model fitted to comparisons."""
    return any(entry.is_model for entry in entries(options))


def finds_answers(options: LanguageOptions) -> bool:
    """Returns whether a function of the reward finds the answer to a prompt in a text."""
    return any(entry.finds_answers for entry in entries(options))


def needs_answers(options: LanguageOptions) -> bool:
    """Returns whether each prompt must have an answer."""
    return finds_answers(options) or not functions(options)


def pattern(options: LanguageOptions) -> dict[str, str]:
    """Returns the pattern of `--reward=regex:…` as an argument; raises ConfigError if invalid."""
    if not any(entry.takes_pattern for entry in entries(options)):
        return {}
    written = options.reward.removeprefix(REGEX)
    try:
        if not written:
            raise re.error("it is empty")
        re.compile(written)
    except re.error as error:
        raise ConfigError(
            "reward", f"must be a regular expression, got {options.reward}: {error}"
        ) from None
    return {"pattern": written}


def host_score(
    config: LanguageConfig, task: TaskLike, placement: Placement
) -> scoring.Scorer | None:
    """Returns the scorer of `--reward`; None if the compiled program computes the reward.

    Raises:
      ConfigError: Functions are invalid or unsuitable, as far as is known without loading them.
    """
    options, own = config.run, own_scorer(config.run)
    sources, arguments = functions(options), pattern(options)
    of_task = any(entry.of_task for entry in entries(options))
    for name in ("reward_weights", "reward_timeout"):
        config_lib.require_effect(options, name, bool(sources), "reward names functions")
    if isinstance(task, Dialogue):
        if of_task:
            return None
        raise ConfigError(
            "reward",
            f"must be left out with task = {options.task}, which has its own, got {options.reward}",
        )
    if is_model(options) and task_entry(options.task).reward:
        raise ConfigError(
            "reward",
            f"{options.reward} must be fitted to a verifier: task = {options.task} has none",
        )
    if not (own or sources):
        return None
    if not all(":" in source for source in sources):
        near = errors.suggest(options.reward, NAMED)
        raise ConfigError(
            "reward",
            f"must be {', '.join(NAMED)}, {REGEX}PATTERN, or functions such as rewards.py:nearly, "
            f"got {options.reward}{near}",
        )
    for entry in entries(options):
        if entry.needs:
            errors.require("reward", *entry.needs)
    if options.distributed:
        raise ConfigError(
            "reward", "must be left out with distributed: one process scores completions"
        )
    if placement.cuts_params:
        raise ConfigError("reward", "must be left out with sharded parameters (shard_params, mesh)")
    if own is not None:
        return own
    weights = options.reward_weights.split(",") if options.reward_weights else ["1"] * len(sources)
    try:
        rewards = [
            scoring.Reward(source, float(weight), arguments)
            for source, weight in zip(sources, weights, strict=True)
        ]
    except ValueError:
        raise ConfigError(
            "reward_weights",
            f"must be {len(sources)} numbers, one for each function, got {options.reward_weights}",
        ) from None
    return scoring.HostScore(
        rewards,
        task,
        timeout=float(options.reward_timeout),
        require_end=config.reward is not None and config.reward.require_end,
    )


def explain_zero(examples: Sequence[Values]) -> list[str]:
    """Explains examples that all score 0, by expected answers and a reward that finds answers.

    Args:
      examples: Rows that `language.render` returns.
    """
    rows = [row for row in examples if row["expected"]]
    lines = [
        f"expected {row['expected']!r}, got {row['completion'].strip()[:200]!r}"
        for row in rows[:10]
    ]
    texts = {
        "completions": [row["completion"] for row in rows],
        "answer": [row["expected"] for row in rows],
    }
    for name in ("last_number", "contains"):
        found = int(sum(getattr(answers, name)(**texts)))
        if found:
            lines.append(
                f"--reward={name} would find the answer in {found} of these {len(rows)} completions"
            )
            break
    cut = sum(not row["ended"] for row in rows)
    if cut:
        lines.append(
            f"{cut} of {len(rows)} do not end within their budget (--problem.max_new_tokens)"
        )
    if lines:
        lines.insert(0, "no held-out completion is right before training:")
    return lines


def replaces_verifier(options: LanguageOptions, task: TaskLike, *, pretrained: bool) -> bool:
    """Returns whether functions of `--reward` replace the verifier in evaluations, too.

    The functions replace the verifier if the equality of a completion with `answer` says little: a
    pretrained model writes free text, `math` and similar rewards find the answer in a text, and
    prompts may have no answer.

    Args:
      options: Options of the run.
      task: Task of the run.
      pretrained: Whether the run started with a pretrained model.
    """
    return bool(functions(options)) and (
        pretrained or finds_answers(options) or unanswered(options, task)
    )


def unanswered(options: LanguageOptions, task: TaskLike) -> bool:
    """Returns whether a prompt of a file has no answer."""
    columns = None if isinstance(task, Dialogue) else task.columns
    return isinstance(columns, prompts.PromptColumns) and not columns.answered()


def rescore(reward_fn: scoring.HostScore, answers: Mapping[str, Answers]) -> dict[str, Answers]:
    """Returns answers of one seed with the functions' scores, NaN if a function always fails."""
    try:
        return {name: reward_fn.score_answers(each)[0] for name, each in answers.items()}
    except scoring.RewardError:  # an example without a score is still shown
        unknown: Any = {name: np.full(x.score.shape, np.nan) for name, x in answers.items()}
        return {name: each._replace(score=unknown[name]) for name, each in answers.items()}


def score_evaluation(reward_fn: scoring.HostScore, answers: Mapping[str, Answers]) -> Json:
    """Returns the metrics of an evaluation, `[S, P]`, from answers with the leading axis `[S]`.

    A prompt whose answers no function scores, or on which a function fails, gets the mean of the
    other prompts; `evaluation_failures` is the share of failures, if any function failed.
    """
    seeds = range(len(next(iter(answers.values())).length))
    of_seed = (jax.tree.map(lambda x, i=i: x[i], dict(answers)) for i in seeds)
    scored = [{name: reward_fn.score_answers(x) for name, x in each.items()} for each in of_seed]
    pairs = jax.tree.map(lambda *each: np.stack(each), *scored)
    stacked = {name: pair[0] for name, pair in pairs.items()}
    failed = np.any([pair[1].any(axis=-1) for pair in pairs.values()], axis=0)
    absent = np.any([np.isnan(each.score).any(axis=-1) for each in stacked.values()], axis=0)

    def filled(value: PyTree) -> PyTree:
        judged = np.ma.array(value, mask=absent).mean(axis=1, keepdims=True)
        return np.where(absent, np.ma.filled(judged, np.nan), value)

    measured: dict[str, Any] = language.evaluation.measure(stacked)
    if absent.any():
        measured = {name: filled(value) for name, value in measured.items()}
    return measured | ({scoring.FAILED: failed.astype(np.float32)} if failed.any() else {})


def with_reward_model(
    problem: Problem, config: LanguageConfig, task: language.Task, policy: language.Transformer
) -> Problem:
    """Returns the problem with a reward model that is fitted to comparisons.

    The compared completions are samples of the initial policy.

    Raises:
      ConfigError: The settings also ask for process rewards of the verifier.
    """
    settings, fitted = config.problem, config.fitted_reward
    assert isinstance(settings, language.LanguageSettings)
    assert fitted is not None
    if settings.process_reward:
        raise ConfigError(
            "problem.process_reward", f"has no effect with reward = {config.run.reward}"
        )
    with flags.locating({"reward_model": type(fitted.reward_model)}):
        model = fitted.reward_model.build(task.tokenizer.size, outputs=1).clone(
            constrain=policy.constrain
        )
    fit = functools.partial(
        language.reward_model.fit,
        model,
        task,
        policy,
        settings=fitted.preferences,
        max_new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
    )
    return language.learned_reward(problem, task, model, fit)
