"""What one run of a compiled program does, counted in its optimised HLO, loops by their trips.

XLA's own cost analysis counts the body of a loop once. Here a loop counts as often as it turns: by
its known trip count, or by the constant that its condition compares a counter with.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# What neither computes nor moves anything by itself.
FREE = frozenset(
    (
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "call"),
        *("partition-id", "replica-id", "opt-barrier", "while", "conditional", "add-dependency"),
    )
)
# The same values in another form.
ALIASES = frozenset(("bitcast", "copy", "convert", "reshape", "broadcast"))
# What moves values without computing any, or is counted by what it calls.
MOVES = frozenset(
    (
        *("slice", "dynamic-slice", "dynamic-update-slice", "gather", "scatter", "pad", "iota"),
        *("concatenate", "transpose", "reverse", "fusion", "custom-call", "sort", "rng"),
    )
)
ASYNC = ("-start", "-done", "-update")
_ARRAY = re.compile(r"([a-z]+[0-9]*(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Array(NamedTuple):
    """One array of a shape: its dtype, dimensions and layout."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes without padding."""
        return int(self.size * width(self.dtype))

    @property
    def held(self) -> int:
        """Bytes as laid out: the minor dimensions are rounded up to whole tiles."""
        order, _, rest = self.layout.partition(":")
        tile = re.match(r"T\(([\d,]*)\)", rest)
        if not (tile and tile[1] and self.dims):
            return self.bytes
        physical = [self.dims[int(i)] for i in reversed(order.split(",")) if i]
        tiles = [int(t) for t in tile[1].split(",")]
        physical = [1] * (len(tiles) - len(physical)) + physical
        for at, t in enumerate(tiles, start=len(physical) - len(tiles)):
            physical[at] = -(-physical[at] // t) * t
        return int(math.prod(physical) * width(self.dtype))

    @property
    def on_chip(self) -> bool:
        """Whether it lies in the chip's scratch memory, not in HBM."""
        return "S(1)" in self.layout


def width(dtype: str) -> float:
    """Bytes of an element.

    Example:
      >>> width("f32"), width("bf16"), width("pred"), width("s4")
      (4.0, 2.0, 1.0, 0.5)
    """
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1.0 if dtype == "pred" else 0.0


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    arrays: tuple[Array, ...]
    opcode: str
    operands: tuple[str, ...]
    rest: str

    def called(self) -> Iterator[tuple[str, str]]:
        """How and which computations it calls."""
        for role, name in _CALLED.findall(self.rest):
            yield role, name
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.rest):
            for name in branches[1].split(","):
                yield "branch", name.strip().lstrip("%")

    def attribute(self, name: str) -> str:
        """The text of an attribute; empty without it."""
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return found[1] if found else ""

    def integers(self, name: str) -> list[int]:
        """The integers of an attribute."""
        return [int(i) for i in re.findall(r"-?\d+", self.attribute(name))]


class Computation(NamedTuple):
    """The instructions of a computation by name, its root, and who uses what."""

    of: dict[str, Instruction]
    root: str
    users: Mapping[str, Sequence[Instruction]]

    def parameter(self, number: int) -> str:
        """The name of a parameter."""
        found = (e for e in self.of.values() if e.opcode == "parameter")
        return next(e.name for e in found if e.operands[0] == str(number))


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind.

    Attributes:
      count: of operations.
      bytes: of their results (of its operand, for a reduce-scatter) on a chip.
      sent: bytes that a chip sends, in rings.
    """

    count: float = 0
    bytes: float = 0
    sent: float = 0

    def plus(self, other: "Transfer", times: float = 1) -> "Transfer":
        """With another one, done so often."""
        return Transfer(
            self.count + times * other.count,
            self.bytes + times * other.bytes,
            self.sent + times * other.sent,
        )


@dataclasses.dataclass
class Counts:
    """What one run of a program does on one chip.

    Attributes:
      flops: of matrix products.
      padded: the same, with each dimension rounded up to what a matrix unit multiplies at once.
      elementwise: operations other than those.
      bytes: moved between HBM and the chip, padding included.
      useful: the same without padding.
      kernels: operations that start one after another.
      cycles: the compiler's own estimate, where it gives one.
      collectives: by kind.
      bounds: loops that may end early, counted to their bound: `{operation: bound}`; a bound of 0
        is unknown, and the loop counts once.
    """

    flops: float = 0
    padded: float = 0
    elementwise: float = 0
    bytes: float = 0
    useful: float = 0
    kernels: float = 0
    cycles: float = 0
    collectives: dict[str, Transfer] = dataclasses.field(default_factory=dict)
    bounds: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, other: "Counts", times: float = 1) -> None:
        """Adds another program, run so often."""
        for name in ("flops", "padded", "elementwise", "bytes", "useful", "kernels", "cycles"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, transfer in other.collectives.items():
            before = self.collectives.get(kind, Transfer())
            self.collectives[kind] = before.plus(transfer, times)
        self.bounds |= other.bounds


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """The computations of a module by name, and the name of its entry."""
    found, entry, name, lines = dict[str, Computation](), "", "", dict[str, Instruction]()
    root = ""
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith("{") and "->" in line:
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            lines, root = {}, ""
        elif line.startswith("}") and name:
            users = collections.defaultdict[str, list[Instruction]](list)
            for each in lines.values():
                for operand in dict.fromkeys(each.operands):
                    users[operand].append(each)
            found[name], name = Computation(lines, root, users), ""
        elif name and " = " in line:
            made = _instruction(line)
            lines[made.name] = made
            root = made.name if line.lstrip().startswith("ROOT ") else root
    return found, entry


def _instruction(line: str) -> Instruction:
    left, right = line.strip().removeprefix("ROOT ").split(" = ", 1)
    shape, right = _split(right) if right.startswith("(") else right.split(" ", 1)
    opcode, right = right.lstrip().split("(", 1)
    inside, rest = _split("(" + right)
    arrays = tuple(
        Array(dtype, tuple(int(n) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )
    operands = tuple(re.findall(r"%([\w.-]+)", inside)) or tuple(re.findall(r"[\w.-]+", inside))
    if opcode == "constant":
        operands = (inside[1:-1],)
    return Instruction(left.lstrip("%"), arrays, opcode, operands, rest)


def _split(text: str) -> tuple[str, str]:
    """A text that begins with a bracket, after the bracket's end."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: at + 1], text[at + 1 :]
    return text, ""


