"""Evaluates the policies of a run again: `jaxrl-po evaluate --run=runs/first --size=1024`.

Every seed is evaluated greedily, all seeds at the same iteration: the best checkpoint by the mean
score over seeds, or the latest checkpoint. The score that selected the best checkpoint is biased
upwards by the selection. Episodes, and prompts that a task generates, are therefore drawn anew,
from `--seed`. For prompts in a file, each prompt of the test set is asked once; the test set does
not select checkpoints. The command writes `evaluation.json` to the folder of the run, or to
`--out`.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_po import config as config_lib
from jaxrl_po.config import SEED, ConfigError, Interval, static
from jaxrl_po.control import adapt, make_record
from jaxrl_po.run.data.scoring import opened
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import control, earlier, flags
from jaxrl_po.run.experiment.control_config import ControlConfig
from jaxrl_po.run.experiment.experiment import DOMAINS
from jaxrl_po.run.experiment.options import RunConfig
from jaxrl_po.run.experiment.settings import Domain
from jaxrl_po.run.store import folder, statistics

# Maps each training command to the flag that sets the size of an evaluation.
SIZES = {"control": "eval_episodes", "language": "eval_prompts"}

Scores = dict[str, np.ndarray[Any, Any]]
"""Maps the name of a score to the mean score of each seed, `[S]`."""


@config_lib.record
class EvaluateOptions:
    """Options of an evaluation after the run."""

    run: str = static("", "folder of a run of jaxrl-po control or jaxrl-po language")
    out: str = static("", "file to write; empty for evaluation.json in the folder of the run")
    checkpoint: str = static(
        "best", f"checkpoint to evaluate; {earlier.WHICH}", choices=earlier.CHECKPOINTS
    )
    size: int = static(
        0,
        "episodes or held-out prompts per seed, the first prompts of a finite test set; 0 for as "
        "many as in the run",
        within=Interval(0, 10**6),
    )
    seed: int = static(1, "seed of the evaluation's random numbers", within=SEED)
    record: str = static(
        "",
        "also write the episodes of the first seed, an .npz file of observation, action, "
        "terminated and truncated, for --algorithm=sft",
    )


def evaluate_run(
    options: EvaluateOptions, domain: Domain[Any], config: RunConfig[Any]
) -> tuple[int, str, Scores]:
    """Evaluates every seed of a run; `--size` replaces the evaluation size in the run's config.

    Returns:
      Iteration of the checkpoint; number of episodes or prompts per seed, in words; and the scores.
    """
    if options.size:
        sizes: Any = {SIZES[domain.NAME]: options.size}
        config = dataclasses.replace(config, run=dataclasses.replace(config.run, **sizes))
    job, iteration, state = earlier.state(domain, config, "run", options.run, options.checkpoint)
    seeds, rollouts, score = config.run.seeds, job.host.rollouts, job.evaluation.score_evaluation
    scorer = opened(job.host.scorer)
    if rollouts is not None:
        with contextlib.closing(rollouts), scorer:
            values = rollouts.evaluate(state, options.seed)
    else:
        measure = functools.partial(job.measure, key=jax.random.key(options.seed))
        values = dict(compiled(measure, state)(state))
        if score is not None:
            with scorer:
                values = score(jax.device_get(values))
    scores = {
        name: np.asarray(value).reshape(seeds, -1).mean(axis=1) for name, value in values.items()
    }
    count = np.size(next(iter(values.values()))) // seeds
    size = f"{count} {SIZES[domain.NAME].removeprefix('eval_')}"
    return iteration, size, scores


def record_episodes(options: EvaluateOptions, domain: Domain[Any], config: RunConfig[Any]) -> None:
    """Writes greedy episodes of the first seed to `--record`.

    Raises:
      ConfigError: the run does not belong to `control`, or its environment cannot be recorded.
    """
    if not isinstance(config, ControlConfig):
        raise ConfigError("record", "is for a run of jaxrl-po control")
    path = folder.require_file(options.record, ".npz", "record")
    state = earlier.state(domain, config, "run", options.run, options.checkpoint)[2]
    spaces, env, _ = world = control.open_world(config)
    problem = control.build_problem(config, world)
    bound = None if env is None else adapt(env).max_steps
    if bound is None or not hasattr(spaces.observation, "shape"):
        raise ConfigError(
            "record",
            f"{config.run.env} must be in JAX, with bounded episodes and one array as observation",
        )
    made = make_record(
        env, problem, num_episodes=options.size or config.run.eval_episodes, max_steps=bound
    )
    one = select_seed(state)
    steps, mask = jax.jit(made)(one.params, one.collector, jax.random.key(options.seed))
    kept = np.asarray(mask)
    with folder.writing(path):
        np.savez(path, **{name: np.asarray(x)[kept] for name, x in steps.items()})
    print(f"see {path}: {int(kept.sum()):,} steps of {len(kept)} episodes")


def format_scores(scores: Scores) -> str:
    """Formats a line per score: mean, interquartile mean with 95 % interval, and lowest seed."""
    lines = [f"{'':>28} {'mean':>10} {'IQM, 95 % interval':>32} {'lowest':>10}"]
    for name, values in scores.items():
        iqm = statistics.with_interval(values)
        lines.append(f"{name:>28} {values.mean():>10.4g} {iqm:>32} {values.min():>10.4g}")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs the command `evaluate`; returns the exit status."""
    summary = "Evaluates the policies of a run again."
    options = flags.ask(argv, "jaxrl-po evaluate", summary, EvaluateOptions)
    if options is None:
        return 0
    domain, config = earlier.read_any(DOMAINS.values(), "run", options.run)
    if options.record:
        record_episodes(options, domain, config)
    path = folder.require_file(options.out or str(Path(options.run) / "evaluation.json"), ".json")
    iteration, size, scores = evaluate_run(options, domain, config)
    asked, title = flags.flatten({"": options}), domain.title(config)
    lists = {name: values.tolist() for name, values in scores.items()}
    with folder.writing(path):
        content = {"options": asked, "run": title, "iteration": iteration}
        folder.write_json(path, content | lists)
    which = f"{options.checkpoint} checkpoint (iteration {iteration})"
    print(f"{title}, {which}, {size}, {options.run}")
    print(format_scores(scores), end="")
    print(f"see {path}")
    return 0
