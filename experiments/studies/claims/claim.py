"""Published claim to test on many seeds: its statement, its criteria, and its verdict."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_po.run.store import statistics

HOLDS, FAILS, OPEN = "holds", "does not hold", "cannot be told here"
LEVEL = 0.05  # significance level for all comparisons of a claim together
LEAST_SEEDS = 5  # smallest number of seeds that an arm needs in a setting for a verdict
REPLICATES = 10_000

Scores = npt.NDArray[np.float64]
Curves = Mapping[str, Scores]
"""Map from the name of a quantity to `[S, E]`: S runs, E evaluations."""
Score = Callable[[Curves], Scores]
"""`(curves of runs, [S, E] each) -> [S]`, returns one number per run."""


def last(name: str, of: int = 1) -> Score:
    """Builds a score: the mean of a quantity over the last evaluations.

    Example:
      >>> last("greedy_accuracy", of=2)({"greedy_accuracy": np.array([[0.0, 0.5, 1.0]])}).tolist()
      [0.75]
    """
    return lambda curves: np.asarray(curves[name][:, -of:].mean(axis=1))


class Arm(NamedTuple):
    """Arm of the comparison.

    Attributes:
      flags: map from the name of a flag to its value in this arm.
      tuned: name of the numeric flag that is tuned for this arm.
      values: grid of the tuned flag, ascending; extended if the best value lies at its edge.
    """

    flags: Mapping[str, Any]
    tuned: str
    values: tuple[float, ...]


class Comparison(NamedTuple):
    """Statement that an arm's score exceeds another arm's, or a level, by more than a margin.

    Attributes:
      arm: name of the first arm.
      than: name of the other arm, or None to compare with the level 0.
      by: margin; negative for a claim of "at least as good, up to the margin".
      settings: names of the settings that the two arms are compared in; empty for all settings.
      score: score that replaces the claim's score in this comparison, or None.
    """

    arm: str
    than: str | None
    by: float
    settings: tuple[str, ...] = ()
    score: Score | None = None

    def __str__(self) -> str:
        """Returns the comparison in words.

        Example:
          >>> str(Comparison("G = 2", "G = 16", -0.02))
          'G = 2 − G = 16 > −0.02'
        """
        left = self.arm if self.than is None else f"{self.arm} − {self.than}"
        return f"{left} > {self.by:g}".replace("> -", "> −")


class Claim(NamedTuple):
    """A claim with its criteria for and against it, stated before anything runs.

    A claim holds if every comparison holds, and fails if the opposite of one comparison is shown.

    Attributes:
      statement: claim in one sentence.
      source: publication of the claim.
      arms: map from names to arms.
      settings: map from names to flags: environments, or tasks and sizes.
      comparisons: comparisons that the claim states.
      score: `(curves) -> [S]`, returns one score per run, by which arms are compared.
      measure: meaning of the score in words, with its unit.
      flags: flags of all runs.
      warm_start: flags that train one initial policy in each setting, from which all runs of the
        setting start; empty to start from random policies.
      objective: `(curves) -> [S]`, returns the number of each run that tuning maximises.
      evaluations: number of evaluations of each run.
      seeds: number of seeds of each arm in each setting.
      tuning_seeds: number of seeds for each value while tuning; reported runs have other seeds.
      limits: text that states the limits of the verdict's validity.
      ranges: map from a setting to its scores that count as 0 and as 1, if settings have different
        scales; empty if scores are compared unchanged.
      seeds_in: map from a setting to its number of seeds, for settings that have fewer seeds.
    """

    statement: str
    source: str
    arms: Mapping[str, Arm]
    settings: Mapping[str, Mapping[str, Any]]
    comparisons: tuple[Comparison, ...]
    score: Score
    measure: str
    flags: Mapping[str, Any]
    warm_start: Mapping[str, Any] = {}
    objective: Score = last("greedy_accuracy")
    evaluations: int = 10
    seeds: int = 16
    tuning_seeds: int = 4
    limits: str = ""
    ranges: Mapping[str, tuple[float, float]] = {}
    seeds_in: Mapping[str, int] = {}

    def flags_of(self, setting: str, arm: Arm, value: float) -> dict[str, Any]:
        """Returns the flags of an arm in a setting, with a value of the arm's tuned flag."""
        return {**self.flags, **self.settings[setting], **arm.flags, arm.tuned: value}

    def seeds_of(self, setting: str, num_values: int) -> tuple[int, int]:
        """Returns an arm's numbers of seeds in a setting: for the result, and per tuned value."""
        if setting not in self.seeds_in:
            return self.seeds, self.tuning_seeds
        seeds = self.seeds_in[setting]
        return seeds, max(1, min(self.tuning_seeds, seeds // num_values))

    def scores(self, setting: str, tuned: "Tuned", score: Score | None = None) -> Scores:
        """Computes the scores of an arm in a setting, `[S]`."""
        low, high = self.ranges.get(setting, (0.0, 1.0))
        return ((score or self.score)(tuned.curves) - low) / (high - low)

    def settings_of(self, arm: str) -> list[str]:
        """Returns the names of the settings in which an arm is compared."""
        wanted: dict[str, None] = {}
        for comparison in self.comparisons:
            if arm in (comparison.arm, comparison.than):
                wanted |= dict.fromkeys(comparison.settings or self.settings)
        return [name for name in self.settings if name in wanted]


def crossed(*parts: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Combines settings: every combination of one setting from each part, such as tasks and sizes.

    Example:
      >>> crossed({"sums": {"task": "addition"}}, {"small": {"model.width": 32}})
      {'sums, small': {'task': 'addition', 'model.width': 32}}
    """
    found: dict[tuple[str, ...], dict[str, Any]] = {(): {}}
    for part in parts:
        pairs = itertools.product(found.items(), part.items())
        found = {(*names, name): {**own, **more} for (names, own), (name, more) in pairs}
    return {", ".join(names): flags for names, flags in found.items()}


class Tuned(NamedTuple):
    """Result of tuning an arm in a setting.

    Attributes:
      value: best value of the tuned flag.
      inside: True if smaller and larger values were tried too.
      curves: curves of the runs with the best value, on new seeds.
    """

    value: float
    inside: bool
    curves: Curves


class Outcome(NamedTuple):
    """Result of a comparison.

    Attributes:
      comparison: comparison that was tested.
      difference: difference between the scores of the two arms, see `centre`.
      low: lower end of the difference's 95 % interval.
      high: upper end of the difference's 95 % interval.
      each: `(difference, low, high)` of each setting.
      improvement: probability that a run of the first arm exceeds a run of the other arm; the mean
        over the settings.
      p: two-sided p-value of the hypothesis that the difference is the margin, uncorrected.
      verdict: verdict with Holm's correction over the comparisons of the claim.
    """

    comparison: Comparison
    difference: float
    low: float
    high: float
    each: dict[str, tuple[float, float, float]]
    improvement: float
    p: float
    verdict: str


def centre(arm: Sequence[Scores]) -> Scores:
    """Computes the mean over settings of the interquartile mean over runs, `[S, …]` each to `[…]`.

    Runs of different settings are not pooled before the tails are cut: if the levels of settings
    differ, cutting pooled runs would remove entire settings.

    Example:
      >>> float(centre([np.array([0.0, 0.1, 0.1, 0.2]), np.array([0.8, 0.9, 0.9, 1.0])]))
      0.5
    """
    return np.mean([statistics.interquartile_mean(runs) for runs in arm], axis=0)


def resampled(arm: Sequence[Scores], seed: int) -> Scores:
    """Computes the centres of resampled runs, `[R]`; runs are resampled within each setting."""
    draw = np.random.default_rng(seed).integers
    return centre([runs[draw(len(runs), size=(len(runs), REPLICATES))] for runs in arm])


def difference(
    x: Sequence[Scores], y: Sequence[Scores] | None, by: float
) -> tuple[float, float, float, float]:
    """Computes the difference of two arms (see `centre`), and its significance against a margin.

    Args:
      x: scores of one arm in each setting, `[S]` each.
      y: scores of the other arm, or None for 0.
      by: margin of the hypothesis.

    Returns:
      Difference, the two ends of its 95 % interval (stratified percentile bootstrap), and the
      two-sided p of `permuted` for a difference of `by`.

    Example:
      >>> runs = [np.linspace(0.8, 0.9, 16)]
      >>> d, low, high, p = difference(runs, [np.linspace(0.4, 0.5, 16)], by=0.1)
      >>> bool(0.35 < low < d < high < 0.45 and p <= 0.001)
      True
    """
    whole = float(centre(x)) - (0.0 if y is None else float(centre(y)))
    draws = resampled(x, 0) - (0.0 if y is None else resampled(y, 1))
    low, high = np.percentile(draws, statistics.TAILS)
    return whole, float(low), float(high), permuted([runs - by for runs in x], y)


def permuted(x: Sequence[Scores], y: Sequence[Scores] | None) -> float:
    """Computes the two-sided p of a permutation test that two arms have the same centre.

    The arguments x, y and by have the same meaning as in `difference`. The permutations exchange
    runs of the two arms within a setting; without a second arm they flip signs of runs. The test
    holds its level for any number of runs, whereas a bootstrap of few runs has too narrow
    intervals; p is at least 1 / 10,001.

    Example:
      >>> permuted([np.array([2.0, 3.0])], [np.array([0.0, 1.0])]) > 0.2  # 2 of 6 ways
      True
    """
    generator = np.random.default_rng(2)
    first, second = list[Scores](), list[Scores]()
    for i, runs in enumerate(x):
        if y is None:
            signs = generator.choice([-1.0, 1.0], size=(len(runs), REPLICATES))
            first.append(runs[:, None] * signs)
            continue
        both = np.concatenate([runs, y[i]])
        order = generator.random((len(both), REPLICATES)).argsort(axis=0)
        first.append(both[order[: len(runs)]])
        second.append(both[order[len(runs) :]])
    draws = centre(first) - (centre(second) if second else 0.0)
    whole = float(centre(x)) - (0.0 if y is None else float(centre(y)))
    as_far = np.abs(draws) >= abs(whole) - 1e-12 * max(1.0, abs(whole))
    return float((1 + as_far.sum()) / (1 + REPLICATES))


def holm(p: Sequence[float], level: float = LEVEL) -> list[bool]:
    """Applies Holm's procedure, which rejects the k-th smallest p at `level / (m − k + 1)`.

    True in the result stands for a rejected hypothesis. Holm 1979.

    Example:
      >>> holm([0.04, 0.01, 0.03])
      [False, True, False]
    """
    rejected = [False] * len(p)
    for rank, i in enumerate(np.argsort(p, kind="stable")):
        if p[i] > level / (len(p) - rank):
            break
        rejected[i] = True
    return rejected


def judge(claim: Claim, results: Mapping[str, Mapping[str, Tuned]]) -> list[Outcome]:
    """Computes the outcome of every comparison of a claim.

    Args:
      claim: claim that was tested.
      results: map from a setting to a map from an arm to its tuned runs.
    """
    found = [compare(claim, comparison, results) for comparison in claim.comparisons]
    verdicts = []
    for outcome, rejected in zip(found, holm([each.p for each in found]), strict=True):
        comparison = outcome.comparison
        arms = [arm for arm in (comparison.arm, comparison.than) if arm is not None]
        used = [results[name][arm] for name in outcome.each for arm in arms]
        enough = all(len(claim.score(each.curves)) >= LEAST_SEEDS for each in used)
        told = rejected and enough and all(each.inside for each in used)
        side = HOLDS if outcome.difference > comparison.by else FAILS
        verdicts.append(outcome._replace(verdict=side if told else OPEN))
    return verdicts


def compare(
    claim: Claim, comparison: Comparison, results: Mapping[str, Mapping[str, Tuned]]
) -> Outcome:
    """Computes the outcome of one comparison, without a verdict.

    `judge` documents the arguments.
    """
    settings = comparison.settings or tuple(claim.settings)

    def scores(arm: str) -> list[Scores]:
        return [claim.scores(name, results[name][arm], comparison.score) for name in settings]

    x = scores(comparison.arm)
    y = None if comparison.than is None else scores(comparison.than)
    x, y = with_failures(x, y)
    each = {
        name: difference([x[i]], y and [y[i]], comparison.by)[:3] for i, name in enumerate(settings)
    }
    pairs = zip(x, y or [np.zeros(1)] * len(x), strict=True)
    improvement = np.mean([statistics.probability_of_improvement(*pair) for pair in pairs])
    whole, low, high, p = difference(x, y, comparison.by)
    return Outcome(comparison, whole, low, high, each, float(improvement), p, OPEN)


def with_failures(
    x: Sequence[Scores], y: Sequence[Scores] | None
) -> tuple[list[Scores], list[Scores] | None]:
    """Replaces the score of a NaN run by the worst score of both arms.

    Returns the scores of both arms, in each setting.

    Without a second arm the level 0 is included when the worst score is taken.

    Example:
      >>> x, y = with_failures([np.array([0.9, np.nan])], [np.array([0.5, 0.4])])
      >>> x[0].tolist()
      [0.9, 0.4]
    """

    def filled(runs: Scores, other: Scores) -> Scores:
        known = np.concatenate([runs, other])
        known = known[np.isfinite(known)]
        return np.where(np.isfinite(runs), runs, known.min() if known.size else 0.0)

    if y is None:
        return [filled(runs, np.zeros(1)) for runs in x], None
    return list(map(filled, x, y)), list(map(filled, y, x))


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Returns the claim's verdict.

    The claim holds if all comparisons hold, and fails if one comparison fails.
    """
    each = [outcome.verdict for outcome in outcomes]
    if FAILS in each:
        return FAILS
    return HOLDS if set(each) == {HOLDS} else OPEN


def interval(centre: float, low: float, high: float) -> str:
    """Formats a number with its confidence interval.

    Example:
      >>> interval(0.5, 0.4, 0.61)
      '0.500 [0.400, 0.610]'
    """
    return f"{centre:.3f} [{low:.3f}, {high:.3f}]"


def shown(claim: Claim, setting: str, name: str, tuned: Tuned) -> str:
    """Formats the score of an arm in a setting, and the tuned value that reached the score."""
    scores = statistics.worst_if_missing(claim.scores(setting, tuned))
    low, high = (float(end) for end in statistics.bootstrap_interval(scores))
    edge = "" if tuned.inside else ", at the edge of what was tried"
    return (
        f"{name:<28} {interval(float(statistics.interquartile_mean(scores)), low, high)}   "
        f"{claim.arms[name].tuned}={tuned.value:g}{edge}"
    )


def table(
    claim: Claim, results: Mapping[str, Mapping[str, Tuned]], outcomes: Sequence[Outcome]
) -> str:
    """Formats the claim, its comparisons with verdicts, and every arm in every setting."""
    lines = [f"{claim.statement} ({claim.source})", f"score: {claim.measure}", ""]
    row = "{:<44} {:>24} {:>10} {:>7}  {}".format
    lines.append(row("comparison", "difference", "P(better)", "p", "verdict"))
    for each in outcomes:
        whole = interval(each.difference, each.low, each.high)
        chances = f"{each.improvement:.2f}", f"{each.p:.4f}"
        lines.append(row(str(each.comparison), whole, *chances, each.verdict))
        parts = each.each if len(each.each) > 1 else {}
        lines += [f"{'  in ' + name:<44} {interval(*ends):>24}" for name, ends in parts.items()]
    lines += ["", "every arm, with the value that was best for it:"]
    for setting, arms in results.items():
        told = [shown(claim, setting, name, tuned) for name, tuned in arms.items()]
        lines += [f"{setting:<30} {each}" for each in told]
    lines += ["", f"The claim {verdict(outcomes)}.", claim.limits]
    return "\n".join(lines).rstrip() + "\n"
