"""Tests that the documentation is true: links, flags, fields, defaults, metrics, quotations,
snippets."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import os
import re
import shlex
import tempfile
import textwrap
from pathlib import Path

import jax
import pytest
import trial
from names import PAGES, ROOT, name
from scripts import python
from tables import cases

import jaxrl_po
from jaxrl_po import language as words
from jaxrl_po.cli import evaluate, export, plot, render, report
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import control, flags, language, registry, search_space, settings
from jaxrl_po.run.store import metrics

DOCS = ROOT / "docs"
README = ROOT / "README.md"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"
METHODS = DOCS / "methods.md"
FENCE = re.compile(r"^```(\w*)(?: title=\"(.+?)\")?\n(.*?)^```$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FLAG = re.compile(r"(?<![\w-])--([a-z][\w.]*\*?)")
COMMAND = re.compile(r"(jaxrl-po|python experiments/(?:\w+/)*\w+\.py)(?: (.*))?$")
OTHERS = re.compile(
    r"^\.venv/bin/python .*|^#SBATCH .*|^srun |--worker=all --command=|--no-deps", re.M
)
SCRIPTS = sorted(
    path
    for folder in ("studies", "studies/claims", "benchmarks", "benchmarks/bench")
    for path in ROOT.glob(f"experiments/{folder}/*.py")
)
ROW = re.compile(r"^\| `(\w+)` \|(.*)\|$", re.M)
PROGRAMS = {  # snippets of a page; each snippet may continue the previous one
    page: "\n".join(
        code
        for kind, source, code in FENCE.findall((DOCS / page).read_text())
        if kind == "python" and not source
    )
    for page in ("bring_your_own.md", "hyperparameters.md", "scaling.md", "index.md")
}
README_SNIPPETS = [code for kind, _, code in FENCE.findall(README.read_text()) if kind == "python"]


def prose(path):
    return FENCE.sub("", path.read_text())


def anchors(path):
    """Returns the explicit ids of a page and the ids that its headings get."""
    headings = re.findall(r"^#+ (.+?)(?: \{ #(\w+) \})?$", prose(path), re.M)
    return {given or re.sub(r"[^\w]+", "-", title.lower()).strip("-") for title, given in headings}


def fields(algorithm):
    return {field.name: field for field in dataclasses.fields(registry.METHODS[algorithm].Config)}


@functools.cache
def training_flags(script):
    """Returns the flags of a training command under any algorithm, sampling, task and reward."""
    variants = [{"algorithm": algorithm} for algorithm in registry.METHODS]
    if script is control:
        variants += [{"sampling": sampling} for sampling in control.SAMPLINGS]
    else:
        variants += [{"task": task} for task in registry.TASKS] + [{"reward": "model"}]
        variants += [{"init_from": str(pretrained_folder())}]
        variants += [{"tools": "mine.py:Game", **variants[-1], "task": "file"}]
    return {
        flags.join(prefix, field.name)
        for options in (script.OPTIONS(**variant) for variant in variants)
        for prefix, record in settings.sections_of(
            script, options, script.initial_model(options)
        ).items()
        for field in flags.settable(record)
    }


@functools.cache
def pretrained_folder():
    """Makes a folder that a command recognises as a pretrained model."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def fields_of(record):
    return {field.name for field in flags.settable(record)}


@functools.cache
def flags_of():
    """Returns the starts of command lines, each with the flags that may follow."""
    found = {
        "jaxrl-po control": training_flags(control),
        "jaxrl-po language": training_flags(language),
    }
    found["jaxrl-po sweep"] = training_flags(control) | fields_of(search_space.ControlSweep)
    for command in (evaluate, export, plot, render, report):
        name_of = command.__name__.rpartition(".")[2]
        record = getattr(command, f"{name_of.capitalize()}Options")
        found[f"jaxrl-po {name_of}"] = fields_of(record)
    found["python experiments/study.py"] = set(vars(trial.parser().parse_args([])))
    for path in SCRIPTS:
        spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        if hasattr(module, "parser") or hasattr(module, "claim"):
            found[f"python {name(path)}"] = found["python experiments/study.py"]
        elif hasattr(module, "main"):
            sections = getattr(module, "SECTIONS", {"": module.Options})
            found[f"python {name(path)}"] = {
                flags.join(prefix, field)
                for prefix, record in sections.items()
                for field in fields_of(record)
            }
    return found


