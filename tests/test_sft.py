"""Tests supervised training: demonstrations, learning from them, and refused demonstrations."""

import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from folders import arguments, write_place, write_rows
from numpy.testing import assert_allclose
from tables import cases

from jaxrl_po.algorithms import sft
from jaxrl_po.cli import evaluate, launch
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, cross_entropy, demonstrations
from jaxrl_po.language.tasks import addition
from jaxrl_po.language.warm_start import WarmStart, warm_start
from jaxrl_po.run.data import prompts, tables
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import models, settings

TASK = addition(2, zero_pad=False)  # the answers differ in length
MODEL = Transformer(TASK.tokenizer.size, width=8, layers=1, heads=2)


def test_step_follows_cross_entropy_of_answers():
    """The gradient equals the gradient of a warm start on the same demonstrations, in microbatches
    too."""
    problem = demonstrations.make_problem(TASK, MODEL, num_prompts=8)

    def step(state, batch):
        learner = sft.make(sft.Config(num_microbatches=2), problem, optax.sgd(0.5))
        return learner.update(state, batch)

    learner = sft.make(sft.Config(), problem, optax.sgd(0.5))
    state = jax.jit(learner.init)(jax.random.key(0))
    state, batch = jax.jit(learner.sample)(state)
    after, metrics = jax.jit(step)(state, batch)

    def cross_entropy(params):
        tokens = jnp.concatenate([batch.inputs.tokens], axis=1)
        logits = MODEL.apply(params, tokens[:, :-1], batch.inputs.pad)[0]
        log_prob = jax.nn.log_softmax(logits[:, -TASK.answer_length :])
        taken = jnp.take_along_axis(
            log_prob, batch.inputs.tokens[:, -TASK.answer_length :, None], 2
        )
        # The loss counts tokens up to EOS, and no padding after EOS.
        ends = (batch.inputs.tokens[:, -TASK.answer_length :] == TASK.tokenizer.eos).argmax(1)
        counted = np.arange(TASK.answer_length) <= np.asarray(ends)[:, None]
        assert 0 < counted.sum() < counted.size
        return -jnp.sum(taken[..., 0] * counted) / counted.sum()

    loss, gradient = jax.value_and_grad(cross_entropy)(state.params.policy)
    assert metrics["loss"].value() == pytest.approx(float(loss), rel=1e-5)
    wanted = jax.tree.map(lambda x, g: x - 0.5 * g, state.params.policy, gradient)
    chex.assert_trees_all_close(after.params.policy, wanted, rtol=1e-4, atol=1e-6)
    measure = jax.jit(demonstrations.make_evaluate(TASK, MODEL, num_prompts=20))
    held_out = measure(state.params, state.collector, jax.random.key(0))
    assert held_out["held_out_loss"].shape == (20,)
    assert float(held_out["held_out_loss"].mean()) == pytest.approx(float(loss), rel=0.3)


CHAT = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


@cases(
    "columns, found",
    ({"prompt": "p", "completion": "c", "level": 1}, [{"prompt": "p", "level": 1, "answer": "c"}]),
    ({"prompt": "p", "answer": "c"}, [{"prompt": "p", "answer": "c"}]),
    ({"text": "t"}, [{"prompt": "", "answer": "t"}]),
    (
        {"messages": CHAT},
        [{"messages": CHAT[:1], "answer": "b"}, {"messages": CHAT[:3], "answer": "d"}],
    ),
    ({"messages": CHAT, "completion": "e"}, [{"messages": CHAT, "answer": "e"}]),
)
def test_rows_demonstrate_answers(columns, found):
    assert [row.columns for row in prompts.Row(columns, "row").demonstrations()] == found


def test_conversations_with_equal_beginnings_are_held_out_separately():
    said = [
        {"messages": [*CHAT[:2], {"role": "user", "content": f"{i}"}, CHAT[3]]} for i in range(40)
    ]
    parts = prompts.hash_split([prompts.Row(row, "row") for row in said], 0.2, 2, whole=True)
    found = [{row.identity(True) for row in part} for part in tables.read_demonstrations(parts)]
    assert len(set.union(*found)) == 41  # each last answer, and the shared first answer once
    assert sum(map(len, found)) == 41
    with pytest.raises(
        ConfigError, match=r"^task.train: row: every held-out demonstration is a training"
    ):
        tables.read_demonstrations([parts[0], parts[0][:1]])


def read_task(tmp_path, rows, *flags):
    train = write_rows(tmp_path / "rows.jsonl", rows)
    given = arguments(tmp_path, tmp_path / "run", train, *flags, "--algorithm=sft")
    gone = ("--problem.", "--eval_samples", "--config.num_ep", "--init_from")
    given = [flag for flag in given if not flag.startswith(gone)]
    return models.make_task(settings.parse_settings(script, given).config, None)


