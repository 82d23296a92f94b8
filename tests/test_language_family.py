"""Tests methods on tokens: the region of TRPO, length bias, and a comparison on a language task."""

import json

import jax
import jax.numpy as jnp
import language_family
import lecture
import numpy as np
import pytest
import tiny
from comparison import Result
from probes import tabular_problem

from jaxrl_po.algorithms import dapo, grpo, trpo
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError
from jaxrl_po.run.experiment import registry

TABULAR = tabular_problem(num_prompts=8, group_size=4, dense=False)


def test_trpo_on_tokens_stays_within_its_region():
    """The exact KL is over the tokens of a batch, without what stands behind the mask."""
    learner = trpo.make(
        trpo.Config(max_kl=0.05, value_minibatches=2),
        TABULAR._replace(rows=lambda samples: samples),
    )

    @jax.jit
    def step(key):
        state, batch = learner.sample(learner.init(key))
        after, metrics = learner.update(state, batch)
        old, new = (TABULAR.apply(s.params, batch.inputs)[0] for s in (state, after))
        kl = jnp.sum(old.kl(new) * batch.mask) / batch.mask.sum()
        return kl, metrics["exact_kl"].value()

    kl, reported = step(jax.random.key(0))
    assert 1e-3 < float(kl) <= 0.05 * (1 + 1e-4)
    np.testing.assert_allclose(reported, kl, rtol=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "config", "want"),
    [(grpo, grpo.Config(), -1.0), (dapo, dapo.Config(), 0.0)],
    ids=["grpo", "dapo"],
)
def test_length_bias_of_groups(algorithm, config, want):
    """The factor 1 / |o| gives a slope of −1; the mean over all tokens has a slope of 0."""
    length, outcome, weight = lecture.token_weights(algorithm, config, TABULAR, jax.random.key(3))
    assert len(set(length.tolist())) > 3
    assert set(outcome.tolist()) == {0.0, 1.0}
    assert lecture.length_slope(length, outcome, weight) == pytest.approx(want, abs=1e-3)


def result(name, **metrics):
    """Result of two seeds: 100 completions of 4 tokens per iteration, lines at iterations 0, 10 and
    20."""
    lines = [{"iteration": 0, "step": 0, "greedy_accuracy": [0.4, 0.6]}]
    for i in (1, 2):
        line = {
            "response_length": [4.0, 4.0],
            "greedy_accuracy": [0.4 + 0.2 * i, 0.6 + 0.1 * i],
            "kl": [0.01, 0.02 * i],
        }
        lines.append(
            {"iteration": 10 * i, "step": 1000 * i, "time/seconds": 5.0, **line, **metrics}
        )
    return Result(name, lines, {"warm_start_accuracy": [0.4, 0.6]})


def test_accuracy_stands_against_generated_tokens():
    plain, sampled = result("grpo"), result("dapo", generation_batches=[1.0, 3.0])
    assert [row["step"] for row in language_family.by_tokens(plain).rows] == [0, 4000, 8000]
    assert [row["step"] for row in language_family.by_tokens(sampled).rows] == [0, 8000, 16000]
    header, first, second = language_family.table([plain, sampled]).splitlines()
    assert header.split()[:2] == ["warm", "start"]
    assert first.split()[:2] == ["grpo", "0.500"]
    assert [line.split()[-2:] for line in (first, second)] == [["0.0150", "0.0400"]] * 2
    # At 8,000 tokens the second seed of DAPO is two thirds of the way to its first line, at 12,000
    # tokens: .6 + ⅔ · .1.
    assert second.split()[5:8] == ["0.733", "[0.667,", "0.800]"]


def test_useful_steps_have_tokens_with_an_advantage():
    """The number is 20: 20 iterations of 2 × 4 steps, half of them taken, a quarter of the tokens
    with a signal.

    For TRPO the number of accepted steps counts.
    """
    iterations = np.array([10.0, 10.0])
    config = grpo.Config(num_epochs=2, num_minibatches=4)
    rare = result("grpo", updates=[0.5, 0.5], signal=[0.25, 0.25])
    assert lecture.useful_steps(rare, config, iterations) == 20.0
    assert (
        lecture.useful_steps(result("trpo", accepted=[1.0, 0.5]), trpo.Config(), iterations) == 15.0
    )


def test_methods_have_valid_flags_and_known_names(tmp_path, written_down):
    options = language_family.Options()
    steps = f"--total_steps={options.total_steps}"
    flags = {
        name: [*language_family.arguments(method, options), steps]
        for name, method in language_family.METHODS.items()
    }
    for name, method in registry.METHODS.items():
        if method.has_critic:
            flags[f"critic {name}"] = [f"--algorithm={name}", *tiny.MODEL]
    for name, given in flags.items():
        written_down(launch.language, [*given, f"--out={tmp_path / name}", "--devices=1"])
    with pytest.raises(ConfigError, match="did you mean trpo"):
        language_family.main(["--methods=trop", f"--out={tmp_path}"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_lecture_s_table_is_measured(tmp_path, capsys):
    """Every cell of a small comparison equals its count by hand."""
    out = tmp_path / "family"
    sizes = [
        "--seeds=2",
        "--total_steps=512",
        "--width=8",
        "--layers=1",
        "--warm_start_steps=4",
        "--devices=1",
    ]
    assert language_family.main([*sizes, "--num_digits=1", f"--out={out}"]) == 0
    assert (out / "family.png").read_bytes().startswith(b"\x89PNG")
    cells = json.loads((out / "lecture.json").read_text())
    assert list(cells) == ["ppo", "trpo", "grpo", "dapo"]
    assert {name: list(column["models"]) for name, column in cells.items()} == {
        "ppo": ["policy", "critic"],
        "trpo": ["policy", "critic"],
        "grpo": ["policy", "reference"],
        "dapo": ["policy"],
    }
    policy = cells["dapo"]["models"]["policy"]
    assert 1.9 * policy < cells["dapo"]["optimizer bytes"] < 2.1 * policy  # the two moments of Adam
    assert cells["grpo"]["samples per prompt"] == 4.0 <= cells["dapo"]["samples per prompt"]
    assert cells["ppo"]["dead groups"] is None
    assert 0.0 < cells["grpo"]["dead groups"] <= 1.0
    assert (cells["grpo"]["tokens per useful step"] is None) == (
        cells["grpo"]["dead groups"] == 1.0
    )
    assert [round(column["length slope"], 1) for column in cells.values()] == [0.0, 0.0, -1.0, 0.0]
    assert all(column["tokens generated"] > 512 for column in cells.values())
    shown = capsys.readouterr().out.splitlines()
    (dead_groups,) = (line for line in shown if line.startswith("| dead groups"))
    assert dead_groups.split(" | ")[1] == "–"  # a critic does not compare groups
