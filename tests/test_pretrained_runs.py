"""Runs that begin with a pretrained folder: adapters, seeds that share a base, and export."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
import tiny
from folders import ADAPTED, BONUS, ROWS, arguments, write_place
from scripts import everything

from jaxrl_po import run
from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.run import jobs, launch, methods, models, programs, runner, warm
from jaxrl_po.run.checkpoint import Store
from jaxrl_po.run.commands import evaluate, export, report
from jaxrl_po.run.commands import language as script
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.metrics import read
from jaxrl_po.run.parallel import Placement

CONSTANT = re.compile('"0x[0-9A-F]+"')


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """Starts the backend, whose number of devices a script would choose otherwise."""
    return jax.local_device_count()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A pretrained folder and prompts for it."""
    return write_place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def adapted(place):
    """A run with adapters, of three iterations."""
    out = place / "adapted"
    assert script.main(arguments(place, out, *ADAPTED, "--total_steps=24")) == 0
    return out


def names_of(out):
    store = Store(out / "checkpoints" / "latest")
    return store.read(max(store.iterations()))


def test_a_run_begins_with_the_model_of_the_folder_and_trains_adapters_alone(place, adapted):
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
    stored = config["resolved"]["base"]
    assert stored == models.digest(
        loaded.params, models.read_base(str(place / "model"), models.Computation())
    )
    assert config["init_from"] == str(place / "model")
    assert config["model.dtype"] == "float32"
    assert "model.width" not in config


def test_the_first_greedy_answers_are_those_of_the_folder(place, adapted):
    loaded = pretrained.load(place / "model")
    speaker = run.load(adapted, checkpoint="latest")
    merged = export_of(adapted, place / "exported", "--checkpoint=latest")
    text = "w8 w9"
    ids = np.array([loaded.tokenizer.encode(text)])
    pad = np.zeros(1, np.int32)
    own = speaker.generate([text])
    again = pretrained.load(merged)
    logits = again.model.apply(again.params, ids, pad)[0]
    before = loaded.model.apply(loaded.params, ids, pad)[0]
    assert np.abs(logits - before).max() > 1e-4
    first = int(np.argmax(logits[0, -1]))
    assert own[0].split()[:1] == again.tokenizer.decode([first]).split()[:1]
    assert json.loads((merged / "config.json").read_text())["max_position_embeddings"] == 256


def export_of(out, folder, *further):
    shutil.rmtree(folder, ignore_errors=True)
    assert export.main([f"--run={out}", f"--out={folder}", *further]) == 0
    return folder


def test_a_run_with_adapters_is_evaluated_reported_and_resumed(place, adapted, tmp_path, capsys):
    assert evaluate.main([f"--run={adapted}", f"--out={tmp_path / 'e.json'}"]) == 0
    assert "greedy_accuracy" in json.loads((tmp_path / "e.json").read_text())
    assert report.main([str(adapted), f"--out={tmp_path / 'r.html'}"]) == 0
    out = tmp_path / "run"
    shutil.copytree(adapted, out)
    shutil.rmtree(out / "checkpoints" / "latest" / "3")
    assert script.main([f"--out={out}", "--resume"]) == 0
    assert "resuming at iteration 2" in capsys.readouterr().out
    assert everything(out)[1].keys() == everything(adapted)[1].keys()
    for key, arrays in everything(adapted)[1].items():
        assert everything(out)[1][key] == arrays


def test_a_run_begins_where_adapters_ended(place, adapted, tmp_path):
    """With all parameters; a run with adapters over the merged ones is evaluated too."""
    few = [f"--init_from={adapted}", "--seeds=1", "--total_steps=0", "--show=0", "--eval_samples=0"]
    assert script.main([*arguments(place, tmp_path / "all"), *few]) == 0
    begun = names_of(tmp_path / "all")
    merged = pretrained.load(export_of(adapted, tmp_path / "model", "--checkpoint=latest"))
    base, moved = pretrained.load(place / "model").params, 0.0
    for (path, leaf), before in zip(
        jax.tree_util.tree_leaves_with_path(merged.params), jax.tree.leaves(base), strict=True
    ):
        name = f".params.policy{jax.tree_util.keystr(path)}"
        np.testing.assert_array_equal(begun[name][0], leaf)
        moved = max(moved, float(np.abs(leaf - before).max()))
    assert moved > 1e-4
    assert script.main([*arguments(place, tmp_path / "more"), *few, "--lora.rank=3"]) == 0
    assert evaluate.main([f"--run={tmp_path / 'more'}"]) == 0


