"""Trains a transformer on a verifiable task.

`python experiments/language.py --task=addition --out=runs/addition`
"""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import language

if __name__ == "__main__":
    flags.entry(language.main)
