"""Environments of other suites as `Environment`.

Each suite has a small module, which imports it.
"""
