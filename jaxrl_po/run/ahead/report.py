"""The programs of a run, compiled for a machine that is not here, and what each will need."""

import dataclasses
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from rich import filesize

from jaxrl_po.config import ConfigError
from jaxrl_po.run.ahead.counts import Counts, Program
from jaxrl_po.run.ahead.topology import Machine
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.memory import exhausted_bytes, memory_of
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.sharding import LogicalAxes, shardings
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.programs import Job
from jaxrl_po.types import PyTree, TrainState

SMALLER = (
    "fewer --seeds, more --config.num_microbatches, a --mesh that shards parameters, --lora.rank, "
    "--model.dtype=bfloat16 or --model.remat"
)

SAMPLING = "sampling of an iteration"


@dataclasses.dataclass(frozen=True)
class Report:
    """What one program needs on each chip.

    Attributes:
      machine: as it was asked for.
      program: which one of the run, and what one call of it is.
      fits: whether its memory is there.
      memory: bytes of a chip: `state`, `temporary`, `code`, `peak`, and where known `capacity`.
      counts: see `Counts`; None where the program did not fit or cannot be read.
      seconds: estimates by what may limit it: `products`, `memory`, `links`; `operations` from the
        compiler's count of cycles. Empty without public figures of the chip.
      compile_seconds: of this machine's processor.
      why: the compiler's own words, where it has no counts.
    """

    machine: str
    program: str
    fits: bool
    memory: dict[str, int]
    counts: Counts | None
    seconds: dict[str, float]
    compile_seconds: float
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        """The report as one JSON object."""
        return dataclasses.asdict(self)

    @property
    def limit(self) -> str:
        """What takes longest; empty where nothing is estimated."""
        return max(self.seconds, key=lambda name: self.seconds[name], default="")


def reports(
    job: Job, placement: Placement, axes: LogicalAxes | None, machine: Machine
) -> Iterator[Report]:
    """One report for each program of an iteration, as each is compiled; nothing is trained.

    Raises:
      ConfigError: the run plays its environments on the host.
    """
    if job.rollouts is not None or job.compile_chunk is not None:
        raise ConfigError("compile_for needs a run whose environments are part of the program")
    for name, function, arguments in _functions(job, state_like(job, placement, axes), placement):
        yield compile_for(name, function, arguments, machine)


def state_like(job: Job, placement: Placement, axes: LogicalAxes | None) -> TrainState:
    """Shapes, dtypes and shardings of the state."""
    shapes = jax.eval_shape(job.learner.init, job.start)
    like: TrainState
    if axes is not None and placement.cuts_params:
        mesh, rules = parallel.make_mesh(placement), parallel.rules_of(placement)
        like = programs.with_shardings(shapes, shardings(shapes, mesh, axes, rules))
    else:
        like = _placed(shapes, parallel.state_spec(), placement)
    return like


def _placed(shapes: PyTree, specs: PyTree, placement: Placement) -> Any:
    """Shapes with shardings, by a prefix tree of their partitions."""
    mesh = parallel.make_mesh(placement)
    each = jax.tree.map(functools.partial(NamedSharding, mesh), jax.tree.broadcast(specs, shapes))
    return programs.with_shardings(shapes, each)


def _functions(
    job: Job, like: TrainState, placement: Placement
) -> Iterator[tuple[str, Callable[..., Any], tuple[Any, ...]]]:
    """Name, function and arguments of the programs of an iteration."""
    if job.rewarded is None:
        yield "an iteration", programs.chunk_of(job), (like, np.int32(0))
        return
    yield SAMPLING, job.learner.sample, (like,)
    batch = programs.with_reward(jax.eval_shape(job.learner.sample, like)[1])
    placed = _placed(batch, parallel.batch_spec(), placement)
    yield "update of an iteration", job.learner.update, (like, placed)


