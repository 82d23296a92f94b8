"""Tests the tests of the numerical modules by mutation: tests should notice each small change to
the code.

    python tests/mutants.py                          # all mutants: half an hour on one core
    python tests/mutants.py losses masked            # all mutants of two modules
    python tests/mutants.py --sample=20 --seed=1     # 20 mutants of each module
    python tests/mutants.py --least=0.9              # exits with 1 if fewer are killed

Each mutant is compiled from the changed syntax tree and replaces its module in a forked child
process, which has imported third-party libraries but no module of this package. The child process
runs the module's doctests and tests up to the first failure. A mutant that takes several times as
long as the original program counts as killed. Strings, annotations, decorators, chex assertions and
`raise` statements are not mutated.
"""

import argparse
import ast
import copy
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))

from impostors import ROOT, Impostor, finished, path_of, prepare, start

TESTS = {
    "masked": ("test_masked", "test_advantages", "test_rounding"),
    "divergences": ("test_divergences", "test_identities"),
    "losses": ("test_losses", "test_identities"),
    "advantages": ("test_advantages", "test_rounding"),
    "trust_region": ("test_trust_region", "test_fisher"),
}
PATIENCE = 5.0
SWAPS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
NAMES = {
    "min": "max",
    "max": "min",
    "minimum": "maximum",
    "maximum": "minimum",
    "pmin": "pmax",
    "zeros_like": "ones_like",
    "expm1": "exp",
}
# Calls that are replaced by their first argument; a call of `where` by each of its two branches.
DROPPED = {"stop_gradient", "clip", "square", "sqrt", "psum", "astype", "flip", "where"}


class Mutant(NamedTuple):
    """Mutant of a module, made by a single change.

    Attributes:
      line: Line number of the change.
      change: Description of the change as `before → after`.
      tree: Syntax tree of the complete mutated module.
    """

    line: int
    change: str
    tree: ast.Module


def name_of(call: ast.expr) -> str:
    return (
        call.attr
        if isinstance(call, ast.Attribute)
        else call.id
        if isinstance(call, ast.Name)
        else ""
    )


def alternatives(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes that may replace a node.

    Nodes that a replacement reuses are shared with the original tree.
    """
    match node:
        case ast.Compare(left, [op], right):
            yield from (ast.Compare(left, [swap()], right) for swap in SWAPS[type(op)])
        case ast.BinOp(left, op, right) if type(op) in SWAPS:
            yield from (ast.BinOp(left, swap(), right) for swap in SWAPS[type(op)])
        case ast.BoolOp(op, values):
            yield from (ast.BoolOp(swap(), values) for swap in SWAPS[type(op)])
        case ast.UnaryOp(_, operand):
            yield operand
        case ast.Constant(bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(int() | float() as value):
            yield ast.Constant(value + 1 if abs(value) < 1000 else 2 * value)
        case ast.IfExp(_, body, orelse):
            yield from (body, orelse)
        case ast.Call(function, arguments, keywords):
            name = name_of(function)
            if name in DROPPED:
                receiver = [function.value] if name == "astype" else []
                yield from arguments[1:] if name == "where" else (receiver or arguments[:1])
            for keyword in keywords:
                if keyword.arg == "axis_name":
                    yield ast.Call(
                        function, arguments, [other for other in keywords if other is not keyword]
                    )
            if name in NAMES and isinstance(function, ast.Attribute):
                yield ast.Call(
                    ast.Attribute(function.value, NAMES[name], ast.Load()), arguments, keywords
                )


def sites(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of a tree that may be mutated, parents first."""
    match node:
        case ast.Expr(ast.Constant()) | ast.Raise() | ast.Import() | ast.ImportFrom():
            return
        case ast.Expr(ast.Call(ast.Attribute(ast.Name("chex")))):
            return
        case ast.AnnAssign(value=value):
            skipped = [child for child in ast.iter_child_nodes(node) if child is not value]
        case ast.FunctionDef():
            skipped = [*node.decorator_list, node.returns]
        case ast.ClassDef():
            skipped = node.decorator_list
        case ast.arg():
            return
        case _:
            skipped = []
    yield node
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from sites(child)


class Put(ast.NodeTransformer):
    """Transformer that replaces one node of a tree by another node."""

    def __init__(self, place: ast.AST, node: ast.AST):
        self.place, self.node = place, node

    def visit(self, node: ast.AST) -> ast.AST:
        return self.node if node is self.place else self.generic_visit(node)


def mutants(source: str) -> list[Mutant]:
    """Returns all mutants of a module, in the order of the module's text.

    >>> program = "def f(x: int = 1) -> int:\\n    return -x if x < 2 else x"
    >>> [(mutant.line, mutant.change) for mutant in mutants(program)]
    [(1, '1 → 2'), (2, '-x if x < 2 else x → -x'), (2, '-x if x < 2 else x → x'),
     (2, 'x < 2 → x <= 2'), (2, 'x < 2 → x >= 2'), (2, '2 → 3'), (2, '-x → x')]
    """
    tree = ast.parse(source)
    found = []
    for i, node in enumerate(sites(tree)):
        for j, alternative in enumerate(alternatives(node)):
            place = list(sites(changed := copy.deepcopy(tree)))[i]
            other = list(alternatives(place))[j]
            other = ast.copy_location(other, place)
            changed = ast.fix_missing_locations(Put(place, other).visit(changed))
            found.append(
                Mutant(place.lineno, f"{ast.unparse(node)} → {ast.unparse(alternative)}", changed)
            )
    return found


def files_of(module: str) -> list[str]:
    """Returns the file of a module, for its doctests, and the module's test files."""
    return [path_of(module), *(str(ROOT / "tests" / f"{name}.py") for name in TESTS[module])]


def examine(module: str, sample: int | None, seed: int) -> tuple[int, int]:
    """Runs the tests on the mutants of a module and prints the survivors; returns `(killed,
    all)`."""
    source = Path(path_of(module)).read_text(encoding="utf-8")
    _, (word, seconds) = finished(start(None, files_of(module), 600.0))
    if word != "passed":
        raise SystemExit(f"the tests of {module} fail on the module itself")
    chosen = mutants(source)
    if sample is not None and sample < len(chosen):
        chosen = sorted(
            random.Random(f"{module} {seed}").sample(chosen, sample), key=lambda mutant: mutant.line
        )
    killed = 0
    for mutant in chosen:
        limit = PATIENCE * seconds + 10.0
        _, (word, _) = finished(start(Impostor(module, mutant.tree), files_of(module), limit))
        killed += word != "passed"
        if word != "failed":
            print(
                f"{module}.py:{mutant.line}:",
                f"{'survived' if word == 'passed' else word}: {mutant.change}",
                flush=True,
            )
    print(f"{module}: {killed} of {len(chosen)} mutants killed", flush=True)
    return killed, len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"modules (default: {', '.join(TESTS)})")
    parser.add_argument(
        "--sample", type=int, help="number of mutants of each module (default: all)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--least",
        type=float,
        default=0.0,
        help="share of mutants of each module that must be killed",
    )
    arguments = parser.parse_args()
    prepare()
    modules = arguments.names or list(TESTS)
    if unknown := set(modules) - set(TESTS):
        parser.error(f"no such module: {', '.join(sorted(unknown))}")
    shares = [
        killed / total
        for killed, total in (examine(m, arguments.sample, arguments.seed) for m in modules)
    ]
    sys.exit(min(shares) < arguments.least)


if __name__ == "__main__":
    main()
