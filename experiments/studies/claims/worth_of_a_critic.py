"""Is a critic worth its cost: PPO against GRPO at equal completions, time and memory?

Run the study by `python experiments/studies/claims/worth_of_a_critic.py
--out=runs/worth_of_a_critic`. The critic is a second transformer of the policy's size. With a
critic, a completion takes twice the time and twice the memory, so GRPO gets twice the completions
at equal cost: in twice the iterations, or in batches twice as large.
"""

import small
import trial
from claim import Arm, Claim, Comparison, crossed, last

COMPLETIONS = 100 * 128


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    groups = {
        "algorithm": "grpo",
        "problem.num_prompts": 16,
        "problem.group_size": 8,
        "config.use_reference": False,
    }
    rate = "config.learning_rate", small.STEP_SIZES
    return Claim(
        statement="Groups make up for a critic: GRPO is as good as PPO after as many completions, "
        "and better in as much time and memory",
        source="GRPO, arXiv:2402.03300, section 4.1",
        arms={
            "PPO": Arm(
                {"algorithm": "ppo", "problem.num_prompts": 128, "total_steps": COMPLETIONS}, *rate
            ),
            "GRPO": Arm({**groups, "total_steps": COMPLETIONS}, *rate),
            "GRPO, twice": Arm({**groups, "total_steps": 2 * COMPLETIONS}, *rate),
            "GRPO, batches of twice": Arm(
                {**groups, "problem.num_prompts": 32, "total_steps": 2 * COMPLETIONS}, *rate
            ),
        },
        settings=crossed(small.TASKS, small.SIZES),
        comparisons=(
            Comparison("GRPO", "PPO", by=-0.02),
            Comparison("GRPO, twice", "PPO", by=0.0),
            Comparison("GRPO, batches of twice", "PPO", by=0.0),
        ),
        score=last("greedy_accuracy"),
        measure="held-out greedy accuracy at the end",
        flags={},
        warm_start={"warm_start.accuracy": 0.4},
        limits="Rewards at the end alone, where a critic has least to add.",
    )


if __name__ == "__main__":
    trial.entry(claim())
