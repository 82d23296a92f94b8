"""Sweeps: a grid or random draws of hyperparameters, each on several seeds, and the best of them.

Combinations that differ in numbers of the method alone train vmapped, as one program.
"""

import json
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.experiment import (
    assembly,
    control,
    flags,
    methods,
    plan,
    search,
    user_code,
    vmapped,
)
from jaxrl_po.run.experiment.experiment import Experiment, with_names
from jaxrl_po.run.experiment.options import option
from jaxrl_po.run.experiment.search import OF_A_START, Asked, Combination
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import interrupts
from jaxrl_po.run.loop.interrupts import Interrupted
from jaxrl_po.run.store import folder, metrics, provenance, sources
from jaxrl_po.run.store.sources import Given

PROGRAMS = "programs"  # folder of their runs
OF_ONE_RUN = ("log_every", "eval_every", "checkpoint_every")
OF_A_RUN_ALONE = ("distributed", "tensorboard", "wandb", "deterministic")

Group = Sequence[Mapping[str, Any]]  # records of the combinations that share one program


@config.record
class Options(control.Options):
    """The sweep as a whole."""

    evaluations: int = option(
        10,
        "greedy evaluations of each run, at most; the score is the mean of the last three",
        within=COUNT,
        common=True,
    )
    draws: int = option(
        0,
        "combinations that are drawn of the flags with a distribution, such as "
        "--config.learning_rate=log_uniform(1e-5,1e-2), uniform(a,b) or choice(a,b,c)",
        within=NON_NEGATIVE,
        common=True,
    )


class Swept(NamedTuple):
    """What a sweep leaves.

    Attributes:
      rows: one for each combination, best first: `flags`, `steps` `[E]` and `scores` `[S, E]`.
      best: flag name to value of the best one, of all flags that were set or tuned.
      folder: with `sweep.json`, and once it is finished `table.txt` and `sweep.png`.
    """

    rows: list[dict[str, Any]]
    best: dict[str, Any]
    folder: Path

    def __repr__(self) -> str:
        return f"Swept(rows=<{len(self.rows)} items>, best={self.best!r}, folder={self.folder!r})"


def sweep(experiment: Experiment, *, over: Mapping[str, Any], **options: Any) -> Swept:
    """Searches hyperparameters of an experiment in control.

    Args:
      experiment: with the folder `out` and the number of seeds of each combination.
      over: flag with a dot to a list of values, or to a distribution of `draws` values as text.
      options: `evaluations`, `draws`, and keywords of `Experiment`.

    Raises:
      ConfigError: names the argument that cannot work, before anything is trained.
      Interrupted: at an interrupt, after the current iteration, saved; the rows of a program that
        it ended have the evaluations so far. `resume=True` continues the sweep.

    Example:
      >>> rates = {"config.learning_rate": "log_uniform(1e-5, 1e-2)"}
      >>> sweep(Experiment(env="CartPole-v1", out="runs/a"), over=rates, draws=32)  # doctest: +SKIP
    """
    user_code.require_not_imported()
    if not isinstance(experiment, Experiment) or experiment.script != control.SCRIPT.name:
        raise ConfigError("experiment", "must be an Experiment in control: run.Experiment(env=…)")
    for name, values in over.items():
        if not isinstance(values, str | list | tuple) and np.ndim(values) != 1:
            raise ConfigError(
                "over", f"{name} must have a list of values or a text, got {values!r}"
            )
    listed = {
        name: [config.static_value(name, value) for value in values]
        for name, values in over.items()
        if not isinstance(values, str)
    }
    searched = {name: ",".join(map(errors.shown, values)) for name, values in listed.items()}
    given = with_names({**experiment.settings, **options, **over, **searched})
    argv = flags.written(given)
    sections = sections_of(flags.parse(argv, {"": Options}, partial=True)[""])
    single = [{name: value} for name, values in listed.items() for value in values]
    for each in (with_names(options), *single):
        flags.require_kinds(each, flags.given(flags.written(each), sections))
    own = {name: value for name, value in given.items() if isinstance(value, Given)}
    return carry_out(argv, own=own)


