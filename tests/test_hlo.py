"""Tests counts of the work in optimised HLO, and the table of programs for TPUs."""

import dataclasses
import doctest
import json
from pathlib import Path
from types import SimpleNamespace

import hlo
import hlo_counts
import hlo_products
import jax
import jax.numpy as jnp
import numpy as np
import tpu
from tables import cases

from jaxrl_po import run

# Loop as a TPU's compiler writes it: a product of 128 rows by 64 columns as a convolution, its rows
# in the chip's own memory (S(1)), its weights a slice of a stack.
TPU = (Path(__file__).parent / "golden_tpu_loop.hlo").read_text(encoding="utf-8")


def test_tpu_loop_counts_once_per_iteration():
    found = hlo_counts.Program(TPU).counts()
    assert found.flops == 7 * 2 * 128 * 256 * 64
    assert found.padded == 2 * found.flops  # a product of 64 columns on a unit of 128 columns
    assert hlo_counts.Program(TPU, unit=256).counts().padded == 4 * found.flops
    # Only a slice of the stack is read, and no other data leave the chip's own memory.
    assert found.useful == 7 * 256 * 64 * 2
    assert found.bytes == 2 * found.useful  # rows of 64 numbers are stored in tiles of 128
    assert found.elementwise == 7 * 128 * 64
    assert (found.kernels, found.cycles) == (7 * 2, 7 * 384)
    size = 128 * 64 * 4
    assert found.collectives == {
        "all-reduce": hlo_counts.Transfer(7, 7 * size, 7 * 2 * 3 / 4 * size)
    }
    assert found.bounds == {}


def test_gather_beside_product_counts_once_and_scatter_sums():
    """A TPU's compiler writes a fusion for each part: every fusion names the gather that the fusion
    continues."""
    text = (Path(__file__).parent / "golden_tpu_gather.hlo").read_text(encoding="utf-8")
    found = hlo_counts.Program(text).counts()
    gathered, summed = 64 * 64 * 2, 64 * 64 * 4
    assert found.collectives == {
        "all-gather": hlo_counts.Transfer(1, gathered, 3 / 4 * gathered),
        "reduce-scatter": hlo_counts.Transfer(1, summed, 3 / 4 * summed),
    }
    assert found.flops == 2 * 32 * 64 * 16
    # The gather moves the shard and the full array; the product, a slice even into the chip's
    # memory, and the sum follow.
    moved = 64 * 16 * 2 + gathered, (32 * 64 + 64 * 16 + 32 * 16) * 2, 64 * 2, 5 / 4 * summed
    assert found.bytes == sum(moved)


def test_early_ending_loop_counts_to_its_declared_bound():
    text = TPU.replace(
        "ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT",
        "%lt = pred[]{:T(512)} compare(%j, %n), direction=LT\n"
        "  %more = pred[]{:T(512)} constant(true)\n"
        "  ROOT %go = pred[]{:T(512)} and(%lt, %more)",
    )
    found = hlo_counts.Program(text).counts()
    assert found.flops == 7 * 2 * 128 * 256 * 64
    assert found.bounds == {"jit(f)/while": 7}
    unknown = hlo_counts.Program(text.replace("constant(7)", "custom-call()")).counts()
    assert unknown.flops == 2 * 128 * 256 * 64
    assert unknown.bounds == {"jit(f)/while": 0}


def test_non_hlo_kernels_are_named_and_counting_continues():
    """The metadata of kernels span several lines, and the line after them begins with a brace."""
    kernel = (
        '%k = f32[128,256]{1,0:T(8,128)} custom-call(%x), custom_call_target="tpu_custom_call", '
        'frontend_attributes={kernel_metadata={\n"block": 512\n}}, metadata={op_name="jit(f)"}\n'
    )
    placed = '%a = f32[128,256]{1,0} custom-call(), custom_call_target="AllocateBuffer"\n'
    found = hlo_counts.Program(TPU.replace("  %y = ", f"  {kernel}  {placed}  %y = ")).counts()
    assert found.uncounted == {"tpu_custom_call": 7}
    plain = hlo_counts.Program(TPU).counts()
    assert (found.flops, found.collectives) == (plain.flops, plain.collectives)
    assert found.bytes == plain.bytes + 7 * 128 * 256 * 4


