"""Are two completions per prompt as good as sixteen, at equal numbers of completions?

The paper on 2-GRPO states that GRPO with G = 2 is as good as GRPO with G = 16. Run the study by
`python experiments/studies/claims/two_of_a_group.py --out=runs/two_of_a_group`.
"""

import small
import trial
from claim import Arm, Claim, Comparison, crossed, last

BATCH = 128  # completions per iteration


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    groups = {
        f"G = {size}": Arm(
            {"problem.group_size": size, "problem.num_prompts": BATCH // size},
            "config.learning_rate",
            small.STEP_SIZES,
        )
        for size in (2, 16)
    }
    return Claim(
        statement="GRPO with two completions of a prompt is as good as with sixteen, at equal "
        "numbers of completions",
        source="2-GRPO, arXiv:2510.00977",
        arms=groups,
        settings=crossed(small.TASKS, small.SIZES),
        comparisons=(Comparison("G = 2", "G = 16", by=-0.02),),
        score=last("greedy_accuracy"),
        measure="held-out greedy accuracy after 12,800 completions",
        flags={
            "algorithm": "grpo",
            "config.use_reference": False,
            "total_steps": 100 * BATCH,
            "eval_prompts": 512,
        },
        warm_start={"warm_start.accuracy": 0.4},
        limits="Models of two blocks, answers of one to three tokens, a verified reward of 0 or 1; "
        "the paper's models have 1.5 – 7 billion parameters.",
    )


if __name__ == "__main__":
    trial.entry(claim())
