"""Ahead-of-time compilation of an experiment's programs, for a machine that may be absent."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from rich import filesize

from jaxrl_po.config import ConfigError, Json
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel, topology
from jaxrl_po.run.devices.memory import DeviceMemory, measure_memory, program_memory, refusal
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.sharding import shardings
from jaxrl_po.run.devices.topology import Machine
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.types import PyTree, TrainState

SMALLER = (
    "try fewer seeds, more config.num_microbatches, a mesh that shards parameters, lora.rank, "
    "model.dtype = bfloat16 or model.remat"
)


@dataclasses.dataclass(frozen=True)
class CompiledProgram:
    """One program of a training iteration, compiled for one machine.

    Attributes:
      name: Name of the program, followed by the number of microbatches if there are several.
      machine: Name of the target machine, as in `--compile_for`.
      compile_seconds: Seconds that compilation took on the compiling computer.
      memory: Bytes per device that the compiler reports: `arguments`, `outputs`, `temporaries`,
        `code` and `total`; at most `total` for a program that the compiler refused.
      capacity: Bytes of a device's memory; None if unknown.
      fits: Whether the total memory is within the capacity of a device.
      reason: Compiler's message if the program was refused; otherwise empty.
      executable: JAX's compiled program; None if the compiler refused the program.
    """

    name: str
    machine: str
    compile_seconds: float
    memory: dict[str, int]
    capacity: int | None
    fits: bool
    reason: str = ""
    executable: Any = None

    def as_text(self) -> str:
        """Returns the optimised HLO; empty if the compiler refused the program."""
        return "" if self.executable is None else self.executable.as_text() or ""

    def as_json(self) -> Json:
        """Returns all fields except the executable as one JSON object."""
        fields = (field.name for field in dataclasses.fields(self) if field.name != "executable")
        return {name: getattr(self, name) for name in fields}

    def describe(self) -> str:
        """Returns a line for users that states whether the program fits on the machine."""
        need = self.reason
        if not need:
            sizes = {name: filesize.decimal(size) for name, size in self.memory.items()}
            total = sizes.pop("total", "unknown memory")
            of = "" if self.capacity is None else f" of {filesize.decimal(self.capacity)}"
            each = ", ".join(f"{name} {size}" for name, size in sizes.items())
            need = f"{total}{of} per device ({each})"
        line = f"{self.name} {'fits' if self.fits else 'does not fit'} {self.machine}: {need}"
        line = f"{line}; compiled in {self.compile_seconds:.1f} s"
        return line if self.fits else f"{line}; {SMALLER}"


def compile_for(experiment: Experiment, machine: str) -> Iterator[CompiledProgram]:
    """Compiles the programs of an iteration, one after another, without training or writing files.

    Args:
      experiment: Experiment to compile; the folder of the experiment is not touched.
      machine: `tpu:v5e:2x4` (also v5p and v6e, with any topology that the installed libtpu knows),
        `gpu` for the attached GPUs, or `cpu:8`, for which `jax_num_cpu_devices` must be set first.

    Yields:
      One `CompiledProgram` per program of an iteration.

    Raises:
      ConfigError: The machine is unknown, or the number of its devices divides neither the number
        of seeds nor the number of batch rows.
      RunError: The experiment does not fit in memory with any number of microbatches; raised after
        all programs were yielded.
    """
    if machine.startswith("tpu:"):
        errors.require("compile_for", "libtpu", "tpu-compile")
    described = topology.parse_machine(machine)
    # The programs are not cached, since the compiling computer may be unable to run them.
    settings = experiment.read()
    options = dataclasses.replace(settings.config.run, compilation_cache="")
    settings = settings._replace(config=dataclasses.replace(settings.config, run=options))
    job = prepare(
        DOMAINS[experiment.script], settings._replace(stored={}), described=described.devices
    )
    if job.layout.placement.num_devices != len(described.devices):
        number = len(described.devices)
        raise ConfigError("mesh", f"must use all {number} devices of compile_for = {machine}")
    if job.host.rollouts is not None:
        raise ConfigError("compile_for", "needs environments that are part of the program")
    yield from _fitting(job, described)


def _fitting(job: TrainJob, machine: Machine) -> Iterator[CompiledProgram]:
    """Yields the programs for the smallest number of microbatches whose update fits in memory."""
    found = list[CompiledProgram]()

    def compile_job(job: TrainJob, number: int = 1) -> DeviceMemory:
        suffix = f" in {number} microbatches" if number > 1 else ""
        functions = list(_functions(job))
        found[:] = [
            compile_program(f"{name}{suffix}", function, arguments, machine)
            for name, function, arguments in functions
        ]
        # Memory is counted as in a training run, which then chooses the same num_microbatches.
        like = functions[0][2][0]
        *sampling, memory = [
            measure_memory(each.executable, like)
            if each.executable is not None
            else DeviceMemory(0, each.memory.get("total"), refused=each.reason)
            for each in found
        ]
        return memory.beside(*sampling) if sampling else memory

    memory = compile_job(job)
    try:
        if job.rebuild is not None:
            programs.choose_microbatches(job, memory, compile_job, machine.memory)
    finally:
        yield from found


def _functions(job: TrainJob) -> Iterator[tuple[str, Callable[..., PyTree], tuple[PyTree, ...]]]:
    """Yields the name, function and arguments of each program of an iteration."""
    like = _state_like(job)
    if job.host.scorer is None:
        yield "iteration", programs.chunk_of(job), (like, np.int32(0))
        return
    yield "sampling", job.learner.sample, (like,)
    batch = programs.with_reward(jax.eval_shape(job.learner.sample, like)[1])
    placed = _placed(batch, parallel.batch_spec(), job.layout.placement)
    yield "update", job.learner.update, (like, placed)


def _state_like(job: TrainJob) -> TrainState:
    """Returns the shapes, dtypes and shardings of the training state of a job."""
    placement, axes = job.layout.placement, job.layout.axes
    shapes: TrainState = jax.eval_shape(job.learner.init, job.start)
    if axes is None or not placement.cuts_params:
        return _placed(shapes, parallel.state_spec(), placement)
    mesh, rules = parallel.make_mesh(placement), parallel.rules_of(placement)
    return programs.with_shardings(shapes, shardings(shapes, mesh, axes, rules))


def _placed(shapes: PyTree, specs: PyTree, placement: Placement) -> PyTree:
    """Returns shapes with shardings; `specs` is a prefix tree of partition specs."""
    mesh = parallel.make_mesh(placement)
    each = jax.tree.map(functools.partial(NamedSharding, mesh), jax.tree.broadcast(specs, shapes))
    return programs.with_shardings(shapes, each)


def compile_program(
    name: str, function: Callable[..., PyTree], arguments: tuple[PyTree, ...], machine: Machine
) -> CompiledProgram:
    """Compiles a function whose first argument is donated; see `CompiledProgram` for the result."""
    begun = time.perf_counter()
    lowered = jax.jit(function, donate_argnums=0).lower(*arguments)
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = refusal(error)
        if refused is None:
            raise
        took, reason = time.perf_counter() - begun, refused.refused
        memory = {} if refused.peak is None else {"total": refused.peak}
        return CompiledProgram(name, machine.name, took, memory, machine.memory, False, reason)
    took = time.perf_counter() - begun
    sizes = program_memory(executable)
    memory = {} if sizes is None else sizes._asdict() | {"total": sizes.total}
    fits = machine.memory is None or memory.get("total", 0) <= machine.memory
    return CompiledProgram(
        name, machine.name, took, memory, machine.memory, fits, executable=executable
    )
