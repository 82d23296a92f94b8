"""Counts FLOPs of the matrix products in optimised HLO, which are convolutions on a TPU."""

import collections
import math
import re
from collections.abc import Mapping

from hlo import Computation, Instruction, arrays_of


def product(within: Computation, each: Instruction, unit: int) -> tuple[float, float]:
    """Returns the FLOPs of a matrix product.

    Plain, and with dimensions rounded up to the size of a matrix unit.
    """
    left, right = (arrays_of(within, operand)[0] for operand in each.operands[:2])
    out = each.arrays[0]
    if each.opcode == "dot":
        contracted = math.prod(left.dims[i] for i in each.integers("lhs_contracting_dims"))
        batch = math.prod(left.dims[i] for i in each.integers("lhs_batch_dims"))
        rows = left.size // max(1, contracted * batch)
        columns = right.size // max(1, contracted * batch)
        return _padded(batch, rows, contracted, columns, unit)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
    assert labels is not None
    of_left, of_right, of_out = labels[1], labels[2], labels[3]
    meeting = math.prod(
        taps(
            left.dims[of_left.index(s)],
            right.dims[of_right.index(s)],
            out.dims[of_out.index(s)],
            _window(each, int(s)),
        )
        for s in of_left
        if s.isdigit()
    )
    rows, columns = out.dims[of_out.index("b")], out.dims[of_out.index("f")]
    return _padded(meeting, rows, right.dims[of_right.index("i")], columns, unit)


def _padded(times: int, rows: int, inner: int, columns: int, unit: int) -> tuple[float, float]:
    padded = _up(rows, 8) * _up(inner, unit) * _up(columns, unit)
    return 2.0 * times * rows * inner * columns, 2.0 * times * padded


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _window(each: Instruction, axis: int) -> dict[str, tuple[int, ...]]:
    """Returns stride, padding and dilations of one spatial dimension of a convolution."""
    text = re.search(r"window=\{([^}]*)\}", each.rest)
    found = collections.defaultdict[str, tuple[int, ...]](lambda: (1,))
    for name, value in re.findall(r"(\w+)=([\w-]+)", text[1] if text else ""):
        parts = value.split("x")
        found[name] = tuple(int(i) for i in parts[axis].split("_"))
    if "pad" not in found:
        found["pad"] = (0, 0)
    return found


def taps(size: int, kernel: int, out: int, window: Mapping[str, tuple[int, ...]]) -> int:
    """Counts pairs of output and kernel positions that meet an element.

    Padding and gaps do not count.

    The compiler writes batched products as convolutions whose window meets one element at a time.
    """
    stride, low = window["stride"][0], window["pad"][0]
    spread, holes = window["rhs_dilate"][0], window["lhs_dilate"][0]
    last = (size - 1) * holes
    found = 0
    for tap in range(kernel):
        first = tap * spread - low
        # Output positions o with 0 <= first + o·stride <= last, where first + o·stride is a
        # multiple of the dilation.
        period = holes // math.gcd(holes, stride)
        for o in range(min(period, out)):
            if (first + o * stride) % holes == 0:
                lowest = max(o, math.ceil(-first / stride))
                lowest += (o - lowest) % period
                highest = min(out - 1, (last - first) // stride)
                found += max(0, (highest - lowest) // period + 1)
                break
    return found
