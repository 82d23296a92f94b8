"""Builds a small model that calls a tool: `python examples/guessing_model.py runs/guessing`.

Fits a small Llama to dialogues with the environment of `guessing.py`, in which all guesses are
drawn at random, and writes the files of a downloaded model: a folder with weights, tokenizer and a
chat template that describes tools (`model`), and also prompts (`prompts.jsonl`) for training with
`jaxrl-po language --tools=examples/guessing.py:Guessing …`; see docs/dialogues.md.
"""

import argparse
import json
import random
from pathlib import Path

import jax
from guessing import Guessing
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxrl_po import language
from jaxrl_po.language import pretrained
from jaxrl_po.language.warm_start import warm_start
from jaxrl_po.run.host.dialogues.schemas import schema_of

PAD, END, START = SPECIAL = ("<pad>", "<|im_end|>", "<|im_start|>")
TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool.function.name }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QUESTION = "Find my number."


def call(number: int) -> dict[str, object]:
    """Returns a message that calls the tool with a guess."""
    guess = {"name": "guess", "arguments": {"number": number}}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": guess}],
    }


def dialogue(drawn: random.Random) -> list[dict[str, object]]:
    """Returns a game of random guesses, cut after three guesses."""
    game = Guessing()
    said = game.reset(drawn.randrange(16))
    messages = [{"role": "user", "content": QUESTION + said}]
    while not game.found and game.guesses < 3:
        number = drawn.randrange(16)
        messages += [call(number), {"role": "tool", "content": game.guess(number)}]
    return [*messages, {"role": "assistant", "content": "Done."}] if game.found else messages


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Trains a byte-level BPE on the dialogues, with few tokens for the text around a number."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def main() -> None:
    """Fits the model and writes the model's folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="folder, new or empty")
    parser.add_argument("--steps", type=int, default=300, help="of the fit")
    options = parser.parse_args()
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": QUESTION, "secret": i % 16, "game": i} for i in range(400)]
    (out / "prompts.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )

    drawn, template = random.Random(0), pretrained.ChatTemplate(TEMPLATE, {"eos_token": END})
    tools = [schema_of(Guessing().guess, "guess")]
    dialogues = [dialogue(drawn) for _ in range(3000)]
    # The model learns to write the next message after all previous messages.
    examples = {}
    for messages in dialogues:
        last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
        said = template.render(messages[:last], tools=tools)
        whole = template.render(messages[: last + 1], tools=tools, add_generation_prompt=False)
        examples[said] = whole.removeprefix(said).removesuffix(f"{END}\n")
    rules = train_tokenizer([said + answer for said, answer in examples.items()])
    pad, end = (rules.token_to_id(token) for token in (PAD, END))
    tokenizer = pretrained.TextTokenizer(
        rules, rules.get_vocab_size(), pad, (end,), {"eos_token": END, "pad_token": PAD}
    )
    pairs = [language.tasks.Example(*pair) for pair in examples.items()]
    task = language.tasks.table("guessing", tokenizer, pairs[64:], pairs[:64])
    model = language.Transformer(tokenizer.size, width=64, layers=2, heads=4, mlp_width=128)

    @jax.jit
    def fit(key: jax.Array) -> object:
        first, second = jax.random.split(key)
        prompt = task.sample(first, False)
        params = model.init(first, prompt.tokens[None], prompt.pad[None])
        settings = language.WarmStart(steps=options.steps, batch_size=64, learning_rate=3e-3)
        return warm_start(model, params, task, settings, second)

    params = fit(jax.random.key(0))
    pretrained.save(out / "model", model, params, tokenizer, template, context=1024)
    print(f"{out / 'model'}: prompts of at most {task.prompt_length} tokens, {len(pairs)} messages")


if __name__ == "__main__":
    main()
