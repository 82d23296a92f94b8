from pathlib import Path
from types import SimpleNamespace

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_po.cli import plot
from jaxrl_po.config import ConfigError
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.store import metrics

ROWS = [
    {"step": step, **metrics.by_seed({"episode_return": np.array([10.0, 20.0, 30.0, 90.0]) + step})}
    for step in (0, 100, 200)
]
PANEL = plotting.Panel(
    ROWS, (plotting.Series("episode_return", "training"),), "title", "environment steps", "return"
)


def draw(panel):
    axes = Figure().subplots()
    plotting.draw_panel(axes, panel)
    return axes


def test_the_bold_line_is_the_interquartile_mean():
    bold = max(draw(PANEL).get_lines(), key=lambda line: line.get_linewidth())
    np.testing.assert_array_equal(bold.get_xdata(), [0, 100, 200])
    # (20 + 30) / 2, and likewise at later points.
    np.testing.assert_array_equal(bold.get_ydata(), [25.0, 125.0, 225.0])


def test_seeds_are_drawn_and_band_contains_line():
    axes = draw(PANEL)
    thin = [line for line in axes.get_lines() if line.get_linewidth() < 1]
    np.testing.assert_array_equal([line.get_ydata()[0] for line in thin], [10.0, 20.0, 30.0, 90.0])
    band = axes.collections[0].get_paths()[0].vertices
    at_start = band[band[:, 0] == 0.0, 1]
    assert at_start.min() < 25.0 < at_start.max()


@pytest.mark.parametrize(("seeds", "bands", "thin"), [(3, 0, 3), (4, 1, 0)])
def test_fewer_than_four_seeds_are_drawn_alone(seeds, bands, thin):
    rows = [
        {"step": step, **metrics.by_seed({"episode_return": np.arange(seeds) + float(step)})}
        for step in (0, 100)
    ]
    axes = draw(PANEL._replace(rows=rows, seeds=False))
    assert len(axes.collections) == bands
    assert sum(line.get_linewidth() < 1 for line in axes.get_lines()) == thin
    title = axes.get_legend().get_title().get_text()
    assert title == f"IQM and {'95 % band' if bands else 'each seed'}, {seeds} seeds"


def test_curves_beyond_the_colours_are_drawn():
    names = [f"run {i}" for i in range(10)]
    axes = draw(
        PANEL._replace(
            series=tuple(plotting.Series("episode_return", name) for name in names), seeds=False
        )
    )
    bold = [line for line in axes.get_lines() if line.get_linewidth() > 2]
    assert [line.get_label() for line in bold] == names
    assert len({(line.get_color(), line.get_linestyle()) for line in bold}) == len(names)


def test_axes_and_legend_say_what_is_shown():
    axes = draw(PANEL._replace(target=20.0))
    assert (
        axes.get_xlabel(),
        axes.get_ylabel(),
        axes.get_title(loc="left") or axes.get_title(),
    ) == ("environment steps", "return", "title")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["training", "target 20"]
    assert axes.get_legend().get_title().get_text() == "IQM and 95 % band, 4 seeds"


def test_curve_without_seeds_has_no_band():
    rows = [{"step": step, "ratio": [1.0 + step]} for step in (1, 2, 4)]
    axes = draw(
        plotting.Panel(rows, (plotting.Series("ratio", "ppo"),), "title", "devices", "ratio")
    )
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ppo"]
    assert all(float(tick).is_integer() for tick in axes.get_xticks())


def test_metric_without_numbers_is_drawn_as_none(tmp_path):
    rows = [{"step": 0, **metrics.by_seed({"episode_return": [np.nan, np.nan]})}]
    runs = [plot.Run(name, rows, {}, "CartPole-v1") for name in ("a", "b")]
    assert compared(runs, "episode_return").count("0 of 2       -inf") == 2
    plot.save_figure(runs, "episode_return", tmp_path / "plot.png")


def test_a_seed_without_a_number_counts_as_worst(tmp_path):
    values = {"a": [71.0, 500.0, None, 500.0], "b": [70.0, 70.0, 70.0, 70.0]}
    runs = [
        plot.Run(name, [{"step": 1, "greedy_return": each}], {}, "CartPole-v1")
        for name, each in values.items()
    ]
    first, second = compared(runs, "greedy_return").splitlines()[2:4]
    assert first.split()[:5] == ["a", "3", "of", "4", "-inf"]
    assert first.split()[-1] == "-inf"
    assert float(first.split()[5]) == 285.5  # of 71 and 500 the worst and the best are dropped
    assert second.split()[:3] == ["b", "4", "70"]
    assert "0.25 [" in second  # b is better than one of the four seeds of a
    plot.save_figure(runs, "greedy_return", tmp_path / "plot.png")


