"""Tests microbatches chosen by the compiler's count of memory; tests replace the memory of the
device."""

import contextlib
import io
import json
import re
from types import SimpleNamespace
from unittest import mock

import costs
import jax
import pytest
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.run.devices import memory
from jaxrl_po.run.devices.memory import DeviceMemory
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import language
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.experiment.training import record_microbatches
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import Length
from jaxrl_po.run.loop.programs import MICROBATCHES, choose_microbatches, require_evaluation
from jaxrl_po.run.store.exporters import ExportingReporter
from jaxrl_po.run.store.metrics import read

NUMBERS = (1, 2, 3, 4, 6, 12)


def choose(space, peak_of, fixed=400, floor=0, rows=12):
    """Returns the chosen number and the compiled numbers of a job with a list of peaks."""
    compiled = []

    def in_microbatches(_, number):
        return None if rows % number else job

    def compile_again(job, number):
        compiled.append(number)
        return DeviceMemory(0, peak_of(number), fixed).beside(DeviceMemory(0, floor))

    job = SimpleNamespace(length=Length(1, rows))
    with mock.patch.object(programs, "in_microbatches", in_microbatches):
        return choose_microbatches(job, compile_again(job, 1), compile_again, space), compiled


def line(number):
    return 1000 + 960 // number


def test_smallest_number_that_fits_is_chosen():
    for space in range(1080, 2100, 20):
        number, compiled = choose(space, line)
        assert line(number) <= space
        assert number == 1 or line(NUMBERS[NUMBERS.index(number) - 1]) > space
        assert len(compiled) <= 3


def test_two_numbers_may_have_the_same_peak():
    assert choose(1500, lambda n: 2000 if n < 3 else 1000) == (3, [1, 2, 3])


def test_sampling_must_fit_but_asks_for_no_microbatches():
    def update(number):
        return 10 + 990 // number

    assert choose(100, update, fixed=10, floor=90, rows=256) == (16, [1, 16])


@cases(
    "space, peak_of, parts, tried",
    (1070, line, (400, 0), [1, 3, 6]),
    (1500, lambda n: 2000 - n, (400, 0), [1, 2, 3]),
    # Three further numbers are not compiled.
    (1500, lambda n: 2000 if n == 1 else 1550 - n, (400, 0), [1, 2, 3]),
    (1500, line, (1501, 0), [1]),
    (1500, line, (400, 1501), [1]),  # the peak of sampling
)
def test_training_that_does_not_fit_is_an_error(space, peak_of, parts, tried):
    seen = []

    def count(number):
        seen.append(number)
        return peak_of(number)

    peak = re.escape(f"{peak_of(tried[-1]) / 1000:.1f}")
    with pytest.raises(
        RunError,
        match=rf"^training needs {peak} kB of a device, which has {space / 1000:.1f} kB, with "
        rf"config\.num_microbatches = {tried[-1]}: lower problem\.num_prompts or seeds",
    ):
        choose(space, count, *parts)
    assert seen == tried


@cases("size", None, 1000)
def test_refused_program_never_fits(monkeypatch, size):
    refused, tried = DeviceMemory(0, size, refused="RESOURCE_EXHAUSTED: no room"), []
    job = SimpleNamespace(length=Length(1, 12))
    monkeypatch.setattr(programs, "in_microbatches", lambda _, number: None if 12 % number else job)

    def compile_again(_, number):
        tried.append(number)
        return DeviceMemory(0, 900) if number == 4 else refused

    assert choose_microbatches(job, refused, compile_again, 1000) == 4
    assert tried == [2, 4]
    for space in (None, 1000):
        with pytest.raises(
            RunError, match=r"training needs more .*; the compiler says: .* no room$"
        ):
            choose_microbatches(job, refused, lambda *_: refused, space)


def test_evaluation_that_does_not_fit_is_an_error():
    for fits in (None, DeviceMemory(0, None), DeviceMemory(0, 3000)):
        require_evaluation(fits, 3000)
    with pytest.raises(RunError, match=r"evaluation needs 3\.0 kB .* 2\.9 kB: lower eval_prompts"):
        require_evaluation(DeviceMemory(0, 3000), 2900)


