"""Sweeps: a grid or random draws of hyperparameters, each on several seeds, and the best result.

Combinations that differ only in numbers of the method train vmapped, as one program.
"""

import csv
import dataclasses
import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po import config
from jaxrl_po.config import ConfigError, Json, Values, setting_of
from jaxrl_po.population import Space
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags, populations, search_space, settings, user_code
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment, with_names
from jaxrl_po.run.experiment.options import TUNED, RunConfig, RunOptions
from jaxrl_po.run.experiment.populations import Plan
from jaxrl_po.run.experiment.search_space import RECORDS, TIE, Sweep, SweepSpec
from jaxrl_po.run.experiment.settings import Domain, Settings
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import runner, signals
from jaxrl_po.run.loop.job import Length, Patience, TrainJob
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.loop.signals import Interrupted
from jaxrl_po.run.store import folder, metrics, provenance, sources, statistics
from jaxrl_po.types import Row

PROGRAMS = "programs"  # folder of the runs of a sweep, one subfolder per program
CONFIRM = "confirm"  # folder in `programs` of the runs on fresh seeds, by the number of seeds
EXACT = "exact_draws"  # entry in `config.json` if drawn values are not rounded

Group = Sequence[Settings[RunConfig[Any]]]  # settings of the combinations of one program
Groups = list[list[tuple[Json, Settings[RunConfig[Any]]]]]  # with the values of the combinations


@config.with_field_docs
class SweepResult(NamedTuple):
    """Results of a sweep.

    Attributes:
      rows: Results of each combination, best first: `flags`, `steps` `[E]` and `scores` `[S, E]`;
        with `exploit_every`, `flags` at the start and `lineage`, see `populations.History`.
      best: Values of the best combination by flag name, for all flags that were set or tuned.
      folder: Folder with `sweep.json`, the lines of all runs in `programs/*/metrics.jsonl` and,
        after the end of the sweep, `table.txt`, `sweep.csv` and `sweep.png`.
      confirmed: Results on fresh seeds, better first, of the best combination and of the run
        without the searched flags (empty `flags`); empty without `confirm`.
    """

    rows: list[Json]
    best: Json
    folder: Path
    confirmed: Sequence[Json] = ()

    def table(self) -> list[Json]:
        """Returns the rows of `sweep.csv`: flags, `seed_index` and final `score` of each run.

        A member of a population also has its settings at the end, `config.learning_rate (end)`.
        `pandas.DataFrame` takes the rows.
        """
        return [
            row["flags"]
            | {
                f"{name} (end)": x[i][-1]
                for name, x in row.get("lineage", {"values": {}})["values"].items()
            }
            | {"seed_index": i, "score": float(score)}
            for row in self.rows
            for i, score in enumerate(final_scores(row["scores"]))
        ]

    def __repr__(self) -> str:
        return f"SweepResult(rows=<{len(self.rows)} items>, best={self[1]!r}, folder={self[2]!r})"


def sweep(experiment: Experiment, *, over: Values, **options: Any) -> SweepResult:
    """Searches hyperparameters of an experiment.

    Runs that differ in numbers of the method share each seed's warm start of a language model; runs
    with `init_from` share an earlier run.

    Args:
      experiment: experiment with the folder `out` and the number of seeds of each combination.
      over: list of values, or distribution of `draws` values or tie such as `@config.gamma` as a
        text, by flag with a dot.
      options: `evaluations`, `draws`, `confirm`, `exploit_every`, `exploit_by`, and keywords of
        `Experiment`.

    Returns:
      The results, with `table()`, the best settings and the folder.

    Raises:
      ConfigError: an argument is invalid, raised before training; the error names the argument.
      Interrupted: an interrupt ended the sweep after the current iteration, saved; the rows of an
        interrupted program have the evaluations so far. `resume=True` continues the sweep.

    Example:
      >>> rates = {"config.learning_rate": "log_uniform(1e-5, 1e-2)"}
      >>> sweep(Experiment(env="CartPole-v1", out="runs/a"), over=rates, draws=32)  # doctest: +SKIP
    """
    user_code.require_not_imported()
    if not isinstance(experiment, Experiment):
        raise ConfigError("experiment", "must be an Experiment: run.Experiment(env=…)")
    domain, given = DOMAINS[experiment.script], with_names({**experiment.settings, **options})
    spec = settings.options_of(RECORDS[domain.NAME], given)
    sections = settings.sections_of(domain, spec)
    for name, values in over.items():
        if isinstance(values, str):
            given[name] = flags.FlagText(values)
            continue
        if not isinstance(values, list | tuple) and np.ndim(values) != 1:
            raise ConfigError(
                "over", f"{name} must have a list of values or a text, got {values!r}"
            )
        each = [flags.convert(with_names({name: value}), sections)[name] for value in values]
        if any(str(value).startswith(sources.OWN) for value in each):
            raise ConfigError("over", f"{name} must list names: an object of Python has one sweep")
        given[name] = flags.FlagText(",".join(map(errors.spell, each)))
    swept = run_sweep(domain, given)
    picture = "curves.png" if any("lineage" in row for row in swept.rows) else "sweep.png"
    print(f"best: {errors.spell_all(swept.best)}; see {swept.folder / picture}")
    return swept


