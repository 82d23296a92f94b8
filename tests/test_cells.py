"""Tests the comparison of two trees: exceptions exist for settings only."""

import sys

import cells
import pytest


def record(*, rate, code=0, state="s", loss=1.0, **settings):
    return {
        "code": code,
        "names": {"config.json": True},
        "contents": {
            "config.json": {"config": {"rate": rate}, **settings},
            "metrics.jsonl": [{"loss": loss}],
        },
        "state": state,
        "result": None,
        "said": [],
    }


@pytest.fixture
def compare(monkeypatch, capsys):
    """Compares two records under some arguments; returns the exit code and the last line."""

    def run(before, after, *arguments):
        found = iter([{"ppo": before}, {"ppo": after}])
        monkeypatch.setattr(cells, "records", lambda *_: next(found))
        monkeypatch.setattr(cells.subprocess, "run", lambda *_, **__: None)
        monkeypatch.setattr(cells, "CELLS", {"ppo": []})
        monkeypatch.setattr(sys, "argv", ["cells.py", *arguments])
        try:
            code = cells.main()
        except SystemExit as end:
            code = end.code
        return code, "".join(capsys.readouterr())

    return run


def test_settings_may_have_exceptions_and_new_names(compare):
    before, after = record(rate=1, squash=True, exact=False), record(rate=2, tanh=True)
    assert compare(before, after)[0] == 1
    code, said = compare(before, after, "--except=rate,exact", "--renamed=squash:tanh")
    assert code == 0
    assert "exception exact: 1 differences\nexception rate: 1 differences\n" in said
    assert "renamed squash: tanh\n" in said
    assert compare(before, after, "--except=rate,exact")[0] == 1
    assert compare(before, after, "--except=rate", "--renamed=squash:tanh")[0] == 1


@pytest.mark.parametrize("key", ["code", "state", "loss", "metrics.jsonl"])
def test_measurements_have_no_exceptions(compare, key):
    code, said = compare(record(rate=1), record(rate=1), f"--except={key}")
    assert (code, said.splitlines()[-1]) == (2, f"cells.py: error: no exception for {key}")
    assert compare(record(rate=1), record(rate=1), f"--renamed={key}:x")[0] == 2


def test_an_exception_hides_no_measurement(compare):
    for other in ({"code": 1}, {"state": "t"}, {"loss": 2.0}):
        code, said = compare(record(rate=1), record(rate=2, **other), "--except=rate,0")
        assert code == 1
        assert next(iter(other)) in said
