"""Tests the tests of the numerical modules by mutation: tests should notice each small change to
the code.

    python tests/mutants.py                          # all mutants: many hours on one core
    python tests/mutants.py losses masked            # all mutants of two modules
    python tests/mutants.py --sample=10 --seed=1     # 10 mutants of each module: two hours
    python tests/mutants.py --least=0.9              # exits with 1 if fewer are killed

Each mutant is compiled from the changed syntax tree and replaces its module in a forked child
process, which has imported third-party libraries but no module of this package. The child process
runs the module's doctests and tests up to the first failure. A mutant that takes several times as
long as the original program counts as killed. Strings, annotations, decorators, chex assertions and
`raise` statements are not mutated. Results are stored in `.mutants/`, so that a later call on the
same module and test files continues.
"""

import argparse
import ast
import copy
import hashlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "support"))

from impostors import ROOT, Impostor, finished, path_of, prepare, start

# Test files of each module, cheapest first; a mutant ends with the first file that notices it.
TESTS = {
    "masked": ("test_masked", "test_rounding", "test_advantages"),
    "divergences": ("test_divergences", "test_identities"),
    "losses": ("test_losses", "test_identities", "test_peer_losses", "test_coefficients"),
    "advantages": ("test_rounding", "test_group_identities", "test_advantages"),
    "trust_region": ("test_trust_region", "test_fisher", "test_step_sizes"),
    "compensated": ("test_masked", "test_rounding"),
    "distributions": ("test_distributions", "test_rounding", "test_kernels"),
    "dynamic_sampling": ("test_dynamic_sampling",),
    "group_advantages": ("test_group_identities", "test_rounding", "test_advantages"),
    "group_statistics": ("test_group_statistics", "test_rounding", "test_algorithms"),
    "lengths": ("test_lengths",),
    "minibatches": ("test_minibatches", "test_updates"),
    "natural_updates": ("test_fisher",),
    "optimizers": ("test_optimizers", "test_optimization"),
    "token_weights": ("test_losses", "test_group_identities"),
    "updates": ("test_updates", "test_optimizers", "test_step_sizes"),
    "algorithms.cispo": ("test_coefficients_of_groups", "test_golden_flags"),
    "algorithms.gmpo": ("test_coefficients_of_groups", "test_golden_flags"),
    "algorithms.kl_cov": ("test_coefficients_of_groups", "test_golden_flags"),
    "algorithms.surrogates": ("test_surrogates",),
    "control.hoisting": ("test_hoisting",),
    "control.normalizer": ("test_rounding", "test_control"),
    "control.spaces": ("test_spaces",),
    "control.statistics": ("test_control", "test_spaces", "test_acting", "test_algorithms"),
    "language.attention": ("test_attention", "test_transformer", "test_sampling"),
    "language.kernels": ("test_kernels",),
    "language.rewards": ("test_rewards",),
    "language.rope": ("test_transformer", "test_rope_spellings", "test_pretrained"),
    "language.stopping": ("test_stopping",),
    "language.tokenizer": ("test_tokenizer", "test_tasks"),
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
    return getattr(call, "attr", getattr(call, "id", ""))


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
    source, files = Path(path_of(module)).read_text(encoding="utf-8"), files_of(module)
    digest = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    record = ROOT / ".mutants" / f"{module}.json"
    stored = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    if stored.get("digest") != digest:
        _, (word, seconds) = finished(start(None, files, 600.0))
        if word != "passed":
            raise SystemExit(f"the tests of {module} fail on the module itself")
        stored = {"digest": digest, "seconds": seconds, "outcomes": {}}
    chosen = list(enumerate(mutants(source)))
    if sample is not None and sample < len(chosen):
        chosen = sorted(
            random.Random(f"{module} {seed}").sample(chosen, sample), key=lambda pair: pair[0]
        )
    killed, outcomes = 0, stored["outcomes"]
    for i, mutant in chosen:
        if str(i) not in outcomes:
            limit = PATIENCE * stored["seconds"] + 10.0
            outcomes[str(i)] = finished(start(Impostor(module, mutant.tree), files, limit))[1]
            record.parent.mkdir(exist_ok=True)
            record.write_text(json.dumps(stored), encoding="utf-8")
        word, _ = outcomes[str(i)]
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
    parser.add_argument("--sample", type=int, help="number of mutants of a module (default: all)")
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
