"""Study of R1-Zero at a small scale: a transformer that imitates searches learns to search better.

`python experiments/studies/countdown_zero.py` writes traces of an imperfect search of countdown,
fits a transformer to them (`sft`), and improves it by GRPO from outcomes, all seeds in one program,
with the verifier `right`. Before and after GRPO, the model answers 256 problems over unseen numbers
once each. A study that is run again resumes. The study writes its table, its picture and its
figures to `docs`.
"""

import ast
import itertools
import json
import operator
import random
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import smollm2

from jaxrl_po import config
from jaxrl_po.cli import evaluate
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.store import folder

PAGE, PICTURE = Path("docs/studies/countdown_zero.md"), Path("docs/countdown_zero.png")
RESULTS = Path("docs/studies/countdown_zero.json")
# Targets and values are encoded in one token: 35 is Z.
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# Largest number in a problem; largest target or value of a trace.
LARGEST, BOUND = 9, len(DIGITS) - 1
PATIENCE = 4  # largest number of tries in a trace, which then answers with its last try
# Number of held-out problems; share of the triples of numbers that are held out.
HELD_OUT, SHARE = 256, 0.25
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
SIGNS = dict(zip("+-*", OPERATIONS.values(), strict=True))
# Completions per iteration and seed, 16 prompts × 8; token budget of a completion.
BATCH, BUDGET = 128, 96
MODEL = {"model.width": 96, "model.layers": 3, "model.mlp_width": 256, "devices": "1"}
SHARED = {**MODEL, "task": "file", "task.characters": DIGITS + "+-*()=,:<>!?"}


@config.record
class Options:
    """Settings of the study."""

    traces: int = static(200_000, "demonstrations that are fitted, each once", within=COUNT)
    iterations: int = static(240, "iterations of GRPO", within=COUNT)
    seeds: int = static(3, "parallel runs of GRPO from the same fitted model", within=COUNT)
    out: str = static("runs/countdown_zero", "folder for the runs")


class Try(NamedTuple):
    """Expression that the search tries.

    Attributes:
      steps: computation as a trace writes it, `3*2=6+7=D`.
      expression: expression as an answer writes it, `(3*2)+7`.
      value: value of the expression.
    """

    steps: str
    expression: str
    value: int


def tries(numbers: Sequence[int]) -> list[Try]:
    """Lists each (a ∘ b) ∘ c with a ≥ b, whose values lie in 0 … BOUND."""
    found = set()
    for (a, b, c), first, second in itertools.product(
        itertools.permutations(numbers), SIGNS, SIGNS
    ):
        x = SIGNS[first](a, b)
        value = SIGNS[second](x, c)
        if a >= b and x <= BOUND and 0 <= value <= BOUND:
            steps = f"{a}{first}{b}={DIGITS[x]}{second}{c}={DIGITS[value]}"
            found.add(Try(steps, f"({a}{first}{b}){second}{c}", value))
    return sorted(found)


def trace(numbers: Sequence[int], target: int, draw: random.Random) -> str:
    """Writes tries in random order, up to the target or the limit of tries, and an answer.

    A mark after each try states whether the try is right (`!`), above the target (`>`) or below it
    (`<`).
    """
    all_of_them, made = tries(numbers), ""
    for each in draw.sample(all_of_them, min(draw.randint(1, PATIENCE), len(all_of_them))):
        made += each.steps + "!><"[(each.value > target) - (each.value < target)]
        if each.value == target:
            break
    return f"{made}:{each.expression}"


def right(completions: Sequence[str], numbers: Any, target: Any, **_: Any) -> list[float]:
    """Returns 1 if the text after the last colon uses each number once and reaches the target."""
    return [
        float(reaches(text.rpartition(":")[2] if ":" in text else "", *problem))
        for text, *problem in zip(completions, numbers, target, strict=True)
    ]


def reaches(expression: str, numbers: Sequence[int], target: int) -> bool:
    """Returns whether an expression of sums, differences and products has the target value."""
    used = []

    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)):
                used.append(number)
                return number
            case ast.BinOp(left, sign, right) if type(sign) in OPERATIONS:
                return OPERATIONS[type(sign)](value(left), value(right))
        raise ValueError

    try:
        # A warning about text such as 3(4), which calls a number.
        with warnings.catch_warnings(action="ignore"):
            found = value(ast.parse(expression, mode="eval").body)
    except (ValueError, SyntaxError):
        return False
    return found == target and sorted(used) == sorted(numbers)


