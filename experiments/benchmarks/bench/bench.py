"""Times jaxrl_po, rejax, PureJaxRL's loop, brax's PPO and TRL alternately on the same machine.

`make bench` measures every row except the optional ones and writes the table and the picture of
`docs/benchmarks.md`; `python experiments/benchmarks/bench/bench.py --only=rejax` measures one peer
and leaves table and picture in the folder `--out`.

Each measurement is one process, which compiles, then times. A round has one measurement of jaxrl_po
and one of the peer; each round reverses the order of the previous round. The first round does not
count; a peer that can run in several ways is timed in each way then, and keeps the fastest.

Each peer has its own Python environment in `.venv/peers`, created at first use from `peers/*.txt`.
If a peer cannot be installed or fails, only its rows are missing. A benchmark that is started
again, with the same code on the same machine, keeps finished rows and repeats noisy ones.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import libraries
import machine
import page
import rows
import timing
from page import OURS, THEIRS

from jaxrl_po import backend, config
from jaxrl_po.config import COUNT, ConfigError, static
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.store import folder, provenance

HOUR = 3600.0  # seconds after which a process counts as hung


@config.record
class Options:
    """Rows to measure, and the place of the results."""

    only: str = static("", "rows whose name holds one of these words, a,b,…; empty for all")
    rounds: int = static(5, "rounds that count", within=COUNT)
    pythons: str = static(
        "",
        "interpreters with a peer installed, as environment=path,…, in place of environments made "
        f"here; environments: {', '.join(libraries.environments())}",
    )
    tiny: bool = static(False, "sizes that only show that everything runs: no figure counts")
    page: str = static("", "page whose table and picture are written; empty writes neither")
    out: str = static("runs/bench", "folder for the results, which also keeps finished rows")


class Program:
    """Program that is timed once per call, in a new process.

    Args:
      name: name of the program in messages.
      command: command line of the program.
      choices: alternative lists of further arguments; the first round finds the fastest list.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[object],
        choices: Sequence[Sequence[str]] = ((),),
    ):
        self.name, self.command, self.choices = name, command, choices
        self.rows: list[dict[str, Any]] = []
        self.others: list[float | None] = []

    def __call__(self) -> float:
        """Runs the program once; returns the seconds per unit of work."""
        before = machine.clock()
        rows = [self.run(choice) for choice in self.choices]
        fastest = max(range(len(rows)), key=lambda i: rate(rows[i]))
        self.choices = [self.choices[fastest]]
        self.rows.append(rows[fastest])
        self.others.append(machine.others(before, machine.clock()))
        return 1.0 / rate(rows[fastest])

    def run(self, choice: Sequence[str]) -> dict[str, Any]:
        """Runs the program; returns the JSON object on its last line."""
        try:
            return timing.last_line([*self.command, *choice], HOUR)
        except RunError as error:
            raise RunError(f"{self.name} ended: {error}") from None

    def results(self) -> dict[str, Any]:
        """Returns the rounds that count, and the arguments of the program in those rounds."""
        rows = self.rows[1:]
        return {
            "rates": [rate(row) for row in rows],
            "compile_seconds": [row["compile_seconds"] for row in rows if "compile_seconds" in row],
            "device": rows[0]["device"],
            "choice": [word.removeprefix("--") for word in self.choices[0]],
            "others": self.others[1:],
        }


def rate(row: Mapping[str, Any]) -> float:
    """Returns units of work per second: environment steps, or iterations.

    Example:
      >>> rate({"seconds_per_iteration": 0.25}), rate({"steps_per_second": 1000})
      (4.0, 1000.0)
    """
    if "steps_per_second" in row:
        return float(row["steps_per_second"])
    return 1.0 / float(row["seconds_per_iteration"])