def test_available_memory_is_limit_minus_resident(monkeypatch):
    monkeypatch.setattr(memory, "resident_bytes", lambda: 200)
    monkeypatch.setattr(memory, "limit_bytes", lambda: 1000)
    # Several devices of one CPU share its memory.
    assert [memory.available_bytes(devices) for devices in (1, 2)] == [800, 400]
    monkeypatch.setattr(memory, "limit_bytes", lambda: None)
    assert memory.available_bytes(1) is None


def test_processes_of_a_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "resident_bytes", lambda: 200)
    monkeypatch.setattr(memory, "limit_bytes", lambda: 1000)
    monkeypatch.setattr(memory.platform, "node", lambda: "here")
    monkeypatch.setattr(
        memory.processes, "gather_values", lambda x: [x, x, "there"] if x == "here" else [x]
    )
    assert memory.available_bytes(1) == 1000 // 2 - 200


@cases("file", "{}/memory.max", "memory/{}/memory.limit_in_bytes")
@cases("group", "", "slice", "slice/job")
def test_limit_is_of_container_or_machine(tmp_path, monkeypatch, file, group):
    groups = tmp_path / "self"
    groups.write_text("4:cpu,memory:/slice/job\n3:cpu:/other\n0::/slice/job\n")
    limit, other = (tmp_path / f"./{file.format(each)}" for each in (group, "other"))
    for each in (limit, other):
        each.parent.mkdir(parents=True, exist_ok=True)
    monkeypatch.setattr(memory, "CGROUPS", tmp_path)
    monkeypatch.setattr(memory, "OWN_CGROUPS", groups)
    machine = memory.limit_bytes()
    other.write_text("1\n")
    limit.write_text("5000\n")
    assert memory.limit_bytes() == 5000 < machine
    for text in ("max\n", str(2 * machine)):
        limit.write_text(text)
        assert memory.limit_bytes() == machine


