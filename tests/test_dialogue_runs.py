"""Tests runs of dialogues on the command line."""

import dataclasses
import html
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases
from tiny import MODEL

from jaxrl_po import run
from jaxrl_po.algorithms import actor_critic
from jaxrl_po.cli import evaluate, launch, render, report
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, dialogues
from jaxrl_po.run.data.transcripts import transcript
from jaxrl_po.run.store.metrics import read
from jaxrl_po.types import ActorCritic, Batch

SMALL = [
    "--task=higher_lower",
    "--task.numbers=4",
    "--task.max_turns=3",
    "--problem.num_prompts=4",
    "--problem.group_size=4",
    "--total_steps=32",
    "--log_every=1",
    "--eval_every=1",
    "--seeds=2",
    "--devices=1",
    "--eval_prompts=8",
    *MODEL,
]


def written(game):
    """Returns a game as a person reads it, formatted independently of the library."""
    text = f"step {game['step']:,}, {game['decoding']}, score {game['score']:g}"
    text += f", guesses {game['guesses']:g}\nprompt  {game['prompt']}"
    for turn in game["turns"]:
        text += f"\npolicy  {turn['message']}"
        earned = []
        if turn["reward"] != 0:
            earned.append(f"reward {turn['reward']:g}")
        if game["decoding"] == "sampled":
            earned.append(f"advantage {turn['advantage']:+.2f}")
        if earned:
            text += f"    ({', '.join(earned)})"
        if turn["reply"]:
            text += f"\nreply   {turn['reply']}"
    return text


