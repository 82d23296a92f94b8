"""Measures bias, variance and sample efficiency of advantage estimators.

`python experiments/studies/estimators.py --gamma=0.95`: Monte Carlo, A3C(k) and GAE(λ) on a random
tabular MDP whose values, advantages and policy gradient are known exactly, with three critics: the
exact critic, a critic with errors, and zeros. Every estimator sees the same segments: T steps of a
continuing episode, bootstrapped by the critic at the end. The states are drawn from the policy's
stationary distribution, so that the mean of ∇log π · Â over the steps of a segment estimates (1 −
γ) ∇J.

Â differs from A(s, a) by the error of the return and by the baseline's error, V(s) − V̂(s). The
baseline's error is the same for all estimators, has no variance given s and does not bias the
policy gradient, so bias and mean squared error are reported for Â + V̂(s) against Q(s, a), along
with the bias against A(s, a). Writes `table.txt`, `table.json`, `cells.npz` (mean and variance of Â
− A, and visits, for each state, action and position) and `estimators.png` under `--out`.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import moments
import numpy as np
import segments
import tabular
from estimator_figure import CRITICS, Result, curves, save_figure
from moments import GradientScores, Statistics, exact_scores
from segments import GROUPS, Grid, Setting, Sums, stationary_distribution, total
from tabular import MDP

from jaxrl_po import config
from jaxrl_po.config import NON_NEGATIVE, UNIT, ConfigError, Interval, static
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.store import folder


@config.record
class Options:
    """Settings of the measurement."""

    num_states: int = static(8, "states of the MDP", within=Interval(2, 16))
    num_actions: int = static(3, "actions of the MDP", within=Interval(2, 8))
    stay: float = static(
        0.8,
        "probability that a step leaves the state as it is, beside the random transition",
        within=Interval(0.0, 0.99),
    )
    gamma: float = static(0.95, "discount", within=Interval(0.0, 0.999, open_low=True))
    num_steps: int = static(128, "length of a segment", unit="steps", within=Interval(2, 256))
    num_samples: int = static(
        8192,
        f"segments, a multiple of {GROUPS}; the critics share them",
        unit="segments",
        within=Interval(1024),
    )
    value_error: float = static(
        0.5,
        "root mean square error of the critic in error, relative to the standard deviation of V",
        within=NON_NEGATIVE,
    )
    lambdas: str = static("0,0.5,0.8,0.9,0.95,0.98,1", "λ of GAE, in [0, 1], separated by commas")
    batch: int = static(
        16,
        "segments per estimate of the policy gradient",
        unit="segments",
        within=Interval(1),
    )
    accuracy: float = static(
        0.1,
        "relative error of the policy gradient for which the table reports the steps",
        within=Interval(0.0, 1.0, open_low=True),
    )
    seed: int = static(
        0, "seed of the MDP, the policy, the critic's error and the segments", within=NON_NEGATIVE
    )
    out: str = static(
        "runs/estimators", "folder for the results; an earlier measurement in it is replaced"
    )

    def validate(self) -> None:
        """Checks conditions that the range of a field cannot express."""
        if self.num_samples % GROUPS:
            raise ConfigError(
                "num_samples", f"must be a multiple of {GROUPS}, got {self.num_samples}"
            )
        self.grid()

    def grid(self) -> Grid:
        """Returns the requested estimators.

        Raises:
          ConfigError: `lambdas` has an entry that is not a number in [0, 1].
        """
        try:
            lambdas = sorted({float(item) for item in self.lambdas.split(",")})
        except ValueError:
            lambdas = []
        if not lambdas or not all(lambda_ in UNIT for lambda_ in lambdas):
            raise ConfigError(
                "lambdas", f"must be numbers in [0, 1], separated by commas, got {self.lambdas!r}"
            )
        ks = tuple(2**i - 1 for i in range(self.num_steps.bit_length()) if 2**i < self.num_steps)
        return Grid(self.num_steps, ks, tuple(lambdas))


def setting(options: Options) -> Setting:
    """Draws the MDP, the policy and the errors of the critic."""
    rng = np.random.default_rng(options.seed)
    mdps = tabular.random_mdps(rng, 1, options.num_states, options.num_actions, options.gamma)
    transition, reward, _, gamma = (np.asarray(leaf)[0] for leaf in mdps)
    transition = (1 - options.stay) * transition + options.stay * np.eye(options.num_states)[
        :, None, :
    ]
    logits = rng.normal(size=reward.shape)
    policy = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    visits = stationary_distribution(np.einsum("sa,sat->st", policy, transition))
    mdp = MDP(*map(jnp.asarray, (transition, reward, visits, gamma)))
    value, advantage, gradient = segments.solve(mdp, jnp.asarray(logits))
    error = rng.normal(size=options.num_states)
    deviation = np.sqrt(visits @ np.square(value - visits @ np.asarray(value)))
    error *= options.value_error * deviation / np.sqrt(visits @ np.square(error))
    critics = np.stack([value, value + error, np.zeros_like(error)])
    return Setting(
        mdp,
        jnp.asarray(logits),
        jnp.asarray(policy),
        value,
        advantage,
        gradient,
        jnp.asarray(critics),
    )


def evaluate(options: Options) -> Result:
    """Runs the complete measurement in double precision."""
    grid = options.grid()
    with jax.enable_x64(True):
        problem = setting(options)
        sums = jax.device_get(
            segments.measure(
                problem, jax.random.key(options.seed), grid=grid, num_samples=options.num_samples
            )
        )
        problem = jax.device_get(problem)

    def statistics(sums: Sums) -> Statistics:
        gradient = moments.gradient_scores(problem, sums)
        relative = {"gradient_bias": gradient.bias, "gradient_error": gradient.error(options.batch)}
        return moments.scores(problem, moments.cells(problem, sums)) | relative

    exact = exact_scores(problem, grid.mixtures(), grid.horizons(), grid.num_steps)
    return Result(
        problem,
        grid,
        sums,
        moments.jackknife(statistics, sums),
        exact,
        GradientScores(
            np.square(exact["gradient_bias"]),
            moments.gradient_scores(problem, total(sums)).variance,
        ),
    )


def rows(result: Result, options: Options) -> list[dict[str, Any]]:
    """Returns a row for each critic and estimator."""
    steps = options.num_steps * result.gradients.segments(options.accuracy)
    return [
        {"critic": critic, "estimator": estimator, "steps": float(steps[c, e])}
        | {name: float(number[c, e]) for name, (number, _) in result.measured.items()}
        | {
            f"{name}_standard_error": float(error[c, e])
            for name, (_, error) in result.measured.items()
        }
        | {f"{name}_exact": float(number[c, e]) for name, number in result.exact.items()}
        for c, critic in enumerate(CRITICS)
        for e, estimator in enumerate(result.grid.names())
    ]


def table(result: Result, options: Options) -> str:
    """Formats the rows, a block per critic; `*` marks the smallest value of a column."""
    batch = f"{options.batch * options.num_steps:,} steps"
    lines = [
        f"{'':9} {'bias of':>8} {'bias of Â + V̂':>20} {'standard deviation':>22} {'rmse':>8}"
        f" {'policy gradient: relative bias, error of':>52}",
        f"{'':9} {'Â to A':>8} {'to Q':>13} {'exact':>7} {'':>14} {'exact':>7} {'to Q':>8}"
        f" {'bias':>13} {'exact':>6} {batch:>14} {f'steps to {options.accuracy:.0%}':>14}",
    ]
    everything, families = rows(result, options), curves(result)
    for c, critic in enumerate(CRITICS):
        error = result.setting.critics[c] - result.setting.value
        lines += [
            "",
            (
                f"critic: {critic}, root mean square error "
                f"{np.sqrt(result.setting.mdp.initial @ np.square(error)):.2f}"
            ),
        ]
        block = [row for row in everything if row["critic"] == critic]
        least = {
            name: min(row[name] for row in block) for name in ("rmse", "gradient_error", "steps")
        }
        for row in block:
            stars = {name: "*" if row[name] == x < np.inf else " " for name, x in least.items()}
            pairs = {
                name: f"{row[name]:.3f}±{row[f'{name}_standard_error']:.3f}"
                for name in result.measured
            }
            steps = f"{row['steps']:,.0f}" if np.isfinite(row["steps"]) else "never"
            lines.append(
                f"{row['estimator']:9} {row['advantage_bias']:>8.3f} {pairs['bias']:>13} "
                f"{row['bias_exact']:>7.3f} {pairs['deviation']:>14} "
                f"{row['deviation_exact']:>7.3f} {row['rmse']:>7.3f}{stars['rmse']} "
                f"{pairs['gradient_bias']:>13} {row['gradient_bias_exact']:>6.3f} "
                f"{pairs['gradient_error']:>13}{stars['gradient_error']} "
                f"{steps:>13}{stars['steps']}"
            )
        best = [(curve, int(curve.exact["rmse"][c].argmin())) for curve in families]
        found = (
            f"{curve.name}({curve.parameter[i]:.3g}) {curve.exact['rmse'][c, i]:.3f}"
            for curve, i in best
        )
        lines.append(f"{'':9} smallest exact rmse: {', '.join(found)}")
    lines += [
        "",
        (
            "±: upward standard error of the root of an unbiased square, so 0.02±0.02 is "
            "consistent with no bias. *: smallest of its column."
        ),
        "never: the exact bias alone exceeds the accuracy.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(
        argv,
        "estimators.py",
        "Measures bias, variance and sample efficiency of advantage estimators.",
        Options,
    )
    if options is None:
        return 0
    folder.inspect(options.out, resume=False, overwrite=True)
    with folder.claim(options.out, overwrite=False) as out:
        result = evaluate(options)
        text = table(result, options)
        (out / "table.txt").write_text(text, encoding="utf-8")
        folder.write_json(
            out / "table.json",
            {"options": flags.flatten({"": options}), "rows": rows(result, options)},
        )
        np.savez_compressed(
            out / "cells.npz", **moments.cells(result.setting, total(result.sums))._asdict()
        )
        save_figure(result, options.accuracy, out / "estimators.png")
    print(text, end="")
    print(f"see {out / 'estimators.png'}")
    return 0


if __name__ == "__main__":
    flags.run_script(main)
