"""Tests the gate: its trials, their order, and its verdict."""

import json

import gate
import pytest
from gate import SOUND, Outcome, Trial
from tables import cases
from wrong_programs import Wrong

ONE = Wrong("one", "losses", "a", "b", ("test_losses.py::test_x", "test_masked.py::test_z"))
OTHER = Wrong("other", "masked", "a", "b", ("test_losses.py::test_y",))


def test_correct_program_runs_first_in_each_file():
    losses, masked = gate.trials([ONE, OTHER])
    assert losses == [
        Trial(None, ("test_losses.py::test_x", "test_losses.py::test_y")),
        Trial(ONE, ("test_losses.py::test_x",)),
        Trial(OTHER, ("test_losses.py::test_y",)),
    ]
    assert [trial.wrong for trial in masked] == [None, ONE]


def test_change_of_helper_changes_the_test():
    assert {"test_gate.py", "gate.py", "impostors.py", "wrong_programs.py"} <= gate.helpers(
        "test_gate.py"
    )
    assert "probes.py" not in gate.helpers("test_gate.py")


@cases(
    "key, word, well",
    (("one", "test_masked.py::test_z"), "failed", True),
    (("one", "test_masked.py::test_z"), "passed", False),
    (("one", "test_masked.py::test_z"), "broken", False),
    (("one", "test_masked.py::test_z"), "late", False),
    ((SOUND, "test_masked.py::test_z"), "failed", False),
)
def test_named_tests_must_kill_and_pass_correct_program(key, word, well, capsys):
    found = {
        trial.key: Outcome("failed" if trial.wrong else "passed", 1.0)
        for trials in gate.trials([ONE, OTHER])
        for trial in trials
    }
    found[key] = Outcome(word, 1.0)
    assert gate.report(found, [ONE, OTHER]) == well
    assert f"{1 + (well or key[0] == SOUND)} of 2 wrong programs killed" in capsys.readouterr().out


def outcomes(**words):
    """Returns outcomes of both tests of `one`, of a test of `other`, and of the correct program."""
    keys = {
        "one": ("one", ONE.tests[0]),
        "again": ("one", ONE.tests[1]),
        "other": ("other", OTHER.tests[0]),
        "sound": (SOUND, ONE.tests[0]),
    }
    return {keys[name]: Outcome(word, 1.0) for name, word in words.items()}


@cases(
    "found, numbers",
    (outcomes(sound="passed", one="failed", again="failed", other="failed"), (2, 0, 0)),
    (outcomes(sound="passed", one="failed", again="passed", other="late"), (0, 2, 0)),
    (outcomes(sound="failed", one="failed", again="failed", other="failed"), (2, 1, 0)),
    (outcomes(sound="passed", one="failed"), (0, 0, 2)),
    (outcomes(one="passed"), (0, 1, 1)),
    ({}, (0, 0, 2)),
)
def test_a_result_counts_every_wrong_program(found, numbers, monkeypatch):
    monkeypatch.setattr(gate, "WRONG", [ONE, OTHER])
    assert tuple(gate.counts(found).values()) == numbers


@cases("error", KeyboardInterrupt, RuntimeError)
def test_an_interrupted_gate_says_how_far_it_came(error, tmp_path, monkeypatch):
    """The first call ends after three trials, and the second call reuses their outcomes."""

    ends_after = iter([3, 9])

    def run(lists, workers):
        last = next(ends_after)
        for number, trial in enumerate(trial for each in lists for trial in each):
            if number == last:
                raise error
            yield trial, Outcome("failed" if trial.wrong else "passed", 1.0)

    changes = {"WRONG": [ONE, OTHER], "FOLDER": tmp_path, "run": run, "prepare": lambda: None}
    for name, value in changes.items():
        monkeypatch.setattr(gate, name, value)
    file = tmp_path / "kept" / "gate.json"
    monkeypatch.setattr("sys.argv", ["gate.py", f"--results={file}"])
    for expected, numbers in ((error, [1, 0, 1, 3, 0]), (SystemExit, [2, 0, 0, 5, 3])):
        with pytest.raises(expected):
            gate.main()
        row = json.loads(file.read_text())
        names = ("passed", "failed", "skipped", "trials", "trials_of_earlier_calls")
        assert [row[name] for name in names] == numbers


def test_files_whose_trials_are_known_stop_no_worker(monkeypatch):
    left = Trial(None, ("test_losses.py",))
    monkeypatch.setattr(gate, "start", lambda *_, **__: 1)
    monkeypatch.setattr(gate, "finished", lambda: (1, Outcome("passed", 1.0)))
    assert [trial for trial, _ in gate.run([[], [], [left]], workers=1)] == [left]
