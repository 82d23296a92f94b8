"""Measures size and coupling of the code: `python tests/size.py`; `test_size.py` holds the limits.

A code line has at least one token that is not a comment, a docstring or a blank. The folders `run/`
and `cli/` form the run layer. An import pair is a pair of files: each imported name is resolved to
the file that defines it, also through a package, lazy or not, and through `package.name` in the
code.
"""

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
RUN_LAYER = ("jaxrl_po/run/", "jaxrl_po/cli/")
FUNCTION, CLASS = (ast.FunctionDef, ast.AsyncFunctionDef), ast.ClassDef
QUIET = {"COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER", "ENCODING"}


def is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def docstrings(tree):
    """Returns the string statements of a module, of its classes and of its functions."""
    return [x.value for x in ast.walk(tree) if isinstance(x, ast.Expr) and is_text(x.value)]


def code_rows(text):
    """Returns the numbers of the lines that contain code."""
    rows = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] not in QUIET:
            rows.update(range(token.start[0], token.end[0] + 1))
    for each in docstrings(ast.parse(text)):
        rows.difference_update(range(each.lineno, each.end_lineno + 1))
    return rows


def listed(*patterns):
    """Returns the files that match a pattern, relative to the project's root."""
    return sorted(p.relative_to(ROOT).as_posix() for each in patterns for p in ROOT.glob(each))