def test_interval_without_episode_repeats_last_return():
    rows = [
        {"step": step, "episode_return": values, "kl": values}
        for step, values in enumerate(([1.0, 10.0], [2.0, None], [None, 30.0]))
    ]
    run = plot.Run("a", rows, {}, "CartPole-v1")
    assert plot.final_values(run, "episode_return").tolist() == [2.0, 30.0]
    assert plot.final_values(run, "kl").tolist() == [-np.inf, 30.0]
    panel = PANEL._replace(rows=rows, series=(plotting.Series("episode_return", "a"),))
    thin = [line for line in draw(panel).get_lines() if line.get_linewidth() < 1]
    assert [line.get_ydata().tolist() for line in thin] == [[1.0, 2.0, 2.0], [10.0, 10.0, 30.0]]


def test_metric_in_no_row_is_omitted():
    axes = draw(PANEL._replace(series=(plotting.Series("absent", "absent"),)))
    assert not axes.get_lines()
    assert axes.get_legend() is None


def test_probability_of_improvement_compares_with_first_run():
    scores = {"first": [2.0, 3.0], "better": [4.0, 5.0], "worse": [0.0, 1.0]}
    runs = [
        plot.Run(name, [{"step": 1, "score": each}], {}, "here") for name, each in scores.items()
    ]
    _, _, _, better, worse, _, first, second, method = compared(runs, "score").splitlines()
    # Two of 6 exchanges give a difference as large.
    assert better.endswith(" 1.00 [0.39, 1.00]     0.33")
    assert worse.endswith(" 0.00 [0.00, 0.61]     0.33")
    assert first == "better is better than first with probability 1.00 [0.39, 1.00], p = 0.33"
    assert second == "first is better than worse with probability 1.00 [0.39, 1.00], p = 0.33"
    assert "Newcombe 2006" in method


def test_area_is_the_mean_over_shared_steps():
    """Over steps 10 – 30: 2 → 4 → 4 has the mean 3.5, and 0 → 8, cut at 30, has the mean 5."""
    runs = [
        plot.Run(name, [{"step": s, "score": [v]} for s, v in points], {}, "here")
        for name, points in (
            ("a", [(10, 2.0), (20, 4.0), (30, 4.0)]),
            ("b", [(0, 1.0), (10, 3.0), (50, 11.0)]),
        )
    ]
    assert [x.tolist() for x in plot.scores_of(runs, "score", plot.AREA)] == [[3.5], [5.0]]
    assert [x.tolist() for x in plot.scores_of(runs, "score", plot.FINAL)] == [[4.0], [11.0]]
    apart = [runs[0]._replace(rows=runs[0].rows[:1]), runs[1]]
    with pytest.raises(ConfigError, match=r"^by: must be final: .* no two steps of score"):
        plot.scores_of(apart, "score", plot.AREA)


def test_area_begins_where_every_seed_has_a_value():
    """Over steps 20 – 40: 2 → 4 → 4 has the mean 3.5, 6 has the mean 6, and 3 → 5 the mean 4."""
    rows = {
        "a": [[None, 8.0], [2.0, 6.0], [4.0, None], [None, 6.0]],
        "b": [[0.0], [3.0], [4.0], [5.0]],
    }
    runs = [
        plot.Run(name, [{"step": 10 * i, "episode_return": x} for i, x in enumerate(y, 1)], {}, "")
        for name, y in rows.items()
    ]
    assert plot.shared_steps(runs, "episode_return") == (20.0, 40.0)
    found = plot.scores_of(runs, "episode_return", plot.AREA)
    assert [x.tolist() for x in found] == [[3.5, 6.0], [4.0]]
    never = runs[0]._replace(rows=[row | {"episode_return": [None, 1.0]} for row in runs[0].rows])
    found = plot.scores_of([never, runs[1]], "episode_return", plot.AREA)
    assert [x.tolist() for x in found] == [[-np.inf, 1.0], [3.0 + 1.0 / 6.0]]


def compared(runs, metric):
    return plot.format_comparisons(runs, metric)


def test_failed_picture_leaves_the_one_before(tmp_path):
    path = tmp_path / "curves.png"
    path.write_bytes(b"before")

    def fill(file, format):
        Path(file).write_bytes(b"half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        plotting.write_figure(SimpleNamespace(savefig=fill), path)
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"before"]


NAMES = ["$\\frac{", "a_b^2 $x$ {y}", "_first & last", "'q' \"r\" 100% #1 ~", "\\alpha $\\x$"]


