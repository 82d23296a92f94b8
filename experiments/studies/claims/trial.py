"""Tests a claim on many seeds: the command of each claim, and `python experiments/study.py`.

The claim is written down before anything is trained. In each setting each arm is tuned on seeds of
its own, and then trained on others: both in one program, compiled once. `table.txt` and
`verdict.png` hold the result; what is done is kept, and `--resume` continues.
"""

import dataclasses
import json
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import claim as claims
import jax
import numpy as np
from claim import Arm, Claim, Tuned

from jaxrl_po import config
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, static
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import keep_programs
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import control, flags, language, sweeping, user_code, vmapped
from jaxrl_po.run.experiment import (
    settings as run_settings,
)
from jaxrl_po.run.experiment.language_config import VERIFIER
from jaxrl_po.run.experiment.vmapped import Curves
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.host import vector_envs
from jaxrl_po.run.loop import interrupts
from jaxrl_po.run.store import folder

EXTENSIONS = 2  # of the grid of a tuned value, at most, while the best value lies at its edge
# Base seeds: those of tuning and of what is reported have nothing in common.
TUNING, REPORTED = 1, 0


@config.record
class Options:
    """Where a claim is, and where its results go."""

    claim: str = static("", "a function that returns a `Claim`, as file.py:name")
    out: str = static("", "folder for the results; new or empty, or see --resume and --overwrite")
    devices: str = static("auto", "devices to spread runs over; on a CPU, auto makes one per core")
    compilation_cache: str = static(
        "auto",
        "folder where compiled programs are kept for the next time; auto is one in the user's "
        "cache, empty keeps none",
    )
    resume: bool = static(False, "go on with the study in --out")
    overwrite: bool = static(False, "replace the study in --out")


def stated(claim: Claim) -> dict[str, Any]:
    """The claim as it is stored before anything runs, without the code of its scores."""
    code = ("script", "score", "objective", "limits")
    compared = [{**each._asdict(), "score": each.score is not None} for each in claim.comparisons]
    return {
        "script": "study",
        "command": claim.script.name,
        **{name: value for name, value in claim._asdict().items() if name not in code},
        "arms": {name: arm._asdict() for name, arm in claim.arms.items()},
        "comparisons": compared,
    }


def check(claim: Claim) -> None:
    """Raises ConfigError for a claim with an unknown name, or one that cannot be tested."""
    if not claim.comparisons:
        raise ConfigError("claim", "must have a comparison")
    if claim.warm_start and claim.script is not language.SCRIPT:
        raise ConfigError("claim", "only a claim with language.SCRIPT can have a warm_start")
    if claim.script is control.SCRIPT and claim.objective is Claim._field_defaults["objective"]:
        raise ConfigError("claim", 'must have an objective, as in last("greedy_return")')
    for each in claim.comparisons:
        for compared in (each.arm, each.than):
            if compared is not None and compared not in claim.arms:
                near = errors.suggest(compared, claim.arms)
                raise ConfigError("claim", f"a comparison names the arm {compared!r}{near}")
        for name in each.settings:
            if name not in claim.settings:
                near = errors.suggest(name, claim.settings)
                raise ConfigError("claim", f"a comparison names the setting {name!r}{near}")
    for name, arm in claim.arms.items():
        if len(arm.values) < 2 or list(arm.values) != sorted(set(arm.values)) or arm.values[0] <= 0:
            raise ConfigError(
                "claim",
                f"the values of arm {name!r} must be positive and ascending, two or more, got "
                f"{list(arm.values)}",
            )
        for setting in claim.settings_of(name):
            require_learner(claim, setting, arm)
            if claim.warm_start:
                run_settings.parse(language.SCRIPT, first(claim, setting))


def require_learner(claim: Claim, setting: str, arm: Arm) -> None:
    """Raises ConfigError for flags that do not parse, or that a study cannot train."""
    each = [settled(claim, setting, arm, value, []) for value in arm.values]
    for made, iterations in each:
        options = made.run
        if not iterations or iterations % claim.evaluations:
            raise ConfigError(
                "claim",
                f"{claim.evaluations} evaluations must divide the iterations of a run; "
                f"total_steps = {options.total_steps} makes {iterations} in {setting!r}",
            )
        reward = getattr(options, "reward", VERIFIER)
        if getattr(options, "tools", "") or reward != VERIFIER:
            raise ConfigError("claim", "reward and tools of a study must be in its program")
    if len({sweeping.static_part(config) for config, _ in each}) > 1:
        raise ConfigError("claim", f"{arm.tuned} cannot be tuned: only a number of config.* can")


