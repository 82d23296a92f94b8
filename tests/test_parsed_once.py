"""Tests that a run parses its arguments once and makes its environment once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from scripts import surroundings

from jaxrl_po import backend

# Counts parsed arguments, and calls of gymnax from before the library is imported.
PROGRAM = """
import collections, functools, json, sys
import gymnax

calls = collections.Counter()

def counted(owner, name, what):
    call = getattr(owner, name)

    @functools.wraps(call)
    def wrapped(*args, **kwargs):
        calls[what] += 1
        return call(*args, **kwargs)

    setattr(owner, name, wrapped)

counted(gymnax, "make", "environment")
from jaxrl_po.run.experiment import flags

counted(flags, "tokenize", "arguments")
from jaxrl_po.__main__ import main

status = main(sys.argv[1:])
print(json.dumps(calls))
sys.exit(status)
"""
CONTROL = [
    *("control", "--total_steps=64", "--seeds=1", "--devices=1", "--eval_episodes=1"),
    *("--problem.num_envs=4", "--problem.num_steps=8", "--network.width=8"),
    *("--config.num_minibatches=2", "--config.num_epochs=1", "--config.num_microbatches=1"),
]
LANGUAGE = ["language", "--task=addition", *tiny.LANGUAGE, "--config.num_microbatches=1"]


@pytest.mark.parametrize(
    ("argv", "calls"),
    [(CONTROL, {"arguments": 1, "environment": 1}), (LANGUAGE, {"arguments": 1})],
    ids=["control", "language"],
)
def test_arguments_are_parsed_and_environment_made_once(tmp_path, argv, calls):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *argv, f"--out={tmp_path / 'run'}"],
        env=surroundings() | {"PYTHONPATH": os.fspath(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1]) == calls


def test_computing_file_leaves_a_device_per_core(tmp_path):
    own = tmp_path / "own.py"
    own.write_text("import jax.numpy as jnp\nzeros = jnp.zeros(2)\n")
    program = "import jax; from jaxrl_po.run.experiment import user_code\n"
    program += f"user_code.load('env', '{own}:zeros'); print(jax.device_count())"
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=surroundings() | {"PYTHONPATH": os.fspath(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
    )
    assert ended.stdout == f"{backend.cores()}\n"
