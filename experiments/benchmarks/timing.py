"""Times programs alternately, and runs benchmarks in processes of their own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import flags
from jaxrl_po.types import TrainState

Name = TypeVar("Name", bound=Hashable)
CACHE = "JAX_COMPILATION_CACHE_DIR"


def clock(function: Callable[..., Any], *args: Any) -> tuple[float, Any]:
    """Times a call until its results are computed; returns the seconds and the result."""
    begun = time.perf_counter()
    result = jax.block_until_ready(function(*args))
    return time.perf_counter() - begun, result


def stepper(step: Callable[[TrainState], Any], state: TrainState) -> Callable[[], float]:
    """Runs one iteration, to compile and to place the state.

    Returns a function that times another iteration.
    """
    state = jax.block_until_ready(step(state))[0]

    def tick() -> float:
        nonlocal state
        seconds, (state, _) = clock(step, state)
        return seconds

    return tick


def in_turns(clocks: Mapping[Name, Callable[[], float]], rounds: int) -> dict[Name, list[float]]:
    """Times programs alternately, so that drifts in the machine's speed affect all equally.

    Args:
      clocks: map from a name to a function that runs one more iteration and returns its seconds.
      rounds: number of rounds that count; one more round, the first, is discarded.

    Returns:
      Map from a name to seconds, with one number per round.
    """
    seconds: dict[Name, list[float]] = {name: [] for name in clocks}
    for i in range(rounds + 1):
        # Every other round runs in reverse order, so that no program always follows the same slow
        # program.
        for name in list(clocks)[:: 1 if i % 2 else -1]:
            seconds[name].append(clocks[name]())
    return {name: values[1:] for name, values in seconds.items()}


def show(row: Mapping[str, Any], *, as_json: bool) -> None:
    """Prints measurements, one line per number, or the one JSON line for `measure_apart`."""
    print(
        json.dumps(row) if as_json else "\n".join(f"{name}: {value}" for name, value in row.items())
    )


def measured(
    argv: Sequence[str], name: str, summary: str, record: type, measure: Callable[[Any], Any]
) -> int:
    """Runs a benchmark: parses its options, measures, and prints the row; returns the exit status.

    Args:
      argv: command line, without the program's name.
      name: name of the script, see `flags.ask`.
      summary: description of the script, see `flags.ask`.
      record: class of the script's options, with a field `json`.
      measure: `(options) -> row`, takes the measurements.
    """
    options: Any = flags.ask(argv, name, summary, record)
    if options is not None:
        row = measure(options)
        show(row, as_json=options.json)
    return 0


def measure_apart(script: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark in a new process, with its own memory and devices.

    Returns the object on its last line.
    """
    return last_line([sys.executable, script, *arguments, "--json"])


def last_line(command: Sequence[object], timeout: float | None = None) -> dict[str, Any]:
    """Runs a program and returns the JSON object in its last line of output.

    Args:
      command: program and its arguments.
      timeout: seconds until the program is killed, see `output_of`.

    Raises:
      RunError: the program failed, see `output_of`, or its last line is not a JSON object.
    """
    try:
        row: dict[str, Any] = json.loads(output_of(command, timeout).splitlines()[-1])
    except (IndexError, ValueError):
        raise RunError(f"{command[0]} printed no JSON object last") from None
    return row


def output_of(command: Sequence[object], timeout: float | None = None) -> str:
    """Runs a program and returns its output.

    The program does not read compiled programs from a cache, so that compile times are those of a
    first run.

    Args:
      command: program and its arguments.
      timeout: seconds after which the program is killed; None for no limit.

    Raises:
      RunError: the program failed, with its last named error or else the last line of its errors;
        or the program did not end in time.
    """
    environment = {name: value for name, value in os.environ.items() if name != CACHE}
    try:
        words = list(map(str, command))
        limits: Any = {"env": environment, "timeout": timeout, "check": True}
        return subprocess.run(words, capture_output=True, **limits).stdout.decode()
    except subprocess.TimeoutExpired:
        raise RunError(f"{command[0]} did not end in {timeout:.0f} seconds") from None
    except OSError as error:
        raise RunError(f"{command[0]}: {error.strerror}") from None
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in error.stderr.decode().splitlines() if line.strip()]
        # A program may print advice after its error message.
        errors = [line for line in lines if line.lower().startswith(("error", "fatal"))]
        raise RunError((errors or lines or [f"status {error.returncode}"])[-1]) from None
