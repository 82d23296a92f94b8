"""Tests that a module imports only from lower layers or its own folder, and that imports form no
cycles."""

import ast
import functools
import sys
from pathlib import Path

import pytest
import size
from tables import cases

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "jaxrl_po"
LAYERS = (
    {"version", "backend", "config", "types", "masked", "compensated", "variables"},  # data
    {"divergences"},  # log-ratios, from which distributions and losses are computed
    {  # the layer of mathematics
        *("distributions", "advantages", "losses", "token_weights"),
        *("trust_region", "group_advantages", "group_statistics"),
    },
    {  # the layer of one training iteration
        *("lengths", "minibatches", "optimizers", "updates", "natural_updates"),
        *("learner", "dynamic_sampling", "population"),
    },
    {"control", "language"},  # problems
    {"algorithms"},
    {"run"},  # the layer of impure code: files, processes and devices
    {"cli"},  # the layer of commands
    {"__main__", "__init__"},
)
RUN = (  # folders and modules of run/, lowest layer first
    *("errors", "devices", "store", "data", "host", "loop"),
    *("figures", "experiment", "aot", "__init__"),
)
CHAINS = {0, 3}  # layers whose modules may import each other
FLAX_HOMES = {
    "control/memory.py",
    "control/networks.py",
    "language/blocks.py",
    "language/transformer.py",
}
IMPURE = {"absl", "orbax", "matplotlib", "PIL", "rich"}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def layer(unit: str) -> int:
    return next(i for i, members in enumerate(LAYERS) if unit in members)


def place(part: str) -> int:
    """Returns the position in `run/` of a folder or module; names of other kinds are those in
    `__init__`."""
    return RUN.index(part if part in RUN else "__init__")


def violations(module: str, source: str) -> list[str]:
    unit, *inner = module.removesuffix(".py").split("/")
    here, found = layer(unit), []
    for name in sorted(size.imported(source)):
        root, *rest = name.split(".")
        if root == "jaxrl_po" and rest and any(rest[0] in members for members in LAYERS):
            there = layer(rest[0])
            allowed = rest[0] == unit and bool(inner)
            allowed |= there < here or (there == here and here in CHAINS)
            if rest[0] == unit == "run":
                allowed = place("".join(rest[1:2])) <= place(inner[0])
            if not allowed:
                found.append(f"{module} (L{here}) imports {name} (L{there})")
        if root == "flax" and module not in FLAX_HOMES:
            found.append(f"{module} imports flax")
        if root in IMPURE and unit not in ("run", "cli", "__main__"):
            found.append(f"{module} (L{here}) imports {root}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_layers(module):
    assert violations(module, (PACKAGE / module).read_text()) == []


ASKS_JAX = {"default_backend", "devices", "local_devices", "device_count", "local_device_count"}


def asks_jax(source: str) -> list[str]:
    """Returns the places in a program that ask JAX for its devices."""
    return [
        f"line {node.lineno}: {ast.unparse(node)}"
        for node in ast.walk(ast.parse(source))
        if (
            isinstance(node, ast.Attribute) and node.attr in ASKS_JAX and "jax" in ast.unparse(node)
        )
        or (isinstance(node, ast.alias) and node.name in ASKS_JAX)
    ]


@pytest.mark.parametrize("module", MODULES)
def test_one_function_below_run_asks_jax_for_backend(module):
    if module.split("/")[0] in ("run", "cli"):
        return
    found = asks_jax((PACKAGE / module).read_text())
    assert len(found) == (2 if module == "backend.py" else 0), found


def sources(texts: dict[str, str]) -> dict[str, str]:
    return {f"jaxrl_po/{module}": text for module, text in texts.items()}


@functools.cache
def graph() -> dict[str, set[str]]:
    return size.graph(sources({module: (PACKAGE / module).read_text() for module in MODULES}))


def test_no_module_imports_itself_however_far_around():
    assert size.in_cycles(graph()) == []


WORKER_SIDE = {
    *("workers", "guard", "scoring_worker", "answers", "mathematics", "reasoning"),
    *("instances", "schemas"),
}


@pytest.mark.parametrize("module", [m for m in MODULES if Path(m).stem in WORKER_SIDE])
def test_worker_processes_never_import_jax(module):
    """Worker processes import only each other's modules, since other modules of the package might
    import JAX."""
    assert module.startswith(("run/data/", "run/host/dialogues/"))
    assert {Path(file).stem for file in graph()[f"jaxrl_po/{module}"]} <= WORKER_SIDE
    names = size.imported((PACKAGE / module).read_text())
    assert {"jax", "jaxlib", "flax", "optax", "numpy"}.isdisjoint(n.split(".")[0] for n in names)


@cases(
    "last",
    "import jaxrl_po.run.a",
    "SCORE = 'jaxrl_po.run.a:score'",
    "COMMAND = ['-m', f'jaxrl_po.run.a{suffix}']",
    "import jaxrl_po.run",
)
def test_a_cycle_of_modules_is_found(last):
    texts = {
        "run/__init__.py": "NAMES = {'a': ('f',)}",
        "run/a.py": "from jaxrl_po.run import b",
        "run/b.py": "from jaxrl_po.run.c import f",
        "run/c.py": last,
    }
    found = size.in_cycles(size.graph(sources(texts)))
    assert found[-3:] == [f"jaxrl_po/run/{name}.py" for name in "abc"]
    assert size.in_cycles(size.graph(sources({**texts, "run/c.py": f'"""{last}"""'}))) == []


def test_everything_in_run_has_a_place():
    parts = {m.split("/")[1].removesuffix(".py") for m in MODULES if m.startswith("run/")}
    assert parts == set(RUN)


@cases(
    "module, source",
    ("losses.py", "from jaxrl_po import updates"),
    ("control/problem.py", "from jaxrl_po.language import tasks"),
    ("learner.py", "import flax.linen"),
    ("updates.py", "import matplotlib.pyplot"),
    ("run/store/folder.py", "def f():\n    from jaxrl_po.run.loop import job"),
    ("run/errors.py", "from jaxrl_po.run import devices"),
    ("run/experiment/models.py", "from jaxrl_po.run import Experiment"),
    ("run/experiment/models.py", "from jaxrl_po import run"),
)
def test_violations_are_found(module, source):
    assert violations(module, source)


def test_no_script_is_named_like_a_standard_module():
    """Python searches a script's own folder first: a file `profile.py` in that folder would break
    cProfile."""
    scripts = [p for room in ("experiments", "tests") for p in (ROOT / room).rglob("*.py")]
    assert len(scripts) > 100
    assert not {p.stem for p in scripts} & sys.stdlib_module_names
