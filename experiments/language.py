"""Trains a transformer on a verifiable task: `python experiments/language.py --task=addition --out=runs/addition`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import common
import jax
import jax.numpy as jnp

from jaxrl_po import checkpoint, config, flags, language, runner, sharding
from jaxrl_po.algorithms import dapo
from jaxrl_po.config import COUNT, NON_NEGATIVE, Interval, static
from jaxrl_po.flags import UsageError
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.parallel import Placement
from jaxrl_po.plotting import Series


@config.record
class Addition:
    """Settings of `--task=addition`."""

    num_digits: int = static(3, "digits of an operand", unit="digits", within=Interval(1, language.tasks.MAX_DIGITS))
    zero_pad: bool = static(True, "operands and sum fill their width with zeros; otherwise prompts and answers vary in length")
    reverse: bool = static(True, "answers lowest digit first, the order in which carries propagate")


@config.record
class Multiplication:
    """Settings of `--task=multiplication`."""

    num_digits: int = static(2, "digits of an operand", unit="digits", within=Interval(1, language.tasks.MAX_FACTOR_DIGITS))
    chain_of_thought: bool = static(True, "write the partial products and the sums so far before the answer")


@config.record
class Sorting:
    """Settings of `--task=sorting`."""

    length: int = static(6, "digits of a list", unit="digits", within=Interval(2, language.tasks.MAX_LENGTH))
    symbols: int = static(10, "digits to choose from", within=Interval(2, 10))


@config.record
class Modular:
    """Settings of `--task=modular`."""

    num_digits: int = static(1, "digits of an operand", unit="digits", within=Interval(1, language.tasks.MAX_FACTOR_DIGITS))
    modulus_digits: int = static(
        1, "digits of the modulus", unit="digits", within=Interval(1, language.tasks.MAX_FACTOR_DIGITS)
    )


@config.record
class BaseConversion:
    """Settings of `--task=base_conversion`."""

    num_digits: int = static(3, "decimal digits of a number", unit="digits", within=Interval(1, language.tasks.MAX_DIGITS))
    base: int = static(2, "base of the answer", within=Interval(2, 16))


@config.record
class Countdown:
    """Settings of `--task=countdown`."""

    num_numbers: int = static(3, "given numbers, each to be used once", within=Interval(2, language.tasks.MAX_NUMBERS))
    max_number: int = static(9, "the largest of them; max_number ** num_numbers below 2 ** 31", within=Interval(2))


@config.record
class RunningSum:
    """Settings of `--task=running_sum`."""

    length: int = static(6, "digits of a list", unit="digits", within=Interval(2, language.tasks.MAX_LENGTH))
    modulus: int = static(10, "of the sums", within=Interval(2, 10))
    max_filler: int = static(
        8, "most filler tokens of a demonstration", unit="tokens", within=Interval(0, language.tasks.MAX_FILLER)
    )


class TaskEntry(NamedTuple):
    """A task by name.

    Attributes:
      settings: record of `--task.*`.
      make: settings as keywords to a task.
    """

    settings: type
    make: Callable[..., language.Task]


TASKS = {
    "addition": TaskEntry(Addition, language.tasks.addition),
    "multiplication": TaskEntry(Multiplication, language.tasks.multiplication),
    "sorting": TaskEntry(Sorting, language.tasks.sorting),
    "modular": TaskEntry(Modular, language.tasks.modular),
    "base_conversion": TaskEntry(BaseConversion, language.tasks.base_conversion),
    "countdown": TaskEntry(Countdown, language.tasks.countdown),
    "running_sum": TaskEntry(RunningSum, language.tasks.running_sum),
}


@config.record
class Options(common.Options):
    """The run as a whole."""

    task: str = static("addition", f"one of {', '.join(TASKS)}")
    init_from: str = static(
        "",
        "folder of an earlier run of this script, at whose latest policy (of its first seed) every seed starts; empty for none",
    )
    eval_prompts: int = static(512, "held-out prompts of one evaluation of one seed", unit="prompts", within=COUNT)
    eval_samples: int = static(
        0,
        "samples of each held-out prompt, for avg@n and pass@k; 0 evaluates greedily only",
        unit="samples",
        within=NON_NEGATIVE,
    )
    shard_params: bool = static(
        False, "cut parameters, reference and optimizer state over the devices of the data axis, in place of copying them"
    )
    show: int = static(
        4,
        "held-out prompts of the first seed whose completions, greedy and sampled, each evaluation adds to samples.jsonl",
        unit="prompts",
        within=NON_NEGATIVE,
    )


def initial_policy(records: Mapping[str, Any], task: language.Task, policy: language.Transformer) -> Any:
    """The parameters that `--init_from` names.

    Raises:
      UsageError: its vocabulary or its model is another one, or no checkpoint is intact.
    """
    run = records[""].init_from
    earlier = common.read_run(SCRIPT, "init_from", run)
    tokenizer = TASKS[earlier[""].task].make(**vars(earlier["task"])).tokenizer
    if tokenizer != task.tokenizer:
        raise flags.UsageError(
            f"--init_from={run} must have the vocabulary of --task={records[''].task}, {task.tokenizer.characters!r}; "
            f"it was trained on {earlier[''].task}, {tokenizer.characters!r}"
        )
    for name in ("width", "layers", "heads", "kv_heads", "mlp_width", "gated", "tied"):
        mine, its = vars(records["model"])[name], vars(earlier["model"])[name]
        if mine != its:
            raise flags.UsageError(f"--model.{name}={mine} must be {flags.shown(its)}, as in --init_from={run}")
    like = jax.eval_shape(policy.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    with common.blame_run("init_from", run):
        found = checkpoint.peek_policy(Path(run) / "checkpoints" / "latest", like, seed_index=0)
    if found is None:
        raise flags.UsageError(f"--init_from={run} holds no intact checkpoint; wait for one or choose another run")
    return found


def build(records: Mapping[str, Any], algorithm: Any, placement: Placement) -> common.Experiment:
    """The method on the task, with a policy and, where the method reads one, a critic of its size."""
    options, settings, model = records[""], records["problem"], records["model"]
    task = TASKS[options.task].make(**vars(records["task"]))
    policy, critic = model.build(task.tokenizer.size), model.build(task.tokenizer.size, outputs=1)
    if placement.cuts_params:
        require_shares(model, placement)
        policy, critic = (each.clone(constrain=sharding.rows_over_data(placement)) for each in (policy, critic))
    if not settings.max_new_tokens and isinstance(records["config"], dapo.Config) and records["config"].soft_overlong:
        settings = dataclasses.replace(settings, max_new_tokens=language.rewards.budget_with_room(task.answer_length))
    problem = language.make_problem(
        task,
        policy,
        **vars(settings),
        critic=None if options.algorithm in common.IN_GROUPS else critic,
        initial=initial_policy(records, task, policy) if options.init_from else None,
        warm=records["warm_start"],
        axis_name=placement.axis_name,
    )
    decoding = {
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_k": settings.top_k,
        "top_p": settings.top_p,
    }
    return common.Experiment(
        learner=algorithm.make(dataclasses.replace(records["config"], axis_name=placement.axis_name), problem),
        evaluate=language.make_evaluate(
            task,
            policy,
            num_prompts=options.eval_prompts,
            num_samples=options.eval_samples,
            **decoding,
        ),
        score="greedy_accuracy",
        steps_per_iteration=settings.num_prompts * settings.group_size,
        initial="warm_start_accuracy",
        examples=runner.Examples(
            language.make_describe(task, policy, num_prompts=options.show, **decoding),
            functools.partial(language.render, task),
        )
        if options.show
        else None,
        axes=LOGICAL_AXES,
    )


def require_shares(model: language.ModelSettings, placement: Placement) -> None:
    """Raises UsageError where the devices cannot share the transformer evenly."""
    over_data = {"width": model.width} if placement.shard_params else {}
    over_model = {"kv_heads": model.kv_heads, "mlp_width": model.mlp_width}
    for axis, devices, sizes in (("data", placement.data_devices, over_data), ("model", placement.model_devices, over_model)):
        for name, size in sizes.items():
            if size % devices:
                raise UsageError(
                    f"--model.{name}={size} must be a multiple of {devices}, the devices of the {axis} axis of the mesh"
                )


# Few passes over many rows keep a small model stable.
SMALL = {
    "total_steps": 131_072,
    "seeds": 4,
    "model.mlp_width": 128,
    "warm_start.steps": 10_000,
    "warm_start.accuracy": 0.5,
    "config.learning_rate": 1e-3,
}
# One completion is one episode with its reward at the end.
WITH_CRITIC = {
    "config.gamma": 1.0,
    "config.lambda_": 1.0,
    "config.max_grad_norm": 1.0,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
    "problem.num_prompts": 256,
    "problem.group_size": 1,
}
# Four small steps a batch: eight of a larger size let one seed in two collapse. The rise spares the warm start.
IN_GROUPS = {
    "total_steps": 163_840,
    "config.learning_rate": 2e-3,
    "config.warm_up_iterations": 30,
    common.DECAY: 1280,
    "config.entropy_coefficient": 0.02,
    "config.num_epochs": 2,
    "config.num_minibatches": 2,
    "problem.num_prompts": 32,
    "problem.group_size": 4,
}


def defaults(options: Options) -> dict[str, Any]:
    """Flags that suit small transformers."""
    small = {name: value for name, value in SMALL.items() if not (options.init_from and name.startswith("warm_start."))}
    if options.algorithm == "ppo":
        return small | WITH_CRITIC
    once = {"config.num_epochs": 1} if options.algorithm == "rloo" else {}  # its surrogate has no clip
    return small | IN_GROUPS | once if options.algorithm in common.IN_GROUPS else {}


SCRIPT = common.Script(
    name="language",
    summary="Trains a small transformer on a task whose answers are verified.",
    options=Options,
    defaults=defaults,
    sections=lambda options: {
        "task": flags.lookup("task", options.task, TASKS).settings,
        "problem": language.Settings,
        "model": language.ModelSettings,
        "warm_start": language.WarmStart,
    },
    rows=lambda records: records["problem"].num_prompts,
    shards_params=lambda options: options.shard_params,
    build=build,
    title=lambda records: f"{records[''].algorithm} on {records[''].task}",
    unit="completions",
    curves=(Series("accuracy", "training"), Series("greedy_accuracy", "greedy, held out")),
    y_label="accuracy",
)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    return common.main(SCRIPT, argv)


if __name__ == "__main__":
    flags.entry(main)
