"""A module imports only from lower layers or its own folder, and there are no import cycles."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxrl_po"
LAYERS = (
    {"version", "backend", "config", "types", "masked", "compensated", "variables"},  # data
    {"divergences"},  # log-ratios, from which distributions and losses are made
    {  # the mathematics
        *("distributions", "advantages", "losses", "token_weights"),
        *("trust_region", "group_advantages", "group_statistics"),
    },
    {  # one iteration
        *(
            "lengths",
            "minibatches",
            "optimizers",
            "updates",
            "natural_updates",
            "learner",
            "dynamic_sampling",
        ),
    },
    {"control", "language"},  # problems
    {"algorithms"},
    {"run"},  # the impure part
    {"study"},  # claims over many runs
    {"cli"},  # the commands
    {"__main__"},
)
CHAINS = {0, 3}  # layers whose modules may import each other
FLAX_HOMES = {
    "control/memory.py",
    "control/networks.py",
    "language/blocks.py",
    "language/transformer.py",
}
IMPURE = {"absl", "orbax", "matplotlib", "PIL", "rich"}
MODULES = sorted(
    p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py") if p.name != "__init__.py"
)


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
            allowed |= there < here or (there == here and here in CHAINS)
            if not allowed:
                found.append(f"{module} (L{here}) imports {name} (L{there})")
        if root == "flax" and module not in FLAX_HOMES:
            found.append(f"{module} imports flax")
        if root in IMPURE and unit not in ("run", "study", "cli", "__main__"):
            found.append(f"{module} (L{here}) imports {root}")
    return found


def circles(sources: dict[str, str]) -> list[str]:
    """Modules that import themselves, directly or through others."""
    dotted = {
        f"jaxrl_po.{module.removesuffix('.py').replace('/', '.')}": module for module in sources
    }
    edges = {
        module: {dotted[n] for n in imported_names(text) & dotted.keys()}
        for module, text in sources.items()
    }

    def reached(start: str) -> set[str]:
        seen, todo = set(), [start]
        while todo:
            for there in edges[todo.pop()] - seen:
                seen.add(there)
                todo.append(there)
        return seen

    return [module for module in sources if module in reached(module)]


@pytest.mark.parametrize("module", MODULES)
def test_layers(module):
    assert violations(module, (PACKAGE / module).read_text()) == []


ASKS_JAX = {"default_backend", "devices", "local_devices", "device_count", "local_device_count"}


def asks_jax(source: str) -> list[str]:
    """Where a program asks JAX what it runs on."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.Attribute) and node.attr in ASKS_JAX and "jax" in ast.unparse(node)
        )
        or (isinstance(node, ast.alias) and node.name in ASKS_JAX)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_only_one_function_below_run_asks_jax_for_its_backend(module):
    if module.split("/")[0] in ("run", "study", "cli"):
        return
    found = asks_jax((PACKAGE / module).read_text())
    assert len(found) == (2 if module == "backend.py" else 0), found


def test_a_question_to_jax_is_found():
    for source in (
        "import jax\nx = jax.default_backend()",
        "import jax\nx = jax.devices('cpu')[0]",
        "from jax import local_device_count",
    ):
        assert len(asks_jax(source)) == 1
    assert asks_jax("target.devices") == []


def test_no_module_imports_itself_however_far_around():
    assert circles({module: (PACKAGE / module).read_text() for module in MODULES}) == []


WORKER_SIDE = {
    *("workers", "guard", "scoring_worker", "answers", "mathematics", "reasoning"),
    *("instances", "schemas"),
}


@pytest.mark.parametrize("module", [m for m in MODULES if Path(m).stem in WORKER_SIDE])
def test_worker_processes_never_import_jax(module):
    """Nor modules of ours that might: only one another."""
    assert module.startswith(("run/data/", "run/host/dialogues/"))
    names = imported_names((PACKAGE / module).read_text())
    ours = {n.replace(".", "/") + ".py" for n in names if n.startswith("jaxrl_po.")}
    assert {Path(n).stem for n in ours if (ROOT / n).exists()} <= WORKER_SIDE
    assert {"jax", "jaxlib", "flax", "optax", "numpy"}.isdisjoint(n.split(".")[0] for n in names)


def test_a_circle_is_found():
    sources = {
        "run/a.py": "from jaxrl_po.run import b",
        "run/b.py": "from jaxrl_po.run.c import f",
        "run/c.py": "import jaxrl_po.run.a",
    }
    assert circles(sources) == list(sources)
    assert circles({**sources, "run/c.py": ""}) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("losses.py", "from jaxrl_po import updates"),
        ("losses.py", "from jaxrl_po.advantages import gae"),
        ("control/problem.py", "from jaxrl_po.language import tasks"),
        ("learner.py", "import flax.linen"),
        ("learner.py", "from jaxrl_po import control"),
        ("algorithms/ppo.py", "import jaxrl_po.run.loop.runner"),
        ("updates.py", "import matplotlib.pyplot"),
    ],
)
def test_violations_are_found(module, source):
    assert violations(module, source)


def test_no_script_is_named_like_a_standard_module():
    """Python looks into a script's own folder first: `profile.py` there breaks cProfile."""
    scripts = [p for room in ("experiments", "tests") for p in (ROOT / room).rglob("*.py")]
    assert len(scripts) > 100
    assert not {p.stem for p in scripts} & sys.stdlib_module_names
