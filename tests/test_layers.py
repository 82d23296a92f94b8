"""A module imports only from lower layers, its own subpackage or, in L5, other L5 modules."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxrl_po"
LAYERS = (
    {"version", "config", "types", "masked", "distributions"},
    {"advantages", "losses", "divergences", "trust_region", "networks", "minibatches", "optimizers", "hoisting"},
    {"updates", "control", "language"},
    {"learner", "dynamic_sampling", "group_statistics"},
    {"algorithms"},
    {
        "parallel",
        "checkpoint",
        "exporters",
        "metrics",
        "flags",
        "folder",
        "memory",
        "plotting",
        "processes",
        "programs",
        "progress",
        "prompts",
        "provenance",
        "reasoning",
        "rendering",
        "runner",
        "scoring",
        "scoring_worker",
        "sharding",
    },
)
SIBLINGS_ALLOWED = {0, 5}  # L0 is a chain from config to types; L5 is one shell
FLAX_HOMES = {"networks.py", "language/transformer.py"}
IMPURE = {"absl", "orbax", "matplotlib", "PIL", "rich"}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if p.name != "__init__.py")


def layer(unit: str) -> int:
    return next(i for i, members in enumerate(LAYERS) if unit in members)


def imported_names(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names.add(node.module)
            if node.module.startswith("jaxrl_po"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(module: str, source: str) -> list[str]:
    unit = module.split("/")[0].removesuffix(".py")
    here, found = layer(unit), []
    for name in sorted(imported_names(source)):
        root, *rest = name.split(".")
        if root == "jaxrl_po" and rest and any(rest[0] in members for members in LAYERS):
            there = layer(rest[0])
            allowed = rest[0] == unit and "/" in module
            allowed |= there < here or (there == here and here in SIBLINGS_ALLOWED)
            if not allowed:
                found.append(f"{module} (L{here}) imports {name} (L{there})")
        if root == "flax" and module not in FLAX_HOMES:
            found.append(f"{module} imports flax")
        if root in IMPURE and here < 5:
            found.append(f"{module} (L{here}) imports {root}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_layers(module):
    assert violations(module, (PACKAGE / module).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("losses.py", "from jaxrl_po import updates"),
        ("losses.py", "from jaxrl_po.advantages import gae"),
        ("control/problem.py", "from jaxrl_po.language import tasks"),
        ("learner.py", "import flax.linen"),
        ("algorithms/ppo.py", "import jaxrl_po.runner"),
        ("updates.py", "import matplotlib.pyplot"),
    ],
)
def test_violations_are_found(module, source):
    assert violations(module, source)
