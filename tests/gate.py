"""Runs every wrong program against the tests that must notice it, in parallel: `make gate`.

    python tests/gate.py                     # all; an interrupted call on the same files continues
    python tests/gate.py --changed=HEAD~3    # those whose module or killing test changed since
    python tests/gate.py 'the first turn counts'

The script exits with 1 if a wrong program survives. The tests of each file must first pass on the
correct program. The flag `--results=FILE` writes the result of the call, see `counts`.
"""

import argparse
import ast
import collections
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))

from impostors import ROOT, Impostor, Outcome, finished, path_of, prepare, start
from results import Result
from wrong_programs import WRONG, Wrong, table

TESTS = ROOT / "tests"
FOLDERS = (TESTS, TESTS / "support")
FOLDER = ROOT / ".gate"
SOUND = "the program as it is"
LIMIT = 600.0  # seconds of processor time that one trial may take


class Trial(NamedTuple):
    """Trial that runs tests of one file on one program.

    Attributes:
      wrong: Wrong program under test; None for the correct program.
      tests: Test files or node ids in `tests/`.
    """

    wrong: Wrong | None
    tests: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        """Key under which the trial's results are stored."""
        return (self.wrong.name if self.wrong else SOUND, " ".join(self.tests))


def trials(chosen: Iterable[Wrong]) -> list[list[Trial]]:
    """Returns lists of trials, one per test file, longest first; each begins with the correct
    program."""
    by_file = collections.defaultdict(list)
    for wrong in chosen:
        for test in wrong.tests:
            by_file[test.partition("::")[0]].append(Trial(wrong, (test,)))
    for file, found in by_file.items():
        named = {test for trial in found for test in trial.tests}
        by_file[file].insert(0, Trial(None, (file,) if file in named else tuple(sorted(named))))
    return sorted(by_file.values(), key=len, reverse=True)


