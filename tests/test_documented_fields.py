"""Tests that fields on a page exist in the record that the page names, and that each field is
documented."""

import importlib
import inspect
import re

import pytest
from names import PAGES, ROOT, name

from jaxrl_po.run.experiment import control, flags, language, registry

DOCS = ROOT / "docs"
METHODS = set(registry.METHODS)
SHARED = re.findall(
    r"^\| (`.+?) \| (.+?) \| .+ \|$",
    (DOCS / "methods.md").read_text().partition("## Shared fields")[2].partition("\n## ")[0],
    re.M,
)
KINDS = {
    "all": METHODS,
    "with a critic": {name for name, x in registry.METHODS.items() if x.has_critic},
    "in groups": {name for name, x in registry.METHODS.items() if x.compares_groups},
}


def words(text):
    """Returns the words between backquotes in a text."""
    return set(re.findall(r"`(\w+)`", text))


def fields(algorithm):
    return {field.name for field in flags.settable(registry.METHODS[algorithm].Config)}


def rows(text):
    """Returns the fields that begin a row of a table."""
    return set(re.findall(r"^\| `(\w+)` \|", text, re.M))


def methods_of(cell):
    """Returns the methods that a cell in the table of shared fields names.

    Example:
      >>> methods_of("`npg`, `trpo`") == {"npg", "trpo"}
      True
      >>> sorted(methods_of("all but `npg`, `ppo`, in groups, `sft`"))
      ['a2c', 'ppo_penalty', 'reinforce', 'trpo']
    """
    most, _, others = cell.partition(" but ")
    named, left_out = (
        words(text).union(*(kind for said, kind in KINDS.items() if said in text.split(", ")))
        for text in (most, others)
    )
    return named - left_out


@pytest.mark.parametrize(("row", "cell"), SHARED, ids=lambda text: text)
def test_a_shared_row_holds_for_its_methods(row, cell):
    assert methods_of(cell) <= METHODS
    for field in words(row):
        assert methods_of(cell) == {each for each in METHODS if field in fields(each)}, field


def documented(algorithm):
    """Returns the documented fields in tables of a method's page, of its parent's page, and in
    shared rows.

    A method without a page has a section of `compositions.md`, whose text may name fields.
    """
    page = DOCS / "algorithms" / f"{algorithm}.md"
    if page.exists():
        text = page.read_text()
        parent = re.search(r"^## Fields\n\nBeside those of \[[\w ]+\]\((\w+\.md)\)", text, re.M)
        found = rows(text) | rows((page.parent / parent[1]).read_text() if parent else "")
    else:
        whole = (DOCS / "algorithms" / "compositions.md").read_text()
        section = rf"^## [^\n]+{{ #{algorithm} }}\n.*?(?=^## |\Z)"
        grpo = (DOCS / "algorithms" / "grpo.md").read_text()
        found = words(re.search(section, whole, re.M | re.S)[0]) | rows(grpo)
    return found.union(*(words(row) for row, cell in SHARED if algorithm in methods_of(cell)))


@pytest.mark.parametrize("algorithm", sorted(METHODS))
def test_every_field_of_a_method_is_documented(algorithm):
    assert fields(algorithm) - documented(algorithm) == set()


def told(path):
    """Returns method and fields of each text of a page that states whose fields they are.

    Such texts are commands and the page of a method.
    """
    text = re.sub(r"\\\n\s*", "", path.read_text())
    for command in re.findall(r"jaxrl-po (?:control|sweep|language) [^\n`#]*", text):
        script = language if command.startswith("jaxrl-po language") else control
        algorithm = re.search(r"--algorithm=(\w+)", command)
        # a resumed run keeps its method
        if algorithm or not re.search(r"--(resume|init_from|sampling)\b", command):
            chosen = algorithm[1] if algorithm else script.OPTIONS().algorithm
            yield chosen, set(re.findall(r"--config\.(\w+)", command))
        text = text.replace(command, "")
    if path.parent.name == "algorithms" and path.stem in METHODS:
        yield path.stem, set(re.findall(r"--config\.(\w+)", text))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_fields_exist_in_the_record_that_is_said(path):
    for algorithm, found in told(path):
        assert found - fields(algorithm) == set(), algorithm


def test_help_describes_the_fields_of_exported_named_tuples():
    modules = ("types", "backend", "control", "language", "trust_region", "run")
    exported = [
        value
        for module in (importlib.import_module(f"jaxrl_po.{name}") for name in modules)
        for value in (getattr(module, name) for name in dir(module))
        if inspect.isclass(value) and hasattr(value, "_fields")
        if value.__module__.startswith("jaxrl_po")
    ]
    assert {"TrainState", "Task", "Trained", "ControlPolicy"} <= {x.__name__ for x in exported}
    for record in exported:
        assert "Alias for field" not in inspect.getdoc(record) + "".join(
            inspect.getdoc(getattr(record, field)) for field in record._fields
        ), record