def test_a_text_is_demonstrated_after_an_end(tmp_path):
    task = read_task(tmp_path, [{"text": f"{i} words"} for i in range(20)])
    prompt = task.row(0)
    assert prompt.tokens[int(prompt.pad) :].tolist() == [task.tokenizer.eos]
    said = task.tokenizer.decode(task.demonstrate(prompt.problem).tolist())
    assert said.endswith(" words")


@cases(
    "row, message",
    ({"prompt": "p"}, r"line \d+: must have completion, answer, text, or messages in which"),
    ({"messages": CHAT[:1]}, r"line \d+: must have completion, answer, text, or messages in"),
    ({"prompt": "p", "completion": 3}, "line 1: completion must be text, got 3"),
    ({"text": ["t"]}, r"line 1: text must be text, got \['t'\]"),
)
def test_bad_rows_are_named(tmp_path, row, message):
    with pytest.raises(ConfigError, match=f"^task.train: .*{message}"):
        read_task(tmp_path, [row | {"i": i} for i in range(20)])


@cases(
    "flags, message",
    (["--reward=math"], r"^reward: has no effect unless the method samples completions"),
    (["--eval_samples=2"], r"^eval_samples: has no effect unless the method samples"),
    (["--warm_start.steps=2"], r"^warm_start.steps: is not a setting"),
    (["--tools=a.py:A"], r"^tools: must be left out with algorithm = sft"),
    (["--task=mastermind"], r"^task: must not be a dialogue with algorithm = sft, got mastermind"),
)
def test_what_it_has_no_use_for_is_named(tmp_path, flags, message):
    given = [*tiny.MODEL, "--algorithm=sft", "--devices=1", f"--out={tmp_path / 'run'}"]
    with pytest.raises(ConfigError, match=message):
        launch.language([*given, *flags])


@pytest.mark.slow
def test_run_over_pretrained_model_is_written_and_evaluated(tmp_path, capsys, trace_only):
    write_place(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"w{i}"}, CHAT[1]]} for i in range(8, 28)]
    train = write_rows(tmp_path / "rows.jsonl", rows)
    out = tmp_path / "run"
    flags = [
        *("--algorithm=sft", "--seeds=1", "--devices=1", "--task=file", "--lora.rank=2"),
        *("--problem.num_prompts=4", "--total_steps=8", "--show=2", train),
        *(f"--init_from={tmp_path / 'model'}", f"--out={out}"),
    ]
    assert launch.language(flags) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    said = capsys.readouterr().out.splitlines()
    assert any(
        re.search(r": an epoch is \d+ completions, so that --total_steps=8 makes ", x) for x in said
    )
    assert {"loss", "answer_length", "held_out_loss", "held_out_log_prob"} <= lines[-1].keys()
    assert "held_out_log_prob" in json.loads((out / "summary.json").read_text())
    assert evaluate.main([f"--run={out}"]) == 0
    assert "held_out_loss" in json.loads((out / "evaluation.json").read_text())
    grpo = [
        flag
        for flag in flags
        if flag.partition("=")[0] not in ("--algorithm", "--out", "--init_from")
    ]
    rows = [{"prompt": f"w{i}", "answer": "w9"} for i in range(8, 28)]
    write_rows(tmp_path / "rows.jsonl", rows)
    further = [*grpo, "--algorithm=grpo", f"--init_from={out}", f"--out={tmp_path / 'next'}"]
    assert launch.language([*further, "--problem.group_size=2", "--total_steps=8"]) == 0


def test_training_and_evaluation_ask_for_their_own_split():
    asked = []

    def sample(key, held_out):
        asked.append(held_out)
        return TASK.sample(key, held_out)

    task, key = TASK._replace(sample=sample), jax.random.key(0)
    problem = demonstrations.make_problem(task, MODEL, num_prompts=2)
    start = jax.eval_shape(problem.init, key)
    asked.clear()
    jax.eval_shape(problem.collect, *start, key)
    assert set(asked) == {False}
    asked.clear()
    jax.eval_shape(demonstrations.make_evaluate(task, MODEL, num_prompts=2), *start, key)
    assert set(asked) == {True}


def test_warm_start_takes_a_supervised_step():
    settings = WarmStart(steps=1, batch_size=8, learning_rate=0.01)
    problem = demonstrations.make_problem(TASK, MODEL, num_prompts=8)
    learner = sft.make(sft.Config(learning_rate=0.01), problem)

    @jax.jit
    def both(key):
        state = learner.init(key)
        policy = state.params.policy
        step_key = jax.random.fold_in(jax.random.split(key)[0], 0)
        batch = cross_entropy.draw_demonstrations(TASK, jax.random.split(step_key, 8))
        after, _ = learner.update(state, batch)
        return after.params.policy, warm_start(MODEL, policy, TASK, settings, key), policy

    expected, found, before = jax.device_get(both(jax.random.key(1)))
    for x, y, z in zip(*map(jax.tree.leaves, (expected, found, before)), strict=True):
        assert_allclose(y, x, rtol=0, atol=1e-6)
        assert np.abs(x - z).max() > 0.009