def helpers(file: str) -> set[str]:
    """Returns the name of a file and of all test files and helpers that the file imports, directly
    or indirectly."""
    found, ahead = set(), [file]
    while ahead:
        name = ahead.pop()
        path = next((x / name for x in FOLDERS if (x / name).exists()), None)
        if name in found or path is None:
            continue
        found.add(name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                ahead.append(f"{node.module}.py")
            elif isinstance(node, ast.Import):
                ahead += [f"{alias.name}.py" for alias in node.names]
    return found


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def changed_since(commit: str) -> list[Wrong]:
    """Returns the wrong programs that are new or whose module or test has changed since a
    commit."""
    files = {*git("diff", "--name-only", commit).split()}
    files |= {*git("ls-files", "--others", "--exclude-standard").split()}
    tests = {f.rpartition("/")[2] for f in files if f.startswith("tests/")}
    known = {
        wrong
        for file in git("ls-tree", "--name-only", commit, "tests/wrong/").split()
        for wrong in table(git("show", f"{commit}:{file}"))
    }
    return [
        wrong
        for wrong in WRONG
        if wrong not in known
        or str(Path(path_of(wrong.module)).relative_to(ROOT)) in files
        or any(helpers(test.partition("::")[0]) & tests for test in wrong.tests)
    ]


def digest() -> str:
    """Returns a digest of every file on which a result depends."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard").split("\n")
    code = [
        ROOT / name
        for name in sorted(set(names))
        if name.endswith((".py", ".txt", ".json", ".toml"))
    ]
    return hashlib.sha256(b"\0".join(p.read_bytes() for p in code if p.is_file())).hexdigest()


def results(path: Path) -> dict[tuple[str, str], Outcome]:
    """Returns the results of an earlier call on the same files."""
    if not path.exists():
        return {}
    rows = (line for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}"))
    return {tuple(row["key"]): Outcome(*row["outcome"]) for row in map(json.loads, rows)}


def run(lists: list[list[Trial]], workers: int) -> Iterator[tuple[Trial, Outcome]]:
    """Runs all trials; trials of one file run one after another and share compiled programs."""
    ahead = collections.deque(lists)
    at: dict[str, collections.deque[Trial]] = {
        f"gate{i}": collections.deque() for i in range(workers)
    }
    running: dict[int, tuple[str, Trial]] = {}

    def begin(worker: str) -> None:
        while not at[worker] and ahead:
            at[worker].extend(ahead.popleft())
        if at[worker]:
            trial = at[worker].popleft()
            impostor = None
            if trial.wrong is not None:
                text = Path(path_of(trial.wrong.module)).read_text(encoding="utf-8")
                impostor = Impostor(trial.wrong.module, ast.parse(trial.wrong.source(text)))
            tests = ["-m", "", *(str(TESTS / test) for test in trial.tests)]
            log = str(FOLDER / f"{worker}.log")
            running[start(impostor, tests, LIMIT, worker=worker, log=log)] = worker, trial

    for worker in at:
        begin(worker)
    while running:
        child, outcome = finished()
        worker, trial = running.pop(child)
        if trial.wrong is None and outcome.word != "passed":
            print((FOLDER / f"{worker}.log").read_text(encoding="utf-8", errors="replace"))
        yield trial, outcome
        begin(worker)


def counts(found: dict[tuple[str, str], Outcome]) -> dict[str, int]:
    """Returns how many wrong programs were killed, how many survive, and how many have no verdict.

    Returns:
      `passed`: Wrong programs that every named test killed. `failed`: Wrong programs that a named
      test let pass, and sets of tests that fail on the correct program. `skipped`: Wrong programs
      that were not chosen, or that an interrupted call did not reach.
    """
    words: dict[str, set[str]] = collections.defaultdict(set)
    for (name, tests), outcome in found.items():
        words[f"{SOUND}: {tests}" if name == SOUND else name].add(outcome.word)
    sound = [words[name] for name in words if name.startswith(SOUND)]
    failed = sum(each != {"passed"} for each in sound)
    passed = skipped = 0
    for wrong in WRONG:
        reached = all((wrong.name, test) in found for test in wrong.tests)
        passed += reached and words[wrong.name] == {"failed"}
        failed += bool(words[wrong.name] - {"failed"})
        skipped += not reached and words[wrong.name] <= {"failed"}
    return {"passed": passed, "failed": failed, "skipped": skipped}


def report(found: dict[tuple[str, str], Outcome], chosen: list[Wrong]) -> bool:
    """Prints the table of kills and errors; returns True without errors."""
    table: dict[str, list[float]] = collections.defaultdict(lambda: [0, 0, 0.0])
    survivors = []
    for wrong in chosen:
        outcomes = [found[wrong.name, test] for test in wrong.tests]
        alive = [test for test in wrong.tests if found[wrong.name, test].word != "failed"]
        survivors += [f"  {wrong.name}: {found[wrong.name, test].word}: {test}" for test in alive]
        row = table[wrong.module]
        row[0], row[1] = row[0] + 1, row[1] + (not alive)
        row[2] += sum(outcome.seconds for outcome in outcomes)
    print(f"\n{'module':32} {'wrong':>6} {'killed':>7} {'seconds':>8}")
    for module, (count, killed, seconds) in sorted(table.items()):
        print(f"{module:32} {count:6} {killed:7} {seconds:8.0f}")
    for (name, tests), outcome in found.items():
        if name == SOUND and outcome.word != "passed":
            survivors.append(f"  {SOUND}: {outcome.word}: {tests}")
    if survivors:
        print("\nshould have been killed, or have passed:", *survivors, sep="\n")
    killed = sum(int(row[1]) for row in table.values())
    print(f"{killed} of {len(chosen)} wrong programs killed")
    return not survivors


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="wrong programs (default: all)")
    parser.add_argument("--changed", metavar="COMMIT", help="those that changed since this commit")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--results", metavar="FILE", help="JSON file for the result")
    arguments = parser.parse_args()
    chosen = changed_since(arguments.changed) if arguments.changed else list(WRONG)
    if arguments.names:
        chosen = [wrong for wrong in chosen if wrong.name in arguments.names]
        if missing := set(arguments.names) - {wrong.name for wrong in chosen}:
            parser.error(f"no such program: {', '.join(sorted(missing))}")
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{digest()[:16]}.jsonl"
    earlier = {} if arguments.names else results(path)
    found = dict(earlier)
    result = Result(arguments.results) if arguments.results else None
    try:
        run_all(chosen, found, path, arguments.workers)
    finally:
        if result is not None:  # seconds of this call, without earlier calls
            result.write(**counts(found), trials=len(found), trials_of_earlier_calls=len(earlier))
    sys.exit(not report(found, chosen))


def run_all(
    chosen: list[Wrong], found: dict[tuple[str, str], Outcome], path: Path, workers: int
) -> None:
    """Runs the trials that are not in `found`; adds their outcomes to `found` and to a file."""
    lists = [
        [trial for trial in trials_of_file if trial.key not in found]
        for trials_of_file in trials(chosen)
    ]
    prepare()
    begun, count = time.monotonic(), sum(map(len, lists))
    with path.open("a", encoding="utf-8") as file:
        for number, (trial, outcome) in enumerate(run(lists, workers), 1):
            found[trial.key] = outcome
            row = {"key": trial.key, "outcome": outcome}
            print(json.dumps(row), file=file, flush=True)
            print(
                f"[{number}/{count}] {trial.key[0]}: {trial.key[1].partition(' ')[0]}:",
                f"{outcome.word} in {outcome.seconds:.0f} s",
                flush=True,
            )
    print(f"{(time.monotonic() - begun) / 60:.1f} minutes on {workers} workers")


if __name__ == "__main__":
    main()
