"""Finds by data flow whether a function of rows mixes the rows.

The function is traced for two numbers of rows. An axis whose size differs between the two traced
programs is the axis of the rows. A value mixes rows if it lacks the axis of the rows but is
computed from rows, or if it differs with the number of rows. An operation that this module does not
list counts as mixing rows.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal

MIXED = -1

PLAIN = """
    abs acos acosh add add_any and argmax argmin asin asinh atan atan2 atanh broadcast_in_dim cbrt
    ceil clamp concatenate convert_element_type copy cos cosh cumlogsumexp cummax cummin cumprod
    cumsum digamma div dot_general dynamic_slice eq erf erf_inv erfc exp exp2 expm1 floor gather ge
    gt integer_pow iota is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not
    or pad pow reduce_and reduce_max reduce_min reduce_or reduce_precision reduce_sum rem reshape
    reshard rev round rsqrt select_n sharding_constraint sign sin sinh slice sort split sqrt square
    squeeze stack stop_gradient sub tan tanh top_k transpose xor
""".split()  # noqa: SIM905  a list literal would need one line per name
CALLS = {"closed_call", "custom_jvp_call", "custom_vjp_call", "jit"}
# parameters that the shapes imply, and one parameter that may be NaN
UNREAD = {"shape", "new_sizes", "limit_indices", "slice_sizes", "fill_value"}
Pair = Sequence[
    Any
]  # two versions of a program, equation or value, traced with two numbers of rows


def is_row_wise(programs: tuple[ClosedJaxpr, ClosedJaxpr], rows: tuple[int, int]) -> bool:
    """Returns whether row i of each result depends on row i of the arguments alone.

    Args:
      programs: jaxprs of the function for two numbers of rows, the first axis of its arguments and
        results.
      rows: two numbers of rows, each at least 2.
    """
    if any(not type(x).__name__.endswith("DebugEffect") for x in programs[0].effects):
        return False
    try:
        arguments = [_axis(x, rows) != MIXED for x in _pairs(programs, "jaxpr.invars")]
        return all(_results(programs, rows, arguments))
    # The two programs differ beyond the number of rows.
    except (AttributeError, KeyError, ValueError):
        return False


def _results(programs: Pair, rows: tuple[int, int], arguments: Sequence[bool]) -> list[bool]:
    """Returns whether each result of a program is row-wise, from whether its arguments are."""
    twins: dict[Any, tuple[Any, bool]] = {}

    def write(name: str, pair: Pair, row_wise: Sequence[bool]) -> None:
        for (one, two), ok in zip(_pairs(pair, name), row_wise, strict=True):
            twins[one] = two, ok

    def read(name: str, pair: Pair) -> list[bool]:
        return [
            _equal(one.val, two.val) if isinstance(one, Literal) else twins[one] == (two, True)
            for one, two in _pairs(pair, name)
        ]

    write("jaxpr.constvars", programs, [_equal(*pair) for pair in _pairs(programs, "consts")])
    write("jaxpr.invars", programs, arguments)
    for pair in _pairs(programs, "jaxpr.eqns"):
        name, operands = pair[0].primitive.name, read("invars", pair)
        if name in CALLS:
            inner = [x.params.get("jaxpr") or x.params["call_jaxpr"] for x in pair]
            write("outvars", pair, _results(inner, rows, operands))
        else:
            ok = pair[1].primitive.name == name and all(operands) and _keeps(pair, rows)
            write("outvars", pair, [ok] * len(pair[0].outvars))
    return read("jaxpr.outvars", programs)


def _keeps(pair: Pair, rows: tuple[int, int]) -> bool:
    """Returns whether an operation on row-wise operands does not mix rows."""
    name, params = pair[0].primitive.name, pair[0].params
    before = [_axis(x, rows) for x in _pairs(pair, "invars")]
    after = [_axis(x, rows) for x in _pairs(pair, "outvars")]
    differ = [key for key in params.keys() - UNREAD if params[key] != pair[1].params[key]]
    if name not in PLAIN or MIXED in after or differ:
        return False
    if None in after:  # one value for all rows, which must not depend on any row
        return set(before) <= {None}
    along = [params.get(key) for key in ("axis", "dimension", "dimensions") if name != "squeeze"]
    if any(after[0] in np.atleast_1d(axes) for axes in along):
        return False
    if name == "pad":
        return not any(params["padding_config"][after[0]])
    if name == "reshape":
        shapes = pair[0].invars[0].aval.shape, pair[0].outvars[0].aval.shape
        return np.prod(shapes[0][: before[0]]) == np.prod(shapes[1][: after[0]])
    if name == "gather" and before[0] is not None:
        axis, numbers = before[0], params["dimension_numbers"]
        every = axis not in numbers.start_index_map and params["slice_sizes"][axis] == rows[0]
        return every or axis in numbers.operand_batching_dims
    return True


def _axis(pair: Pair, rows: tuple[int, int]) -> int | None:
    """Returns a value's axis of rows.

    None if no axis grows with the rows; `MIXED` if several axes do, or one grows by another amount.
    """
    shapes = np.array([x.aval.shape for x in pair], int)
    axes = np.flatnonzero(shapes[0] != shapes[1])
    if not axes.size:
        return None
    return int(axes[0]) if shapes[:, axes].T.tolist() == [list(rows)] else MIXED


def _pairs(pair: Pair, name: str) -> list[Any]:
    """Pairs the entries of a program's or equation's attribute for both numbers of rows."""
    return list(zip(*map(operator.attrgetter(name), pair), strict=True))


def _equal(one: Any, two: Any) -> bool:
    """Returns whether a constant is the same for both numbers of rows."""
    if one is two or any(isinstance(x, jax.core.Tracer) for x in (one, two)):
        return one is two
    return np.shape(one) == np.shape(two) and np.array(one).tobytes() == np.array(two).tobytes()
