"""Tests the ablation and the language benchmark."""

import functools
import itertools
import json
import math

import ablation
import jax
import numpy as np
import pytest
import timing
from comparison import Result

from experiments.benchmarks import language as benchmark_language
from jaxrl_po.run.experiment import flags, registry


def test_each_row_adds_one_switch():
    rows = list(ablation.arguments().values())
    assert len(rows) == 6
    for before, after in itertools.pairwise(rows):
        assert len(set(after) - set(before)) == 1
    records = [
        flags.parse_records(row, {"config": registry.METHODS["dapo"].Config})["config"]
        for row in rows
    ]
    first, last = records[0], records[-1]
    assert (first.upper, first.token_level_loss, first.dynamic_sampling) == (0.2, False, "off")
    assert (last.upper, last.token_level_loss, last.dynamic_sampling) == (0.28, True, "refill")
    assert not any(record.use_reference for record in records)


def result(name, accuracy, batches):
    """Result of two seeds: evaluations at iterations 0, 10 and 20, completions of 5 tokens."""
    constant = {"response_length": [5.0, 5.0], "truncated": [0.1, 0.1], "entropy": [1.0, 1.0]}
    later = [
        {
            "iteration": 10 * i,
            "step": 80 * i,
            "greedy_accuracy": [accuracy[i], accuracy[i] / 2],
            "generation_batches": batches,
            **constant,
        }
        for i in (1, 2)
    ]
    rows = [{"iteration": 0, "step": 0, "greedy_accuracy": [accuracy[0]] * 2}, *later]
    return Result(name, rows, {"warm_start_accuracy": [accuracy[0]] * 2})


def test_scores_at_equal_updates_and_at_equal_tokens():
    """Each row has 10 × 8 × 5 = 400 tokens; a row with two batches per update has spent them
    halfway."""
    plain, sampled = (
        result("plain", [0.2, 0.4, 0.6], [1.0, 1.0]),
        result("sampled", [0.2, 0.5, 0.9], [2.0, 4.0]),
    )
    np.testing.assert_allclose(ablation.generated(plain), [[0, 400, 800]] * 2)
    np.testing.assert_allclose(ablation.generated(sampled), [[0, 800, 1600], [0, 1600, 3200]])
    first, second = ablation.score([plain, sampled])
    np.testing.assert_allclose(first.updates, first.tokens)
    np.testing.assert_allclose(first.tokens, [0.6, 0.3])
    np.testing.assert_allclose(second.updates, [0.9, 0.45])
    # At that number of tokens the second seed is halfway to its first evaluation.
    np.testing.assert_allclose(second.tokens, [0.5, (0.2 + 0.25) / 2])
    text = ablation.table([plain, sampled], [first, second]).splitlines()
    assert text[1].split()[:3] == ["warm", "start", "0.200"]
    assert [line.split()[-1] for line in text[2:]] == ["1", "2"]


@pytest.mark.slow
def test_ablation_leaves_a_table_and_a_picture(tmp_path, capsys, monkeypatch):
    """Only the first and the last row run, at a small size; the other rows differ in switches that
    other tests cover."""
    steps = {"naive GRPO": "", "+ dynamic sampling": "dynamic_sampling=refill"}
    monkeypatch.setattr(ablation, "STEPS", steps)
    out = tmp_path / "ablation"
    sizes = [
        *("--seeds=2", "--updates=4", "--num_prompts=4", "--group_size=4"),
        *("--width=16", "--layers=1", "--length=2"),
    ]
    assert ablation.main([*sizes, "--warm_start_steps=0", "--devices=1", f"--out={out}"]) == 0
    assert (out / "ablation.png").read_bytes().startswith(b"\x89PNG")
    lines = (out / "table.txt").read_text().splitlines()
    assert [line.strip().split("  ")[0] for line in lines[1:]] == ["warm start", *steps]
    assert "running_sum, 2 seeds" in capsys.readouterr().out
    first, last = (
        json.loads((out / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in steps
    )
    assert "generation_batches" in last
    assert "generation_batches" not in first


def test_flags_are_valid(tmp_path, written_down):
    written_down(ablation.main, [f"--out={tmp_path / 'x'}", "--devices=1"])


def test_benchmark_counts_what_it_times(capsys, monkeypatch):
    # Sampling and the complete iteration are timed in turn; the first time of each does not count.
    times = iter([9.0, 9.0, 0.25, 1.0, 0.75, 3.0])
    monkeypatch.setattr(
        timing,
        "clock",
        lambda function, *args: (next(times), jax.block_until_ready(function(*args))),
    )
    monkeypatch.setattr(benchmark_language, "matrix_peak", lambda dtype: 1e9)
    monkeypatch.setattr(
        benchmark_language, "products", lambda model, prompt, new, readers: 1e6 * new
    )
    arguments = [
        *("--width=16", "--layers=1", "--new_tokens=5", "--num_prompts=4", "--group_size=2"),
        *("--iterations=2", "--seeds=2", "--devices=2", "--num_microbatches=2", "--remat=true"),
    ]
    assert benchmark_language.main([*arguments, "--json"]) == 0
    row = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Parameters: embedding and output have 14 · 16 each, norms 3 · 16, attention 4 · 16², SwiGLU 3
    # · 16 · 64.
    assert row["parameters"] == 2 * 14 * 16 + 3 * 16 + 4 * 16**2 + 3 * 16 * 64
    assert row["placement"].startswith("2 seeds on 2 devices")
    assert row["seconds_per_iteration"] == 2.0
    assert row["sampling_seconds"] == 0.5
    assert row["training_seconds"] == 1.5
    tokens = row["sampled_tokens_per_second"] * 0.5
    assert 15 < tokens < 81  # 2 seeds × 4 prompts × 2 completions of 1 to 5 tokens
    np.testing.assert_allclose(row["tokens_per_second"], tokens / 2.0, rtol=0.05)
    np.testing.assert_allclose(row["trained_tokens_per_second"], 2 * tokens / 1.5, rtol=0.05)
    # Forward and backward pass of two updates take 6 operations per product: 1e6 per sampled token.
    share = 6e6 * 2 * tokens / 1.5 / 1e9
    np.testing.assert_allclose(row["training_share_of_matrix_peak"], share, rtol=0.05)


def test_benchmark_counts_the_products_that_there_are():
    """The forward pass contains all products of two matrices; products in attention have leading
    axes."""
    task = benchmark_language.language.tasks.addition(3)
    sizes = {"width": 16, "heads": 4, "kv_heads": 2, "mlp_width": 40}
    for layers in (1, 3):
        model = benchmark_language.language.ModelSettings(layers=layers, **sizes).build(
            task.tokenizer.size
        )
        tokens, new = jax.numpy.zeros((2, task.prompt_length + 4), jax.numpy.int32), 5
        traced = jax.make_jaxpr(functools.partial(model.apply, last=new))(
            model.parameter_shapes(), tokens, jax.numpy.zeros(2, jax.numpy.int32)
        )
        shapes = [
            [v.aval.shape for v in eqn.invars]
            for eqn in traced.eqns
            if eqn.primitive.name == "dot_general"
        ]
        counted = sum(math.prod(a) * b[1] for a, b in shapes if len(a) == len(b) == 2)
        assert 2 * benchmark_language.products(model, task.prompt_length, new) == counted
