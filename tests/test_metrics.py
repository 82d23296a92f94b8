import json
import math

import numpy as np
import pytest
import scipy.stats
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.run.store import metrics, statistics


def test_interquartile_mean_drops_a_quarter_at_each_end():
    # n = 8: two numbers are dropped at each end, (3 + 4 + 5 + 60) / 4 = 18
    assert statistics.interquartile_mean([-900.0, 1.0, 3.0, 4.0, 5.0, 60.0, 70.0, 900.0]) == 18.0
    # n = 3: ⌊3/4⌋ = 0 numbers are dropped
    assert statistics.interquartile_mean([1.0, 2.0, 6.0]) == 3.0


def test_nan_is_left_out_of_aggregates():
    columns = [[1.0, np.nan], [np.nan, np.nan], [3.0, np.nan]]
    assert_array_equal(statistics.nan_mean(columns), [2.0, np.nan])
    assert_array_equal(statistics.interquartile_mean(columns), [2.0, np.nan])
    # four of five numbers are finite: one number is dropped at each end, (2 + 4) / 2
    assert statistics.interquartile_mean([100.0, np.nan, 2.0, 4.0, -5.0]) == 3.0


def test_final_score_counts_diverged_seed_as_worst():
    rows = [metrics.by_seed({"greedy_return": x}) for x in ([9.0] * 4, [500.0] * 3 + [np.nan])]
    rows = [json.loads(json.dumps(metrics.strict(row))) for row in rows]
    said = metrics.in_words(rows, "greedy_return")
    assert said.startswith("greedy return 500, worst seed -inf: 1 of 4 seeds gained less")
    rows[-1]["greedy_return"] = [500.0, None, None, None]
    assert metrics.in_words(rows, "greedy_return") == "greedy return is a number in 1 of 4 seeds"


def test_an_interval_may_end_at_minus_infinity():
    low, high = statistics.bootstrap_interval([-np.inf, 1.0, 2.0, 3.0])
    assert low == -np.inf
    assert 2.0 <= high <= 3.0


def test_later_line_does_not_belong_to_initial_policy():
    later = metrics.by_seed({"accuracy": [0.5, 0.5]})
    rows = [
        {"iteration": 4, "step": 8},
        {"iteration": 5, "step": 10, **later},
        {"iteration": 6, "step": 12, "time/compile_seconds": 1.0, **later},
    ]
    assert metrics.in_words(rows, "accuracy") == "accuracy 0.5, worst seed 0.5"
    resolved = dict.fromkeys(("placement", "device", "versions"), "")
    settings = {"seeds": 2, "seed": 0, "algorithm": "ppo", "resolved": resolved}
    made = metrics.summary(rows, settings, score="accuracy", initial="before")
    assert (made["accuracy"], made["steps"]) == ([0.5, 0.5], 12)
    assert "before" not in made


def test_pool_adds_before_it_divides():
    # seed 0: (1·2 + 3·6) / (2 + 6) = 20 / 8, not the mean of the means (1 + 3) / 2;
    # seed 1: the seed has no sample
    total = np.array([[2.0, 0.0], [18.0, 0.0]], np.float32)
    count = np.array([[2.0, 0.0], [6.0, 0.0]], np.float32)
    assert_array_equal(metrics.pool({"x": Mean(total, count)})["x"], [2.5, np.nan])


def test_intervals_hold_nineteen_of_twenty_resamples():
    """A hundred tosses of a coin give 40 to 60 heads with 96 % probability, and 42 to 58 with 91
    %."""
    coin = np.repeat([0.0, 1.0], 50)
    interval = statistics.bootstrap_interval(coin, statistic=statistics.nan_mean)
    assert_allclose(interval, [0.4, 0.6], atol=0.011)


def test_bootstrap_is_reproducible_and_keeps_curves_whole():
    curve = np.random.default_rng(0).normal(size=(6, 1)) * np.array([1.0, 2.0, -1.0])
    low, high = statistics.bootstrap_interval(curve)
    assert_array_equal((low, high), statistics.bootstrap_interval(curve))
    # every point resamples the same seeds: doubled values have doubled bounds, mirrored values have
    # mirrored bounds
    assert_allclose([low[1], high[1]], [2 * low[0], 2 * high[0]])
    assert_allclose([low[2], high[2]], [-high[0], -low[0]])


