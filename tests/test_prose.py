"""Tests that docstrings, comments and help texts remain readable: limits of each habit in each
folder."""

import prose
import pytest

GOAL = {"that of": 0.3, "what": 1.0, "likewise": 0.05, "is no": 1.5}
GOAL |= {prose.ENTRY: 0.03, prose.SUMMARY: 0.01}
FOLDERS = ("jaxrl_po", "experiments", "examples", "tests")
GOOD = """Computes the loss of a batch.

Args:
  batch: Batch of one seed.
  rows: Number of rows.

Example:
  >>> what_of(that)
"""
SENTENCES = [
    (None, GOOD),
    ("that of", "Returns the loss and that of the critic."),
    ("what", "Returns what the batch holds."),
    ("likewise", "Returns the loss, likewise masked."),
    ("is no", "Returns None if there is no batch."),
    ("is no", "Returns the batch from which the loss follows."),
    (prose.ENTRY, GOOD.replace("Number of", "of the")),
    (prose.SUMMARY, "Whether the batch is empty."),
]
CASES = [(habit, f'def f():\n    """{text}"""\n') for habit, text in SENTENCES] + [
    ("what", "x = 1  # what it is\n"),
    ("what", 'n: int = config.static(8, f"what {it} is", unit="steps")\n'),
    (None, 'print("what it is, that of which there is none")\n'),
]


@pytest.mark.parametrize("folder", FOLDERS)
def test_habits_stay_below_their_limits(folder):
    rates, _ = prose.measure(prose.read(folder))
    assert not [x for x in rates if rates[x] > GOAL[x]], f"python tests/prose.py {folder}"


@pytest.mark.parametrize(("habit", "source"), CASES)
def test_a_sentence_with_a_habit_is_noticed(habit, source):
    rates, places = prose.measure({"module.py": source})
    assert [name for name, rate in rates.items() if rate > GOAL[name]] == [habit] * bool(habit)
    assert [f": {habit}: " in place for place in places] == [True] * bool(habit)
