"""Tests that names of the package in notebooks, pages, examples and experiments exist."""

import re

import pytest
from names import PAGES, ROOT, code_of, missing, name, parses
from tables import cases

import jaxrl_po

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROGRAMS = [
    path for folder in ("examples", "experiments") for path in (ROOT / folder).rglob("*.py")
]


@pytest.mark.parametrize("path", [*PAGES, *NOTEBOOKS, *sorted(PROGRAMS)], ids=name)
def test_every_name_of_the_package_exists(path):
    assert missing(code_of(path)) == []


@cases(
    "code, absent",
    ("from jaxrl_po import losses as l\nlambda x: l.cisco(x)", ["l.cisco"]),
    ("import jaxrl_po.absent.more", ["jaxrl_po.absent.more"]),
    ("import jax\njax.jitt", ["jax.jitt"]),
    ("import comparison\ncomparison.clock", ["comparison.clock"]),
    ("from jaxrl_po import losses\ndef f(losses):\n    return losses.total", []),
    ("from jaxrl_po import losses\nlosses = []\nlosses.append(1)", []),
    ("import torch\ntorch.no_such_name", []),
)
def test_what_does_not_exist_is_named(code, absent):
    assert missing(code) == absent


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
