"""Environments of other suites as `Environment`: one small module per suite, which imports it."""
