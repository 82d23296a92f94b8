"""The documentation is true: links, flags, fields, defaults, metrics, quotations, snippets."""

import ast
import dataclasses
import functools
import importlib
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

from jaxrl_po.run import flags, launch, methods, tasks
from jaxrl_po.run.commands import control, language

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCE = re.compile(r"^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--([a-zA-Z][\w.]*)")
ROW = re.compile(r"^\| `(\w+)` \|(.*)\|$", re.M)
SNIPPETS = [code for _, _, code in FENCE.findall((DOCS / "bring_your_own.md").read_text())]
IN_GROUPS_PAGE = set(methods.IN_GROUPS) - {"grpo", "dapo"}


def name(path):
    return path.relative_to(ROOT).as_posix()


def prose(path):
    return FENCE.sub("", path.read_text())


def anchors(path):
    """Explicit ids, and those that headings get."""
    headings = re.findall(r"^#+ (.+?)(?: \{ #(\w+) \})?$", prose(path), re.M)
    return {given or re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title, given in headings}


@functools.cache
def fields(algorithm):
    return {
        field.name: field
        for field in dataclasses.fields(
            importlib.import_module(f"jaxrl_po.algorithms.{algorithm}").Config
        )
    }


@functools.cache
def all_flags():
    """The flags of the two scripts under any algorithm, way to collect, task and reward."""
    found = {"help"}
    for script in (control, language):
        options = script.Options
        variants = [{"algorithm": algorithm} for algorithm in methods.ALGORITHMS]
        if script is control:
            variants += [{"sampling": sampling} for sampling in control.SAMPLINGS]
        else:
            variants += [{"task": task} for task in tasks.TASKS] + [{"reward": language.MODEL}]
        for variant in variants:
            sections = launch.sections_of(script.SCRIPT, options(**variant))
            found |= {
                flags.join(prefix, field.name)
                for prefix, record in sections.items()
                for field in flags.settable(record)
            }
    return found


@functools.cache
def strings_of_the_package():
    return set(
        re.findall(
            r"\"(\w+)\"", "\n".join(path.read_text() for path in (ROOT / "jaxrl_po").rglob("*.py"))
        )
    )


@pytest.mark.parametrize("path", [ROOT / "README.md", *PAGES], ids=name)
def test_links_and_images_exist(path):
    for target in LINK.findall(prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_flags_exist(path):
    unknown = set(FLAG.findall(path.read_text())) - all_flags()
    assert not unknown


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_configs_are_valid(path):
    for algorithm, arguments in re.findall(r"(\w+)\.Config\(([^()]*)\)", path.read_text()):
        call = ast.parse(f"f({arguments})", mode="eval").body
        given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
        importlib.import_module(f"jaxrl_po.algorithms.{algorithm}").Config(**given).validate()


@pytest.mark.parametrize("path", sorted((DOCS / "algorithms").glob("*.md")), ids=name)
def test_tables_of_fields_and_metrics(path):
    tables = {"fields": 0, "metrics": 0}
    for table in re.split(r"\n\n+", prose(path)):
        head = re.match(r"\| field of `(\w+)\.Config` \| default", table)
        if head:
            for field, rest in ROW.findall(table):
                default = flags.shown(fields(head.group(1))[field].default)
                assert rest.split("|")[0].strip() == default, field
                tables["fields"] += 1
        elif table.startswith("| metric |"):
            for metric, _ in ROW.findall(table):
                assert (
                    metric in strings_of_the_package()
                    or f"{metric}=" in (ROOT / "jaxrl_po" / "updates.py").read_text()
                ), metric
                tables["metrics"] += 1
    assert tables["fields"]
    assert tables["metrics"] or path.stem == "compositions"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_quoted_lines_stand_in_their_file(path):
    for _, source, code in FENCE.findall(path.read_text()):
        assert not source or code in (ROOT / source).read_text(), f"{source}:\n{code}"


@pytest.mark.parametrize("path", sorted((DOCS / "algorithms").glob("*.md")), ids=name)
def test_pseudo_code_fits_the_critic_to_advantages_that_are_not_whitened(path):
    """As the code does: `actor_critic.estimate` makes both, and whitening comes after it."""
    for language_of_fence, _, code in FENCE.findall(path.read_text()):
        target = re.search(r"(fit v to|target ←)[^\n;]*\bA\b", code)
        if language_of_fence == "text" and target:
            assert "whiten" not in code[: target.start()]
            assert "whiten(A)" in code[target.end() :]


def test_every_algorithm_has_a_page_or_a_section():
    for algorithm in methods.ALGORITHMS:
        if algorithm in IN_GROUPS_PAGE:
            assert algorithm in anchors(DOCS / "algorithms" / "compositions.md")
        else:
            assert (DOCS / "algorithms" / f"{algorithm}.md").exists()


def test_navigation_and_api_list_what_there_is():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == [page.relative_to(DOCS).as_posix() for page in PAGES]
    for module in re.findall(r"^::: (\S+)$", (DOCS / "api.md").read_text(), re.M):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists(), module


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [*SNIPPETS, FENCE.findall((DOCS / "index.md").read_text())[-1][2]],
    ids=range(len(SNIPPETS) + 1),
)
def test_snippet_runs(code, tmp_path):
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api" / "index.html").stat().st_size > 100_000
