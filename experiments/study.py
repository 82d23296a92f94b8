"""Tests a claim on many seeds: `python experiments/study.py --claim=mine.py:claim --out=runs/mine`.

The file imports `Arm`, `Claim` and `Comparison` from `claim`; `docs/studies/how.md` explains how to
write one.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent / "studies" / "claims"))

import trial

if __name__ == "__main__":
    trial.entry()
