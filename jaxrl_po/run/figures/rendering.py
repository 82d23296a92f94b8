"""Episodes as GIFs: for each family of environments, a function that draws one time step.

The functions draw observations instead of states: an environment resets itself in the step that
ends an episode, so the final state is lost, but the final observation is recorded.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyBboxPatch, Patch, Polygon
from matplotlib.transforms import Affine2D
from PIL import Image

from jaxrl_po.run.figures.plotting import COLOURS, INK, QUIET, replacing, style

Floats = npt.NDArray[np.floating[Any]]
Frame = npt.NDArray[np.uint8]

PAPER, FAINT, ACCENT = "#fafaf8", "#dfe3e7", COLOURS[1]
CHANNELS = (*COLOURS, "#e0a83c", "#7fb2cc")
ROUND: dict[str, Any] = {"solid_capstyle": "round", "solid_joinstyle": "round"}
TRAIL = 24  # number of time steps for which the path of a tip is drawn
STAGE = (0.03, 0.09, 0.94, 0.81)  # left, bottom, width, height of the drawing, as shares of a frame
HOLD = 1500  # milliseconds for which the last frame is shown


class Episode(NamedTuple):
    """One recorded episode of T steps.

    Attributes:
      observation: observations `[T + 1, …]`, not normalised, including the final observation.
      action: actions `[T, …]`, as the policy chose them.
      reward: rewards `[T]` of the steps.
    """

    observation: Floats
    action: npt.NDArray[Any]
    reward: Floats


Draw = Callable[[Axes, Episode, int], None]


def cart_pole(axes: Axes, episode: Episode, t: int) -> None:
    """Draws a cart on a rail, with a pole of length 1; ticks mark the ends of the rail at ±2.4."""
    x, _, angle, _ = episode.observation[t].tolist()
    _stage(axes, (-2.75, 2.75), (-0.9, 1.6))
    axes.plot([-2.75, 2.75], [0.0, 0.0], color=QUIET, linewidth=1.5)
    for end in (-2.4, 2.4):
        axes.plot([end, end], [-0.09, 0.09], color=QUIET, linewidth=1.5)
    axes.add_patch(_box(x, 0.0, 0.62, 0.3))
    ends = [x, x + np.sin(angle)], [0.15, 0.15 + np.cos(angle)]
    axes.plot(*ends, color=ACCENT, linewidth=6.5, zorder=4, **ROUND)
    axes.add_patch(Circle((x, 0.15), 0.045, color=PAPER, zorder=5))


def pendulum(axes: Axes, episode: Episode, t: int) -> None:
    """Draws a rod that turns around a pivot, upright at angle 0, with the path of the rod's tip."""
    cos, sin = episode.observation[: t + 1, 0], episode.observation[: t + 1, 1]
    x, y = -sin, cos
    _stage(axes, (-1.6, 1.6), (-1.25, 1.25))
    axes.add_patch(Circle((0.0, 0.0), 1.0, fill=False, edgecolor=FAINT, linewidth=1.5))
    axes.plot([0.0, 0.0], [0.94, 1.06], color=QUIET, linewidth=1.5)
    _trail(axes, x, y)
    axes.plot([0.0, x[-1]], [0.0, y[-1]], color=INK, linewidth=8.0, zorder=4, **ROUND)
    axes.add_patch(Circle((0.0, 0.0), 0.035, color=PAPER, zorder=5))
    axes.add_patch(Circle((x[-1], y[-1]), 0.1, color=ACCENT, zorder=5))


def acrobot(axes: Axes, episode: Episode, t: int) -> None:
    """Draws two links of length 1 below a pivot, the path of the tip, and the height to reach."""
    cos_1, sin_1, cos_2, sin_2 = episode.observation[: t + 1, :4].T
    middle_x, middle_y = sin_1, -cos_1
    tip_x = middle_x + sin_1 * cos_2 + cos_1 * sin_2
    tip_y = middle_y - cos_1 * cos_2 + sin_1 * sin_2
    _stage(axes, (-2.8, 2.8), (-2.15, 2.15))
    axes.plot([-2.8, 2.8], [1.0, 1.0], color=QUIET, linewidth=1.5, linestyle=(0, (4, 3)))
    _trail(axes, tip_x, tip_y)
    joints = [0.0, middle_x[-1], tip_x[-1]], [0.0, middle_y[-1], tip_y[-1]]
    axes.plot(*joints, color=INK, linewidth=7.0, zorder=4, **ROUND)
    for x, y in zip(*(each[:2] for each in joints), strict=True):
        axes.add_patch(Circle((x, y), 0.06, color=PAPER, zorder=5))
    axes.add_patch(Circle((tip_x[-1], tip_y[-1]), 0.14, color=ACCENT, zorder=5))


