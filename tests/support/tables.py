"""Tables of cases of one test."""

import pytest


def cases(names, *rows, **options):
    """Returns a mark that runs a test once per row: `pytest.mark.parametrize`, in fewer lines.

    Args:
      names: Names of the arguments, separated by commas.
      *rows: Values of the arguments, a tuple per row; single values for a single name.
      **options: Further options of `parametrize`.
    """
    return pytest.mark.parametrize(names, rows, **options)


def slow(*values):
    """Returns a row that only `make slow` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)
