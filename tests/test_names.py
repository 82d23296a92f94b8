"""Tests that names of the package in notebooks, pages, examples and experiments exist."""

import ast
import json
import re

import pytest
from names import ROOT, code_of, missing, parses
from tables import cases

import jaxrl_po

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROGRAMS = [
    path for folder in ("examples", "experiments") for path in (ROOT / folder).rglob("*.py")
]


def name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, *sorted(PROGRAMS)], ids=name)
def test_every_name_of_the_package_exists(path):
    assert missing(code_of(path)) == []


@cases(
    "code, absent",
    ("from jaxrl_po.distributions import Categorical, ratio", ["jaxrl_po.distributions.ratio"]),
    ("from jaxrl_po import losses, losts\nlosses.cisco", ["jaxrl_po.losts", "losses.cisco"]),
    ("from jaxrl_po import losses as l\nlambda x: l.cisco(x)", ["l.cisco"]),
    ("import jaxrl_po.control as c\nc.spaces.read_space", ["c.spaces.read_space"]),
    ("import jaxrl_po\njaxrl_po.run.trained", ["jaxrl_po.run.trained"]),
    ("def f():\n    from jaxrl_po import run\n    run.lode", ["run.lode"]),
    ("import jaxrl_po.absent.more", ["jaxrl_po.absent.more"]),
    ("import jax\njax.jitt", ["jax.jitt"]),
    ("import comparison\ncomparison.clock", ["comparison.clock"]),
    ("from jaxrl_po import ppo\nppo.Config(gama=1.0)", ["ppo.Config(gama=)"]),
    ("from jaxrl_po import losses\ndef f(losses):\n    return losses.total", []),
    ("from jaxrl_po import losses\nlosses = []\nlosses.append(1)", []),
    ("import torch\ntorch.no_such_name", []),
)
def test_what_does_not_exist_is_named(code, absent):
    assert missing(code) == absent


def test_code_of_a_notebook_leaves_out_commands(tmp_path):
    cells = [
        {"cell_type": "markdown", "source": ["import nothing"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!ls\n", "x = 1 % 2"]},
    ]
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    assert ast.unparse(ast.parse(code_of(path))) == "x = 1 % 2"


# a name such as `learner.step` belongs to an object, not to the module The modules that are not
# listed hold records.
MODULES = sorted({*jaxrl_po.__all__, "distributions", "masked"} - {"learner"})
KNOWN = f"from jaxrl_po import {', '.join(MODULES)}\n"
KNOWN += "from jaxrl_po.types import Batch, Learner, Problem, Samples, TrainState\n"
KNOWN += "from jaxrl_po.language import Task\n"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_names_between_backquotes_exist(path):
    blocks = re.compile(r"^```.*?^```$", re.M | re.S)
    found = re.findall(r"`([^`\n]+)`", blocks.sub("", path.read_text()))
    absent = [missing(KNOWN + code) for code in found if parses(code) and code[-3:] != ".py"]
    assert [names for names in absent if names] == []
