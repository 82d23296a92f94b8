"""Trip counts of loops in optimised HLO."""

import re
from collections.abc import Mapping

from hlo import ALIASES, Computation, Instruction, source

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


def trips(
    computations: Mapping[str, Computation], within: Computation, loop: Instruction
) -> tuple[int, bool]:
    """Returns the largest trip count of a loop (0 if unknown), and whether the count is exact."""
    if exact := _TRIPS.search(loop.rest):
        return int(exact[1]), True
    called = dict(loop.called())
    condition = computations[called["condition"]]
    start = within.of.get(loop.operands[0])
    bounds, exact_condition = _bounds(computations, condition, condition.root, start, within)
    return (min(bounds), exact_condition) if bounds else (0, False)


def _bounds(
    computations: Mapping[str, Computation],
    condition: Computation,
    name: str,
    start: Instruction | None,
    within: Computation,
) -> tuple[list[int], bool]:
    """Returns upper bounds of a loop's trip count, and whether no other condition ends the loop."""
    each = condition.of[name]
    if each.opcode == "and":
        both = [_bounds(computations, condition, o, start, within) for o in each.operands]
        return [bound for bounds, _ in both for bound in bounds], False
    # A condition over several seeds: the loop runs until the last seed ends.
    if each.opcode == "reduce":
        return _bounds(computations, condition, each.operands[0], start, within)[0], False
    if each.opcode in ALIASES:
        return _bounds(computations, condition, each.operands[0], start, within)
    if each.opcode == "fusion":
        body = computations[dict(each.called())["calls"]]
        inlined = {
            parameter.name: condition.of[each.operands[int(parameter.operands[0])]]
            for parameter in body.of.values()
            if parameter.opcode == "parameter"
        }
        merged = Computation({**condition.of, **body.of, **inlined}, body.root, {})
        return _bounds(computations, merged, body.root, start, within)
    if each.opcode != "compare":
        return [], False
    sides = [_value(condition, operand, start, within) for operand in each.operands]
    (first, of_first), (last, of_last) = sides
    direction = each.attribute("direction")
    if of_last == "counter":  # the comparison `constant > counter`
        (first, of_first), (last, of_last) = sides[1], sides[0]
        direction = {"GT": "LT", "GE": "LE", "NE": "NE"}.get(direction, "")
    if of_first != "counter" or of_last != "constant" or direction not in ("LT", "LE", "NE"):
        return [], False
    return [max(0, last - first + (direction == "LE"))], True


def _value(
    condition: Computation, name: str, start: Instruction | None, within: Computation
) -> tuple[int, str]:
    """Returns one side of a comparison: a constant, or a counter with its first value."""
    each = condition.of[name]
    each = source(condition, each)
    if each.opcode == "constant" and re.fullmatch(r"-?\d+", each.operands[0]):
        return int(each.operands[0]), "constant"
    if each.opcode == "get-tuple-element" and start is not None and start.opcode == "tuple":
        first = source(within, within.of[start.operands[each.integers("index")[0]]])
        if first.opcode == "constant" and re.fullmatch(r"-?\d+", first.operands[0]):
            return int(first.operands[0]), "counter"
    return 0, ""
