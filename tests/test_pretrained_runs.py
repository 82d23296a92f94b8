"""Tests runs that begin with a pretrained folder: adapters, seeds that share a base, and export."""

import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import tiny
from folders import ADAPTED, ROWS, arguments
from scripts import everything
from tables import cases

from jaxrl_po import run
from jaxrl_po.cli import evaluate, export, launch, report
from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.run.devices.memory import DeviceMemory
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import models
from jaxrl_po.run.experiment import settings as settings_lib
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import read

pytestmark = pytest.mark.slow

CONSTANT = re.compile('"0x[0-9A-F]+"')


@pytest.fixture(scope="module")
def adapted(finished, tmp_path_factory):
    """Returns a run of three iterations with adapters."""
    return finished("pretrained", tmp_path_factory.mktemp("adapted") / "run")


@pytest.fixture(scope="module")
def place(finished, adapted):
    """Returns the pretrained folder of the run `adapted`, with prompts; tests must not write to
    it."""
    return finished.place


@pytest.fixture
def begun(monkeypatch):
    """Returns flags of runs without steps, whose training is not compiled."""
    shapes.trace_only(monkeypatch)
    monkeypatch.setattr(programs, "check_job", lambda job: None)
    monkeypatch.setattr(programs, "compile_kind", lambda *_: (None, DeviceMemory(0, None)))
    return ["--total_steps=0", "--eval_samples=0", "--show=0"]


def names_of(out):
    store = Store(out / "checkpoints" / "latest")
    return store.read(max(store.iterations()))


def test_run_trains_adapters_over_the_folder_alone(place, adapted):
    first, last = read(adapted / "metrics.jsonl")[0], read(adapted / "metrics.jsonl")[-1]
    assert {"greedy_accuracy", "avg@2", "pass@1", "pass@2"} <= first.keys()
    assert first["greedy_accuracy"][0] == first["greedy_accuracy"][1]
    assert (
        json.loads((adapted / "summary.json").read_text())["warm_start_accuracy"]
        == first["greedy_accuracy"]
    )
    assert last["iteration"] == 3
    policies = [name for name in names_of(adapted) if name.startswith(".params")]
    assert policies
    assert all(name.startswith(".params.policy['lora']") for name in policies)
    rows = [json.loads(line) for line in (adapted / "samples.jsonl").read_text().splitlines()]
    assert rows[0]["prompt"] in {row["prompt"] for row in ROWS}
    assert rows[0]["expected"] == "w7"
    loaded = pretrained.load(place / "model")
    config = json.loads((adapted / "config.json").read_text())
    assert config["resolved"]["base"] == models.digest_base(
        loaded.params, models.read_base(str(place / "model"), models.Computation())
    )
    assert config["init_from"] == str(place / "model")
    assert config["model.dtype"] == "float32"
    assert "model.width" not in config


def test_first_greedy_answers_match_the_folder(place, adapted, tmp_path):
    loaded = pretrained.load(place / "model")
    speaker = run.load(adapted, checkpoint="latest")
    merged = export_of(adapted, tmp_path / "exported", "--checkpoint=latest")
    text = "w8 w9"
    ids = np.array([loaded.tokenizer.encode(text)])
    pad = np.zeros(1, np.int32)
    own = speaker.generate([text])
    again = pretrained.load(merged)
    apply = jax.jit(again.model.apply)
    logits, before = (apply(params, ids, pad)[0] for params in (again.params, loaded.params))
    assert np.abs(logits - before).max() > 1e-4
    first = int(np.argmax(logits[0, -1]))
    assert own[0].split()[:1] == again.tokenizer.decode([first]).split()[:1]
    assert json.loads((merged / "config.json").read_text())["max_position_embeddings"] == 256


def export_of(out, folder, *further):
    shutil.rmtree(folder, ignore_errors=True)
    assert export.main([f"--run={out}", f"--out={folder}", *further]) == 0
    return folder


def test_a_run_with_adapters_is_reported_and_resumed(adapted, tmp_path, capsys):
    assert report.main([str(adapted), f"--out={tmp_path / 'r.html'}"]) == 0
    out = tmp_path / "run"
    shutil.copytree(adapted, out)
    shutil.rmtree(out / "checkpoints" / "latest" / "3")
    assert launch.language([f"--out={out}", "--resume"]) == 0
    assert "resuming at iteration 2" in capsys.readouterr().out
    assert everything(out)[1].keys() == everything(adapted)[1].keys()
    for key, arrays in everything(adapted)[1].items():
        assert everything(out)[1][key] == arrays


def over(run, *flags):
    """Returns flags of a run that begins with another run."""
    return [*(flag for flag in flags if "--init_from" not in flag), f"--init_from={run}"]


def test_a_run_begins_where_adapters_ended(place, adapted, tmp_path):
    flags = over(adapted, *arguments(place, tmp_path / "all", "--seeds=1"))
    job = job_of(flags)
    begun = jax.jit(job.learner.init)(job.start).params.policy
    merged = pretrained.load(export_of(adapted, tmp_path / "model", "--checkpoint=latest"))
    base = pretrained.load(place / "model").params
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y), begun, merged.params)
    moved = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), merged.params, base)
    assert max(jax.tree.leaves(moved)) > 1e-4


