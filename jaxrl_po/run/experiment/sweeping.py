"""Sweeps: a grid or random draws of hyperparameters, each on several seeds, and the best result.

Combinations that differ only in numbers of the method train vmapped, as one program.
"""

import dataclasses
import itertools
import json
import math
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError, Json, Setting, Values, setting_of
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import control, flags, language, settings, user_code
from jaxrl_po.run.experiment.control_config import ControlOptions
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment, with_names
from jaxrl_po.run.experiment.language_config import LanguageOptions
from jaxrl_po.run.experiment.options import InitialModel, RunConfig, RunOptions, common_option
from jaxrl_po.run.experiment.settings import Domain, Settings
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import runner, signals
from jaxrl_po.run.loop.job import Length, Patience, TrainJob
from jaxrl_po.run.loop.progress import Progress
from jaxrl_po.run.loop.signals import Interrupted
from jaxrl_po.run.store import folder, metrics, provenance, sources, statistics
from jaxrl_po.types import Row

PROGRAMS = "programs"  # folder of the runs of a sweep, one subfolder per program
Combination = dict[str, str]
DRAW = re.compile(r"(\w+) *\((.*)\)")
DISTRIBUTIONS = ("log_uniform", "uniform", "choice")
EXACT = "exact_draws"  # entry in `config.json` if drawn values are not rounded

Group = Sequence[Settings[RunConfig[Any]]]  # settings of the combinations of one program


@config.record
class Search:
    """Options of the search that a sweep carries out."""

    evaluations: int = common_option(
        10,
        "greedy evaluations of each run, at most; the score is the mean of the last three",
        within=COUNT,
    )
    draws: int = common_option(
        0,
        "combinations that are drawn of the flags with a distribution, such as "
        "--config.learning_rate=log_uniform(1e-5,1e-2), uniform(a,b) or choice(a,b,c)",
        within=NON_NEGATIVE,
    )


@config.record
class ControlSweep(Search, ControlOptions):
    """Options of a sweep in control environments."""


@config.record
class LanguageSweep(Search, LanguageOptions):
    """Options of a sweep of a language model."""


Sweep = ControlSweep | LanguageSweep
SUMMARY = (
    "Searches hyperparameters: give a flag several values, separated by commas, or a distribution."
)
RECORDS: dict[str, type[Sweep]] = {control.NAME: ControlSweep, language.NAME: LanguageSweep}


class SweepSpec(NamedTuple):
    """Flags that a sweep was asked to search, and flags with one value.

    Attributes:
      flags: Values of the flags with one value, by flag name.
      swept: Values, as written, of the flags with several values, by flag name.
      drawn: Distributions, as written, of the flags that are drawn, by flag name.
      tuned: Defaults of `jaxrl-po control` when the sweep started, by flag name.
    """

    flags: Json
    swept: dict[str, list[str]]
    drawn: dict[str, str]
    tuned: Values

    def settings(self, domain: Domain[Any], combination: Combination) -> Settings[RunConfig[Any]]:
        """Returns the settings of one combination of values."""
        options = settings.options_of(RECORDS[domain.NAME], self.flags)
        initial = domain.initial_model(options)
        sections = settings.sections_of(domain, options, initial)
        for name, drawn in self.drawn.items():
            prefix, _, field = name.rpartition(".")
            default = getattr(sections.get(prefix), field, None)
            if type(default) is int and not drawn.startswith("choice"):
                raise ConfigError(
                    name, f"must be choice(a,b,…), as its values are integers, got {drawn}"
                )
        texts = {name: flags.FlagText(value) for name, value in combination.items()}
        given = flags.convert(self.flags | texts, sections)
        # A value of a combination may choose other defaults than the defaults of the sweep.
        whole, own = (
            _defaults(domain, options, values, initial, sections) for values in (self.flags, given)
        )
        kept = {
            name: value for name, value in self.tuned.items() if name in own or name not in whole
        }
        chosen = {name: value for name, value in own.items() if whole.get(name) != value}
        layers = {"given": given, "tuned": kept | chosen}
        records, origins = flags.merge_layers(sections, layers)
        return Settings(domain.CONFIG.of_sections(records, initial), given, {}, origins, {})