def test_products_of_compiled_program_equal_those_of_loops():
    """The compiler's own analysis counts the body of a loop once."""

    def f(x, w, v):
        def turn(x, _):
            x = jnp.tanh(x @ w)
            return jax.lax.fori_loop(0, 3, lambda _, y: jnp.cos(y) @ v, x), None

        return jax.lax.scan(turn, x, None, length=7)[0]

    square = jnp.ones((64, 64))
    program = jax.jit(f).lower(jnp.ones((32, 64)), square, square).compile()
    one = 2 * 32 * 64 * 64
    assert hlo_counts.Program(program.as_text()).counts().flops == 7 * (1 + 3) * one
    assert program.cost_analysis()["flops"] < 4 * one

    def batched(x, w):
        return jnp.einsum("sbi,sio->sbo", x, w)

    shapes = jnp.ones((5, 32, 64)), jnp.ones((5, 64, 16))
    program = jax.jit(batched).lower(*shapes).compile()
    assert hlo_counts.Program(program.as_text()).counts().flops == 5 * 2 * 32 * 64 * 16


@cases("size", 1, 4, 7)
@cases("kernel", 1, 3)
@cases("stride, low, holes, spread", (1, 0, 1, 1), (2, 1, 1, 2), (3, 2, 4, 1), (2, 1, 2, 1))
def test_window_taps_are_those_that_meet_elements(size, kernel, stride, low, holes, spread):
    out = 6
    window = {"stride": (stride,), "pad": (low, 0), "lhs_dilate": (holes,), "rhs_dilate": (spread,)}
    places = np.arange(out)[:, None] * stride + np.arange(kernel) * spread - low
    meets = (places >= 0) & (places <= (size - 1) * holes) & (places % holes == 0)
    assert hlo_products.taps(size, kernel, out, window) == meets.sum()


def test_times_follow_the_figures_of_the_chip():
    speed = tpu.SPEEDS["v5e"]
    counts = hlo_counts.Program(TPU, speed.unit).counts()
    assert tpu.times(counts, speed) == {
        "products": counts.padded / 197e12,
        "memory": counts.bytes / 819e9,
        "links": counts.collectives["all-reduce"].sent / 200e9,
        "operations": 7 * 384 / 1.5e9,
    }


def test_table_row_is_counted_from_the_text(monkeypatch):
    """The row of a program that does not fit reports the compiler's message.

    The row of an unreadable program reports the program's memory.
    """
    memory = {"arguments": 10, "outputs": 0, "temporaries": 20, "code": 0, "total": 30}
    whole = run.CompiledProgram("iteration", "tpu:v5e:1x1", 1.0, memory, 100, True)
    refused = dataclasses.replace(whole, memory={}, fits=False, reason="Used 3G of 2G")
    executables = SimpleNamespace(as_text=lambda: TPU), SimpleNamespace(as_text=unreadable), None
    lines = []
    for program, executable in zip((whole, whole, refused), executables, strict=True):
        program = dataclasses.replace(program, executable=executable)
        monkeypatch.setattr(run, "compile_for", lambda *_, found=program: iter([found]))
        row = tpu.Row("ppo", "tpu:v5e:1x1", ("control",))
        lines.append(tpu.line(json.loads(json.dumps(tpu.figures(row)))))
    head, work = "| ppo | v5e:1x1 |", "29.4 MFLOP, 50% | 458.8 kB | 344.1 kB | 0.0 ms, operations"
    assert lines == [
        f"{head} 360.4 kB / 30 bytes | {work} |\n",
        f"{head} 10 bytes / 30 bytes | its program cannot be read: no text | | | |\n",
        f"{head} Used 3G of 2G | | | | |\n",
    ]


def unreadable():
    raise jax.errors.JaxRuntimeError("no text\nof this program")


def test_examples_of_the_docstrings_hold():
    assert [doctest.testmod(module).failed for module in (hlo, tpu)] == [0, 0]
