"""Counts FLOPs, memory traffic and collectives of one run of a program, from its optimised HLO.

XLA's own cost analysis counts the body of a loop once. This module counts a loop's body as often as
the loop runs: by the known trip count, or by the constant that the loop's condition compares a
counter with.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Sequence

import hlo
import hlo_loops
import hlo_products
from hlo import ALIASES, Array, Computation, Instruction, arrays_of, source

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "ragged-all-to-all",
)
# Operations that neither compute nor move data.
FREE = frozenset(
    (
        *("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "call"),
        *("partition-id", "replica-id", "opt-barrier", "while", "conditional", "add-dependency"),
    )
)
# Operations that only move values, or whose work is counted in the computations that they call.
MOVES = frozenset(
    (
        *("slice", "dynamic-slice", "dynamic-update-slice", "gather", "scatter", "pad", "iota"),
        *("concatenate", "transpose", "reverse", "fusion", "custom-call", "sort", "rng"),
    )
)
# Custom calls of the TPU's compiler that place buffers or assert facts, without computation.
NOTES = re.compile("AllocateBuffer|ConcatBitcast|AssumeGatherIndicesInBound|.*Bitpacked")
ASYNC = ("-start", "-done", "-update")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Transfer:
    """Collectives of one kind.

    Attributes:
      count: Number of collective operations.
      bytes: Bytes of the operations' results on a chip, or of the operand of a reduce-scatter.
      sent: Bytes that a chip sends if the collectives run in rings.
    """

    count: float = 0
    bytes: float = 0
    sent: float = 0

    def plus(self, other: "Transfer", times: float = 1) -> "Transfer":
        """Returns the sum with `times` runs of another transfer."""
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Transfer(*(mine + times * its for mine, its in pairs))


@dataclasses.dataclass
class Counts:
    """Work of one run of a program on one chip.

    Attributes:
      flops: FLOPs of all matrix products.
      padded: FLOPs with each dimension rounded up to the size of a matrix unit.
      elementwise: Number of elementwise operations outside matrix products.
      bytes: Bytes moved between HBM and the chip, padding included.
      useful: Bytes moved without padding.
      kernels: Number of kernels, which start one after another.
      cycles: Compiler's estimate of the cycles; 0 without an estimate.
      collectives: `{kind: transfer}`, transfer of each kind of collective.
      bounds: `{operation: bound}`, largest trip count of each loop that may end early; a loop
        counts up to its bound, and a loop of unknown bound, 0, counts once.
      uncounted: `{target: calls}`, number of calls of each kernel that is not HLO; the FLOPs of
        such a kernel are not counted, and each of its operands and results is moved once.
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
    uncounted: dict[str, float] = dataclasses.field(default_factory=dict)

    def add(self, other: "Counts", times: float = 1) -> None:
        """Adds the counts of another program, which runs `times` times."""
        for name in ("flops", "padded", "elementwise", "bytes", "useful", "kernels", "cycles"):
            setattr(self, name, getattr(self, name) + times * getattr(other, name))
        for kind, transfer in other.collectives.items():
            before = self.collectives.get(kind, Transfer())
            self.collectives[kind] = before.plus(transfer, times)
        for target, calls in other.uncounted.items():
            self.uncounted[target] = self.uncounted.get(target, 0) + times * calls
        self.bounds |= other.bounds


