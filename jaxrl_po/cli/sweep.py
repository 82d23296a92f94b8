"""Grid search over hyperparameters, with seeds and numeric settings vmapped into one program.

`jaxrl-po sweep --algorithm=ppo --env=Pendulum-v1 --seeds=4 --config.learning_rate=3e-4,1e-3
--config.gamma=0.9,0.95`

A `--config.*`, `--problem.*` or `--network.*` flag of `jaxrl-po control` with several
comma-separated values is swept over; with several such flags, so are all combinations of their
values. Combinations that differ only in numeric settings of the method train side by side in one
program; different sizes or switches need separate programs, of which `--processes` train at a time.
Writes `sweep.json` (after each program: an interrupted sweep resumes with `--out=… --resume`
alone), `table.txt` and `sweep.png` to `--out`, and prints the flags of the best combination. The
files in `jaxrl_po/run/experiment/configs/` were found in this way.
"""

import contextlib
import json
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import assembly, control, flags, methods, plan, search, user_code
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.experiment.search import OF_A_START, Asked, Combination
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import interrupts, runner, vmapped
from jaxrl_po.run.loop.vmapped import Training
from jaxrl_po.run.store import folder, metrics

ALONE = Placement(1, 1, 1)


OF_ONE_RUN = ("log_every", "eval_every", "checkpoint_every", "patience", "idle_patience")


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
    save: bool = static(False, "write the best flags to jaxrl_po/run/experiment/configs/")


def read(argv: Sequence[str], options: Options) -> Asked:
    """The sweep that the arguments ask for."""
    kept, swept = search.split(argv)
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
            "choose another"
        )
    asked = Asked(**{name: stored[name] for name in Asked._fields})
    code = stored.get("resolved", {}).get(user_code.DIGESTS, {})
    if not all(isinstance(field, dict) for field in (*asked, code)):
        raise UsageError(
            f"--resume: {Path(out) / folder.CONFIG} is damaged; repair it, or choose another --out"
        )
    asked = asked._replace(flags=asked.flags | user_code.found(asked.flags, code, Path(out)))
    options = flags.parse([], {"": Options}, stored=asked.flags)[""]
    whole = flags.given(argv, {"": Options}, partial=True)
    whole |= user_code.absolute(whole)
    search.refuse_differences(whole, [flags.flatten({"": options})], out)
    sections = sections_of(options)
    kept, swept = search.split(argv)
    single = flags.given(kept, sections)
    single |= user_code.absolute(single)
    several = {
        name: [flags.given([f"--{name}={value}"], sections)[name] for value in values]
        for name, values in swept.items()
    }
    search.refuse_differences(
        single | several,
        [flags.flatten(asked.records(each, sections)) for each in search.combinations(asked.swept)],
        out,
    )
    return asked._replace(
        flags=asked.flags
        | {name: value for name, value in single.items() if name in search.MAY_DIFFER}
    )


Group = Sequence[Mapping[str, Any]]  # records of the combinations that share one program


class Built(NamedTuple):
    """A program of the sweep before it is compiled; the experiment is that of its first member."""

    placement: Placement
    group: Group
    iterations: int
    experiment: assembly.Setup


def build(group: Group, options: Options, given: Collection[str]) -> Built:
    """The program of a group; `given` names the flags that the user gave."""
    runs = len(group) * options.seeds
    placement = parallel.choose(options.devices, num_seeds=runs, num_rows=1, mesh=options.mesh)
    if placement.cuts_params:
        raise UsageError(
            f"--mesh={options.mesh}: model is for jaxrl-po language; these networks are not sharded"
        )
    settled = [plan.settle(control.SCRIPT, records, given) for records in group]
    group = [records for records, _ in settled]
    experiment = control.build(group[0], methods.ALGORITHMS[options.algorithm], ALONE)
    return Built(placement, group, settled[0][1], experiment)


def check(groups: Iterable[Group], options: Options, given: Collection[str]) -> None:
    """Raises the error of the first combination whose settings are wrong."""
    for group in groups:
        for records in build(group, options, given).group[1:]:
            control.build(records, methods.ALGORITHMS[options.algorithm], ALONE)


def run(group: Group, options: Options, given: Collection[str]) -> dict[str, Any]:
    """Trains the combinations that share one program, each over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds` and
      `compile_seconds`.
    """
    placement, group, iterations, experiment = build(group, options, given)
    steps = control.steps(group[0])
    # Seeds innermost; every combination gets the same keys.
    configs = vmapped.configs([records["config"] for records in group], options.seeds)
    keys, evaluation_key = vmapped.keys(options.seed, options.seeds, len(group))

    assert experiment.learner_of is not None
    training = Training(experiment.learner_of, placement, iterations, options.evaluations)
    host, measure = experiment.host, experiment.evaluate
    if host is not None:
        done = vmapped.train_on_host(
            training, host, configs, keys, base_seed=options.seed, num_seeds=options.seeds
        )
    else:
        assert measure is not None
        done = vmapped.train_in_program(training, measure, configs, keys, evaluation_key)
    require_actions(done.curves)
    return {
        "steps": [steps * end for end in training.ends],
        "scores": done.curves["greedy_return"].reshape(len(group), options.seeds, -1).tolist(),
        "seconds": done.seconds,
        "compile_seconds": done.compile_seconds,
    }


def require_actions(curves: vmapped.Curves) -> None:
    """Raises UsageError if in some state no action was legal."""
    if runner.NO_ACTION not in curves:
        return
    without = np.any(curves[runner.NO_ACTION] > 0, axis=1)
    if without.any():
        raise UsageError(
            f"--env: no action was legal in some state of {int(without.sum())} of "
            f"{without.size} runs: the action_mask of the environment must allow one in every "
            "state that is not the last of an episode"
        )


