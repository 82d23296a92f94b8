"""Tests that a new state can be donated: it shares no array with itself, the problem or the
user."""

import collections

import gymnax
import jax
import jax.numpy as jnp
import optax
import pytest
from learners import CASES, make
from probes import tabular_problem

from jaxrl_po import control, language
from jaxrl_po.algorithms import distillation, grpo, ppo
from jaxrl_po.algorithms.reference import ReferenceSettings, with_reference_kl
from jaxrl_po.algorithms.teacher import TEACHER, with_teacher
from jaxrl_po.config import ConfigError
from jaxrl_po.language.lora import Lora

TASK = language.tasks.addition(1)
SMALL = language.Transformer(TASK.tokenizer.size, width=8, layers=1, heads=2)
ADAPTED = SMALL.clone(lora=Lora(2, targets=("down",)))
donated = jax.jit(lambda state: state, donate_argnums=0)


def shared(init):
    """Returns names of leaves that share memory with another leaf, or with an array from outside of
    `init`."""
    program, shapes = jax.make_jaxpr(init, return_shape=True)(jax.random.key(0))
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    given = {*program.jaxpr.constvars, *program.jaxpr.invars}
    times = collections.Counter(program.jaxpr.outvars)
    pairs = zip(paths, program.jaxpr.outvars, strict=True)
    return [path for path, leaf in pairs if leaf in given or times[leaf] > 1]


@pytest.mark.parametrize(("algorithm", "problem"), CASES)
def test_leaves_of_a_new_state_are_distinct(algorithm, problem):
    found = shared(make(algorithm, problem).init)
    assert [path for path in found if TEACHER not in path] == []


def test_a_reference_by_reward_is_distinct():
    problem, beta = tabular_problem(num_prompts=2, group_size=2), jnp.float32(0.1)
    settings = ReferenceSettings(enabled=True, adapt=True, kl_coefficient=beta)
    config = ppo.Config(num_minibatches=2)
    learner = with_reference_kl(ppo.make(config, problem), problem, settings)
    donated(jax.vmap(learner.init)(jax.random.split(jax.random.key(0))))
    donated(learner.init(jax.random.key(0)))
    assert not beta.is_deleted()


def test_a_donated_step_leaves_problem_and_user_alone():
    """Arrays of the user are in the environment's state, in the optimizer's state and in the
    config."""
    env, params = gymnax.make("CartPole-v1")
    problem = control.make_groups(env, num_prompts=2, group_size=2, num_steps=2, env_params=params)
    rate, beta = jnp.float32(1e-3), jnp.float32(0.1)
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=rate)
    learner = grpo.make(grpo.Config(kl_coefficient=beta), problem, optimizer)
    step = jax.jit(learner.step, donate_argnums=0)
    for _ in range(2):
        first = learner.init(jax.random.PRNGKey(0))
        state, _ = step(step(first)[0])
        assert int(state.step) == 2
        assert all(x.is_deleted() for x in jax.tree.leaves(first.params))
    assert not any(x.is_deleted() for x in (rate, beta))


def parameters(model):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), model.parameter_shapes())


def of_task(task, model, **options):
    base = parameters(model.clone(lora=None))
    options |= {"initial": base, "num_prompts": 2, "group_size": 2}
    return language.make_problem(task, model, **options), base


def test_a_pretrained_policy_and_reward_model_are_copied():
    judge = SMALL.clone(outputs=1)
    rewarding = language.RewardModel(parameters(judge), *(jnp.float32(x) for x in (0, 1, 1)))
    problem, _ = of_task(TASK, SMALL)
    problem = language.learned_reward(problem, TASK, judge, lambda *_: rewarding)
    # Arrays of the user, before a learner copies the arrays into its state.
    assert shared(problem.init)
    assert shared(grpo.make(grpo.Config(), problem).init) == []


def test_prompts_are_copied():
    example = language.tasks.Example("1", "2")
    task = language.tasks.table("one", TASK.tokenizer, [example], [example], share_prompts=True)
    task = task._replace(data=jax.tree.map(jnp.asarray, task.data))
    learner = grpo.make(grpo.Config(), of_task(task, SMALL)[0])
    assert learner.init(jax.random.key(0)).params.frozen
    assert shared(learner.init) == []


def frozen_learners():
    adapted, base = of_task(TASK, ADAPTED)
    student = tabular_problem(num_prompts=2, group_size=2)
    teacher = jax.tree.map(jnp.copy, student.init(jax.random.key(1))[0])
    return {
        "adapters": (grpo.make(grpo.Config(), adapted), base),
        "teacher": (
            distillation.make(distillation.Config(), with_teacher(student, teacher)),
            teacher,
        ),
    }


@pytest.mark.parametrize("name", ["adapters", "teacher"])
def test_frozen_parameters_stay_out_of_donations(name):
    learner, given = frozen_learners()[name]
    state = learner.init(jax.random.key(0))
    frozen = state.params.frozen
    pointers = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(frozen)}
    # the state does not copy the frozen arrays
    assert pointers >= {x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)}
    donated(state.with_frozen(None))
    assert not any(x.is_deleted() for x in jax.tree.leaves(given))
    donated(learner.init(jax.random.key(0)))
    with pytest.raises(ConfigError, match=r"frozen: .* donated: .*state\.with_frozen\(None\)"):
        learner.init(jax.random.key(0))


def test_a_warm_start_refuses_a_donated_base():
    problem, base = of_task(TASK, ADAPTED, warm=language.WarmStart(steps=1, batch_size=2))
    donated(base)
    with pytest.raises(ConfigError, match="donated"):
        jax.eval_shape(problem.init, jax.random.key(0))
