"""Compares runs: `python experiments/plot.py runs/a runs/b --out=runs/plot`."""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("plot")
