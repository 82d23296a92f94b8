"""Command of each claim and of `python experiments/study.py`: tests a claim on many seeds.

The claim is stored before any training starts. In each setting each arm is tuned on its own seeds,
and then trained on other seeds, each time by `run.sweep` in a subfolder of `arms`. The files
`table.txt` and `verdict.png` hold the result; finished sweeps are not repeated, and `--resume`
continues a study.
"""

import argparse
import json
import re
import runpy
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import claim as claims
import figure
import numpy as np
from claim import Arm, Claim, Curves, Tuned

from jaxrl_po import run
from jaxrl_po.config import ConfigError

EXTENSIONS = 2  # largest number of extensions of a tuned grid, while the best value lies at an edge
# Base seeds, chosen so that tuning and reported runs have no seed in common.
TUNING, REPORTED = 1, 0
ARMS, CONFIG = "arms", "config.json"
FILES = ("table.txt", "verdict.json", "verdict.png", CONFIG)
ON_HOST = ("reward", "tools")  # flags of code that runs outside the compiled program


def parser(claim: Claim | None = None) -> argparse.ArgumentParser:
    """Returns the parser of the command's flags.

    `--claim` is required if the script has no claim of its own.
    """
    made = argparse.ArgumentParser(
        "python experiments/study.py", description=__doc__, allow_abbrev=False
    )
    if claim is None:
        made.add_argument("--claim", default="", help="function that returns a Claim, file.py:name")
    made.add_argument("--out", default="", help="folder for the results")
    made.add_argument("--devices", default="auto", help="devices of the runs; see jaxrl-po control")
    made.add_argument("--compilation_cache", default="auto", help="folder of compiled programs")
    made.add_argument("--resume", action="store_true", help="continue the study in --out")
    made.add_argument("--overwrite", action="store_true", help="replace the study in --out")
    return made


def experiment(flags: Mapping[str, Any]) -> run.Experiment:
    """Returns the experiment that flags describe.

    The name of a flag may have a section and a dot.
    """
    plain = {name: value for name, value in flags.items() if "." not in name}
    over = {name: value for name, value in flags.items() if "." in name}
    return run.Experiment(**plain, over=over)


def stated(claim: Claim) -> dict[str, Any]:
    """Returns the claim in its stored form, without the functions that compute scores."""
    code = ("score", "objective", "limits")
    compared = [{**each._asdict(), "score": each.score is not None} for each in claim.comparisons]
    return {
        "script": "study",
        **{name: value for name, value in claim._asdict().items() if name not in code},
        "arms": {name: arm._asdict() for name, arm in claim.arms.items()},
        "comparisons": compared,
    }


def check(claim: Claim) -> None:
    """Raises ConfigError for a claim with an unknown name, or for a claim that cannot be tested."""
    if not claim.comparisons:
        raise ConfigError("claim", "must have a comparison")
    for each in claim.comparisons:
        named = (
            *(("arm", name, claim.arms) for name in (each.arm, each.than) if name is not None),
            *(("setting", name, claim.settings) for name in each.settings),
        )
        for kind, name, known in named:
            if name not in known:
                names = f"choose one of {', '.join(known)}"
                raise ConfigError("claim", f"a comparison names the {kind} {name!r}; {names}")
    for name, arm in claim.arms.items():
        if len(arm.values) < 2 or list(arm.values) != sorted(set(arm.values)) or arm.values[0] <= 0:
            raise ConfigError(
                "claim",
                f"the values of arm {name!r} must be positive and ascending, two or more, got "
                f"{list(arm.values)}",
            )
        for setting in claim.settings_of(name):
            asked = [experiment(claim.flags_of(setting, arm, value)) for value in arm.values]
            if set(ON_HOST) & asked[0].settings.keys():
                raise ConfigError("claim", "reward and tools of a study must be in its program")
            control = "task" not in asked[0].settings
            if control and claim.objective is Claim._field_defaults["objective"]:
                raise ConfigError("claim", 'must have an objective, as in last("greedy_return")')
            if claim.warm_start:
                experiment(first(claim, setting))