class Program:
    """A module of optimised HLO.

    Args:
      text: as a compiled program's `as_text()` gives it.
      unit: rows and columns that a matrix unit multiplies at once, for the padded count.
    """

    def __init__(self, text: str, unit: int = 128):
        self.computations, self.entry = parse(text)
        self.unit = unit
        devices = re.search(r"(?:num_partitions|replica_count)=(\d+)", text[: text.find("\n")])
        self.devices = int(devices[1]) if devices else 1
        self._cost = functools.cache(self._count)

    def counts(self) -> Counts:
        """What one run of the program does."""
        return self._cost(self.entry, False)

    def _count(self, name: str, fused: bool) -> Counts:
        """The counts of a computation; within a fusion nothing is moved and no kernel starts."""
        total, within = Counts(), self.computations[name]
        for each in within.of.values():
            self._operation(total, within, each)
            if not fused:
                self._movement(total, within, each)
            called = list(each.called())
            if each.opcode == "while":
                trips, known = self.trips(within, each)
                if not known:
                    total.bounds[_operation_name(each)] = trips
                total.add(self._cost(dict(called)["body"], fused), trips or 1)
            elif each.opcode == "conditional":
                branches = [self._cost(branch, fused) for _, branch in called]
                total.add(max(branches, key=lambda b: (b.flops, b.bytes, b.kernels)))
            elif each.opcode in ("fusion", "call", "async-start"):
                inside = fused or each.opcode == "fusion"
                for _, computation in called:
                    total.add(self._cost(computation, inside))
        return total

    def _operation(self, total: Counts, within: Computation, each: Instruction) -> None:
        kind = each.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            members = self._members(each)
            size = sum(a.bytes for a in self._moved(within, each, kind))
            share = (members - 1) / members
            sent = {"all-reduce": 2 * share * size, "collective-permute": size}
            transfer = Transfer(1, size, sent.get(kind, share * size))
            total.collectives[kind] = total.collectives.get(kind, Transfer()).plus(transfer)
        elif each.opcode in ("dot", "convolution"):
            flops, padded = self._product(within, each)
            total.flops += flops
            total.padded += padded
        elif each.opcode in ("reduce", "reduce-window"):
            total.elementwise += sum(a.size for o in each.operands[:1] for a in _of(within, o))
        elif each.opcode not in FREE | ALIASES | MOVES and not each.opcode.endswith(ASYNC):
            total.elementwise += each.arrays[0].size

    def _moved(self, within: Computation, each: Instruction, kind: str) -> list[Array]:
        """What a collective moves: its operands, or where these grow, its results."""
        given = [array for operand in each.operands for array in _of(within, operand)]
        if kind != "all-gather":
            return given
        if each.opcode.endswith("-start"):  # (operands, results)
            return list(each.arrays[len(given) : 2 * len(given)])
        return list(each.arrays)

    def _members(self, each: Instruction) -> int:
        """Chips of one group of a collective."""
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", each.rest):
            return int(iota[2])
        if lists := re.search(r"replica_groups=\{\{([\d,]*)\}", each.rest):
            return lists[1].count(",") + 1
        return max(self.devices, 2)

    def _product(self, within: Computation, each: Instruction) -> tuple[float, float]:
        """FLOPs of a matrix product, and with padding to the matrix unit."""
        left, right = (_of(within, operand)[0] for operand in each.operands[:2])
        out = each.arrays[0]
        if each.opcode == "dot":
            contracted = math.prod(left.dims[i] for i in each.integers("lhs_contracting_dims"))
            batch = math.prod(left.dims[i] for i in each.integers("lhs_batch_dims"))
            rows = left.size // max(1, contracted * batch)
            columns = right.size // max(1, contracted * batch)
            return self._padded(batch, rows, contracted, columns)
        labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", each.rest)
        assert labels is not None
        of_left, of_right, of_out = labels[1], labels[2], labels[3]
        taps = math.prod(
            _taps(
                left.dims[of_left.index(s)],
                right.dims[of_right.index(s)],
                out.dims[of_out.index(s)],
                _window(each, int(s)),
            )
            for s in of_left
            if s.isdigit()
        )
        rows, columns = out.dims[of_out.index("b")], out.dims[of_out.index("f")]
        return self._padded(taps, rows, right.dims[of_right.index("i")], columns)

    def _padded(self, times: int, rows: int, inner: int, columns: int) -> tuple[float, float]:
        wide = self.unit
        padded = _up(rows, 8) * _up(inner, wide) * _up(columns, wide)
        return 2.0 * times * rows * inner * columns, 2.0 * times * padded

    def _movement(self, total: Counts, within: Computation, each: Instruction) -> None:
        quiet = each.opcode in FREE or each.opcode.endswith(ASYNC[1:])
        scalar = not any(array.dims for array in each.arrays)
        if quiet or scalar or "AllocateBuffer" in each.rest:
            return
        total.kernels += 1
        if cycles := _CYCLES.search(each.rest):
            total.cycles += int(cycles[1])
        moved = [*self._read(within, each), *self._written(each)]
        moved = [array for array in moved if array.dims and not array.on_chip]
        total.bytes += sum(array.held for array in moved)
        total.useful += sum(array.bytes for array in moved)

    def _read(self, within: Computation, each: Instruction) -> Iterator[Array]:
        """What is read: of an operand that is only sliced, the slices."""
        if each.opcode in ("dynamic-slice", "slice", "gather"):
            yield from each.arrays
            return
        if each.opcode == "dynamic-update-slice":
            yield from _of(within, each.operands[1])
            return
        body = self.computations[dict(each.called())["calls"]] if each.opcode == "fusion" else None
        for number, operand in enumerate(each.operands):
            whole = _of(within, operand)
            parts = None if body is None else self._sliced(body, body.parameter(number))
            if parts is None:
                yield from whole
            else:
                layout = whole[0].layout if whole and whole[0].on_chip else ""
                yield from (part._replace(layout=layout or part.layout) for part in parts)

    def _sliced(self, body: Computation, name: str) -> list[Array] | None:
        """What is read of a value within a fusion; None for all of it."""
        if name == body.root:
            return None
        found = list[Array]()
        for user in body.users.get(name, ()):
            inner: list[Array] | None = None
            first = user.operands[0] == name
            if user.opcode in ("dynamic-slice", "slice", "gather") and first:
                inner = list(user.arrays)
            elif user.opcode == "dynamic-update-slice" and first:
                inner = []
            elif user.opcode == "bitcast":
                inner = self._sliced(body, user.name)
            elif user.opcode == "fusion":
                called = self.computations[dict(user.called())["calls"]]
                inner = self._sliced(called, called.parameter(user.operands.index(name)))
            if inner is None:
                return None
            found += inner
        return found

    def _written(self, each: Instruction) -> Iterator[Array]:
        """What is written: of a result that is updated in place, the update."""
        if each.opcode == "dynamic-update-slice":
            return
        if each.opcode.endswith("-start"):
            yield from each.arrays[:1]
            return
        if each.opcode != "fusion":
            yield from each.arrays
            return
        body = self.computations[dict(each.called())["calls"]]
        root = body.of[body.root]
        outputs = [body.of[o] for o in root.operands] if root.opcode == "tuple" else [root]
        for output, array in zip(outputs, each.arrays, strict=False):
            output = _source(body, output)
            if output.opcode == "dynamic-update-slice":
                update = _of(body, output.operands[1])[0]
                yield update._replace(layout=array.layout if array.on_chip else update.layout)
            else:
                yield array

    def trips(self, within: Computation, loop: Instruction) -> tuple[int, bool]:
        """How often a loop turns at most (0: unknown), and whether it is known to turn so often."""
        if exact := _TRIPS.search(loop.rest):
            return int(exact[1]), True
        called = dict(loop.called())
        condition = self.computations[called["condition"]]
        start = within.of.get(loop.operands[0])
        bounds, exact_condition = self._bounds(condition, condition.root, start, within)
        return (min(bounds), exact_condition) if bounds else (0, False)

    def _bounds(
        self,
        condition: Computation,
        name: str,
        start: Instruction | None,
        within: Computation,
    ) -> tuple[list[int], bool]:
        """Turns after which a condition is false at the latest, and whether that is its whole."""
        each = condition.of[name]
        if each.opcode == "and":
            both = [self._bounds(condition, o, start, within) for o in each.operands]
            return [bound for bounds, _ in both for bound in bounds], False
        if each.opcode == "reduce":  # over seeds: as long as any of them goes on
            return self._bounds(condition, each.operands[0], start, within)[0], False
        if each.opcode in ALIASES:
            return self._bounds(condition, each.operands[0], start, within)
        if each.opcode == "fusion":
            body = self.computations[dict(each.called())["calls"]]
            inlined = {
                parameter.name: condition.of[each.operands[int(parameter.operands[0])]]
                for parameter in body.of.values()
                if parameter.opcode == "parameter"
            }
            merged = Computation({**condition.of, **body.of, **inlined}, body.root, {})
            return self._bounds(merged, body.root, start, within)
        if each.opcode != "compare":
            return [], False
        sides = [self._value(condition, operand, start, within) for operand in each.operands]
        (first, of_first), (last, of_last) = sides
        direction = each.attribute("direction")
        if of_last == "counter":  # constant > counter
            (first, of_first), (last, of_last) = sides[1], sides[0]
            direction = {"GT": "LT", "GE": "LE", "NE": "NE"}.get(direction, "")
        if of_first != "counter" or of_last != "constant" or direction not in ("LT", "LE", "NE"):
            return [], False
        return [max(0, last - first + (direction == "LE"))], True

    def _value(
        self, condition: Computation, name: str, start: Instruction | None, within: Computation
    ) -> tuple[int, str]:
        """A side of a comparison: a constant, or a counter with its first value."""
        each = condition.of[name]
        each = _source(condition, each)
        if each.opcode == "constant" and re.fullmatch(r"-?\d+", each.operands[0]):
            return int(each.operands[0]), "constant"
        if each.opcode == "get-tuple-element" and start is not None and start.opcode == "tuple":
            first = _source(within, within.of[start.operands[each.integers("index")[0]]])
            if first.opcode == "constant" and re.fullmatch(r"-?\d+", first.operands[0]):
                return int(first.operands[0]), "counter"
        return 0, ""