def compile_for(
    name: str, function: Callable[..., Any], arguments: tuple[Any, ...], machine: Machine
) -> Report:
    """Compiles a function, its first argument donated, and counts what it does."""
    begun = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=0).lower(*arguments)
    chip = machine.chip
    capacity = {} if chip is None else {"capacity": int(chip.memory)}
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        took, why = time.perf_counter() - begun, _exceeded(str(error))
        used = exhausted_bytes(error)
        peak = {} if used is None else {"peak": used}
        return Report(machine.name, name, False, capacity | peak, None, {}, took, why=why)
    took = time.perf_counter() - begun
    counts, why = None, ""
    try:
        counts = Program(program.as_text() or "", chip.unit if chip else 128).counts()
    except jax.errors.JaxRuntimeError as error:  # of v5p, with its updates of what is under way
        why = f"its program cannot be read: {str(error).splitlines()[0]}"
    of = memory_of(program, arguments[0])
    analysis: Any = program.memory_analysis()
    memory = {
        "state": of.state,
        "temporary": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes,
        "peak": (of.peak or 0) + analysis.generated_code_size_in_bytes,
    }
    fits = chip is None or memory["peak"] <= chip.memory
    seconds = {} if counts is None else _seconds(counts, machine)
    return Report(machine.name, name, fits, memory | capacity, counts, seconds, took, why)


def _exceeded(words: str) -> str:
    """By how much a program does not fit, as the compiler says it."""
    found = re.search(r"(Used|temporaries) \S*\d.*?(by [\d.]+\w|HBM \([^)]*\))", words)
    return found[0] if found else words.splitlines()[0]


def _seconds(counts: Counts, machine: Machine) -> dict[str, float]:
    """The time of one run by what could limit it, with every loop at its bound."""
    chip = machine.chip
    if chip is None:
        return {}
    sent = sum(transfer.sent for transfer in counts.collectives.values())
    found = {
        "products": counts.padded / chip.peak,
        "memory": counts.bytes / chip.bandwidth,
        "links": sent / chip.links,
    }
    return found | ({"operations": counts.cycles / chip.clock} if counts.cycles else {})


def lines(report: Report) -> Iterator[str]:
    """The report for people to read."""
    memory = {name: filesize.decimal(size) for name, size in report.memory.items()}
    if "state" not in memory:
        yield f"{report.machine}: {report.program} does not fit: {report.why}; try {SMALLER}"
        return
    of = f" of {memory['capacity']}" if "capacity" in memory else ""
    yield (
        f"{report.machine}: {report.program} {'fits' if report.fits else 'does not fit'}: a chip "
        f"holds {memory['state']} of state, {memory['temporary']} of temporaries and "
        f"{memory['code']} of code, {memory['peak']}{of} at its peak"
    )
    if report.counts is not None:
        yield from _counted(report.counts)
    else:
        yield f"  not counted: {report.why}"
    if report.seconds:
        each = ", ".join(
            f"{name} {seconds * 1e3:,.2f} ms" for name, seconds in report.seconds.items()
        )
        yield f"  takes about, each alone: {each}; limited by {report.limit}"
    yield f"  compiled in {report.compile_seconds:.1f} s"


def _counted(counts: Counts) -> Iterator[str]:
    """What a program does."""
    padding = 1 - counts.flops / counts.padded if counts.padded else 0.0
    idle = 1 - counts.useful / counts.bytes if counts.bytes else 0.0
    yield (
        f"  computes {amount(counts.flops)}FLOP in products ({padding:.0%} of the matrix units is "
        f"padding) and {amount(counts.elementwise)} other operations"
    )
    yield (
        f"  moves {filesize.decimal(int(counts.bytes))} to and from memory ({idle:.0%} padding) in "
        f"{counts.kernels:,.0f} operations"
    )
    for kind, transfer in sorted(counts.collectives.items()):
        yield (
            f"  {kind}: {transfer.count:,.0f} of {filesize.decimal(int(transfer.bytes))}, "
            f"{filesize.decimal(int(transfer.sent))} sent"
        )
    for loop, bound in counts.bounds.items():
        turns = f"to its bound of {bound:,}" if bound else "once: its turns are not known"
        yield f"  counted {turns}: {loop}"
    for target, calls in counts.uncounted.items():
        yield f"  not counted: what {calls:,.0f} calls of {target} compute"


def amount(number: float) -> str:
    """A number with a metric prefix.

    Example:
      >>> amount(0), amount(950), amount(1.234e10)
      ('0 ', '950 ', '12.3 G')
    """
    if number < 1000:
        return f"{number:.0f} "
    power = min(5, int(math.log10(number) // 3))
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}"