def commands(text):
    """Returns the command lines of a page, in a block or between backquotes, with their flags.

    >>> commands("see `jaxrl-po plot a --out=b`, `--seeds=1`")
    [('jaxrl-po plot', {'out'})]
    """
    blocks = "\n".join(code for kind, _, code in FENCE.findall(text) if kind in ("", "bash"))
    lines = re.sub(r"\\\n\s*", "", blocks).splitlines()
    lines += re.findall(r"`([^`\n]+)`", FENCE.sub("", text))
    found = []
    for line in lines:
        match = COMMAND.search(re.split(r"\s+#", line)[0].strip(' "'))
        if match and match[1] == "jaxrl-po":
            command, _, rest = (match[2] or "").partition(" ")
            found.append((f"jaxrl-po {command}", set(FLAG.findall(rest))))
        elif match:
            found.append((match[1], set(FLAG.findall(match[2] or ""))))
    return found


def known(flag, among):
    """Returns whether a flag is in a set of flags; `prefix.*` stands for every flag with this
    prefix."""
    if flag.endswith("*"):
        return any(other.startswith(flag[:-1]) for other in among)
    return flag in among


@functools.cache
def strings_of_the_package():
    sources = [path.read_text() for path in (ROOT / "jaxrl_po").rglob("*.py")]
    return set(re.findall(r"\"(\w+)\"", "\n".join(sources)))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_and_images_exist(path):
    for target in LINK.findall(prose(path)):
        if re.match(r"\w+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def test_a_newcomer_reads_contributing_to_its_end():
    assert len(CONTRIBUTING.read_text().splitlines()) <= 132


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_flags_exist(path):
    everywhere = {"help"}.union(*flags_of().values())
    text = OTHERS.sub("", path.read_text())
    assert [flag for flag in FLAG.findall(text) if not known(flag, everywhere)] == []


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_commands_exist_and_take_their_flags(path):
    for command, given in commands(OTHERS.sub("", path.read_text())):
        if command not in ("jaxrl-po COMMAND", "jaxrl-po "):
            unknown = {flag for flag in given if not known(flag, {"help", *flags_of()[command]})}
            assert not unknown, command


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_options_of_other_scripts_stand_in_their_source(path):
    for line in re.findall(r"^\.venv/bin/python (tests/.*)$", path.read_text(), re.M):
        script, *given = shlex.split(line, comments=True)
        source = (ROOT / script).read_text()
        assert all(f'"{word.partition("=")[0]}"' in source for word in given if word[0] == "-"), (
            line
        )


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_configs_are_valid(path):
    """A config is checked as far as its arguments are numbers and words."""
    for algorithm, arguments in re.findall(r"(\w+)\.Config\(([^()]*)\)", path.read_text()):
        if algorithm == "algorithm" or "…" in arguments:
            continue
        call = ast.parse(f"f({arguments})", mode="eval").body
        given = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if not isinstance(keyword.value, ast.Attribute)
        }
        importlib.import_module(f"jaxrl_po.algorithms.{algorithm}").Config(**given).validate()


@pytest.mark.parametrize("path", [*sorted((DOCS / "algorithms").glob("*.md")), METHODS], ids=name)
def test_tables_of_fields_and_metrics(path):
    checked = 0
    for table in re.split(r"\n\n+", prose(path)):
        head = re.match(r"\| field of `(\w+)\.Config` \| default", table)
        if head:
            for field, rest in ROW.findall(table):
                default = errors.spell(fields(head.group(1))[field].default)
                assert rest.split("|")[0].strip() == default, field
                checked += 1
        elif table.startswith("| metric |"):
            for metric, _ in ROW.findall(table):
                assert (
                    metric in strings_of_the_package()
                    or f"{metric}=" in (ROOT / "jaxrl_po" / "updates.py").read_text()
                ), metric
                checked += 1
    assert checked


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_quoted_lines_stand_in_their_file(path):
    for _, source, code in FENCE.findall(path.read_text()):
        assert not source or code in (ROOT / source).read_text(), f"{source}:\n{code}"


@pytest.mark.parametrize("path", sorted((DOCS / "algorithms").glob("*.md")), ids=name)
def test_pseudo_code_fits_critic_to_unwhitened_advantages(path):
    """The code does the same: `actor_critic.estimate` computes target and advantage, and whitening
    comes later."""
    for language_of_fence, _, code in FENCE.findall(path.read_text()):
        target = re.search(r"(fit v to|target ←)[^\n;]*\bA\b", code)
        if language_of_fence == "text" and target:
            assert "whiten" not in code[: target.start()]
            assert "whiten(A)" in code[target.end() :]


@cases("path", README, DOCS / "index.md", DOCS / "cli.md", ids=name)
def test_commands_run_in_the_order_of_the_page(path):
    """A command reads only files that an earlier command wrote."""
    made = set()
    for language_of_fence, _, code in FENCE.findall(path.read_text()):
        for line in "" if language_of_fence else code.splitlines():
            begins = "--resume" not in line
            for flag, folder in re.findall(r"(--\w+=)?(runs/\w+)", line.partition("#")[0]):
                if flag == "--out=" and begins:
                    made.add(folder)
                assert folder in made, line