class Runs(NamedTuple):
    """Runs of an arm in a setting.

    Attributes:
      claim: Claim of the study.
      setting: Name of the setting.
      name: Name of the arm.
      shared: Flags of all runs of the study in this setting.
      place: Folder that holds the sweeps.
    """

    claim: Claim
    setting: str
    name: str
    shared: Mapping[str, Any]
    place: Path

    @property
    def arm(self) -> Arm:
        """Arm whose flag is tuned."""
        return self.claim.arms[self.name]

    @property
    def seeds(self) -> tuple[int, int]:
        """Numbers of seeds for tuning and for reported runs, see `Claim.seeds_of`."""
        return self.claim.seeds_of(self.setting, len(self.arm.values))

    def admits(self, value: float) -> bool:
        """Returns whether the range of the tuned flag includes a value."""
        try:
            experiment(self.claim.flags_of(self.setting, self.arm, value))
        except ConfigError:
            return False
        return True

    def train(self, values: Sequence[float], seeds: int, base_seed: int) -> list[Curves]:
        """Returns curves for each tuned value, `[S, E]`.

        A finished sweep is loaded, not trained again.
        """
        kind = "tuning" if base_seed == TUNING else "reported"
        place = self.place / " ".join([kind, *(f"{value:g}" for value in values)])
        if not (place / "table.txt").exists():
            print(f"{self.setting}, {self.name}: {kind}", flush=True)
            asked = self.claim.flags_of(self.setting, self.arm, values[0])
            run.sweep(
                experiment({**asked, **self.shared, "seeds": seeds, "seed": base_seed}),
                over={self.arm.tuned: values},
                evaluations=self.claim.evaluations,
                out=place,
                resume=(place / CONFIG).exists(),
            )
        curves = curves_of(place)
        parts = [slice(i * seeds, (i + 1) * seeds) for i in range(len(values))]
        return [{name: x[part] for name, x in curves.items()} for part in parts]


def curves_of(place: Path) -> Curves:
    """Returns the curves of a sweep, `[N, E]`, in the order of its values.

    NaN for missing samples.
    """
    parts = []
    for path in sorted(place.glob("programs/*/metrics.jsonl"), key=lambda x: int(x.parent.name)):
        lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        rows = [row for row in lines if row["iteration"]]
        names = [name for name, value in rows[-1].items() if isinstance(value, list)]
        parts.append({x: np.array([row.get(x) for row in rows], np.float64).T for x in names})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def beyond(edge: Sequence[float], count: int) -> list[float]:
    """Returns the values that follow two values in the same ratio, in ascending order.

    Example:
      >>> beyond([2.0, 4.0], 3), beyond([2.0, 1.0], 1)
      ([8.0, 16.0, 32.0], [0.5])
    """
    near, end = edge
    return sorted(float(f"{end * (end / near) ** (i + 1):.3g}") for i in range(count))


def tune(runs: Runs) -> tuple[float, bool]:
    """Returns the value with the best objective, and whether values on both sides are worse."""
    claim, asked, found = runs.claim, list(runs.arm.values), dict[float, float]()
    for _ in range(1 + EXTENSIONS):
        curves = runs.train(asked, runs.seeds[1], TUNING)
        for value, each in zip(asked, curves, strict=True):
            found[value] = float(np.mean(np.nan_to_num(claim.objective(each), nan=-np.inf)))
        tried = sorted(found)
        best = max(tried, key=lambda value: found[value])
        if tried[0] < best < tried[-1]:
            return best, True
        further = beyond(tried[-2:] if best == tried[-1] else tried[1::-1], len(runs.arm.values))
        asked = list(filter(runs.admits, further))
        if not asked:
            break  # the best value is the largest or smallest that the flag admits
    return best, False


def carry_out_arms(claim: Claim, out: Path, shared: Mapping[str, Any]) -> dict[str, Any]:
    """Tunes and trains every arm in every setting in which the arm is compared."""
    results: dict[str, dict[str, Tuned]] = {}
    for i, setting in enumerate(claim.settings, 1):
        begun = {**shared, **begin(claim, setting, out / f"warm start {i}", shared)}
        results[setting] = {}
        for j, name in enumerate(claim.arms, 1):
            if setting in claim.settings_of(name):
                runs = Runs(claim, setting, name, begun, out / f"{i}.{j}")
                value, inside = tune(runs)
                tuned = Tuned(value, inside, runs.train([value], runs.seeds[0], REPORTED)[0])
                results[setting][name] = tuned
                print(f"{setting}: {claims.shown(claim, setting, name, tuned)}", flush=True)
    return results


def first(claim: Claim, setting: str) -> dict[str, Any]:
    """Returns the flags that train the initial policy of a setting, before any method trains it."""
    shared = {**claim.flags, **claim.settings[setting], "seeds": 1, "total_steps": 0}
    of_method = re.compile(r"algorithm$|config\.")
    own = {name: value for name, value in shared.items() if not of_method.match(name)}
    return own | dict(claim.warm_start)


