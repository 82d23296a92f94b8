"""Tests claims on many seeds: their statistics, and the command from file to verdict."""

import doctest
import json

import claim as claims
import numpy as np
import pytest
import trial
from claim import FAILS, HOLDS, OPEN, Arm, Claim, Comparison, Tuned

from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import registry
from jaxrl_po.run.store.metrics import read

RATE = "config.learning_rate"
SCORE = claims.last("greedy_accuracy")


def about(comparisons, arms=("a", "b"), settings=("one", "two"), **more):
    """Returns a claim that is not trained."""
    return Claim(
        statement="a exceeds b",
        source="a test",
        arms={name: Arm({"algorithm": "grpo"}, RATE, (1e-3, 1e-2)) for name in arms},
        settings={name: {"task": "sorting"} for name in settings},
        comparisons=comparisons,
        score=SCORE,
        measure="accuracy",
        flags={},
        **more,
    )


def runs(mean, *, spread=0.02, inside=True, seed=0):
    """Returns scores of sixteen runs about a mean."""
    scores = np.random.default_rng(seed).normal(mean, spread, 16)
    return Tuned(1e-3, inside, {"greedy_accuracy": np.stack([scores - 1.0, scores], axis=1)})


def judged(a, b, by, *, inside=True):
    results = {
        name: {"a": runs(a, seed=i), "b": runs(b, seed=i + 9, inside=inside)}
        for i, name in enumerate(("one", "two"))
    }
    return claims.judge(about((Comparison("a", "b", by),)), results)[0]


def test_examples_of_the_docstrings_hold():
    assert [doctest.testmod(module).failed for module in (claims, trial)] == [0, 0]


