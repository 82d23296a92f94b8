"""The promise of docs/save_and_load.md: what version 0.4 wrote is read; another format is named.

`run_of_0_4.tar.xz` is the folder of

    jaxrl-po control --env=CartPole-v1 --devices=1 --seeds=1 --total_steps=128 --eval_episodes=2 \
        --problem.num_envs=4 --problem.num_steps=16 --config.num_minibatches=2 \
        --config.num_epochs=1 --network.width=4 --network.depth=1 --out=run_of_0_4

without its curves, its lock and the checkpoint of iteration 1.
"""

import json
import shutil
import tarfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import run
from jaxrl_po.cli import evaluate, plot, render
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.store import checkpoint

KEPT = Path(__file__).parent / "run_of_0_4.tar.xz"
SUM_OF_SQUARES = 17.0158  # of the policy's parameters, as they were when the folder was written


@pytest.fixture
def kept(tmp_path):
    with tarfile.open(KEPT) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "run_of_0_4"


def test_a_run_of_0_4_is_loaded_evaluated_drawn_and_resumed(kept, tmp_path):
    policy = run.load(kept, checkpoint="latest")
    squares = sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(policy.params))
    np.testing.assert_allclose(squares, SUM_OF_SQUARES, rtol=1e-3)
    assert policy.act(jnp.zeros(4)) in (0, 1)
    told = tmp_path / "evaluation.json"
    assert evaluate.main([f"--run={kept}", "--checkpoint=latest", f"--out={told}"]) == 0
    assert json.loads(told.read_text())["iteration"] == 2
    resumed = run.resume(kept, total_steps=256)
    assert [row["iteration"] for row in resumed.rows] == [0, 1, 2, 3, 4]
    assert plot.main([str(kept), f"--out={tmp_path / 'curves.png'}"]) == 0


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (2, r"config\.json has format 2, and jaxrl_po 0\.\S+ reads 1; install a later version"),
        (None, r"config\.json has no format number, as before version 0\.4, and jaxrl_po"),
    ],
)
def test_a_folder_of_another_format_is_named_and_left_as_it_is(
    kept, no_compilation, number, message
):
    settings = json.loads((kept / "config.json").read_text()) | {"format": number}
    if number is None:
        del settings["format"]
    (kept / "config.json").write_text(json.dumps(settings))
    for use in (
        lambda: run.load(kept),
        lambda: run.resume(kept),
        lambda: run.train(run.Experiment(env="CartPole-v1", out=str(kept), resume=True)),
        lambda: evaluate.main([f"--run={kept}"]),
        lambda: render.main([f"--run={kept}"]),
        lambda: plot.main([str(kept)]),
    ):
        with pytest.raises((ConfigError, UsageError), match=message):
            use()
    assert json.loads((kept / "config.json").read_text()) == settings


def test_what_an_older_version_began_blocks_a_folder(kept):
    """It is not taken for a run that was only begun, which the same command may replace."""
    shutil.rmtree(kept / "checkpoints")
    (kept / "metrics.jsonl").unlink()
    (kept / "summary.json").unlink()
    (kept / "config.json").write_text('{"script": "control"}')
    with pytest.raises(ConfigError, match="already holds files"):
        run.train(run.Experiment(env="CartPole-v1", out=str(kept)))


def test_a_checkpoint_of_a_later_format_is_named_and_kept(tmp_path, monkeypatch):
    state = {"w": jnp.ones(2)}
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "FORMATS", (1, 2))
        with checkpoint.Store(tmp_path) as store:
            store.save(3, state)
    message = r"the checkpoint has format 2, and jaxrl_po \S+ reads 1; install a later version$"
    with (
        checkpoint.Store(tmp_path) as store,
        pytest.raises(checkpoint.CheckpointError, match=message),
    ):
        store.load(state)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        checkpoint.peek(tmp_path, state)
    assert checkpoint.newest_intact(tmp_path) == 3
