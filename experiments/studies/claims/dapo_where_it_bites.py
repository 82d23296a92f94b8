"""Does each of DAPO's ingredients help where it acts?

Run the study by `python experiments/studies/claims/dapo_where_it_bites.py
--out=runs/dapo_where_it_bites`. In docs/studies/ablation.md few ratios reach a clip, few
completions reach the budget, and most groups are informative, so that ablation cannot show the
effect of an ingredient. This study tests each ingredient alone, in a setting where the ingredient
acts: several steps per batch for clip-higher, a budget that completions reach for the filtering of
overlong completions, completions of many lengths for the soft length penalty and for the mean over
tokens, and, for dynamic sampling, prompts where two groups in five have equal outcomes.
"""

from typing import Any

import small
import trial
from claim import Arm, Claim, Comparison, crossed, last

OFF = {
    "config.clip_higher": False,
    "config.overlong_filtering": False,
    "config.soft_overlong": False,
    "config.token_level_loss": False,
    "config.dynamic_sampling": "off",
}
SUMS = {"task": "running_sum", "task.length": 5}
REGIMES: dict[str, dict[str, Any]] = {
    "several steps": {
        **small.TASKS["sorting"],
        "config.num_epochs": 4,
        "config.num_minibatches": 4,
    },
    # The budget is as long as a right answer; initially a quarter of the completions exceed the
    # budget.
    "tight budget": small.TASKS["sorting"],
    # Right answers have 3 tokens or more, demonstrations 8 to 16; the last 5 tokens of the budget
    # cost reward.
    "many lengths": SUMS,
    "one outcome": {"task": "addition", "task.num_digits": 3, "problem.group_size": 4},
}
ACTS: dict[str, tuple[dict[str, Any], str]] = {
    "clip_higher": ({"config.clip_higher": True}, "several steps"),
    "overlong_filtering": ({"config.overlong_filtering": True}, "tight budget"),
    "soft_overlong": (
        {"config.soft_overlong": True, "config.overlong_cache": 5},
        "many lengths",
    ),
    "token_level_loss": ({"config.token_level_loss": True}, "many lengths"),
    "dynamic_sampling": ({"config.dynamic_sampling": "reweight"}, "one outcome"),
}


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    arms = {"none": OFF} | {name: OFF | switches for name, (switches, _) in ACTS.items()}
    return Claim(
        statement="Each of DAPO's five ingredients alone raises the accuracy where it acts",
        source="DAPO, arXiv:2503.14476, table 1",
        arms={
            name: Arm(switches, "config.learning_rate", small.STEP_SIZES)
            for name, switches in arms.items()
        },
        settings=crossed(REGIMES, small.SIZES),
        comparisons=tuple(
            Comparison(
                name, "none", by=0.0, settings=tuple(f"{regime}, {size}" for size in small.SIZES)
            )
            for name, (_, regime) in ACTS.items()
        ),
        score=last("greedy_accuracy"),
        measure="held-out greedy accuracy after 12,800 completions",
        flags={
            "algorithm": "dapo",
            "problem.num_prompts": 16,
            "problem.group_size": 8,
            "total_steps": 100 * 128,
        },
        warm_start={"warm_start.accuracy": 0.3},
        limits="Dynamic sampling is DAPO's without a second batch: groups of one outcome are left "
        "out, and the others weigh more. One task for each ingredient, at two sizes.",
    )


if __name__ == "__main__":
    trial.entry(claim())
