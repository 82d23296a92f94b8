"""Measures the cost of each test: its processor time, and the number of programs that it compiles.

Every test run prints the ten test files with the highest costs. A test that is not marked slow
fails if it compiles more than four programs of .3 s: compilation is most of a test's cost.
"""

import collections
import contextlib
import os
import time
import timeit

import jax
import pytest

MOST = 4  # largest number of programs that one test may compile
# Seconds of processor time that count as compiling a program, on a machine whose pace is `PACE`.
LARGE = 0.3
PACE = 0.005  # seconds that a fixed computation takes, see `slowness`
# Accepted reasons to skip a test where all extras of `make test` are installed. Any other reason
# means that a feature is not tested.
EXPECTED_SKIPS = (
    *(f"No module named '{suite}'" for suite in ("craftax", "mujoco_playground", "xminigrid")),
    *(f"No module named '{extra}'" for extra in ("reasoning_gym", "wandb")),
    "the system does not report what a process holds",
)
KEY = "cost"
paused = [False]


@contextlib.contextmanager
def uncounted():
    """Excludes programs compiled inside from the test's count, because other tests use the programs
    too."""
    before, paused[0] = paused[0], True
    try:
        yield
    finally:
        paused[0] = before


def slowness() -> float:
    """Returns how much slower this machine is today than a machine whose pace is `PACE`, at least
    1."""
    return max(
        1.0, min(timeit.repeat("sum(i * i for i in range(10**5))", number=1, repeat=9)) / PACE
    )


def processor_time() -> float:
    """Returns the processor time of this process and of its finished children, in seconds."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Costs:
    """Pytest plugin for the worker processes and for the process that reports."""

    def __init__(self, strict: bool):
        self.strict, self.large, self.lowered = strict, 0, 0.0
        self.least = LARGE * slowness()
        self.files: dict[str, float] = collections.defaultdict(float)
        self.skips: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self.listen)

    def listen(self, event: str, _: float, **__: object) -> None:
        # Processor time is measured, because wall time would also count the work of other
        # processes.
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            self.lowered = time.process_time()
        elif event == "/jax/core/compile/backend_compile_duration":
            seconds = time.process_time() - self.lowered
            self.large += seconds >= self.least and not paused[0]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        self.large, item.begun = 0, processor_time()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        result = yield
        if self.large > MOST and not item.get_closest_marker("slow"):
            pytest.fail(
                f"compiles {self.large} programs of {LARGE} s or more: share one, make it smaller, "
                "or mark the test slow",
                pytrace=False,
            )
        return result

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_teardown(self, item):
        result = yield
        item.user_properties.append((KEY, processor_time() - item.begun))
        return result

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self.files[report.nodeid.partition("::")[0]] += dict(report.user_properties).get(
                KEY, 0.0
            )
        if report.skipped and not hasattr(report, "wasxfail"):
            self.skips.append(f"{report.nodeid}: {report.longrepr[2]}")

    def pytest_collectreport(self, report):
        if report.skipped:
            self.skips.append(f"{report.nodeid}: {report.longrepr[2]}")

    def unexpected(self) -> list[str]:
        return [skip for skip in self.skips if not any(why in skip for why in EXPECTED_SKIPS)]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session):
        if self.strict and self.unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        total = sum(self.files.values())
        terminalreporter.section(f"{total / 60:.1f} processor minutes; the ten costliest files")
        for file, seconds in sorted(self.files.items(), key=lambda cost: -cost[1])[:10]:
            terminalreporter.line(f"{seconds:7.1f} s  {file}")
        if self.strict and self.unexpected():
            terminalreporter.section("skipped, and not in EXPECTED_SKIPS of costs.py", red=True)
            for skip in self.unexpected():
                terminalreporter.line(skip)
