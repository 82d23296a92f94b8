"""Renders an episode of a finished or running run of `jaxrl-po control` as a GIF.

Example: `python experiments/render.py --run=runs/cartpole --out=cartpole.gif`
"""

from jaxrl_po.__main__ import entry

if __name__ == "__main__":
    entry("render")