@pytest.mark.parametrize("algorithm", ["ppo", "trpo", "dapo"])
def test_every_kind_of_method_trains_adapters(place, tmp_path, algorithm):
    grouped = algorithm in methods.IN_GROUPS
    flags = [flag for flag in arguments(place, tmp_path / "run") if "algorithm" not in flag]
    critic = [] if grouped else ["--critic.width=8", "--critic.layers=1", "--critic.heads=2"]
    critic += [] if grouped else ["--critic.kv_heads=1", "--critic.mlp_width=8"]
    if not grouped:
        flags = [flag for flag in flags if not flag.startswith("--config.num_")]
        flags += ["--problem.group_size=1", "--problem.num_prompts=4"]
        flags += (
            ["--config.num_minibatches=1"]
            if algorithm == "ppo"
            else ["--config.value_minibatches=1", "--config.value_epochs=1"]
        )
    flags += [f"--algorithm={algorithm}", *critic, "--lora.rank=1", "--total_steps=8"]
    assert script.main([*flags, "--eval_samples=0", "--show=0"]) == 0
    held = names_of(tmp_path / "run")
    assert any(name.startswith(".params.value") for name in held) != grouped
    assert all("lora" in name for name in held if name.startswith(".params.policy"))


def test_adapters_train_over_a_model_of_ours(tmp_path):
    """Over a run, and over initial parameters that all seeds share."""
    flags = [flag for flag in tiny.LANGUAGE if "warm_start" not in flag]
    flags += ["--algorithm=grpo", "--lora.rank=2", "--lora.targets=query,value", "--show=0"]
    assert script.main([*flags, "--warm_start.steps=2", f"--out={tmp_path / 'a'}"]) == 0
    held = names_of(tmp_path / "a")
    assert {name.split("'")[-4] for name in held if name.startswith(".params.policy")} <= {
        "query",
        "value",
    }
    start = f"--init_from={tmp_path / 'a'}"
    assert script.main([*flags, start, f"--out={tmp_path / 'b'}"]) == 0
    with pytest.raises(UsageError, match="began with a model of ours, whose tokenizer"):
        export.main([f"--run={tmp_path / 'b'}", f"--out={tmp_path / 'c'}"])


def test_all_parameters_are_trained_without_adapters_and_exported(place, tmp_path):
    out = tmp_path / "run"
    further = [
        BONUS,
        "--config.warm_up_iterations=0",
        "--total_steps=8",
        "--config.learning_rate=0.01",
        "--model.dtype=bfloat16",
    ]
    assert script.main(arguments(place, out, "--seeds=1", *further, "--model.remat")) == 0
    again = pretrained.load(export_of(out, tmp_path / "model", "--checkpoint=latest"))
    first = pretrained.load(place / "model")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), again.params, first.params)
    assert max(jax.tree.leaves(moved)) > 1e-3


def test_adapters_are_merged_in_float32(place, tmp_path):
    """Over a base in bfloat16, most of what they change would be rounded away."""
    half = ["--seeds=1", "--model.dtype=bfloat16", *ADAPTED, "--total_steps=8"]
    half += ["--show=0", "--eval_samples=0"]
    base = pretrained.load(place / "model", param_dtype="bfloat16")
    stored = tmp_path / "half"
    pretrained.save(stored, base.model, base.params, base.tokenizer, base.chat_template)
    flags = [f for f in arguments(place, tmp_path / "a", *half) if "--init_from" not in f]
    assert script.main([*flags, f"--init_from={stored}"]) == 0
    merged = pretrained.load(
        export_of(tmp_path / "a", tmp_path / "b", "--checkpoint=latest"), param_dtype=None
    )
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(merged.params)} == {"float32"}
    settings = launch.parse(script.SCRIPT, [*flags, f"--init_from={tmp_path / 'a'}"], {})
    begun = models.start(script.SCRIPT, settings)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(begun.params)} == {"float32"}


def job_of(place, tmp_path, *further):
    records = launch.parse(script.SCRIPT, arguments(place, tmp_path / "run", *further), {})
    seeds = records[""].seeds
    algorithm = methods.ALGORITHMS[records[""].algorithm]
    one = Placement(seeds, 1, 1)
    experiment = script.SCRIPT.build(records, algorithm, one)
    return jobs.make_job(
        experiment, records[""], one, iterations=1, steps_per_iteration=8, log_every=1
    )


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree) if leaf.size)