def mountain_car(axes: Axes, episode: Episode, t: int, *, goal: float) -> None:
    """Draws a car in a valley, and a flag at the position `goal`."""

    def height(x: Any) -> Any:
        return 0.45 * np.sin(3.0 * x) + 0.55

    position = float(episode.observation[t, 0])
    _stage(axes, (-1.25, 0.65), (-0.1, 1.32))
    ground = np.linspace(-1.25, 0.65, 120)
    axes.fill_between(ground, height(ground), -0.1, color=FAINT, linewidth=0)
    axes.plot(ground, height(ground), color=QUIET, linewidth=1.5)
    axes.plot([goal, goal], [height(goal), height(goal) + 0.2], color=INK, linewidth=2.0, **ROUND)
    flag = np.array([(0.0, 0.2), (0.0, 0.11), (-0.1, 0.155)]) + np.array([goal, height(goal)])
    axes.add_patch(Polygon(flag, color=INK))
    turned = Affine2D().rotate(np.arctan(1.35 * np.cos(3.0 * position)))
    place = turned.translate(position, height(position)) + axes.transData
    car: list[Patch] = [
        _box(0.0, 0.075, 0.19, 0.06, color=ACCENT),
        _box(-0.01, 0.115, 0.1, 0.06, color=ACCENT),
    ]
    car += [Circle((x, 0.03), 0.03, color=INK, zorder=5) for x in (-0.055, 0.055)]
    for part in car:
        part.set_transform(place)
        axes.add_patch(part)


def grid(axes: Axes, episode: Episode, t: int) -> None:
    """Draws an observation `[H, W]` or `[H, W, C]`, a colour per channel, channel 0 on top."""
    cells = episode.observation[t]
    cells = np.nan_to_num(cells.reshape(*cells.shape[:2], -1))
    rows, columns, depth = cells.shape
    colours = (ACCENT,) if depth == 1 else CHANNELS
    picture = np.broadcast_to(to_rgb("#eef0f2"), (rows, columns, 3))
    for channel in reversed(range(depth)):
        opacity = np.clip(cells[:, :, channel, None], 0.0, 1.0)
        colour = np.array(to_rgb(colours[channel % len(colours)]))
        picture = opacity * colour + (1.0 - opacity) * picture
    _stage(axes, (0.0, columns), (rows, 0.0))
    axes.imshow(picture, extent=(0.0, columns, rows, 0.0), interpolation="nearest")
    if max(rows, columns) <= 20:
        axes.hlines(range(rows + 1), 0, columns, color=PAPER, linewidth=2.0)
        axes.vlines(range(columns + 1), 0, rows, color=PAPER, linewidth=2.0)


def picture(axes: Axes, episode: Episode, t: int, *, pictures: Sequence[Frame]) -> None:
    """Draws the image that the environment itself rendered at time step t."""
    height, width = pictures[t].shape[:2]
    _stage(axes, (0.0, width), (height, 0.0))
    axes.imshow(pictures[t], extent=(0.0, width, height, 0.0))


def components(axes: Axes, episode: Episode, t: int) -> None:
    """Draws any environment: the observation as bars, beside the actions and the return so far."""
    axes.set_axis_off()
    observed = np.nan_to_num(
        episode.observation.reshape(len(episode.observation), -1), posinf=0.0, neginf=0.0
    )
    size = observed.shape[1]
    bars = _panel(axes, (0.09, 0.1, 0.37, 0.81), "observation", (-0.6, size - 0.4), observed)
    bars.vlines(range(size), 0.0, observed[t], color=ACCENT, linewidth=max(0.6, 60.0 / size))
    bars.axhline(0.0, color=QUIET, linewidth=0.8)
    actions = episode.action.reshape(len(episode.action), -1)
    returns = np.append(0.0, np.cumsum(episode.reward))
    below = ("return", returns[:, None], t + 1, 0.1)
    for title, values, until, y in (("action", actions, t, 0.59), below):
        panel = _panel(axes, (0.61, y, 0.37, 0.32), title, (0, len(actions)), values)
        panel.set_prop_cycle(color=(ACCENT, *COLOURS))
        marker = "o" if len(values) <= 20 else ""
        panel.plot(values[:until], linewidth=1.6, marker=marker, markersize=3)


