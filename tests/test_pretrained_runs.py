"""Runs that begin with a pretrained folder: adapters, texts, and what ends in one line."""

import json
import re
import shutil

import families
import jax
import numpy as np
import pytest
import tiny
from scripts import everything

from jaxrl_po import run
from jaxrl_po.config import ConfigError
from jaxrl_po.language import pretrained
from jaxrl_po.run import jobs, launch, methods, models, prompts, runner
from jaxrl_po.run.checkpoint import Store
from jaxrl_po.run.commands import evaluate, export, report
from jaxrl_po.run.commands import language as script
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.metrics import read
from jaxrl_po.run.parallel import Placement

SMALL = [
    "--devices=1",
    "--seeds=2",
    "--eval_prompts=4",
    "--eval_samples=2",
    "--show=2",
    "--task=file",
    "--problem.num_prompts=2",
    "--problem.group_size=4",
    "--problem.max_new_tokens=4",
    "--config.num_minibatches=1",
    "--config.num_epochs=1",
    "--algorithm=grpo",
]
# A bonus, since the answers of a random model are never right.
BONUS = "--config.entropy_coefficient=0.1"
ADAPTED = ["--lora.rank=2", "--config.learning_rate=0.05", BONUS]
CONSTANT = re.compile('"0x[0-9A-F]+"')
ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": "w7"} for i in range(8, 28)]


