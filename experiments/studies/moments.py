"""Computes bias and variance of advantage estimators and policy gradients, measured and exact."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from segments import GROUPS, Array, Setting, Sums, total

Statistics = dict[str, Array]
Pair = tuple[Array, Array]


class Cells(NamedTuple):
    """Moments of the error Â − A given the state, the action and the position.

    NaN for an unvisited cell.

    Attributes:
      mean: `[C, E, T, S, A]`, mean error.
      variance: `[C, E, T, S, A]`, variance of the error.
      visits: `[T, S, A]`, number of visits; infinite for exact moments.
    """

    mean: Array
    variance: Array
    visits: Array


def cells(setting: Setting, sums: Sums) -> Cells:
    """Computes the measured moments; variances are unbiased estimates."""
    count = sums.visits
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = sums.error / count
        variance = (sums.square - count * np.square(mean)) / (count - 1)
    variance = np.where(count > 1, np.maximum(variance, 0.0), np.nan)
    return Cells(
        *(x.reshape(*x.shape[:-1], *setting.logits.shape) for x in (mean, variance, count))
    )


def exact_cells(setting: Setting, mixtures: Array, horizons: Array, num_steps: int) -> Cells:
    """Computes exact moments by enumeration, backwards from the last step of Σ_l cˡ δ_{t+l}.

    Args:
      setting: MDP, policy and critics.
      mixtures: `[E]`, λ, so that c = γλ.
      horizons: `[E]`, number of steps in the sum, at most the steps left in the segment.
      num_steps: T, steps of a segment.
    """
    transition, reward, _, gamma = (np.asarray(x) for x in setting.mdp)
    policy, critics = np.asarray(setting.policy), np.asarray(setting.critics)
    delta = (reward[:, :, None] + gamma * critics[:, None, None, :] - critics[:, :, None, None])[
        :, None
    ]
    decay = gamma * mixtures[:, None, None, None]

    def expected(x: Array) -> Array:
        return np.einsum("sat,...sat->...sa", transition, x)

    def following(x: Array) -> Array:
        """Averages an array over the next step's state and action, and over the next state."""
        return np.sum(policy * x, axis=-1)[:, :, None, None, :]

    mean = square = np.zeros((len(critics), len(mixtures), *reward.shape))
    means, squares = [], []
    for _ in range(num_steps):
        ahead = decay * following(mean)
        square = expected(
            np.square(delta) + 2 * delta * ahead + np.square(decay) * following(square)
        )
        mean = expected(delta + ahead)
        means.append(mean)
        squares.append(square)
    left = np.minimum(horizons[:, None], num_steps - np.arange(num_steps)) - 1
    chosen = np.arange(len(mixtures))[:, None]
    mean, square = (np.stack(x, axis=2)[:, chosen, left] for x in (means, squares))
    variance = np.maximum(square - np.square(mean), 0.0)
    return Cells(mean - np.asarray(setting.advantage), variance, np.full(mean.shape[2:], np.inf))


def scores(setting: Setting, moments: Cells) -> Statistics:
    """Averages unbiased estimates of the squared bias over visits; of a bias of 0 the mean is 0.

    Returns:
      Keys of the result: `advantage_bias` of Â against A; `bias` and `rmse` of Â + V̂ against Q;
      `deviation` given state, action and position.
    """
    policy = np.asarray(setting.policy)
    often = np.asarray(setting.mdp.initial)[:, None] * policy
    weights = np.where(
        np.isinf(moments.visits), often, np.where(moments.visits > 1, moments.visits, 0.0)
    )
    weights = weights / weights.sum()
    baseline = (np.asarray(setting.critics) - np.asarray(setting.value))[:, None, None, :, None]

    def average(x: Array) -> Array:
        return np.sum(weights * np.where(weights > 0, x, 0.0), axis=(-3, -2, -1))

    with np.errstate(divide="ignore", invalid="ignore"):
        noise = moments.variance / moments.visits
    bias, variance = average(np.square(moments.mean + baseline) - noise), average(moments.variance)
    advantage_bias = average(np.square(moments.mean) - noise)
    return {
        "advantage_bias": advantage_bias,
        "bias": bias,
        "deviation": variance,
        "rmse": bias + variance,
    }


class GradientScores(NamedTuple):
    """Scores of the policy gradient of one segment, relative to the exact gradient, `[C, E]`.

    Attributes:
      bias: squared bias of the gradient.
      variance: trace of the gradient's covariance.
    """

    bias: Array
    variance: Array

    def error(self, segments: float | Array) -> Array:
        """Computes the mean squared relative error of the average over a number of segments."""
        return np.maximum(self.bias, 0.0) + self.variance / segments

    def segments(self, accuracy: float) -> Array:
        """Computes the number of segments at which √error is `accuracy`.

        Infinite if the bias alone exceeds it.
        """
        slack = accuracy**2 - np.maximum(self.bias, 0.0)
        return np.where(slack > 0, self.variance / np.where(slack > 0, slack, 1.0), np.inf)


def gradient_scores(setting: Setting, sums: Sums) -> GradientScores:
    """Measures the scores of the policy gradient from the segments' gradients."""
    count = sums.visits[0].sum()
    exact = np.asarray(setting.gradient).ravel()
    mean = sums.gradient / count
    variance = (sums.gradient_square - count * np.square(mean).sum(-1)) / (count - 1)
    bias = np.square(mean - exact).sum(-1) - variance / count
    return GradientScores(bias / (exact @ exact), variance / (exact @ exact))


def gradient_bias(setting: Setting, moments: Cells) -> Array:
    """Computes the mean policy gradient minus the exact one, `[C, E, S·A]`, from exact moments."""
    policy = np.asarray(setting.policy)
    error = moments.mean.mean(axis=2)
    centred = error - np.sum(policy * error, axis=-1, keepdims=True)
    bias = np.asarray(setting.mdp.initial)[:, None] * policy * centred
    return bias.reshape(*bias.shape[:2], -1)


def exact_scores(setting: Setting, mixtures: Array, horizons: Array, num_steps: int) -> Statistics:
    """Computes roots of the `scores` of `exact_cells`, and the relative `gradient_bias`."""
    moments = exact_cells(setting, mixtures, horizons, num_steps)
    bias = gradient_bias(setting, moments)
    squared = scores(setting, moments) | {
        "gradient_bias": np.square(bias).sum(-1) / np.square(setting.gradient).sum()
    }
    return {name: np.sqrt(x) for name, x in squared.items()}


def jackknife(statistic: Callable[[Sums], Statistics], sums: Sums) -> dict[str, Pair]:
    """Computes the root of each statistic, and its standard error by leaving out one group."""
    whole = total(sums)
    others = [
        statistic(Sums(*(x - y[i] for x, y in zip(whole, sums, strict=True))))
        for i in range(GROUPS)
    ]
    pairs = {}
    for name, squared in statistic(whole).items():
        error = np.sqrt((GROUPS - 1) * np.var([other[name] for other in others], axis=0))
        centre = np.maximum(squared, 0.0)
        # Takes the difference upwards only, which is finite where the square is 0 too.
        pairs[name] = np.sqrt(centre), np.sqrt(centre + error) - np.sqrt(centre)
    return pairs
