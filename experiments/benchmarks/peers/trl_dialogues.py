"""Runs TRL's GRPOTrainer with `environment_factory` on the game of `mastermind_game.py`.

Install in a separate environment and run with the folder that `benchmarks/dialogues.py` writes:

    python -m venv trl && trl/bin/pip install torch==2.13.0 trl==1.16.0 transformers==5.23.0

The script prints the chat template to use (`--template`), or trains: each line on standard input
starts an iteration, and after each iteration the script prints one JSON object. The script does not
import jaxrl_po.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from mastermind_game import CODES, QUESTION, TURNS, Mastermind
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_chat_template

MARK = "row: "


class Steps(TrainerCallback):
    """Callback that waits for an input line before each step and prints the step's time."""

    def on_step_begin(self, *arguments: Any, **further: Any) -> None:
        """See `TrainerCallback`."""
        if not sys.stdin.readline():
            os._exit(0)
        self.begun = time.perf_counter()

    def on_step_end(self, *arguments: Any, **further: Any) -> None:
        """See `TrainerCallback`."""
        self.seconds = time.perf_counter() - self.begun

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """See `TrainerCallback`."""
        row = {"seconds": self.seconds, "tokens": logs.get("completions/mean_length")}
        row["calls"] = logs.get("tools/call_frequency")
        print(MARK + json.dumps(row), flush=True)


def main() -> None:
    """Runs the script from command-line arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--template", action="store_true")
    for name in ("model", "out"):
        parser.add_argument(f"--{name}", default="")
    for name in ("num_prompts", "group_size", "budget", "reply_length", "steps"):
        parser.add_argument(f"--{name}", type=int, default=1)
    options = parser.parse_args()
    if options.template:
        print(qwen3_chat_template, end="")
        return
    torch.manual_seed(0)
    rows = [
        {"prompt": [{"role": "user", "content": QUESTION}], "secret": CODES[i % len(CODES)]}
        for i in range(options.num_prompts * options.steps)
    ]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        environment_factory=Mastermind,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=options.out,
            per_device_train_batch_size=options.num_prompts * options.group_size,
            num_generations=options.group_size,
            max_completion_length=TURNS * (options.budget + options.reply_length),
            generation_kwargs={"max_new_tokens": options.budget},
            max_tool_calling_iterations=TURNS,
            max_steps=options.steps,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
            bf16=False,
            beta=0.0,
            learning_rate=1e-6,
        ),
        callbacks=[Steps()],
    )
    trainer.train()


if __name__ == "__main__":
    main()