def test_an_initial_policy_is_made_once(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(trial.run, "train", made.append)
    claim = about((Comparison("a", "b", 0.0),), warm_start={"warm_start.steps": 1})
    for _ in range(2):
        flag = trial.begin(claim, "one", tmp_path, {"compilation_cache": ""})
        assert flag == {"init_from": str(tmp_path)}
        (tmp_path / "summary.json").touch()
    (experiment,) = made
    assert experiment.settings["total_steps"] == 0
    assert experiment.settings["warm_start.steps"] == 1


def test_difference_beyond_the_margin_holds():
    higher, lower = judged(0.8, 0.5, by=0.1), judged(0.5, 0.8, by=0.1)
    assert (higher.verdict, higher.improvement) == (HOLDS, 1.0)
    assert (lower.verdict, lower.improvement) == (FAILS, 0.0)
    assert judged(0.5, 0.5, by=0.1).verdict == FAILS
    # The claim is: as good as the other arm, up to .1.
    assert judged(0.5, 0.5, by=-0.1).verdict == HOLDS
    assert judged(0.5, 0.5, by=0.0).verdict == OPEN


def test_arm_at_sweep_edge_gives_no_verdict():
    outcome = judged(0.8, 0.5, by=0.1, inside=False)
    assert outcome.p < 0.001
    assert outcome.verdict == OPEN


def test_a_level_is_compared_with_the_margin_alone():
    results = {name: {"a": runs(0.8)} for name in ("one", "two")}
    for by, verdict in ((0.7, HOLDS), (0.9, FAILS)):
        outcome = claims.judge(about((Comparison("a", None, by),)), results)[0]
        assert outcome.verdict == verdict
        np.testing.assert_allclose(outcome.difference, 0.8, atol=0.02)


def test_verdict_of_claim_follows_its_comparisons():
    outcome = judged(0.8, 0.5, by=0.1)
    for verdicts, whole in (
        ((HOLDS, HOLDS), HOLDS),
        ((HOLDS, OPEN), OPEN),
        ((OPEN, FAILS), FAILS),
        ((HOLDS, FAILS), FAILS),
    ):
        assert claims.verdict([outcome._replace(verdict=each) for each in verdicts]) == whole


def test_intervals_hold_nineteen_of_twenty_resamples():
    """With k heads in a hundred draws of a coin, the mean of the middle half is k / 50 − ½."""
    coin = [np.repeat([0.0, 1.0], 50)]
    for other, half in ((None, 0.2), (coin, 0.2 * 2**0.5)):
        level = 0.5 if other is None else 0.0
        _, low, high, _ = claims.difference(coin, other, by=0.0)
        np.testing.assert_allclose([low, high], [level - half, level + half], atol=0.015)


def test_no_setting_is_cut_as_a_tail():
    """Four settings have different levels: trimming pooled runs would remove the lowest setting."""
    levels = (0.1, 0.4, 0.6, 0.9)
    y = [level + np.linspace(-0.01, 0.01, 16) for level in levels]
    whole, low, high, _ = claims.difference([y[0] + 0.2, *y[1:]], y, 0.0)
    np.testing.assert_allclose(whole, 0.05, atol=1e-12)
    assert 0.04 < low < high < 0.06


def test_holm_is_stricter_for_the_first():
    assert claims.holm([0.03, 0.04]) == [False, False]
    assert claims.holm([0.02, 0.04]) == [True, True]


def test_scores_are_rescaled_by_their_ranges():
    claim = about((Comparison("a", "b", 0.0),), ranges={"one": (-2.0, 2.0)})
    tuned = Tuned(1.0, True, {"greedy_accuracy": np.array([[0.0], [1.0]])})
    assert claim.scores("one", tuned).tolist() == [0.5, 0.75]
    assert claim.scores("two", tuned).tolist() == [0.0, 1.0]


def test_arm_trains_only_where_compared():
    claim = about((Comparison("a", "b", 0.0, settings=("two",)), Comparison("a", None, 0.0)))
    assert claim.settings_of("a") == ["one", "two"]
    assert claim.settings_of("b") == ["two"]


class Tried:
    """Runs whose objective is a known function of the tuned value."""

    def __init__(self, score):
        self.claim = about((Comparison("a", "b", 0.0),))
        self.arm, self.seeds, self.asked = Arm({}, RATE, (1.0, 2.0, 4.0)), (1, 1), []
        self.score = score

    def admits(self, value):
        return True

    def train(self, values, seeds, base_seed):
        assert base_seed == trial.TUNING
        self.asked.append(list(values))
        return [{"greedy_accuracy": np.array([self.score(value)] * seeds)} for value in values]


def peak(best):
    """Returns a score of two equal values, highest at `best`."""
    return lambda value: [-abs(np.log(value / best))] * 2


def test_a_sweep_goes_on_beyond_its_edge():
    for best, value, inside, asked in (
        (2.0, 2.0, True, 1),
        (16.0, 16.0, True, 2),
        (0.25, 0.25, True, 2),
        (1e9, 256.0, False, 3),
    ):
        runs = Tried(peak(best))
        assert trial.tune(runs) == (value, inside)
        assert len(runs.asked) == asked


def test_sweep_stays_within_range_of_flag():
    arm = Arm({"algorithm": "ppo"}, "config.gamma", (0.5, 0.6))
    claim = about((Comparison("a", "b", 0.0),))._replace(
        arms={"a": arm, "b": arm}, settings={"one": {"env": "CartPole-v1"}}
    )
    asked = []

    class Trained(trial.Runs):
        def train(self, values, seeds, base_seed):
            asked.append(list(values))
            return [{"greedy_accuracy": np.full((seeds, 2), value)} for value in values]

    assert trial.tune(Trained(claim, "one", "a", {}, None)) == (0.864, False)
    assert asked == [[0.5, 0.6], [0.72, 0.864]]  # the values 1.04 and 1.24 are out of range


def test_tuning_objective_need_not_be_last_value():
    early = {1.0: 0.2, 2.0: 0.9, 4.0: 0.1}
    runs = Tried(lambda value: [early[value], 0.1 * value])
    runs.claim = runs.claim._replace(objective=claims.last("greedy_accuracy", of=2))
    assert trial.tune(runs) == (2.0, True)


def test_a_diverged_value_is_never_the_best():
    score = peak(4.0)
    runs = Tried(lambda value: score(value) if value < 4.0 else [np.nan] * 2)
    assert trial.tune(runs) == (2.0, True)


SMALL = {
    "total_steps": 64,
    "eval_prompts": 8,
    "model.width": 8,
    "model.layers": 1,
    "model.mlp_width": 8,
    "model.heads": 1,
    "model.kv_heads": 1,
    "problem.num_prompts": 8,
    "problem.group_size": 2,
    "config.use_reference": False,
    "config.num_epochs": 1,
    "config.num_minibatches": 1,
}
OF_FILE = """
from claim import Arm, Claim, Comparison, last

def claim():
    return Claim(
        statement="GRPO exceeds itself", source="a test",
        arms={{"small": Arm({{}}, "config.learning_rate", (1e-4, 1e-3, 1e-2))}},
        settings={{"sorting": {{"task": "sorting"}}}},
        comparisons=(Comparison("small", None, {by}),),
        score=last("greedy_accuracy"), measure="accuracy", flags={flags},
        warm_start={{"warm_start.steps": 2}}, evaluations=2, seeds=3, tuning_seeds=1)
"""


@pytest.fixture
def small(tmp_path):
    """Returns a claim of one small arm, in a file of its own."""
    path = tmp_path / "mine.py"
    flags = {"algorithm": "grpo"} | SMALL
    path.write_text(OF_FILE.format(by=0.5, flags=flags))
    return path


@pytest.mark.usefixtures("trace_only")
@pytest.mark.slow
def test_claim_runs_from_file_to_verdict(small, tmp_path, capsys, monkeypatch):
    out = tmp_path / "study"
    arguments = [f"--claim={small}:claim", f"--out={out}", "--compilation_cache="]
    assert trial.main(arguments) == 0
    printed = capsys.readouterr().out
    table = (out / "table.txt").read_text()
    assert table in printed
    assert "small > 0.5" in table
    assert (out / "verdict.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((out / "config.json").read_text())["statement"] == "GRPO exceeds itself"
    (place,) = (out / "arms" / "1.1").glob("reported *")
    curves = trial.curves_of(place)
    assert np.shape(curves["greedy_accuracy"]) == (3, 2)
    assert np.shape(curves["response_length"]) == (3, 2)

    # Finished arms are not trained again.
    monkeypatch.setattr(trial.run, "sweep", None)
    (out / "table.txt").unlink()
    assert trial.main([*arguments, "--resume"]) == 0
    assert (out / "table.txt").read_text() == table

    # A stated claim cannot be changed.
    small.write_text(small.read_text().replace("None, 0.5", "None, 0.1"))
    with pytest.raises(
        ConfigError,
        match=r"resume: comparisons of the claim must be as stated in .*; choose another",
    ):
        trial.main([*arguments, "--resume"])
    with pytest.raises(ConfigError, match="already holds files"):
        trial.main(arguments)

    # Another claim in the same folder finds no files of the first claim.
    monkeypatch.setattr(trial, "begin", None)
    with pytest.raises(TypeError, match="NoneType"):
        trial.main([*arguments, "--overwrite"])
    assert not (out / "arms" / "1.1").exists()
    assert not (out / "verdict.json").exists()


def test_study_lanes_equal_runs_of_the_command(tmp_path, finished):
    """The same flags and seed give the same evaluation by `jaxrl-po control`."""
    out = finished("control", tmp_path / "run")
    stored = json.loads((out / "config.json").read_text())
    common = ("env", "total_steps", "eval_episodes", "problem.", "network.", "config.num_")
    claim = about((Comparison("a", None, 0.0),), arms=("a",), settings=("one",))._replace(
        arms={"a": Arm({"algorithm": "ppo"}, RATE, (1e-4, 1e-3))},
        settings={"one": {}},
        flags={name: value for name, value in stored.items() if name.startswith(common)},
        evaluations=5,
        seeds=2,
        tuning_seeds=1,
    )
    runs = trial.Runs(claim, "one", "a", {"devices": "1"}, tmp_path / "arms")
    got = runs.train([stored[RATE]], 2, 0)[0]
    lines = {row["iteration"]: row for row in read(out / "metrics.jsonl")}
    for name in ("entropy", "policy_loss"):
        np.testing.assert_allclose(got[name][:, 0], lines[2][name], rtol=1e-4, atol=1e-6)
    for evaluation, iteration in ((2, 6), (4, 10)):
        returns = got["greedy_return"][:, evaluation]
        np.testing.assert_allclose(returns, lines[iteration]["greedy_return"], rtol=1e-4)


def test_untestable_claim_is_one_line(tmp_path, small):
    fine = about((Comparison("a", "b", 0.0),))
    for claim, line in (
        (about(()), "must have a comparison"),
        (about((Comparison("c", "b", 0.0),)), "a comparison names the arm 'c'; choose one of a, b"),
        (
            about((Comparison("a", "b", 0.0, settings=("three",)),)),
            "a comparison names the setting 'three'; choose",
        ),
        (fine._replace(arms={"a": Arm({}, RATE, (1e-2, 1e-3)), "b": fine.arms["b"]}), "ascending"),
        (fine._replace(arms={"a": Arm({}, RATE, (1e-3,)), "b": fine.arms["b"]}), "two or more"),
        (fine._replace(flags={"reward": "mine.py:score"}), "in its program"),
        (fine._replace(flags={"widht": 3}), "widht"),
        (
            fine._replace(
                settings={"one": {}, "two": {}},
                objective=claims.last("greedy_return"),
                warm_start={"warm_start.steps": 1},
            ),
            "warm_start.steps",
        ),
        (fine._replace(settings={"one": {}, "two": {}}), "must have an objective"),
    ):
        with pytest.raises(ConfigError, match=line):
            trial.main([f"--out={tmp_path / 'none'}"], claim)
    for name, line in (
        (f"{small}", "must be a file and a name"),
        (f"{small}:Arm", r"^claim: .*mine.py:Arm: .*missing"),
        (f"{small}:dict", r"^claim: .*mine.py:dict: .* holds no 'dict'"),
    ):
        with pytest.raises(ConfigError, match=line):
            trial.main([f"--claim={name}", f"--out={tmp_path / 'none'}"])
    assert not (tmp_path / "none").exists()


CLAIMS = (
    *("two_of_a_group", "length_bias", "entropy_law", "group_statistics"),
    *("implementation_matters", "dapo_where_it_bites", "worth_of_a_critic"),
)


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_can_be_tested(name):
    """Each claim compares arms that it has, at enough seeds, tasks and sizes."""
    module = __import__(name)
    claim = module.claim()
    trial.check(claim)
    assert claim.seeds >= 16
    assert len(claim.settings) >= 4
    assert all(len(arm.values) >= 4 for arm in claim.arms.values())
    for arm in claim.arms.values():
        assert {**claim.flags, **arm.flags}["algorithm"] in registry.METHODS


@pytest.mark.parametrize("seeds", [2, 3, 5, 8, 16])
def test_arms_that_are_alike_are_rarely_told_apart(seeds, monkeypatch):
    """Equal arms are distinguished at most one time in twenty, up to three standard errors of 300
    comparisons."""
    monkeypatch.setattr(claims, "REPLICATES", 400)
    generator = np.random.default_rng(seeds)
    found = []
    for _ in range(300):
        x, y = ([generator.beta(2.0, 1.0, seeds) for _ in range(2)] for _ in range(2))
        found.append(claims.difference(x, y, 0.0)[3] <= 0.05)
    assert np.mean(found) <= 0.05 + 3 * (0.05 * 0.95 / 300) ** 0.5
    if seeds == 16:
        apart = claims.difference([y + 0.5 for y in x], y, 0.0)[3]
        assert apart <= 0.05


def test_a_run_that_failed_counts_as_the_worst():
    good, failed = np.linspace(0.8, 0.9, 16), np.full(16, np.nan)
    half = np.where(np.arange(16) % 2, 0.95, np.nan)
    x, y = claims.with_failures([half], [good])
    assert x[0].min() == 0.8
    whole, *_, p = claims.difference(x, y, 0.0)
    assert whole < 0.05 or p > 0.05
    (none,), _ = claims.with_failures([failed], [good])
    assert claims.difference([none], [good], 0.0)[0] < 0
    (level,), _ = claims.with_failures([half], None)
    assert level.min() == 0.0


def test_fewer_than_five_seeds_tell_nothing():
    claim = about((Comparison("a", "b", 0.0),))
    for seeds, told in ((4, OPEN), (5, HOLDS)):
        ranges = (("a", 0.8), ("b", 0.1))
        scores = {name: np.linspace(low, low + 0.1, seeds) for name, low in ranges}
        arms = {x: Tuned(1e-3, True, {"greedy_accuracy": y[:, None]}) for x, y in scores.items()}
        assert claims.judge(claim, {"one": arms, "two": arms})[0].verdict == told


def test_curves_of_several_programs_stand_in_their_order(tmp_path):
    for number in (1, 2, 10):
        place = tmp_path / "programs" / str(number)
        place.mkdir(parents=True)
        rows = [{"iteration": i, "score": [number, None]} for i in (0, 5)]
        (place / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = trial.curves_of(tmp_path)["score"]
    np.testing.assert_equal(curves, [[1], [np.nan], [2], [np.nan], [10], [np.nan]])
