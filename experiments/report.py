"""Writes an HTML page about one or several runs.

Example: `python experiments/report.py runs/a runs/b --out=runs/report.html`
"""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("report")