def carry_out(
    argv: Sequence[str], *, own: Mapping[str, Given] = {}, leave_early: bool = False
) -> Swept:
    """Carries out the sweep of a command's arguments, or goes on with it.

    Args:
      argv: the arguments.
      own: flag to the object that was given for it in Python.
      leave_early: end the process at a signal, as a command does; else see `sweep`.

    Raises:
      ConfigError: before anything is trained or an earlier sweep is overwritten.
      RunError: the folder can no longer be written.
      NoAction, PoolError: see `runner.run`.
    """
    options = flags.parse(argv, {"": Options}, partial=True)[""]
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    asked = resumed(argv, stored, options.out) if stored else read(argv, options)
    asked = asked._replace(flags={**asked.flags, **own})
    options = flags.parse([], {"": Options}, stored=asked.flags)[""]
    refuse(options, asked)
    keep_programs(options.compilation_cache)
    sections = sections_of(options)
    rounded = bool(stored) and not stored.get(search.EXACT)
    groups = group(asked, options, sections, rounded=rounded)
    given = frozenset([*asked.flags, *asked.swept, *asked.drawn])
    with flags.locating(sections):
        check([[records for _, records in each] for each in groups], options, given)
    with (
        folder.claim(options.out, overwrite=options.overwrite) as out,
        interrupts.kept(out, leave_early=leave_early),
    ):
        lasting = {
            name: value for name, value in asked.flags.items() if name not in ("out", *OF_A_START)
        }
        said = {
            "script": "sweep",
            search.EXACT: not rounded,
            **asked._replace(flags=lasting)._asdict(),
        }
        code = {sources.DIGESTS: sources.digests(lasting)}
        for line in provenance.note(provenance.differences(code, stored.get("resolved", {}))):
            print(line, flush=True)
        folder.write_settings(out, said | {"resolved": code})
        rows = done(out / "sweep.json") if options.resume else []
        try:
            for number, each in enumerate(groups, 1):
                if all(combination in [row["flags"] for row in rows] for combination, _ in each):
                    continue
                title = f"program {number} of {len(groups)}"
                place = out / PROGRAMS / str(number)
                of_group = [records for _, records in each], options, given, place, title
                result, interrupted = (
                    interrupts.in_thread(run, *of_group) if leave_early else run(*of_group)
                )
                scored = [
                    {"flags": combination, **result, "scores": scores}
                    for (combination, _), scores in zip(each, result["scores"], strict=True)
                ]
                rows = sorted([*rows, *scored], key=lambda row: -search.final(row["scores"]).mean())
                if interrupted:
                    raise KeyboardInterrupt
                folder.write_json(out / "sweep.json", rows)
                shutil.rmtree(place / "checkpoints", ignore_errors=True)
                print(
                    f"{title}: {metrics.counted(len(each), 'settings')} × "
                    f"{metrics.counted(options.seeds, 'seeds')}, {result['steps'][-1]:,} steps "
                    f"each, {result['seconds']:.0f} s",
                    flush=True,
                )
            (out / "table.txt").write_text(search.table(rows), encoding="utf-8")
            scores = [(row["flags"], search.final(row["scores"])) for row in rows]
            with plotting.beside(out / "sweep.png"):
                axis = f"final {metrics.axis('greedy_return')}"
                plotting.save_sweep(scores, axis, out / "sweep.png")
        except ConfigError as error:
            raise flags.located(error, sections) from None
        except KeyboardInterrupt:
            raise Interrupted(swept=Swept(rows, best(asked, rows, sections, given), out)) from None
    return Swept(rows, best(asked, rows, sections, given), out)


def group(
    asked: Asked, options: Options, sections: dict[str, type], *, rounded: bool
) -> list[list[tuple[Combination, dict[str, Any]]]]:
    """Groups the combinations, with their records, by the program that they share.

    Args:
      asked: the sweep.
      options: options of the sweep as a whole.
      sections: prefix to record class.
      rounded: whether the draws are those of an earlier version; see `search.combinations`.
    """
    combinations = search.combinations(asked, options.draws, options.seed, rounded=rounded)
    total = math.prod(map(len, asked.swept.values())) * (options.draws or 1)
    if len(combinations) < total:
        print(f"{len(combinations)} of {total} combinations are distinct; each trains once")
    groups: dict[str, list[tuple[Combination, dict[str, Any]]]] = {}
    for combination in combinations:
        records = asked.records(combination, sections)
        groups.setdefault(search.static_part(records), []).append((combination, records))
    return list(groups.values())


def best(
    asked: Asked, rows: list[dict[str, Any]], sections: dict[str, type], given: frozenset[str]
) -> dict[str, Any]:
    """Returns the flags of the first row that were set or tuned; none without a row."""
    if not rows:
        return {}
    records = asked.records(rows[0]["flags"], sections)
    settled = flags.flatten(plan.settle(control.SCRIPT, records, given)[0])
    tunable = [name for name in asked.flags if name.startswith(search.SWEPT)]
    names = dict.fromkeys([*asked.tuned, *tunable, *asked.swept, *asked.drawn])
    return {name: settled[name] for name in names if name in settled}


def read(argv: Sequence[str], options: Options) -> Asked:
    """The sweep that the arguments ask for."""
    kept, swept, drawn = search.split(argv)
    fixed = flags.given(kept, sections_of(options))
    return Asked(fixed | sources.absolute(fixed), swept, drawn, control.defaults(options, fixed))


