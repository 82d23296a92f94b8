"""Trains a transformer on a task: `jaxrl-po language --task=addition --out=runs/addition`."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_po import config, language
from jaxrl_po.algorithms import dapo, reference
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, number, static
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.run import (
    earlier,
    flags,
    jobs,
    launch,
    methods,
    programs,
    scoring,
    sharding,
    tasks,
    user_code,
    warm,
)
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.options import Options as RunOptions
from jaxrl_po.run.parallel import Placement
from jaxrl_po.run.plotting import Series
from jaxrl_po.run.script import Script
from jaxrl_po.run.tasks import TASKS
from jaxrl_po.types import Learner, Problem

VERIFIER, MODEL = "verifier", "model"


@config.record
class Options(RunOptions):
    """The run as a whole."""

    task: str = static(
        "addition", f"one of {', '.join(TASKS)}, or a function of your own as file.py:name"
    )
    init_from: str = static(
        "",
        "folder of an earlier run of this script, whose latest policy (of its first seed) "
        "is the initial policy of every seed; empty for none",
    )
    reward: str = static(
        VERIFIER,
        f"reward to optimise: `{VERIFIER}`, of the task; `{MODEL}`, a reward model fitted to "
        "comparisons by the verifier (--reward_model.*, --preferences.*); or Python functions "
        "that score completions, as in rewards.py:nearly,package.module:other",
    )
    eval_prompts: int = static(
        512, "held-out prompts per evaluation and seed", unit="prompts", within=COUNT
    )
    eval_samples: int = static(
        0,
        "samples per held-out prompt, for avg@n and pass@k; 0 evaluates greedily only",
        unit="samples",
        within=NON_NEGATIVE,
    )
    reward_weights: str = static("", "weights of the functions, as in 1,0.2; empty is 1 for each")
    reward_accuracy: str = static(
        "",
        "the function whose score is the accuracy and decides which groups are "
        "informative; empty takes the first",
    )
    reward_timeout: float = number(
        60.0, "time limit of one call of a function", unit="seconds", within=POSITIVE
    )
    shard_params: bool = static(
        False,
        "shard parameters, reference and optimizer state over the devices of the data axis "
        "instead of replicating them",
    )
    show: int = static(
        4,
        "held-out prompts whose completions by the first seed, greedy and sampled, are "
        "written to samples.jsonl at each evaluation",
        unit="prompts",
        within=NON_NEGATIVE,
    )


def functions(options: Options) -> list[str]:
    """Sources of the reward functions on the host: from `--reward`, or those of the task."""
    own = tasks.entry(options.task).reward
    sources = {VERIFIER: own, MODEL: ""}.get(options.reward, options.reward)
    return [source for source in sources.split(",") if source]


def host_score(
    options: Options, task: language.Task, placement: Placement
) -> scoring.HostScore | None:
    """The scorer that calls `functions`; None if the reward is computed in the program.

    Raises:
      ConfigError, UsageError: invalid or unsuitable functions; none is loaded yet.
    """
    sources = functions(options)
    for name in ("reward_weights", "reward_accuracy", "reward_timeout"):
        config.require_effect(options, name, bool(sources), "reward names functions")
    if options.reward == MODEL and tasks.entry(options.task).reward:
        raise UsageError(
            f"--reward={MODEL} must be fitted to a verifier in the program; "
            f"--task={options.task} has none"
        )
    if not sources:
        return None
    if not all(":" in source for source in sources):
        near = flags.suggest(options.reward, (VERIFIER, MODEL))
        raise UsageError(
            f"--reward={options.reward} must be {VERIFIER}, {MODEL}, or functions such as "
            f"rewards.py:nearly{near}"
        )
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


def problem_settings(records: Mapping[str, Any], task: language.Task) -> language.Settings:
    """`--problem.*`, with the token budget that the method leaves around the longest answer."""
    settings: language.Settings = records["problem"]
    method = records["config"]
    if settings.max_new_tokens or not (isinstance(method, dapo.Config) and method.soft_overlong):
        return settings
    budget = language.rewards.budget_with_room(task.answer_length)
    return dataclasses.replace(settings, max_new_tokens=budget)


def build(records: Mapping[str, Any], algorithm: Any, placement: Placement) -> jobs.Experiment:
    """The experiment: the method on the task, with a policy and, if it needs one, a critic."""
    options, model = records[""], records["model"]
    task = tasks.entry(options.task).make(**vars(records["task"]))
    settings = problem_settings(records, task)
    rewarded = host_score(options, task, placement)
    policy, critic = model.build(task.tokenizer.size), model.build(task.tokenizer.size, outputs=1)
    if placement.cuts_params:
        require_shares(model, placement)
        policy, critic = (
            each.clone(constrain=sharding.rows_over_data(placement)) for each in (policy, critic)
        )
    initial = earlier.initial_policy(SCRIPT, records, task, policy) if options.init_from else None
    settings_of_method = dataclasses.replace(records["config"], axis_name=placement.axis_name)

    def make(warm_start: Any) -> Learner:
        problem = language.make_problem(
            task,
            policy,
            **vars(settings),
            verify=rewarded is None,
            critic=None if options.algorithm in methods.IN_GROUPS else critic,
            initial=initial,
            warm=warm_start,
        )
        if options.reward == MODEL:
            problem = with_reward_model(problem, records, task, policy)
        learner: Learner = algorithm.make(settings_of_method, problem)
        if options.algorithm in methods.WITH_CRITIC and records["reference"].enabled:
            learner = reference.with_reference_kl(
                learner,
                problem,
                records["reference"],
                num_parts=records["config"].num_parts,
                axis_name=placement.axis_name,
            )
        return learner

    return jobs.Experiment(
        learner=make(records["warm_start"]),
        evaluate=language.make_evaluate(
            task,
            policy,
            num_prompts=options.eval_prompts,
            num_samples=options.eval_samples,
            decoding=settings.decoding,
        ),
        score="greedy_accuracy",
        initial="warm_start_accuracy",
        examples=programs.Examples(
            language.make_describe(
                task, policy, num_prompts=options.show, decoding=settings.decoding
            ),
            functools.partial(language.render, task),
        )
        if options.show
        else None,
        axes=LOGICAL_AXES,
        rewarded=rewarded,
        warm=warm.in_parts(make, records["warm_start"], task, policy),
    )


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


def require_shares(model: language.ModelSettings, placement: Placement) -> None:
    """Raises UsageError if the transformer cannot be sharded evenly over the devices."""
    over_data = {"width": model.width} if placement.shard_params else {}
    over_model = {"kv_heads": model.kv_heads, "mlp_width": model.mlp_width}
    for axis, devices, sizes in (
        ("data", placement.data_devices, over_data),
        ("model", placement.model_devices, over_model),
    ):
        for name, size in sizes.items():
            if size % devices:
                raise UsageError(
                    f"--model.{name}={size} must be a multiple of {devices}, the devices of "
                    f"the {axis} axis of the mesh"
                )


# Few epochs over large batches keep a small model stable.
SMALL = {
    "total_steps": 131_072,
    "seeds": 4,
    "model.mlp_width": 128,
    "warm_start.steps": 10_000,
    "warm_start.accuracy": 0.5,
}
# A completion is an episode with its reward at the end, so nothing is discounted.
EPISODES: dict[str, Any] = {
    "config.gamma": 1.0,
    "problem.num_prompts": 256,
    "problem.group_size": 1,
}
# An underfitted critic halves the gain of a natural-gradient step: fit it well, and subsample the
# rows of the Fisher products.
FIT = {"config.value_epochs": 4, "config.value_minibatches": 8, "config.value_learning_rate": 3e-3}
STEPS = {
    "config.learning_rate": 1e-3,
    "config.lambda_": 1.0,
    "config.max_grad_norm": 1.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
}
NATURAL = EPISODES | FIT | {"config.lambda_": 1.0, "config.fisher_stride": 2}
WITH_CRITIC = {
    "reinforce": EPISODES | FIT | {"config.learning_rate": 1e-3, "config.max_grad_norm": 1.0},
    "a2c": EPISODES
    | {
        "config.learning_rate": 1e-3,
        "config.max_grad_norm": 1.0,
        "config.estimator": "monte_carlo",
    },
    "npg": NATURAL,
    "trpo": NATURAL | {"config.max_kl": 0.02},
    "ppo": EPISODES | STEPS,
    "ppo_penalty": EPISODES | STEPS,
}
# Four small steps per batch of 512: with 128 completions and an entropy bonus, most seeds forgot
# what the warm start had taught them.
IN_GROUPS = {
    "total_steps": 204_800,
    "config.learning_rate": 1e-3,
    "config.warm_up_iterations": 30,
    launch.DECAY: 400,
    "config.entropy_coefficient": 0.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
    "problem.num_prompts": 64,
    "problem.group_size": 8,
}


# A reward model is reliable only near the initial policy, whose samples it was fitted on; hence the
# KL penalty to that policy.
JUDGED = {"reward_model.width": 32, "reward_model.mlp_width": 64}
REFERRED = {"reference.enabled": True}


def defaults(options: Options) -> dict[str, Any]:
    """Default values of flags that suit small transformers."""
    small: dict[str, Any] = dict(SMALL)
    if options.init_from:
        small = {name: value for name, value in small.items() if not name.startswith("warm_start.")}
    if options.reward == MODEL:
        small |= JUDGED | (REFERRED if options.algorithm in ("ppo", "ppo_penalty") else {})
    if options.algorithm in WITH_CRITIC:
        return small | WITH_CRITIC[options.algorithm]
    if options.algorithm == "dapo" and functions(options):
        # A refill needs the scores inside the program.
        small |= {"config.dynamic_sampling": dapo.REWEIGHT}
    # The surrogate of RLOO is not clipped, so it is valid only near the old policy.
    once = {"config.num_epochs": 1} if options.algorithm == "rloo" else {}
    return small | IN_GROUPS | once if options.algorithm in methods.IN_GROUPS else {}


def sections(options: Options) -> dict[str, type]:
    """Prefix to record class, besides the algorithm's."""
    judge = (
        {"reward_model": language.ModelSettings, "preferences": language.Preferences}
        if options.reward == MODEL
        else {}
    )
    return {
        "task": tasks.entry(options.task).settings,
        "problem": language.Settings,
        "model": language.ModelSettings,
        "warm_start": language.WarmStart,
        **judge,
        **({"reference": reference.Settings} if options.algorithm in methods.WITH_CRITIC else {}),
    }


SCRIPT = Script(
    name="language",
    summary="Trains a small transformer on a task whose answers are verified.",
    options=Options,
    defaults=defaults,
    tuned=lambda options: {},
    sections=sections,
    rows=lambda records: records["problem"].num_prompts,
    steps=lambda records: records["problem"].num_prompts * records["problem"].group_size,
    shards_params=lambda options: options.shard_params,
    build=build,
    title=lambda records: f"{records[''].algorithm} on {user_code.short(records[''].task)}",
    unit="completions",
    curves=(Series("accuracy", "training"), Series("greedy_accuracy", "held-out greedy")),
    y_label="accuracy",
)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    return launch.main(SCRIPT, argv)
