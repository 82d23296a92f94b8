"""Tests memory above a problem: on the host, in a command, and as an entry of its own."""

import dataclasses
import json
import shutil

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import tiny
from clock import ignore, started
from clock import problem_of as hosted_problem
from memory_reference import SIZES
from tables import cases

from jaxrl_po import control
from jaxrl_po import run as runs
from jaxrl_po.cli import evaluate, launch, render
from jaxrl_po.config import ConfigError, describe_field
from jaxrl_po.control import actor, memory, recorded, unroll
from jaxrl_po.control.problem import CRITIC_MEMORY

pytestmark = pytest.mark.slow


def test_a_host_environment_replays_what_acted():
    """The test compares three iterations with one sequence of all their steps.

    The last iteration begins at the start of an episode.
    """
    hosted = hosted_problem(3, 6, memory="gru", statistics=True)
    _, state, rollouts = started(hosted)
    state = state._replace(params=jax.tree.map(lambda x: 2.0 * x, state.params))
    sample = jax.jit(
        lambda s, r: jax.vmap(hosted.problem.collect)(
            s.params,
            recorded.with_recording(s, r).collector,
            jax.random.split(jax.random.key(0), 1),
        )
    )
    batches = []
    for _ in range(3):
        state, recording = rollouts.record(state, ignore)
        collector, batch = sample(state, recording)
        seen = batch.inputs.observation
        batches.append((seen, batch.mask, batch.action, batch.log_prob, batch.value))
        state = state._replace(collector=collector)
    seen, mask, action, log_prob, value = (
        np.concatenate(x, axis=2)[0] for x in zip(*batches, strict=True)
    )
    begins = np.pad(~mask[:, :-1], ((0, 0), (1, 0)))
    assert begins[:, 12].all()
    assert not begins[:, 6].any()

    @jax.jit
    def replayed(params, key):
        empty = jnp.zeros((3, 8))
        distribution, value = hosted.problem.apply(
            params, actor.StepRows(seen, begins, empty, empty)
        )
        of_rows = unroll.row_keys(jax.random.split(key)[1], jnp.arange(3))
        keys = jax.vmap(lambda key: jax.vmap(jax.random.fold_in, (None, 0))(key, times))(of_rows)
        drawn = jax.vmap(jax.vmap(lambda one, key: one.sample(key)))(distribution, keys)
        return drawn, distribution.log_prob(action), value

    times = jnp.arange(18) % 6
    found = replayed(*jax.tree.map(lambda x: x[0], (state.params, state.key)))
    for ours, acted in zip(found, (action, log_prob, value), strict=True):
        np.testing.assert_allclose(ours[mask], acted[mask], atol=1e-5)


def test_opened_pool_begins_without_memory():
    hosted = hosted_problem(3, 6, memory="transformer")
    _, state, rollouts = started(hosted)
    state = jax.tree.map(jnp.ones_like, state._replace(key=None))
    began = rollouts._begin(state._replace(step=np.zeros(1)), ignore)
    memory = jax.tree.leaves(began.collector.sharded[CRITIC_MEMORY])
    assert len(memory) == 2
    assert not any(x.any() for x in memory)


@pytest.mark.usefixtures("trace_only")
def test_another_memory_is_one_entry(tmp_path, monkeypatch):
    called = []

    def summed(size, initialization, target, *, window):
        called.append((size, window))

        def run(memory, features, begins, final):
            dense = nn.Dense(size)

            def step(memory, x):
                memory = jnp.where(x[1][:, None], 0.0, memory) + x[0]
                return memory, memory

            memory, outputs = jax.lax.scan(step, memory, (dense(features), begins))
            return memory, outputs, None if final is None else outputs + dense(final)

        return memory.Memory(lambda rows: jnp.zeros((rows, size)), run)

    kind = memory.MemoryKind(summed, "a sum", sizes=("window",), divisors=("window",))
    monkeypatch.setitem(memory.MEMORIES, "sum", kind)
    flags = ["--network.memory=sum", "--network.memory_window=4", "--env=MemoryChain-bsuite"]
    assert launch.control([*tiny.CONTROL, *flags, f"--out={tmp_path}"]) == 0
    assert set(called) == {(8, 4)}
    assert json.loads((tmp_path / "config.json").read_text())["network.memory"] == "sum"
    (field,) = (x for x in dataclasses.fields(control.NetworkSettings) if x.name == "memory")
    assert "gru, transformer, sum" in describe_field(field)
    for changes, message in (
        ({"memory_layers": 3}, "memory_layers: has no effect unless memory is transformer"),
        ({"memory_window": 3}, "memory_window: must divide width = 64"),
        ({"memory": "gru", "memory_window": 4}, "unless memory is transformer or sum"),
        ({"memory": "none", "recurrent_networks": "policy"}, "memory is gru or transformer or sum"),
    ):
        with pytest.raises(ConfigError, match=message):
            control.NetworkSettings(**{"memory": "sum", **changes}).validate()


@cases("real, memory", (False, "transformer"), (True, "gru"))
def test_memory_run_resumes_evaluates_renders_and_loads(
    tmp_path, capsys, monkeypatch, real, memory
):
    if not real:
        shapes.trace_only(monkeypatch)
    whole, out = tmp_path / "whole", tmp_path / "run"
    flags = [
        "--env=MemoryChain-bsuite",
        f"--network.memory={memory}",
        *(f"--network.{name}={size}" for name, size in SIZES[memory].items()),
        "--network.recurrent_networks=policy",
        "--network.width=8",
        "--network.depth=1",
        "--problem.num_envs=4",
        "--problem.num_steps=8",
        "--config.num_minibatches=2",
        "--eval_episodes=4",
        "--seeds=2",
        "--total_steps=128",
    ]
    assert launch.control([*flags, f"--out={whole}"]) == 0
    shutil.copytree(whole, out)
    shutil.rmtree(out / "checkpoints" / "latest" / "4")
    assert launch.control([f"--out={out}", "--resume"]) == 0
    assert "resuming at iteration 3" in capsys.readouterr().out
    resumed, at_once = (
        [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        for place in (out, whole)
    )
    assert resumed[-1]["greedy_return"] == at_once[-1]["greedy_return"]
    assert resumed[-1]["policy_loss"] == at_once[-1]["policy_loss"]
    assert evaluate.main([f"--run={out}", "--size=4"]) == 0
    assert render.main([f"--run={out}", "--max_steps=4"]) == 0
    policy = runs.load(out)
    with pytest.raises(ConfigError, match=r"^act: must be replaced by step"):
        policy.act(jnp.zeros(3))
    seen = jnp.array([1.0, 0.0, 1.0])
    after, action = policy.step(policy.start, seen)
    assert bool(jax.tree.leaves(after)[0].any()) == real  # otherwise all parameters are zero
    remembered, _ = policy.step(jax.tree.map(lambda x: x + 1.0, policy.start), seen)
    assert not np.array_equal(jax.tree.leaves(remembered)[0], jax.tree.leaves(after)[0])
    assert int(action) in (0, 1)
