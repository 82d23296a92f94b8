"""Tests programs of every kind, compiled for a v5e 2 × 4 by its own compiler, one at a time."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TPU = Path(__file__).parent.parent / ".venv-tpu"
SMALL = ("--problem.num_envs=16", "--problem.num_steps=8", "--total_steps=1024")
WORDS = (
    *("--task=addition", "--task.num_digits=1", "--problem.num_prompts=8", "--seeds=1"),
    *("--model.width=16", "--model.layers=1", "--model.mlp_width=32", "--warm_start.steps=0"),
)
# Cases: name, flags, and the collectives of an iteration as kind and number. A change that adds a
# collective fails the test.
CASES = [
    ("ppo", ("control", "--seeds=8", *SMALL), {}),
    ("ppo", ("control", "--seeds=1", *SMALL), {"all-reduce": 68}),
    ("ppo", ("language", *WORDS, "--problem.num_prompts=64"), {"all-reduce": 9}),
    ("trpo", ("language", *WORDS, "--problem.num_prompts=64"), {"all-reduce": 60}),
    ("grpo", ("language", *WORDS), {"all-reduce": 7}),
    ("grpo", ("language", *WORDS, "--model.fused_attention"), {"all-reduce": 7}),
    (
        "grpo",
        ("language", *WORDS, "--shard_params", "--mesh=data:8"),
        # One collective, of 512 bytes, determines whether the minibatch has an unmasked slot.
        {"all-gather": 36, "all-reduce": 24, "all-to-all": 5, "collective-permute": 74},
    ),
]


COUNT = """
import json, sys, jax, tpu
jax.config.update("jax_platforms", "cpu")
print(json.dumps(tpu.figures(tpu.Row("", "tpu:v5e:2x4", tuple(sys.argv[1:])))))
"""


def surroundings():
    """Returns an environment without XLA's flags for CPUs, at which libtpu would end the
    process."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return env | {"PYTHONPATH": os.pathsep.join([str(TPU), *sys.path])}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("algorithm", "flags", "collectives"), CASES)
def test_collectives_of_an_iteration(algorithm, flags, collectives):
    done = subprocess.run(
        [sys.executable, "-c", COUNT, *flags, f"--algorithm={algorithm}"],
        env=surroundings(),
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["machine"] == "tpu:v5e:2x4"
    assert found["memory"]["total"] > found["memory"]["arguments"] > 0
    counts = found["counts"]
    assert counts["padded"] >= counts["flops"] > 0
    of_kinds = {kind: transfer["count"] for kind, transfer in counts["collectives"].items()}
    assert of_kinds == collectives
    assert ("tpu_custom_call" in counts["uncounted"]) == ("--model.fused_attention" in flags)


@pytest.mark.slow
def test_libtpu_prints_nothing_without_a_tpu():
    """To look for a GPU, the command starts JAX's backends, which include libtpu."""
    env = {name: value for name, value in surroundings().items() if name != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_po", "control", "--compile_for=gpu"],
        env=env,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*gpu needs an attached GPU.*\n", done.stderr)
