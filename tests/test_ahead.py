"""Programs for machines that are not here: what is counted in HLO, and what is refused."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import run
from jaxrl_po.algorithms import sft
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer
from jaxrl_po.language.settings import Settings
from jaxrl_po.language.tasks import addition
from jaxrl_po.run.ahead import counts as counting
from jaxrl_po.run.ahead import products, report, topology
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment import ahead
from jaxrl_po.run.experiment.composition import Composition
from jaxrl_po.run.experiment.models import Start

# A loop as a TPU's compiler writes it: a product of 128 rows by 64 columns as a convolution, its
# rows in the chip's own memory (S(1)), its weights a slice of a stack.
TPU = (Path(__file__).parent / "golden_tpu_loop.hlo").read_text(encoding="utf-8")


def test_a_loop_of_a_tpu_counts_as_often_as_it_turns():
    found = counting.Program(TPU).counts()
    assert found.flops == 7 * 2 * 128 * 256 * 64
    assert found.padded == 2 * found.flops  # 64 columns on a unit of 128
    assert counting.Program(TPU, unit=256).counts().padded == 4 * found.flops
    # Of the stack only a slice is read, and that is all that leaves the chip's own memory.
    assert found.useful == 7 * 256 * 64 * 2
    assert found.bytes == 2 * found.useful  # rows of 64 in tiles of 128
    assert found.elementwise == 7 * 128 * 64
    assert (found.kernels, found.cycles) == (7 * 2, 7 * 384)
    size = 128 * 64 * 4
    assert found.collectives == {"all-reduce": counting.Transfer(7, 7 * size, 7 * 2 * 3 / 4 * size)}
    assert found.bounds == {}


def test_a_gather_beside_a_product_counts_once_and_a_scattered_sum_as_such():
    """As a TPU's compiler writes both: every fusion names the gather that it carries on."""
    text = (Path(__file__).parent / "golden_tpu_gather.hlo").read_text(encoding="utf-8")
    found = counting.Program(text).counts()
    gathered, summed = 64 * 64 * 2, 64 * 64 * 4
    assert found.collectives == {
        "all-gather": counting.Transfer(1, gathered, 3 / 4 * gathered),
        "reduce-scatter": counting.Transfer(1, summed, 3 / 4 * summed),
    }
    assert found.flops == 2 * 32 * 64 * 16
    # The shard once and the whole; the product; a slice, though into the chip's memory; the sum.
    moved = 64 * 16 * 2 + gathered, (32 * 64 + 64 * 16 + 32 * 16) * 2, 64 * 2, 5 / 4 * summed
    assert found.bytes == sum(moved)


def test_a_loop_that_may_end_early_counts_to_its_bound_and_says_so():
    text = TPU.replace(
        "ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT",
        "%lt = pred[]{:T(512)} compare(%j, %n), direction=LT\n"
        "  %more = pred[]{:T(512)} constant(true)\n"
        "  ROOT %go = pred[]{:T(512)} and(%lt, %more)",
    )
    found = counting.Program(text).counts()
    assert found.flops == 7 * 2 * 128 * 256 * 64
    assert found.bounds == {"jit(f)/while": 7}
    unknown = counting.Program(text.replace("constant(7)", "custom-call()")).counts()
    assert unknown.flops == 2 * 128 * 256 * 64
    assert unknown.bounds == {"jit(f)/while": 0}


def test_kernels_that_are_not_hlo_are_named_and_what_follows_them_is_counted():
    """Their metadata go over several lines, which a brace begins."""
    kernel = (
        '%k = f32[128,256]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"block": 512\n}}, metadata={op_name="jit(f)"}\n'
    )
    placed = '%a = f32[128,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    found = counting.Program(TPU.replace("  %y = ", f"  {kernel}  {placed}  %y = ")).counts()
    assert found.uncounted == {"tpu_custom_call": 7}
    plain = counting.Program(TPU).counts()
    assert (found.flops, found.collectives) == (plain.flops, plain.collectives)
    assert found.bytes == plain.bytes + 7 * 128 * 256 * 4


def test_products_of_a_compiled_program_are_those_of_its_loops():
    """The compiler's own analysis counts the body once."""

    def f(x, w, v):
        def turn(x, _):
            x = jnp.tanh(x @ w)
            inner = jax.lax.fori_loop(0, 3, lambda _, y: jnp.cos(y) @ v, x)
            return inner, None

        return jax.lax.scan(turn, x, None, length=7)[0]

    square = jnp.ones((64, 64))
    program = jax.jit(f).lower(jnp.ones((32, 64)), square, square).compile()
    one = 2 * 32 * 64 * 64
    assert counting.Program(program.as_text()).counts().flops == 7 * (1 + 3) * one
    assert program.cost_analysis()["flops"] < 4 * one

    def batched(x, w):
        return jnp.einsum("sbi,sio->sbo", x, w)

    shapes = jnp.ones((5, 32, 64)), jnp.ones((5, 64, 16))
    program = jax.jit(batched).lower(*shapes).compile()
    assert counting.Program(program.as_text()).counts().flops == 5 * 2 * 32 * 64 * 16


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize(
    ("stride", "low", "holes", "spread"), [(1, 0, 1, 1), (2, 1, 1, 2), (3, 2, 4, 1), (2, 1, 2, 1)]
)
def test_taps_of_a_window_are_those_that_meet_an_element(size, kernel, stride, low, holes, spread):
    out = 6
    window = {"stride": (stride,), "pad": (low, 0), "lhs_dilate": (holes,), "rhs_dilate": (spread,)}
    places = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    meets = (places >= 0) & (places <= (size - 1) * holes) & (places % holes == 0)
    assert products.taps(size, kernel, out, window) == meets.sum()


