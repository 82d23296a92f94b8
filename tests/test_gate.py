"""What the gate runs, in which order, and when it is content."""

import gate
import pytest
from gate import SOUND, Outcome, Trial
from wrong import Wrong

ONE = Wrong("one", "losses", "a", "b", ("test_losses.py::test_x", "test_masked.py::test_z"))
OTHER = Wrong("other", "masked", "a", "b", ("test_losses.py::test_y",))


def test_the_tests_of_a_file_first_run_on_the_program_as_it_is():
    losses, masked = gate.trials([ONE, OTHER])
    assert losses == [
        Trial(None, ("test_losses.py::test_x", "test_losses.py::test_y")),
        Trial(ONE, ("test_losses.py::test_x",)),
        Trial(OTHER, ("test_losses.py::test_y",)),
    ]
    assert [trial.wrong for trial in masked] == [None, ONE]


def test_a_change_of_a_helper_is_a_change_of_the_test():
    assert {"test_gate.py", "gate.py", "impostors.py", "wrong.py"} <= gate.helpers("test_gate.py")
    assert "probes.py" not in gate.helpers("test_gate.py")


@pytest.mark.parametrize(
    ("key", "word", "well"),
    [
        (("one", "test_masked.py::test_z"), "failed", True),
        (("one", "test_masked.py::test_z"), "passed", False),
        (("one", "test_masked.py::test_z"), "broken", False),
        (("one", "test_masked.py::test_z"), "late", False),
        ((SOUND, "test_masked.py::test_z"), "failed", False),
    ],
)
def test_each_test_named_must_kill_and_pass_on_the_program_as_it_is(key, word, well, capsys):
    found = {
        trial.key: Outcome("failed" if trial.wrong else "passed", 1.0)
        for trials in gate.trials([ONE, OTHER])
        for trial in trials
    }
    found[key] = Outcome(word, 1.0)
    assert gate.report(found, [ONE, OTHER]) == well
    assert f"{1 + (well or key[0] == SOUND)} of 2 wrong programs killed" in capsys.readouterr().out