def run_sweep(domain: Domain[Any], given: Values, *, leave_early: bool = False) -> SweepResult:
    """Carries out a sweep, or continues a sweep that was interrupted.

    Args:
      domain: Domain of the experiments.
      given: Text or value of each flag, by flag name; see `flags.tokenize`.
      leave_early: Whether a signal ends the process, as in a command; if false, see `sweep`.

    Raises:
      ConfigError: A flag is invalid, raised before training and before an earlier sweep is
        overwritten.
      RunError: The folder can no longer be written.
      NoAction, PoolError: See `runner.run`.
    """
    options = settings.options_of(RECORDS[domain.NAME], given)
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    spec = (
        search_space.resumed(domain, given, stored, options.out)
        if stored
        else search_space.parse(domain, given, options)
    )
    options = sweep_options(domain, spec)
    sections = settings.sections_of(domain, options)
    search_space.refuse(options, spec)
    keep_programs(options.compilation_cache)
    rounded = bool(stored) and not stored.get(EXACT)
    found = search_space.combinations(spec, options.draws, options.seed, rounded=rounded)
    groups = group(domain, spec, found)
    if spec.tuned:
        print(f"{TUNED}: {errors.spell_all(spec.tuned)}")
    total = math.prod(map(len, spec.swept.values())) * (options.draws or 1)
    if len(found) < total:
        print(f"{len(found)} of {total} combinations are distinct; each trains once")
    with flags.locating(sections):
        space = populations.space_of(domain, spec, found[0]) if options.exploit_every else None
        score = check_groups(domain, groups, options, space)
        plan = space and populations.make_plan(domain, spec, found[0], space)
        if options.confirm:
            fresh = on_fresh_seeds(spec, options)
            check_groups(domain, group(domain, fresh, [{}]), sweep_options(domain, fresh), None)
    with (
        flags.locating(sections),
        folder.claim(options.out, overwrite=options.overwrite) as out,
        signals.resumable_on_signal(out, leave_early=leave_early),
    ):
        fields = settings.fields_of(sections)
        lasting = {
            name: value
            for name, value in spec.flags.items()
            if fields[name].stored and name != "out"
        }
        said = {"script": "sweep", EXACT: not rounded, **spec._replace(flags=lasting)._asdict()}
        code = {sources.DIGESTS: sources.digests(lasting)}
        for line in provenance.note(provenance.differences(code, stored.get("resolved", {}))):
            print(line, flush=True)
        folder.write_settings(out, said | {"resolved": code})
        rows = done(out / "sweep.json", sections) if options.resume else []
        confirmed = list[Json]()
        try:
            train_groups(rows, groups, options, out, domain, plan=plan, leave_early=leave_early)
            write_results(rows, spec, out, f"final {metrics.axis(score)}")
            if options.confirm:
                place = out / PROGRAMS / CONFIRM / str(options.confirm)
                confirmed = done(place / "sweep.json", sections)
                again = group(domain, fresh, [rows[0]["flags"], {}])
                fresh_options = sweep_options(domain, fresh)
                print(f"best combination and default on {options.confirm} fresh seeds", flush=True)
                train_groups(
                    confirmed, again, fresh_options, place, domain, leave_early=leave_early
                )
                text = compare_with_default(confirmed)
                (place / "table.txt").write_text(text, encoding="utf-8")
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            swept = SweepResult(rows, best(domain, spec, rows, sections), out, confirmed)
            raise Interrupted(swept=swept) from None
    return SweepResult(rows, best(domain, spec, rows, sections), out, confirmed)


