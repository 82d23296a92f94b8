"""Tests that a run makes its environment once, and that a user's file may compute when imported."""

import os
import subprocess
import sys
from pathlib import Path

import gymnax
import pytest
import tiny
from scripts import surroundings

from jaxrl_po import backend
from jaxrl_po.cli import launch


@pytest.mark.usefixtures("trace_only")
def test_environment_is_made_once(tmp_path, monkeypatch):
    made, make = [], gymnax.make
    monkeypatch.setattr(gymnax, "make", lambda name: made.append(name) or make(name))
    assert launch.control([*tiny.CONTROL, f"--out={tmp_path / 'run'}"]) == 0
    assert made == ["CartPole-v1"]


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
