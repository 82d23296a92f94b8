"""Tests the search space of sweeps: distributions, draws, ties and refused values."""

import numpy as np
import pytest
from finished import SWEEP
from tables import cases

from jaxrl_po import config
from jaxrl_po.cli import sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import flags, search_space

SMALL = [flag for flag in SWEEP if "learning_rate" not in flag]


@cases(
    "arguments, match",
    (["--config.learning_rat=1e-3,1e-2"], "learning_rate"),
    (["--problem.num_envs=4,many"], "num_envs"),
    (["--env=CartPole-v2"], "CartPole-v1"),
    (["--eval_every=3"], "eval_every: must be left out: a sweep is one process"),
    (["--total_steps=1"], "total_steps: must be 0 or at least 32 .* got 1"),
    (["--critic=nowhere.py:A"], "there is no file"),
    (["--draws=3"], r"draws: must be left out without a distribution, .*log_uniform.* got 3"),
    (["--config.gamma=uniform(0,1)"], "draws: must be at least 1 with a distribution, got 0"),
    (
        ["--draws=3", "--config.gamma=log_uniform(0,1)"],
        r"config.gamma: must be log_uniform\(low,high\) with finite 0 < .* got log_uniform",
    ),
    (["--confirm=2"], "^confirm: must be 0 without a searched flag, got 2"),
    (
        ["--config.epsilon_low=@config.epsilon_hihg", "--config.epsilon_high=0.1,0.2"],
        r"^config.epsilon_low: must be @ and another searched flag, got @config.epsilon_hihg; "
        r"did you mean config.epsilon_high\?",
    ),
    (
        ["--config.gamma=@config.lambda_", "--config.lambda_=0.9"],
        r"^config.gamma: must be @ and another searched flag, got @config.lambda_$",
    ),
    (
        ["--draws=3", "--problem.num_envs=uniform(4,8)"],
        r"^problem.num_envs: must be choice\(a,b,…\), as its values are integers, got uniform",
    ),
    *(
        (
            ["--draws=3", f"--config.gamma={wrong}(0.5,0.9)"],
            rf"^config.gamma: must be a distribution of a sweep, got {wrong}\(0.5,0.9\); "
            + f"(did you mean|choose one of) {right}",
        )
        for wrong, right in (
            ("loguniform", "log_uniform"),
            ("randint", "choice"),
            ("beta", "log_uniform, uniform, choice"),
        )
    ),
)
def test_bad_sweeps_are_named_and_touch_nothing(tmp_path, arguments, match):
    with pytest.raises(ConfigError, match=match):
        sweep.main([*SMALL, f"--out={tmp_path / 'sweep'}", *arguments])
    assert not (tmp_path / "sweep").exists()
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / "sweep.json").write_text("[]")
    with pytest.raises(ConfigError, match=match):
        sweep.main([*SMALL, f"--out={earlier}", "--overwrite", *arguments])
    assert [path.name for path in earlier.iterdir()] == ["sweep.json"]


def test_draws_follow_seed_and_lie_in_range():
    asked = search_space.SweepSpec(
        {},
        {"config.gamma": ["0.9", "0.99"]},
        {"config.learning_rate": "log_uniform(1e-5,1e-1)", "network.width": "choice(4,8)"},
        {},
    )
    found = search_space.combinations(asked, 200, 3)
    assert found == search_space.combinations(asked, 200, 3)
    assert found != search_space.combinations(asked, 200, 4)
    assert len(found) == 400
    rates = np.array([float(each["config.learning_rate"]) for each in found[:200]])
    assert rates.min() >= 1e-5
    assert rates.max() <= 1e-1
    # half of the draws lie below the geometric mean
    assert 70 <= np.sum(rates < 1e-3) <= 130
    assert {each["network.width"] for each in found} == {"4", "8"}
    assert [each["config.learning_rate"] for each in found[200:]] == [
        each["config.learning_rate"] for each in found[:200]
    ]


def test_draws_keep_all_their_digits():
    narrow = search_space.SweepSpec({}, {}, {"config.gamma": "uniform(0.9995,0.99999)"}, {})
    values = [float(each["config.gamma"]) for each in search_space.combinations(narrow, 64, 0)]
    assert len(set(values)) == 64
    assert 0.9995 <= min(values) <= max(values) <= 0.99999


def test_a_sweep_of_earlier_keeps_its_draws():
    asked = search_space.SweepSpec({}, {}, {"config.gamma": "uniform(0.5,0.9)"}, {})
    exact, rounded = (search_space.combinations(asked, 3, 0, rounded=x) for x in (False, True))
    assert [f"{float(x['config.gamma']):.4g}" for x in exact] == [
        x["config.gamma"] for x in rounded
    ]
    coin = search_space.SweepSpec({}, {}, {"network.width": "choice(4,8)"}, {})
    assert len(search_space.combinations(coin, 6, 0, rounded=True)) == 6


def test_equal_combinations_are_searched_once():
    coin = search_space.SweepSpec(
        {}, {"config.gamma": ["0.9", "0.9"]}, {"network.width": "choice(4,8)"}, {}
    )
    found = search_space.combinations(coin, 6, 0)
    assert sorted(each["network.width"] for each in found) == ["4", "8"]


def test_blank_may_precede_a_tie():
    given = {"config.gamma": flags.FlagText("0.9, @config.lambda_")}
    _, swept, _ = search_space.split_flags(given, {"config.gamma": config.Setting("")})
    assert swept == {"config.gamma": ["0.9", "@config.lambda_"]}


def test_tied_flag_has_the_value_of_its_flag():
    ties = {"config.epsilon_low": ["@config.epsilon_high", "0.3"]}
    clips = {"config.epsilon_high": "uniform(0.1,0.4)"}
    found = search_space.combinations(search_space.SweepSpec({}, ties, clips, {}), 5, 0)
    assert all(each["config.epsilon_low"] == each["config.epsilon_high"] for each in found[:5])
    assert [each["config.epsilon_low"] for each in found[5:]] == ["0.3"] * 5
