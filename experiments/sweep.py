"""Searches settings of a method on an environment, seeds and numbers vmapped in one program."""

from jaxrl_po.run import flags
from jaxrl_po.run.commands import sweep

if __name__ == "__main__":
    flags.entry(sweep.main)
