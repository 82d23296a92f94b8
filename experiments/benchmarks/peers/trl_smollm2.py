"""Runs TRL's GRPOTrainer on the work of row `alone` of `experiments/studies/smollm2.py`, one seed.

Run the script in the environment of `trl_grpo.py`, with the files and the exported model of row
`before`:

    jaxrl-po export --run=runs/smollm2/before --checkpoint=latest --out=runs/smollm2/model
    trl/bin/python experiments/benchmarks/peers/trl_smollm2.py runs/smollm2

Prompts, reward, sizes, step size and adapters equal those of row `alone`. The script writes
`docs/studies/smollm2/trl.json`, in the format of the rows, after each iteration. The script does
not import jaxrl_po.
"""

import json
import re
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

ITERATIONS, TOKENS = 20, 6
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
Prompts = list[dict[str, str]]


def write(lines: list[dict[str, Any]], held_out: dict[str, list[float]]) -> None:
    """Writes the JSON file of the row with all results so far."""
    row = {"settings": {"seeds": 1, "algorithm": "grpo"}, "held_out": held_out, "lines": lines}
    Path("docs/studies/smollm2/trl.json").write_text(
        json.dumps(row, indent=2) + "\n", encoding="utf-8"
    )


class Lines(TrainerCallback):
    """Callback that stores accuracy, time and memory of each iteration."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.begun = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Stores the metrics of a step; see `TrainerCallback`."""
        if "reward" not in logs:
            return
        begun, self.begun = self.begun, time.perf_counter()
        line = {
            "iteration": state.global_step,
            "step": 64 * state.global_step,
            "accuracy": [logs["reward"]],
            "rss_gb": [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6],
            "processor_s": [time.process_time()],
            "time/seconds": self.begun - begun,
        }
        self.found.append(line)
        write(self.found, {})


def prompts(out: Path, name: str) -> Prompts:
    """Reads prompts and answers from one of the row's files, with the row's wording."""
    template = json.loads((out / "before/config.json").read_text(encoding="utf-8"))["task.template"]
    rows = map(json.loads, (out / "sums" / f"{name}.jsonl").read_bytes().splitlines())
    return [
        {"prompt": template.replace("{prompt}", row["prompt"]), "answer": str(row["answer"])}
        for row in rows
    ]


def score(text: str, answer: str, ended: bool) -> float:
    """Returns 1 for a complete completion whose last number is the answer, else 0."""
    numbers = re.findall(r"(?:(?<![\w.)])-)?\d+", text)
    return float(ended and bool(numbers) and numbers[-1] == answer)


def trained(model: Path, rows: Prompts, tokenizer: Any) -> tuple[Any, list[dict[str, Any]]]:
    """Trains the model; returns the model and the stored lines."""

    def reward(
        completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        ended = [tokenizer.eos_token_id in ids for ids in completion_ids]
        return [score(*each) for each in zip(completions, answer, ended, strict=True)]

    lines = Lines()
    with tempfile.TemporaryDirectory() as scratch:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=Dataset.from_list(rows),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=scratch,
                per_device_train_batch_size=64,
                num_generations=8,
                max_completion_length=TOKENS,
                max_steps=ITERATIONS,
                learning_rate=1e-3,
                warmup_steps=2,
                weight_decay=0.0,
                loss_type="grpo",
                beta=0.0,
                temperature=1.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            peft_config=LoraConfig(
                r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
            callbacks=[lines],
        )
        trainer.train()
    return trainer.model.eval(), lines.found


def accuracy(model: Any, tokenizer: Any, rows: Prompts, **how: Any) -> float:
    """Returns the share of prompts with a right answer, with one completion each."""
    scores = []
    for part in (rows[i : i + 64] for i in range(0, len(rows), 64)):
        asked = tokenizer([row["prompt"] for row in part], return_tensors="pt", padding=True)
        written = model.generate(**asked, max_new_tokens=TOKENS, **how)
        for row, ids in zip(part, written[:, asked["input_ids"].shape[1] :], strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            scores.append(score(text, row["answer"], tokenizer.eos_token_id in ids))
    return sum(scores) / len(scores)


def main() -> None:
    """Trains the model, evaluates it on held-out prompts, and writes the row's file."""
    out = Path(sys.argv[1])
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(out / "model", padding_side="left")
    model, lines = trained(out / "model", prompts(out, "train"), tokenizer)
    asked = prompts(out, "test")
    held_out = {
        "greedy": [accuracy(model, tokenizer, asked, do_sample=False)],
        "sampled": [accuracy(model, tokenizer, asked, **SAMPLED)],
    }
    write(lines, held_out)


if __name__ == "__main__":
    main()
