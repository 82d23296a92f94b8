"""Figures of the house: `python tests/house.py`; `test_house.py` holds its limits.

Code lines are lines that hold code: no blank line, no comment, no docstring. The shell is `run/`,
`study/` and `cli/`. Import pairs are pairs of files: each name is resolved to the file that defines
it, through a package's face, lazy or not, and through `package.name` in the code.
"""

import ast
import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
SHELL = ("jaxrl_po/run/", "jaxrl_po/study/", "jaxrl_po/cli/")


def code_rows(text):
    """Numbers of the lines that hold a token which is no comment, string statement or newline."""
    rows, quiet = set(), set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            quiet.update(range(node.lineno, node.end_lineno + 1))
    skip = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
        tokenize.ENCODING,
    }
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skip:
            rows.update(range(token.start[0], token.end[0] + 1))
    return rows - quiet


def listed(*patterns):
    """Files relative to the project's root."""
    return sorted(p.relative_to(ROOT).as_posix() for each in patterns for p in ROOT.glob(each))


def figures():
    files = listed("jaxrl_po/**/*.py")
    text = {f: (ROOT / f).read_text() for f in files}
    tree = {f: ast.parse(t) for f, t in text.items()}
    rows = {f: code_rows(t) for f, t in text.items()}
    code = {f: len(r) for f, r in rows.items()}
    shell = [f for f in files if f.startswith(SHELL)]
    name_of = {f: f[:-3].replace("/", ".").removesuffix(".__init__") for f in files}
    module = {n: f for f, n in name_of.items()}
    defined, faces, lazy = {}, {}, set()
    for f in files:
        for node in tree[f].body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                defined[name_of[f], node.name] = f
                if node.name == "__getattr__":
                    lazy.add(name_of[f])
            for target in (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            ):
                if isinstance(target, ast.Name):
                    defined[name_of[f], target.id] = f
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    faces[name_of[f], alias.asname or alias.name] = (node.module, alias.name)

    def resolve(mod, name, depth=6):
        """The file that defines `mod.name`, or None for what is not ours."""
        if f"{mod}.{name}" in module:
            return module[f"{mod}.{name}"]
        if (mod, name) in defined:
            return defined[mod, name]
        if (mod, name) in faces and depth:
            return resolve(*faces[mod, name], depth - 1)
        if mod in lazy:
            for (other, what), f in defined.items():
                if what == name and other.startswith(mod + "."):
                    return f
        return module.get(mod)

    arrows = {f: set() for f in files}
    for f in files:
        alias_of = {}
        for node in ast.walk(tree[f]):
            if isinstance(node, ast.Import):
                for a in node.names:
                    if a.name in module:
                        arrows[f].add(module[a.name])
                        alias_of[a.asname or a.name] = a.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for a in node.names:
                    target = resolve(node.module, a.name)
                    if target:
                        arrows[f].add(target)
                    if f"{node.module}.{a.name}" in module:
                        alias_of[a.asname or a.name] = f"{node.module}.{a.name}"
        for node in ast.walk(tree[f]):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and alias_of.get(node.value.id)
            ):
                mod = alias_of[node.value.id]
                if module[mod].endswith("__init__.py"):
                    arrows[f].add(resolve(mod, node.attr))
        arrows[f] = {t for t in arrows[f] if t and t != f}

    functions = [
        (f, n)
        for f in files
        for n in ast.walk(tree[f])
        if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    sized = sorted(
        (
            (sum(n.lineno <= r <= n.end_lineno for r in rows[f]), f"{f}:{n.name}")
            for f, n in functions
        ),
        reverse=True,
    )
    wide = [
        f"{f}:{n.name} {k}"
        for f, n in functions
        if (k := len(n.args.posonlyargs + n.args.args)) > 8
    ]
    seen, todo = set(), [module.get("jaxrl_po.algorithms.ppo")]
    while todo:
        f = todo.pop()
        if f and f not in seen:
            seen.add(f)
            todo += arrows[f]
    bare = [
        f
        for f in files
        for n in tree[f].body
        if isinstance(n, (ast.FunctionDef, ast.ClassDef))
        and not n.name.startswith("_")
        and not ast.get_docstring(n)
    ]
    docs = [
        f
        for f in listed("docs/**/*.md", "README.md", "CONTRIBUTING.md")
        if not f.startswith("docs/studies/")
    ]

    def lines(f):
        return (ROOT / f).read_text().count("\n")

    def total(*patterns):
        return sum(len(code_rows((ROOT / f).read_text())) for f in listed(*patterns))

    return {
        "library code": sum(code.values()),
        "library lines": sum(t.count("\n") for t in text.values()),
        "shell code": sum(code[f] for f in shell),
        "shell files": len(shell),
        "experiments code": total("experiments/**/*.py"),
        "shell import pairs": sum(len([t for t in arrows[f] if t in shell]) for f in shell),
        "functions above 70 lines of code": sum(k > 70 for k, _ in sized),
        "the longest": [f"{k} {w}" for k, w in sized[:6]],
        "functions with more than 8 arguments": len(wide),
        "files above 300 lines of code": sum(n > 300 for n in code.values()),
        "ppo's closure, files": len(seen),
        "ppo's closure, code": sum(code[f] for f in seen),
        "public without a docstring": len(bare),
        "README lines": lines("README.md"),
        "CHANGELOG lines": lines("CHANGELOG.md"),
        "docs words (studies aside)": sum(len((ROOT / f).read_text().split()) for f in docs),
        "test code": total("tests/**/*.py"),
    }


if __name__ == "__main__":
    for name, value in figures().items():
        print(f"{name:38} {value:,}" if isinstance(value, int) else f"{name:38} {value}")