def test_an_experiment_is_compiled_for_devices_and_not_run(tmp_path):
    small = {"problem.num_envs": 4, "problem.num_steps": 8, "config.num_epochs": 1}
    experiment = run.Experiment(
        env="CartPole-v1", seeds=2, total_steps=64, out=tmp_path / "run", over=small
    )
    (found,) = run.compile_for(experiment, "cpu:2")
    assert not (tmp_path / "run").exists()
    assert found.fits
    assert found.why == ""
    assert found.seconds == {}
    assert found.memory["peak"] > found.memory["state"] > 0
    assert found.counts.flops > 0
    assert found.counts.collectives == {}
    assert json.loads(json.dumps(found.as_json()))["counts"]["flops"] == found.counts.flops
    said = "\n".join(report.lines(found))
    assert "cpu:2: an iteration fits" in said
    assert "counted once" in said
    with pytest.raises(ConfigError, match="compile_for trains nothing"):
        run.train(run.Experiment(env="CartPole-v1", out=tmp_path / "run", compile_for="cpu:2"))


def test_what_limits_a_program_and_what_does_not_fit():
    chip = topology.CHIPS["v5e"]
    machine = topology.Machine("tpu:v5e:1x1", (), Target("tpu", 1, 1), chip)
    counts = counting.Program((TPU), unit=chip.unit).counts()
    seconds = report._seconds(counts, machine)
    assert seconds["products"] == counts.padded / 197e12
    assert seconds["memory"] == counts.bytes / 819e9
    assert seconds["links"] == counts.collectives["all-reduce"].sent / 200e9
    assert seconds["operations"] == 7 * 384 / 1.5e9
    words = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space "
        "hbm. Used 20.10G of 15.75G hbm. Exceeded hbm capacity by 4.35G.\n\nTotal hbm usage"
    )
    lost = report.Report("tpu:v5e:1x1", "an iteration", False, {}, None, {}, 1.0)
    lost = dataclasses.replace(lost, why=report._exceeded(words))
    (said,) = report.lines(lost)
    assert "Used 20.10G of 15.75G hbm. Exceeded hbm capacity by 4.35G" in said
    assert "--config.num_microbatches" in said
    words = (
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory "
        "required for HLO temporaries (38.09G) exceeds available HBM (15.75G). HLO module: jit_f."
    )
    assert report._exceeded(words) == "temporaries (38.09G) exceeds available HBM (15.75G)"


def test_programs_are_reported_with_the_fewest_microbatches(monkeypatch):
    """Those with which the update fits, whether sampling does or not."""
    monkeypatch.setattr(report, "reports", lambda job, *_: job.made(job.number))
    names = report.SAMPLING, "update of an iteration"

    def fitting(space, sampling_fits):
        def made(number):
            peak = 8 + 80 // number
            for name, fits in zip(names, (sampling_fits, peak <= space), strict=True):
                yield report.Report("m", name, fits, {"peak": peak}, None, {}, 1.0)

        def rebuild(number):
            return job(number) if number in (2, 4, 8) else None

        def job(number):
            return SimpleNamespace(number=number, made=made, rebuild=rebuild, steps_per_iteration=8)

        plan = SimpleNamespace(job=job(1), placement=0, setup=SimpleNamespace(axes=0))
        machine = SimpleNamespace(chip=SimpleNamespace(memory=space))
        return ahead._fitting(plan, machine)

    for space, suffix in ((88, ""), (28, " in 4 microbatches"), (25, " in 8 microbatches")):
        for sampling_fits in (True, False):
            found = [(each.program, each.fits) for each in fitting(space, sampling_fits)]
            assert found == [(names[0] + suffix, sampling_fits), (names[1] + suffix, True)]
    reports = fitting(17, True)
    found = [next(reports), next(reports)]
    assert [(each.program, each.fits) for each in found] == [
        (f"{names[0]} in 8 microbatches", True),
        (f"{names[1]} in 8 microbatches", False),
    ]
    with pytest.raises(RunError, match="training needs 18 bytes of a device, which has 17 bytes"):
        next(reports)


@pytest.mark.parametrize("columns", [None, 4])
def test_programs_that_sample_nothing_are_of_the_machine_too(columns):
    task = addition(1)
    model = Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
    placement = Placement(1, 1, 1, described=(SimpleNamespace(platform="tpu"),))
    composed = Composition(
        records={"": SimpleNamespace(algorithm="sft")},
        algorithm=sft,
        placement=placement,
        start=Start(task, model, None, None, ""),
        settings=Settings(num_prompts=2),
        teacher=None,
        verify=True,
        columns=columns,
        policy=model,
        critic=None,
    )
    assert composed._problem(None, {}).target == placement.target


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tpu", "must name a chip: v5e, v5p, v6e"),
        ("tpu:v9:2x4", "must name a chip: v5e, v5p, v6e"),
        ("cpu:0", "must read like tpu:v5e:4x4, cpu:8 or gpu"),
        ("v5e:4x4", "must read like tpu:v5e:4x4, cpu:8 or gpu"),
        ("gpu", "needs a GPU that is attached"),
    ],
)
def test_machines_that_are_not_known_are_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        topology.describe(name)