def write(out: Path, traces: int) -> dict[str, str]:
    """Writes traces, training problems and held-out problems.

    Returns the paths of their files by name.

    Problems over the same numbers are all in one split, training or held-out.
    """
    draw = random.Random(0)
    triples = list(itertools.combinations_with_replacement(range(1, LARGEST + 1), 3))
    draw.shuffle(triples)
    sides = triples[round(SHARE * len(triples)) :], triples[: round(SHARE * len(triples))]
    train, test = (
        [
            (draw.sample(each, 3), target)
            for each in side
            for target in sorted({one.value for one in tries(each)})
        ]
        for side in sides
    )
    files = {
        "train": train,
        "test": draw.sample(test, HELD_OUT),
        "traces": draw.choices(train, k=traces),
    }
    out.mkdir(parents=True, exist_ok=True)
    for name, problems in files.items():
        lines = []
        for numbers, target in problems:
            row: dict[str, Any] = {"numbers": numbers, "target": target}
            if name == "traces":
                row = {"completion": trace(numbers, target, draw)}
            prompt = f"{','.join(map(str, numbers))}={DIGITS[target]}?"
            lines.append(json.dumps({"prompt": prompt, **row}) + "\n")
        (out / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {name: str(out / f"{name}.jsonl") for name in files}


def stages(options: Options, files: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Returns the flags of each stage: the supervised fit, its evaluation, and training by GRPO."""
    asked = {
        **{**SHARED, "algorithm": "grpo", "reward": right, "log_every": 1},
        **{"reward.require_end": True, "problem.max_new_tokens": BUDGET},
        **{"task.train": files["train"], "task.test": files["test"], "task.test_fraction": 0.04},
        **{"problem.num_prompts": BATCH // 8, "eval_samples": 1, "eval_every": 10},
        "init_from": str(Path(options.out) / "fit"),
    }
    steps = {"config.kl_coefficient": 0.1, "config.num_epochs": 1, "config.epsilon_high": 0.28}
    return {
        "fit": {
            **{**SHARED, "algorithm": "sft", "task.train": files["traces"]},
            **{"task.test_fraction": 0.005, "log_every": 20, "eval_every": 10},
            **{"config.learning_rate": 2e-3, "config.warm_up_iterations": 50},
            "config.num_microbatches": 4,  # each microbatch is cut to its longest trace
            **{"config.decay_iterations": options.traces // 64, "total_steps": options.traces},
        },
        "before": asked | {"seeds": 1, "total_steps": 0},
        "after": {
            **{**asked, **steps, "config.learning_rate": 3e-4, "config.warm_up_iterations": 3},
            **{"config.decay_iterations": 0, "seeds": options.seeds},
            "total_steps": BATCH * options.iterations,
        },
    }


def cell(scores: Sequence[float]) -> str:
    """Formats mean and interval in per cent.

    Over the problems for a single model, else over seeds.
    """
    if len(scores) > 1:
        return smollm2.interval(scores)
    hits = round(scores[0] * HELD_OUT)
    return smollm2.interval([1.0] * hits + [0.0] * (HELD_OUT - hits))


def write_page() -> None:
    """Writes the table into the page, and draws the picture."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))
    table = ["| | iterations | greedy, % | sampled, % | tokens, greedy |", "|---" * 5 + "|"]
    for name, row in rows.items():
        scores = " | ".join(cell(row["held_out"][how]) for how in ("greedy", "sampled"))
        done, length = row["lines"][-1]["iteration"], np.mean(row["greedy_length"])
        table.append(f"| {name} | {done} | {scores} | {length:.1f} |")
    smollm2.write_table(PAGE, table)
    lines = rows["after"]["lines"]
    right_ones = [
        plotting.Series("greedy_accuracy", "greedy"),
        plotting.Series("avg@1", "at T = 1"),
    ]
    length, x = [plotting.Series("response_length", "training")], "completions, each seed"
    panels = [
        plotting.Panel(lines, right_ones, "held-out problems", x, "share right"),
        plotting.Panel(lines, length, "length of completions", x, "tokens"),
    ]
    plotting.save_panels(panels, PICTURE)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Fits a transformer to traces of a search, and improves it by GRPO."
    options = flags.ask(argv, "countdown_zero.py", summary, Options)
    if options is None:
        return 0
    out = Path(options.out)
    found = {}
    for name, given in stages(options, write(out, options.traces)).items():
        smollm2.train(out / name, given)
        if name != "fit":
            if status := evaluate.main([f"--run={out / name}", "--checkpoint=latest"]):
                return status
            asked = json.loads((out / name / "evaluation.json").read_text(encoding="utf-8"))
            found[name] = smollm2.measured(out / name, given | {"reward": "right"})
            found[name]["greedy_length"] = asked["greedy_length"]
    folder.write_json(RESULTS, found)
    write_page()
    return 0


if __name__ == "__main__":
    flags.run_script(main)
