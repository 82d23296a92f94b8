"""Tests environments that break their contract silently: metrics of a run, and its warnings."""

import json

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from gymnax.environments import spaces
from probes import AlwaysTerminated, AlwaysTruncated, Params

from jaxrl_po import control
from jaxrl_po.cli import launch
from jaxrl_po.control import recorded
from jaxrl_po.control.problem import frac_broken
from jaxrl_po.control.spaces import read_spaces
from jaxrl_po.run.loop.progress import MetricWarnings


class NeverResets:
    """Environment that is done from the fifth step on and observes the step number.

    The upper bound of its observation space is 3.
    """

    default_params = Params()

    def reset(self, key, params=None):
        return jnp.int32(0), jnp.int32(0)

    def step(self, key, t, action, params=None):
        t = t + 1
        return t, t, 1.0, t >= 5, jnp.bool_(False), {"final_observation": t}

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params=None):
        return spaces.Discrete(4)


class NeverEnds(NeverResets):
    """Environment that states a limit of five steps and does not end episodes at the limit."""

    def step(self, key, t, action, params=None):
        seen, t, reward, _, truncated, info = super().step(key, t % 3, action)
        return seen, t, reward, jnp.bool_(False), truncated, info


class Nested(AlwaysTruncated):
    """Environment with a class in a structured observation: the class −1 is outside the space, 1
    within."""

    def observation_space(self, params=None):
        hidden = {"pair": spaces.Tuple((spaces.Discrete(2), spaces.Box(0.0, 1.0, (1,))))}
        return spaces.Dict({"privileged_state": spaces.Discrete(9), **hidden})

    def observation(self, state):
        cue = state.cue.astype(int)
        return {"privileged_state": jnp.abs(cue), "pair": (cue, jnp.zeros(1))}


def batches(problem, count=3):
    """Returns the metrics of several iterations of one seed, leaves `[n, 1]`."""

    @jax.jit
    def run(key):
        def iterate(collector, key):
            collector, batch = problem.collect(params, collector, key)
            return collector, batch.metrics

        params, collector = problem.init(key)
        return jax.lax.scan(iterate, collector, jax.random.split(key, count))[1]

    return jax.tree.map(lambda x: np.asarray(x)[:, None], run(jax.random.key(0)))


def doubts(metrics):
    """Returns the warnings about each iteration, one after another."""
    asked = MetricWarnings()
    return [
        line
        for i in range(len(metrics["episode_length"].count))
        for line in asked.about(i, {}, {name: x.metric()[i] for name, x in metrics.items()})
    ]


def test_episodes_of_one_step_are_counted():
    metrics = batches(control.make_problem(NeverResets(), num_envs=20, num_steps=6))
    # The first episode ends at step 5, and each later step is an episode of its own.
    assert (metrics["frac_one_step"].metric()[:, 0] * 6).round().tolist() == [1.0, 6.0, 6.0]
    # Steps 0 to 3 are within the range; the policy then observes 4 and larger numbers.
    assert (metrics["frac_out_of_range"].metric()[:, 0] * 6).round().tolist() == [2.0, 6.0, 6.0]
    said = doubts(metrics)
    assert [line.partition(": ")[0] for line in said] == [
        "seed 0, after iteration 0",
        "seed 0, after iteration 1",
    ]
    assert "frac_out_of_range" in said[0]
    assert "frac_one_step" in said[1]


def test_a_vine_and_groups_are_counted_alike():
    sizes = {"num_envs": 60, "num_steps": 6, "num_states": 1, "num_branches": 2, "horizon": 1}
    vine = batches(control.make_vine(NeverResets(), **sizes), 2)
    assert (vine["frac_one_step"].metric()[:, 0] * 6).round().tolist() == [1.0, 6.0]
    assert len(doubts(vine)) == 2
    groups = batches(
        control.make_groups(NeverResets(), num_prompts=2, group_size=2, num_steps=9), 2
    )
    # The last of the five steps of an episode is outside the space; the steps after the end are
    # masked.
    np.testing.assert_allclose(groups["frac_out_of_range"].metric(), 1 / 5)


