"""Measures the over-optimisation of a learned reward.

`python experiments/studies/overoptimisation.py`: PPO with all four models on addition. A reward
model is fitted to noisy comparisons of completions of the warm start, and the policy is trained on
the fitted reward with a KL penalty to the reference, for several coefficients β down to 0. All β of
a seed share its warm start and its reward model, and train in one program. As β falls, the score of
the reward model rises; the verifier, which training never uses, shows how much of the rise is real
(Gao et al. 2022, arXiv:2210.10760). Writes `table.txt`, `curves.npz` (each metric `[S, B, I]`:
seed, β, iteration) and `overoptimisation.png` under the folder `--out`.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from jaxrl_po import config, language
from jaxrl_po.algorithms import ppo, reference
from jaxrl_po.config import COUNT, NON_NEGATIVE, POSITIVE, SEED, UNIT, ConfigError, Interval, static
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import COLOURS, QUIET
from jaxrl_po.run.store import folder
from jaxrl_po.types import Learner, Problem

Curves = dict[str, npt.NDArray[np.float64]]
MEASURED = ("reward_model", "accuracy", "reference_kl", "response_length", "reward_model_accuracy")
BATCH = 64  # number of comparisons per step of the reward model
LAST = 10  # the table reports the mean over the last tenth of the iterations


@config.record
class Options:
    """Settings of the study."""

    coefficients: str = static("1,0.5,0.2,0.1,0.05,0", "β of the KL penalty, separated by commas")
    num_digits: int = static(
        1, "digits of an operand", unit="digits", within=Interval(1, language.tasks.MAX_DIGITS)
    )
    seeds: int = static(
        4, "warm starts, each with its own reward model", unit="seeds", within=COUNT
    )
    seed: int = static(0, "base seed", within=SEED)
    iterations: int = static(240, "iterations of each run", within=Interval(LAST))
    num_prompts: int = static(128, "prompts of one iteration, one completion each", within=COUNT)
    width: int = static(
        32, "width of policy, critic and reward model; their MLPs are twice as wide", within=COUNT
    )
    layers: int = static(1, "blocks of policy and critic", within=COUNT)
    reward_layers: int = static(2, "blocks of the reward model", within=COUNT)
    warm_start: float = static(
        0.4, "greedy accuracy at which the supervised warm start stops", within=UNIT
    )
    comparisons: int = static(
        4096, f"comparisons that a reward model is fitted to, a multiple of {BATCH}", within=COUNT
    )
    flip: float = static(
        0.2,
        "probability that the preference of a comparison is flipped",
        within=Interval(0.0, 0.5, open_high=True),
    )
    learning_rate: float = static(2e-3, "Adam's step size for actor and critic", within=POSITIVE)
    devices: str = static("auto", "devices to shard seeds over")
    out: str = static(
        "runs/overoptimisation", "folder for the results; an earlier measurement in it is replaced"
    )

    def betas(self) -> list[float]:
        """Returns the coefficients β in descending order.

        Raises:
          ConfigError: an entry of the list is not a number of at least 0.
        """
        try:
            betas = sorted({float(item) for item in self.coefficients.split(",")}, reverse=True)
        except ValueError:
            betas = []
        if not betas or not all(beta in NON_NEGATIVE for beta in betas):
            raise ConfigError(
                "coefficients",
                f"must be numbers from 0, separated by commas, got {self.coefficients!r}",
            )
        return betas

    def preferences(self) -> language.Preferences:
        """Returns the settings of the noisy comparisons."""
        return language.Preferences(
            comparisons=self.comparisons,
            batch_size=BATCH,
            epochs=4,
            flip=self.flip,
            learning_rate=3e-3,
        )

    def validate(self) -> None:
        """Checks conditions that the range of a field cannot express."""
        self.betas()
        if self.comparisons % BATCH:
            raise ConfigError(
                "comparisons", f"must be a multiple of {BATCH}, got {self.comparisons}"
            )


def build(options: Options) -> Problem:
    """Builds addition with a critic, and a reward model fitted to warm-start completions."""
    task = language.tasks.addition(options.num_digits)
    sizes = language.ModelSettings(
        width=options.width, layers=options.layers, mlp_width=2 * options.width
    )
    policy, critic = (sizes.build(task.tokenizer.size, outputs=outputs) for outputs in (0, 1))
    judge = dataclasses.replace(sizes, layers=options.reward_layers).build(
        task.tokenizer.size, outputs=1
    )
    warm = language.WarmStart(steps=10_000, accuracy=options.warm_start)
    problem = language.make_problem(
        task, policy, num_prompts=options.num_prompts, group_size=1, critic=critic, warm=warm
    )
    fit = functools.partial(
        language.reward_model.fit, judge, task, policy, settings=options.preferences()
    )
    return language.learned_reward(problem, task, judge, fit)


def run(options: Options) -> Curves:
    """Trains all β of all seeds; returns each metric of `MEASURED` as an array `[S, B, I]`."""
    problem = build(options)
    base = ppo.Config(
        gamma=1.0,
        lambda_=1.0,
        learning_rate=options.learning_rate,
        max_grad_norm=1.0,
        num_epochs=2,
        num_minibatches=2,
    )
    betas = jnp.array(options.betas(), jnp.float32)

    def make(beta: jax.Array | float) -> Learner:
        settings = reference.ReferenceSettings(enabled=True, kl_coefficient=beta)
        return reference.with_reference_kl(ppo.make(base, problem), problem, settings)

    def of_seed(key: jax.Array) -> dict[str, jax.Array]:
        state = make(0.0).init(key)

        def under(beta: jax.Array) -> dict[str, jax.Array]:
            _, logged = jax.lax.scan(
                lambda s, _: make(beta).step(s),
                state,
                None,
                length=options.iterations,
            )
            return {name: logged[name].value() for name in MEASURED}

        return jax.vmap(under)(betas)

    placement = parallel.choose(options.devices, num_seeds=options.seeds, num_rows=1)
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(
        jax.random.key(options.seed), jnp.arange(options.seeds)
    )
    curves = jax.jit(parallel.spread(jax.vmap(of_seed), placement))(keys)
    return {name: np.asarray(values, np.float64) for name, values in curves.items()}


def final(curves: Curves) -> Curves:
    """Returns final reward, accuracy and KL to the reference, nats per completion, `[S, B]`."""
    kl = curves["reference_kl"] * curves["response_length"]
    named = {"reward_model": curves["reward_model"], "accuracy": curves["accuracy"], "kl": kl}
    return {
        name: values[..., -(values.shape[-1] // LAST) :].mean(axis=-1)
        for name, values in named.items()
    }


def interval(values: npt.NDArray[np.float64]) -> str:
    """Formats the mean over seeds with the lowest and the highest seed."""
    return f"{values.mean():.3f} [{values.min():.3f}, {values.max():.3f}]"


def table(curves: Curves, betas: Sequence[float]) -> str:
    """Formats a line for each β, and a line for the warm start."""
    end = final(curves)
    lines = [f"{'β':>10} {'reward model':>24} {'accuracy':>24} {'KL of a completion':>24}"]
    start = [interval(curves[name][:, 0, 0]) for name in ("reward_model", "accuracy")]
    lines.append(f"{'warm start':>10} {start[0]:>24} {start[1]:>24} {'0':>24}")
    for i, beta in enumerate(betas):
        cells = [interval(end[name][:, i]) for name in ("reward_model", "accuracy", "kl")]
        lines.append(f"{beta:>10g} " + " ".join(f"{cell:>24}" for cell in cells))
    decided = curves["reward_model_accuracy"][:, 0, 0]
    return (
        "\n".join(
            [
                *lines,
                (
                    "share of fresh comparisons that the reward model decides rightly: "
                    f"{interval(decided)}"
                ),
            ]
        )
        + "\n"
    )


def save_figure(curves: Curves, betas: Sequence[float], path: Path) -> None:
    """Draws both scores along the runs, and their final values against the KL to the reference."""
    end = final(curves)
    with plotting.style():
        figure = Figure(figsize=(17, 4.4), layout="constrained", dpi=120)
        along, truth, far = figure.subplots(1, 3)
        for axes, name, title in (
            (along, "reward_model", "What the reward model says"),
            (truth, "accuracy", "What is right"),
        ):
            for i, beta in enumerate(betas):
                mean = curves[name][:, i].mean(axis=0)
                smooth = np.convolve(mean, np.ones(LAST) / LAST, mode="valid")
                axes.plot(
                    np.arange(len(smooth)) + LAST - 1,
                    smooth,
                    color=COLOURS[i % len(COLOURS)],
                    linewidth=2,
                    label=f"β = {beta:g}",
                )
            axes.set(
                title=title,
                xlabel="iteration",
                ylabel={"reward_model": "reward, std", "accuracy": "accuracy"}[name],
            )
        figure.legend(
            *along.get_legend_handles_labels(),
            loc="outside lower center",
            ncols=len(betas),
            fontsize=9,
        )
        proxy = far.twinx()
        order = np.argsort(end["kl"].mean(axis=0))
        for axes, name, colour in (
            (far, "accuracy", COLOURS[2]),
            (proxy, "reward_model", COLOURS[1]),
        ):
            axes.plot(
                end["kl"].mean(axis=0)[order],
                end[name].mean(axis=0)[order],
                color=colour,
                linewidth=2,
            )
            axes.plot(
                end["kl"].ravel(), end[name].ravel(), "o", color=colour, markersize=4, alpha=0.5
            )
            axes.yaxis.label.set_color(colour)
        far.axhline(
            curves["accuracy"][:, 0, 0].mean(), color=QUIET, linestyle=(0, (4, 3)), linewidth=1.2
        )
        far.set(
            title="Where the runs end; dashed: warm start",
            xlabel="KL(policy ‖ reference), nats of a completion",
            ylabel="accuracy",
        )
        proxy.set_ylabel("reward, std")
        proxy.grid(visible=False)
        plotting.write_figure(figure, path)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(
        argv, "overoptimisation.py", "Measures the over-optimisation of a learned reward.", Options
    )
    if options is None:
        return 0
    folder.inspect(options.out, resume=False, overwrite=True)
    with folder.claim(options.out, overwrite=False) as out:
        curves, betas = run(options), options.betas()
        text = table(curves, betas)
        (out / "table.txt").write_text(text, encoding="utf-8")
        folder.write_json(out / "options.json", flags.flatten({"": options}))
        arrays: dict[str, Any] = {"betas": betas, **curves}
        np.savez_compressed(out / "curves.npz", **arrays)
        save_figure(curves, betas, out / "overoptimisation.png")
    print(
        f"{options.num_digits}-digit addition, {options.seeds} seeds: "
        "mean [lowest, highest] over seeds",
        text,
        sep="\n",
        end="",
    )
    print(f"see {out / 'overoptimisation.png'}")
    return 0


if __name__ == "__main__":
    flags.run_script(main)
