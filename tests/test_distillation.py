"""Tests on-policy distillation: teachers of other sizes, from an earlier run, and refused
teachers."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import tabular_problem
from tiny import MODEL

from jaxrl_po import language
from jaxrl_po.algorithms import distillation
from jaxrl_po.algorithms.teacher import with_teacher
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.distributions import Categorical
from jaxrl_po.run.experiment import language as script
from jaxrl_po.run.experiment import models, settings
from jaxrl_po.run.store.checkpoint import Store
from jaxrl_po.run.store.metrics import read

TASK = language.tasks.addition(1)
SIZES = {"num_prompts": 4, "group_size": 2}
SMALL = [
    *("--seeds=1", "--devices=1", "--eval_prompts=4", "--show=0", "--task.num_digits=1"),
    *("--problem.num_prompts=4", "--problem.group_size=2", "--log_every=1", "--eval_every=1"),
    *("--warm_start.steps=0", *MODEL),
]


def transformer(width):
    return language.Transformer(TASK.tokenizer.size, width=width, layers=1, heads=2)


def test_a_student_comes_to_answer_as_its_teacher():
    """The exact KL(student ‖ teacher) on the tabular problem falls towards 0."""
    problem = tabular_problem(num_prompts=16, num_steps=8)
    teacher = problem.init(jax.random.key(5))[0]._replace(value=None)
    config = as_arrays(distillation.Config(learning_rate=3e-2))
    learner = distillation.make(config, with_teacher(problem, teacher))
    state = learner.init(jax.random.key(0))

    def distance(params):
        states = np.arange(6)
        student, its = (problem.apply(p, states)[0] for p in (params, teacher))
        return float(student.kl(its).mean())

    assert state.params.frozen["teacher"] == teacher  # the teacher is not stored in any checkpoint
    assert not state.collector.replicated
    # the metric `signal` could end a run.
    assert "signal" not in jax.eval_shape(learner.step, state)[1]
    before = distance(state.params)
    state = jax.jit(lambda s: jax.lax.fori_loop(0, 200, lambda _, s: learner.step(s)[0], s))(state)
    assert before > 0.05
    assert distance(state.params) < 0.1 * before


def test_teacher_of_other_sizes_scores_the_students_tokens():
    """The teacher scores only tokens that the student's sampler allows.

    Both policies renormalise over the allowed tokens.
    """
    student, large = transformer(8), transformer(16)
    problem = language.make_problem(TASK, student, top_k=6, **SIZES)
    its = language.make_problem(TASK, large, **SIZES)

    @jax.jit
    def both(key):
        params = its.init(key)[0]
        taught = with_teacher(problem, params, its.apply)
        _, batch = taught.collect(*taught.init(key), key)
        return batch, large.apply(params.policy, batch.inputs.tokens[:, :-1], batch.inputs.pad)[0]

    batch, logits = both(jax.random.key(0))
    steps = batch.action.shape[1]
    among = jnp.where(batch.inputs.kept, logits[:, -steps:], -jnp.inf)
    assert (batch.inputs.kept.sum(axis=-1)[batch.mask] == 6).all()
    want = np.take_along_axis(
        np.asarray(jax.nn.log_softmax(among)), np.asarray(batch.action)[..., None], 2
    )[..., 0]
    mask = np.asarray(batch.mask)
    assert_allclose(np.asarray(batch.columns["teacher_log_prob"])[mask], want[mask], rtol=1e-4)
    assert np.abs(batch.columns["teacher_log_prob"] - batch.log_prob).max() > 1e-3


def test_a_teacher_with_other_actions_is_refused():
    problem = tabular_problem(num_prompts=4)
    params = problem.init(jax.random.key(0))[0]._replace(value=None)

    def apply(params, inputs):
        return Categorical(jnp.zeros((*inputs.shape, 5))), jnp.zeros(inputs.shape)

    learner = distillation.make(distillation.Config(), with_teacher(problem, params, apply))
    with pytest.raises(ConfigError, match=r"teacher: must have the 4 actions .* got 5"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))
    alone = distillation.make(distillation.Config(), problem)
    with pytest.raises(ConfigError, match="teacher: must be given for distillation"):
        jax.eval_shape(lambda key: alone.step(alone.init(key)), jax.random.key(0))


@pytest.fixture(scope="module")
def earlier(finished, tmp_path_factory):
    return finished("language", tmp_path_factory.mktemp("earlier") / "teacher")


@pytest.mark.usefixtures("trace_only")
def test_a_run_is_taught_by_an_earlier_one(earlier, tmp_path):
    argv = [*SMALL, "--algorithm=distillation", "--total_steps=16", "--model.width=16"]
    argv += [f"--teacher={earlier}", f"--out={tmp_path / 'run'}"]
    config = settings.parse_settings(script, argv).config
    teacher = models.teacher(script, config, models.make_task(config, None))
    store = Store(earlier / "checkpoints" / "latest")
    saved = store.read(max(store.iterations()))
    for path, leaf in jax.tree_util.tree_leaves_with_path(teacher.params):
        seeds = saved[f".params.policy{jax.tree_util.keystr(path)}"]
        assert_array_equal(leaf, seeds[0])
    assert launch.language(argv) == 0
    lines = read(tmp_path / "run" / "metrics.jsonl")
    assert all("teacher_kl" in line for line in lines[1:])
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 16


def test_what_cannot_teach_is_refused(earlier, tmp_path):
    def refused(*flags, algorithm="distillation", match):
        out = f"--out={tmp_path / 'none'}"
        with pytest.raises(ConfigError, match=match):
            launch.language([*SMALL, f"--algorithm={algorithm}", "--total_steps=8", out, *flags])

    refused(match="^teacher: must name a run of jaxrl-po language, e.g. runs/first")
    refused(
        f"--teacher={earlier}",
        algorithm="grpo",
        match="^teacher: has no effect unless algorithm = distillation",
    )
    refused(
        f"--teacher={tmp_path}", match=f"^teacher: must be the folder of a run .* got {tmp_path};"
    )
    digits = [flag for flag in SMALL if not flag.startswith("--task.")]
    with pytest.raises(
        ConfigError, match=f"^teacher: must have the vocabulary of .*; {earlier} was trained on"
    ):
        launch.language(
            [
                *(*digits, "--task=sorting", "--algorithm=distillation", "--total_steps=8"),
                *(f"--teacher={earlier}", f"--out={tmp_path / 'none'}"),
            ]
        )