def run_all(
    groups: Mapping[int, Group], options: Options, given: Collection[str]
) -> Generator[tuple[int, dict[str, Any]]]:
    """Trains the programs, in this process or several at a time in their own.

    Yields:
      The number and the result of each program as it finishes.

    Raises:
      UsageError: a process ended without a result.
    """
    if options.processes == 1:
        for number, group in groups.items():
            yield number, interrupts.in_thread(run, group, options, given)
        return
    with interrupts.Processes(options.processes) as pool:
        started = {
            pool.submit(run, group, options, given): number for number, group in groups.items()
        }
        try:
            for done in futures.as_completed(started):
                yield started[done], done.result()
        except BrokenProcessPool:
            raise UsageError(
                f"--processes={options.processes}: a process of the sweep was killed, "
                "perhaps because memory ran out; continue with --resume and a smaller number"
            ) from None


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
    for name in OF_ONE_RUN:
        if name in asked.flags:
            raise UsageError(
                f"--{name} must be left out: a sweep has --evaluations, and keeps whole runs"
            )
    if not options.total_steps:
        raise UsageError("--total_steps=0 must be at least the steps of an iteration in a sweep")
    if options.save and user_code.is_source(options.env):
        raise UsageError(
            f"--save must be left out with --env={options.env}: the tuned flags of an environment "
            "of one's own are not looked up; sweep.json and the last line show them"
        )
    keep_programs(options.compilation_cache)
    sections = sections_of(options)
    groups: dict[str, list[tuple[Combination, dict[str, Any]]]] = {}
    for combination in search.combinations(asked.swept):
        records = asked.records(combination, sections)
        groups.setdefault(search.static_part(records), []).append((combination, records))

    given = frozenset([*asked.flags, *asked.swept])
    # Before an earlier sweep is overwritten.
    every = [[records for _, records in group] for group in groups.values()]
    with flags.blame(sections):
        if options.processes == 1:
            check(every, options, given)
        else:
            with interrupts.Processes(1) as pool:
                pool.submit(check, every, options, given).result()
    with (
        folder.claim(options.out, overwrite=options.overwrite) as out,
        interrupts.kept(out, at_once=options.processes == 1),
    ):
        lasting = {
            name: value for name, value in asked.flags.items() if name not in ("out", *OF_A_START)
        }
        said = {"script": "sweep", **asked._replace(flags=lasting)._asdict()}
        code = {user_code.DIGESTS: user_code.digests(lasting)}
        folder.write_json(out / folder.CONFIG, said | {"resolved": code})
        path = out / "sweep.json"
        try:
            rows = (
                json.loads(path.read_text(encoding="utf-8"))
                if options.resume and path.exists()
                else []
            )
            done = [row["flags"] for row in rows]
        except (KeyError, TypeError, ValueError):
            raise UsageError(
                f"--resume: {path} is damaged; repair it, or choose another --out"
            ) from None
        programs = dict(enumerate(groups.values(), 1))
        todo = {
            number: [records for _, records in group]
            for number, group in programs.items()
            if not all(combination in done for combination, _ in group)
        }
        with (
            flags.blame(sections),
            contextlib.closing(run_all(todo, options, given)) as results,
        ):
            for number, result in results:
                group = programs[number]
                rows += [
                    {"flags": combination, **result, "scores": scores}
                    for (combination, _), scores in zip(group, result["scores"], strict=True)
                ]
                rows.sort(key=lambda row: -search.final(row["scores"]).mean())
                folder.write_json(path, rows)
                print(
                    f"program {number} of {len(groups)}: "
                    f"{metrics.counted(len(group), 'settings')} × "
                    f"{metrics.counted(options.seeds, 'seeds')}, {result['steps'][-1]:,} steps "
                    f"each, {result['seconds']:.0f} s",
                    flush=True,
                )
        text = search.table(rows)
        (out / "table.txt").write_text(text, encoding="utf-8")
        print(text, end="")
        records = asked.records(rows[0]["flags"], sections)
        best = flags.flatten(plan.settle(control.SCRIPT, records, given)[0])
        tunable = [name for name in asked.flags | asked.swept if name.startswith(search.SWEPT)]
        chosen = {
            name: best[name] for name in dict.fromkeys([*asked.tuned, *tunable]) if name in best
        }
        print("best:", *(f"--{name}={flags.shown(value)}" for name, value in chosen.items()))
        if options.save:
            save(options, asked, chosen, search.final(rows[0]["scores"]), rows[0]["steps"][-1])
        scores = [(row["flags"], search.final(row["scores"])) for row in rows]
        with plotting.beside(out / "sweep.png"):
            plotting.save_sweep(scores, f"final {metrics.axis('greedy_return')}", out / "sweep.png")
    return 0


def save(
    options: Options, asked: Asked, chosen: Mapping[str, Any], scores: Any, steps: int
) -> None:
    """Writes the best flags to `jaxrl_po/run/experiment/configs/<algorithm>/<env>.json`.

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
            "steps": steps,
        },
        "flags": chosen,
    }
    path = control.tuned_file(options)
    path.parent.mkdir(parents=True, exist_ok=True)
    folder.write_json(path, content)
    print(f"saved to {path}")


def sections_of(options: Options) -> dict[str, type]:
    """Prefix to record class, of all flags of a sweep."""
    return {**plan.sections_of(control.SCRIPT, options), "": Options}