def _panel(axes: Axes, place: Any, title: str, x: tuple[float, float], values: Any) -> Axes:
    """Adds inset axes, whose limits include 0 and all of `values` throughout the episode."""
    panel = axes.inset_axes(place, facecolor=PAPER)
    finite = values[np.isfinite(values)]
    low, high = float(np.min(finite, initial=0.0)), float(np.max(finite, initial=0.0))
    margin = 0.08 * (high - low) or 0.5
    panel.set(xlim=x, ylim=(low - margin, high + margin))
    panel.set_title(title, fontsize="medium", fontweight="normal", color=INK)
    panel.locator_params(nbins=3, integer=True, axis="x")
    panel.locator_params(nbins=4, axis="y")
    return panel


def _stage(axes: Axes, x: tuple[float, float], y: tuple[float, float]) -> None:
    """Prepares empty axes with the same scale in both directions."""
    axes.set_axis_off()
    axes.set(xlim=x, ylim=y, aspect="equal")


def _box(x: float, y: float, width: float, height: float, color: str = INK) -> FancyBboxPatch:
    """Returns a rounded box whose centre is `(x, y)`."""
    corner, rounding = (x - width / 2, y - height / 2), min(width, height) / 4
    shape = f"round,pad=0,rounding_size={rounding}"
    return FancyBboxPatch(corner, width, height, shape, color=color, linewidth=0, zorder=3)


def _trail(axes: Axes, x: Floats, y: Floats) -> None:
    """Draws the path of a moving point over the last time steps; older parts are fainter."""
    for i in range(max(len(x) - TRAIL, 1), len(x)):
        fade = 0.5 * (1.0 - (len(x) - i) / TRAIL)
        part = slice(i - 1, i + 1)
        axes.plot(x[part], y[part], color=ACCENT, alpha=fade, lw=2.5, solid_capstyle="butt")


def frames(draw: Draw, episode: Episode, *, title: str, width: int = 480) -> Iterator[Frame]:
    """Draws every time step of an episode, with the step number and the return so far below.

    Args:
      draw: `(axes, episode, t) -> None`, draws one time step.
      episode: episode to draw, see `Episode`.
      title: title above the drawing.
      width: width of a frame in pixels; the height is three quarters of the width.

    Returns:
      T + 1 frames `[height, width, 3]`.
    """
    returns = np.append(0.0, np.cumsum(episode.reward, dtype=np.float64))
    with style({"font.size": 8.5, "axes.grid": False}):
        figure = Figure(figsize=(4.0, 3.0), dpi=width / 4.0, facecolor=PAPER)
        canvas = FigureCanvasAgg(figure)
        figure.text(0.04, 0.94, title, color=INK, weight="bold", va="center")
        step = figure.text(0.04, 0.05, "", color=INK, va="center")
        total = figure.text(0.96, 0.05, "", color=INK, va="center", ha="right")
        axes = figure.add_axes(STAGE, facecolor=PAPER)
        fixed = axes.get_children()
        for t, so_far in enumerate(returns):
            # New axes for each frame would take most of the time, so artists are removed instead.
            for artist in [*axes.get_children()]:
                if artist not in fixed:
                    artist.remove()
            draw(axes, episode, t)
            step.set_text(f"step {t}")
            total.set_text(f"return {so_far:.5g}")
            canvas.draw()
            yield np.asarray(canvas.buffer_rgba())[..., :3].copy()


def save_gif(pictures: Iterable[Frame], path: Path, *, fps: int = 30) -> None:
    """Writes frames as a GIF that loops; the last frame is shown for longer.

    Args:
      pictures: frames of an episode, see `frames`.
      path: path of the file, which is replaced atomically.
      fps: frames per second; GIF rounds the duration of a frame to hundredths of a second.
    """
    how: Any = {"method": Image.Quantize.FASTOCTREE, "dither": Image.Dither.NONE}
    first, *others = [Image.fromarray(each).quantize(256, **how) for each in pictures]
    timing: Any = {"duration": [round(1000 / fps)] * len(others) + [HOLD], "loop": 0}
    with replacing(path) as temporary:
        first.save(temporary, format="GIF", save_all=True, append_images=others, **timing)
