import numpy as np

from jaxrl_po.masked import Mean
from jaxrl_po.run.loop.log import Doubts


def mean(total):
    total = np.array(total, np.float64)
    return Mean(total, np.full(total.shape, 8.0))


def test_an_iteration_without_signal_in_any_seed_is_said_once():
    doubts = Doubts()
    assert list(doubts.about(10, {"signal": mean([[1.0, 0.0], [0.0, 2.0]])}, {})) == []
    (said,) = doubts.about(12, {"signal": mean([[0.0, 1.0], [0.0, 0.0]])}, {})
    assert said.startswith("iteration 14 taught nothing: ")
    assert list(doubts.about(14, {"signal": mean([[0.0, 0.0]])}, {})) == []


def test_a_held_out_accuracy_of_zero_is_said_where_training_has_another():
    doubts = Doubts()
    for row in (
        {"accuracy": [0.3, 0.3]},  # not evaluated
        {"greedy_accuracy": [0.0, 0.0]},  # the first line
        {"accuracy": [0.3, 0.01], "greedy_accuracy": [0.1, 0.0]},  # 0.01 is chance
        {"accuracy": [0.3, None], "greedy_accuracy": [0.3, None]},
    ):
        assert list(doubts.about(0, {}, row)) == []
    row = {"accuracy": [0.3, 0.25], "greedy_accuracy": [0.1, 0.0]}
    (said,) = doubts.about(0, {}, row)
    assert said.startswith("seed 1: held-out greedy accuracy 0, though 0.25 in training: ")
    assert list(doubts.about(0, {}, row)) == []


def test_numbers_that_are_not_finite_are_said_once_a_seed():
    spoiled = {"frac_nonfinite": mean([[0.0, 0.0], [0.0, 3.0]])}
    doubts = Doubts()
    (said,) = doubts.about(4, spoiled, {})
    assert said.startswith("seed 1: a reward or observation of iteration 6 is not finite; ")
    assert list(doubts.about(6, spoiled, {})) == []
    (said,) = doubts.about(8, {"frac_nonfinite": mean([[2.0, 2.0]])}, {})
    assert said.startswith("seed 0: ")
