import importlib
import subprocess
import sys
import types
from importlib.metadata import version

import pytest

from jaxrl_po.run.experiment import suites

SPARED = """
import sys
import jax
from jaxrl_po.run.experiment import suites

gymnax = suites.import_gymnax()
assert not {"seaborn", "pandas", "scipy.stats"} & sys.modules.keys()
env, params = gymnax.make("Pong-misc")
_, state = jax.jit(env.reset)(jax.random.key(0), params)
picture = env.render(state, params)
print(type(picture).__name__)
import seaborn
print(seaborn.__version__, suites.import_gymnax() is gymnax)
"""


@pytest.mark.slow
def test_gymnax_is_had_without_seaborn_until_a_game_is_drawn():
    done = subprocess.run(
        [sys.executable, "-c", SPARED], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["AxesImage", f"{version('seaborn')} True"]


def test_seaborn_is_imported_when_something_of_it_is_used(monkeypatch):
    """A package in place of gymnax imports it, and uses it later."""
    real = types.ModuleType("seaborn")
    real.heatmap = lambda: "drawn"
    given = []
    imported = importlib.import_module

    def import_module(name):
        if name == "gymnax":
            given.append(sys.modules["seaborn"])
            return name
        return real if name == "seaborn" else imported(name)

    monkeypatch.setattr(importlib, "import_module", import_module)
    monkeypatch.delitem(sys.modules, "seaborn", raising=False)
    assert suites.import_gymnax() == "gymnax"
    assert "seaborn" not in sys.modules
    assert given[0] is not real
    assert given[0].heatmap() == "drawn"
    monkeypatch.setitem(sys.modules, "seaborn", real)
    suites.import_gymnax()
    assert given[1] is real
