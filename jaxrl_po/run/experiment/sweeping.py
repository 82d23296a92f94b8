"""Sweeps: a grid or random draws of hyperparameters, each on several seeds, and the best of them.

Combinations that differ in numbers of the method alone train vmapped, as one program.
"""

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.experiment import control, flags, language, search, settings, user_code, vmapped
from jaxrl_po.run.experiment.assembly import AnyScript
from jaxrl_po.run.experiment.control_config import ControlOptions
from jaxrl_po.run.experiment.experiment import Experiment, with_names
from jaxrl_po.run.experiment.language_config import LanguageOptions
from jaxrl_po.run.experiment.options import Options, common_option
from jaxrl_po.run.experiment.search import Asked, Combination
from jaxrl_po.run.experiment.settings import Settings
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import interrupts
from jaxrl_po.run.loop.interrupts import Interrupted
from jaxrl_po.run.store import folder, metrics, provenance, sources

PROGRAMS = "programs"  # folder of their runs

Group = Sequence[Settings[Any]]  # of the combinations that share one program


@config.record
class Search:
    """The search of a sweep."""

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
    """A sweep in control as a whole."""


@config.record
class LanguageSweep(Search, LanguageOptions):
    """A sweep of a language model as a whole."""


Sweep = ControlSweep | LanguageSweep
SUMMARY = (
    "Searches hyperparameters: give a flag several values, separated by commas, or a distribution."
)
SCRIPTS: dict[str, AnyScript] = {
    script.name: script._replace(name="sweep", summary=SUMMARY, options=options)
    for script, options in ((control.SCRIPT, ControlSweep), (language.SCRIPT, LanguageSweep))
}
SCRIPT = SCRIPTS["control"]  # of the command


class Swept(NamedTuple):
    """What a sweep leaves.

    Attributes:
      rows: one for each combination, best first: `flags`, `steps` `[E]` and `scores` `[S, E]`.
      best: flag name to value of the best one, of all flags that were set or tuned.
      folder: with `sweep.json`, the lines of all runs in `programs/*/metrics.jsonl`, and once it is
        finished `table.txt` and `sweep.png`.
    """

    rows: list[dict[str, Any]]
    best: dict[str, Any]
    folder: Path

    def __repr__(self) -> str:
        return f"Swept(rows=<{len(self.rows)} items>, best={self.best!r}, folder={self.folder!r})"


