"""Tests that the package does not use packages that break installations, outdated JAX, or
`eval`."""

import ast
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "jaxrl_po").rglob("*.py"))
# JAX will remove `pmap` and `jax.experimental.shard_map`; a callback inside a program stops the
# program at every step.
FORBIDDEN = {"pmap", "shard_map", "pure_callback", "io_callback", "callback", "eval", "exec"}


def refused(source):
    """Returns the forbidden calls in a program.

    >>> sorted(refused("eval(x); jax.pmap(f); jax.shard_map(g); model.eval()"))
    ['eval', 'jax.pmap']
    >>> sorted(refused("jax.experimental.shard_map.shard_map(h)"))
    ['jax.experimental.shard_map.shard_map']
    """
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func) for call in calls} - {"jax.shard_map"}
    of_jax = {name for name in names if name.startswith("jax.")}
    return {name for name in of_jax if name.rpartition(".")[2] in FORBIDDEN} | names & FORBIDDEN


def test_nothing_forbidden_is_used():
    sources = {
        path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in SOURCES
    }
    assert {name: found for name, source in sources.items() if (found := refused(source))} == {}
    leaving = re.compile(r"jax\.experimental(\.| import )(shard_map|pjit|maps|host_callback)")
    assert [name for name, source in sources.items() if leaving.search(source)] == []


def test_gymnax_omissions_are_declared_but_breaking_packages_not():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = {re.split(r"[^\w-]", line)[0].lower() for line in project["dependencies"]}
    assert {"gymnax", "six"} <= names
    assert not {
        name for name in names if name.startswith(("distrax", "rlax", "tfp", "sbx", "tensorflow"))
    }


def unencoded(source):
    """Returns calls that read or write text in the default encoding of the locale.

    >>> unencoded("open(p); p.open('a'); p.read_text(); run(c, text=True)")
    ['open(p)', "p.open('a')", 'p.read_text()', 'run(c, text=True)']
    >>> unencoded("open(p, 'rb'); p.open(encoding='utf-8'); pool.open(seeds); f(text=text)")
    []
    """
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and is_unencoded(node)
    ]


def is_unencoded(call):
    name = ast.unparse(call.func).rsplit(".", 1)[-1]
    given = {each.arg: ast.unparse(each.value) for each in call.keywords}
    words = [each.value for each in call.args if isinstance(each, ast.Constant)]
    if "encoding" in given or "b" in given.get("mode", "".join(map(str, words[-1:]))):
        return False
    if name in ("open", "fdopen"):  # other functions with the name open may open environments
        return isinstance(call.func, ast.Name) or not call.args or bool(words)
    return name in ("read_text", "write_text") or given.get("text") == "True"


def test_text_is_utf8_whatever_the_locale():
    rooms = [path for room in ("experiments", "examples") for path in (ROOT / room).rglob("*.py")]
    found = {path.name: unencoded(path.read_text(encoding="utf-8")) for path in [*SOURCES, *rooms]}
    assert {name: calls for name, calls in found.items() if calls} == {}


def ignored(source):
    """Returns keyword arguments that their function deletes: a user would not notice that they have
    no effect.

    >>> ignored("def f(x, *, a=1, b=2):\\n    del a\\n    return x + b")
    ['f: a']
    >>> ignored("def f(a):\\n    del a")
    []
    """
    return [
        f"{node.name}: {name.id}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        for statement in node.body
        if isinstance(statement, ast.Delete)
        for name in statement.targets
        if isinstance(name, ast.Name) and name.id in {arg.arg for arg in node.args.kwonlyargs}
    ]


def test_no_keyword_argument_is_ignored():
    found = {path.name: ignored(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: names for name, names in found.items() if names} == {}