@pytest.mark.parametrize("env", [AlwaysTerminated(), AlwaysTruncated()], ids=["bandit", "longer"])
def test_sound_environments_raise_no_doubt(env):
    for num_steps in (1, 5):  # all 50 episodes end together, at steps 5, 10, …
        metrics = batches(control.make_problem(env, num_envs=50, num_steps=num_steps), 10)
        assert "frac_out_of_range" not in metrics
        assert doubts(metrics) == []


def test_classes_inside_of_structures_are_counted():
    metrics = batches(control.make_problem(Nested(), num_envs=40, num_steps=5), 1)
    share = metrics["frac_out_of_range"].metric()
    assert 0.2 < share < 0.8
    space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(3, start=2)] * 2)
    found = read_spaces("host", space, gymnasium.spaces.Discrete(2))
    seen = [jnp.array([[2, 4, 5, 1]]), jnp.array([[2, 2, 2, 2]])]
    mask = jnp.array([[True, True, True, False]])
    share = frac_broken(found, jax.vmap(jax.vmap(found.observe))(tuple(seen)), mask)
    assert float(share["frac_out_of_range"].metric()) == pytest.approx(1 / 3)


def test_host_environments_are_counted_by_their_mask():
    found = read_spaces("host", gymnasium.spaces.Discrete(3), gymnasium.spaces.Discrete(2))
    problem = control.recorded_from_settings(
        found, control.ControlSettings(num_envs=1, num_steps=4)
    )
    off, on = jnp.zeros((1, 4), bool), jnp.ones((1, 4), bool)
    recording = recorded.StepRecording(
        observation=jnp.array([[0, 3, 7, 1, 2]]),
        action=jnp.zeros((1, 4), jnp.int32),
        reward=jnp.ones((1, 4)),
        terminated=off.at[0, 1].set(True),
        truncated=off,
        mask=on.at[0, 2].set(False),
        episode_return=jnp.ones((1, 4)),
        episode_length=jnp.array([[1.0, 1.0, 0.0, 1.0]]),
    )
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    collector = collector.add(sharded={recorded.RECORDING: recording})
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    for name in ("frac_out_of_range", "frac_one_step"):
        assert float(batch.metrics[name].metric()) == pytest.approx(1 / 3), name


def test_an_evaluation_says_which_episodes_ended():
    problem = control.make_problem(NeverEnds(), num_envs=2, num_steps=2)
    state = jax.jit(problem.init)(jax.random.key(0))

    def evaluated(env, **options):
        evaluate = control.make_evaluate(env, problem, num_episodes=3, **options)
        return jax.tree.map(np.asarray, jax.jit(evaluate)(*state, jax.random.key(1)))

    never = evaluated(NeverEnds())
    assert never["ended"].tolist() == [0.0] * 3
    assert never["length"].tolist() == [5.0] * 3
    # the last allowed step ends both episodes
    assert evaluated(NeverResets())["ended"].tolist() == [1.0] * 3
    assert evaluated(NeverResets(), max_steps=4)["ended"].tolist() == [0.0] * 3


def test_a_run_reports_once_by_name(tmp_path, capsys):
    (tmp_path / "mine.py").write_text("from test_broken_environments import NeverResets\n")
    arguments = [*tiny.CONTROL, f"--env={tmp_path}/mine.py:NeverResets", f"--out={tmp_path}/run"]
    assert launch.control([*arguments, "--problem.num_envs=16", "--total_steps=1000"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "reported once" in line]
    for line, name in zip(lines, ("frac_out_of_range", "frac_one_step"), strict=True):
        assert line.startswith("seed 0, after iteration ")
        assert name in line
    rows = (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(rows[-1])["greedy_ended"] == [1.0, 1.0]
