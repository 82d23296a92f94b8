import jax.numpy as jnp
import numpy as np
import tiny
import toy_run
from probes import one_piece
from tables import cases

from jaxrl_po.algorithms import a2c, grpo, npg, ppo, trpo
from jaxrl_po.masked import Mean
from jaxrl_po.run.experiment import control, language
from jaxrl_po.run.experiment.experiment import Experiment
from jaxrl_po.run.experiment.prepare import prepare
from jaxrl_po.run.loop.job import smaller_steps
from jaxrl_po.run.loop.progress import MetricWarnings


def mean(total):
    total = np.array(total, np.float64)
    return Mean(total, np.full(total.shape, 8.0))


def test_iteration_without_signal_in_all_seeds_warns_once():
    doubts = MetricWarnings()
    assert list(doubts.about(10, {"signal": mean([[1.0, 0.0], [0.0, 2.0]])}, {})) == []
    (said,) = doubts.about(12, {"signal": mean([[0.0, 1.0], [0.0, 0.0]])}, {})
    assert said.startswith("iteration 14 taught nothing: ")
    assert list(doubts.about(14, {"signal": mean([[0.0, 0.0]])}, {})) == []


def test_zero_held_out_accuracy_beside_training_success_warns():
    doubts = MetricWarnings()
    for row in (
        {"accuracy": [0.3, 0.3]},  # this line has no evaluation
        {"greedy_accuracy": [0.0, 0.0]},  # this is the first line of a run
        # 0.01 is the accuracy of random answers.
        {"accuracy": [0.3, 0.01], "greedy_accuracy": [0.1, 0.0]},
        {"accuracy": [0.3, None], "greedy_accuracy": [0.3, None]},
    ):
        assert list(doubts.about(0, {}, row)) == []
    row = {"accuracy": [0.3, 0.25], "greedy_accuracy": [0.1, 0.0]}
    (said,) = doubts.about(0, {}, row)
    assert said.startswith("seed 1: held-out greedy accuracy 0, though 0.25 in training: ")
    assert list(doubts.about(0, {}, row)) == []


def test_nonfinite_numbers_warn_once_per_seed():
    spoiled = {"frac_nonfinite": mean([[0.0, 0.0], [0.0, 3.0]])}
    doubts = MetricWarnings()
    (said,) = doubts.about(4, spoiled, {})
    assert said.startswith("seed 1: a reward or observation of iteration 6 is not finite; ")
    assert list(doubts.about(6, spoiled, {})) == []
    (said,) = doubts.about(8, {"frac_nonfinite": mean([[2.0, 2.0]])}, {})
    assert said.startswith("seed 0: ")


def test_an_environment_that_never_resets_is_reported_once():
    doubts = MetricWarnings()
    for i, shares in enumerate([[0.1, 1.0], [0.1, 0.6], [0.99, 0.99]]):
        assert list(doubts.about(i, {}, {"frac_one_step": shares})) == []
    (said,) = doubts.about(3, {}, {"frac_one_step": [0.1, 1.0]})
    assert said.startswith("seed 1, after iteration 3: all episodes have one step now, as if")
    assert "frac_one_step" in said
    assert list(doubts.about(4, {}, {"frac_one_step": [1.0, 1.0]})) == []


def test_bandits_have_episodes_of_one_step_by_design():
    doubts = MetricWarnings()
    for i in range(3):
        assert list(doubts.about(i, {}, {"frac_one_step": [1.0, 1.0]})) == []


def test_observations_outside_their_space_are_reported_once():
    doubts = MetricWarnings()
    assert list(doubts.about(0, {}, {"frac_out_of_range": [0.0, 0.0]})) == []
    (said,) = doubts.about(4, {}, {"frac_out_of_range": [0.0, 0.2]})
    assert said.startswith("seed 1, after iteration 4: a discrete observation lies outside its")
    assert list(doubts.about(6, {}, {"frac_out_of_range": [0.1, 0.2]})) == []


def test_an_evaluation_without_an_end_is_reported_once():
    doubts = MetricWarnings()
    for ended in ([], [1.0, 0.25], [1.0, None]):
        assert list(doubts.about(0, {}, {"greedy_ended": ended})) == []
    (said,) = doubts.about(0, {}, {"greedy_ended": [1.0, 0.0]})
    assert said.startswith("seed 1, after iteration 0: no episode of the evaluation ends within")
    assert list(doubts.about(1, {}, {"greedy_ended": [0.0, 0.0]})) == []


def test_a_large_kl_is_reported_once():
    large = {"kl": mean([[8.0, 8.0], [0.8, 41.6]])}  # a KL of 1 nat is not above the threshold of 1
    doubts = MetricWarnings("set --config.early_stop")
    (said,) = doubts.about(4, large, {})
    assert said.startswith("seed 1: the update of iteration 6 has a kl of 5.2 nats, ")
    assert ": set --config.early_stop; " in said
    assert list(doubts.about(6, large, {})) == []


@cases("total, count", (np.nan, 8.0), (0.0, 0.0))
def test_a_kl_without_a_number_is_not_reported(total, count):
    kl = Mean(np.array([[total]]), np.array([[count]]))
    assert list(MetricWarnings().about(0, {"kl": kl}, {})) == []


@cases(
    "method, advice",
    (ppo.Config(), "set --config.early_stop, which ends an update at a KL of --config.target"),
    (ppo.Config(early_stop=True), "lower --config.learning_rate"),
    (grpo.Config(), "lower --config.learning_rate"),
    (a2c.Config(), "lower --config.learning_rate"),
    (trpo.Config(), "lower --config.max_kl"),
    (npg.Config(), "lower --config.max_kl"),
    (None, ""),
)
def test_advice_names_fields_of_the_method(method, advice):
    assert smaller_steps(method).startswith(advice)
    assert bool(smaller_steps(method)) == bool(advice)


def test_a_run_says_what_makes_steps_smaller(tmp_path):
    def step(state):
        state, metrics = toy_run.toy().step(state)
        kl = jnp.where(state.step == 7, jnp.array([0.1, 2.0, 0.1]), 0.1)
        return state, metrics | {"kl": Mean(kl, jnp.ones(toy_run.SEEDS))}

    reporter, learner = toy_run.Silent(), one_piece(toy_run.toy().init, step)
    toy_run.run(tmp_path / "run", reporter, learner=learner, smaller_steps="do less")
    (said,) = [line for line in reporter.reported if "kl" in line]
    assert said.startswith("seed 1: the update of iteration 7 has a kl of 2 nats, ")
    assert ": do less; " in said


@cases(
    "script, flags, advice",
    (control, tiny.CONTROL, "set --config.early_stop"),
    (control, [*tiny.CONTROL, "--network.memory=transformer"], "lower --config.learn"),
    (language, [*tiny.LANGUAGE, "--algorithm=grpo"], "lower --config.learning_rate"),
    ids=["ppo", "memory", "language"],
)
def test_a_job_has_its_methods_advice(tmp_path, script, flags, advice):
    given = Experiment.parse(script, [*flags, f"--out={tmp_path / 'run'}"]).read()
    assert prepare(script, given).display.smaller_steps.startswith(advice)
