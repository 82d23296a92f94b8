"""Builds a small pretrained model in a minute: `python examples/sums.py runs/sums`.

Writes word problems, trains a byte-level BPE on the problems' text, fits a small Llama to some of
the answers, and writes the files of a downloaded model: a folder with weights, tokenizer and chat
template (`model`), and also prompts with answers (`train.jsonl`, `test.jsonl`) for training by
`jaxrl-po language --init_from=runs/sums/model --task=file …`; see docs/pretrained.md.
"""

import argparse
import itertools
import json
import random
from pathlib import Path

import jax
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl_po import language
from jaxrl_po.language import pretrained
from jaxrl_po.language.warm_start import warm_start

PAD, END, USER, ASSISTANT = SPECIAL = ("<pad>", "<end>", "<user>", "<assistant>")
TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NAMES, THINGS = ("Ada", "Ben", "Cleo", "Dan"), ("apples", "books", "coins", "eggs")


def problems() -> list[dict[str, object]]:
    """Returns rows of messages and answers: sums and differences of digits."""
    rows = []
    for name, thing, a, b in itertools.product(NAMES, THINGS, range(10), range(10)):
        story, answer = (f"gets {b} more", a + b) if a < b or (a + b) % 2 else (f"gives {b}", a - b)
        asked = {"role": "user", "content": f"{name} has {a} {thing}, {story}. Now?"}
        rows.append({"messages": [asked], "answer": answer})
    random.Random(0).shuffle(rows)
    return rows


def train_tokenizer(rows: list[dict[str, object]]) -> Tokenizer:
    """Trains a byte-level BPE on the problems' text, with one token for each digit."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(row) for row in rows), trainer)
    return tokenizer


def main() -> None:
    """Fits the model and writes the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder, new or empty")
    parser.add_argument("--accuracy", type=float, default=0.45, help="where the fit stops")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows = problems()
    for name, part in (("train", rows[:1400]), ("test", rows[1400:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (out / f"{name}.jsonl").write_text(text, encoding="utf-8")

    rules = train_tokenizer(rows)
    pad, end = (rules.token_to_id(token) for token in (PAD, END))
    tokenizer = pretrained.TextTokenizer(
        rules, rules.get_vocab_size(), pad, (end,), {"eos_token": END, "pad_token": PAD}
    )
    template = pretrained.ChatTemplate(TEMPLATE, {"eos_token": END})
    examples = [
        language.tasks.Example(template.render(row["messages"]), str(row["answer"])) for row in rows
    ]
    task = language.tasks.table("sums", tokenizer, examples[:1400], examples[1400:])
    model = language.Transformer(tokenizer.size, width=64, layers=2, heads=4, mlp_width=128)

    @jax.jit
    def fit(key: jax.Array) -> tuple[object, jax.Array]:
        first, second, third = jax.random.split(key, 3)
        prompt = task.sample(first, False)
        params = model.init(first, prompt.tokens[None], prompt.pad[None])
        settings = language.WarmStart(steps=4000, accuracy=options.accuracy, learning_rate=2e-3)
        params = warm_start(model, params, task, settings, second)
        return params, language.warm_start.greedy_accuracy(model, params, task, third)

    params, accuracy = fit(jax.random.key(0))
    pretrained.save(out / "model", model, params, tokenizer, template, context=256)
    print(f"{out / 'model'}: {float(accuracy):.0%} of the training prompts answered correctly")


if __name__ == "__main__":
    main()
