"""A tiny pretrained folder with prompts for it, and the flags of small runs over it."""

import json

import families

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
ROWS = [{"prompt": f"w{i} w{i + 1}", "answer": "w7"} for i in range(8, 28)]


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"--task.train={path}"


def write_place(folder):
    """Writes both into a folder."""
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
