"""Trains a method on a gymnax environment.

Example: `python experiments/control.py --env=CartPole-v1 --out=runs/first`
"""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("control")