def resumed(argv: Sequence[str], stored: Mapping[str, Any], out: str) -> Asked:
    """The sweep stored in a folder; arguments may omit its flags, or repeat them as they were.

    Args:
      argv: arguments.
      stored: the `config.json` of the sweep.
      out: the value of `--out`.

    Raises:
      ConfigError: names the first flag that differs, with both values.
    """
    if stored.get("script") != "sweep" or not set(Asked._fields) <= set(stored):
        raise ConfigError(
            "resume", f"{out} must hold a sweep of this version of jaxrl-po sweep; choose another"
        )
    asked = Asked(**{name: stored[name] for name in Asked._fields})
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    if not all(isinstance(field, dict) for field in (*asked, code)):
        raise ConfigError("resume", f"{Path(out) / folder.CONFIG} is damaged; choose another out")
    found = sources.located(asked.flags, code, str(stored.get("out", "")), Path(out))
    asked = asked._replace(flags=asked.flags | found)
    options = flags.parse(argv, {"": Options}, stored=asked.flags, partial=True)[""]
    again = read(argv, options)
    before = {**asked.flags, **asked.swept, **asked.drawn}
    for name, value in {**again.flags, **again.swept, **again.drawn}.items():
        if name in code and sources.digests({name: value}) == {name: code[name]}:
            continue
        if name not in search.MAY_DIFFER and value != before.get(name):
            wanted = errors.shown(before[name]) if name in before else "left out"
            raise ConfigError(
                name,
                f"must be {wanted}, as in the sweep in {out} that is resumed, got "
                f"{errors.shown(value)}; leave it out, or choose another out",
            )
    may_differ = {name: x for name, x in again.flags.items() if name in (*search.MAY_DIFFER, *code)}
    return asked._replace(flags=asked.flags | may_differ)


def refuse(options: Options, asked: Asked) -> None:
    """Raises ConfigError for flags that a sweep cannot have, or that have no effect in it."""
    for name in OF_A_RUN_ALONE:
        if getattr(options, name):
            raise ConfigError(
                name, "must be left out: a sweep is one process that writes sweep.json"
            )
    for name in OF_ONE_RUN:
        if name in asked.flags:
            raise ConfigError(name, "must be left out: a sweep has evaluations")
    if asked.drawn and not options.draws:
        raise ConfigError("draws", "must be at least 1 with a distribution, got 0")
    if options.draws and not asked.drawn:
        raise ConfigError(
            "draws",
            "must be left out without a distribution, e.g. "
            f"config.learning_rate=log_uniform(1e-5,1e-2), got {options.draws}",
        )
    if not options.total_steps:
        raise ConfigError("total_steps", "must be at least the steps of an iteration, got 0")


def check(groups: Sequence[Group], options: Options, given: Collection[str]) -> None:
    """Raises the error of the first combination whose settings are wrong."""
    for group in groups:
        placement = parallel.choose(
            options.devices, num_seeds=len(group) * options.seeds, num_rows=1, mesh=options.mesh
        )
        if placement.cuts_params:
            raise ConfigError("mesh", f"must have no model axis in a sweep, got {options.mesh}")
        for records in group:
            build(plan.settle(control.SCRIPT, records, given)[0])


def build(records: Mapping[str, Any]) -> assembly.Setup:
    """The setup of a combination."""
    return control.build(records, methods.ALGORITHMS[records[""].algorithm], vmapped.ALONE)


def run(
    group: Group, options: Options, given: Collection[str], place: Path, title: str
) -> tuple[dict[str, Any], bool]:
    """Trains the combinations that share one program, each over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds` and
      `compile_seconds`; and whether a signal came.
    """
    settled = [plan.settle(control.SCRIPT, records, given) for records in group]
    rows, interrupted = vmapped.train(
        build(settled[0][0]),
        [records["config"] for records, _ in settled],
        options,
        place,
        title,
        iterations=settled[0][1],
        steps_per_iteration=control.steps(group[0]),
        evaluations=options.evaluations,
    )
    scores = vmapped.curves(rows)["greedy_return"]
    result = {
        "steps": [row["step"] for row in rows],
        "scores": scores.reshape(len(group), options.seeds, -1).tolist(),
        "seconds": sum(row["time/seconds"] for row in rows),
        "compile_seconds": rows[-1]["time/compile_seconds"],
    }
    return result, interrupted


def done(path: Path) -> list[dict[str, Any]]:
    """The combinations that are finished; raises ConfigError for a damaged file."""
    try:
        rows: list[dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        )
        return [row for row in rows if row["flags"] is not None]
    except (KeyError, TypeError, ValueError):
        raise ConfigError("resume", f"{path} is damaged; choose another out") from None


def sections_of(options: Options) -> dict[str, type]:
    """Prefix to record class, of all flags of a sweep."""
    return {**plan.sections_of(control.SCRIPT, options), "": Options}
