"""Does GRPO fall behind PPO in control, when its groups are episodes from one initial state?

Run the study by `python experiments/studies/claims/critic_in_control.py
--out=runs/critic_in_control`. The paper groups unrelated episodes of a batch; in this study the G
episodes of a group share their initial state. PPO and GRPO have the same policy, clip and number of
environment steps; for GRPO, steps that are simulated after the end of an episode, up to its time
limit, count too. Each method has the number of epochs that a sweep found for it on CartPole.
"""

import trial
from claim import Arm, Claim, Comparison, last

SHORT = "CartPole-v1"
LONG = "Acrobot-v1", "Pendulum-v1", "MountainCarContinuous-v0"
STEP_SIZES = "config.learning_rate", (3e-4, 1e-3, 3e-3, 1e-2)
PPO = {
    "algorithm": "ppo",
    "problem.num_envs": 16,
    "problem.num_steps": 125,
    "problem.normalize_observations": False,
    "problem.scale_rewards": True,
    "network.critic_width": 0,
    "config.gamma": 0.99,
    "config.lambda_": 0.95,
    "config.num_epochs": 4,
    "config.num_minibatches": 8,
    "config.decay_iterations": 0,
}
GRPO = {
    "algorithm": "grpo",
    "problem.num_prompts": 2,
    "problem.group_size": 8,
    "config.use_reference": False,
    "config.num_epochs": 10,
    "config.num_minibatches": 4,
}


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    end = last("greedy_return", of=3)
    return Claim(
        statement="Without a critic GRPO falls behind PPO in control, except on CartPole, also "
        "with groups of episodes from one initial state",
        source="arXiv:2511.03527",
        arms={"PPO": Arm(PPO, *STEP_SIZES), "GRPO": Arm(GRPO, *STEP_SIZES)},
        # Each episode of a group is simulated up to its time limit.
        settings={
            SHORT: {"env": SHORT, "problem.num_steps": 500, "total_steps": 320_000},
            LONG[0]: {"env": LONG[0], "problem.num_steps": 500, "total_steps": 320_000},
            LONG[1]: {
                "env": LONG[1],
                "problem.num_steps": 200,
                "total_steps": 480_000,
                "network.initial_log_std": 0.0,
            },
            LONG[2]: {
                "env": LONG[2],
                "problem.num_steps": 1000,
                "total_steps": 480_000,
                "network.initial_log_std": 0.5,
            },
        },
        ranges={
            SHORT: (0.0, 500.0),
            LONG[0]: (-500.0, -70.0),
            LONG[1]: (-1400.0, -150.0),
            LONG[2]: (0.0, 95.0),
        },
        comparisons=(
            Comparison("PPO", "GRPO", by=0.05, settings=LONG),
            Comparison("GRPO", "PPO", by=-0.05, settings=(SHORT,)),
        ),
        score=end,
        measure="normalised greedy return, mean of the last three of ten evaluations",
        flags={"config.entropy_coefficient": 0.0, "eval_episodes": 32},
        objective=end,
        limits="Four environments of gymnax, at one number of steps each.",
    )


if __name__ == "__main__":
    trial.entry(claim())
