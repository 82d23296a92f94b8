"""Tests that the result of a complete run is written, also if the run fails or is interrupted."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import conftest
import results
from tables import cases

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
INTERRUPTED = """
def test_passes():
    pass


def test_is_interrupted():
    raise KeyboardInterrupt


def test_is_not_reached():
    pass
"""


@cases(
    "program, options, numbers, ended",
    (MIXED, ["-n1"], (1, 2, 3), "tests_failed"),
    (INTERRUPTED, [], (1, 0, 0), "interrupted"),
    ("import absent", [], (0, 1, 0), "interrupted"),
)
def test_a_run_leaves_its_numbers(tmp_path, program, options, numbers, ended):
    (tmp_path / "plugin.py").write_text(PLUGIN)
    (tmp_path / "test_it.py").write_text(program)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests" / "support")])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": path, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "plugin", "-p", "xdist", *options]
    subprocess.run([*command, "test_it.py"], cwd=tmp_path, env=environment, capture_output=True)
    found = json.loads((tmp_path / "kept" / "result.json").read_text())
    assert (found["passed"], found["failed"], found["skipped"]) == numbers
    assert found["ended"] == ended
    assert 0 <= found["seconds"] < 300


def test_a_result_names_its_commit_and_changes(tmp_path):
    def git(*arguments):
        who = ["-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(
            ["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    git("init", "-q")
    (tmp_path / ".gitignore").write_text(".results/\n")
    git("add", ".")
    git("commit", "-qm", "first")
    path = tmp_path / ".results" / "slow.json"
    for dirty in (False, True):
        results.Result(path, tmp_path).write(passed=1, failed=0, skipped=0)
        found = json.loads(path.read_text())
        assert (found["commit"], found["dirty"]) == (git("rev-parse", "HEAD"), dirty)
        (tmp_path / "new.py").write_text("")


def test_a_run_deletes_the_result_of_another(tmp_path):
    (tmp_path / "slow.json").write_text("{}")
    results.Result(tmp_path / "slow.json")
    assert not (tmp_path / "slow.json").exists()


@cases("worker, number", ({}, 1), ({"workerinput": {}}, 0))
def test_only_the_process_that_reports_writes(tmp_path, worker, number):
    plugins = []
    config = SimpleNamespace(
        getoption={"--results": str(tmp_path / "a.json"), "--strict-skips": False}.get,
        pluginmanager=SimpleNamespace(register=plugins.append),
        **worker,
    )
    conftest.pytest_configure(config)
    assert sum(isinstance(plugin, results.Results) for plugin in plugins) == number


@cases("target", "slow", "gate")
def test_make_keeps_the_result_where_git_ignores_it(target):
    read = functools.partial(subprocess.check_output, cwd=ROOT, text=True)
    file = f".results/{target}.json"
    assert f"--results={file}" in read(["make", "--dry-run", target])
    assert read(["git", "check-ignore", file]).strip() == file