def test_adapters_over_merged_adapters_are_evaluated(place, adapted, tmp_path, begun):
    flags = over(adapted, *arguments(place, tmp_path / "more", "--seeds=1", *begun))
    assert launch.language([*flags, "--lora.rank=3"]) == 0
    assert evaluate.main([f"--run={tmp_path / 'more'}", f"--out={tmp_path / 'e.json'}"]) == 0
    assert "greedy_accuracy" in json.loads((tmp_path / "e.json").read_text())
    further = settings_lib.parse_settings(script, over(tmp_path / "more", *flags)).config
    assert further.initial == (str(place / "model"), True)


def test_a_method_with_a_critic_trains_adapters(place, tmp_path):
    own = ("--algorithm", "--config.num_", "--problem.")
    flags = [flag for flag in arguments(place, tmp_path / "run") if not flag.startswith(own)]
    flags += ["--algorithm=trpo", "--lora.rank=1", "--problem.num_prompts=4"]
    job = job_of([*flags, "--problem.group_size=1", "--config.value_minibatches=1"])
    state = jax.eval_shape(job.learner.init, job.start)
    after = jax.eval_shape(job.learner.step, state)[0]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert state.params.value is not None
    assert state.params.policy.keys() == {"lora"}


def test_adapters_train_over_a_model_of_ours(tmp_path, begun, written_down):
    """Adapters train over a run, and over initial parameters that all seeds share."""
    flags = [flag for flag in tiny.LANGUAGE if "warm_start" not in flag]
    flags += ["--algorithm=grpo", "--lora.rank=2", "--lora.targets=query,value", *begun]
    assert launch.language([*flags, f"--out={tmp_path / 'a'}"]) == 0
    held = names_of(tmp_path / "a")
    assert {name.split("'")[-4] for name in held if name.startswith(".params.policy")} <= {
        "query",
        "value",
    }
    written_down(launch.language, over(tmp_path / "a", *flags, f"--out={tmp_path / 'b'}"))
    with pytest.raises(
        ConfigError, match=r"tokenizer that transformers cannot read: load it by jax"
    ):
        export.main([f"--run={tmp_path / 'b'}", f"--out={tmp_path / 'c'}"])


def test_all_parameters_are_trained_without_adapters_and_exported(place, tmp_path, begun):
    flags = arguments(place, tmp_path / "run", "--seeds=1", "--model.dtype=bfloat16", *begun)
    flags += ["--model.remat"]
    job = job_of(flags)
    state = jax.eval_shape(job.learner.step, jax.eval_shape(job.learner.init, job.start))[0]
    first = pretrained.load(place / "model").params
    assert jax.tree.structure(state.params.policy) == jax.tree.structure(first)
    assert launch.language(flags) == 0
    again = pretrained.load(export_of(tmp_path / "run", tmp_path / "model", "--checkpoint=latest"))
    # The exported numbers are those of the checkpoint, unlike the initial folder's.
    assert max(jax.tree.leaves(jax.tree.map(np.max, again.params))) == 0.0
    assert max(jax.tree.leaves(jax.tree.map(np.max, first))) > 0.0


def test_an_export_narrows_what_training_did_not_change():
    base = {"kept": np.array([1.5, 0.1], jnp.bfloat16), "moved": np.array([1.5], jnp.bfloat16)}
    params = {name: x.astype(np.float32) for name, x in base.items()}
    params["moved"] += 1e-4
    found = export.as_base(params, base)
    assert {name: str(x.dtype) for name, x in found.items()} == {
        **{"kept": "bfloat16", "moved": "float32"}
    }
    np.testing.assert_array_equal(found["kept"], base["kept"])
    assert export.rounded_away(params, base, "bfloat16") == (1, 1)
    assert export.rounded_away(params, base, "float32") == (1, 0)


def test_adapters_are_merged_in_float32(place, tmp_path, begun, capsys):
    """Over a base in bfloat16, rounding would remove most of the adapters' changes.

    Unchanged tensors are exported in the type of the base.
    """
    half = ["--seeds=1", "--model.dtype=bfloat16", *ADAPTED, *begun]
    base = pretrained.load(place / "model", param_dtype="bfloat16")
    stored = tmp_path / "half"
    pretrained.save(stored, base.model, base.params, base.tokenizer, base.chat_template)
    flags = arguments(place, tmp_path / "a", *half)
    assert launch.language(over(stored, *flags)) == 0
    latest = "--checkpoint=latest"
    merged = pretrained.load(export_of(tmp_path / "a", tmp_path / "b", latest), param_dtype=None)
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    # Not the type of one of the tensors.
    assert config["dtype"] == config["torch_dtype"] == "float32"
    kept = pretrained.load(stored, param_dtype=None).params["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(merged.params["params"]):
        before = functools.reduce(lambda tree, key: tree[key.key], path, kept)
        same = np.array_equal(leaf, before.astype(leaf.dtype))
        assert str(leaf.dtype) == ("bfloat16" if same else "float32"), path
    capsys.readouterr()
    rounded = pretrained.load(
        export_of(tmp_path / "a", tmp_path / "b", latest, "--dtype=bfloat16"), param_dtype=None
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(rounded.params)} == {"bfloat16"}
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    (share,) = re.findall(r"([\d.]+)% of the changed numbers round back", capsys.readouterr().out)
    assert 0.0 <= float(share) < 100.0
    settings = settings_lib.parse_settings(script, over(tmp_path / "a", *flags)).config
    found = models.make_models(script, settings)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(found.params)} == {"float32"}


