"""Is the accuracy a function of the entropy alone, R = −a·exp(H) + b, whatever the method?

Run the study by `python experiments/studies/claims/entropy_law.py --out=runs/entropy_law`. The
paper fits a and b to a run, and predicts the rest of the run from its first part.
"""

import numpy as np
import small
import trial
from claim import Arm, Claim, Comparison, Curves, Scores, crossed

COMPLETIONS, EVALUATIONS = 100 * 128, 50
EARLY = 0.36  # share of a run from which the paper predicts the run's end


def fitted(curves: Curves, share: float) -> tuple[Scores, Scores]:
    """Returns accuracies by the law, fitted to a run's first share, and by the run, `[S, E]`."""
    x, y = np.exp(curves["entropy"]), curves["accuracy"]
    early = slice(round(share * x.shape[1]))
    law = [np.polyfit(h[early], r[early], 1) for h, r in zip(x, y, strict=True)]
    return np.stack([np.polyval(line, h) for line, h in zip(law, x, strict=True)]), y


def explained(curves: Curves) -> Scores:
    """Computes the share of the variance of the accuracy that the law explains, R², `[S]`.

    An accuracy of n completions has a sampling variance R(1 − R) / n, which no law explains: the
    sampling variance is subtracted from both variances.
    """
    law, run = fitted(curves, 1.0)
    noise = (run * (1.0 - run)).mean(axis=1) / (COMPLETIONS / EVALUATIONS)
    return 1.0 - (((run - law) ** 2).mean(axis=1) - noise) / (run.var(axis=1) - noise)


def foretold(curves: Curves) -> Scores:
    """Computes minus the error in the final accuracy that the early-fitted law predicts, `[S]`."""
    law, run = fitted(curves, EARLY)
    return -np.abs(law[:, -5:].mean(axis=1) - run[:, -5:].mean(axis=1))


def claim() -> Claim:
    """Builds the claim, with the criteria for and against it."""
    arms = {
        name: Arm({"algorithm": name}, "config.learning_rate", small.STEP_SIZES)
        for name in ("grpo", "dr_grpo", "reinforce_pp")
    }
    return Claim(
        statement="The accuracy of a run is R = −a·exp(H) + b of its entropy H, so that its first "
        "third foretells its end, whatever the method",
        source="arXiv:2505.22617, eq. (1)",
        arms=arms,
        settings=crossed(small.TASKS, small.SIZES),
        comparisons=(
            *(Comparison(name, None, by=0.9) for name in arms),
            *(Comparison(name, None, by=-0.05, score=foretold) for name in arms),
        ),
        score=explained,
        measure="R² of the law (first three); minus the error of the foretold accuracy (others)",
        flags={
            "config.use_reference": False,
            "problem.num_prompts": 16,
            "problem.group_size": 8,
            "total_steps": COMPLETIONS,
            "eval_prompts": 128,
        },
        warm_start={"warm_start.accuracy": 0.4},
        evaluations=EVALUATIONS,
        limits="Models of two blocks whose entropy begins below one nat a token.",
    )


if __name__ == "__main__":
    trial.entry(claim())