def dotted(file):
    """Returns the dotted name of the module in a file.

    Example:
      >>> dotted("jaxrl_po/run/__init__.py")
      'jaxrl_po.run'
    """
    return file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(source, package=""):
    """Returns the dotted names that a module imports anywhere, or mentions in a string.

    Args:
      source: Text of the module.
      package: Name of the package if the module is its `__init__`; strings may name modules of that
        package.
    """
    tree, names = ast.parse(source), set()
    quiet = set(map(id, docstrings(tree)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif is_text(node) and id(node) not in quiet:
            names |= set(re.findall(r"\bjaxrl_po(?:\.\w+)+", node.value))
            if package and re.fullmatch(r"\w+(\.\w+)*", node.value):
                names.add(f"{package}.{node.value}")
    return names


def graph(sources):
    """Returns the files that each file imports or names in a string.

    Args:
      sources: Text of each file by its path, relative to the project's root.
    """
    files = {dotted(file): file for file in sources}

    def file_of(name):
        while name and name not in files:
            name = name.rpartition(".")[0]
        return files.get(name)

    found = {}
    for file, text in sources.items():
        package = dotted(file) if file.endswith("__init__.py") else ""
        found[file] = {file_of(name) for name in imported(text, package)} - {None, file}
    return found


def closure(edges, start):
    """Returns a node of a graph and all nodes that it reaches."""
    seen, todo = set(), [start]
    while todo:
        node = todo.pop()
        todo += edges[node] - seen - {node}
        seen.add(node)
    return seen


def in_cycles(edges):
    """Returns the nodes of a graph that reach themselves."""
    return sorted(x for x in edges if any(x in closure(edges, there) for there in edges[x]))


def pairs(trees):
    """Returns the files whose definitions each file imports."""
    module = {dotted(file): file for file in trees}
    # maps (module, name) to the file that defines the name, or to the name that it is imported from
    names = {}
    for file, tree in trees.items():
        for node in tree.body:
            targets = [getattr(node, "target", None), *getattr(node, "targets", [])]
            bound = [x.id for x in targets if isinstance(x, ast.Name)]
            bound += [node.name] if isinstance(node, (*FUNCTION, CLASS)) else []
            names |= {(dotted(file), name): file for name in bound}
            if isinstance(node, ast.ImportFrom):
                names |= {
                    (dotted(file), x.asname or x.name): (node.module, x.name) for x in node.names
                }

    def resolve(mod, name):
        if f"{mod}.{name}" in module:
            return module[f"{mod}.{name}"]
        found = names.get((mod, name))
        if isinstance(found, tuple):
            return resolve(*found)
        if found is None and (mod, "__getattr__") in names:
            within = (f for (m, n), f in names.items() if n == name and m.startswith(f"{mod}."))
            found = next((f for f in within if isinstance(f, str)), None)
        return found or module.get(mod)

    found = {}
    for file, tree in trees.items():
        there, packages = set(), {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                there |= {module.get(x.name) for x in node.names}
                packages |= {x.asname or x.name: x.name for x in node.names}
            elif isinstance(node, ast.ImportFrom):
                there |= {resolve(node.module, x.name) for x in node.names}
                packages |= {x.asname or x.name: f"{node.module}.{x.name}" for x in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                name = packages.get(node.value.id, "")
                if module.get(name, "").endswith("__init__.py"):
                    there.add(resolve(name, node.attr))
        found[file] = there - {None, file}
    return found


def loose_signature(function):
    """Returns whether a function is annotated with `Any`."""
    each = function.args
    annotated = [x.annotation for x in [*each.posonlyargs, *each.args, *each.kwonlyargs]]
    return any("Any" in ast.unparse(x) for x in [*annotated, function.returns] if x)


def large_records(layer, trees):
    """Returns the classes with more than 14 fields, inherited fields included; records of settings
    do not count."""
    classes = {x.name: x for tree in trees.values() for x in ast.walk(tree) if isinstance(x, CLASS)}

    def fields(node):
        bases = {ast.unparse(x).split(".")[-1] for x in node.bases} & classes.keys() - {node.name}
        own = sum(isinstance(x, ast.AnnAssign) for x in node.body)
        return own + sum(fields(classes[x]) for x in bases)

    def is_flags(node):
        decorators = {ast.unparse(x).split("(")[0] for x in node.decorator_list}
        return decorators & {"record", "config.record"}

    found = [x for f in layer for x in ast.walk(trees[f]) if isinstance(x, CLASS)]
    return [f"{fields(x)} {x.name}" for x in found if not is_flags(x) and fields(x) > 14]


def figures():
    """Returns all measurements as `{name: figure}`."""
    files = listed("jaxrl_po/**/*.py")
    text = {f: (ROOT / f).read_text() for f in files}
    tree = {f: ast.parse(t) for f, t in text.items()}
    rows = {f: code_rows(t) for f, t in text.items()}
    code = {f: len(r) for f, r in rows.items()}
    layer = [f for f in files if f.startswith(RUN_LAYER)]
    inside = [f for f in layer if f.startswith(RUN_LAYER[0]) and f != "jaxrl_po/run/__init__.py"]
    arrows = pairs(tree)
    functions = [(f, x) for f in files for x in ast.walk(tree[f]) if isinstance(x, FUNCTION)]
    sized = [
        (sum(x.lineno <= r <= x.end_lineno for r in rows[f]), f"{f}:{x.name}") for f, x in functions
    ]
    folder = {f: f.split("/")[2].removesuffix(".py") for f in inside}
    folders = {x: set() for x in folder.values()}
    for f, there in graph({f: text[f] for f in inside}).items():
        folders[folder[f]] |= {folder[x] for x in there} - {folder[f]}
    importers = {
        f: sum(f in arrows[x] and not x.endswith("__init__.py") for x in files)
        for f in inside
        if not f.endswith("__init__.py")
    }
    ppo = closure(arrows, "jaxrl_po/algorithms/ppo.py")
    bare = [
        x
        for f in files
        for x in tree[f].body
        if isinstance(x, (*FUNCTION, CLASS)) and x.name[0] != "_" and not ast.get_docstring(x)
    ]
    docs = [f for f in listed("docs/**/*.md") if not f.startswith("docs/studies/")]
    docs += ["README.md", "CONTRIBUTING.md"]

    def lines(f):
        return (ROOT / f).read_text().count("\n")

    def total(pattern):
        return sum(len(code_rows((ROOT / f).read_text())) for f in listed(pattern))

    return {
        "library code": sum(code.values()),
        "library lines": sum(t.count("\n") for t in text.values()),
        "run layer code": sum(code[f] for f in layer),
        "run layer files": len(layer),
        "run layer import pairs": sum(len(arrows[f] & set(layer)) for f in layer),
        "folders of run/ in import cycles": len(in_cycles(folders)),
        "the folders": in_cycles(folders),
        "signatures with Any in the run layer": sum(
            loose_signature(x) for f, x in functions if f in layer
        ),
        "records above 14 fields in the run layer": len(large_records(layer, tree)),
        "the records": large_records(layer, tree),
        "modules of run/ with one importer": list(importers.values()).count(1),
        "experiments code": total("experiments/**/*.py"),
        "functions above 70 lines of code": sum(k > 70 for k, _ in sized),
        "the longest": [f"{k} {name}" for k, name in sorted(sized, reverse=True)[:6]],
        "functions with more than 8 arguments": sum(
            len(x.args.posonlyargs + x.args.args) > 8 for _, x in functions
        ),
        "files above 400 lines of code": sum(n > 400 for n in code.values()),
        "ppo's imports, files": len(ppo),
        "ppo's imports, code": sum(code[f] for f in ppo),
        "public without a docstring": len(bare),
        "README lines": lines("README.md"),
        "CHANGELOG lines": lines("CHANGELOG.md"),
        "docs words (studies aside)": sum(len((ROOT / f).read_text().split()) for f in docs),
        "test code": total("tests/**/*.py"),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:42} {value:,}" if isinstance(value, int) else f"{name:42} {value}")
