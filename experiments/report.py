"""Writes an HTML page about one or several runs.

`python experiments/report.py runs/a runs/b --out=runs/report.html`
"""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import report

if __name__ == "__main__":
    flags.entry(report.main)
