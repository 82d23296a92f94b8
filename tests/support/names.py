"""Finds the names that a program reads from modules, without running the program."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Packages outside this repository whose names are checked; other packages may not be installed.
FAMILIAR = {"flax", "gymnax", "jax", "numpy", "optax"}


def name(path: Path) -> str:
    """Returns the name of a file inside this repository."""
    return path.relative_to(ROOT).as_posix()


def missing(code: str) -> list[str]:
    """Returns the names that a program imports, reads or passes and that do not exist.

    The checked names are imported names, attributes of modules and of classes of the package, and
    keywords of its functions and classes. A name that a function or the program assigns again does
    not stand for a module there.

    Example:
      >>> missing("from jaxrl_po import losses as l, losts; l.cispo, l.cisco")
      ['jaxrl_po.losts', 'l.cisco']
      >>> missing("import jaxrl_po; jaxrl_po.ppo.Config(gamma=1.0, gama=1.0)")
      ['jaxrl_po.ppo.Config(gama=)']
      >>> missing("from jaxrl_po.types import Batch; Batch.score, Batch.scores")
      ['Batch.scores']
    """
    tree = ast.parse(code)
    bound: dict[str, object] = {}
    absent = [name for node in ast.walk(tree) for name in _import(node, bound)]
    return absent + _read(tree, bound)


def _import(node: ast.AST, bound: dict[str, object]) -> list[str]:
    """Adds the values that a statement imports to `bound`; returns the names that do not exist."""
    absent = []
    if isinstance(node, ast.Import):
        for alias in filter(lambda alias: _is_known(alias.name), node.names):
            first = alias.name.partition(".")[0]
            if _module(alias.name) is None:
                absent.append(alias.name)
            else:
                bound[alias.asname or first] = _module(alias.name if alias.asname else first)
    elif isinstance(node, ast.ImportFrom) and _is_known(node.module or "."):
        home = _module(node.module or "")
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            if not hasattr(home, alias.name) and _module(dotted) is None:
                absent.append(dotted)
            else:
                bound[alias.asname or alias.name] = getattr(home, alias.name, None)
    return absent


def _is_known(module: str) -> bool:
    """Returns whether names of a module are checked: modules of known packages and files of this
    repository are."""
    first = module.partition(".")[0]
    if first in FAMILIAR or first == "jaxrl_po":
        return True
    spec = importlib.util.find_spec(first) if first else None
    origin = Path(spec.origin or "") if spec is not None else Path()
    # Packages installed in the virtual environment are below the repository's root too.
    return origin.is_relative_to(ROOT) and "site-packages" not in origin.parts


def _module(name: str) -> ModuleType | None:
    """Imports a module; returns None if it does not exist."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


def _read(scope: ast.AST, bound: dict[str, object]) -> list[str]:
    """Returns attributes and keywords that a scope, or a scope inside it, uses and that do not
    exist.

    Args:
      scope: Program or function.
      bound: `{name: value}`, names imported outside the scope.
    """
    own, inner = _parts(scope)
    anew = {node.arg for node in own if isinstance(node, ast.arg)}
    anew |= {n.id for n in own if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound = {name: value for name, value in bound.items() if name not in anew}
    absent = []
    for node in own:
        if isinstance(node, ast.Attribute):
            if not _has(_value(node.value, bound), node.attr):
                absent.append(ast.unparse(node))
        elif isinstance(node, ast.Call):
            keywords = _keywords(_value(node.func, bound))
            given = [keyword.arg for keyword in node.keywords if keyword.arg]
            unknown = [word for word in given if keywords is not None and word not in keywords]
            absent += [f"{ast.unparse(node.func)}({word}=)" for word in unknown]
    return absent + [name for each in inner for name in _read(each, bound)]


def _has(value: object, name: str) -> bool:
    """Returns whether a module or class of the package has an attribute.

    For values that are not modules or classes of the package the result is True.
    """
    if isinstance(value, type) and _is_ours(value):
        return hasattr(value, name) or name in getattr(value, "__dataclass_fields__", {})
    return not isinstance(value, ModuleType) or hasattr(value, name)


def _is_ours(value: object) -> bool:
    return str(getattr(value, "__module__", "")).startswith("jaxrl_po")


def _keywords(value: object) -> set[str] | None:
    """Returns the keywords of a function or record of the package; None if it accepts any
    keyword."""
    if not callable(value) or not _is_ours(value):
        return None
    try:
        parameters = inspect.signature(value).parameters
    except ValueError:  # a class that derives from a Python built-in, such as RuntimeError
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values()):
        return None
    return set(parameters)


def _parts(scope: ast.AST) -> tuple[list[ast.AST], list[ast.AST]]:
    """Returns the nodes of a scope outside nested functions, and the functions directly inside the
    scope."""
    own: list[ast.AST] = []
    inner: list[ast.AST] = []
    ahead = list(ast.iter_child_nodes(scope))
    while ahead:
        node = ahead.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            inner.append(node)
        else:
            own.append(node)
            ahead = [*ast.iter_child_nodes(node), *ahead]
    return own, inner


def _value(node: ast.AST, bound: dict[str, object]) -> object:
    """Returns the value of an imported name, or of an attribute of an imported name."""
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, bound), node.attr, None)
    return None


def code_of(path: Path) -> str:
    """Returns the code of a program, of a notebook's cells, or of a page's Python snippets."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return "\n".join("".join(cell["source"]) for cell in cells)
    if path.suffix == ".md":
        return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S))
    return text


def parses(code: str) -> bool:
    """Returns whether a text is valid Python."""
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True
