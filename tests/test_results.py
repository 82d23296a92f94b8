"""Tests that the result of a complete run is written if tests of the run fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PLUGIN = """
import results


def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(results.Results("kept/result.json"))
"""
MIXED = """
import pytest


@pytest.fixture
def broken():
    raise ValueError


def test_passes():
    pass


def test_fails():
    assert 0


def test_has_a_broken_fixture(broken):
    pass


@pytest.mark.parametrize("i", range(3))
def test_is_skipped(i):
    pytest.skip("no")
"""


def test_a_run_leaves_its_numbers(tmp_path):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(MIXED)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests" / "support")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "xdist", "-n1"]
    subprocess.run([*command, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True)
    found = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == (1, 2, 3)
    assert found["ended"] == "tests_failed"
    assert 0 <= found["seconds"] < 300