def sweep(experiment: Experiment, *, over: Mapping[str, Any], **options: Any) -> Swept:
    """Searches hyperparameters of an experiment.

    A language model's warm start is part of each run; runs with `init_from` share an earlier one.

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
    if not isinstance(experiment, Experiment):
        raise ConfigError("experiment", "must be an Experiment: run.Experiment(env=…)")
    script, given = SCRIPTS[experiment.script], with_names({**experiment.settings, **options})
    sections = settings.sections_of(script, settings.options_of(script, given))
    for name, values in over.items():
        if isinstance(values, str):
            given[name] = flags.Text(values)
            continue
        if not isinstance(values, list | tuple) and np.ndim(values) != 1:
            raise ConfigError(
                "over", f"{name} must have a list of values or a text, got {values!r}"
            )
        each = [flags.convert({name: value}, sections)[name] for value in values]
        given[name] = flags.Text(",".join(map(errors.shown, each)))
    return carry_out(script, given)


def carry_out(script: AnyScript, given: Mapping[str, Any], *, leave_early: bool = False) -> Swept:
    """Carries out a sweep, or continues it.

    Args:
      script: Member of `SCRIPTS`.
      given: Flag name to text or value; see `flags.tokenize`.
      leave_early: Whether a signal ends the process, as of a command; else see `sweep`.

    Raises:
      ConfigError: Before anything is trained or an earlier sweep is overwritten.
      RunError: The folder can no longer be written.
      NoAction, PoolError: See `runner.run`.
    """
    options = settings.options_of(script, given)
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    asked = resumed(script, given, stored, options.out) if stored else read(script, given, options)
    options = settings.options_of(script, asked.flags, asked.tuned)
    sections = settings.sections_of(script, options)
    refuse(options, asked)
    keep_programs(options.compilation_cache)
    rounded = bool(stored) and not stored.get(search.EXACT)
    groups = group(script, asked, options, rounded=rounded)
    with flags.locating(sections):
        score = check(script, [[one for _, one in each] for each in groups], options)
    with (
        flags.locating(sections),
        folder.claim(options.out, overwrite=options.overwrite) as out,
        interrupts.kept(out, leave_early=leave_early),
    ):
        fields = settings.fields_of(sections)
        lasting = {
            name: value
            for name, value in asked.flags.items()
            if fields[name].stored and name != "out"
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
        rows = done(out / "sweep.json", sections) if options.resume else []
        try:
            for number, each in enumerate(groups, 1):
                if all(combination in [row["flags"] for row in rows] for combination, _ in each):
                    continue
                title = f"program {number} of {len(groups)}"
                place = out / PROGRAMS / str(number)
                of_group = [one for _, one in each], options, place, title, script
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
                axis = f"final {metrics.axis(score)}"
                plotting.save_sweep(scores, axis, out / "sweep.png")
        except KeyboardInterrupt:
            raise Interrupted(swept=Swept(rows, best(script, asked, rows, sections), out)) from None
    return Swept(rows, best(script, asked, rows, sections), out)


def group(
    script: AnyScript, asked: Asked, options: Sweep, *, rounded: bool
) -> list[list[tuple[Combination, Settings[Any]]]]:
    """Groups the combinations, with their settings, by the program that they share.

    Args:
      script: member of `SCRIPTS`.
      asked: settings and values of the sweep.
      options: options of the sweep as a whole.
      rounded: whether the draws are those of an earlier version; see `search.combinations`.
    """
    combinations = search.combinations(asked, options.draws, options.seed, rounded=rounded)
    total = math.prod(map(len, asked.swept.values())) * (options.draws or 1)
    if len(combinations) < total:
        print(f"{len(combinations)} of {total} combinations are distinct; each trains once")
    groups: dict[str, list[tuple[Combination, Settings[Any]]]] = {}
    for combination in combinations:
        made = asked.settings(script, combination)
        groups.setdefault(search.static_part(made.config), []).append((combination, made))
    return list(groups.values())


def best(
    script: AnyScript, asked: Asked, rows: list[dict[str, Any]], sections: Mapping[str, type]
) -> dict[str, Any]:
    """Returns the flags of the first row that were set or tuned; empty without a row."""
    if not rows:
        return {}
    first = asked.settings(script, rows[0]["flags"])
    config, _ = settings.settle(script, first, script.open_world(first.config))
    settled, fields = flags.flatten(config.sections()), settings.fields_of(sections)
    names = dict.fromkeys([*asked.tuned, *asked.flags, *asked.swept, *asked.drawn])
    varying = [name for name in names if name in settled and fields[name].sweep == "varies"]
    return {name: settled[name] for name in varying}


def read(script: AnyScript, given: Mapping[str, Any], options: Options) -> Asked:
    """Returns the sweep that flags ask for."""
    initial = script.initial(options)
    sections = settings.sections_of(script, options, initial)
    kept, swept, drawn = search.split(given, settings.fields_of(sections))
    script.require_known(options, kept, initial)
    fixed = flags.convert(kept, sections)
    of_run = options, fixed, initial
    tuned = flags.current({**script.tuned(*of_run), **script.presets(*of_run)}, sections)
    return Asked(fixed | sources.absolute(fixed), swept, drawn, tuned)


def resumed(
    script: AnyScript, given: Mapping[str, Any], stored: Mapping[str, Any], out: str
) -> Asked:
    """Returns the sweep stored in a folder; flags may be left out, or repeated as they were.

    Args:
      script: Member of `SCRIPTS`.
      given: Flag name to text or value.
      stored: Content of the sweep's `config.json`.
      out: Value of `--out`.

    Raises:
      ConfigError: Names the first flag that differs, with both values.
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
    before = flags.current(asked.flags, {"": script.options}) | found
    options = settings.options_of(script, given, before)
    sections = settings.sections_of(script, options)
    asked = Asked(*(flags.current(each, sections) for each in asked))
    asked = asked._replace(flags=asked.flags | found)
    again, fields = read(script, given, options), settings.fields_of(sections)
    may_change = {
        name
        for name, field in fields.items()
        if field.resume == "any" or not field.stored or name in code
    }
    before = {**asked.flags, **asked.swept, **asked.drawn}
    for name, value in {**again.flags, **again.swept, **again.drawn}.items():
        if name in code and sources.digests({name: value}) == {name: code[name]}:
            continue
        if (name not in may_change or name in code) and value != before.get(name):
            wanted = errors.shown(before[name]) if name in before else "left out"
            raise ConfigError(
                name,
                f"must be {wanted}, as in the sweep in {out} that is resumed, got "
                f"{errors.shown(value)}; leave it out, or choose another out",
            )
    changed = {name: value for name, value in again.flags.items() if name in may_change}
    return asked._replace(flags=asked.flags | changed)