def settled(
    claim: Claim, setting: str, arm: Arm, value: float, start: Sequence[str]
) -> tuple[Any, int]:
    """Returns the config of an arm in a setting, and the iterations of a run."""
    asked = {**claim.flags, **claim.settings[setting], **arm.flags, arm.tuned: value}
    given = [*flags.written(asked), *start]
    read = run_settings.parse(claim.script, given)
    # Environments on the host may have packages that are not here, and take no part in this.
    on_host = vector_envs.is_host(getattr(read.config.run, "env", ""))
    world = None if on_host else claim.script.open_world(read.config)
    return run_settings.settle(claim.script, read, world)


class Runs(NamedTuple):
    """The runs of an arm in a setting.

    Attributes:
      claim: the claim.
      setting: its name.
      name: of the arm.
      start: flags of the initial policy.
      devices: see `Options`.
    """

    claim: Claim
    setting: str
    name: str
    start: Sequence[str]
    devices: str

    @property
    def arm(self) -> Arm:
        """What is tuned."""
        return self.claim.arms[self.name]

    @property
    def seeds(self) -> tuple[int, int]:
        """See `Claim.seeds_of`."""
        return self.claim.seeds_of(self.setting, len(self.arm.values))

    def admits(self, value: float) -> bool:
        """Whether the tuned flag may have a value."""
        try:
            settled(self.claim, self.setting, self.arm, value, self.start)
        except ConfigError:
            return False
        return True

    def train(self, values: Sequence[float], seeds: int, base_seed: int) -> list[Curves]:
        """Curves for each value, `[S, E]`."""
        asked = [settled(self.claim, self.setting, self.arm, each, self.start) for each in values]
        configs, iterations = [each for each, _ in asked], asked[0][1]
        script, first = self.claim.script, configs[0]
        options = dataclasses.replace(
            first.run, seeds=seeds, seed=base_seed, devices=self.devices, mesh=""
        )
        with tempfile.TemporaryDirectory() as scratch:
            rows, _ = vmapped.train(
                script.build(first, vmapped.ALONE, script.open_world(first)),
                [each.method for each in configs],
                options,
                Path(scratch),
                f"{self.setting}, {self.name}",
                iterations=iterations,
                steps_per_iteration=1,
                evaluations=self.claim.evaluations,
            )
        curves = vmapped.curves(rows)
        parts = [slice(i * seeds, (i + 1) * seeds) for i in range(len(values))]
        return [{name: x[part] for name, x in curves.items()} for part in parts]


def beyond(edge: Sequence[float], count: int) -> list[float]:
    """Values beyond the second of two, in their ratio, ascending.

    Example:
      >>> beyond([2.0, 4.0], 3), beyond([2.0, 1.0], 1)
      ([8.0, 16.0, 32.0], [0.5])
    """
    near, end = edge
    return sorted(float(f"{end * (end / near) ** (i + 1):.3g}") for i in range(count))


def tune(runs: Runs, found: dict[float, float], keep: Callable[[], None]) -> tuple[float, bool]:
    """The value with the best objective, and whether there are worse ones on both sides of it.

    Args:
      runs: of the arm.
      found: value to objective, of what was tried; what is tried is added.
      keep: called after each addition.
    """
    claim, asked = runs.claim, list(runs.arm.values)
    extended = len(set(found) - set(asked)) // len(asked)  # by the study that is resumed
    for _ in range(extended, 1 + EXTENSIONS):
        if not set(asked) <= set(found):
            curves = runs.train(asked, runs.seeds[1], TUNING)
            for value, each in zip(asked, curves, strict=True):
                found[value] = float(np.mean(np.nan_to_num(claim.objective(each), nan=-np.inf)))
            keep()
        tried = sorted(found)
        best = max(tried, key=lambda value: found[value])
        if tried[0] < best < tried[-1]:
            return best, True
        further = beyond(tried[-2:] if best == tried[-1] else tried[1::-1], len(runs.arm.values))
        asked = list(filter(runs.admits, further))
        if not asked:
            break  # the best value is the last that the flag may have
    return best, False


