"""Tests that the code does not grow: limits are lowered as the code shrinks."""

import re

import pytest
import size

LIMITS = {
    "library code": 25_469,
    "run layer code": 11_540,
    "run layer files": 79,
    "run layer import pairs": 370,
    "folders of run/ in import cycles": 0,
    "signatures with Any in the run layer": 113,
    "records above 14 fields in the run layer": 0,
    "modules of run/ with one importer": 16,
    "experiments code": 5_741,
    "functions above 70 lines of code": 0,
    "functions with more than 8 arguments": 0,
    "files above 400 lines of code": 0,
    "ppo's imports, files": 15,
    "ppo's imports, code": 2_020,
    "public without a docstring": 0,
    "README lines": 150,
    "CHANGELOG lines": 180,
    "docs words (studies aside)": 27_497,
    "test code": 32_996,
}


@pytest.fixture(scope="module")
def figures():
    return size.figures()


@pytest.mark.parametrize("name", LIMITS)
def test_limits(figures, name):
    assert figures[name] <= LIMITS[name]


def test_only_code_counts():
    rows = size.code_rows('"""Text."""\n\n# why\nx = 1\ny = (\n    2,\n)\n')
    assert rows == {4, 5, 6, 7}


def test_files_and_names_of_tests_are_short():
    """A file has at most 450 lines, the name of a test at most eight words."""
    text = {file: (size.ROOT / file).read_text() for file in size.listed("tests/**/*.py")}
    assert [file for file in text if text[file].count("\n") > 450] == []
    names = [name for each in text.values() for name in re.findall(r"def test_(\w+)", each)]
    assert len(names) > 1_600
    assert [name for name in names if len(name.split("_")) > 8] == []
