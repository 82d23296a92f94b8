"""Statistics over the scores of seeds; a missing score is NaN.

The statistics follow Agarwal et al. 2021, "Deep Reinforcement Learning at the Edge of the
Statistical Precipice" (https://arxiv.org/abs/2108.13264): the interquartile mean over seeds, a
bootstrap interval around it, the probability of improvement and performance profiles.
"""

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Statistic = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
TAILS = (2.5, 97.5)  # percentiles that bound a 95 % interval


def nan_mean(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Computes the mean over the leading axis, ignoring NaN; NaN if all values are NaN.

    Args:
      values: `[S, …]`, one entry per seed.
    """
    x = np.asarray(values, np.float64)
    present = ~np.isnan(x)
    count = present.sum(axis=0)
    total = np.where(present, x, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def interquartile_mean(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Computes the mean over the leading axis without the ⌊n/4⌋ lowest and highest of n values.

    NaN is dropped first: n counts the remaining values.

    Args:
      values: `[S, …]`, one entry per seed.

    Returns:
      Array `[…]`; NaN if no seed has a value.

    Example:
      >>> float(interquartile_mean([0.0, 1.0, 3.0, 100.0]))
      2.0
    """
    x = np.sort(np.asarray(values, np.float64), axis=0)  # NaN is sorted to the end
    count = (~np.isnan(x)).sum(axis=0)
    rank = np.arange(len(x)).reshape(-1, *[1] * (x.ndim - 1))
    kept = (rank >= count // 4) & (rank < count - count // 4)
    total = np.where(kept, x, 0.0).sum(axis=0)
    return np.where(count > 0, total / np.maximum(kept.sum(axis=0), 1), np.nan)


def worst_if_missing(scores: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Replaces NaN and infinity in final scores by −∞: a seed that diverged is the worst.

    Example:
      >>> worst_if_missing([500.0, None, 71.0]).tolist()
      [500.0, -inf, 71.0]
    """
    x = np.asarray(scores, np.float64)
    return np.where(np.isfinite(x), x, -np.inf)


def seeds_with_score(scores: npt.ArrayLike) -> str:
    """Returns the number of seeds, as `2 of 3` if some seeds have no score.

    Example:
      >>> seeds_with_score([1.0, -np.inf, 3.0]), seeds_with_score([1.0, 2.0])
      ('2 of 3', '2')
    """
    present = np.isfinite(np.asarray(scores, np.float64))
    return f"{present.size}" if present.all() else f"{present.sum()} of {present.size}"


def carried(values: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Fills NaN in curves with the last number of the same seed.

    The return is NaN in an interval without a completed episode; long, good episodes cause such
    intervals.

    Args:
      values: `[S, X]`, one curve per seed; a NaN before the first number remains.

    Example:
      >>> carried([[np.nan, 1.0, np.nan, 3.0]]).tolist()
      [[nan, 1.0, 1.0, 3.0]]
    """
    x = np.asarray(values, np.float64)
    last = np.maximum.accumulate(np.where(np.isnan(x), 0, np.arange(x.shape[1])), axis=1)
    return np.take_along_axis(x, last, axis=1)


def bootstrap_interval(
    values: npt.ArrayLike, *, statistic: Statistic = interquartile_mean, replicates: int = 2000
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Computes a 95 % interval by a percentile bootstrap over seeds, deterministically.

    Args:
      values: `[S, …]` with the seeds first; trailing axes are points of a curve, and a resampled
        seed contributes its whole curve.
      statistic: `([S, R]) -> [R]`, a reduction over the leading axis.
      replicates: number R of bootstrap resamples.

    Returns:
      `(low, high)`, each `[…]`; resamples whose statistic is NaN are dropped, and both ends are NaN
      if no resample remains.

    Example:
      >>> low, high = bootstrap_interval([1.0, 2.0, 3.0, 4.0], statistic=nan_mean)
      >>> bool(1.0 <= low < 2.5 < high <= 4.0)
      True
    """
    x = np.asarray(values, np.float64)
    draws = np.random.default_rng(0).integers(len(x), size=(len(x), replicates))
    # The loop takes one point of the curve at a time: resamples of a whole curve need much memory.
    bounds = [tails(statistic(each[draws])) for each in x.reshape(len(x), -1).T]
    low, high = np.array(bounds).T.reshape(2, *x.shape[1:])
    return low, high


def with_interval(scores: npt.ArrayLike) -> str:
    """Formats the interquartile mean of seeds `[S]` with its 95 % interval."""
    ends = interquartile_mean(scores), *bootstrap_interval(scores)
    return "{:.4g} [{:.4g}, {:.4g}]".format(*map(float, ends))


def difference_with_interval(x: npt.ArrayLike, y: npt.ArrayLike, *, replicates: int = 2000) -> str:
    """Formats IQM(x) − IQM(y) of seeds `[S]`, `[S']` with its 95 % percentile bootstrap interval.

    Example:
      >>> difference_with_interval([5.0, 5.0, 5.0], [1.0, 1.0])
      '4 [4, 4]'
    """
    generator, middles = np.random.default_rng(0), []
    for scores in (np.asarray(x, np.float64), np.asarray(y, np.float64)):
        draws = generator.integers(len(scores), size=(len(scores), replicates))
        middles.append((interquartile_mean(scores), interquartile_mean(scores[draws])))
    (ours, of_ours), (theirs, of_theirs) = middles
    with np.errstate(invalid="ignore"):  # −∞ − −∞, if most seeds of both have no score
        return "{:.4g} [{:.4g}, {:.4g}]".format(float(ours - theirs), *tails(of_ours - of_theirs))


def tails(estimates: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Returns the ends of a 95 % interval of the numbers in `estimates`; NaN without numbers."""
    known = estimates[~np.isnan(estimates)]
    if not known.size:
        return math.nan, math.nan
    # No interpolation exists between −∞ and a number.
    finite = bool(np.isfinite(known).all())
    low, high = np.percentile(known, TAILS, method="linear" if finite else "inverted_cdf")
    return float(low), float(high)


def probability_of_improvement(x: npt.ArrayLike, y: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Computes P(X > Y) + ½ P(X = Y), the Mann–Whitney statistic over all S·S' pairs of seeds.

    Args:
      x: `[S, …]`, scores of method X.
      y: `[S', …]`, scores of method Y.

    Returns:
      Array `[…]` in [0, 1], above ½ if X is better; pairs with a NaN are ignored; NaN if no pair
      remains.

    Example:
      >>> float(probability_of_improvement([1.0, 3.0], [2.0, 3.0]))
      0.375
    """
    x, y = np.asarray(x, np.float64)[:, None], np.asarray(y, np.float64)[None, :]
    wins = np.where(np.isnan(x) | np.isnan(y), np.nan, (x > y) + 0.5 * (x == y))
    return nan_mean(wins.reshape(-1, *wins.shape[2:]))


def improvement_interval(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[float, float]:
    """Computes the 95 % score interval of `probability_of_improvement` of `x [S]` over `y [S']`.

    The interval holds all θ with |p − θ| ≤ 1.96·√V(θ), where
    V(θ) = θ(1 − θ)/(S·S') · (1 + ((S + S')/2 − 1)·((1 − θ)/(2 − θ) + θ/(1 + θ))),
    to three decimals: method 5 of Newcombe 2006, "Confidence intervals for an effect size measure
    based on the Mann–Whitney statistic. Part 2" (https://doi.org/10.1002/sim.2324). The interval
    has a positive width even if every score of X is better. Both ends are NaN if X or Y has no
    score.

    Example:
      >>> low, high = improvement_interval([5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0])
      >>> round(low, 2), high
      (0.58, 1.0)
    """
    p = float(probability_of_improvement(x, y))
    sizes = [int(np.sum(~np.isnan(np.asarray(scores, np.float64)))) for scores in (x, y)]
    if math.isnan(p):
        return math.nan, math.nan
    theta = np.linspace(0.0, 1.0, 1001)
    spread = 1.0 + (sum(sizes) / 2 - 1.0) * ((1.0 - theta) / (2.0 - theta) + theta / (1.0 + theta))
    variance = theta * (1.0 - theta) / math.prod(sizes) * spread
    inside = theta[np.abs(theta - p) <= np.maximum(1.96 * np.sqrt(variance), 0.0005)]
    return float(inside[0]), float(inside[-1])


def improvement_p_value(x: npt.ArrayLike, y: npt.ArrayLike, *, permutations: int = 20_000) -> float:
    """Computes the two-sided p-value of a permutation test of P(X > Y) + ½ P(X = Y) = ½.

    The p-value is the share of the exchanges of scores between X and Y after which the probability
    of improvement is at least as far from ½. If there are more than `permutations` exchanges, as
    from nine scores on each side, random ones stand for all, and the original assignment counts as
    one of them.

    Args:
      x: `[S]`, scores of X; NaN is ignored.
      y: `[S']`, scores of Y.
      permutations: Largest number of exchanges; equal scores always draw the same exchanges.

    Returns:
      The p-value in (0, 1]; NaN if X or Y has no score.

    Example:
      >>> round(improvement_p_value([5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]), 2)
      0.03
    """
    scores = [np.asarray(values, np.float64) for values in (x, y)]
    ours, theirs = (values[~np.isnan(values)] for values in scores)
    if not (ours.size and theirs.size):
        return math.nan
    pooled = np.concatenate([ours, theirs])
    wins = (pooled[:, None] > pooled) + 0.5 * (pooled[:, None] == pooled)
    ranks = wins.sum(axis=1)  # rank of each score among all scores
    exact = math.comb(ranks.size, ours.size) <= permutations
    if exact:
        exchanged = np.array(list(itertools.combinations(ranks, ours.size)))
    else:
        everywhere = np.broadcast_to(ranks, (permutations, ranks.size))
        exchanged = np.random.default_rng(0).permuted(everywhere, axis=1)[:, : ours.size]
    centre = ours.size * ranks.mean()
    observed = np.abs(ranks[: ours.size].sum() - centre)
    far = np.abs(exchanged.sum(axis=1) - centre) >= observed - 1e-9
    return float(far.mean() if exact else (1 + far.sum()) / (1 + permutations))


def format_comparison(labels: Sequence[str], scores: Sequence[npt.NDArray[np.float64]]) -> str:
    """Returns a line per run (score, comparison with the first run), then comparisons in words.

    Args:
      labels: Names of the runs.
      scores: Scores of the seeds of each run, `[S]`.
    """
    width = max(map(len, labels))
    line = f"{{:{width}}} {{:>8}} {{:>10}} {{:>30}} {{:>10}} {{:>24}} {{:>8}}".format
    head = "IQM, 95 % interval", "lowest", "better than the first", "p"
    lines, sentences = [line("", "seeds", "mean", *head)], list[str]()
    for i, (label, mine) in enumerate(zip(labels, scores, strict=True)):
        better = p_value = ""
        if i:
            low, high = improvement_interval(mine, scores[0])
            probability = float(probability_of_improvement(mine, scores[0]))
            better = f"{probability:.2f} [{low:.2f}, {high:.2f}]"
            p_value = f"{improvement_p_value(mine, scores[0]):.2g}"
            names, said = [label, labels[0]], better
            if probability < 0.5:  # in words the better run comes first
                names.reverse()
                said = f"{1.0 - probability:.2f} [{1.0 - high:.2f}, {1.0 - low:.2f}]"
            named = " is better than ".join(names)
            sentences.append(f"{named} with probability {said}, p = {p_value}")
        mean, lowest = f"{mine.mean():.4g}", f"{mine.min():.4g}"
        middle, seeds = with_interval(mine), seeds_with_score(mine)
        lines.append(line(label, seeds, mean, middle, lowest, better, p_value).rstrip())
    if sentences:
        method = "95 % score intervals (Newcombe 2006); p: two-sided permutation test over seeds"
        lines += ["", *sentences, method]
    return "\n".join(lines) + "\n"


def performance_profile(
    values: npt.ArrayLike, thresholds: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Computes the share of runs with a score strictly above each threshold: `[X]` or `[X, R]`.

    Args:
      values: scores `[S]`, or R resamples `[S, R]`; a NaN exceeds no threshold.
      thresholds: `[X]`, scores to compare with.

    Example:
      >>> performance_profile([1.0, 2.0, 4.0, 8.0], [0.0, 3.0, 8.0]).tolist()
      [1.0, 0.5, 0.0]
    """
    levels = np.asarray(thresholds, np.float64)
    return np.stack([np.mean(np.asarray(values, np.float64) > level, axis=0) for level in levels])