def tune_and_train(runs: Runs, path: Path) -> Tuned:
    """An arm in a setting, tuned and trained, but for what the file already holds."""
    stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"tuning": []}
    found = {value: -np.inf if mean is None else mean for value, mean in stored["tuning"]}

    def keep(**more: Any) -> None:
        content = {"setting": runs.setting, "arm": runs.name, "tuning": sorted(found.items())}
        folder.write_json(path, content | more)

    if "curves" not in stored:
        value, inside = tune(runs, found, keep)
        curves = runs.train([value], runs.seeds[0], REPORTED)[0]
        keep(value=value, inside=inside, curves={name: x.tolist() for name, x in curves.items()})
        jax.clear_caches()
        stored = json.loads(path.read_text(encoding="utf-8"))
    curves = {name: np.array(x, np.float64) for name, x in stored["curves"].items()}
    return Tuned(stored["value"], stored["inside"], curves)


def run(claim: Claim, out: Path, devices: str) -> dict[str, dict[str, Tuned]]:
    """Tunes and trains every arm in every setting in which it is compared."""
    results: dict[str, dict[str, Tuned]] = {}
    place = out / "arms"
    place.mkdir(exist_ok=True)
    for i, setting in enumerate(claim.settings, 1):
        start = begin(claim, i, setting, place)
        results[setting] = {}
        for j, name in enumerate(claim.arms, 1):
            if setting in claim.settings_of(name):
                runs = Runs(claim, setting, name, start, devices)
                tuned = tune_and_train(runs, place / f"{i}.{j}.json")
                results[setting][name] = tuned
                print(f"{setting}: {claims.shown(claim, setting, name, tuned)}", flush=True)
    return results


def first(claim: Claim, setting: str) -> list[str]:
    """Flags of the initial policy of a setting, which no method has trained."""
    shared = {**claim.flags, **claim.settings[setting], "seeds": 1, "total_steps": 0}
    of_method = re.compile(r"algorithm$|config\.")
    own = {name: value for name, value in shared.items() if not of_method.match(name)}
    return flags.written(own | dict(claim.warm_start))


def begin(claim: Claim, number: int, setting: str, out: Path) -> list[str]:
    """Makes the initial policy of a setting, unless it is there; the flag that begins with it."""
    if not claim.warm_start:
        return []
    place = out / f"warm start {number}"
    if not (place / "summary.json").exists():
        launch.language([*first(claim, setting), f"--out={place}", "--overwrite"])
        if not (place / "summary.json").exists():
            raise UsageError(f"{place.name} did not finish; see {place}")
    return [f"--init_from={place}"]


def carry_out(claim: Claim, options: Options) -> int:
    """Tests a claim; returns the exit status."""
    stored = folder.inspect(options.out, resume=options.resume, overwrite=options.overwrite)
    parallel.split(options.devices)
    check(claim)
    said = json.loads(json.dumps(stated(claim)))
    for name, value in said.items():
        if stored and stored.get(name) != value:
            raise ConfigError(
                "resume",
                f"{name} of the claim must be as stated in {options.out} before anything ran; "
                "choose another out",
            )
    keep_programs(options.compilation_cache)
    with folder.claim(options.out, overwrite=options.overwrite) as out, interrupts.kept(out):
        folder.write_settings(out, said)
        results = interrupts.in_thread(run, claim, out, options.devices)
        outcomes = claims.judge(claim, results)
        text = claims.table(claim, results, outcomes)
        (out / "table.txt").write_text(text, encoding="utf-8")
        told = [{**each._asdict(), "comparison": str(each.comparison)} for each in outcomes]
        verdict = {"verdict": claims.verdict(outcomes), "comparisons": told}
        folder.write_json(out / "verdict.json", verdict)
        picture = out / "verdict.png"
        with plotting.beside(picture):
            rows = claims.rows(outcomes)
            plotting.save_differences(rows, claim.statement, claim.measure, picture)
    print(text, end="")
    print(f"see {picture}")
    return 0


def main(argv: Sequence[str], claim: Claim | None = None) -> int:
    """Runs the command, or the claim of a file that is itself run; returns its exit status."""
    summary = "Tests a claim about methods on many seeds."
    options = flags.ask(argv, "python experiments/study.py", summary, Options)
    if options is None:
        return 0
    if claim is None:
        claim = user_code.make("claim", options.claim)
        if not isinstance(claim, Claim):
            raise ConfigError("claim", f"{options.claim} must return a Claim, got {claim!r}")
    return carry_out(claim, options)
