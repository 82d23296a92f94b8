"""Training that starts from the policy of an earlier run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.run.checkpoint import Store
from jaxrl_po.run.commands import language as script
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.metrics import read

SMALL = [
    "--devices=1",
    "--eval_prompts=64",
    "--show=0",
    "--task.num_digits=1",
    "--problem.num_prompts=2",
    "--problem.group_size=4",
    "--model.width=16",
    "--model.layers=1",
    "--model.heads=2",
    "--model.kv_heads=1",
    "--model.mlp_width=16",
    "--config.num_minibatches=1",
    "--config.num_epochs=1",
    "--algorithm=grpo",
]


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """Starts the backend, whose number of devices a script would choose otherwise."""
    return jax.local_device_count()


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    out = tmp_path_factory.mktemp("earlier") / "run"
    warm = [
        "--warm_start.steps=400",
        "--warm_start.batch_size=64",
        "--warm_start.accuracy=1",
        "--total_steps=0",
    ]
    assert script.main([*SMALL, *warm, "--seeds=1", f"--out={out}"]) == 0
    assert json.loads((out / "summary.json").read_text())["steps"] == 0
    assert (out / "curves.png").exists()
    return out


def test_every_seed_starts_where_the_earlier_run_stopped(earlier, tmp_path):
    out = tmp_path / "run"
    assert (
        script.main(
            [*SMALL, "--seeds=2", "--total_steps=8", f"--init_from={earlier}", f"--out={out}"]
        )
        == 0
    )
    last, first = read(earlier / "metrics.jsonl")[-1], read(out / "metrics.jsonl")[0]
    (reached,) = last["greedy_accuracy"]
    assert reached > 0.0
    assert first["greedy_accuracy"] == [reached, reached]
    saved = Store(earlier / "checkpoints" / "latest").read(0)
    begun = Store(out / "checkpoints" / "latest")
    assert 0 in begun.iterations()
    policy = [name for name in saved if name.startswith(".params.policy")]
    assert len(policy) > 5
    for name in policy:
        np.testing.assert_array_equal(begun.read(0)[name], np.repeat(saved[name], 2, axis=0))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--task=sorting"],
            (
                r"--init_from=.* must have the vocabulary of --task=sorting, .*; "
                r"it was trained on addition, "
            ),
        ),
        (["--model.width=32"], "--model.width=32 must be 16, as in --init_from="),
    ],
)
def test_another_vocabulary_or_model_is_refused_before_anything_is_written(
    earlier, tmp_path, flags, message
):
    arguments = [flag for flag in SMALL if not flag.startswith("--task.")]
    with pytest.raises(UsageError, match=message):
        script.main([*arguments, *flags, f"--init_from={earlier}", f"--out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(
        UsageError,
        match=r"--init_from=.* must be the folder of a run of jaxrl-po language or of a "
        r"pretrained model; it holds no config.json",
    ):
        script.main([*SMALL, f"--init_from={tmp_path}", f"--out={tmp_path / 'run'}"])
    (tmp_path / "config.json").write_text('{"mode": "llama"}')
    with pytest.raises(UsageError, match=r"; its config.json is that of something else$"):
        script.main([*SMALL, f"--init_from={tmp_path}", f"--out={tmp_path / 'run'}"])


def test_a_run_without_an_intact_checkpoint_is_named(earlier, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes((earlier / "config.json").read_bytes())
    with pytest.raises(UsageError, match="holds no intact checkpoint"):
        script.main([*SMALL, f"--init_from={tmp_path / 'run'}", f"--out={tmp_path / 'next'}"])


def test_parameters_of_another_model_are_refused_by_the_problem():
    task = language.tasks.addition(1)
    sizes = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8)
    model, other = sizes.build(task.tokenizer.size), sizes.build(task.tokenizer.size + 1)
    params = other.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ConfigError, match=r"initial must be parameters of the model: .*embedding"):
        language.make_problem(task, model, num_prompts=2, group_size=2, initial=params)
