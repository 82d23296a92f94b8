"""Tests the promise of docs/save_and_load.md: files of version 0.4 are accepted; the errors for
other formats name the format.

The archive `run_of_0_4.tar.xz` is the folder of the command

    jaxrl-po control --env=CartPole-v1 --devices=1 --seeds=1 --total_steps=128 --eval_episodes=2 \
        --problem.num_envs=4 --problem.num_steps=16 --config.num_minibatches=2 \
        --config.num_epochs=1 --network.width=4 --network.depth=1 --out=run_of_0_4

without its curves, its lock and the checkpoint of iteration 1.

The archive `optimizers_of_0_4.tar.xz` has three folders of the same command, without the best
checkpoint too: `cosine` with `--config.schedule=cosine --config.decay_iterations=4`, `adamw` and
`muon` with the `--config.optimizer` of their name and `--config.schedule=constant`.
"""

import json
import shutil
import tarfile
from pathlib import Path

import chex
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from tables import cases

from jaxrl_po import control, ppo, run
from jaxrl_po.cli import evaluate, plot, render
from jaxrl_po.config import ConfigError
from jaxrl_po.optimizers import adam
from jaxrl_po.run.errors import UsageError
from jaxrl_po.run.experiment import control as command
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.store import checkpoint
from jaxrl_po.types import ActorCritic, TrainState

KEPT = Path(__file__).parent / "run_of_0_4.tar.xz"
SUM_OF_SQUARES = 17.0158  # of the policy's parameters when the folder was written
OPTIMIZERS = Path(__file__).parent / "optimizers_of_0_4.tar.xz"
RESUMED = 17.05767  # sum of squares of the `adamw` policy that version 0.4 trained to 256 steps


def unpacked(path, folder):
    """Unpacks an archive; returns its folder."""
    with tarfile.open(path) as archive:
        archive.extractall(folder, filter="data")
    return folder / path.name.removesuffix(".tar.xz")


@pytest.fixture
def kept(tmp_path):
    return unpacked(KEPT, tmp_path)


def test_version_04_run_is_loaded_evaluated_drawn_resumed(kept, tmp_path):
    policy = run.load(kept, checkpoint="latest")
    np.testing.assert_allclose(squares(policy.params), SUM_OF_SQUARES, rtol=1e-3)
    assert policy.act(jnp.zeros(4)) in (0, 1)
    told = tmp_path / "evaluation.json"
    assert evaluate.main([f"--run={kept}", "--checkpoint=latest", f"--out={told}"]) == 0
    assert json.loads(told.read_text())["iteration"] == 2
    resumed = run.resume(kept, total_steps=256)
    assert [row["iteration"] for row in resumed.rows] == [0, 1, 2, 3, 4]
    assert plot.main([str(kept), f"--out={tmp_path / 'curves.png'}"]) == 0


@pytest.mark.usefixtures("no_compilation")
def test_removed_setting_is_refused_unless_default(kept):
    stored = json.loads((kept / "config.json").read_text())

    def told(reproducible):
        (kept / "config.json").write_text(json.dumps(stored | {"reproducible": reproducible}))
        asked = Experiment.parse(command, ["--resume", f"--out={kept}"])
        return [x for x in prepare(command, asked.read()).display.notes if "former" in x]

    assert told(False) == []
    assert told(True) == [
        "config.json: reproducible=true is a setting of a former version, without effect now"
    ]
    with pytest.raises(ConfigError, match=r"^reproducible: is not .*did you mean deterministic"):
        Experiment.parse(command, ["--reproducible"])


@pytest.fixture
def optimizers(tmp_path):
    return unpacked(OPTIMIZERS, tmp_path)


def squares(params):
    return sum(float(jnp.sum(jnp.square(leaf))) for leaf in jax.tree.leaves(params))


def restored(folder, **fields):
    """Returns the arrays of the checkpoint by name, and the current state made from these
    arrays."""
    env, network = gymnax.make("CartPole-v1")[0], control.NetworkSettings(width=4, depth=1)
    problem = control.make_problem(env, num_envs=4, num_steps=16, network=network)
    sizes = {"num_minibatches": 2, "num_epochs": 1, "learning_rate": 1e-3}
    learner = ppo.make(ppo.Config(**sizes, **fields), problem)
    like = jax.eval_shape(jax.vmap(learner.init), jax.random.split(jax.random.key(0), 1))
    latest = folder / "checkpoints" / "latest"
    with checkpoint.Store(latest) as store:
        return store.read(2), store.load(like)[1]


def test_cosine_count_of_version_04_is_dropped(optimizers):
    """Adam's moments with one leaf per parameter become the flat moments of the method's own
    Adam."""
    held, state = restored(optimizers / "cosine", schedule="cosine", decay_iterations=4)
    assert held[".opt_state[2].count"] == held[".opt_state[1][0].count"] == 4
    _, adam, _ = state.opt_state
    params = jax.tree.map(lambda x: x[0], state.params.without_frozen())
    assert adam.count == 4
    for name in ("mu", "nu"):
        moments = ravel_pytree(params)[1](getattr(adam, name)[0])
        for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
            former = held[f".opt_state[1][0].{name}{jax.tree_util.keystr(path)}"]
            np.testing.assert_array_equal(leaf, former[0])
            assert np.any(former)


