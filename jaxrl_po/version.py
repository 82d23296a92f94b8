"""The version and the format of runs, kept apart so that packaging need not import JAX."""

__version__ = "0.4.0"
FORMATS = (1,)  # formats of config.json and checkpoints that are read; the last is written
