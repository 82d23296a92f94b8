"""Evaluates the policies of a run again.

`python experiments/evaluate.py --run=runs/first --size=1024`
"""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import evaluate

if __name__ == "__main__":
    flags.entry(evaluate.main)
