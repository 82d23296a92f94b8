"""Comparisons: runs of one script in separate folders, benchmarks in processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax

from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import RunError, UsageError
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import Panel, Series
from jaxrl_po.run.store import metrics
from jaxrl_po.run.store.metrics import Row
from jaxrl_po.types import TrainState

Name = TypeVar("Name", bound=Hashable)


CACHE = "JAX_COMPILATION_CACHE_DIR"
START = "warm start"  # folder of the initial policy that several runs share


class Result(NamedTuple):
    """The results of a run.

    Attributes:
      name: of the run.
      rows: its lines of metrics.
      summary: its `summary.json`.
    """

    name: str
    rows: list[Row]
    summary: Mapping[str, Any]


def run_each(
    main: Callable[[Sequence[str]], int],
    runs: Mapping[str, Sequence[str]],
    shared: Sequence[str],
    out: Path,
) -> list[Result]:
    """Runs a script once per name, one after another; earlier results are replaced.

    Args:
      main: the script's `main`.
      runs: name to the arguments of that run alone.
      shared: arguments of every run.
      out: folder in which each run gets a folder.

    Raises:
      UsageError: a run did not finish; those after it are not started.
    """
    results = []
    for name, arguments in runs.items():
        status = main([*shared, *arguments, f"--out={out / name}", "--overwrite"])
        if status or not (out / name / "summary.json").exists():
            raise UsageError(f"{name} did not finish; see {out / name}")
        results.append(read(out, name))
    return results


def run_from_one(
    main: Callable[[Sequence[str]], int],
    runs: Mapping[str, Sequence[str]],
    shared: Mapping[str, Any],
    start: Mapping[str, Any],
    rows: Mapping[str, Any],
    out: Path,
) -> list[Result]:
    """Makes one initial policy in the folder `START`, then runs a script from it once per name.

    Args:
      main: the `main` of `jaxrl-po language`.
      runs: see `run_each`.
      shared: flag name to value, for the initial policy and all runs.
      start: flags of the initial policy alone, which is warm-started but not trained further.
      rows: flags of the runs alone.
      out: see `run_each`.
    """
    first = {"seeds": 1, "total_steps": 0, **start}
    others = {"init_from": out / START, **rows}
    given = [
        [f"--{name}={value}" for name, value in (dict(shared) | each).items()]
        for each in (first, others)
    ]
    run_each(main, {START: []}, given[0], out)
    return run_each(main, runs, given[1], out)


def read(out: Path, name: str) -> Result:
    """The results of the run of this name, from its folder."""
    summary = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))
    return Result(name, metrics.read(out / name / "metrics.jsonl"), summary)


def panel(
    results: Sequence[Result],
    metric: str,
    title: str,
    x_label: str,
    y_label: str,
    target: float | None = None,
) -> Panel:
    """A panel with one metric, a curve per run."""
    series = [Series(metric, result.name, result.rows) for result in results]
    return Panel([], series, title, x_label, y_label, target, seeds=False)


def leave(out: Path, name: str, panels: Sequence[Panel], heading: str, table: str) -> None:
    """Writes the figure `<name>.png` and `table.txt`; prints the table under its heading."""
    path = out / f"{name}.png"
    (out / "table.txt").write_text(table, encoding="utf-8")
    with plotting.beside(path):
        plotting.save(panels, path)
    print(heading, table, sep="\n", end="")
    print(f"see {path}")


def clock(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Seconds of a call until its arrays are ready, and its result."""
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - begun, result


def stepper(step: Callable[[TrainState], Any], state: TrainState) -> Callable[[], float]:
    """Runs one iteration now, to compile and to place the state; each call times one more."""
    state = jax.block_until_ready(step(state))[0]

    def tick() -> float:
        nonlocal state
        seconds, (state, _) = clock(step, state)
        return seconds

    return tick


def in_turns(clocks: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Times programs in turns, so that drifts in the machine's speed affect all of them alike.

    Args:
      clocks: name to a function that runs one more iteration and returns the seconds it took.
      rounds: rounds that count; one more, the first, is discarded.

    Returns:
      Name to seconds, one number per round.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in clocks}
    for i in range(rounds + 1):
        # Every other round runs in reverse, so that no program always follows the same heavy one.
        for name in list(clocks)[:: 1 if i % 2 else -1]:
            seconds[name].append(clocks[name]())
    return {name: values[1:] for name, values in seconds.items()}


def show(row: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints measurements: one line per number, or the one JSON line that `measure_apart` reads."""
    print(
        json.dumps(row) if as_json else "\n".join(f"{name}: {value}" for name, value in row.items())
    )


def measured(
    argv: Sequence[str], name: str, summary: str, record: type, measure: Callable[[Any], Any]
) -> int:
    """Runs a benchmark: asks for its options, measures and shows; returns the exit status.

    Args:
      argv: command line.
      name: of the script, see `flags.ask`.
      summary: likewise.
      record: of its options, `json` among them.
      measure: options to one row.
    """
    options: Any = flags.ask(argv, name, summary, record)
    if options is not None:
        with flags.blame({"": record}):
            row = measure(options)
        show(row, as_json=options.json)
    return 0


def measure_apart(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark in a new process, with its own memory and devices; returns its last line."""
    return last_line([sys.executable, script, *arguments, "--json"])


def last_line(command: Sequence[object], timeout: float | None = None) -> dict[str, Any]:
    """Runs a program, whose last line of output is one JSON object, and returns that.

    Args:
      command: the program and its arguments.
      timeout: see `output_of`.

    Raises:
      RunError: see `output_of`, or it printed something else.
    """
    try:
        row: dict[str, Any] = json.loads(output_of(command, timeout).splitlines()[-1])
    except (IndexError, ValueError):
        raise RunError(f"{command[0]} printed no JSON object last") from None
    return row


def output_of(command: Sequence[object], timeout: float | None = None) -> str:
    """Runs a program and returns what it printed.

    Programs that were compiled before are not read, so that compile times are those of a first run.

    Args:
      command: the program and its arguments.
      timeout: seconds after which it is ended; None for no limit.

    Raises:
      RunError: it failed, with the last error that it named or else the last line of its errors;
        or it did not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name != CACHE}
    try:
        return subprocess.run(
            [str(word) for word in command],
            check=True,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env=environment,
            timeout=timeout,
        ).stdout
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not end in {timeout:.0f} seconds") from None
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        said = [line.strip() for line in error.stderr.splitlines() if line.strip()]
        # After its error, a program may still give advice.
        errors = [line for line in said if line.lower().startswith(("error", "fatal"))]
        message = (errors or said or [f"status {error.returncode}"])[-1]
        raise RunError(message) from None
