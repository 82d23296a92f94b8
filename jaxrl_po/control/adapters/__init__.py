"""Environments of other suites as `Environment`: one small module each, which imports its suite."""
