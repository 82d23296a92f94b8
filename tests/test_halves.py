"""Tests a step in two halves with a Python reward between them, against one program with a
verifier."""

import contextlib
import functools
import os
import signal
import threading
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scripts import lines
from toy_run import Silent, train_job

from jaxrl_po import language
from jaxrl_po.algorithms import dapo, grpo
from jaxrl_po.config import ConfigError
from jaxrl_po.run.data.scoring import HostScore, Reward, RewardError
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.seeds import over_seeds
from jaxrl_po.run.loop import runner, signals
from jaxrl_po.run.store.checkpoint import Store

HERE = Path(__file__).parent / "support" / "reward_functions.py"
TASK = language.tasks.addition(1)
SIZES = language.ModelSettings(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)
MODEL = SIZES.build(TASK.tokenizer.size).clone(gated=False)
SEEDS = 2


@functools.cache
def warm():
    """Returns parameters whose answers are sometimes right, but mostly wrong."""
    settings = language.WarmStart(steps=150, batch_size=64, learning_rate=1e-2)
    return jax.jit(language.make_problem(TASK, MODEL, warm=settings).init)(jax.random.key(1))[
        0
    ].policy


@functools.cache
def make(*, verify=False, axis_name=None):
    problem = language.make_problem(
        TASK, MODEL, num_prompts=8, group_size=4, verify=verify, initial=warm()
    )
    return grpo.make(grpo.Config(axis_name=axis_name, use_reference=False), problem)


def job(rewarded=None, **changes):
    own = make(verify=rewarded is None)
    defaults = {"iterations": 3, "steps_per_iteration": 32, "log_every": 2, "scorer": rewarded}
    return train_job(
        over_seeds(own, SEEDS), jax.random.split(jax.random.key(0), SEEDS), **(defaults | changes)
    )


def run(path, name="", resume=False, reporter=None, **changes):
    path.mkdir(exist_ok=True)
    scored = HostScore([Reward(f"{HERE}:{name}")], TASK) if name else contextlib.nullcontext()
    with scored as rewarded:
        return runner.run(job(rewarded, **changes), path, reporter or Silent(), resume=resume)


def words(state):
    return jax.tree.map(np.asarray, state._replace(key=jax.random.key_data(state.key)))


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    path = tmp_path_factory.mktemp("scored")
    return path, run(path, "exact")


def test_both_routes_come_to_the_same_parameters(tmp_path, scored):
    path, host = scored
    one = run(tmp_path)
    rows = lines(path)
    assert all(0.02 < accuracy < 0.98 for row in rows[1:] for accuracy in row["accuracy"])
    assert all(norm > 1e-3 for row in rows[1:] for norm in row["grad_norm"])
    # Two programs round differently from one program; a wrong reward moves parameters by 1e-3.
    chex.assert_trees_all_close(words(host.state), words(one.state), rtol=0.0, atol=1e-6)
    for row, other in zip(rows[1:], lines(tmp_path)[1:], strict=True):
        assert row["reward_failures"] == [0.0] * SEEDS
        for name in other:
            assert_allclose(
                np.array(row[name], float),
                np.array(other[name], float),
                rtol=1e-3,
                atol=1e-5,
                err_msg=name,
            )


def test_resumed_with_a_reward_in_python_equals_uninterrupted(tmp_path, scored, monkeypatch):
    """The signal arrives in the first of the two iterations of the first line."""

    heard = threading.Event()
    monkeypatch.setattr(signals, "say", lambda text: heard.set())

    def interrupted(self, *given, **named):
        if named["first"]:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard.wait(60)
        return score(self, *given, **named)

    score = HostScore.score_batch
    with monkeypatch.context() as patch:
        patch.setattr(HostScore, "score_batch", interrupted)
        assert run(tmp_path, "exact").iteration == 1
    outcome = run(tmp_path, "exact", resume=True)
    jax.tree.map(assert_array_equal, words(outcome.state), words(scored[1].state))
    assert lines(tmp_path) == lines(scored[0])


def test_later_failure_scores_0_and_is_reported(tmp_path, scored):
    reporter = Silent()
    run(tmp_path, "forgets", reporter=reporter)
    failures = [row["reward_failures"] for row in lines(tmp_path)[1:]]
    # The reward fails in the second of the first line's two iterations, then in all.
    assert failures == [[0.5, 0.5], [1.0, 1.0]]
    assert sum("forgets raised KeyError: 'forgotten'" in line for line in reporter.reported) == 1