@cases(
    "used, size",
    ("Used 20.00G", 20 * 2**30),
    ("Used 2T", 2**41),
    ("(3.5M", 7 * 2**19),
    ("Used 1K", 1024),
    ("", None),
)
def test_program_that_the_compiler_rejects_leaves_its_size(monkeypatch, used, size):
    message = f"RESOURCE_EXHAUSTED: Ran out of memory, HLO temporaries {used} of 15.75G hbm."

    def reject(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(programs, "compile_kind", reject)
    rejected = programs.compile_if_it_fits(SimpleNamespace(rebuild=lambda n: None), None, None)
    assert rejected == (None, DeviceMemory(0, size, refused=message))
    with pytest.raises(jax.errors.JaxRuntimeError):
        programs.compile_if_it_fits(SimpleNamespace(rebuild=None), None, None)


def test_microbatches_do_not_reduce_the_memory_of_sampling():
    update, unknown = DeviceMemory(1, 70, 6), DeviceMemory(1, None)
    assert update.beside(DeviceMemory(1, 90, 5)) == DeviceMemory(1, 90, 6, 90)
    assert update.beside(DeviceMemory(1, 50, 5)) == DeviceMemory(1, 70, 6, 50)
    assert (update.beside(unknown), unknown.beside(update)) == (update, unknown)


TINY = ["--problem.num_prompts=6", "--problem.group_size=2", "--model.width=8", "--model.layers=1"]


def job_of(out, *flags):
    argv = [f"--out={out}", *TINY, "--seeds=1", "--devices=1", "--warm_start.steps=0", *flags]
    return prepare(language, Experiment.parse(language, argv).read())


@cases(
    "flags, numbers",
    (["grpo"], [1, 2, 3, 6, 12, 24]),
    # A method that does not share prompts.
    (["grpo", "--config.extra_samples=1"], [1, 2, 3, 6, 9, 18]),
    # A method that shuffles rows.
    (["grpo", "--config.num_minibatches=2"], [1, 2, 3, 4, 6, 12]),
    (["grpo", "--devices=2", "--mesh=data:2"], [1, 3, 6, 12]),
    (["dapo", "--problem.num_prompts=8", "--config.train_prompts=6"], [1, 2, 3, 6, 12, 24]),
)
def test_microbatch_is_of_whole_prompts_or_of_one(tmp_path, monkeypatch, flags, numbers):
    monkeypatch.setattr(programs, "check_job", lambda job: None)
    one = ["--problem.group_size=4", "--config.num_minibatches=1", f"--algorithm={flags[0]}"]
    job = job_of(tmp_path, *one, *flags[1:])
    assert job.output.settings[MICROBATCHES] is None
    assert [n for n in range(1, 33) if programs.in_microbatches(job, n) is not None] == numbers
    second = programs.in_microbatches(job, numbers[1])
    assert programs.in_microbatches(second, numbers[2]) is not None


def test_chosen_number_is_exported(tmp_path):
    began = SimpleNamespace(begin=lambda *start: began.starts.append(start), starts=[])
    began.write = began.close = lambda *_: None
    shown = SimpleNamespace(report=None, phase=None, update=lambda *_: None)
    job = job_of(tmp_path, "--algorithm=grpo")
    given = job_of(tmp_path, "--algorithm=grpo", f"--{MICROBATCHES}=3")
    with ExportingReporter(shown, [began], ("title", job.output.settings, tmp_path)) as reporter:
        record_microbatches(job, 3, tmp_path, print)
        reporter.update({"step": 0}, 1.0)
    assert list(job.output.settings) == list(given.output.settings)
    assert began.starts[0][1][MICROBATCHES] == 3


@cases("flag, number", (f"--{MICROBATCHES}=2", 2), ("--deterministic", 1))
def test_no_number_is_chosen_if_given_or_deterministic(tmp_path, flag, number):
    job = job_of(tmp_path, "--algorithm=grpo", flag)
    assert job.rebuild is None
    assert job.output.settings[MICROBATCHES] == number


SFT = [
    *("--algorithm=sft", "--devices=1", "--seeds=1", "--show=0", "--eval_prompts=2"),
    *("--problem.num_prompts=64", "--model.width=8", "--model.mlp_width=64"),
]


def run_in(space, out, *more):
    """Returns the number of microbatches and the peak of a run on a device of `space` bytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda devices: space)
        assert launch.language([f"--out={out}", *SFT, "--total_steps=64", *more]) == 0
    config = json.loads((out / "config.json").read_text())
    return config[MICROBATCHES], read(out / "metrics.jsonl")[0]["memory/peak_bytes"]


@pytest.fixture(scope="module")
def plenty(tmp_path_factory):
    """Returns the peak of a run in plenty of memory, and the run's lines."""
    out = tmp_path_factory.mktemp("plenty") / "run"
    with costs.uncounted(), contextlib.redirect_stdout(io.StringIO()) as lines:
        number, peak = run_in(10**12, out)
    assert number == 1
    return peak, lines.getvalue()


def test_supervised_training_prints_both_losses_and_its_memory(plenty):
    _, said = plenty  # cross entropies of training and held-out prompts
    assert re.search(r": loss \S+  held out loss \S+  64/64 ", said)
    assert re.search(r"a device holds \S+ kB of state and needs \S+ \S+ of 1\.0 TB", said)


@pytest.fixture(scope="module")
def little(plenty, tmp_path_factory):
    """Returns folder, microbatches, peak and printed lines of a run in one byte less memory."""
    out = tmp_path_factory.mktemp("little") / "run"
    with costs.uncounted(), contextlib.redirect_stdout(io.StringIO()) as lines:
        number, smaller = run_in(plenty[0] - 1, out)
    return out, number, smaller, lines.getvalue()


def test_run_in_little_memory_takes_microbatches(plenty, little):
    _, number, smaller, said = little
    assert number > 1
    assert smaller < plenty[0]
    assert f"--config.num_microbatches={number}, to fit in memory" in said


def test_resumed_run_keeps_its_number(little):
    out, number, smaller, _ = little
    assert run_in(10**12, out, "--resume") == (number, smaller)


def test_start_in_more_memory_chooses_anew(plenty, tmp_path):
    peak, _ = plenty
    with pytest.raises(RunError, match="evaluation needs"):
        run_in(1, tmp_path / "none")
    assert MICROBATCHES not in json.loads((tmp_path / "none" / "config.json").read_text())
    assert run_in(10**12, tmp_path / "none", "--resume") == (1, peak)