def job_of(flags):
    config = settings_lib.parse_settings(script, flags).config
    return script.build(config, Placement(config.run.seeds, 1, 1))


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.size)


@pytest.fixture(scope="module")
def warmed(place):
    """Returns a job whose adapters have a warm start, and the lowered parts of the warm start."""
    flags = ["--warm_start.steps=60", "--warm_start.batch_size=8", "--eval_samples=0"]
    flags += ["--warm_start.learning_rate=0.02", "--lora.rank=4", "--task.test_fraction=0.4"]
    job = job_of(arguments(place, place / "none", *flags))
    fit = jax.eval_shape(job.warm.begin, job.start)
    begin = jax.jit(job.warm.begin).lower(job.start)
    return job, begin, jax.jit(job.warm.advance).lower(fit, np.int32(0), job.given)


def test_base_is_an_argument_of_the_programs(place, tmp_path, warmed):
    adapted, *lowered = warmed
    for job, programs_of in ((adapted, lowered), (job_of(arguments(place, tmp_path / "run")), [])):
        base = bytes_of(job.given)
        texts = [each.as_text() for each in (job.learner.init.lower(job.start), *programs_of)]
        assert base > 50_000
        # A constant is written in hexadecimal digits, two per byte; the rest of the text is the
        # program itself.
        assert max(sum(map(len, CONSTANT.findall(text))) for text in texts) < base / 2


def test_warm_start_trains_adapters(warmed):
    job, *lowered = warmed
    begin, advance = (each.compile() for each in lowered)
    parts = job.warm._replace(begin=begin, advance=advance)

    def at_once(function, *given):
        return function(*given), 0.0

    def nothing(*_):
        pass

    fitted = programs.run_warm_start(parts, job.start, at_once, nothing, nothing, given=job.given)
    state = jax.jit(job.warm.init)((job.start, fitted))
    assert np.mean(jax.jit(job.evaluate)(state)["greedy_accuracy"]) > 0.5


@pytest.fixture
def moved(place, adapted, tmp_path):
    """Returns a copy of the run, over a folder with another θ."""
    own = shutil.copytree(place, tmp_path / "place")
    run = shutil.copytree(adapted, tmp_path / "adapted")
    for path, old, new in (
        (own / "model" / "config.json", "1000000.0", "500000.0"),
        (run / "config.json", str(place), str(own)),
    ):
        path.write_text(path.read_text().replace(old, new))
    return own, run


def test_other_base_is_refused_and_missing_named(moved, tmp_path, monkeypatch):
    place, adapted = moved
    monkeypatch.setattr("jaxrl_po.run.loop.programs.check_job", lambda job: None)
    changed = r"^\w+: \S+ holds adapters over another base: its digest was \w+ and is \w+ now"
    next_run = [*arguments(place, tmp_path / "next"), f"--init_from={adapted}", "--total_steps=8"]
    for call in (
        lambda: launch.language([f"--out={adapted}", "--resume"]),
        lambda: evaluate.main([f"--run={adapted}"]),
        lambda: export.main([f"--run={adapted}", f"--out={tmp_path / 'exported'}"]),
        lambda: launch.language(next_run),
    ):
        with pytest.raises(ConfigError, match=changed):
            call()
    with pytest.raises(ConfigError, match=changed):
        run.load(adapted)
    (place / "model").rename(place / "away")
    with pytest.raises(ConfigError, match=r"^run: \S+: init_from: must .*; it holds no config"):
        evaluate.main([f"--run={adapted}"])
    with pytest.raises(ConfigError, match=r"it holds no config\.json"):
        launch.language([f"--out={adapted}", "--resume"])


@cases(
    "flags, message",
    ([], "run: must name the folder of a run of jaxrl-po control or jaxrl-po language"),
    (["--run={run}"], "out: must name a folder, e.g. trained$"),
    (["--run={run}", "--out={run}"], r"out: must be a folder that is new or empty, got \S+"),
    (
        ["--run={run}", "--out={run}/x", "--seed_index=2"],
        "seed_index: must be below 2, the seeds of run = .*, got 2$",
    ),
)
def test_export_names_what_it_lacks(adapted, flags, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        export.main([flag.format(run=adapted) for flag in flags])
