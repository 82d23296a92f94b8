"""The picture of `estimators.py`: bias and variance of the estimators, measured and exact."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import NullLocator
from moments import Array, GradientScores, Pair, Statistics, exact_scores
from segments import Grid, Setting, Sums

from jaxrl_po.run.figures import plotting
from jaxrl_po.run.figures.plotting import COLOURS, INK, QUIET

CRITICS = ("exact", "in error", "zeros")
TINY = 1e-12  # squared values below this threshold are rounding error


class Result(NamedTuple):
    """All values that the table, the figure and the tests read.

    Attributes:
      setting: MDP, policy and critics.
      grid: estimators to compare.
      sums: sums of errors, squares and gradients over every group of segments.
      measured: map from a name to a number and its standard error, `[C, E]` each: the roots of
        `scores`, and `gradient_bias` and `gradient_error` (of one batch), both relative to the
        exact gradient.
      exact: map from a name to a number `[C, E]`, computed by enumeration.
      gradients: scores of the policy gradient, with its exact bias.
    """

    setting: Setting
    grid: Grid
    sums: Sums
    measured: dict[str, Pair]
    exact: Statistics
    gradients: GradientScores


class Curve(NamedTuple):
    """Family of estimators on a fine grid of its parameter, with exact values.

    Attributes:
      name: `GAE` or `A3C`.
      parameter: λ or k, `[N]`.
      reach: horizontal position in the figure, in steps: 1 / (1 − γλ) or k + 1, `[N]`.
      exact: exact values `[C, N]` by the name of the quantity.
    """

    name: str
    parameter: Array
    reach: Array
    exact: Statistics


def curves(result: Result) -> list[Curve]:
    """Computes curves of GAE for λ from 0 to 1, and of A3C for k from 0 to the longest horizon."""
    gamma, num_steps = float(result.setting.mdp.gamma), result.grid.num_steps
    reach = np.geomspace(1.0, 1.0 / (1.0 - gamma), 121)
    lambdas = np.clip((1.0 - 1.0 / reach) / gamma, 0.0, 1.0)
    steps = np.unique(np.geomspace(1, num_steps, 61).round().astype(int))
    gae = exact_scores(result.setting, lambdas, np.full(lambdas.shape, num_steps), num_steps)
    a3c = exact_scores(result.setting, np.ones(steps.shape), steps, num_steps)
    return [Curve("GAE", lambdas, reach, gae), Curve("A3C", steps - 1, steps, a3c)]


class Look(NamedTuple):
    """Line style of a curve."""

    colour: str
    width: float
    label: str


# The broad pale line (the sum) is drawn behind the larger of bias² and variance.
LOOKS = {
    "rmse": Look("#c9ced3", 7.0, "mean squared error of Â + V̂(s) against Q"),
    "deviation": Look(COLOURS[0], 2.0, "variance"),
    "bias": Look(COLOURS[1], 2.0, "bias²"),
}
DASHED: dict[str, Any] = {"color": QUIET, "linewidth": 1.2, "linestyle": (0, (4, 3))}


def draw_curve(axes: Axes, curve: Curve, result: Result, critic: int) -> None:
    """Draws bias², variance and their sum for one family: exact as lines, measured as points.

    Error bars are ± two standard errors; a marker shows the exact minimum.
    """
    names = result.grid.names()
    labels = {
        i: name[len(curve.name) + 1 : -1]
        for i, name in enumerate(names)
        if name.startswith(curve.name)
    }
    parameters = [float(label) for label in labels.values()]
    if curve.name == "A3C":
        labels[0] = "MC"
        parameters.append(curve.parameter[-1])
    picked, reach = list(labels), np.interp(parameters, curve.parameter, curve.reach)
    for name, look in LOOKS.items():
        exact = np.square(curve.exact[name][critic])
        axes.plot(
            curve.reach,
            np.where(exact > TINY, exact, np.nan),
            color=look.colour,
            linewidth=look.width,
            label=look.label,
        )
        if name == "rmse":
            continue
        number, error = (x[critic, picked] for x in result.measured[name])
        measured, spread = np.square(number), np.square(number + error) - np.square(number)
        # A bias that is not distinguishable from zero cannot be drawn on a log scale.
        told = measured > np.maximum(2 * spread, TINY)
        axes.errorbar(
            reach[told],
            measured[told],
            yerr=2 * spread[told],
            fmt="o",
            color=look.colour,
            markersize=5,
        )
    best = int(curve.exact["rmse"][critic].argmin())
    least = curve.reach[best], curve.exact["rmse"][critic, best] ** 2
    axes.axvline(least[0], **DASHED)
    axes.plot(
        *least,
        "o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor=INK,
        label="exact minimum",
    )
    axes.annotate(
        f"{curve.name}({curve.parameter[best]:.2g})",
        least,
        (5, 20),
        textcoords="offset points",
        color=INK,
        fontsize=9.5,
    )
    axes.set_xticks(reach, list(labels.values()))
    axes.xaxis.set_minor_locator(NullLocator())


def draw_gradient(
    axes: Axes, result: Result, critic: int, accuracy: float, chosen: Sequence[int]
) -> None:
    """Draws the relative error of the policy gradient against the number of environment steps."""
    segments = np.geomspace(1.0, 1e4, 60)
    for colour, e in zip(COLOURS, chosen, strict=False):
        bias, variance = (x[critic, e] for x in result.gradients)
        error = np.sqrt(GradientScores(bias, variance).error(segments))
        axes.plot(
            segments * result.grid.num_steps,
            error,
            color=colour,
            linewidth=2.0,
            label=result.grid.names()[e],
        )
    axes.axhline(accuracy, label=f"{accuracy:.0%}", **DASHED)


def save_figure(result: Result, accuracy: float, path: Path) -> None:
    """Writes the picture: a row for each critic; GAE, A3C, and the error of the policy gradient.

    Args:
      result: result of `evaluate`.
      accuracy: relative error of the policy gradient at which a line is drawn.
      path: path of the PNG file.
    """
    names, families = result.grid.names(), curves(result)
    # For all critics, each family is represented by the member that needs the fewest steps under
    # the critic with errors.
    steps = result.gradients.segments(accuracy)[CRITICS.index("in error")]
    best = [
        min((e for e, name in enumerate(names) if name.startswith(f.name)), key=lambda e: steps[e])
        for f in families
    ]
    chosen = list(dict.fromkeys([0, names.index("A3C(0)"), *reversed(best)]))
    top = 3.0 * max(np.square(curve.exact["rmse"]).max() for curve in families)
    with plotting.style({"text.parse_math": True}):  # powers of ten on the figure's axes
        figure = Figure(
            figsize=(15.0, 10.5), layout=ConstrainedLayoutEngine(h_pad=0.12, w_pad=0.1), dpi=150
        )
        grid = figure.subplots(len(CRITICS), 3, sharex="col")
        for axes in grid.flat:
            axes.set(xscale="log", yscale="log")
        for c, critic in enumerate(CRITICS):
            for axes, curve in zip(grid[c], families, strict=False):
                draw_curve(axes, curve, result, c)
                axes.set(ylim=(top / 1e4, top), title=f"{curve.name}, critic: {critic}")
            draw_gradient(grid[c, 2], result, c, accuracy, chosen)
            grid[c, 2].set(ylim=(0.02, 5.0), title=f"Sample efficiency, critic: {critic}")
            grid[c, 0].set_ylabel("reward units squared")
            grid[c, 2].set_ylabel("relative error of the gradient")
        labels = (
            "λ, spaced by its reach 1 / (1 − γλ)",
            "k, spaced by the steps k + 1",
            "environment steps",
        )
        for axes, label in zip(grid[-1], labels, strict=True):
            axes.set_xlabel(label)
        grid[0, 0].legend(
            fontsize=9,
            loc="lower right",
            title="lines exact; points measured, ± 2 standard errors",
            title_fontsize=9,
        )
        grid[0, 2].legend(fontsize=9, loc="upper right")
        plotting.write_figure(figure, path)
