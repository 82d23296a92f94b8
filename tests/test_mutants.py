"""Tests that the tests of each numerical module kill nine of ten mutants in a fixed sample.

The script `tests/mutants.py` runs all mutants, `tests/gate.py` the named wrong programs.
"""

import subprocess
import sys
from pathlib import Path

import mutants
import pytest
from impostors import path_of
from wrong_programs import WRONG


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nine_of_ten_mutants_are_killed():
    modules = ["masked", "divergences", "losses", "advantages", "trust_region"]
    command = [sys.executable, mutants.__file__, *modules, "--sample=20", "--least=0.9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_wrong_program_is_one_change_that_compiles():
    assert len({wrong.name for wrong in WRONG}) == len(WRONG)
    for wrong in WRONG:
        changed = wrong.source(Path(path_of(wrong.module)).read_text(encoding="utf-8"))
        compile(changed, wrong.module, "exec")
        for test in wrong.tests:
            file, _, name = test.partition("::")
            text = (Path(__file__).parent / file).read_text(encoding="utf-8")
            assert f"def {name.partition('[')[0]}(" in text or not name
