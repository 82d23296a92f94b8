"""Renders an episode of a finished or running run of `control.py` as a GIF.

`python experiments/render.py --run=runs/cartpole --out=cartpole.gif`
"""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import render

if __name__ == "__main__":
    flags.entry(render.main)
