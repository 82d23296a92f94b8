"""Does PPO's lead over TRPO come from its code-level additions?

Run the study by `python experiments/studies/claims/implementation_matters.py
--out=runs/implementation_matters`. The additions are value clipping, the decay of the step size,
scaled rewards, normalised observations and orthogonal initialisation; each method is trained with
all additions and without any. TRPO has no step size and no clipped loss, so it has only the last
three additions.
"""

import trial
from claim import Arm, Claim, Comparison, last

MUJOCO = "gymnasium:InvertedPendulum-v5"
EVALUATIONS = 10
SHORT = {"problem.num_envs": 4, "total_steps": 100 * 512}
LONG = {"problem.num_envs": 16, "total_steps": 100 * 2048}
# No arm uses the settings that were found for PPO alone on Pendulum.
SAME = {
    "network.initial_log_std": 0.0,
    "network.critic_width": 0,
    "config.gamma": 0.95,
    "config.lambda_": 0.95,
}
SCALES = {
    "problem.scale_rewards": True,
    "problem.normalize_observations": True,
    "network.initialization": "orthogonal",
}
NO_SCALES = {
    "problem.scale_rewards": False,
    "problem.normalize_observations": False,
    "network.initialization": "lecun_normal",
}
STEPPING = {"config.clip_value": True, "config.decay_iterations": 100}
NO_STEPPING = {"config.clip_value": False, "config.decay_iterations": 0}
STEP_SIZES = "config.learning_rate", (1e-4, 3e-4, 1e-3, 3e-3)
RADII = "config.max_kl", (3e-3, 1e-2, 3e-2, 1e-1)


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    # The score covers all of a run, since every arm solves the easy problems in the end.
    mean_return = last("greedy_return", of=EVALUATIONS)
    return Claim(
        statement="PPO leads TRPO by its code-level additions: with them TRPO is as good, and "
        "without them PPO is worse",
        source="Engstrom et al. 2020, arXiv:2005.12729",
        arms={
            "PPO": Arm({"algorithm": "ppo", **SCALES, **STEPPING}, *STEP_SIZES),
            "PPO, bare": Arm({"algorithm": "ppo", **NO_SCALES, **NO_STEPPING}, *STEP_SIZES),
            "TRPO": Arm({"algorithm": "trpo", **SCALES}, *RADII),
            "TRPO, bare": Arm({"algorithm": "trpo", **NO_SCALES}, *RADII),
        },
        settings={
            "CartPole-v1": {"env": "CartPole-v1", **SHORT},
            "Acrobot-v1": {"env": "Acrobot-v1", **SHORT},
            "Pendulum-v1": {"env": "Pendulum-v1", **LONG, **SAME},
            MUJOCO: {"env": MUJOCO, **SHORT},
        },
        ranges={
            "CartPole-v1": (0.0, 500.0),
            "Acrobot-v1": (-500.0, -70.0),
            "Pendulum-v1": (-1400.0, -150.0),
            MUJOCO: (0.0, 1000.0),
        },
        comparisons=(
            Comparison("PPO", "PPO, bare", by=0.05),
            Comparison("TRPO", "PPO", by=-0.05),
            Comparison("PPO, bare", "TRPO, bare", by=-0.05),
        ),
        score=mean_return,
        measure="normalised greedy return, mean of ten evaluations of 100 iterations",
        flags={"problem.num_steps": 128},
        objective=mean_return,
        evaluations=EVALUATIONS,
        seeds=32,
        tuning_seeds=8,
        seeds_in={MUJOCO: 10},
        limits="Of MuJoCo its simplest problem.",
    )


if __name__ == "__main__":
    trial.entry(claim())
