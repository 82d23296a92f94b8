"""Measures TRL's GRPOTrainer on the work of `language.py`: seconds of one iteration.

Install and run in a separate environment:

    python -m venv trl && trl/bin/pip install -r experiments/benchmarks/peers/trl.txt
    trl/bin/python experiments/benchmarks/peers/trl_grpo.py --width=64 --layers=2 --new_tokens=5

An iteration samples and scores a completion for each row and takes `--updates` gradient steps on
DAPO's loss, in float32 on a CPU; `--lora_rank` trains adapters. The model is a Llama with random
weights and the requested sizes; prompts are additions if the vocabulary has only digits, and random
words if the vocabulary is larger. The first iteration does not count; the result is the median time
of the other iterations. The last line is one JSON object. The script does not import jaxrl_po.
"""

import argparse
import itertools
import json
import os
import random
import tempfile
import time
from statistics import median
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

SYMBOLS = "0123456789+="
ROWS = 4096


class Clock(TrainerCallback):
    """Callback that stores the time at the end of each gradient step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *arguments: Any, **further: Any) -> None:
        """See `TrainerCallback`."""
        self.times.append(time.perf_counter())


def additions() -> tuple[dict[str, int], Any, list[dict[str, str]]]:
    """Returns the vocabulary of three-digit addition, the pattern to split text, and prompts."""
    rng, rows = random.Random(0), []
    for _ in range(ROWS):
        a, b = rng.randrange(1000), rng.randrange(1000)
        rows.append({"prompt": f"{a:03d}+{b:03d}=", "answer": str(a + b).zfill(4)[::-1]})
    return {c: i for i, c in enumerate(SYMBOLS)}, pre_tokenizers.Split("", "isolated"), rows


def words(size: int, prompt_tokens: int) -> tuple[dict[str, int], Any, list[dict[str, str]]]:
    """Returns a vocabulary of words, the pattern that splits text, and prompts of random words."""
    rng = random.Random(0)
    rows = [
        {"prompt": " ".join(f"w{rng.randrange(size)}" for _ in range(prompt_tokens)), "answer": ""}
        for _ in range(256)
    ]
    return {f"w{i}": i for i in range(size)}, pre_tokenizers.WhitespaceSplit(), rows


def reward(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """Returns 1 for a right sum.

    If the prompt has no answer, a number computed from the completion.
    """
    return [
        float(text.startswith(right)) if right else len(set(text.split())) % 7 / 6.0
        for text, right in zip(completions, answer, strict=True)
    ]


def main() -> None:
    """Trains and prints one JSON object."""
    parser = argparse.ArgumentParser()
    for name, default in {
        "width": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 0,
        "mlp_width": 0,
        "vocabulary": 0,
        "prompt_tokens": 64,
        "new_tokens": 5,
        "num_prompts": 64,
        "group_size": 8,
        "updates": 2,
        "num_microbatches": 1,
        "iterations": 10,
        "threads": 0,
        "lora_rank": 0,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    vocabulary, splitter, rows = (
        words(options.vocabulary - 2, options.prompt_tokens) if options.vocabulary else additions()
    )
    size = len(vocabulary) + 2
    core = Tokenizer(
        models.WordLevel(vocabulary | {"<eos>": size - 2, "<pad>": size - 1}, unk_token="<pad>")
    )
    core.pre_tokenizer = splitter
    if not options.vocabulary:
        core.decoder = decoders.Fuse()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=options.width,
            intermediate_size=options.mlp_width or 4 * options.width,
            num_hidden_layers=options.layers,
            num_attention_heads=options.heads,
            num_key_value_heads=options.kv_heads or options.heads,
            tie_word_embeddings=bool(options.vocabulary),
            max_position_embeddings=2048,
            bos_token_id=size - 2,
            eos_token_id=size - 2,
            pad_token_id=size - 1,
        )
    )
    adapters = None
    if options.lora_rank:
        adapters = LoraConfig(
            r=options.lora_rank,
            lora_alpha=2 * options.lora_rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
        )
    clock = Clock()
    with tempfile.TemporaryDirectory() as out:
        trainer = GRPOTrainer(
            model=model,
            processing_class=PreTrainedTokenizerFast(
                tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", padding_side="left"
            ),
            train_dataset=Dataset.from_list(rows),
            reward_funcs=reward,
            args=GRPOConfig(
                output_dir=out,
                per_device_train_batch_size=options.num_prompts
                * options.group_size
                // options.num_microbatches,
                gradient_accumulation_steps=options.num_microbatches,
                steps_per_generation=options.num_microbatches,
                num_generations=options.group_size,
                num_iterations=options.updates,
                max_completion_length=options.new_tokens,
                max_steps=options.updates * (options.iterations + 1),
                learning_rate=1e-5,
                loss_type="dapo",
                epsilon=0.2,
                epsilon_high=0.28,
                beta=0.0,
                temperature=1.0,
                gradient_checkpointing=False,
                bf16=False,
                use_cpu=True,
                logging_steps=1000,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
            ),
            peft_config=adapters,
            callbacks=[clock],
        )
        trainer.train()
    ends = clock.times[options.updates - 1 :: options.updates]
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    row = {
        "seconds_per_iteration": round(median(seconds), 4),
        "parameters": sum(p.numel() for p in model.parameters()),
        "threads": torch.get_num_threads(),
        "device": "cpu",
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
