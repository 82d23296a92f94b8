"""Instructions of optimised HLO, parsed from its text, with the layouts of their arrays."""

import collections
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

# Operations that return the values of their operand with another shape or layout.
ALIASES = frozenset(("bitcast", "copy", "convert", "reshape", "broadcast"))
_ARRAY = re.compile(r"([a-z]+[0-9]*(?:e\d+m\d+[a-z]*)?)\[([\d,]*)\](?:\{([^{}]*)\})?")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.-]+)"
)


class Array(NamedTuple):
    """Array of an HLO shape: its dtype, dimensions and layout."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the array without padding."""
        return int(self.size * width(self.dtype))

    @property
    def held(self) -> int:
        """Bytes of the array in memory, with minor dimensions rounded up to complete tiles."""
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
        """True if the array lies in the chip's scratch memory, not in HBM."""
        return "S(1)" in self.layout


def width(dtype: str) -> float:
    """Returns the bytes of one element of a dtype.

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
        """Yields the computations that the instruction calls: `(role, name)`."""
        for role, name in _CALLED.findall(self.rest):
            yield role, name
        if branches := re.search(r"branch_computations=\{([^}]*)\}", self.rest):
            for name in branches[1].split(","):
                yield "branch", name.strip().lstrip("%")

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute.

        Empty if the instruction does not have the attribute.
        """
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.rest)
        return found[1] if found else ""

    def integers(self, name: str) -> list[int]:
        """Returns the integers in the text of an attribute."""
        return [int(i) for i in re.findall(r"-?\d+", self.attribute(name))]


class Computation(NamedTuple):
    """Computation of HLO: instructions by name, the root, and the users of each instruction."""

    of: dict[str, Instruction]
    root: str
    users: Mapping[str, Sequence[Instruction]]

    def parameter(self, number: int) -> str:
        """Returns the name of the parameter with a number."""
        found = (e for e in self.of.values() if e.opcode == "parameter")
        return next(e.name for e in found if e.operands[0] == str(number))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations of a module by name, and the name of the entry computation."""
    found, entry, name, lines = dict[str, Computation](), "", "", dict[str, Instruction]()
    root = ""
    for line in text.splitlines():
        if not line.startswith(" ") and line.endswith("{") and "->" in line:
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            entry = name if line.startswith("ENTRY") else entry
            lines, root = {}, ""
        # A line that ends with "}}" does not end a computation: the metadata of a kernel span
        # several lines.
        elif re.match(r"\}(,|$)", line) and name:
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
    """Splits a text that begins with a bracket after the bracket's closing partner."""
    depth = 0
    for at, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return text[: at + 1], text[at + 1 :]
    return text, ""


def source(within: Computation, each: Instruction) -> Instruction:
    """Returns the source of an instruction that only changes the layout of the source's values."""
    while each.opcode in ALIASES and each.operands[0] in within.of:
        each = within.of[each.operands[0]]
    return each


def arrays_of(within: Computation, name: str) -> tuple[Array, ...]:
    """Returns the arrays of an operand, one for each element of a tuple."""
    return within.of[name].arrays if name in within.of else ()
