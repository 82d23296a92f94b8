"""A fixed sample of the mutants of each numerical module: its tests notice nine of ten. `tests/mutants.py` runs them all."""

import subprocess
import sys

import mutants
import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("module", mutants.TESTS)
def test_nine_of_ten_mutants_are_killed(module):
    command = [sys.executable, mutants.__file__, module, "--sample=20", "--least=0.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
