"""Compares runs: `python experiments/plot.py runs/a runs/b --out=runs/plot`."""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import plot

if __name__ == "__main__":
    flags.entry(plot.main)
