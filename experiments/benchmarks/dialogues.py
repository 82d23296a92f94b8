"""Times the same dialogue game in the compiled program, on the host and by TRL, alternately.

`python experiments/benchmarks/dialogues.py` times iterations of GRPO on Mastermind (3 symbols of 4)
with a small random model, in up to three ways: with the library's own task, whose dialogues are
part of the compiled program; through `--tools`, with the game as a Python class and a chat
template; and, with `--trl_python=path/to/python`, with the same Python class through TRL's
`environment_factory`. A tool call is one token of the model's vocabulary, so that a random policy
can play. In the compiled program a message is a guess in four tokens; on the host and in TRL a
message has up to four tokens, most of them tool calls, and the chat template makes prompts and
replies longer.
"""

import dataclasses
import json
import runpy
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

from jaxrl_po import config, language
from jaxrl_po.config import COUNT, static
from jaxrl_po.language import pretrained
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags, settings
from jaxrl_po.run.experiment import language as command
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import Length

PEERS = Path(__file__).parent / "peers"
GAME = runpy.run_path(str(PEERS / "mastermind_game.py"))
MARK = "row: "  # prefix of the lines that TRL's script prints
BUDGET = 4  # largest number of tokens in a message
SPECIAL = ("<unk>", "<pad>", "<|im_end|>", "<|im_start|>")
PLAIN = ("user", "assistant", "system", "<tool_response>", "</tool_response>", *"0123")
TEMPLATE = (
    "{% if tools %}<|im_start|> system {% for tool in tools %}{{ tool | tojson }} {% endfor %}"
    "<|im_end|>\n{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}<|im_start|> user\n<tool_response>\n{{ message.content }}\n"
    "</tool_response>{% else %}<|im_start|> {{ message.role }}\n{{ message.content }}{% endif %}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)


@config.record
class Options:
    """Sizes of the benchmark."""

    width: int = static(64, "width of the transformer", within=COUNT)
    layers: int = static(2, "blocks of the transformer", within=COUNT)
    num_prompts: int = static(16, "prompts of an iteration", within=COUNT)
    group_size: int = static(4, "dialogues of each prompt", within=COUNT)
    reply_length: int = static(32, "tokens of the longest reply on the host", within=COUNT)
    rounds: int = static(10, "timed iterations of each implementation", within=COUNT)
    trl_python: str = static("", "Python with TRL, to time TRL too")
    json: bool = static(False, "print one JSON object as the last line")


def write_model(folder: Path, options: Options, template: str) -> None:
    """Writes a random model, with one token for each tool call, and prompts for the model."""
    calls = [
        f'<tool_call>{{"name":"guess","arguments":{{"code":"{code}"}}}}</tool_call>'
        for code in GAME["CODES"]
    ]
    words = {word: i for i, word in enumerate([*SPECIAL, *PLAIN, *calls])}
    rules = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rules.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    pad, end = words["<pad>"], words["<|im_end|>"]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
    }
    tokenizer = pretrained.TextTokenizer(rules, len(words), pad, (end,), settings)
    model = language.Transformer(
        tokenizer.size, width=options.width, layers=options.layers, mlp_width=4 * options.width
    )
    params = model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    chat = pretrained.ChatTemplate(template, {"eos_token": "<|im_end|>"})
    pretrained.save(folder / "model", model, params, tokenizer, chat, context=8192)
    rows = [
        {"prompt": GAME["QUESTION"], "secret": code, "game": game}
        for game in range(4)
        for code in GAME["CODES"]
    ]
    (folder / "rows.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )


def of_command(options: Options, *arguments: str) -> tuple[Callable[[], float], list[Any]]:
    """Returns a function that times one iteration of `jaxrl-po language`.

    The function also returns its metrics.
    """
    argv = [
        "--algorithm=grpo",
        "--seeds=1",
        "--devices=1",
        "--show=0",
        "--eval_prompts=1",
        "--config.num_epochs=1",
        "--config.num_minibatches=1",
        f"--problem.num_prompts={options.num_prompts}",
        f"--problem.group_size={options.group_size}",
        f"--problem.max_new_tokens={BUDGET}",
        *arguments,
    ]
    config, place = settings.parse_settings(command, argv).config, Placement(1, 1, 1)
    job = command.build(config, place)
    job = dataclasses.replace(job, length=Length(2**30, 1))
    compiled: Any = programs.compile_programs(job)
    state, rows = compiled.init(job.start), list[Any]()

    def tick() -> float:
        nonlocal state
        given = state, np.int32(1), print, threading.Event()
        seconds, (state, row, *_) = timing.clock(compiled.chunk, *given)
        rows.append({name: float(np.asarray(mean.metric())[0, 0]) for name, mean in row.items()})
        return seconds

    return tick, rows


def of_trl(options: Options, folder: Path) -> tuple[Callable[[], float], list[Any]]:
    """Returns a function that times one iteration of TRL.

    TRL's process waits between iterations.
    """
    process = subprocess.Popen(
        [
            *(options.trl_python, PEERS / "trl_dialogues.py", f"--model={folder / 'model'}"),
            f"--out={folder / 'trl'}",
            f"--num_prompts={options.num_prompts}",
            f"--group_size={options.group_size}",
            f"--budget={BUDGET}",
            f"--reply_length={options.reply_length}",
            f"--steps={options.rounds + 8}",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    assert process.stdin is not None
    assert process.stdout is not None
    rows = list[Any]()

    def tick() -> float:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        for line in process.stdout:
            if line.startswith(MARK):
                rows.append(json.loads(line.removeprefix(MARK)))
                return float(rows[-1]["seconds"])
        raise SystemExit(f"{options.trl_python} ended, with status {process.wait()}")

    return tick, rows


def measure(options: Options) -> dict[str, Any]:
    """Measures the median time of each way over equally many iterations, timed alternately."""
    with tempfile.TemporaryDirectory() as place:
        folder, template = Path(place), TEMPLATE
        if options.trl_python:
            template = subprocess.run(
                [options.trl_python, PEERS / "trl_dialogues.py", "--template"],
                capture_output=True,
                text=True,
                encoding="utf-8",
                check=True,
            ).stdout
        write_model(folder, options, template)
        made = {
            "program": of_command(
                options,
                "--task=mastermind",
                "--warm_start.steps=0",
                f"--model.width={options.width}",
                f"--model.layers={options.layers}",
                f"--model.mlp_width={4 * options.width}",
            ),
            "host": of_command(
                options,
                f"--init_from={folder / 'model'}",
                "--task=file",
                f"--task.train={folder / 'rows.jsonl'}",
                f"--tools={PEERS / 'mastermind_game.py'}:Mastermind",
                f"--tools.turns={GAME['TURNS']}",
                f"--tools.reply_length={options.reply_length}",
            ),
        }
        if options.trl_python:
            made["trl"] = of_trl(options, folder)
        for tick, _ in made.values():
            # Compiles the training program, and the program that samples the first replies.
            tick(), tick()
        for _, rows in made.values():
            rows.clear()
        seconds = timing.in_turns({name: tick for name, (tick, _) in made.items()}, options.rounds)
        rows_of = {name: rows[-options.rounds :] for name, (_, rows) in made.items()}
    dialogues = options.num_prompts * options.group_size
    row: dict[str, Any] = {}
    for name, times in seconds.items():
        tokens = [each.get("response_length", each.get("tokens")) for each in rows_of[name]]
        row[f"{name}_seconds"] = round(median(times), 4)
        row[f"{name}_dialogues_per_second"] = round(dialogues / median(times), 1)
        row[f"{name}_tokens_per_second"] = round(dialogues * median(tokens) / median(times), 1)
        if name != "program":
            row[f"{name}_calls"] = round(median(each["calls"] for each in rows_of[name]), 2)
        if name != "host":
            ratio = np.median(np.divide(times, seconds["host"]))
            row[f"{name}_over_host"] = round(float(ratio), 3)
    row["outside"] = round(median(each["outside"] for each in rows_of["host"]), 3)
    return row


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark from command-line arguments; returns the exit status."""
    summary = "Times dialogues in the program, on the host and by TRL."
    return timing.measured(argv, "benchmarks/dialogues.py", summary, Options, measure)


if __name__ == "__main__":
    flags.run_script(main)
