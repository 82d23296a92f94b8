"""Is a critic worth its cost: PPO against GRPO, at equal completions?

`python experiments/studies/claims/worth_of_a_critic.py --out=runs/worth_of_a_critic`. The critic is
a second transformer of the policy's size: it doubles the memory of parameters and optimizer, and
has a pass of its own in sampling and updates. GRPO is compared at equal completions, and at twice
as many, which stand for equal time.
"""

import functools

import small

from jaxrl_po.run import claims, flags
from jaxrl_po.run.claims import Arm, Claim, Comparison
from jaxrl_po.run.commands import language, study

COMPLETIONS = 100 * 128


def claim() -> Claim:
    """What is claimed, and what would count for it and against it."""
    groups = {
        "algorithm": "grpo",
        "problem.num_prompts": 16,
        "problem.group_size": 8,
        "config.use_reference": False,
    }
    rate = "config.learning_rate", small.STEP_SIZES
    return Claim(
        statement="Groups make up for a critic: GRPO is as good as PPO after as many completions, "
        "and better after as much time",
        source="GRPO, arXiv:2402.03300, section 4.1",
        script=language.SCRIPT,
        arms={
            "PPO": Arm(
                {"algorithm": "ppo", "problem.num_prompts": 128, "total_steps": COMPLETIONS}, *rate
            ),
            "GRPO": Arm({**groups, "total_steps": COMPLETIONS}, *rate),
            "GRPO, twice": Arm({**groups, "total_steps": 2 * COMPLETIONS}, *rate),
        },
        settings=claims.crossed(small.TASKS, small.SIZES),
        comparisons=(
            Comparison("GRPO", "PPO", by=-0.02),
            Comparison("GRPO, twice", "PPO", by=0.0),
        ),
        score=claims.last("greedy_accuracy"),
        measure="held-out greedy accuracy at the end",
        flags={},
        warm_start={"warm_start.accuracy": 0.4},
        limits="Rewards at the end alone, where a critic has least to add; that twice the "
        "completions take equal time is assumed, not measured.",
    )


if __name__ == "__main__":
    flags.entry(functools.partial(study.main, claim=claim()))
