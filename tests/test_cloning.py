"""Tests behaviour cloning: samples of recorded episodes, learning, and refused recordings."""

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tables import cases

from jaxrl_po import control
from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.control.modules import NetworkSettings

ENV = gymnax.make("CartPole-v1")[0]


def test_steps_keep_their_actions_in_every_layout():
    """Every entry of observation i is i, and the action for observation i is i modulo 2."""
    problem = control.make_problem(ENV, num_envs=4, num_steps=3)
    observation = jnp.repeat(jnp.arange(50.0)[:, None], 4, axis=1)
    action = jnp.arange(50, dtype=jnp.int32) % 2
    cloned = control.with_demonstrations(problem, observation, action, num_steps=200)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    _, batch = jax.jit(cloned.collect)(params, collector, jax.random.key(1))
    assert batch.inputs.shape == (4, 200, 4)
    np.testing.assert_array_equal(batch.action, batch.inputs[..., 0] % 2)
    assert set(np.unique(batch.inputs)) == set(range(50))
    assert batch.mask.all()
    half = collector._replace(sharded=jax.tree.map(lambda x: x[2:], collector.sharded))
    _, second = jax.jit(cloned.collect)(params, half, jax.random.key(1))
    np.testing.assert_array_equal(second.action, batch.action[2:])
    assert not np.array_equal(batch.action[0], batch.action[1])
    remembering = control.make_problem(ENV, network=NetworkSettings(memory="gru"))
    with pytest.raises(ConfigError, match=r"^memory: must be none"):
        control.with_demonstrations(remembering, observation, action, num_steps=2)


def recorded(path, **changed):
    """Returns five recorded episodes of a controller that balances the pole, or other arrays."""

    def episode(key):
        observation, state = ENV.reset(key, ENV.default_params)

        def step(carry, key):
            seen, state = carry
            action = (seen[2] + 0.5 * seen[3] + 0.1 * seen[1] + 0.05 * seen[0] > 0).astype(int)
            after, state, _, terminated, truncated, _ = ENV.step(
                key, state, action, ENV.default_params
            )
            return (after, state), (seen, action, terminated, truncated)

        return jax.lax.scan(step, (observation, state), jax.random.split(key, 500))[1]

    arrays = changed
    if not changed:
        played = jax.jit(jax.vmap(episode))(jax.random.split(jax.random.key(0), 10))
        names = ("observation", "action", "terminated", "truncated")
        arrays = {
            name: np.asarray(x).reshape(-1, *x.shape[2:])
            for name, x in zip(names, played, strict=True)
        }
        assert not arrays["terminated"].any()  # every recorded episode lasts to its time limit
    np.savez(path, **arrays)
    return f"--demonstrations={path}"


@pytest.mark.slow
def test_ten_cart_pole_episodes_are_cloned_and_recorded(tmp_path):
    given = recorded(tmp_path / "ten.npz")
    sizes = ["--problem.num_envs=4", "--problem.num_steps=64", "--total_steps=256000"]
    out = tmp_path / "run"
    flags = ["--algorithm=sft", "--seeds=2", "--eval_every=10", *sizes, given, f"--out={out}"]
    assert launch.control(flags) == 0
    again = tmp_path / "again.npz"
    assert evaluate.main([f"--run={out}", "--checkpoint=latest", f"--record={again}"]) == 0
    with np.load(again) as stored:
        assert stored["action"].dtype == np.int32
        ended = stored["terminated"] | stored["truncated"]
        assert stored["observation"].shape == (len(ended), 4)
        assert ended.sum() == 32
        assert len(ended) / 32 >= 475  # the reward is 1 per step


GOOD = {"observation": np.zeros((5, 4)), "action": np.zeros(5, int)}


@cases(
    "arrays, message",
    ({"observation": GOOD["observation"]}, "must be an .npz file with observation and action"),
    (GOOD | {"action": np.zeros(4, int)}, "must have an action for each observation"),
    (GOOD | {"observation": np.zeros((5, 3))}, r"observation must .* \[5, 4\], got \[5, 3\]"),
    (GOOD | {"observation": np.full((5, 4), np.nan)}, r"observation must be finite"),
    (GOOD | {"action": np.full(5, 0.5)}, "action must be whole numbers in"),
    ({"observation": np.array(1.0), "action": np.array(1)}, "must have an action for each"),
    (
        GOOD | {"action": np.full(5, "right")},
        "must be an .npz file with .*bad.npz: they hold no numbers",
    ),
    (GOOD | {"action": np.full(5, 2)}, r"action must lie in \[0, 1\]"),
)
def test_bad_recordings_are_named(tmp_path, arrays, message):
    given = [recorded(tmp_path / "bad.npz", **arrays), f"--out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=f"^demonstrations: (?=.*bad.npz){message}"):
        launch.control([*tiny.CONTROL, "--algorithm=sft", *given])


@cases(
    "flags, message",
    (
        ["--algorithm=sft"],
        "^demonstrations: must name an .npz file with algorithm = sft .* got ''$",
    ),
    (
        ["--demonstrations=a.npz"],
        "^demonstrations: must name .* left out with any other, got 'a.npz'$",
    ),
    (
        ["--algorithm=sft", "--demonstrations=no.npz"],
        "^demonstrations: must be an .npz file with .*no.npz: .* No such file",
    ),
)
def test_what_cloning_needs_is_named(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        launch.control([*tiny.CONTROL, *flags, f"--out={tmp_path / 'run'}"])


def test_only_control_is_recorded(tmp_path, finished):
    out = finished("language", tmp_path / "run")
    with pytest.raises(ConfigError, match=r"^record: is for a run of jaxrl-po control"):
        evaluate.main([f"--run={out}", f"--record={tmp_path / 'a.npz'}"])
