"""Tests training that starts from the policy of an earlier run."""

import json
import shutil

import jax
import numpy as np
import pytest
import tiny
from tables import cases

from jaxrl_po import language, run
from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import control, settings
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.store.checkpoint import Store

SMALL = [*(flag for flag in tiny.LANGUAGE if "warm_start" not in flag), "--algorithm=grpo"]


@pytest.fixture(scope="module")
def earlier(finished, tmp_path_factory):
    return finished("language", tmp_path_factory.mktemp("earlier") / "run")


def test_every_seed_starts_from_earlier_first_seed(earlier):
    config = settings.parse_settings(script, [*SMALL, f"--init_from={earlier}"]).config
    job = script.build(config, Placement(config.run.seeds, 1, 1))
    begun = job.learner.init(job.start).params.policy
    store = Store(earlier / "checkpoints" / "latest")
    saved = store.read(max(store.iterations()))
    assert len(jax.tree.leaves(begun)) > 5
    for path, leaf in jax.tree_util.tree_leaves_with_path(begun):
        seeds = saved[f".params.policy{jax.tree_util.keystr(path)}"]
        assert not np.array_equal(*seeds) or "norm" in str(path)
        np.testing.assert_array_equal(leaf, np.stack([seeds[0]] * 2))


@cases(
    "flags, message",
    (
        ["--task=sorting"],
        (
            r"^init_from: must have the vocabulary of task = sorting, .*; "
            r"\S+ was trained on addition, "
        ),
    ),
    (["--model.width=32"], "^model.width: must be 8, as in init_from = .*, got 32$"),
)
def test_other_vocabulary_or_model_is_refused_before_writing(earlier, tmp_path, flags, message):
    arguments = [flag for flag in SMALL if not flag.startswith("--task.")]
    with pytest.raises(ConfigError, match=message):
        launch.language([*arguments, *flags, f"--init_from={earlier}", f"--out={tmp_path / 'run'}"])
    assert not (tmp_path / "run").exists()


def test_a_folder_without_a_run_is_named(tmp_path):
    (tmp_path / "config.json").write_text('{"mode": "llama"}')
    with pytest.raises(
        ConfigError, match=r"^init_from: must be the folder of .* of something else$"
    ):
        launch.language([*SMALL, f"--init_from={tmp_path}", f"--out={tmp_path / 'run'}"])


def test_a_run_without_an_intact_checkpoint_is_named(earlier, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes((earlier / "config.json").read_bytes())
    with pytest.raises(
        ConfigError, match="holds no intact checkpoint; wait for one, or choose another"
    ):
        launch.language([*SMALL, f"--init_from={tmp_path / 'run'}", f"--out={tmp_path / 'next'}"])


def test_run_does_not_overwrite_its_initial_run(earlier, tmp_path):
    place, later, link = tmp_path / "run", tmp_path / "later", tmp_path / "a_link_to_the_run"
    link.symlink_to(place)
    shutil.copytree(earlier, place)
    later.mkdir()
    settings = json.loads((earlier / "config.json").read_text())
    (later / "config.json").write_text(json.dumps({**settings, "init_from": str(place)}))
    for run_before in (place, later, link):
        with pytest.raises(ConfigError, match=r"^init_from: leads back to \S+run, which another r"):
            launch.language([*SMALL, f"--init_from={run_before}", f"--out={place}", "--overwrite"])
    assert (place / "summary.json").exists()
    (place / "config.json").write_text(json.dumps({**settings, "init_from": str(later)}))
    with pytest.raises(ConfigError, match=r"^run: \S+: init_from: leads back to \S+later, which"):
        evaluate.main([f"--run={place}"])


def test_parameters_of_another_model_are_refused():
    task = language.tasks.addition(1)
    sizes = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8)
    model, other = sizes.build(task.tokenizer.size), sizes.build(task.tokenizer.size + 1)
    params = other.parameter_shapes()
    with pytest.raises(ConfigError, match=r"initial: must be parameters of the model: .*embedding"):
        language.make_problem(task, model, num_prompts=2, group_size=2, initial=params)


WALKS = [flag for flag in tiny.CONTROL if "total_steps" not in flag]


@pytest.fixture(scope="module")
def walked(finished, tmp_path_factory):
    return finished("control", tmp_path_factory.mktemp("walked") / "run")


def test_control_seeds_start_from_earlier_first_seed(walked):
    kept = run.load(walked, checkpoint="latest")
    flags = [*WALKS, f"--init_from={walked}"]
    normal = f"--problem.normalize_observations={kept.settings['problem.normalize_observations']}"
    config = settings.parse_settings(control, [*flags, normal]).config
    job = control.build(config, Placement(2, 1, 1), control.open_world(config))
    state = select_seed(job.learner.init(job.start), 1)
    jax.tree.map(np.testing.assert_array_equal, state.params, kept.params)
    statistics = state.collector.replicated.get("observation_statistics")
    assert (statistics is not None) == kept.settings["problem.normalize_observations"]
    if statistics is not None:
        assert float(jax.tree.leaves(statistics)[0].max()) > 1  # step count of the earlier run


def test_control_run_outlives_its_initial_run(walked, tmp_path):
    earlier, out = shutil.copytree(walked, tmp_path / "earlier"), tmp_path / "run"
    kept = run.load(walked, checkpoint="latest")
    normal = f"--problem.normalize_observations={kept.settings['problem.normalize_observations']}"
    flags = [*WALKS, normal, "--total_steps=0", f"--init_from={earlier}", f"--out={out}"]
    assert launch.control(flags) == 0
    shutil.rmtree(earlier)
    jax.tree.map(np.testing.assert_array_equal, run.load(out).params, kept.params)


@cases(
    "arguments, message",
    (["--network.width=16"], r"^init_from: the policy of \S+ has \[8, 2\] at \['params'\]"),
    (["--problem.normalize_observations={other}"], r"^problem.normalize_observations: must"),
)
def test_unfit_initial_control_run_is_refused(walked, tmp_path, arguments, message):
    other = not run.load(walked).settings["problem.normalize_observations"]
    given = [each.format(other=str(other).lower()) for each in arguments]
    flags = [*tiny.CONTROL, f"--init_from={walked}", *given, f"--out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        launch.control(flags)


def test_control_run_starts_from_intact_checkpoint(walked, tmp_path):
    earlier = shutil.copytree(walked, tmp_path / "earlier")
    shutil.rmtree(earlier / "checkpoints" / "latest")
    with pytest.raises(ConfigError, match=r"^init_from: \S+ holds no intact checkpoint; wait"):
        launch.control([*tiny.CONTROL, f"--init_from={earlier}", f"--out={tmp_path / 'run'}"])
