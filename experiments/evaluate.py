"""Evaluates the policies of a run once more.

Example: `python experiments/evaluate.py --run=runs/first --size=1024`
"""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("evaluate")