def sweep_options(domain: Domain[Any], spec: SweepSpec) -> Sweep:
    """Returns the options of a sweep."""
    options: Sweep = settings.options_of(RECORDS[domain.NAME], spec.flags, spec.tuned)
    return options


def on_fresh_seeds(spec: SweepSpec, options: Sweep) -> SweepSpec:
    """Returns the sweep with `confirm` seeds, whose random numbers the search did not use."""
    return spec._replace(flags=spec.flags | {"seeds": options.confirm, "seed": options.seed + 1})


def train_groups(
    rows: list[Json],
    groups: Groups,
    options: Sweep,
    out: Path,
    domain: Domain[Any],
    *,
    plan: Plan | None = None,
    leave_early: bool,
) -> None:
    """Trains the programs with a combination that `rows` lacks.

    Args:
      rows: Results of combinations, extended by new results and sorted, best first.
      groups: Combinations with their settings, by program.
      options: Options of the sweep.
      out: Folder with `sweep.json`, which is written after each program.
      domain: Domain of the experiments.
      plan: Population that the combinations are; None for a sweep without exploits.
      leave_early: Whether a signal ends the process.

    Raises:
      KeyboardInterrupt: A signal arrived; `rows` has the evaluations so far.
    """
    for number, each in enumerate(groups, 1):
        if all(combination in [row["flags"] for row in rows] for combination, _ in each):
            continue
        title = f"program {number} of {len(groups)}"
        place = out / PROGRAMS / str(number)
        of_group = [one for _, one in each], options, place, title, domain, plan
        result, interrupted = (
            signals.in_thread(run_group, *of_group) if leave_early else run_group(*of_group)
        )
        by_combination = {x: result.pop(x) for x in ("scores", "lineage") if x in result}
        rows += [
            {"flags": combination, **result, **{x: y[i] for x, y in by_combination.items()}}
            for i, (combination, _) in enumerate(each)
        ]
        rows.sort(key=lambda row: -final_scores(row["scores"]).mean())
        if interrupted:
            raise KeyboardInterrupt
        out.mkdir(parents=True, exist_ok=True)
        folder.write_json(out / "sweep.json", rows)
        shutil.rmtree(place / "checkpoints", ignore_errors=True)
        print(
            f"{title}: {metrics.counted(len(each), 'settings')} × "
            f"{metrics.counted(options.seeds, 'seeds')}, {result['steps'][-1]:,} steps "
            f"each, {result['seconds']:.0f} s",
            flush=True,
        )


