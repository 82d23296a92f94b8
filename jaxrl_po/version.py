"""The version, kept apart so that packaging need not import JAX."""

__version__ = "0.3.0"
