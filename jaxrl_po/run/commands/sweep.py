"""Grid search over hyperparameters, with seeds and numeric settings vmapped into one program.

`jaxrl-po sweep --algorithm=ppo --env=Pendulum-v1 --seeds=4 --config.learning_rate=3e-4,1e-3
--config.gamma=0.9,0.95`

A `--config.*`, `--problem.*` or `--network.*` flag of `jaxrl-po control` with several
comma-separated values is swept over; with several such flags, so are all combinations of their
values. Combinations that differ only in numeric settings of the method train side by side in one
program; different sizes or switches need separate programs, of which `--processes` train at a time.
Writes `sweep.json` (after each program: an interrupted sweep resumes with `--out=… --resume`
alone), `table.txt` and `sweep.png` to `--out`, and prints the flags of the best combination. The
files in `jaxrl_po/run/configs/` were found in this way.
"""

import contextlib
import functools
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, static
from jaxrl_po.control.recorded import Recording, with_recording
from jaxrl_po.run import (
    flags,
    folder,
    grid,
    launch,
    methods,
    parallel,
    plotting,
    runner,
    user_code,
)
from jaxrl_po.run.commands import control
from jaxrl_po.run.compilation import keep_programs
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.grid import OF_A_START, Asked, Combination
from jaxrl_po.run.host import HostProblem, Rollouts
from jaxrl_po.run.parallel import Placement
from jaxrl_po.types import Learner, TrainState

ALONE = Placement(1, 1, 1)


@config.record
class Options(control.Options):
    """The sweep as a whole."""

    evaluations: int = static(
        10,
        "greedy evaluations of each run, about; the score is the mean of the last three",
        within=COUNT,
    )
    processes: int = static(
        1,
        "programs that train at a time, each in its own process; 1 trains them one after "
        "another in this process",
        within=COUNT,
    )
    save: bool = static(False, "write the best flags to jaxrl_po/run/configs/")


def read(argv: Sequence[str], options: Options) -> Asked:
    """The sweep that the arguments ask for."""
    kept, swept = grid.split(argv)
    single = flags.given(kept, sections_of(options))
    return Asked(single | user_code.absolute(single), swept, control.defaults(options))


def resumed(argv: Sequence[str], stored: Mapping[str, Any], out: str) -> Asked:
    """The sweep stored in a folder; arguments may omit its flags but not contradict them.

    Args:
      argv: arguments.
      stored: the `config.json` of the sweep.
      out: the value of `--out`.

    Raises:
      UsageError: names the flags that differ, with both values.
    """
    if stored.get("script") != "sweep" or not set(Asked._fields) <= set(stored):
        raise UsageError(
            f"--resume: --out={out} must hold a sweep of this version of jaxrl-po sweep; "
            "choose another or --overwrite"
        )
    asked = Asked(**{name: stored[name] for name in Asked._fields})
    options = flags.parse([], {"": Options}, stored=asked.flags)[""]
    whole = flags.given(argv, {"": Options}, partial=True)
    whole |= user_code.absolute(whole)
    grid.refuse_differences(whole, [flags.flatten({"": options})], out)
    sections = sections_of(options)
    kept, swept = grid.split(argv)
    single = flags.given(kept, sections)
    single |= user_code.absolute(single)
    several = {
        name: [flags.given([f"--{name}={value}"], sections)[name] for value in values]
        for name, values in swept.items()
    }
    grid.refuse_differences(
        single | several,
        [flags.flatten(asked.records(each, sections)) for each in grid.combinations(asked.swept)],
        out,
    )
    return asked._replace(
        flags=asked.flags
        | {name: value for name, value in single.items() if name in grid.MAY_DIFFER}
    )


