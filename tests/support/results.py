"""Writes the result of a complete run of `make slow` or `make gate`, one JSON object in a file.

Notes of issues quote the result file. The file is written at the end of the run, even if the run
fails or is interrupted; the file of an earlier run is deleted at the start.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Result:
    """Result of a run that has started on a commit.

    Attributes:
      path: File to which the result is written.
    """

    def __init__(self, path: str | Path, root: Path = ROOT):
        def git(*arguments: str) -> str:
            command = ["git", *arguments]
            done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
            return done.stdout.strip()

        self.path = Path(path)
        self.path.unlink(missing_ok=True)
        self.tree = {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain")),
        }
        self.begun = time.monotonic()

    def write(self, *, passed: int, failed: int, skipped: int, **others: object) -> None:
        """Writes commit, numbers and seconds since the start; `others` are additional entries of
        the result."""
        counts = {"passed": passed, "failed": failed, "skipped": skipped}
        seconds = {"seconds": round(time.monotonic() - self.begun)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.tree | counts | seconds | others, indent=2)
        self.path.write_text(f"{text}\n", encoding="utf-8")


class Results:
    """Pytest plugin that writes the result of a test run, in the process that reports."""

    def __init__(self, path: str):
        self.result = Result(path)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Writes the numbers of passed, failed and skipped tests.

        An error outside a test, for example in a fixture, counts as a failed test.
        """
        stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
        passed, failed, errors, skipped = (
            len(stats.get(word, ())) for word in ("passed", "failed", "error", "skipped")
        )
        status = pytest.ExitCode(session.exitstatus).name.lower()
        self.result.write(passed=passed, failed=failed + errors, skipped=skipped, ended=status)