@config.with_field_docs
class SweepResult(NamedTuple):
    """Results of a sweep.

    Attributes:
      rows: Results of each combination, best first: `flags`, `steps` `[E]` and `scores` `[S, E]`.
      best: Values of the best combination by flag name, for all flags that were set or tuned.
      folder: Folder with `sweep.json`, the lines of all runs in `programs/*/metrics.jsonl` and,
        after the end of the sweep, `table.txt` and `sweep.png`.
    """

    rows: list[Json]
    best: Json
    folder: Path

    def __repr__(self) -> str:
        return f"SweepResult(rows=<{len(self.rows)} items>, best={self[1]!r}, folder={self[2]!r})"


def sweep(experiment: Experiment, *, over: Values, **options: Any) -> SweepResult:
    """Searches hyperparameters of an experiment.

    A language model's warm start is part of each run; runs with `init_from` share an earlier run.

    Args:
      experiment: experiment with the folder `out` and the number of seeds of each combination.
      over: list of values, or distribution of `draws` values as a text, by flag with a dot.
      options: `evaluations`, `draws`, and keywords of `Experiment`.

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
    return run_sweep(domain, given)


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
    record = RECORDS[domain.NAME]
    options = settings.options_of(record, given)
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    spec = resumed(domain, given, stored, options.out) if stored else parse(domain, given, options)
    options = settings.options_of(record, spec.flags, spec.tuned)
    sections = settings.sections_of(domain, options)
    refuse(options, spec)
    keep_programs(options.compilation_cache)
    rounded = bool(stored) and not stored.get(EXACT)
    groups = group(domain, spec, options, rounded=rounded)
    with flags.locating(sections):
        score = check_groups(domain, [[one for _, one in each] for each in groups], options)
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
        try:
            for number, each in enumerate(groups, 1):
                if all(combination in [row["flags"] for row in rows] for combination, _ in each):
                    continue
                title = f"program {number} of {len(groups)}"
                place = out / PROGRAMS / str(number)
                of_group = [one for _, one in each], options, place, title, domain
                result, interrupted = (
                    signals.in_thread(run_group, *of_group) if leave_early else run_group(*of_group)
                )
                scored = [
                    {"flags": combination, **result, "scores": scores}
                    for (combination, _), scores in zip(each, result["scores"], strict=True)
                ]
                rows = sorted([*rows, *scored], key=lambda row: -final_scores(row["scores"]).mean())
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
            (out / "table.txt").write_text(format_table(rows), encoding="utf-8")
            scores = [(row["flags"], final_scores(row["scores"])) for row in rows]
            with plotting.report_failure(out / "sweep.png"):
                axis = f"final {metrics.axis(score)}"
                plotting.save_sweep(scores, axis, out / "sweep.png")
        except KeyboardInterrupt:
            swept = SweepResult(rows, best(domain, spec, rows, sections), out)
            raise Interrupted(swept=swept) from None
    return SweepResult(rows, best(domain, spec, rows, sections), out)


def group(
    domain: Domain[Any], spec: SweepSpec, options: Sweep, *, rounded: bool
) -> list[list[tuple[Combination, Settings[RunConfig[Any]]]]]:
    """Groups the combinations, with their settings, by the program that they share.

    Args:
      domain: Domain of the experiments.
      spec: Flags and values of the sweep.
      options: Options of the sweep.
      rounded: Whether draws are rounded as in an earlier version; see `combinations`.
    """
    found = combinations(spec, options.draws, options.seed, rounded=rounded)
    total = math.prod(map(len, spec.swept.values())) * (options.draws or 1)
    if len(found) < total:
        print(f"{len(found)} of {total} combinations are distinct; each trains once")
    groups: dict[str, list[tuple[Combination, Settings[RunConfig[Any]]]]] = {}
    for combination in found:
        made = spec.settings(domain, combination)
        groups.setdefault(static_part(made.config), []).append((combination, made))
    return list(groups.values())


def best(domain: Domain[Any], spec: SweepSpec, rows: list[Json], sections: flags.Sections) -> Json:
    """Returns set and tuned flags of the best combination, the first row; empty without rows."""
    if not rows:
        return {}
    first = spec.settings(domain, rows[0]["flags"])
    config = settings.settle(domain, first, domain.open_world(first.config))
    settled, fields = flags.flatten(config.sections()), settings.fields_of(sections)
    names = dict.fromkeys([*spec.tuned, *spec.flags, *spec.swept, *spec.drawn])
    varying = [name for name in names if name in settled and fields[name].sweep == "varies"]
    return {name: settled[name] for name in varying}


def parse(domain: Domain[Any], given: Values, options: RunOptions) -> SweepSpec:
    """Returns the sweep that the given flags describe."""
    initial = domain.initial_model(options)
    sections = settings.sections_of(domain, options, initial)
    kept, swept, drawn = split_flags(given, settings.fields_of(sections))
    domain.require_known(options, kept, initial)
    fixed = flags.convert(kept, sections)
    tuned = _defaults(domain, options, fixed, initial, sections)
    swept = {
        name: [sources.absolute({name: value}).get(name, value) for value in values]
        for name, values in swept.items()
    }
    return SweepSpec(fixed | sources.absolute(fixed), swept, drawn, tuned)


def _defaults(
    domain: Domain[Any],
    options: RunOptions,
    values: Values,
    initial: InitialModel,
    sections: flags.Sections,
) -> Json:
    """Returns tuned values and presets by flag name, for flags that have such values."""
    of_run = options, values, initial
    return flags.current({**domain.tuned(*of_run), **domain.presets(*of_run)}, sections)


def resumed(domain: Domain[Any], given: Values, stored: Values, out: str) -> SweepSpec:
    """Returns the sweep stored in a folder; given flags must equal the stored flags.

    Args:
      domain: Domain of the experiments.
      given: Text or value of each given flag, by flag name.
      stored: Content of the sweep's `config.json`.
      out: Value of `--out`.

    Raises:
      ConfigError: A flag differs; the error names the first such flag, with both values.
    """
    if stored.get("script") != "sweep" or not set(SweepSpec._fields) <= set(stored):
        raise ConfigError(
            "resume", f"{out} must hold a sweep of this version of jaxrl-po sweep; choose another"
        )
    spec = SweepSpec(**{name: stored[name] for name in SweepSpec._fields})
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    if not all(isinstance(field, dict) for field in (*spec, code)):
        raise ConfigError("resume", f"{Path(out) / folder.CONFIG} is damaged; choose another out")
    found = sources.located(spec.flags, code, str(stored.get("out", "")), Path(out))
    record = RECORDS[domain.NAME]
    before = flags.current(spec.flags, {"": record}) | found
    options = settings.options_of(record, given, before)
    sections = settings.sections_of(domain, options)
    spec = SweepSpec(*(flags.current(each, sections) for each in spec))
    spec = spec._replace(flags=spec.flags | found)
    again = parse(domain, given, options)
    # Unlike the length of a run, the length of a sweep may not grow.
    fields = {x: y for x, y in settings.fields_of(sections).items() if y.resume != "grows"}
    now = {**again.flags, **again.swept, **again.drawn}
    before = {**dict.fromkeys(now, "left out"), **spec.flags, **spec.swept, **spec.drawn}
    folder.require_same(now, before | {"resolved": stored.get("resolved", {})}, fields, out)
    return spec._replace(flags=spec.flags | again.flags)


def refuse(options: Sweep, spec: SweepSpec) -> None:
    """Raises ConfigError for flags that a sweep cannot have, or that have no effect in a sweep."""
    for name, field in settings.fields_of({"": type(options)}).items():
        if field.sweep == "absent" and spec.flags.get(name):
            raise ConfigError(
                name, "must be left out: a sweep is one process, which evaluates each run itself"
            )
    if spec.drawn and not options.draws:
        raise ConfigError("draws", "must be at least 1 with a distribution, got 0")
    if options.draws and not spec.drawn:
        raise ConfigError(
            "draws",
            "must be left out without a distribution, e.g. "
            f"config.learning_rate=log_uniform(1e-5,1e-2), got {options.draws}",
        )
    if not options.total_steps:
        raise ConfigError("total_steps", "must be at least the steps of an iteration, got 0")


def check_groups(domain: Domain[Any], groups: Sequence[Group], options: RunOptions) -> str:
    """Returns the name of the score; raises the error of the first invalid combination."""
    for group in groups:
        placement = place_runs(options, len(group))
        if placement.cuts_params:
            raise ConfigError("mesh", f"must have no model axis in a sweep, got {options.mesh}")
        world, alone = domain.open_world(group[0].config), Placement(1, 1, 1)
        for each in group:
            job = domain.build(settings.settle(domain, each, world), alone, world)
            if job.host.scorer is not None:
                raise ConfigError("reward", "must be computed in the program of a sweep")
    return job.evaluation.score


def place_runs(options: RunOptions, combinations: int) -> Placement:
    """Returns the placement of the seeds of several combinations on devices."""
    runs = combinations * options.seeds
    return parallel.choose(options.devices, num_seeds=runs, num_rows=1, mesh=options.mesh)


def run_group(
    group: Group, options: Sweep, out: Path, title: str, domain: Domain[Any]
) -> tuple[Json, bool]:
    """Trains the combinations that share one program, each combination over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds` and
      `compile_seconds`; and whether a signal arrived.
    """
    world = domain.open_world(group[0].config)
    configs = [settings.settle(domain, each, world) for each in group]
    methods = [config.method for config in configs]
    job = domain.build(configs[0], place_runs(options, len(group)), world, methods)
    rows, interrupted = train_group(job, options.evaluations, out, title)
    scores = curves(rows)[job.evaluation.score]
    return {
        "steps": [row["step"] for row in rows],
        "scores": scores.reshape(len(group), options.seeds, -1).tolist(),
        "seconds": sum(row["time/seconds"] for row in rows),
        "compile_seconds": rows[-1]["time/compile_seconds"],
    }, interrupted


def train_group(job: TrainJob, evaluations: int, out: Path, title: str) -> tuple[list[Row], bool]:
    """Trains C settings of a method on S seeds each; continues a run that the folder holds.

    Args:
      job: Job of C·S runs, seeds innermost; the seeds of each setting have the same random numbers.
      evaluations: Maximal number of evaluations of each run, evenly spaced as far as lines consist
        of whole iterations.
      out: Folder of the runs of the program.
      title: Title of the program, for display.

    Returns:
      The lines of evaluations after training started, lists `[C·S]`; and whether a signal arrived,
      see `runner.Outcome`.

    Raises:
      KeyboardInterrupt: A signal arrived before the first line with an evaluation.
      runner.NoAction, PoolError: See `runner.run`.
    """
    out.mkdir(parents=True, exist_ok=True)
    iterations, score = job.length.iterations, job.evaluation.score
    every = -(-iterations // evaluations)
    job = dataclasses.replace(
        job,
        length=Length(iterations, job.length.steps_per_iteration, every),
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
    return rows, outcome.interrupted


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
        present = [flags.current(row["flags"], sections) for row in rows]
        written = [{name: errors.spell(x) for name, x in each.items()} for each in present]
        return [row | {"flags": each} for row, each in zip(rows, written, strict=True)]
    except (KeyError, TypeError, ValueError):
        raise ConfigError("resume", f"{path} is damaged; choose another out") from None


def split_flags(
    given: Values, fields: Mapping[str, Setting]
) -> tuple[Json, dict[str, list[str]], dict[str, str]]:
    """Splits flags into flags with one value, flags with the values of a grid, and distributions.

    Args:
      given: Value of each flag, or text that may describe a search, by flag name.
      fields: Metadata of each flag's field, by flag name; only some fields may vary in a sweep.

    Example:
      >>> fields = {name: Setting("") for name in ("config.gamma", "config.learning_rate")}
      >>> rates = {"config.gamma": "0.9,0.99", "config.learning_rate": "uniform(0,1)"}
      >>> split_flags({"seeds": 2} | {name: flags.FlagText(rates[name]) for name in rates}, fields)
      ({'seeds': 2}, {'config.gamma': ['0.9', '0.99']}, {'config.learning_rate': 'uniform(0,1)'})

    Raises:
      ConfigError: A distribution is unknown; the message suggests the nearest name.
    """
    kept, swept, drawn = Json(), dict[str, list[str]](), dict[str, str]()
    for name, value in given.items():
        text = value if isinstance(value, flags.FlagText) else ""
        found = DRAW.fullmatch(text.strip())
        varies = name in fields and fields[name].sweep == "varies"
        if varies and found:
            if found[1] not in DISTRIBUTIONS:
                close = errors.suggest(found[1], DISTRIBUTIONS)
                close = "; did you mean choice?" if "int" in found[1] else close
                raise ConfigError(name, f"must be a distribution of a sweep, got {value}{close}")
            drawn[name] = text.replace(" ", "")
        elif varies and "," in text:
            swept[name] = text.split(",")
        else:
            kept[name] = value
    return kept, swept, drawn


def combinations(
    spec: SweepSpec, draws: int, seed: int, *, rounded: bool = False
) -> list[Combination]:
    """Returns the distinct combinations of the values of the grid with the draws.

    Args:
      spec: Sweep with the grid and the distributions.
      draws: Number of joint draws of all flags that have a distribution.
      seed: Seed of the draws.
      rounded: Whether draws have four digits and equal draws repeat, as in folders without `EXACT`.

    Raises:
      ConfigError: The bounds of a distribution are invalid.

    Example:
      >>> combinations(SweepSpec({}, {"config.gamma": ["0.9", "0.99"]}, {}, {}), 0, 0)
      [{'config.gamma': '0.9'}, {'config.gamma': '0.99'}]
    """
    grid = [
        dict(zip(spec.swept, values, strict=True))
        for values in itertools.product(*spec.swept.values())
    ]
    generator = np.random.default_rng(seed)
    columns = {
        name: draw_values(name, written, draws, generator, rounded=rounded)
        for name, written in spec.drawn.items()
    }
    rows: list[Combination] = [{}]
    if columns:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    every = [each | row for each in grid for row in rows]
    return every if rounded else list({tuple(each.items()): each for each in every}.values())


def draw_values(
    name: str, written: str, count: int, generator: np.random.Generator, *, rounded: bool = False
) -> list[str]:
    """Draws values from `uniform(a,b)`, `log_uniform(a,b)` with 0 < a < b, or `choice(a,b,…)`."""
    found = DRAW.fullmatch(written)
    assert found is not None
    kind, values = found[1], found[2].split(",")
    if kind == "choice":
        return [values[i] for i in generator.integers(len(values), size=count)]
    try:
        low, high = map(float, values)
        if not (0 < high - low < np.inf and (low > 0 or kind == "uniform")):
            raise ValueError
    except ValueError:
        positive = "0 < " * (kind == "log_uniform")
        raise ConfigError(
            name, f"must be {kind}(low,high) with finite {positive}low < high, got {written}"
        ) from None
    if kind == "uniform":
        drawn = generator.uniform(low, high, count)
    else:
        drawn = np.exp(generator.uniform(np.log(low), np.log(high), count))
    return [f"{value:.4g}" if rounded else repr(float(value)) for value in drawn]


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
    lines = ["  ".join([f"{'mean':>9}", f"{'IQM':>9}", f"{'worst':>9}", f"{'seeds':>8}", *names])]
    for row in rows:
        scores = final_scores(row["scores"])
        numbers = [scores.mean(), float(statistics.interquartile_mean(scores)), scores.min()]
        values = (f"{row['flags'].get(name, ''):>{len(name)}}" for name in names)
        seeds = f"{statistics.seeds_with_score(scores):>8}"
        lines.append("  ".join([*(f"{number:>9.4g}" for number in numbers), seeds, *values]))
    return "\n".join(lines) + "\n"