@cases("path", *[path for path in PAGES if path.stem != "pretrained"], ids=name)
def test_initial_state_is_made_by_compiled_function(path):
    """Pretrained parameters are an exception, since they would be constants of the program."""
    for line in path.read_text().splitlines():
        if "learner.init(" in line:
            assert re.search(r"jit\(lambda key|lax\.scan", line), line


def test_navigation_lists_every_page_and_notebook():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    notebooks = [f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(listed) == sorted(
        [*(page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")), *notebooks]
    )


def test_api_describes_every_public_name():
    entry = re.compile(r"^::: (\S+)$(?:\n {4}options:\n {6}members: \[(.+)\]$)?", re.M)
    described = set()
    for page in (DOCS / "api").glob("*.md"):
        for home, members in entry.findall(page.read_text()):
            module = importlib.import_module(home)
            names = members.split(", ") if members else []
            assert [name for name in names if not hasattr(module, name)] == []
            described |= {home.replace(".algorithms.", "."), *(f"{home}.{name}" for name in names)}
    assert {f"jaxrl_po.{name}" for name in jaxrl_po.__all__} <= described
    for module in (words.tasks, words.dialogues, words.pretrained):
        public = {name for name in module.__all__ if callable(getattr(module, name))}
        twice = {"Countdown", "Prompt", "Task"}  # these names are described beside their functions
        assert {f"{module.__name__}.{name}" for name in public - twice} <= described


def run(code, folder):
    """Returns the output of a snippet, run in a separate process and compiled as a user's snippet
    is."""
    environment = {
        **{key: value for key, value in os.environ.items() if key != "XLA_FLAGS"},
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    done = python("-c", textwrap.dedent(code), cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


PRINTED = re.compile(
    r"^print\(.*\)  # (.*)$", re.M
)  # the output of a snippet is in the comment behind the snippet's line


def numbers(text):
    return [float(each) for each in re.findall(r"-?\d+\.?\d*(?:e-?\d+)?", text)]


def require_close(printed, said):
    """Compares loosely: machines and versions differ in the last digits, and training enlarges the
    differences."""
    assert len(printed) == len(said)
    for line, expected in zip(printed, said, strict=True):
        assert len(numbers(line)) == len(numbers(expected)), line
        for number, wanted in zip(numbers(line), numbers(expected), strict=True):
            assert abs(number - wanted) <= 0.2 + 0.2 * abs(wanted), f"{line}: {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PROGRAMS)
def test_page_snippets_print_their_comments(page, tmp_path):
    said = PRINTED.findall(PROGRAMS[page])
    assert len(said) == len(re.findall(r"^print\(", PROGRAMS[page], re.M)) > 0
    require_close(run(PROGRAMS[page], tmp_path).splitlines(), said)


@pytest.mark.timeout(900)
@pytest.mark.slow
def test_readme_snippets_print_their_comments(tmp_path):
    """Each snippet continues the previous one; the last snippet loads a run that does not exist in
    the test."""
    code = "".join(README_SNIPPETS[:3])
    printed = [line for line in run(code, tmp_path).splitlines() if line.startswith("[")]
    require_close(printed, PRINTED.findall(code))
    _, accuracies = map(numbers, printed)
    assert accuracies[-1] > accuracies[0] + 0.25
    drawn = [tmp_path / "runs" / name for name in ("clip", "quadratic")]
    assert all(metrics.read(run / "metrics.jsonl")[-1]["iteration"] == 15 for run in drawn)
    shown = ["--metric=episode_return", f"--out={tmp_path / 'losses.png'}"]
    assert plot.main([*map(str, drawn), *shown]) == 0


@pytest.mark.slow
def test_contributing_lists_the_files_that_a_run_enters():
    entered = re.findall(r"^(\S+)\.py ", python("walk.py", cwd=ROOT / "tests").stdout, re.M)
    blocks = [code for *_, code in FENCE.findall(CONTRIBUTING.read_text())]
    assert re.split(r",\s+", next(x for x in blocks if "loop/job" in x).strip()) == entered
    assert len(entered) <= 30


@pytest.mark.slow
def test_the_site_builds(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    pytest.importorskip("latex2mathml")
    done = python("-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "api" / "run" / "index.html").stat().st_size > 100_000
    assert "<math" in (tmp_path / "site" / "algorithms" / "trpo" / "index.html").read_text()
    notebook = (tmp_path / "site" / "notebooks" / "02_trust_regions" / "index.html").read_text()
    assert "<math" in notebook
    assert "data:image/png" in notebook
