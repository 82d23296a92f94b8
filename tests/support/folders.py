"""Writes a tiny pretrained folder with prompts, and lists the flags of small runs over it."""

import json

import families
from families import tokenizers

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
# The run has an entropy bonus, since the answers of a random model are never right.
BONUS = "--config.entropy_coefficient=0.1"
ADAPTED = ["--lora.rank=2", "--config.learning_rate=0.05", BONUS]
ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": "w7"} for i in range(8, 28)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--task.train={path}"


def write_place(folder):
    """Writes a tiny pretrained model and prompts for the model into a folder."""
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


# Flags of runs over a model with tools. A tool call is one word, so that a random policy makes many
# calls.
CALLS = {
    "guess0": '{"name":"guess","arguments":{"number":0}}',
    "guess1": '{"name":"guess","arguments":{"number":1}}',
    "guess2": '{"name":"guess","arguments":{"number":2}}',
    "raises": '{"name":"raises","arguments":{}}',
    "unknown": '{"name":"unheard","arguments":{}}',
    "arguments": '{"name":"guess","arguments":{"letter":"a"}}',
    "malformed": '{"name":"guess"',
}
WORDS = [
    *("<unk>", "<end>", "<pad>", "<bos>"),
    *("user:", "assistant:", "tool:", "tools:", "low", "high", "right", "go", "w1", "w2", "w3"),
    *(f"<call>{call}</call>" for call in CALLS.values()),
]
TOOLS_TEMPLATE = (
    "{%- if tools %}{{ 'tools: ' }}{% for tool in tools %}{{ tool.function.name + ' ' }}"
    "{% endfor %}{{ '\\n' }}{% endif %}\n"
    "{%- for message in messages %}\n"
    "{{- message.role + ': ' + message.content }}\n"
    "{%- for call in message.tool_calls or [] %}\n"
    "{{- ' <call>' + call.function | tojson + '</call>' }}\n"
    "{%- endfor %}\n"
    "{{- (' ' + eos_token if message.role == 'assistant' else '') + '\\n' }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
TOOL_ROWS = [
    {"prompt": " ".join(["go", *words]), "secret": i % 3}
    for i, words in enumerate(
        [["w1"], ["w2"], ["w3"], ["w1", "w2"], ["w2", "w3"], ["w3", "w1"], ["w1", "w1"], ["w2"] * 2]
    )
]


def write_tools(folder):
    """Writes a model with tools, and prompts for the model, into a folder."""
    model = families.write(folder / "model", "qwen2", vocab_size=len(WORDS), num_hidden_layers=1)
    rules = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    rules.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    rules.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in WORDS[:4]])
    rules.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text(TOOLS_TEMPLATE)
    write_rows(folder / "rows.jsonl", TOOL_ROWS)
    return folder
