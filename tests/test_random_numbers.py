"""Tests that random numbers are independent where they should be, and shared where they should be.

To detect a wrong key, one side draws exactly as the other side draws: an environment rewards the
action that the sampler would draw with the environment's key, or a task's answer is the token that
the sampler would draw.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from gymnax.environments import spaces
from learners import make
from probes import tabular_problem
from tables import cases

from jaxrl_po import control, language, learner, updates
from jaxrl_po.algorithms import grpo
from jaxrl_po.control import unroll
from jaxrl_po.distributions import Categorical
from jaxrl_po.language import reward_model, sampling
from jaxrl_po.masked import Mean
from jaxrl_po.types import Samples

ACTIONS = 8


class Guess:
    """Environment with reward 1 for the action that `categorical` would draw with the environment's
    own key.

    An episode has 16 steps.
    """

    default_params = None

    def reset(self, key, params=None):
        return jnp.zeros(1), jnp.int32(0)

    def step(self, key, state, action, params=None):
        drawn = jax.random.categorical(key, jnp.zeros(ACTIONS))
        over = state + 1 >= 16
        state, no = jnp.where(over, 0, state + 1), jnp.bool_(False)
        return jnp.zeros(1), state, drawn == action, over, no, {"final_observation": jnp.zeros(1)}

    def action_space(self, params=None):
        return spaces.Discrete(ACTIONS)

    def observation_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))


def uniform(memory, observation):
    return memory, Categorical(jnp.zeros((*observation.shape[:-1], ACTIONS)))


def test_action_noise_is_independent_of_environment_noise():
    environment = control.adapt(Guess())
    envs = unroll.start(environment, jax.random.key(0), jnp.arange(64, dtype=jnp.int32))
    segment = jax.jit(lambda key: unroll.unroll(environment, uniform, envs, key, num_steps=32)[1])(
        jax.random.key(1)
    )
    assert float(segment.transition.reward.mean()) == pytest.approx(1 / ACTIONS, abs=0.05)
    counts = np.bincount(np.ravel(segment.action), minlength=ACTIONS)
    np.testing.assert_allclose(counts / counts.sum(), 1 / ACTIONS, atol=0.04)
    assert len(np.unique(segment.action, axis=0)) == 64
    assert len(np.unique(segment.action, axis=1).T) == 32


def test_nor_in_an_evaluation_that_samples():
    play = functools.partial(
        unroll.episodes,
        control.adapt(Guess()),
        uniform,
        num_episodes=64,
        max_steps=16,
        greedy=False,
    )
    returns, lengths, _ = jax.jit(play)(jax.random.key(0))
    assert set(np.ravel(lengths).tolist()) == {16.0}
    assert float(returns.mean()) == pytest.approx(16 / ACTIONS, abs=0.7)


class Noisy(Guess):
    """Environment whose reward is noise, and a tenth of the action."""

    def step(self, key, state, action, params=None):
        observation, state, _, over, no, info = super().step(key, state, action, params)
        return observation, state, jax.random.normal(key) + 0.1 * action, over, no, info


@cases("num_branches", pytest.param(0, marks=pytest.mark.slow), 24)
def test_branches_share_noise_within_but_not_between_states(num_branches):
    """In the first step the branches of a state differ only by their action.

    In later steps all branches act identically.
    """
    problem = control.make_vine(
        Noisy(),
        num_envs=3,
        num_steps=4,
        num_states=2,
        num_branches=num_branches,
        horizon=3,
        discount=0.5,
    )
    batch = jax.jit(lambda key: problem.collect(*problem.init(key), key)[1])(jax.random.key(0))
    score, action = np.asarray(batch.score), np.asarray(batch.action).reshape(batch.score.shape)
    rest = score - 0.1 * action
    np.testing.assert_allclose(rest, np.broadcast_to(rest[:, :1], rest.shape), atol=1e-5)
    for returns, actions in zip(score, action, strict=True):
        for a in np.unique(actions):
            assert len(set(returns[actions == a].tolist())) == 1
    assert len(np.unique(rest[:, 0].round(4))) == 6


TASK = language.tasks.addition(1, zero_pad=False)
MODEL = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8).build(
    TASK.tokenizer.size
)


def test_completion_noise_is_independent_of_prompt_noise():
    """If the answer is the token drawn with the prompt's key, a policy finds it by chance only."""
    size = TASK.tokenizer.size

    def sample(key, held_out):
        prompt = TASK.sample(jax.random.key(0), held_out)
        # The key belongs to member 0, token 0, see `sampling.generate`.
        first = jax.random.fold_in(jax.random.fold_in(key, 0), 0)
        return prompt._replace(problem=jax.random.categorical(first, jnp.zeros(size)))

    task = TASK._replace(
        sample=sample,
        demonstrate=lambda answer: jnp.zeros(TASK.answer_length, jnp.int32),
        score=lambda answer, tokens: (tokens[0] == answer).astype(float),
        parses=None,
    )
    task = task._replace(stratum=None, strata=0)
    problem = language.make_problem(task, MODEL, num_prompts=64, group_size=2)
    answer = language.evaluation.make_answer(task, MODEL, num_prompts=64)

    @jax.jit
    def scores(key):
        params, collector = problem.init(key)
        indifferent = jax.tree.map(jnp.zeros_like, params)
        return problem.collect(indifferent, collector, key)[1].score, answer(
            indifferent, key, 2
        ).score

    for score in scores(jax.random.key(1)):
        assert float(score[:, 0].mean()) < 0.5