def _source(within: Computation, each: Instruction) -> Instruction:
    """Of what an instruction only has another form."""
    while each.opcode in ALIASES and each.operands[0] in within.of:
        each = within.of[each.operands[0]]
    return each


def _of(within: Computation, name: str) -> tuple[Array, ...]:
    return within.of[name].arrays if name in within.of else ()


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _window(each: Instruction, axis: int) -> dict[str, tuple[int, ...]]:
    """Stride, padding and dilations of one spatial dimension of a convolution."""
    text = re.search(r"window=\{([^}]*)\}", each.rest)
    found = collections.defaultdict[str, tuple[int, ...]](lambda: (1,))
    for name, value in re.findall(r"(\w+)=([\w-]+)", text[1] if text else ""):
        parts = value.split("x")
        found[name] = tuple(int(i) for i in parts[axis].split("_"))
    if "pad" not in found:
        found["pad"] = (0, 0)
    return found


def _taps(size: int, kernel: int, out: int, window: Mapping[str, tuple[int, ...]]) -> int:
    """Pairs of output and kernel positions that meet an element, not padding or a dilation's gap.

    The compiler writes batched products as convolutions whose window meets one element at a time.
    """
    stride, low = window["stride"][0], window["pad"][0]
    spread, holes = window["rhs_dilate"][0], window["lhs_dilate"][0]
    last = (size - 1) * holes
    found = 0
    for tap in range(kernel):
        first = tap * spread - low
        # Output positions o with 0 <= first + o·stride <= last, at multiples of the dilation.
        period = holes // math.gcd(holes, stride)
        for o in range(min(period, out)):
            if (first + o * stride) % holes == 0:
                lowest = max(o, math.ceil(-first / stride))
                lowest += (o - lowest) % period
                highest = min(out - 1, (last - first) // stride)
                found += max(0, (highest - lowest) // period + 1)
                break
    return found


def _operation_name(each: Instruction) -> str:
    """Where a loop comes from, as its metadata names it."""
    found = re.search(r'op_name="([^"]*)"', each.rest)
    return found[1] if found else each.name
