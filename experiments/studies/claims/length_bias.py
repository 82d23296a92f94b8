"""Does GRPO's division by completion length make wrong completions longer, and is there a cure?

Run the study by `python experiments/studies/claims/length_bias.py --out=runs/length_bias`. Neither
arm divides by the rewards' standard deviation, so the arms differ only in the division by length.
"""

import small
import trial
from claim import Arm, Claim, Comparison, crossed, last

STEP_SIZES = "config.learning_rate", small.STEP_SIZES
EACH, FIXED = "divided by its length", "divided by the budget"


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    length, accuracy = last("wrong_length"), last("greedy_accuracy")
    return Claim(
        statement="Dividing each completion's loss by its length makes wrong completions longer; "
        "dividing by a constant does not, and is as accurate",
        source="Dr. GRPO, arXiv:2503.20783",
        arms={
            EACH: Arm({"algorithm": "grpo", "config.scale": "none"}, *STEP_SIZES),
            FIXED: Arm({"algorithm": "dr_grpo"}, *STEP_SIZES),
        },
        settings=crossed(
            {
                "sums of 5": {"task": "running_sum", "task.length": 5},
                "sums of 6 modulo 5": {
                    "task": "running_sum",
                    "task.length": 6,
                    "task.modulus": 5,
                },
            },
            small.SIZES,
        ),
        comparisons=(
            Comparison(EACH, FIXED, by=0.5, score=length),
            Comparison(FIXED, EACH, by=-0.02, score=accuracy),
        ),
        score=accuracy,
        measure="held-out greedy accuracy (second), mean tokens of wrong completions (first)",
        flags={
            "config.use_reference": False,
            "problem.max_new_tokens": 24,
            "problem.num_prompts": 16,
            "problem.group_size": 8,
            "total_steps": 100 * 128,
            "eval_prompts": 512,
        },
        warm_start={"warm_start.accuracy": 0.4},
        limits="Completions have at most 24 tokens; the paper's have thousands, where the bias has "
        "more room.",
    )


if __name__ == "__main__":
    trial.entry(claim())