def refuse(options: Sweep, asked: Asked) -> None:
    """Raises ConfigError for flags that a sweep cannot have, or that have no effect in it."""
    for name, field in settings.fields_of({"": type(options)}).items():
        if field.sweep == "absent" and asked.flags.get(name):
            raise ConfigError(
                name, "must be left out: a sweep is one process, which evaluates each run itself"
            )
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


def check(script: AnyScript, groups: Sequence[Group], options: Options) -> str:
    """Returns the name of the score; raises the error of the first combination that is wrong."""
    for group in groups:
        placement = parallel.choose(
            options.devices, num_seeds=len(group) * options.seeds, num_rows=1, mesh=options.mesh
        )
        if placement.cuts_params:
            raise ConfigError("mesh", f"must have no model axis in a sweep, got {options.mesh}")
        world = script.open_world(group[0].config)
        for each in group:
            setup = script.build(settings.settle(script, each, world)[0], vmapped.ALONE, world)
            if setup.rewarded is not None:
                raise ConfigError("reward", "must be computed in the program of a sweep")
    return setup.score


def run(
    group: Group, options: Sweep, place: Path, title: str, script: AnyScript
) -> tuple[dict[str, Any], bool]:
    """Trains the combinations that share one program, each over all seeds.

    Returns:
      `steps` `[E]` and `scores` `[C, S, E]` (C combinations, S seeds, E evaluations), `seconds` and
      `compile_seconds`; and whether a signal came.
    """
    world = script.open_world(group[0].config)
    settled = [settings.settle(script, each, world) for each in group]
    first = settled[0][0]
    setup = script.build(first, vmapped.ALONE, world)
    rows, interrupted = vmapped.train(
        setup,
        [config.method for config, _ in settled],
        options,
        place,
        title,
        iterations=settled[0][1],
        steps_per_iteration=script.steps(first, world),
        evaluations=options.evaluations,
    )
    scores = vmapped.curves(rows)[setup.score]
    result = {
        "steps": [row["step"] for row in rows],
        "scores": scores.reshape(len(group), options.seeds, -1).tolist(),
        "seconds": sum(row["time/seconds"] for row in rows),
        "compile_seconds": rows[-1]["time/compile_seconds"],
    }
    return result, interrupted


def done(path: Path, sections: Mapping[str, type]) -> list[dict[str, Any]]:
    """Returns the combinations that are finished; raises ConfigError for a damaged file."""
    try:
        rows: list[dict[str, Any]] = (
            json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        )
        present = [flags.current(row["flags"], sections) for row in rows]
        written = [{name: errors.shown(x) for name, x in each.items()} for each in present]
        return [row | {"flags": each} for row, each in zip(rows, written, strict=True)]
    except (KeyError, TypeError, ValueError):
        raise ConfigError("resume", f"{path} is damaged; choose another out") from None
