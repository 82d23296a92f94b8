"""Tests rewards that find an answer in a text, and the explanation if every completion is wrong."""

import numpy as np
import pytest
import tiny
from folders import arguments, write_place
from tables import cases
from test_scoring import TASK, batch_of, of

from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data import answers
from jaxrl_po.run.data.scoring import HostScore, Reward
from jaxrl_po.run.experiment import rewarding


@cases(
    "text, answer, last_number, contains",
    ("The sum is 12.", "12", 1.0, 1.0),
    ("12, not 13", "12", 0.0, 1.0),
    ("1,200 in all", "1200", 1.0, 0.0),
    ("it is 12.0", "12", 1.0, 0.0),
    ("-3", "3", 0.0, 0.0),
    ("112", "12", 0.0, 0.0),
    ("of course Paris!", "Paris", 0.0, 1.0),
    ("Parisian", "Paris", 0.0, 0.0),
    ("", "12", 0.0, 0.0),
    ("yes, or no", " ", 0.0, 0.0),
    ("it is .5", "0.5", 1.0, 0.0),
    ("pages 3-5", "5", 1.0, 0.0),
    ("9" * 400, "8" * 400, 0.0, 0.0),
    ("3 - 8 = -5", "-5", 1.0, 1.0),
    ("3 − 8 = −5", "-5", 1.0, 1.0),
    ("3 − 8 = −5", "5", 0.0, 0.0),
    ("it is –.5", "-0.5", 1.0, 0.0),
    ("pages 3–5", "5", 1.0, 1.0),
    ("-5", "−5", 1.0, 1.0),
    ("1,500", "500", 0.0, 0.0),
    ("1,500", "1", 0.0, 0.0),
    ("1,500", "1,500", 1.0, 1.0),
    ("1, 500", "500", 1.0, 1.0),
    ("3,4", "4", 1.0, 1.0),
    ("of 1234,567", "567", 1.0, 1.0),
    ("it is 2e3", "2000", 1.0, 0.0),
    ("it is 2e3", "3", 0.0, 0.0),
    ("it is 1.5E-1.", "0.15", 1.0, 0.0),
    ("a 4em space", "4", 1.0, 0.0),
    ("between 10%–15%", "15", 1.0, 1.0),
    ("**3**–5", "5", 1.0, 1.0),
    ("the answer is—5", "5", 1.0, 1.0),
    ("x = –5", "-5", 1.0, 1.0),
    ("Paris,100 km", "Paris", 0.0, 1.0),
    ("[0.5,300]", "0.5", 0.0, 1.0),
    ("[1500,300]", "300", 1.0, 1.0),
    ("2020,500", "2020", 0.0, 1.0),
    ("0x1e3", "3", 1.0, 0.0),
    ("1e1000", "1", 0.0, 0.0),
)
def test_answers_are_found_in_texts(text, answer, last_number, contains):
    assert answers.last_number([text], [answer]) == [last_number]
    assert answers.contains([text], [answer]) == [contains]


def test_pattern_finds_first_group_of_last_match():
    texts = ["#### 4 #### 5", "#### 5 #### 4", "5", "#### five"]
    assert answers.regex(texts, ["5"] * 4, pattern=r"#### (\d+)") == [1.0, 0.0, 0.0, 0.0]
    assert answers.regex(["a 5 b"], ["5"], pattern=r"\d") == [1.0]


def test_pattern_that_does_not_end_scores_0():
    batch = batch_of(["1+2=", "1+2="], ["3", "33"])
    pattern = Reward("jaxrl_po.run.data.answers:regex", arguments={"pattern": r"^\d$"})
    batch = batch._replace(truncated=np.array(batch.truncated))
    with HostScore([pattern], TASK._replace(columns=lambda _: {"answer": ["3"] * 2})) as scorer:
        given, _ = scorer.score_batch(batch, first=True, report=print)
        assert given.score.reshape(-1).tolist() == [1.0, 0.0]
    batch.truncated[0, 1, 2] = True
    for required, wanted in ((False, [1.0, 1.0]), (True, [1.0, 0.0])):
        with HostScore([of("digits")], TASK, require_end=required) as scorer:
            given, metrics = scorer.score_batch(batch, first=True, report=print)
        assert given.score.reshape(-1).tolist() == wanted
        assert metrics["accuracy"].value() == np.mean(wanted)
        assert given.reward.sum(axis=2).reshape(-1).tolist() == wanted


@cases(
    "flags, message",
    (["--reward=regex:("], r"^reward: must be a regular expression, got regex:\(: missing \)"),
    (["--reward=regex:"], r"^reward: must be a regular expression, got regex:: it is empty"),
    (["--reward=last_numbr"], r"must be verifier, model, math, last_number, contains, regex:P"),
    (["--reward.require_end"], r"^reward.require_end: is not a setting"),
)
def test_bad_rewards_are_named(tmp_path, flags, message):
    with pytest.raises(ConfigError, match=message):
        launch.language([*tiny.LANGUAGE, "--algorithm=grpo", f"--out={tmp_path / 'run'}", *flags])


def test_reward_that_finds_the_answers_is_suggested():
    shown = [
        {"expected": "12", "completion": "It is 12, I think", "ended": True},
        {"expected": "7", "completion": "seven", "ended": False},
        {"expected": "", "completion": "?", "ended": False},
    ]
    first, *pairs, found, cut = rewarding.explain_zero(shown)
    assert first == "no held-out completion is right before training:"
    assert pairs == ["expected '12', got 'It is 12, I think'", "expected '7', got 'seven'"]
    assert found == "--reward=last_number would find the answer in 1 of these 2 completions"
    assert cut.startswith("1 of 2 do not end within their budget")
    assert rewarding.explain_zero([shown[2]]) == []


def test_a_first_evaluation_of_0_is_explained(tmp_path, trace_only, monkeypatch, capsys):
    """The programs are only traced, with zeros as results, so that every score is 0."""
    monkeypatch.setattr(rewarding, "explain_zero", lambda shown: [f"explained: {len(shown)}"])
    write_place(tmp_path)
    argv = arguments(tmp_path, tmp_path / "run", "--total_steps=0", "--reward=contains")
    assert launch.language([*argv, "--reward.require_end"]) == 0
    # Two prompts, each with a greedy completion and a sample.
    assert "explained: 4" in capsys.readouterr().out