def test_every_epoch_is_reshuffled_and_uses_every_row():
    """Each row has its own gradient, and the optimizer stores the gradients that it receives."""
    rows, epochs, parts = 32, 4, 2

    def loss(params, samples):
        return (Mean(jnp.sum(samples["x"] @ params), jnp.float32(len(samples["x"]))),), {}

    def keep(gradient, state, params=None):
        count, kept = state
        return jnp.zeros_like(gradient), (count + 1, kept.at[count].set(gradient))

    recorder = optax.GradientTransformation(
        lambda params: (jnp.int32(0), jnp.zeros((epochs * parts, rows))), keep
    )
    update = jax.jit(
        updates.gradient_update(loss, recorder, num_epochs=epochs, num_minibatches=parts)
    )
    zeros = jnp.zeros(rows)
    seen = set()
    for key in (0, 1):
        _, (count, kept), _ = update(
            zeros, recorder.init(zeros), {"x": jnp.eye(rows)}, jax.random.key(key)
        )
        assert int(count) == epochs * parts
        dealt = np.asarray(kept).reshape(epochs, parts, rows) > 0
        np.testing.assert_array_equal(dealt.sum(1), 1)
        seen |= {dealt[e, 0].tobytes() for e in range(epochs)}
    assert len(seen) == 2 * epochs


def test_no_key_is_used_twice():
    """The test compares the keys of collection, of improvement and of the state over several
    iterations."""
    problem = tabular_problem()
    params, collector = problem.init(jax.random.key(0))

    def collect(params, _, key):
        return jax.random.key_data(key), problem.collect(params, collector, key)[1]

    def improve(state, samples, key):
        return state._replace(opt_state=jax.random.key_data(key)), {}

    def estimate(state, batch):
        return Samples(batch.inputs, batch.action, batch.log_prob, batch.reward, batch.mask)

    own = problem._replace(init=lambda key: (params, jax.random.key_data(key)), collect=collect)
    made = learner.make(
        own,
        estimate=estimate,
        improve=improve,
        init_optimizer=lambda params: jnp.zeros(2, jnp.uint32),
    )
    state, step = made.init(jax.random.key(0)), jax.jit(made.step)
    # Positions in the state: parameters, optimizer, reference, coefficient, collector state, key,
    # step.
    keys = [state[4], jax.random.key_data(state.key)]
    for _ in range(4):
        state, _ = step(state)
        keys += [state[4], state.opt_state, jax.random.key_data(state.key)]
    assert len({np.asarray(key).tobytes() for key in keys}) == len(keys)


def test_no_two_iterations_sample_the_same():
    made = grpo.make(grpo.Config(learning_rate=1e-30), tabular_problem(num_prompts=8, group_size=4))
    state, seen = made.init(jax.random.key(0)), set()
    sample, update = jax.jit(made.sample), jax.jit(made.update)
    for _ in range(4):
        state, batch = sample(state)
        seen.add(np.asarray(batch.action).tobytes())
        state, _ = update(state, batch)
    assert len(seen) == 4
    assert len(np.unique(np.asarray(batch.action), axis=0)) > 16


def as_raw(keys):
    """Returns keys in the raw form that `jax.random.PRNGKey` returns."""
    return jax.random.key_data(keys)


@cases(
    "algorithm, problem",
    *(("ppo", "everything"), ("trpo", "vine"), ("dapo-carry", "groups")),
    *(("ppo-reference", "learned"), ("dapo", "dialogue")),
)
def test_a_step_keeps_a_raw_key(algorithm, problem):
    learner = make(algorithm, problem)
    keys = as_raw(jax.random.split(jax.random.key(0)))
    state = jax.eval_shape(jax.vmap(learner.init), keys)
    assert (state.key.dtype, state.key.shape) == (jnp.uint32, keys.shape)
    after, _ = jax.eval_shape(jax.vmap(learner.step), state)
    assert jax.tree.map(jnp.result_type, after) == jax.tree.map(jnp.result_type, state)


def test_raw_keys_draw_the_tokens_of_typed_ones():
    def drawn(keys):
        members = sampling.member_keys(keys, 2)
        return sampling.draw(logits, members, jnp.int32(1), decoding, greedy=False, noise=0.1)[0]

    decoding = sampling.Decoding(2)
    logits = jnp.zeros((6, 1000))
    keys = jax.random.split(jax.random.key(0), 3)
    np.testing.assert_array_equal(drawn(as_raw(keys)), drawn(keys))


TASKS = {"task": language.tasks.addition(1), "dialogue": language.dialogues.higher_lower(8)}


@pytest.mark.parametrize("kind", TASKS)
def test_warm_start_and_evaluation_take_raw_keys(kind):
    task = TASKS[kind]
    model = language.Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
    makers = language if kind == "task" else language.dialogues
    warm = language.WarmStart(steps=2, accuracy=0.5, batch_size=2)
    problem = makers.make_problem(task, model, num_prompts=2, group_size=2, warm=warm)
    evaluate = makers.make_evaluate(task, model, num_prompts=2, num_samples=2)

    def run(key):
        start = problem.init(key)
        collector, batch = problem.collect(*start, key)
        return batch.reward, evaluate(start[0], collector, key)

    key = jax.random.key(0)
    assert jax.eval_shape(run, as_raw(key)) == jax.eval_shape(run, key)


def test_a_reward_model_is_fitted_with_raw_keys():
    task = TASKS["task"]
    model = language.Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
    problem = language.make_problem(task, model, num_prompts=2)
    settings = language.Preferences(comparisons=4, batch_size=2)

    def fit(key):
        params, _ = problem.init(key)
        judge = model.clone(outputs=1)
        return reward_model.fit(judge, task, model, params, key, settings=settings).accuracy

    key = jax.random.key(0)
    assert jax.eval_shape(fit, as_raw(key)) == jax.eval_shape(fit, key)