def test_muon_of_version_04_restarts_its_adam(optimizers):
    """In version 0.4 Muon took the input layer and the heads; a network of one layer has no hidden
    matrix."""
    held, state = restored(optimizers / "muon", optimizer="muon")
    inner = state.opt_state[1].inner_states
    assert any("inner_states['muon'].inner_state[0].mu" in name for name in held)
    assert not jax.tree.leaves(inner["muon"].inner_state[0].mu)
    adam = inner["adam"].inner_state[0]
    assert adam.count == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves((adam.mu, adam.nu)))
    assert len(jax.tree.leaves(adam.mu)) == len(jax.tree.leaves(state.params))


@cases("size", 0, 2**20, ids=["leaves", "flat"])
@cases("of_policy", False, True, ids=["joint", "policy"])
@cases("swept", False, True, ids=["alone", "swept"])
def test_cosine_of_version_04_has_current_moments(size, of_policy, swept):
    """The cases cover actor and critic or the policy alone, both sizes, and swept settings."""
    params = ActorCritic({"b": jnp.ones((2, 3)), "a": jnp.full(4, 2.0)}, {"c": jnp.ones((3, 1))})
    trained = params.policy if of_policy else params
    cosine = optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 9))
    former = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.1, eps=1e-5), cosine)
    gradient = jax.tree.map(lambda x: x * jnp.arange(1.0, x.size + 1).reshape(x.shape), trained)

    def state_of(optimizer):
        state = optimizer.init(trained)
        for _ in range(2):
            _, state = optimizer.update(gradient, state, trained)
        state = ({"rate": jnp.ones(())}, state) if swept else state
        return TrainState(params, state, None, jnp.ones(()), None, jax.random.key(0), jnp.int32(2))

    today = state_of(adam(0.1, max_grad_norm=1.0, flat_up_to=size))
    found = checkpoint.from_host(checkpoint.to_host(state_of(former)), today)
    chex.assert_trees_all_close(found.opt_state, today.opt_state, rtol=1e-6)


@pytest.mark.usefixtures("trace_only")
@cases("name", "cosine", "muon")
def test_optimizers_of_0_4_load_and_resume(optimizers, name):
    assert squares(run.load(optimizers / name, checkpoint="latest").params) > 0
    resumed = run.resume(optimizers / name, total_steps=256)
    assert [row["iteration"] for row in resumed.rows] == [0, 1, 2, 3, 4]


def test_named_optimizer_of_version_04_resumes_identically(optimizers):
    run.resume(optimizers / "adamw", total_steps=256)
    policy = run.load(optimizers / "adamw", checkpoint="latest")
    np.testing.assert_allclose(squares(policy.params), RESUMED, rtol=1e-4)


def test_a_policy_loads_without_its_optimizer_state(kept, monkeypatch):
    """An optimizer's state with another structure, as in a later version, is not loaded."""
    latest = kept / "checkpoints" / "latest"
    with checkpoint.Store(latest) as store:
        arrays = store.read(2)
        other = {name: x for name, x in arrays.items() if not name.startswith(".opt_state")}
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "to_host", lambda state: state)
            store.save(2, {**other, ".opt_state['other'].moment": np.ones(3, np.float32)})
    policy = run.load(kept, checkpoint="latest")
    np.testing.assert_allclose(squares(policy.params), SUM_OF_SQUARES, rtol=1e-3)
    with pytest.raises(ConfigError, match=r"opt_state"):
        run.resume(kept, total_steps=256)


@cases(
    "number, message",
    (2, r"config\.json has format 2, and jaxrl_po 0\.\S+ reads 1; install a later version"),
    (None, r"config\.json has no format number, as before version 0\.4, and jaxrl_po"),
)
def test_folder_of_another_format_is_left_unchanged(kept, no_compilation, number, message):
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
    ):
        with pytest.raises(ConfigError, match=message):
            use()
    with pytest.raises(UsageError, match=message):
        plot.main([str(kept)])
    assert json.loads((kept / "config.json").read_text()) == settings


def test_what_an_older_version_began_blocks_a_folder(kept):
    """Such a folder is not taken for a run that has only started, which the same command may
    replace."""
    shutil.rmtree(kept / "checkpoints")
    (kept / "metrics.jsonl").unlink()
    (kept / "summary.json").unlink()
    (kept / "config.json").write_text('{"script": "control"}')
    with pytest.raises(ConfigError, match="already holds files"):
        run.train(run.Experiment(env="CartPole-v1", out=str(kept)))


def test_checkpoint_of_a_later_format_is_retained(tmp_path, monkeypatch):
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