class Program:
    """Program as a module of optimised HLO.

    Args:
      text: Text of a compiled program, as `as_text()` returns it.
      unit: Number of rows and columns that a matrix unit multiplies at once, for `Counts.padded`.
    """

    def __init__(self, text: str, unit: int = 128):
        self.computations, self.entry = hlo.parse(text)
        self.unit = unit
        devices = re.search(r"(?:num_partitions|replica_count)=(\d+)", text[: text.find("\n")])
        self.devices = int(devices[1]) if devices else 1
        self._begun = set[str]()  # channels of collectives that several fusions share
        self._cost = functools.cache(self._count)

    def counts(self) -> Counts:
        """Counts one run of the program."""
        return self._cost(self.entry, False)

    def argument_bytes(self) -> int:
        """Returns the bytes of the arguments on a chip, without padding."""
        given = [i for i in self.computations[self.entry].of.values() if i.opcode == "parameter"]
        return sum(array.bytes for each in given for array in each.arrays)

    def _count(self, name: str, fused: bool) -> Counts:
        """Counts the work of a computation.

        Within a fusion no data is moved and no kernel starts.
        """
        total, within = Counts(), self.computations[name]
        for each in within.of.values():
            if not (fused and self._carried_on(each)):
                self._operation(total, within, each, name)
            if not fused:
                self._movement(total, within, each)
            called = list(each.called())
            if each.opcode == "while":
                trips, known = hlo_loops.trips(self.computations, within, each)
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

    def _carried_on(self, each: Instruction) -> bool:
        """Returns whether another fusion already began a collective.

        Several fusions with products may share a collective.
        """
        channel = each.attribute("channel_id") if each.opcode in COLLECTIVES else ""
        begun = channel in self._begun
        self._begun |= {channel} - {""}
        return begun

    def _operation(
        self, total: Counts, within: Computation, each: Instruction, name: str = ""
    ) -> None:
        kind = each.opcode.removesuffix("-start")
        if name.startswith("all-reduce-scatter"):  # each chip stores its own part of the sum
            kind = kind.replace("all-reduce", "reduce-scatter")
        if kind in COLLECTIVES:
            members = self._members(each)
            size = sum(a.bytes for a in self._moved(within, each, kind))
            share = (members - 1) / members
            sent = {"all-reduce": 2 * share * size, "collective-permute": size}
            transfer = Transfer(1, size, sent.get(kind, share * size))
            total.collectives[kind] = total.collectives.get(kind, Transfer()).plus(transfer)
        elif each.opcode == "custom-call":
            target = each.attribute("custom_call_target").strip('"')
            if not NOTES.fullmatch(target):
                total.uncounted[target] = total.uncounted.get(target, 0) + 1
        elif each.opcode in ("dot", "convolution"):
            flops, padded = hlo_products.product(within, each, self.unit)
            total.flops += flops
            total.padded += padded
        elif each.opcode in ("reduce", "reduce-window"):
            total.elementwise += sum(
                a.size for o in each.operands[:1] for a in arrays_of(within, o)
            )
        elif each.opcode not in FREE | ALIASES | MOVES and not each.opcode.endswith(ASYNC):
            total.elementwise += each.arrays[0].size

    def _moved(self, within: Computation, each: Instruction, kind: str) -> list[Array]:
        """Returns the arrays that a collective moves: its operands, or the results of a gather."""
        given = [array for operand in each.operands for array in arrays_of(within, operand)]
        if kind != "all-gather":
            return given
        if each.opcode.endswith("-start"):  # a pair (operands, results)
            return list(each.arrays[len(given) : 2 * len(given)])
        return list(each.arrays)

    def _members(self, each: Instruction) -> int:
        """Returns the number of chips in a group of a collective."""
        if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", each.rest):
            return int(iota[2])
        if lists := re.search(r"replica_groups=\{\{([\d,]*)\}", each.rest):
            return lists[1].count(",") + 1
        if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", each.rest):
            sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
            return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
        return max(self.devices, 2)

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
        """Yields the arrays that an operation reads: of a sliced operand, only the slices."""
        if each.opcode in ("dynamic-slice", "slice", "gather"):
            yield from _where(each.arrays, arrays_of(within, each.operands[0]))
            return
        if each.opcode == "dynamic-update-slice":
            yield from arrays_of(within, each.operands[1])
            return
        body = self.computations[dict(each.called())["calls"]] if each.opcode == "fusion" else None
        passed = {operand for _, operand in _passed(body, each)}
        for number, operand in enumerate(each.operands):
            if number in passed:
                continue
            whole = arrays_of(within, operand)
            parts = None if body is None else self._sliced(body, body.parameter(number))
            if parts is None:
                yield from whole
            else:
                yield from _where(parts, whole)

    def _sliced(self, body: Computation, name: str) -> list[Array] | None:
        """Returns the slices of a value that a fusion reads.

        None if it reads the complete value.
        """
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
        """Yields the arrays that an operation writes.

        Of a result that is updated in place, only the update.
        """
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
        passed = {output for output, _ in _passed(body, each)}
        for number, (output, array) in enumerate(zip(outputs, each.arrays, strict=False)):
            if number in passed:
                continue
            output = source(body, output)
            if output.opcode == "dynamic-update-slice":
                update = arrays_of(body, output.operands[1])[0]
                yield update._replace(layout=array.layout if array.on_chip else update.layout)
            else:
                yield array


def _where(parts: Sequence[Array], whole: Sequence[Array]) -> Iterator[Array]:
    """Yields parts of an array with the memory layout of the array."""
    for part in parts:
        here = whole[0].layout if whole and whole[0].on_chip else part.layout.replace("S(1)", "")
        yield part._replace(layout=here)


def _passed(body: Computation | None, each: Instruction) -> list[tuple[int, int]]:
    """Returns outputs and operands that a fusion of products passes unchanged to a collective."""
    if body is None or not any(inner.opcode in COLLECTIVES for inner in body.of.values()):
        return []
    pairs = re.findall(r"\{(\d*)\}: \((\d+), ", each.rest)
    return [(int(output or 0), int(operand)) for output, operand in pairs]


def _operation_name(each: Instruction) -> str:
    """Returns the name of a loop's JAX operation, from the loop's metadata."""
    found = re.search(r'op_name="([^"]*)"', each.rest)
    return found[1] if found else each.name