def test_bootstrap_of_a_point_without_values_is_nan():
    low, high = statistics.bootstrap_interval(np.full((3, 1), np.nan))
    assert math.isnan(low[0])
    assert math.isnan(high[0])


def test_lines_are_strict_json(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(FileNotFoundError):  # the folder of the file was moved
        metrics.append(path, {"iteration": 0})
    path.touch()
    metrics.append(
        path,
        {
            "iteration": 1,
            "step": 8,
            **metrics.by_seed({"episode_return": [math.nan, math.inf, 2.0]}),
        },
    )

    def refuse(constant):
        raise AssertionError(constant)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row["episode_return"] == [None, None, 2.0]
    assert row["episode_return/iqm"] is None


def test_by_seed_holds_the_list_and_both_aggregates():
    row = metrics.by_seed({"loss": np.array([0.0, 1.0, 3.0, 100.0], np.float32)})
    assert row == {"loss": [0.0, 1.0, 3.0, 100.0], "loss/mean": 26.0, "loss/iqm": 2.0}


def test_curve_takes_the_lines_that_hold_the_metric():
    rows = [
        {"step": 0, "a": [1.0, None]},
        {"step": 5, "b": [0.0, 0.0]},
        {"step": 9, "a": [2.0, 4.0]},
    ]
    step, values = metrics.curve(rows, "a")
    assert_array_equal(step, [0.0, 9.0])
    assert_array_equal(values, [[1.0, 2.0], [np.nan, 4.0]])


def test_improvement_intervals_cover_the_truth():
    """Among 400 pairs of eight normal scores, 95 % ± 4.4 % of the intervals contain P(X > Y) =
    .76."""
    generator, truth = np.random.default_rng(0), 0.5 * (1.0 + math.erf(0.5))
    pairs = generator.normal(size=(400, 2, 8)) + np.array([[1.0], [0.0]])
    bounds = np.array([statistics.improvement_interval(*pair) for pair in pairs])
    covered = np.mean((bounds[:, 0] <= truth) & (truth <= bounds[:, 1]))
    assert abs(covered - 0.95) < 0.044


@pytest.mark.parametrize("shift", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("seeds", [8, 10])
def test_permutation_p_value_is_exact_to_its_draws(shift, seeds):
    """All 12,870 exchanges of eight scores with eight are counted; 184,756 are sampled."""
    x, y = np.random.default_rng(1).normal(size=(2, seeds)) + np.array([[shift], [0.0]])
    exact = scipy.stats.mannwhitneyu(x, y, method="exact").pvalue
    found = statistics.improvement_p_value(x, y)
    sampling = 4.0 * math.sqrt(exact * (1 - exact) / 20_000) + 1 / 20_000
    assert abs(found - exact) < (1e-12 if seeds == 8 else sampling)
    assert statistics.improvement_p_value(y, x) == pytest.approx(found, abs=0.015)
    assert statistics.improvement_p_value([1.0, np.nan], [1.0]) == 1.0
    assert math.isnan(statistics.improvement_p_value([np.nan], [1.0]))


def test_difference_has_an_interval_of_both():
    assert statistics.difference_with_interval([5.0] * 3, [1.0] * 2) == "4 [4, 4]"
    assert statistics.difference_with_interval([1.0], [-np.inf]) == "inf [inf, inf]"


def test_performance_profile_never_counts_a_missing_score():
    assert_array_equal(statistics.performance_profile([1.0, np.nan], [0.0, 1.0]), [0.5, 0.0])
    assert statistics.performance_profile(np.ones((2, 5)), [0.0, 1.0]).tolist() == [
        [1.0] * 5,
        [0.0] * 5,
    ]


@pytest.mark.parametrize("line", [b"{bad", b"5", b"null", b"\xff"])
def test_a_line_that_is_damaged_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"iteration": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl line 2 is damaged"):
        metrics.read(path)
    with pytest.raises(ConfigError, match="must be a file, but is a folder"):
        metrics.read(tmp_path)