def measure(
    row: rows.Row, rounds: int, given: Mapping[str, Path], *, tiny: bool = False
) -> dict[str, Any]:
    """Times jaxrl_po and the peer alternately.

    An error is reported in one line under the key `failed`.

    Args:
      row: comparison to measure.
      rounds: number of rounds that count.
      given: paths of Python interpreters by environment, see `libraries.interpreters`.
      tiny: True to measure tiny sizes, see `Options`.
    """
    peer, sizes = libraries.PEERS[row.peer], [*row.sizes, *(row.small if tiny else ())]
    theirs: list[object] = [
        libraries.BENCHMARKS / "peers" / peer.script,
        *peer.arguments,
        *row.theirs,
    ]
    try:
        python = given.get(peer.environment) or libraries.install(peer.environment)
        if peer.repository:
            theirs.append(f"--source={libraries.clone(peer.repository)}")
    except RunError as error:
        return {"failed": f"{row.peer} cannot be installed: {error}"}
    ours = [sys.executable, libraries.BENCHMARKS / row.script, *row.ours, *sizes, "--json"]
    programs = {
        OURS: Program(OURS, ours),
        THEIRS: Program(row.peer, [python, *theirs, *sizes], row.choices),
    }
    try:
        timing.in_turns(programs, rounds)
    except RunError as error:
        return {"failed": str(error)}
    results = {name: program.results() for name, program in programs.items()}
    devices = [results[name]["device"] for name in (OURS, THEIRS)]
    if devices[0] != devices[1]:
        failed = f"ours ran on {devices[0]}, {row.peer} on {devices[1]}"
        return {"failed": f"{failed}: set JAX_PLATFORMS=cpu, or give another of --pythons"}
    return {"failed": "", **results}


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark from command-line arguments; returns the exit status."""
    options = flags.ask(
        argv, "benchmarks/bench/bench.py", "Ours beside its peers, in turns.", Options
    )
    if options is None:
        return 0
    asked, out = rows.chosen(options.only), Path(options.out)
    place = Path(options.page) if options.page else None
    if place and options.tiny:
        raise ConfigError("tiny", "has no figures for a page: leave page out")
    if place:
        page.put(place.read_text(encoding="utf-8") if place.exists() else "", "")
    given = libraries.interpreters(options.pythons)
    out.mkdir(parents=True, exist_ok=True)
    store = out / "bench.json"
    stored = json.loads(store.read_text(encoding="utf-8")) if store.exists() else {}
    circumstances = {
        "tiny": options.tiny,
        "processor": provenance.processor(),
        "cores": backend.cores(),
        "versions": provenance.versions(),
        "source": provenance.source(provenance.PACKAGE, libraries.BENCHMARKS),
    }
    results = {
        name: each for name, each in stored.items() if each["circumstances"] == circumstances
    }
    for row in asked:
        if not finished(results.get(row.name), options.rounds):
            print(f"{row.name}: {options.rounds} rounds", flush=True)
            results[row.name] = {
                **measure(row, options.rounds, given, tiny=options.tiny),
                "day": date.today().isoformat(),
                "circumstances": circumstances,
            }
            folder.write_json(store, stored | results)
        print(page.line(row, results[row.name]), flush=True)
    listed = [row for row in rows.ROWS if row in asked or row.name in results or not row.optional]
    text = page.table(listed, results)
    if options.tiny:
        text = f"Measured with --tiny: no figure counts.\n\n{text}"
    (out / "bench.md").write_text(text, encoding="utf-8")
    measured = [row for row in listed if row.name in results and not results[row.name]["failed"]]
    for beside in [out, *([place.parent] if place else [])] if measured else []:
        page.draw(measured, results, beside / "bench.png")
    if place:
        picture = "\n![How many times as fast as its peers](bench.png)\n" if measured else ""
        place.write_text(
            page.put(place.read_text(encoding="utf-8"), text + picture), encoding="utf-8"
        )
    print(text, end="")
    return 0


def finished(result: Mapping[str, Any] | None, rounds: int) -> bool:
    """Returns whether a row already has enough rounds, measured on a quiet machine."""
    if result is None or result["failed"]:
        return False
    return len(result[OURS]["rates"]) >= rounds and not page.noise(result)


if __name__ == "__main__":
    flags.run_script(main)
