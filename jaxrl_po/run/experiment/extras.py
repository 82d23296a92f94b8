"""Packages that only some flags need."""

import importlib.util

from jaxrl_po.run.experiment.flags import UsageError


def require(flag: str, package: str, extra: str) -> None:
    """Raises UsageError if a package that a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--{flag} needs the package {package}: pip install 'jaxrl_po[{extra}]'")