@pytest.fixture(scope="module")
def games():
    """Returns games of an untrained policy, some of whose messages are guesses."""
    dialogue = dialogues.higher_lower(4, max_turns=3)
    model = Transformer(dialogue.tokenizer.size, width=8, layers=1, heads=2, mlp_width=8)
    describe = dialogues.make_describe(dialogue, model, num_prompts=1024)

    @jax.jit
    def play(key):
        params = model.init(key, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
        return describe(ActorCritic(params), None, key)

    return dialogues.render(dialogue, jax.device_get(play(jax.random.key(0))))


def test_games_are_told_turn_by_turn(games):
    assert {game["score"] for game in games} == {0.0, 1.0}
    first = {
        decoding: {game["turns"][0]["message"] for game in games if game["decoding"] == decoding}
        for decoding in ("greedy", "sampled")
    }
    assert len(first["greedy"]) == 1 < len(first["sampled"])
    told = 0
    # a greedy game for each prompt, and a group of four sampled games
    for start in range(0, len(games), 5):
        group = [(game["score"], game["turns"][0]["advantage"]) for game in games[start + 1 :][:4]]
        told += any(advantage for _, advantage in group)
        assert abs(sum(advantage for _, advantage in group)) < 1e-5
        assert all((score > 0) == (advantage > 0) for score, advantage in group if advantage)
    assert told > 0
    assert {turn["reply"] for game in games for turn in game["turns"]} == {"<", ">", "!", ""}
    for game in games:
        assert game["prompt"] == "?"
        assert 1 <= len(game["turns"]) <= 3
        assert {turn["reply"] for turn in game["turns"][:-1]} <= {"<", ">", "!"}
        assert game["turns"][-1]["reply"] == ""
        assert all(
            ("advantage" in turn) == (game["decoding"] == "sampled") for turn in game["turns"]
        )
        assert game["score"] == float(game["turns"][-1]["reward"] > 0)
        assert game["guesses"] == (len(game["turns"]) if game["score"] else 4)


@pytest.mark.usefixtures("trace_only")
def test_run_is_evaluated_again_and_shows_its_games(games, tmp_path, capsys):
    out = tmp_path / "run"
    arguments = ["--algorithm=grpo", "--config.supervision=turn", "--warm_start.steps=0"]
    assert launch.language([*SMALL, *arguments, "--show=0", f"--out={out}"]) == 0
    assert len(json.loads((out / "summary.json").read_text())["greedy_accuracy"]) == 2
    last = read(out / "metrics.jsonl")[-1]
    assert {"guesses", "turns", "truncated", "greedy_guesses", "greedy_turns"} <= last.keys()
    assert evaluate.main([f"--run={out}"]) == 0
    assert ", 8 prompts, " in capsys.readouterr().out
    assert "greedy_guesses" in json.loads((out / "evaluation.json").read_text())
    assert isinstance(run.load(str(out)).generate(["?"])[0], str)
    told = [{"iteration": i // 4, "step": 16 * (i // 4), **games[i]} for i in range(8)]
    (out / "samples.jsonl").write_text("".join(json.dumps(game) + "\n" for game in told))
    capsys.readouterr()
    assert render.main([f"--run={out}"]) == 0
    assert capsys.readouterr().out.strip() == "\n\n".join(map(written, told[4:]))
    rows = [game | {"prompt": "?!"[i % 2]} for i, game in enumerate(told)]
    (out / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert render.main([f"--run={out}", "--all"]) == 0
    assert capsys.readouterr().out.strip() == "\n\n".join(map(written, rows[::2] + rows[1::2]))
    assert report.main([str(out), f"--out={tmp_path / 'run.html'}"]) == 0
    page = (tmp_path / "run.html").read_text()
    assert all(html.escape(transcript(game)) in page for game in told[4:])
    told[-1] |= {
        "score": None,
        "turns": [told[-1]["turns"][0] | {"reward": None, "advantage": None}],
    }
    (out / "samples.jsonl").write_text("".join(json.dumps(game) + "\n" for game in told))
    assert render.main([f"--run={out}"]) == 0
    shown = capsys.readouterr().out
    assert "score none" in shown
    assert "(reward none, advantage none)" in shown
    assert report.main([str(out), f"--out={tmp_path / 'run.html'}"]) == 0
    with pytest.raises(ConfigError, match="width: must be left out"):
        render.main([f"--run={out}", "--width=200"])


@cases(
    "arguments, said",
    (["--problem.prompt_set=4"], "problem.prompt_set"),
    (["--problem.process_reward=true"], "problem.process_reward"),
    (
        ["--reward=model"],
        "reward: must be left out with task = higher_lower, which has its own, got model",
    ),
    (
        ["--problem.max_new_tokens=2"],
        "problem.max_new_tokens: must be at least 3, the longest answer",
    ),
)
def test_what_a_dialogue_cannot_have_is_one_line(arguments, said, tmp_path):
    small = [item for item in SMALL if not item.startswith("--task.")]
    with pytest.raises(ConfigError, match="^" + re.escape(said)) as found:
        launch.language([*small, *arguments, f"--out={tmp_path / 'run'}"])
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def test_discount_per_turn_equals_discount_of_turns():
    """The test sets γ = ½ and λ = ½ between turns and 1 within a turn, for each estimator, row by
    row."""
    turn_ends = np.array([[0, 1, 0, 0, 1, 1], [1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 0]], bool)
    count = np.array([[6], [4], [3]])
    step = np.arange(6)
    reward = np.where(turn_ends, np.random.default_rng(0).normal(size=(3, 6)), 0.0)
    nothing = np.zeros((3, 6), np.float32)
    value = np.random.default_rng(1).normal(size=(3, 7)).astype(np.float32)
    batch = Batch(
        *(None, nothing, nothing, reward.astype(np.float32), value[:, :-1], value[:, 1:]),
        terminated=step == count - 1,
        truncated=nothing > 0,
        mask=step < count,
        score=nothing,
        metrics={},
        columns={"step_end": turn_ends},
    )
    config = actor_critic.Estimation(gamma=0.5, estimator="monte_carlo")
    per_turn = dataclasses.replace(config, discount_per="turn")
    gae = dataclasses.replace(per_turn, estimator="gae", lambda_=0.25)
    n_step = dataclasses.replace(per_turn, estimator="n_step", n_steps=2)
    target, of_gae, of_two, per_step = jax.jit(
        lambda batch: [
            actor_critic.estimate(actor_critic.estimator(each), batch)[1]
            for each in (per_turn, gae, n_step, config)
        ]
    )(batch)
    for row in range(batch.mask.shape[0]):
        count, ends = int(batch.mask[row].sum()), np.flatnonzero(batch.columns["step_end"][row])
        reward = batch.reward[row]
        turn = np.searchsorted(ends, np.arange(count))
        expected = [
            sum(0.5 ** (k - turn[t]) * reward[ends[k]] for k in range(turn[t], len(ends)))
            for t in range(count)
        ]
        np.testing.assert_allclose(target[row, :count], expected, rtol=1e-6)
        # λ-returns mix the following return with its value; within a turn both weights are 1.
        gamma, lambda_ = (np.where(turn_ends[row], x, 1.0) for x in (0.5, 0.25))
        known = np.append(value[row, 1:count], 0.0)
        mixed = 0.0
        for t in reversed(range(count)):
            mixed = reward[t] + gamma[t] * ((1 - lambda_[t]) * known[t] + lambda_[t] * mixed)
            np.testing.assert_allclose(of_gae[row, t], mixed, rtol=1e-5)
            following = reward[t + 1] + gamma[t + 1] * known[t + 1] if t + 1 < count else 0.0
            np.testing.assert_allclose(of_two[row, t], reward[t] + gamma[t] * following, rtol=1e-5)
        by_step = [
            sum(0.5 ** (end - t) * reward[end] for end in ends if end >= t) for t in range(count)
        ]
        np.testing.assert_allclose(per_step[row, :count], by_step, rtol=1e-6)
    assert np.asarray(target != per_step)[batch.mask].any()
