"""Do better estimates of a group's mean and standard deviation help, or sums divided by √G?

`python experiments/studies/claims/group_statistics.py --out=runs/group_statistics` tests extensions
that reviews of GRPO propose.
"""

import small
import trial
from claim import Arm, Claim, Comparison, crossed, last

BATCH = 128  # completions that every arm generates in an iteration


def group(size: int, **switches: object) -> Arm:
    """Builds an arm whose groups have one size."""
    sizes = {"problem.group_size": size, "problem.num_prompts": BATCH // size}
    asked = {f"config.{name}": value for name, value in switches.items()}
    return Arm(sizes | asked, "config.learning_rate", small.STEP_SIZES)


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    return Claim(
        statement="GRPO learns more from the same completions with running estimates of a prompt's "
        "mean and std, with some samples for the estimates alone, or with a sum over √G",
        source="proposed in reviews of GRPO as an extension",
        arms={
            "G = 4": group(4),
            "running": group(4, running_statistics=True),
            "G = 8": group(8),
            "4 of 8": group(8, extra_samples=4),
            "G = 16": group(16),
            "√16": group(16, group_divisor="root_size"),
        },
        settings=crossed(small.TASKS, small.SIZES),
        comparisons=(
            Comparison("running", "G = 4", by=0.0),
            Comparison("4 of 8", "G = 8", by=0.0),
            Comparison("√16", "G = 16", by=0.0),
        ),
        score=last("greedy_accuracy"),
        measure="held-out greedy accuracy after 12,800 completions",
        flags={
            "algorithm": "grpo",
            "config.use_reference": False,
            "problem.prompt_set": 1024,
            "total_steps": 100 * BATCH,
            "eval_prompts": 512,
        },
        warm_start={"warm_start.accuracy": 0.4},
        seeds=32,
        tuning_seeds=8,
        limits="A thousand prompts, each seen some five times.",
    )


if __name__ == "__main__":
    trial.entry(claim())