def write_results(rows: list[Json], spec: SweepSpec, out: Path, y_label: str) -> None:
    """Writes `table.txt`, `sweep.csv` and, unless the combinations are a population, `sweep.png`.

    The picture leaves out tied flags.
    """
    (out / "table.txt").write_text(format_table(rows), encoding="utf-8")
    table = SweepResult(rows, {}, out).table()
    with (out / "sweep.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(table[0]))
        writer.writeheader()
        writer.writerows({name: errors.spell(x) for name, x in row.items()} for row in table)
    if "lineage" in rows[0]:
        return
    tied = {name for name, (first, *more) in spec.swept.items() if first[:1] == TIE and not more}
    scores = [
        (
            {name: errors.spell(x) for name, x in row["flags"].items() if name not in tied},
            final_scores(row["scores"]),
        )
        for row in rows
    ]
    with plotting.report_failure(out / "sweep.png"):
        plotting.save_sweep(scores, y_label, out / "sweep.png")


def compare_with_default(rows: Sequence[Json]) -> str:
    """Returns the comparison of the best combination with the run without the searched flags."""
    scores = {bool(row["flags"]): final_scores(row["scores"]) for row in rows}
    table = statistics.format_comparison(["default", "best"], [scores[False], scores[True]])
    difference = statistics.difference_with_interval(scores[True], scores[False])
    return f"{table}best − default: {difference}, difference of the IQMs, 95 % bootstrap interval\n"


def group(domain: Domain[Any], spec: SweepSpec, combinations: Sequence[Values]) -> Groups:
    """Groups combinations, with their values and settings, by the program that they share."""
    groups: dict[str, list[tuple[Json, Settings[RunConfig[Any]]]]] = {}
    for combination in combinations:
        made = spec.settings(domain, combination)
        values = {name: made.given[name] for name in combination}
        groups.setdefault(static_part(made.config), []).append((values, made))
    return list(groups.values())


def best(domain: Domain[Any], spec: SweepSpec, rows: list[Json], sections: flags.Sections) -> Json:
    """Returns set and tuned flags of the best combination or member; empty without rows."""
    if not rows:
        return {}
    values = rows[0]["flags"]
    if "lineage" in rows[0]:
        members = sorted(rows, key=lambda row: row["lineage"]["draw"])
        scores = np.array([final_scores(row["scores"]) for row in members])
        draw, seed = np.unravel_index(scores.argmax(), scores.shape)
        values = {x: y[seed][-1] for x, y in members[draw]["lineage"]["values"].items()}
    first = spec.settings(domain, values)
    config = settings.settle(domain, first, domain.open_world(first.config))
    settled, fields = flags.flatten(config.sections()), settings.fields_of(sections)
    names = dict.fromkeys([*spec.tuned, *spec.flags, *spec.swept, *spec.drawn])
    varying = [name for name in names if name in settled and fields[name].sweep == "varies"]
    return {name: settled[name] for name in varying}


def check_groups(domain: Domain[Any], groups: Groups, options: Sweep, space: Space | None) -> str:
    """Returns the name of the score; raises the error of the first invalid program."""
    for group in groups:
        job = build_group(domain, [one for _, one in group], options, space)
        if job.host.scorer is not None:
            raise ConfigError("reward", "must be computed in the program of a sweep")
    return job.evaluation.score


def build_group(domain: Domain[Any], group: Group, options: Sweep, space: Space | None) -> TrainJob:
    """Builds the job of the combinations that share one program; reads a pretrained model once."""
    placement = place_runs(options, len(group))
    if placement.cuts_params:
        raise ConfigError("mesh", f"must have no model axis in a sweep, got {options.mesh}")
    world = domain.open_world(group[0].config)
    configs = [settings.settle(domain, each, world) for each in group]
    job = domain.build(configs[0], placement, world, [config.method for config in configs])
    return job if space is None else populations.with_exploits(job, options, space)


def place_runs(options: RunOptions, combinations: int) -> Placement:
    """Returns the placement of the seeds of several combinations on devices."""
    runs = combinations * options.seeds
    return parallel.choose(options.devices, num_seeds=runs, num_rows=1, mesh=options.mesh)


def run_group(
    group: Group,
    options: Sweep,
    out: Path,
    title: str,
    domain: Domain[Any],
    plan: Plan | None,
) -> tuple[Json, bool]:
    """Trains the combinations that share one program, each combination over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds`,
      `compile_seconds` and, by combination, the entry `lineage` of a population; and whether a
      signal arrived.
    """
    job = build_group(domain, group, options, plan and plan.space)
    rows, outcome = train_group(job, options, out, title)
    name, lineage = job.evaluation.score, Json()
    scores = curves(rows)[name]
    if plan is not None:
        history = populations.read_history(out / runner.METRICS, name, plan.space)
        scores, lineage = history.scores, {"lineage": history.lineages(options.seeds)}
        if not outcome.interrupted:
            index = int(final_scores(scores).argmax())
            populations.save_best(plan, job, outcome.state, history, index)
            if (history.parent == history.parent[:, :1]).all():
                print(f"{title}: no member was replaced, for want of scores: raise exploit_every")
    return {
        "steps": [row["step"] for row in rows],
        "scores": scores.reshape(len(group), options.seeds, -1).tolist(),
        "seconds": sum(row["time/seconds"] for row in rows),
        "compile_seconds": rows[-1]["time/compile_seconds"],
        **lineage,
    }, outcome.interrupted


def train_group(
    job: TrainJob, options: Sweep, out: Path, title: str
) -> tuple[list[Row], runner.Outcome]:
    """Trains C settings of a method on S seeds each; continues a run that the folder holds.

    Args:
      job: Job of C·S runs, seeds innermost; the seeds of each setting have the same random numbers.
      options: Options of the sweep, with the maximal number of evaluations of each run, evenly
        spaced as far as lines consist of whole iterations.
      out: Folder of the runs of the program.
      title: Title of the program, for display.

    Returns:
      The lines of evaluations after training started, lists `[C·S]`; and the outcome.

    Raises:
      KeyboardInterrupt: A signal arrived before the first line with an evaluation.
      runner.NoAction, PoolError: See `runner.run`.
    """
    out.mkdir(parents=True, exist_ok=True)
    iterations, score = job.length.iterations, job.evaluation.score
    every = -(-iterations // options.evaluations)
    line = options.exploit_every or every  # a line has one parent
    job = dataclasses.replace(
        job,
        length=Length(iterations, job.length.steps_per_iteration, line, -(-every // line)),
        # In a sweep, a step size that diverges or learns nothing is a result, not an error.
        patience=Patience(iterations + 1, iterations + 1),
    )
    total = job.length.steps(iterations)
    with Progress(title, total, watch=[score], num_seeds=job.num_seeds) as progress:
        outcome = runner.run(job, out, progress, resume=True)
    rows = metrics.read(out / runner.METRICS)
    rows = [row for row in rows if row["iteration"] and score in row]
    if outcome.interrupted and not rows:
        raise KeyboardInterrupt
    return rows, outcome


def curves(rows: Sequence[Row]) -> dict[str, npt.NDArray[np.float64]]:
    """Returns `[N, E]` by metric, for N runs with E evaluations; NaN for a missing sample."""
    return {
        name: np.array([row.get(name) for row in rows], np.float64).T
        for name, value in rows[-1].items()
        if isinstance(value, list)
    }


def done(path: Path, sections: flags.Sections) -> list[Json]:
    """Returns the rows of finished combinations; raises ConfigError for a damaged file."""
    try:
        rows: list[Json] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        present = [search_space.as_written(flags.current(row["flags"], sections)) for row in rows]
        values = [flags.convert(each, sections) for each in present]  # once, numbers were texts
        return [row | {"flags": each} for row, each in zip(rows, values, strict=True)]
    except (KeyError, TypeError, ValueError):
        raise ConfigError("resume", f"{path} is damaged; choose another out") from None


def static_part(config: RunConfig[Any]) -> str:
    """Returns all settings except the numbers of the method; equal texts share a program."""
    numbers = {
        f"config.{field.name}"
        for field in dataclasses.fields(config.method)
        if not setting_of(field).static
    }
    values = flags.flatten(config.sections())
    return json.dumps(
        {name: value for name, value in values.items() if name not in numbers},
        default=str,
        sort_keys=True,
    )


def final_scores(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Returns the score of each seed, `[S]`: the mean of its last three evaluations, or −∞."""
    last = np.asarray(scores, np.float64)[:, -3:].mean(axis=1)
    return statistics.worst_if_missing(last)


def format_table(rows: Sequence[Row]) -> str:
    """Returns a line per combination, best first: mean, interquartile mean and worst seed."""
    names = sorted({name for row in rows for name in row["flags"]})
    labels = [
        f"{name} (start)" if any("lineage" in row for row in rows) else name for name in names
    ]
    lines = ["  ".join([f"{'mean':>9}", f"{'IQM':>9}", f"{'worst':>9}", f"{'seeds':>8}", *labels])]
    for row in rows:
        scores = final_scores(row["scores"])
        numbers = [scores.mean(), float(statistics.interquartile_mean(scores)), scores.min()]
        texts = [errors.spell(row["flags"].get(name, "")) for name in names]
        values = (f"{text:>{len(label)}}" for text, label in zip(texts, labels, strict=True))
        seeds = f"{statistics.seeds_with_score(scores):>8}"
        lines.append("  ".join([*(f"{number:>9.4g}" for number in numbers), seeds, *values]))
    return "\n".join(lines) + "\n"
