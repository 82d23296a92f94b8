"""Tests inputs of runs over a pretrained folder: texts and chats, and errors in one line."""

import json
import shutil

import families
import jax
import numpy as np
import pytest
import tiny
from folders import arguments, write_place, write_rows

from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import prompts
from jaxrl_po.run.devices.memory import DeviceMemory
from jaxrl_po.run.experiment import flags as flags_lib
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import models, policies
from jaxrl_po.run.experiment import settings as settings_lib
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store.metrics import read


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Returns a folder with a pretrained model and prompts for the model."""
    return write_place(tmp_path_factory.mktemp("place"))


CHAT = [
    {"messages": [{"role": "user", "content": f"w{i}"}], "answer": 10 + i} for i in range(20, 40)
]


def test_template_writes_messages_and_function_rewards_them(place, tmp_path, monkeypatch):
    """Rows need no answer with a reward function, which scores evaluations too; the test
    does not train."""
    monkeypatch.setattr(programs, "check_job", lambda job: None)
    monkeypatch.setattr(programs, "compile_with_score", lambda *_: (None, DeviceMemory(0, None)))
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
        *arguments(place, tmp_path / "run", "--total_steps=0", "--eval_samples=0"),
        train,
        f"--reward={rewards}:short",
    ]
    plain = write_rows(tmp_path / "plain.jsonl", [{"prompt": f"{i}"} for i in range(20)])
    alone = ["--task=file", plain, flags[-1], f"--out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"problem\.max_new_tokens: must be given where"):
        launch.language(alone)
    with pytest.raises(
        ConfigError, match=r"warm_start\.steps: must be 0 where the prompts have no answers"
    ):
        launch.language([*flags, "--warm_start.steps=3"])
    assert launch.language(flags) == 0
    row = read(tmp_path / "run" / "metrics.jsonl")[0]
    assert row["greedy_accuracy"] == [1.0, 1.0]
    shown = read(tmp_path / "run" / "samples.jsonl")
    assert {example["decoding"] for example in shown} == {"greedy", "sampled"}
    for example in shown:
        assert example["score"] == 1.0
        assert example["prompt"].startswith("w")
    evaluated = f"--out={tmp_path / 'e.json'}"
    assert evaluate.main([f"--run={tmp_path / 'run'}", evaluated]) == 0
    assert json.loads((tmp_path / "e.json").read_text())["greedy_accuracy"] == [1.0, 1.0]
    with pytest.raises(ConfigError, match="line 1: lacks the column 'answer'"):
        launch.language([*arguments(place, tmp_path / "other"), train])


def test_arguments_reach_the_template(place, tmp_path):
    train = write_rows(tmp_path / "chat.jsonl", CHAT)
    flags = arguments(
        place, tmp_path / "run", train, '--task.template_arguments={"tools": [" w9 "]}'
    )
    config = settings_lib.parse_settings(script, flags).config
    base = models.read_base(str(place / "model"), config.model)
    task = models.make_task(config, base)
    prompt = task.sample(jax.random.key(0), False)
    assert 9 in prompt.tokens[int(prompt.pad) :].tolist()
    assert 9 not in base.text.encode(row_of(CHAT[0]))
    assert task.columns(np.zeros(1, int))["answer"][0].isdigit()


def test_prompts_are_worded_as_the_flags_say(place, tmp_path):
    train = write_rows(
        tmp_path / "plain.jsonl", [{"prompt": f"w{i}", "answer": 1} for i in range(8, 20)]
    )

    def asked(*flags):
        config = settings_lib.parse_settings(
            script, arguments(place, tmp_path / "run", train, *flags)
        ).config
        base = models.read_base(str(place / "model"), config.model)
        task = models.make_task(config, base)
        prompt = task.row(0)
        return base.text, prompt.tokens[int(prompt.pad) :].tolist(), task.answer_length, config

    text, plain, *_ = asked()
    read = lambda *messages: list(text.encode(row_of({"messages": list(messages)})))  # noqa: E731
    [word] = [text.tokenizer.decode(plain)]
    user, system = ({"role": "user", "content": word}, {"role": "system", "content": "w9"})
    assert asked("--task.template=chat")[1] == read(user) != plain
    assert asked("--task.system=w9")[1] == read(system, user) != read(user)
    assert asked("--task.template=w20 {prompt} w21")[1] == [20, *plain, 21]
    # A sentence fits the budget: the answer of one word does not set the budget.
    *_, config = asked("--problem.max_new_tokens=0")
    base = models.read_base(str(place / "model"), config.model)
    settings = script.problem_settings(config, models.make_task(config, base), base)
    assert settings.max_new_tokens == 64
    for flag, message in (
        ("--task.template=w9", r"^task.template: must be chat or a text with \{prompt\}, got 'w9'"),
        ('--task.template_arguments={"a": 1}', r"^task.template_arguments: has no effect unless"),
    ):
        with pytest.raises(ConfigError, match=message):
            asked(flag)
    own = [{"messages": [system, user | {"content": f"w{i}"}], "answer": 1} for i in range(8, 20)]
    write_rows(tmp_path / "plain.jsonl", own)
    with pytest.raises(ConfigError, match=r"line \d+: a system message stands beside task.system"):
        asked("--task.system=w9")
    with pytest.raises(ConfigError, match=r"line \d+: messages have no need of task.template"):
        asked("--task.template=chat")


def test_adapters_have_own_settings_and_short_warm_up(place, tmp_path):
    def config(*flags):
        given = arguments(place, tmp_path / "run", *flags)
        return settings_lib.settle(script, settings_lib.parse_settings(script, given), None).method

    whole, adapted = config("--total_steps=1600"), config("--total_steps=1600", "--lora.rank=2")
    assert adapted.learning_rate > 10 * whole.learning_rate
    assert whole.warm_up_iterations == 20  # the total is 200 iterations
    assert whole.use_reference
    assert not adapted.use_reference
    assert config("--total_steps=80000").warm_up_iterations == 30
    given = {"config.warm_up_iterations": 50}
    read = settings_lib.parse_settings(
        script, arguments(place, tmp_path / "run", *flags_lib.written(given))
    )
    assert settings_lib.settle(script, read, None).method.warm_up_iterations == 50


def test_start_is_read_once_and_has_presets(place, tmp_path, monkeypatch, written_down):
    calls, root = [], models.root
    monkeypatch.setattr(models, "root", lambda *given: calls.append(given) or root(*given))
    out = tmp_path / "run"
    flags = [flag for flag in arguments(place, out, "--lora.rank=2") if "num_epochs" not in flag]
    written_down(launch.language, flags)
    assert calls == [(str(place / "model"),)]
    resolved = json.loads((out / "config.json").read_text())["resolved"]
    assert resolved["tuned"] == {
        "config.learning_rate": 5e-4,
        "config.num_epochs": 1,
        "config.use_reference": False,
    }
    assert resolved["tuned"].keys() <= {
        name for name, origin in resolved["origin"].items() if origin == "preset"
    }


def test_prompt_paths_work_from_elsewhere(place, tmp_path, monkeypatch):
    write_rows(tmp_path / "chat.jsonl", CHAT)
    monkeypatch.chdir(tmp_path)
    flags = [
        *arguments(place, tmp_path / "run"),
        "--task.train=chat.jsonl",
        "--task.test=more.jsonl",
    ]
    task = settings_lib.parse_settings(script, flags).config.task
    assert (task.train, task.test) == (f"{tmp_path}/chat.jsonl", f"{tmp_path}/more.jsonl")


def row_of(columns):
    return prompts.Row(columns, "row")


def test_tokenizer_adds_tokens_to_text_not_to_chat(place):
    from tokenizers import processors

    base = models.read_base(str(place / "model"), models.Computation())
    begin = processors.TemplateProcessing(
        single="<bos> $A",
        special_tokens=[("<bos>", base.text.tokenizer.rules.token_to_id("<bos>"))],
    )
    base.text.tokenizer.rules.post_processor = begin
    assert base.text.encode(row_of({"prompt": "w8"})) == (3, 8)
    # A loaded policy reads its prompt as in training, and BOS is not written twice.
    assert policies._encode(base.text.tokenizer, "w8") == [3, 8]
    assert policies._encode(base.text.tokenizer, "<bos> w8") == [3, 8]
    assert 3 not in base.text.encode(row_of({"messages": [{"role": "user", "content": "w8"}]}))


def spoilt(place, tmp_path, spoil, name="qwen2"):
    families.write(tmp_path / "model", name)
    spoil(tmp_path / "model")
    shutil.copy(place / "rows.jsonl", tmp_path / "rows.jsonl")
    return tmp_path


def rewrite(**changed):
    def spoil(folder):
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changed))

    return spoil


BAD_FOLDERS = {
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        r"init_from: must be the folder of a run of jaxrl-po language or of a pretrained "
        r"model, or a GGUF file, got \S+; it holds no config.json",
    ),
    "unknown family": (
        rewrite(model_type="mamba"),
        r"init_from: \S+: model_type must be one of llama, .*, got 'mamba'",
    ),
    "short context": (
        rewrite(max_position_embeddings=1),
        r"task.train: \S+ line \d+: the prompt has 2 tokens, more than 1, the context of the mo",
    ),
    "context without room": (
        rewrite(max_position_embeddings=5),
        r"problem.max_new_tokens: the longest prompt and completion have 6 tokens together, "
        r"more than 5, the context",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"init_from: \S+: \S+ must hold model.safetensors",
    ),
}


@pytest.mark.parametrize("bad", BAD_FOLDERS)
def test_bad_folder_gives_one_line_before_any_writing(place, tmp_path, bad):
    spoil, message = BAD_FOLDERS[bad]
    folder = spoilt(place, tmp_path, spoil)
    with pytest.raises(ConfigError, match=f"^{message}"):
        launch.language(arguments(folder, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


BAD_FLAGS = {
    "--model.width=8": r"model.width: has no effect with init_from = \S+: a pretrained model has",
    "--lora.rank=0": r"lora.rank: must lie in \[1, inf\), got 0",
    "--lora.rank=2 --lora.targets=embedding": "lora.targets: must be some of query, .* got embed",
    "--task=addition": "task: addition has its own vocabulary: choose random, file, reasoning_gym "
    "or a task of your own for a pretrained model",
    "--task.characters=ab": "task.characters: has no effect with a pretrained model's tokenizer",
    "--task.template_arguments=[1]": "task.template_arguments: must be a JSON object",
    "--task.template_arguments={": "task.template_arguments: must be a JSON object, got '{'",
    '--task.template_arguments={"a":1}': "task.template_arguments: has no effect unless",
    "--critic.width=8": "critic.width: is not a setting",
    "--reward=maths": "reward: must be verifier, model, math, .*or .* got maths; did you mean math",
}


@pytest.mark.parametrize("given", BAD_FLAGS)
def test_bad_flag_gives_one_line_before_any_writing(place, tmp_path, given):
    flags = arguments(place, tmp_path / "run", *given.split())
    if "addition" in given:
        flags = [flag for flag in flags if not flag.startswith("--task.")]
    with pytest.raises(ConfigError, match=f"^{BAD_FLAGS[given]}") as raised:
        launch.language(flags)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_targets_that_the_model_lacks_are_named(tmp_path):
    flags = [*tiny.LANGUAGE, "--model.gated=false", "--lora.rank=2", "--lora.targets=gate"]
    with pytest.raises(ConfigError, match=r"lora\.targets: must name matrices .* has no gate"):
        launch.language([*flags, "--algorithm=grpo", f"--out={tmp_path / 'run'}"])


BAD_ROWS = {
    "both": ({"prompt": "w4", **CHAT[0]}, "line 21: must have prompt or messages, not both"),
    "no list": ({"messages": "w4", "answer": "w5"}, "messages must be a list of messages, got str"),
    "no content": (
        {"messages": [*CHAT[0]["messages"], {"role": "user"}], "answer": "w5"},
        r"line 21: message \d of \d: content must be text, got null$",
    ),
    "a call": (
        {
            "messages": [{"role": "user", "content": None, "tool_calls": [{"name": "f"}]}],
            "answer": "w5",
        },
        "line 21: message 1 of 1: content must be text, got null; tool calls are not read$",
    ),
    "parts": (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}], "answer": "w5"},
        "line 21: message 1 of 1: content must be text, got a list$",
    ),
    "no object": (
        {"messages": ["w4"], "answer": "w5"},
        "message 1 of 1 must be an object with role and content, got str",
    ),
    "empty": (
        {"messages": [], "answer": "w5"},
        "messages must be a list of messages, got an empty list",
    ),
    "refused": (
        {"messages": [{"role": "tool", "content": "w4"}], "answer": "w5"},
        r"line 21: chat_template: line \d: role tool is unknown",
    ),
}


@pytest.mark.parametrize("bad", BAD_ROWS)
def test_a_bad_row_is_named(place, tmp_path, bad):
    row, message = BAD_ROWS[bad]
    train = write_rows(tmp_path / "rows.jsonl", [*CHAT, row])
    with pytest.raises(ConfigError, match=f"^task.train: .*{message}"):
        launch.language(arguments(place, tmp_path / "run", train))
    assert not (tmp_path / "run").exists()


def test_messages_need_a_template(place, tmp_path):
    train = write_rows(tmp_path / "chat.jsonl", CHAT)
    bare = spoilt(place, tmp_path, lambda folder: (folder / "chat_template.jinja").unlink())
    with pytest.raises(ConfigError, match=r"line \d+: messages need a model with a chat template"):
        launch.language(arguments(bare, tmp_path / "run", train))
    ours = ["--task=file", train, "--algorithm=grpo", f"--out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=r"line \d+: messages need a pretrained model"):
        launch.language(ours)
