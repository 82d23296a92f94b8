"""Tests that docstrings, comments and help texts remain readable: limits of each habit in each
folder."""

import prose
import pytest

GOAL = {"that of": 0.3, "what": 1.0, "likewise": 0.05, "is no": 1.5}
GOAL |= {prose.ENTRY: 0.03, prose.SUMMARY: 0.01}
FOLDERS = ("jaxrl_po", "experiments", "examples", "tests")
GOOD = '''
def loss(batch):
    """Computes the loss of a batch.

    Args:
      batch: Batch of one seed.

    Example:
      >>> what_of(that)
    """
    print("what it is, that of which there is none")
'''
BAD = '''
n: int = config.static(8, f"what {it} is", unit="steps")  # and that of the critic
def is_empty(rows):
    """Whether there are none, likewise masked.

    Args:
      rows: of the batch.
    """
'''


@pytest.mark.parametrize("folder", FOLDERS)
def test_habits_stay_below_their_limits(folder):
    rates, _ = prose.measure(prose.read(folder))
    assert not [x for x in rates if rates[x] > GOAL[x]], f"python tests/prose.py {folder}"


def test_each_habit_is_noticed():
    rates, places = prose.measure({"bad.py": BAD})
    assert [name for name, rate in rates.items() if rate > GOAL[name]] == list(GOAL)
    assert len(places) == len(GOAL)
    assert prose.measure({"good.py": GOOD})[1] == []
