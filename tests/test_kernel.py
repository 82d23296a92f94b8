"""Tests interrupts of training in a real Jupyter kernel, as the kernel's stop button sends them."""

import os
import time
from pathlib import Path

import jax
import pytest
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parent.parent
SETUP = """
import sys, time
import jax, jax.numpy as jnp
import numpy as np
from jaxrl_po import run
from jaxrl_po.masked import Mean
sys.path.insert(0, "tests/support")
from probes import one_piece
from toy_run import start_of

def wait(step):
    time.sleep(0.05 if step < 3 else 4.0)
    return np.float32(0.0)

def iterate(state):
    waited = jax.experimental.io_callback(
        wait, jax.ShapeDtypeStruct((), jnp.float32), state.step, ordered=False
    )
    size = state.params.policy.sum() + waited
    return state._replace(step=state.step + 1), {"size": Mean(size, jnp.float32(1.0))}

learner = one_piece(lambda key: start_of(key, 4), iterate)

def show(row):
    print("iteration", row["iteration"], flush=True)

def train():
    return run.train(learner, 1000, log_every=1, on_row=show)
"""


@pytest.fixture(scope="module")
def kernel():
    """Returns manager and client of a kernel with learners whose fourth iteration takes 4 s."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "JAX_COMPILATION_CACHE_DIR": jax.config.jax_compilation_cache_dir,
    }
    manager, client = start_new_kernel(
        startup_timeout=120, kernel_name="python3", env=environment, cwd=str(ROOT)
    )
    assert execute(client, SETUP)[0] is None
    yield manager, client
    client.stop_channels()
    manager.shutdown_kernel(now=True)


def execute(client, code, act=None, at="iteration 1"):
    """Runs a cell and calls `act` once the cell has printed the text `at`.

    Returns:
      Name of the exception that ended the cell, or None, and the printed text.
    """
    asked, printed, error = client.execute(code), "", None
    while True:
        message = client.get_iopub_msg(timeout=120)
        if message["parent_header"].get("msg_id") != asked:
            continue
        kind, content = message["msg_type"], message["content"]
        printed += content.get("text", "")
        error = content["ename"] if kind == "error" else error
        if act is not None and at in printed:
            act()
            act = None
        if kind == "status" and content["execution_state"] == "idle":
            return error, printed


pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_one_interrupt_ends_loop_with_usable_result(kernel):
    manager, client = kernel
    loop = "done = []\nfor _ in range(3):\n    done.append(train())"
    assert execute(client, loop, manager.interrupt_kernel)[0] == "Interrupted"
    use = "trained = sys.last_value.trained\nprint(len(done), trained.state.params.policy.shape)"
    assert execute(client, use) == (None, "0 (1, 4)\n")
    error, printed = execute(client, "print(trained.rows[-1]['iteration'] >= 1, trained.folder)")
    assert (error, printed) == (None, "True None\n")


def test_two_interrupts_leave_the_kernel_alive(kernel):
    manager, client = kernel

    def twice():
        for _ in range(2):
            time.sleep(1.0)  # the slow iteration has started, and continues
            manager.interrupt_kernel()

    assert execute(client, "train()", twice, at="iteration 3")[0] == "KeyboardInterrupt"
    assert manager.is_alive()
    again = "trained = run.train(learner, 2, log_every=1)\nprint(trained.interrupted)"
    assert execute(client, again)[1].endswith("False\n")