@pytest.fixture(scope="module", autouse=True)
def started_backend():
    """Starts the backend, whose number of devices a script would choose otherwise."""
    return jax.local_device_count()


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--task.train={path}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A pretrained folder and prompts for it."""
    folder = tmp_path_factory.mktemp("place")
    families.write(folder / "model", "qwen2")
    write_rows(folder / "rows.jsonl", ROWS)
    return folder


def arguments(place, out, *further):
    return [
        *SMALL,
        f"--init_from={place / 'model'}",
        f"--task.train={place / 'rows.jsonl'}",
        f"--out={out}",
        *further,
    ]


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
    assert (
        script.main(
            arguments(place, out, *ADAPTED, "--total_steps=16", "--config.decay_iterations=3")
        )
        == 0
    )
    assert script.main([f"--out={out}", "--resume", "--total_steps=24"]) == 0
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
    half = ["--seeds=1", "--model.dtype=bfloat16", *ADAPTED]
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
    warm = ["--warm_start.steps=60", "--warm_start.batch_size=8", "--warm_start.learning_rate=0.02"]
    out = tmp_path / "run"
    assert script.main(arguments(place, out, "--lora.rank=4", *warm, "--total_steps=0")) == 0
    assert np.mean(read(out / "metrics.jsonl")[0]["greedy_accuracy"]) > 0.5


CHAT = [
    {"messages": [{"role": "user", "content": f"w{i}"}], "answer": 10 + i} for i in range(20, 40)
]


def test_messages_are_written_by_the_template_and_a_function_rewards_them(place, tmp_path):
    """Rows need no answer then, and the function scores the evaluation too."""
    rewards = tmp_path / "rewards.py"
    rewards.write_text(
        "def short(completions, prompts, **columns):\n"
        "    assert all(prompt.startswith('w') for prompt in prompts), prompts\n"
        "    assert set(columns) == {'completion_ids', 'level'}, columns\n"
        "    return [1.0 for text in completions]\n"
    )
    rows = [{"messages": row["messages"], "level": 1} for row in CHAT]
    train = write_rows(tmp_path / "chat.jsonl", rows)
    flags = [
        *arguments(place, tmp_path / "run", "--total_steps=8"),
        train,
        f"--reward={rewards}:short",
    ]
    with pytest.raises(UsageError, match=r"--problem\.max_new_tokens must be given where"):
        script.main([*flags, "--problem.max_new_tokens=0"])
    with pytest.raises(UsageError, match=r"--warm_start\.steps needs prompts with answers"):
        script.main([*flags, "--warm_start.steps=3"])
    assert script.main(flags) == 0
    row = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["greedy_accuracy"] == row["pass@2"] == [1.0, 1.0]
    shown = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert shown["score"] == 1.0
    assert shown["prompt"].startswith("w")
    evaluated = f"--out={tmp_path / 'e.json'}"
    assert evaluate.main([f"--run={tmp_path / 'run'}", evaluated]) == 0
    assert json.loads((tmp_path / "e.json").read_text())["greedy_accuracy"] == [1.0, 1.0]
    with pytest.raises(UsageError, match="line 1 lacks the column 'answer'"):
        script.main([*arguments(place, tmp_path / "other"), train])


def test_arguments_reach_the_template(place, tmp_path):
    train = write_rows(tmp_path / "chat.jsonl", CHAT)
    flags = arguments(
        place, tmp_path / "run", train, '--task.template_arguments={"tools": [" w9 "]}'
    )
    records = launch.parse(script.SCRIPT, flags, {})
    base = models.read_base(str(place / "model"), records["model"])
    task = models.make_task(records, base)
    prompt = task.sample(jax.random.key(0), False)
    kept = prompt.tokens[int(prompt.pad) :].tolist()
    assert 9 in kept
    assert 9 not in base.text.encode(row_of(CHAT[0]))
    assert task.columns(np.zeros(1, int))["answer"][0].isdigit()


def row_of(columns):
    return prompts.Row(columns, "row")


def test_a_text_gets_the_tokens_that_the_tokenizer_adds_and_a_chat_gets_none(place):
    from tokenizers import processors

    base = models.read_base(str(place / "model"), models.Computation())
    begin = processors.TemplateProcessing(
        single="<bos> $A",
        special_tokens=[("<bos>", base.text.tokenizer.rules.token_to_id("<bos>"))],
    )
    base.text.tokenizer.rules.post_processor = begin
    assert base.text.encode(row_of({"prompt": "w8"})) == (3, 8)
    chat = row_of({"messages": [{"role": "user", "content": "w8"}]})
    assert 3 not in base.text.encode(chat)


def spoilt(place, tmp_path, spoil, name="qwen2"):
    families.write(tmp_path / "model", name)
    spoil(tmp_path / "model")
    shutil.copy(place / "rows.jsonl", tmp_path / "rows.jsonl")
    return tmp_path


def rewrite(file, **changed):
    def spoil(folder):
        path = folder / file
        settings = (json.loads(path.read_text()) if path.exists() else {}) | changed
        path.write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))

    return spoil


def without_end(folder):
    (folder / "generation_config.json").unlink()
    rewrite("config.json", eos_token_id=None)(folder)
    (folder / "tokenizer_config.json").write_text("{}")


BAD_FOLDERS = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"--init_from=\S+ must be the folder of a run of jaxrl-po language or of a pretrained "
        r"model; it holds no config.json",
    ),
    "unknown family": (
        rewrite("config.json", model_type="mamba"),
        r"--init_from=\S+: model_type must be one of llama, .*, got 'mamba'",
    ),
    "no end": (without_end, r"--init_from=\S+: \S+ must name a token that ends a text"),
    "short context": (
        rewrite("config.json", max_position_embeddings=1),
        r"--task.train: \S+ line \d+: the prompt has 2 tokens, more than 1, the context of the mo",
    ),
    "context without room": (
        rewrite("config.json", max_position_embeddings=5),
        r"--problem.max_new_tokens: the longest prompt and completion have 6 tokens together, "
        r"more than 5, the context",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"--init_from=\S+: \S+ must hold model.safetensors",
    ),
}


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_a_bad_folder_ends_in_one_line_before_anything_is_written(place, tmp_path, bad):
    spoil, message = BAD_FOLDERS[bad]
    folder = spoilt(place, tmp_path, spoil)
    with pytest.raises(UsageError, match=f"^{message}"):
        script.main(arguments(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


BAD_FLAGS = {
    "--model.width=8": r"--model.width has no effect with --init_from=\S+: a pretrained model has",
    "--model.gated=false": r"--model.gated has no effect with --init_from",
    "--lora.rank=0": r"--lora.rank must lie in \[1, inf\), got 0",
    "--lora.rank=-1": r"--lora.rank must lie in",
    "--lora.alpha=8": r"--lora.alpha has no effect unless rank is given",
    "--lora.targets=query": r"--lora.targets has no effect unless rank is given",
    "--lora.rank=2 --lora.targets=embedding": "--lora.targets must be some of query, .* got embed",
    "--lora.rank=2 --lora.targets=,": "--lora.targets must be some of query, .* got nothing",
    "--lora.rank=2 --lora.alpha=0": "--lora.alpha must lie in",
    "--task=addition": "--task=addition has a vocabulary of its own: choose file, reasoning_gym",
    "--task.characters=ab": "--task.characters has no effect with the tokenizer of a pretrained",
    "--task.template_arguments=[1]": "--task.template_arguments must be a JSON object",
    "--task.template_arguments={": "--task.template_arguments must be JSON, got '{'",
    '--task.template_arguments={"a":1}': "--task.template_arguments has no effect unless",
    "--critic.width=8": "--critic.width is not a flag",
    "--reward=maths": "--reward=maths must be verifier, model, math, or .*did you mean math",
}


@pytest.mark.parametrize("given", BAD_FLAGS)
def test_a_bad_flag_ends_in_one_line_before_anything_is_written(place, tmp_path, given):
    flags = arguments(place, tmp_path / "run", *given.split())
    if "addition" in given:
        flags = [flag for flag in flags if not flag.startswith("--task.")]
    with pytest.raises(UsageError, match=f"^{BAD_FLAGS[given]}") as raised:
        script.main(flags)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_targets_that_the_model_lacks_are_named(tmp_path):
    flags = [*tiny.LANGUAGE, "--model.gated=false", "--lora.rank=2", "--lora.targets=gate"]
    with pytest.raises(UsageError, match=r"--lora\.targets must name matrices .* has no gate"):
        script.main([*flags, "--algorithm=grpo", f"--out={tmp_path / 'run'}"])


BAD_ROWS = {
    "both": ({"prompt": "w4", **CHAT[0]}, "line 21 must have prompt or messages, not both"),
    "no list": ({"messages": "w4", "answer": "w5"}, "messages must be a list of objects with role"),
    "no content": (
        {"messages": [{"role": "user"}], "answer": "w5"},
        "messages must be a list of objects with role",
    ),
    "empty": ({"messages": [], "answer": "w5"}, "messages must be a list of objects with role"),
    "answer": ({**CHAT[0], "answer": 0.5}, "answer must be text or a whole number, got 0.5"),
    "refused": (
        {"messages": [{"role": "tool", "content": "w4"}], "answer": "w5"},
        "line 21: chat template: role tool is unknown",
    ),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_named(place, tmp_path, bad):
    row, message = BAD_ROWS[bad]
    train = write_rows(tmp_path / "rows.jsonl", [*CHAT, row])
    with pytest.raises(UsageError, match=f"^--task.train: .*{message}"):
        script.main(arguments(place, tmp_path / "run", train))
    assert not (tmp_path / "run").exists()


def test_messages_need_a_template(place, tmp_path):
    train = write_rows(tmp_path / "chat.jsonl", CHAT)
    bare = spoilt(place, tmp_path, lambda folder: (folder / "chat_template.jinja").unlink())
    with pytest.raises(UsageError, match=r"line \d+: messages need a model with a chat template"):
        script.main(arguments(bare, tmp_path / "run", train))
    ours = ["--task=file", train, "--algorithm=grpo", f"--out={tmp_path / 'run'}"]
    with pytest.raises(UsageError, match=r"line \d+: messages need a pretrained model"):
        script.main(ours)


def test_another_base_is_refused_and_a_missing_one_is_named(place, tmp_path):
    families.write(tmp_path / "model", "qwen2")
    shutil.copy(place / "rows.jsonl", tmp_path / "rows.jsonl")
    out = tmp_path / "run"
    flags = ["--lora.rank=1", "--total_steps=8", "--show=0", "--eval_samples=0"]
    flags += ["--config.decay_iterations=2"]
    assert script.main(arguments(tmp_path, out, *flags)) == 0
    config = tmp_path / "model" / "config.json"
    kept = config.read_text()
    config.write_text(kept.replace("1000000.0", "500000.0"))
    changed = "holds adapters over another base: its digest was [0-9a-f]+ and is [0-9a-f]+ now"
    for call in (
        lambda: script.main([f"--out={out}", "--resume", "--total_steps=16"]),
        lambda: evaluate.main([f"--run={out}"]),
        lambda: export.main([f"--run={out}", f"--out={tmp_path / 'exported'}"]),
        lambda: script.main(
            [*arguments(tmp_path, tmp_path / "next"), f"--init_from={out}", "--total_steps=8"]
        ),
    ):
        with pytest.raises(UsageError, match=changed):
            call()
    with pytest.raises(ConfigError, match=changed):
        run.load(out)
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(
        UsageError, match=r"^--run=\S+: --init_from=\S+ must .*; it holds no config"
    ):
        evaluate.main([f"--run={out}"])
    with pytest.raises(UsageError, match=r"it holds no config\.json"):
        script.main([f"--out={out}", "--resume", "--total_steps=16"])


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