def test_seeds_add_adapters_and_their_moments_alone(place, tmp_path):
    states = {
        seeds: jax.eval_shape(job.learner.init, job.start)
        for seeds in (1, 8)
        for job in [job_of(place, tmp_path, "--lora.rank=8", f"--seeds={seeds}")]
    }
    assert bytes_of(states[1].params.frozen) == bytes_of(states[8].params.frozen)
    assert bytes_of(states[8].params.policy) == 8 * bytes_of(states[1].params.policy)
    each = 8 * bytes_of(states[1].params.policy)
    grown = bytes_of(runner.without_frozen(states[8])) - bytes_of(runner.without_frozen(states[1]))
    # Adapters, the reference's, two moments of Adam; and small counters and keys.
    assert grown < 7 / 8 * (4 * each) + 7 * 256


def test_the_base_is_an_argument_of_the_programs_and_no_part_of_their_text(place, tmp_path):
    for further in (["--lora.rank=2"], ["--lora.rank=2", "--warm_start.steps=2"], []):
        job = job_of(place, tmp_path, *further)
        base = bytes_of(job.given)
        texts = [job.learner.init.lower(job.start).as_text()]
        if job.warm is not None:
            texts.append(jax.jit(job.warm.begin).lower(job.start).as_text())
            fit = jax.eval_shape(job.warm.begin, job.start)
            texts.append(jax.jit(job.warm.advance).lower(fit, np.int32(0), job.given).as_text())
        assert base > 50_000
        # A constant is written in hexadecimal digits, two a byte; the rest is the program itself.
        assert max(sum(map(len, CONSTANT.findall(text))) for text in texts) < base / 2


def test_a_warm_start_of_adapters_can_be_asked_for(place, tmp_path):
    flags = ["--warm_start.steps=60", "--warm_start.batch_size=8"]
    flags += ["--warm_start.learning_rate=0.02", "--lora.rank=4", "--eval_samples=0"]
    job = job_of(place, tmp_path, *flags)
    init, parts = programs.compile_init(job)

    def at_once(function, *given):
        return function(*given), 0.0

    def nothing(*_):
        pass

    fitted = warm.run(parts, job.start, at_once, nothing, nothing, given=job.given)
    found = jax.jit(job.evaluate)(init((job.start, fitted)))
    assert np.mean(found["greedy_accuracy"]) > 0.5


@pytest.fixture
def other_base(place):
    """Another θ in the folder, which a test may rename to `away`; afterwards as it was."""
    model, away = place / "model", place / "away"
    config = model / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace("1000000.0", "500000.0"))
    yield
    if away.exists():
        away.rename(model)
    config.write_text(kept)


@pytest.mark.usefixtures("other_base")
def test_another_base_is_refused_and_a_missing_one_is_named(place, adapted, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_po.run.programs.check", lambda job: None)
    changed = "holds adapters over another base: its digest was [0-9a-f]+ and is [0-9a-f]+ now"
    next_run = [*arguments(place, tmp_path / "next"), f"--init_from={adapted}", "--total_steps=8"]
    for call in (
        lambda: script.main([f"--out={adapted}", "--resume"]),
        lambda: evaluate.main([f"--run={adapted}"]),
        lambda: export.main([f"--run={adapted}", f"--out={tmp_path / 'exported'}"]),
        lambda: script.main(next_run),
    ):
        with pytest.raises(UsageError, match=changed):
            call()
    with pytest.raises(ConfigError, match=changed):
        run.load(adapted)
    (place / "model").rename(place / "away")
    with pytest.raises(
        UsageError, match=r"^--run=\S+: --init_from=\S+ must .*; it holds no config"
    ):
        evaluate.main([f"--run={adapted}"])
    with pytest.raises(UsageError, match=r"it holds no config\.json"):
        script.main([f"--out={adapted}", "--resume"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "--run must name the folder of a run of jaxrl-po language"),
        (["--run={run}"], "--out= must be a folder that is new or empty"),
        (["--run={run}", "--out={run}"], r"--out=\S+ must be a folder that is new or empty"),
        (["--run={run}", "--out={run}/x", "--seed=2"], "--seed=2 must be below 2, the seeds of"),
    ],
)
def test_export_names_what_it_lacks(adapted, flags, message):
    with pytest.raises(UsageError, match=f"^{message}"):
        export.main([flag.format(run=adapted) for flag in flags])