def test_first_failure_ends_run_and_keeps_folder(tmp_path, scored):
    with pytest.raises(RewardError, match=r"reward_functions\.py:raises raised ZeroDivisionError"):
        run(tmp_path, "raises")
    with Store(tmp_path / "checkpoints" / "latest") as latest:
        assert latest.iterations() == [0]
    # The resumed run starts once the reward is repaired.
    outcome = run(tmp_path, "exact", resume=True)
    jax.tree.map(assert_array_equal, words(outcome.state), words(scored[1].state))


@pytest.mark.slow
def test_halves_over_devices_are_the_halves_on_one():
    host, placement = make(), parallel.Placement(1, 1, 2)
    state = jax.jit(host.init)(jax.random.key(3))
    alone = jax.jit(host.sample)(state)

    def reward(batch):
        score = np.asarray(batch.action)[..., 0] % 2
        return language.give_reward(batch, score, score)

    expected, metrics = jax.jit(host.update)(alone[0], reward(alone[1]))
    placed = parallel.over_devices(make(axis_name=placement.axis_name), placement)
    stacked, batch = jax.jit(placed.sample)(jax.tree.map(lambda x: x[None], state))
    assert_array_equal(batch.action[0], alone[1].action)
    after, told = jax.jit(placed.update)(stacked, reward(batch))
    assert float(metrics["grad_norm"].value()) > 1e-3
    for name in metrics:
        assert_allclose(
            told[name].value()[0], metrics[name].value(), rtol=1e-4, atol=1e-6, err_msg=name
        )
    jax.tree.map(
        lambda a, b: assert_allclose(a[0], b, rtol=1e-3, atol=1e-5), after.params, expected.params
    )


def test_what_needs_scores_inside_the_program_is_refused():
    host = make()
    with pytest.raises(
        ConfigError, match=r"reward: must be given between .* jitted apart: this problem"
    ):
        jax.eval_shape(host.step, jax.eval_shape(host.init, jax.random.key(0)))
    problem = language.make_problem(TASK, MODEL, num_prompts=2, group_size=2, verify=False)
    learner = dapo.make(dapo.Config(), problem)
    with pytest.raises(ConfigError, match="dynamic_sampling: must be off or reweight where groups"):
        jax.eval_shape(learner.sample, jax.eval_shape(learner.init, jax.random.key(0)))
    with pytest.raises(ConfigError, match="process_reward: has no effect unless the verifier"):
        language.make_problem(TASK, MODEL, verify=False, process_reward=True)


@pytest.mark.slow
def test_keeping_only_informative_groups_needs_no_score_inside():
    critic = SIZES.build(TASK.tokenizer.size, outputs=1)
    problem = language.make_problem(
        TASK, MODEL, num_prompts=4, group_size=2, verify=False, critic=critic
    )
    settings = dapo.Config(
        dynamic_sampling="reweight",
        soft_overlong=False,
        overlong_filtering=False,
        num_minibatches=1,
    )
    learner = dapo.make(settings, problem)
    state, batch = jax.jit(learner.sample)(jax.jit(learner.init)(jax.random.key(0)))
    score = np.array([1, 1, 0, 0, 1, 0, 0, 1], np.float32)
    batch = language.give_reward(batch, score, 2.0 * score)
    assert_array_equal(np.sum(batch.reward, axis=1), 2.0 * score)
    _, metrics = jax.jit(learner.update)(state, batch)
    assert float(metrics["grad_norm"].value()) > 0.0
    # Counts the tokens of the informative groups.
    assert float(metrics["signal"].count) == float(jnp.sum(batch.mask[4:]))


def test_task_data_reaches_the_scorer_unchanged():
    """A solution of countdown may be as long as a completion, and no mask hides a part of the
    solution."""
    task = language.tasks.countdown(2, max_number=9)
    model = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=2, mlp_width=8).build(
        task.tokenizer.size
    )
    problem = language.make_problem(task, model, num_prompts=16, group_size=2, verify=False)
    learner = grpo.make(grpo.Config(), problem)
    batch = jax.jit(lambda key: learner.sample(learner.init(key))[1])(jax.random.key(0))
    assert batch.inputs.problem.solution.shape == batch.mask.shape
    assert (
        np.asarray(batch.mask).sum(axis=1) < batch.mask.shape[1]
    ).any()  # otherwise the case would not test the property
    score = jax.jit(jax.vmap(task.score))
    assert score(batch.inputs.problem, batch.inputs.problem.solution).tolist() == [1.0] * 32