def run(group: Sequence[Mapping[str, Any]], options: Options) -> dict[str, Any]:
    """Trains the combinations that share one program, each over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds` and
      `compile_seconds`.
    """
    runs = len(group) * options.seeds
    placement = parallel.choose(options.devices, num_seeds=runs, num_rows=1, mesh=options.mesh)
    if placement.cuts_params:
        raise UsageError(
            f"--mesh={options.mesh}: model is for jaxrl-po language; these networks are not sharded"
        )
    algorithm = methods.ALGORITHMS[options.algorithm]
    experiments = [control.build(records, algorithm, ALONE) for records in group]
    steps = control.steps(group[0])
    iterations = launch.count_iterations(options.total_steps, steps, "environment steps")
    for records in group:
        launch.require_learning(records["config"], iterations)
    every = max(1, iterations // options.evaluations)
    # [C·S] with the seeds innermost, in the order of `keys` below.
    configs = jax.tree.map(
        lambda *leaves: jnp.repeat(jnp.stack(leaves), options.seeds, axis=0),
        *(config.as_arrays(r["config"]) for r in group),
    )
    training_key, evaluation_key = jax.random.split(jax.random.key(options.seed))
    # Every combination gets the same keys (common random numbers).
    keys = jnp.tile(
        jax.vmap(jax.random.fold_in, in_axes=(None, 0))(training_key, jnp.arange(options.seeds)),
        len(group),
    )

    def learner(settings: Any) -> Learner:
        return control.build({**group[0], "config": settings}, algorithm, ALONE).learner

    training = Training(learner, configs, keys, placement, iterations, every)
    host, measure = experiments[0].host, experiments[0].evaluate
    if host is not None:
        done = train_on_host(training, host, options)
    else:
        assert measure is not None
        done = train_in_program(training, measure, evaluation_key)
    return {
        "steps": [steps * every * (i + 1) for i in range(iterations // every)],
        "scores": done.scores.reshape(len(group), options.seeds, -1).tolist(),
        "seconds": done.seconds,
        "compile_seconds": done.compile_seconds,
    }


class Training(NamedTuple):
    """What one program trains.

    Attributes:
      learner: settings of one run to its learner.
      configs: settings, leaves `[C·S]`.
      keys: `[C·S]`.
      placement: on devices.
      iterations: of each run.
      every: iterations between evaluations.
    """

    learner: Callable[[Any], Learner]
    configs: Any
    keys: jax.Array
    placement: Placement
    iterations: int
    every: int


class Trained(NamedTuple):
    """What became of it.

    Attributes:
      scores: `[C·S, E]`.
      seconds: without those of compiling.
      compile_seconds: on the host, with the first iteration.
    """

    scores: np.ndarray[Any, Any]
    seconds: float
    compile_seconds: float


def train_in_program(
    training: Training, measure: Callable[..., Mapping[str, jax.Array]], key: jax.Array
) -> Trained:
    """Trains all combinations and seeds in one program; `key` is that of every evaluation."""

    def train(settings: Any, training_key: jax.Array) -> tuple[jax.Array, jax.Array]:
        method = training.learner(settings)

        def iterate(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
            state, metrics = method.step(state)
            missing = metrics.get(runner.NO_ACTION)
            return state, jnp.float32(0) if missing is None else missing.metric()

        def stretch(state: TrainState, _: None) -> tuple[TrainState, tuple[jax.Array, jax.Array]]:
            state, no_action = jax.lax.scan(iterate, state, None, length=training.every)
            scores = measure(state.params, state.collector, key)
            return state, (scores["greedy_return"].mean(), no_action.max())

        evaluations = training.iterations // training.every
        scored: tuple[jax.Array, jax.Array]
        _, scored = jax.lax.scan(stretch, method.init(training_key), None, length=evaluations)
        return scored

    program = parallel.spread(jax.vmap(train), training.placement)
    begun = time.perf_counter()
    compiled = jax.jit(program).lower(training.configs, training.keys).compile()
    compile_seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    scores, no_action = jax.tree.map(np.asarray, compiled(training.configs, training.keys))
    if no_action.any():
        raise UsageError(
            f"--env: no action was legal in some state of {int(no_action.any(axis=1).sum())} of "
            f"{len(no_action)} runs: the action_mask of the environment must allow one in every "
            "state that is not the last of an episode"
        )
    return Trained(scores, time.perf_counter() - begun, compile_seconds)


def train_on_host(training: Training, host: HostProblem, options: Options) -> Trained:
    """Trains all combinations and seeds in one pool; each combination has the same environments."""
    over = functools.partial(parallel.spread, placement=training.placement)
    init = jax.jit(over(jax.vmap(lambda settings, key: training.learner(settings).init(key))))
    step = over(jax.vmap(lambda settings, state: training.learner(settings).step(state)[0]))

    @functools.partial(jax.jit, donate_argnums=1)
    def iterate(configs: Any, state: TrainState, recording: Recording) -> TrainState:
        following: TrainState = step(configs, with_recording(state, recording))
        return following

    begun = time.perf_counter()
    first, scores = 0.0, []
    seeds = list(range(options.seeds)) * (len(training.keys) // options.seeds)
    with contextlib.closing(Rollouts(host, options.seed, seeds)) as rollouts:
        state = init(training.configs, training.keys)
        for iteration in range(1, training.iterations // training.every * training.every + 1):
            state = jax.block_until_ready(iterate(training.configs, *rollouts.record(state, print)))
            first = first or time.perf_counter() - begun
            if iteration % training.every == 0:
                scores.append(rollouts.evaluate(state)["greedy_return"].mean(axis=1))
    return Trained(np.stack(scores, axis=1), time.perf_counter() - begun - first, first)


def run_all(
    groups: Mapping[int, Sequence[Mapping[str, Any]]], options: Options
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Trains the programs, in this process or several at a time in their own.

    Yields:
      The number and the result of each program as it finishes.

    Raises:
      UsageError: a process ended without a result.
    """
    if options.processes == 1:
        for number, group in groups.items():
            yield number, run(group, options)
        return
    # A spawned process has no backend yet, so it can set up its own devices, and it frees their
    # memory when it ends, which is after one program.
    fresh = multiprocessing.get_context("spawn")
    with futures.ProcessPoolExecutor(options.processes, fresh, max_tasks_per_child=1) as pool:
        started = {pool.submit(run, group, options): number for number, group in groups.items()}
        try:
            for done in futures.as_completed(started):
                yield started[done], done.result()
        except BrokenProcessPool:
            raise UsageError(
                f"--processes={options.processes}: a process of the sweep was killed, "
                "perhaps because memory ran out; continue with --resume and a smaller number"
            ) from None
        finally:
            pool.shutdown(cancel_futures=True)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    if {"--help", "-h"} & set(argv):
        options = flags.parse(
            [a for a in argv if a.lstrip("-") not in ("h", "help")], {"": Options}, partial=True
        )[""]
        print(
            flags.usage(
                "jaxrl-po sweep",
                "Grid search: give a flag several values, separated by commas.",
                sections_of(options),
            )
        )
        return 0
    options = flags.parse(argv, {"": Options}, partial=True)[""]
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    asked = resumed(argv, stored, options.out) if stored else read(argv, options)
    options = flags.parse([], {"": Options}, stored=asked.flags)[""]
    if options.distributed:
        raise UsageError(
            "--distributed is for jaxrl-po control and jaxrl-po language: a sweep runs in "
            "one process"
        )
    for name in ("tensorboard", "wandb", "deterministic"):
        if getattr(options, name):
            raise UsageError(
                f"--{name} is for jaxrl-po control and jaxrl-po language: a sweep writes sweep.json"
            )
    if options.save and user_code.is_source(options.env):
        raise UsageError(
            f"--save must be left out with --env={options.env}: the tuned flags of an environment "
            "of one's own are not looked up; sweep.json and the last line show them"
        )
    keep_programs(options.compilation_cache)
    sections = sections_of(options)
    groups: dict[str, list[tuple[Combination, dict[str, Any]]]] = {}
    for combination in grid.combinations(asked.swept):
        records = asked.records(combination, sections)
        groups.setdefault(grid.static_part(records), []).append((combination, records))

    with folder.claim(options.out, overwrite=options.overwrite) as out:
        lasting = {
            name: value for name, value in asked.flags.items() if name not in ("out", *OF_A_START)
        }
        folder.write_json(
            out / folder.CONFIG, {"script": "sweep", **asked._replace(flags=lasting)._asdict()}
        )
        path = out / "sweep.json"
        rows = json.loads(path.read_text()) if options.resume and path.exists() else []
        done = [row["flags"] for row in rows]
        programs = dict(enumerate(groups.values(), 1))
        todo = {
            number: [records for _, records in group]
            for number, group in programs.items()
            if not all(combination in done for combination, _ in group)
        }
        with flags.blame(sections):
            for number, result in run_all(todo, options):
                group = programs[number]
                rows += [
                    {"flags": combination, **result, "scores": scores}
                    for (combination, _), scores in zip(group, result["scores"], strict=True)
                ]
                rows.sort(key=lambda row: -grid.final(row["scores"]).mean())
                folder.write_json(path, rows)
                print(
                    f"program {number} of {len(groups)}: {len(group)} settings × "
                    f"{options.seeds} seeds, {result['seconds']:.0f} s",
                    flush=True,
                )
        text = grid.table(rows)
        (out / "table.txt").write_text(text)
        plotting.save_sweep(
            [(row["flags"], grid.final(row["scores"])) for row in rows], out / "sweep.png"
        )
        print(text, end="")
        best = flags.flatten(asked.records(rows[0]["flags"], sections))
        tunable = [name for name in asked.flags | asked.swept if name.startswith(grid.SWEPT)]
        chosen = {
            name: best[name] for name in dict.fromkeys([*asked.tuned, *tunable]) if name in best
        }
        print("best:", *(f"--{name}={flags.shown(value)}" for name, value in chosen.items()))
        if options.save:
            save(options, asked, chosen, grid.final(rows[0]["scores"]))
    return 0


def save(options: Options, asked: Asked, chosen: Mapping[str, Any], scores: Any) -> None:
    """Writes the best flags to `jaxrl_po/run/configs/<algorithm>/<env>.json`.

    The file also holds their score and the command that found them.
    """
    arguments = [
        f"--{name}={flags.shown(value)}"
        for name, value in (asked.flags | asked.swept).items()
        if name not in ("out", "save", *OF_A_START)
    ]
    content = {
        "found_by": " ".join(["jaxrl-po", "sweep", *arguments]),
        "score": {
            "mean": float(np.mean(scores)),
            "worst": float(np.min(scores)),
            "seeds": len(scores),
            "steps": options.total_steps,
        },
        "flags": chosen,
    }
    path = control.tuned_file(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder.write_json(path, content)
    print(f"saved to {path}")


def sections_of(options: Options) -> dict[str, type]:
    """Prefix to record class, of all flags of a sweep."""
    return {**launch.sections_of(control.SCRIPT, options), "": Options}
