"""Compares populations with random sweeps and with tuned settings.

`python experiments/studies/populations.py`: for each seed, 16 draws train once as a population and
once as a random sweep of the same draws and steps. The best member of each seed, chosen by its
evaluations during training, is judged on fresh episodes, as is a run with the tuned settings; TRPO
on MountainCarContinuous has none and runs with its defaults. Writes `table.txt` and `scores.json`
to `--out`.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_po import config
from jaxrl_po.config import COUNT, SEED, ConfigError, Interval, Json, Values, static
from jaxrl_po.run.experiment import control, flags, populations, search_space, settings, sweeping
from jaxrl_po.run.loop import runner
from jaxrl_po.run.store import folder, metrics, statistics

MOUNTAIN_CAR = {
    "problem.num_envs": "16",
    "problem.num_steps": "128",
    "problem.normalize_observations": "true",
    "problem.scale_rewards": "true",
    "network.initial_log_std": "0.5",
}
PPO_DRAWS = {
    "config.learning_rate": "log_uniform(1e-5,1e-2)",
    "config.entropy_coefficient": "log_uniform(1e-5,1e-1)",
    "config.lambda_": "uniform(0.8,1)",
}
TRPO_DRAWS = {
    "config.max_kl": "log_uniform(1e-3,1e-1)",
    "config.value_learning_rate": "log_uniform(1e-4,1e-2)",
    "config.lambda_": "uniform(0.8,1)",
}
TASKS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "Acrobot-v1": ({"algorithm": "ppo", "total_steps": "100000"}, PPO_DRAWS),
    "Pendulum-v1": (
        {"algorithm": "ppo", "total_steps": "200000", "config.decay_iterations": "0"},
        PPO_DRAWS,
    ),
    "MountainCarContinuous-v0": (
        {"algorithm": "trpo", "total_steps": "100000", **MOUNTAIN_CAR},
        TRPO_DRAWS,
    ),
}
ARMS = "random sweep", "population", "tuned settings"
EPISODES = 64  # of an evaluation


@config.record
class Options:
    """Settings of the study."""

    tasks: str = static(",".join(TASKS), "environments, separated by commas")
    draws: int = static(16, "members of a population, or draws of a sweep", within=Interval(2))
    exploit_every: int = static(5, "iterations between exploits", within=COUNT)
    seeds: int = static(8, "populations, or repetitions of the sweep", unit="seeds", within=COUNT)
    seed: int = static(0, "base seed", within=SEED)
    steps: int = static(0, "steps of each run; 0 for those of the table", within=Interval(0))
    out: str = static("runs/populations", "folder for the results; earlier results are replaced")


def train(given: Values, out: Path, title: str) -> tuple[npt.NDArray[np.float64], float]:
    """Trains the draws of a sweep; returns fresh returns `[S]` of the best draws, and seconds.

    Args:
      given: Text of each flag of a sweep, by flag name.
      out: Folder for the runs.
      title: Title of the program.
    """
    options = settings.options_of(search_space.RECORDS[control.NAME], given)
    spec = search_space.parse(control, given, options)
    options = sweeping.sweep_options(control, spec)
    found = search_space.combinations(spec, options.draws, options.seed)
    space = populations.space_of(control, spec, found[0]) if options.exploit_every else None
    (group,) = sweeping.group(control, spec, found)
    job = sweeping.build_group(control, [each for _, each in group], options, space)
    rows, outcome = sweeping.train_group(job, options, out, title)
    scores = sweeping.curves(rows)[job.evaluation.score]
    if space is not None:
        path = out / runner.METRICS
        scores = populations.read_history(path, job.evaluation.score, space).scores
    best = sweeping.final_scores(scores).reshape(-1, options.seeds).argmax(axis=0)
    key = jax.random.key(options.seed + 10_000)
    fresh = jax.jit(job.measure)(outcome.state, key)[job.evaluation.score]
    judged = np.asarray(fresh, np.float64).mean(axis=1).reshape(-1, options.seeds)
    every = [row["time/seconds"] for row in metrics.read(out / runner.METRICS) if row["iteration"]]
    return judged[best, np.arange(options.seeds)], sum(every)


def compare(name: str, options: Options, out: Path) -> tuple[str, Json]:
    """Returns the table of a task, and its scores `[S]` by arm."""
    fixed, drawn = TASKS[name]
    fixed = {
        **fixed,
        "env": name,
        "seeds": str(options.seeds),
        "seed": str(options.seed),
        "eval_episodes": str(EPISODES),
    }
    if options.steps:
        fixed["total_steps"] = str(options.steps)
    searched = {**fixed, **drawn, "draws": str(options.draws)}
    tuned = {x: y for x, y in fixed.items() if x != "config.decay_iterations"}
    every = {"exploit_every": str(options.exploit_every)}
    scores, seconds = Json(), Json()
    for arm, given in zip(ARMS, (searched, searched | every, tuned), strict=True):
        place = out / name / arm.replace(" ", "_")
        texts = {x: flags.FlagText(y) for x, y in {**given, "out": str(place)}.items()}
        scores[arm], seconds[arm] = train(texts, place, f"{name}, {arm}")
    took = ", ".join(f"{arm} {value:.0f} s" for arm, value in seconds.items())
    table = statistics.format_comparison(list(scores), list(scores.values()))
    difference = statistics.difference_with_interval(scores[ARMS[1]], scores[ARMS[0]])
    return (
        f"{name}, {fixed['algorithm']}, {fixed['total_steps']} steps ({took})\n{table}"
        f"population − random sweep: {difference}\n",
        {arm: x.tolist() for arm, x in scores.items()},
    )


def main(argv: Sequence[str]) -> int:
    """Runs the study; returns the exit status."""
    options = flags.ask(argv, "populations.py", "Compares populations with random sweeps.", Options)
    if options is None:
        return 0
    for name in options.tasks.split(","):
        if name not in TASKS:
            raise ConfigError("tasks", f"must be among {', '.join(TASKS)}, got {name!r}")
    folder.inspect(options.out, resume=False, overwrite=True)
    with folder.claim(options.out, overwrite=False) as out:
        tables, scores = list[str](), Json()
        for name in options.tasks.split(","):
            shutil.rmtree(out / name, ignore_errors=True)  # a run in it would be resumed
            table, scores[name] = compare(name, options, out)
            print(table, flush=True)
            tables.append(table)
            (out / "table.txt").write_text("\n".join(tables), encoding="utf-8")
            folder.write_json(out / "scores.json", {**flags.flatten({"": options}), **scores})
    return 0


if __name__ == "__main__":
    flags.run_script(main)
