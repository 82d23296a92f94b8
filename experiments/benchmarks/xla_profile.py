"""Times of a compiled program's operations, from XLA's profile."""

import collections
import math
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import jax

from jaxrl_po.run.devices.compilation import compiled

# Threshold in seconds; below it, the start of an operation dominates the operation's time.
SMALL = 1e-6
# Operations whose time is the sum of the operations inside.
ENCLOSING = {"while", "call", "conditional"}
LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][\w-]*)\((.*)$")
COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
DIMENSIONS = re.compile(r"^\w+\[([\d,]*)\]")
CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")


class Program(NamedTuple):
    """A compiled program with its arguments.

    Attributes:
      compiled: compiled program.
      arguments: arguments of every call.
      calls: number of calls that are timed together.
    """

    compiled: Any
    arguments: tuple[Any, ...]
    calls: int

    def run(self) -> float:
        """Returns the processor seconds of one call of the program."""
        begun = time.process_time()
        results = [self.compiled(*self.arguments) for _ in range(self.calls)]
        jax.block_until_ready(results)
        return (time.process_time() - begun) / self.calls


class Operation(NamedTuple):
    """An instruction of a compiled program.

    Attributes:
      kind: name of the operation in XLA, such as dot, fusion or copy.
      path: JAX function that the instruction comes from.
      products: sizes of the result and of the summed axes, for each matrix product in the
        instruction.
      runs: average number of runs in a call, over the profiled calls.
      seconds: median time of one run, without runs in which another program occupied the core.
    """

    kind: str
    path: str
    products: tuple[tuple[int, ...], ...]
    runs: float = 0.0
    seconds: float = 0.0

    @property
    def flops(self) -> int:
        """Number of multiplications and additions in the matrix products of one run."""
        return sum(2 * math.prod(sizes) for sizes in self.products)


class Total(NamedTuple):
    """Totals of several operations: number in a call, seconds and flops."""

    number: int
    seconds: float
    flops: float


def program(function: Callable[..., Any], *arguments: Any, calls: int = 1) -> Program:
    """Compiles the function for these arguments, as a `Program`."""
    return Program(compiled(function, *arguments), arguments, calls)


def operations(text: str) -> dict[str, Operation]:
    """Returns the instructions of a program by name; a fusion has the products of its parts.

    Args:
      text: text of the program, as `compiled.as_text()` returns it.
    """
    lines, computation = [], ""
    for line in text.splitlines():
        if begins := COMPUTATION.match(line):
            computation = begins[1]
        elif instruction := LINE.match(line):
            lines.append((computation, *instruction.groups()))
    sizes = {name: _sizes(DIMENSIONS.match(shape)) for _, name, shape, *_ in lines}
    # By computation, then by instruction.
    products: dict[str, list[tuple[int, ...]]] = collections.defaultdict(list)
    found = {}
    for computation, name, _, kind, rest in lines:
        own = []
        if kind == "dot":
            left, over = re.search(r"%([\w.-]+)", rest), _sizes(CONTRACTED.search(rest))
            own = [sizes[name] + tuple(sizes[left[1]][n] for n in over if left)]
            products[computation] += own
        elif kind == "fusion" and (called := re.search(r"calls=%?([\w.-]+)", rest)):
            own = products[called[1]]  # XLA's text defines a computation before its call
        path = re.search(r'op_name="([^"]*)"', rest)
        found[name] = Operation(kind, path[1] if path else "", tuple(own))
    return found


def _sizes(found: re.Match[str] | None) -> tuple[int, ...]:
    return tuple(int(n) for n in found[1].split(",") if n) if found else ()


def profiled(program: Program) -> list[tuple[str, str, float]]:
    """Profiles the calls: returns plane and line, name, and nanoseconds of each event."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    program.run()  # the first call is not profiled, since it differs from later calls
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            program.run()
        [file] = Path(folder).rglob("*.xplane.pb")
        return [
            (f"{plane.name} {line.name}", event.name, event.duration_ns)
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes
            for line in plane.lines
            for event in line.events
        ]


def kernels(program: Program) -> float:
    """Counts the kernels, copies included, that a call launches on a GPU.

    On a CPU, the operations that a call runs.
    """
    if jax.default_backend() == "cpu":
        return sum(each.runs for each in executed(program))
    return sum(" Stream #" in place for place, *_ in profiled(program)) / program.calls


def executed(program: Program) -> list[Operation]:
    """Returns the operations that a call of a program runs, without loops, calls and branches.

    Times of operations that use several cores, or run in parallel with others, are wall times.
    """
    known = operations(program.compiled.as_text())
    runs = collections.defaultdict(list)
    calls = 2 * program.calls
    for _, name, duration in profiled(program._replace(calls=calls)):
        if name in known:
            runs[name].append(1e-9 * duration)
    return [
        known[name]._replace(runs=len(seconds) / calls, seconds=median(seconds))
        for name, seconds in runs.items()
        if known[name].kind not in ENCLOSING
    ]


def totals(
    operations: Sequence[Operation], category: Callable[[Operation], str]
) -> dict[str, Total]:
    """Sums the operations of a call by category, with the slowest first."""
    found: dict[str, Total] = {}
    for each in operations:
        number, seconds, flops = found.get(category(each), (0, 0.0, 0.0))
        seconds, flops = seconds + each.runs * each.seconds, flops + each.runs * each.flops
        found[category(each)] = Total(number + round(each.runs), seconds, flops)
    return dict(sorted(found.items(), key=lambda item: -item[1].seconds))
