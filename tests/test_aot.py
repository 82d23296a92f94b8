"""Tests programs that are compiled for machines that need not be attached."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import hlo_counts
import jax
import pytest
from tables import cases

from jaxrl_po import __main__ as command_line
from jaxrl_po import run
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer
from jaxrl_po.language.settings import LanguageSettings
from jaxrl_po.language.tasks import addition
from jaxrl_po.run import aot
from jaxrl_po.run.devices import topology
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import language, settings
from jaxrl_po.run.experiment.models import RunModels
from jaxrl_po.run.loop.job import Length


def test_experiment_is_compiled_for_devices_without_running(tmp_path):
    small = {"problem.num_envs": 4, "problem.num_steps": 8, "config.num_epochs": 1}
    experiment = run.Experiment(
        env="CartPole-v1", seeds=2, total_steps=64, out=tmp_path / "run", over=small
    )
    (found,) = run.compile_for(experiment, "cpu:2")
    assert not (tmp_path / "run").exists()
    *parts, total = found.memory.values()
    assert list(found.memory) == ["arguments", "outputs", "temporaries", "code", "total"]
    assert total == sum(parts) > found.memory["arguments"] > 0
    counts = hlo_counts.Program(found.as_text()).counts()
    assert counts.flops > 0
    assert counts.collectives == {}
    assert json.loads(json.dumps(found.as_json())) == {
        "name": "iteration",
        "machine": "cpu:2",
        "compile_seconds": found.compile_seconds,
        "memory": found.memory,
        "capacity": None,
        "fits": True,
        "reason": "",
    }
    assert found.describe().startswith("iteration fits cpu:2: ")
    with pytest.raises(ConfigError, match="compile_for: trains nothing"):
        run.train(run.Experiment(env="CartPole-v1", out=tmp_path / "run", compile_for="cpu:2"))


@cases("flags", [], ["--json"])
def test_the_command_prints_a_line_per_program(monkeypatch, capsys, flags):
    """The exit status is 1 if a program does not fit."""
    memory = {"arguments": 1000, "outputs": 200, "temporaries": 30, "code": 4, "total": 1234}
    small = run.CompiledProgram("sampling", "tpu:v5e:1x1", 1.25, memory, 1500, True)
    large = dataclasses.replace(small, name="update", capacity=1000, fits=False)
    sizes = "(arguments 1.0 kB, outputs 200 bytes, temporaries 30 bytes, code 4 bytes)"
    of = f"per device {sizes}; compiled in 1.2 s"
    want = [
        f"sampling fits tpu:v5e:1x1: 1.2 kB of 1.5 kB {of}",
        f"update does not fit tpu:v5e:1x1: 1.2 kB of 1.0 kB {of}; {aot.SMALLER}",
    ]
    for status, programs in enumerate([[small], [small, large]]):
        monkeypatch.setattr(aot, "compile_for", lambda *_, found=programs: iter(found))
        assert launch.control(["--env=CartPole-v1", "--compile_for=tpu:v5e:1x1", *flags]) == status
        lines = capsys.readouterr().out.splitlines()
        objects = [each.as_json() for each in programs]
        assert (list(map(json.loads, lines)) if flags else lines) == (
            objects if flags else want[: status + 1]
        )


class Lowered:
    """Program of a number of bytes, or a program that the compiler refuses with a message."""

    def __init__(self, sizes, message=""):
        self.sizes, self.message = sizes, message

    def lower(self, *_):
        return self

    def compile(self):
        if self.message:
            raise jax.errors.JaxRuntimeError(self.message)
        names = ("argument", "output", "alias", "temp", "generated_code")
        sizes = {f"{name}_size_in_bytes": n for name, n in zip(names, self.sizes, strict=True)}
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes))


@cases("capacity, fits", (138, True), (137, False), (None, True))
def test_program_fits_if_its_total_fits_memory(monkeypatch, capacity, fits):
    """Outputs that replace a donated argument count once."""
    monkeypatch.setattr(jax, "jit", lambda *_, **options: Lowered((100, 90, 85, 30, 3)))
    machine = topology.Machine("tpu:v5e:1x1", (), capacity)
    found = aot.compile_program("iteration", None, (), machine)
    sizes = {"arguments": 100, "outputs": 5, "temporaries": 30, "code": 3, "total": 138}
    assert (found.memory, found.capacity, found.fits) == (sizes, capacity, fits)


@cases(
    "message, reason, gibibytes",
    (
        "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.10G "
        "of 15.75G hbm. Exceeded hbm capacity by 4.35G.\n\nTotal hbm usage",
        "Used 20.10G of 15.75G hbm. Exceeded hbm capacity by 4.35G",
        20.10,
    ),
    (
        "E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
        "temporaries (38.09G) exceeds available HBM (15.75G). HLO module: jit_f.",
        "temporaries (38.09G) exceeds available HBM (15.75G)",
        38.09,
    ),
)
def test_a_refused_program_has_the_compilers_reason(monkeypatch, message, reason, gibibytes):
    refused = Lowered((), f"RESOURCE_EXHAUSTED: {message}")
    monkeypatch.setattr(jax, "jit", lambda *_, **options: refused)
    machine = topology.Machine("tpu:v5e:1x1", (), 16_000_000_000)
    found = aot.compile_program("iteration", None, (), machine)
    assert (found.reason, found.fits, found.as_text()) == (reason, False, "")
    assert found.memory == {"total": int(gibibytes * 2**30)}
    line = f"iteration does not fit tpu:v5e:1x1: {reason}; compiled in 0.0 s; {aot.SMALLER}"
    assert found.describe() == line


def test_programs_are_reported_with_the_fewest_microbatches(monkeypatch):
    """The number is the one that a run chooses where both programs fit, by the run's count, which
    excludes code."""
    names = "sampling", "update"
    monkeypatch.setattr(aot, "_functions", lambda job, *_: job.made(job.number))

    def compile_program(name, function, arguments, machine):
        program = Lowered((8, 0, 0, arguments[1], 5)).compile()
        fits = 8 + arguments[1] <= machine.memory
        return run.CompiledProgram(name, "m", 1.0, {}, machine.memory, fits, executable=program)

    monkeypatch.setattr(aot, "compile_program", compile_program)

    def fitting(space, sampling):
        def made(number):
            return zip(names, names, ((None, sampling), (None, 80 // number)), strict=True)

        def in_microbatches(_, number):
            return job(number) if number in (2, 4, 8) else None

        def job(number):
            return SimpleNamespace(number=number, made=made, rebuild=True, length=Length(1, 8))

        monkeypatch.setattr(aot.programs, "in_microbatches", in_microbatches)
        return aot._fitting(job(1), topology.Machine("m", (), space))

    for space, suffix in ((88, ""), (28, " in 4 microbatches"), (25, " in 8 microbatches")):
        found = [(each.name, each.fits) for each in fitting(space, sampling=17)]
        assert found == [(names[0] + suffix, True), (names[1] + suffix, True)]
    for space, sampling, which in ((17, 1, 1), (27, 20, 0)):
        programs = fitting(space, sampling)
        found = [next(programs), next(programs)]
        assert [each.name for each in found] == [*names]
        assert not found[which].fits
        with pytest.raises(RunError, match="training needs 88 bytes of a device"):
            next(programs)


@cases("columns", None, 4)
def test_supervised_programs_target_the_described_machine(columns):
    task = addition(1)
    model = Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
    placement = Placement(1, 1, 1, described=(SimpleNamespace(platform="tpu"),))
    config = settings.parse_settings(language, ["--algorithm=sft"]).config
    config = dataclasses.replace(config, problem=LanguageSettings(num_prompts=2))
    start = RunModels(task, model, None, None, "")
    problem = language.make_problem(config, placement, start, True, columns, {}, None)
    assert problem.target == placement.target


@cases(
    "name, message",
    ("tpu", r"must name a chip \(v5e, v5p, v6e\), got tpu"),
    ("cpu:0", "must read like tpu:v5e:4x4, cpu:8 or gpu"),
    ("cpu:99", r"cpu:99 needs 99 CPU devices, but this process has \d+; call jax.config"),
    ("gpu", "gpu needs an attached GPU"),
)
def test_unknown_machines_are_refused(name, message):
    with pytest.raises(ConfigError, match=f"^compile_for: {message}"):
        topology.parse_machine(name)


NO_TPU = {"TPU_SKIP_MDS_QUERY": "1"}  # variables that JAX sets as it is imported without a TPU
TPU_ASKED = [NO_TPU | {"JAX_PLATFORMS": "tpu,cpu"}, NO_TPU | {"JAX_FORCE_TPU_INIT": "1"}]


@cases("chips", [], ["/dev/accel0"])
@cases("given", NO_TPU, {}, *TPU_ASKED)
def test_libtpu_is_silenced_where_no_tpu_is(monkeypatch, chips, given):
    found = dict(given)
    monkeypatch.setattr(os, "environ", found)
    monkeypatch.setattr(topology.glob, "glob", lambda pattern: chips)
    topology.silence_libtpu()
    assert found == (topology.WITHOUT_TPU if given == NO_TPU and not chips else given)


def test_every_command_silences_libtpu(monkeypatch):
    calls = []
    monkeypatch.setattr(topology, "silence_libtpu", lambda: calls.append(1))
    monkeypatch.setattr(command_line, "main", lambda argv: len(calls))
    monkeypatch.setattr(sys, "argv", ["jaxrl-po"])
    with pytest.raises(SystemExit) as left:
        command_line.entry("control")
    assert left.value.code == 1
