"""Tests metrics and chunks, as CONTRIBUTING shows them."""

import runpy
from pathlib import Path

import pytest

from jaxrl_po.run.store import metrics

EXAMPLE = Path(__file__).parent.parent / "examples" / "own_metric_and_chunk.py"


def test_both_reach_the_lines_of_a_run(tmp_path):
    trained = runpy.run_path(str(EXAMPLE))["main"](tmp_path, iterations=3)
    row = metrics.read(tmp_path / "metrics.jsonl")[-1]
    assert row == trained.rows[-1]
    assert row["iteration"] == 3
    assert len(row["norm"]) == 2
    assert min(row["norm"]) > 0.0
    # Each of the three calls was timed.
    assert 0.0 < row["seconds"][0] * 3 == pytest.approx(row["time/seconds"], rel=0.5)
