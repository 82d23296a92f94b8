import subprocess
import sys
from importlib.metadata import version

SPARED = """
import sys
import jax
from jaxrl_po.run import suites

gymnax = suites.import_gymnax()
assert not {"seaborn", "pandas", "scipy.stats"} & sys.modules.keys()
env, params = gymnax.make("Pong-misc")
_, state = jax.jit(env.reset)(jax.random.key(0), params)
picture = env.render(state, params)
print(type(picture).__name__)
import seaborn
print(seaborn.__version__, suites.import_gymnax() is gymnax)
"""


def test_gymnax_is_had_without_seaborn_until_a_game_is_drawn():
    done = subprocess.run(
        [sys.executable, "-c", SPARED], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["AxesImage", f"{version('seaborn')} True"]
