"""`experiments/tabular.py`, for tests: under the same name, so that a test and a script which it loads share one module."""

import importlib.util
import sys
from pathlib import Path

_spec = importlib.util.spec_from_file_location(__name__, Path(__file__).parent.parent / "experiments" / "tabular.py")
sys.modules[__name__] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sys.modules[__name__])