@pytest.fixture
def texts(monkeypatch):
    """Returns texts of a drawn figure, for a user whose matplotlibrc requests TeX and other
    legends."""
    shown = []

    def write(figure, path):
        figure.savefig(path, format="svg")
        shown.extend(text.get_text() for text in figure.findobj(matplotlib.text.Text))
        assert not any(text.get_usetex() for text in figure.findobj(matplotlib.text.Text))

    monkeypatch.setattr(plotting, "write_figure", write)
    asked = {"text.usetex": True, "svg.fonttype": "none", "legend.loc": "center"}
    with matplotlib.rc_context(asked):
        yield shown
        assert all(matplotlib.rcParams[name] == value for name, value in asked.items())


def curves(path):
    series = [plotting.Series("episode_return", name) for name in NAMES]
    plotting.save_panels([PANEL._replace(series=series)], path)


def sweep(path):
    plotting.save_sweep([({NAMES[0]: name}, [1.0, 2.0]) for name in NAMES], "score", path)


@pytest.mark.parametrize("drawing", [curves, sweep])
def test_names_are_literal_under_any_matplotlibrc(tmp_path, texts, drawing):
    drawing(tmp_path / "picture.svg")
    assert set(NAMES) <= set(texts)
    # Texts become glyphs, because the library sets `svg.fonttype`.
    assert "<use" in (tmp_path / "picture.svg").read_text()


def test_numeric_settings_get_a_numeric_axis(tmp_path, texts):
    rows = [({"config.learning_rate": f"{1.3 * 10.0**-i:.4g}"}, [1.0, 2.0]) for i in range(1, 6)]
    plotting.save_sweep(rows, "score", tmp_path / "picture.svg")
    assert {"0.01", "0.001"} <= set(texts)
    assert not any("$" in text for text in texts)


def test_dots_sharing_a_tick_stand_side_by_side(tmp_path):
    seen, plot = [], Axes.plot
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Axes, "plot", lambda a, x, *r, **k: seen.append(x) or plot(a, x, *r, **k))
        rows = [({"a": a, "b": b}, [1.0]) for a, b in (("1", "x"), ("2", "y"), ("3", "x"))]
        plotting.save_sweep(rows, "score", tmp_path / "picture.svg")
    assert sorted(seen[:3]) == [0, 1, 2]  # dots of `a`, one for each value
    assert sorted(seen[3:]) == [-0.125, 0.125, 1]  # of `b`


def test_grid_of_two_settings_is_a_heatmap(tmp_path, texts, monkeypatch):
    """The seeds of each combination are at its place, sorted, whatever the order of the rows."""
    drawn, imshow = [], Axes.imshow
    monkeypatch.setattr(
        Axes, "imshow", lambda axes, grid, **how: drawn.append(grid) or imshow(axes, grid, **how)
    )
    rates, clips = ("1e-4", "3e-4", "1e-3", "0.1"), ("0.1", "0.2", "0.3", "0.5", "0.05")
    rows = [
        ({"rate": rate, "clip": clip}, [100 * i + 10 * j + 2, 100 * i + 10 * j + 1])
        for j, clip in enumerate(clips)
        for i, rate in enumerate(rates)
    ]
    plotting.save_sweep(rows[::-1], "score", tmp_path / "picture.svg")
    (grid,) = drawn
    assert np.shape(grid) == (5, 8)
    np.testing.assert_array_equal(grid[0], [41, 42, 141, 142, 241, 242, 341, 342])  # clip .05
    np.testing.assert_array_equal(grid[-1], [31, 32, 131, 132, 231, 232, 331, 332])  # clip .5
    assert {"rate", "clip", "score", "1e-4", "0.05"} <= set(texts)
    plotting.save_sweep(rows[1:], "score", tmp_path / "picture.svg")
    assert len(drawn) == 1  # a combination is missing from the grid, so that dots are drawn


def test_two_drawn_numbers_are_a_map(tmp_path, texts, monkeypatch):
    drawn, scatter = [], Axes.scatter
    monkeypatch.setattr(
        Axes, "scatter", lambda a, x, y, **k: drawn.append((x, y, k)) or scatter(a, x, y, **k)
    )
    rows = [
        ({"rate": f"{10.0**-i:g}", "clip": f"{i / 10}"}, [0.0, -i if i < 5 else -np.inf])
        for i in range(1, 6)
    ]
    plotting.save_sweep(rows, "score", tmp_path / "picture.svg")
    (diverged, _, _), (rate, clip, dots), ring = drawn
    assert (diverged, rate) == (pytest.approx([1e-5]), pytest.approx([0.1, 0.01, 1e-3, 1e-4]))
    assert clip == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert dots["c"].tolist() == [-0.5, -1.0, -1.5, -2.0]
    assert ring[:2] == (pytest.approx([0.1]), pytest.approx([0.1]))
    assert {"rate", "clip", "score", "0.001"} <= set(texts)