def begin(claim: Claim, setting: str, place: Path, shared: Mapping[str, Any]) -> dict[str, str]:
    """Trains the initial policy of a setting, unless it exists.

    Returns the flag that loads the policy.
    """
    if not claim.warm_start:
        return {}
    if not (place / "summary.json").exists():
        cache = {"compilation_cache": shared["compilation_cache"]}
        asked = {**first(claim, setting), **cache, "out": str(place), "overwrite": True}
        run.train(experiment(asked))
    return {"init_from": str(place)}


def prepare(out: Path, *, resume: bool, overwrite: bool) -> dict[str, Any]:
    """Returns the stored claim of a study to resume, or an empty claim for a new study.

    Writes no files.

    Raises:
      ConfigError: the folder holds files and neither `--resume` nor `--overwrite` is set, or the
        folder does not hold a study.
    """
    if resume and overwrite:
        raise ConfigError("resume", "must be left out with overwrite: give one of them")
    if not out.exists() or not any(out.iterdir()):
        return {}
    if not (resume or overwrite):
        remedy = "give resume to continue, overwrite to replace the study, or choose another"
        raise ConfigError("out", f"{out} already holds files; {remedy}")
    stored = (
        json.loads((out / CONFIG).read_text(encoding="utf-8")) if (out / CONFIG).exists() else {}
    )
    if stored.get("script") != "study":
        raise ConfigError("out", f"{out} must hold a study; choose another")
    return stored if resume else {}


def carry_out(claim: Claim, options: argparse.Namespace) -> int:
    """Tests a claim; returns the exit status."""
    if not options.out:
        raise ConfigError("out", "must name a folder for the results, e.g. runs/first")
    out = Path(options.out)
    stored = prepare(out, resume=options.resume, overwrite=options.overwrite)
    check(claim)
    said = json.loads(json.dumps(stated(claim)))
    for name, value in said.items():
        if stored and stored.get(name) != value:
            raise ConfigError(
                "resume",
                f"{name} of the claim must be as stated in {out} before anything ran; choose "
                "another out",
            )
    if options.overwrite:
        shutil.rmtree(out / ARMS, ignore_errors=True)
        for name in FILES:
            (out / name).unlink(missing_ok=True)
    (out / ARMS).mkdir(parents=True, exist_ok=True)
    (out / CONFIG).write_text(json.dumps(said, indent=2, ensure_ascii=False), encoding="utf-8")
    shared = {"devices": options.devices, "compilation_cache": options.compilation_cache}
    results = carry_out_arms(claim, out / ARMS, shared)
    outcomes = claims.judge(claim, results)
    text = claims.table(claim, results, outcomes)
    (out / "table.txt").write_text(text, encoding="utf-8")
    told = [{**each._asdict(), "comparison": str(each.comparison)} for each in outcomes]
    verdict = {"verdict": claims.verdict(outcomes), "comparisons": told}
    (out / "verdict.json").write_text(json.dumps(verdict, indent=2), encoding="utf-8")
    figure.save(outcomes, claim.statement, claim.measure, out / "verdict.png")
    print(text, end="")
    print(f"see {out / 'verdict.png'}")
    return 0


def load(source: str) -> Claim:
    """Returns the claim that a function in a file returns; `source` is `file.py:name`."""
    path, _, name = source.rpartition(":")
    if not Path(path).is_file():
        raise ConfigError("claim", f"must be a file and a name, file.py:name, got {source!r}")
    try:
        found = runpy.run_path(path, run_name=Path(path).stem)
        if name not in found:
            raise AttributeError(f"{path} holds no {name!r}")
        claim = found[name]()
    except Exception as error:
        raise ConfigError("claim", f"{source}: {error}") from error
    if not isinstance(claim, Claim):
        raise ConfigError("claim", f"{source} must return a Claim, got {claim!r}")
    return claim


def main(argv: Sequence[str], claim: Claim | None = None) -> int:
    """Runs the command, or the claim of a script; returns the exit status."""
    options = parser(claim).parse_args(argv)
    return carry_out(load(options.claim) if claim is None else claim, options)


def entry(claim: Claim | None = None) -> NoReturn:
    """Runs `main` and exits with its status.

    For invalid flags the status is 2, with one line of message.
    """
    try:
        sys.exit(main(sys.argv[1:], claim))
    except ConfigError as error:
        print(f"error: --{' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; --resume continues", file=sys.stderr)
        sys.exit(130)
