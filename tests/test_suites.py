import importlib
import sys
import types

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tables import cases

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import control, earlier, suites


def test_seaborn_is_imported_on_first_use(monkeypatch):
    """A package in place of gymnax imports seaborn first, and uses seaborn later."""
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


def test_parameters_of_gymnax_environments_are_set():
    env = suites.make_env("CartPole-v1", '{"max_steps_in_episode": 7, "gravity": 0}')
    assert env.max_steps == 7
    key = jax.random.key(0)
    state = env.reset(key)[1]
    plain, default = gymnax.make("CartPole-v1")
    moved = default.replace(gravity=0.0, max_steps_in_episode=7)
    expected = plain.step(key, state, 1, moved)[0]
    np.testing.assert_array_equal(env.step(key, state, 1)[1].observation, expected)
    assert np.abs(expected - plain.step(key, state, 1, default)[0]).max() > 1e-4
    torques = '{"available_torque": [-2, 0, 2]}'
    assert suites.make_env("Acrobot-v1", torques).spaces.num_actions == 3
    assert suites.make_env("CartPole-v1", "{}").max_steps == 500


def test_parameters_keep_the_type_of_their_default():
    convert = suites._converted
    assert convert("size", (4, 4), [5, 6]) == (5, 6)
    assert convert("seed", None, 3) == 3
    assert convert("mask", np.array([True, False]), [False, True]).tolist() == [False, True]
    assert convert("rates", jnp.array([0.5, 1.0]), [1, 2]).dtype == jnp.float32
    for default, value in (
        (jnp.arange(2), [0.5, 1.5]),
        (jnp.arange(2), 3),
        (np.ones(2), ["x", "y"]),
    ):
        with pytest.raises(ConfigError, match=r"^counts: must be \w+\[2\], got"):
            convert("counts", default, value)


@cases(
    "env_params, message",
    ('{"gravty": 1}', " has no 'gravty'; did you mean gravity"),
    ('{"gravity": "9.8"}', ": gravity must be of type float, got '9.8'"),
    ('{"gravity": true}', ": gravity must be of type float"),
    ('{"gravity": [1, [2]]}', ": gravity must be of type float"),
    ('{"max_steps_in_episode": 1.5}', ": max_steps_in_episode must be of type int"),
)
def test_wrong_parameters_of_gymnax_are_named(env_params, message):
    with pytest.raises(ConfigError, match=f"^env_params: CartPole-v1{message}"):
        suites.make_env("CartPole-v1", env_params)


def test_wrong_lists_and_limits_of_gymnax_are_named():
    torque = r"^env_params: Acrobot-v1: available_torque must be float32\[3\], got \['x'\]"
    with pytest.raises(ConfigError, match=torque):
        suites.make_env("Acrobot-v1", '{"available_torque": ["x"]}')
    with pytest.raises(ConfigError, match=r"^env: \S+: max_steps_in_episode must be a whole"):
        suites.make_env("CartPole-v1", '{"max_steps_in_episode": 0}')
    with pytest.raises(ConfigError, match=r"^env_params: must be a JSON object"):
        suites.make_env("CartPole-v1", "[1]")


def test_parameters_of_own_environments_are_set(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import numpy as np\nfrom probes import AlwaysTruncated, Params\n\n"
        "class Mine(AlwaysTruncated):\n"
        "    default_params = Params(max_steps_in_episode=np.int64(5))\n"
    )
    env = suites.make_env(f"{file}:Mine", '{"max_steps_in_episode": 3}')
    assert env.max_steps == 3


def test_a_command_trains_and_evaluates_with_parameters(tmp_path, written_down):
    flags = ['--env_params={"max_steps_in_episode": 9}', "--seeds=1", f"--out={tmp_path / 'run'}"]
    written_down(launch.control, [*tiny.CONTROL, *flags])
    config = earlier.read_config(control, "run", str(tmp_path / "run"))
    assert config.run.env_params == '{"max_steps_in_episode": 9}'
    assert control.open_world(config).env.max_steps == 9
