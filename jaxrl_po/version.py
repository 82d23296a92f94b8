"""Version of the library and of its run format, in a module that does not import JAX."""

__version__ = "0.4.0"
# Formats of config.json and checkpoints that can be read; new files have the last format.
FORMATS = (1,)
