"""Trains a method on a gymnax environment.

`python experiments/control.py --env=CartPole-v1 --out=runs/first`
"""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import control

if __name__ == "__main__":
    flags.entry(control.main)
