"""Tests the reward model and the problem with its rewards: pairs, fit, position of the reward."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import drawn

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import reward_model
from jaxrl_po.language.networks import Sequences
from jaxrl_po.language.tasks.split import rows_held_out
from jaxrl_po.types import ActorCritic

TASK = language.tasks.addition(2, zero_pad=False)
SIZES = language.ModelSettings(width=16, layers=1, heads=2, kv_heads=1, mlp_width=16)
POLICY, CRITIC = SIZES.build(TASK.tokenizer.size), SIZES.build(TASK.tokenizer.size, outputs=1)
JUDGE = dataclasses.replace(SIZES, width=8).build(TASK.tokenizer.size, outputs=1)
BUDGET = 5


def fit(params, key, settings):
    return reward_model.fit(
        JUDGE, TASK, POLICY, params, key, settings=settings, max_new_tokens=BUDGET
    )


def language_problem(critic=CRITIC):
    return language.make_problem(
        TASK, POLICY, num_prompts=6, group_size=2, critic=critic, max_new_tokens=BUDGET
    )


@functools.cache
def begun():
    empty = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    return jax.jit(POLICY.init)(jax.random.key(0), *empty)


@functools.cache
def fitted():
    params = drawn(JUDGE.parameter_shapes(), 0.3, (1,))
    return language.RewardModel(params, jnp.float32(0.1), jnp.float32(0.5), jnp.float32(1.0))


@functools.cache
def collected():
    """Returns a collector's state, a batch, and the batch without the reward model."""
    inside, given = language_problem(), fitted()
    problem = language.learned_reward(inside, TASK, JUDGE, lambda params, key: given)

    @jax.jit
    def both(keys):
        params, collector = problem.init(keys[0])
        _, batch = problem.collect(params, collector, keys[1])
        bare = collector._replace(replicated={})
        return collector, batch, inside.collect(params, bare, keys[1])[1]

    return jax.tree.map(np.asarray, both(jax.random.split(jax.random.key(0))))


@functools.cache
def pairs(flip):
    return compared()(flip)


@functools.cache
def compared():
    compare = functools.partial(
        reward_model.compare, TASK, POLICY, begun(), jax.random.key(1), 512, demonstrations=0.5
    )
    return jax.jit(
        lambda flip, temperature=1.0: compare(
            flip=flip, temperature=temperature, max_new_tokens=BUDGET
        )
    )


def rights(pairs):
    """Returns whether each completion is right, `[N, 2]`, by parsing the completion."""

    def right(tokens):
        prompt, answer = TASK.tokenizer.decode(tokens.tolist(), pad=" ").strip().split("=", 1)
        a, b = prompt.split("+")
        return TASK.tokenizer.eos in tokens and answer == str(int(a) + int(b))[::-1]

    return np.array(
        [[right(np.asarray(tokens)) for tokens in pair] for pair in np.asarray(pairs.inputs.tokens)]
    )


def test_verifier_prefers_right_answers_with_given_error_rate():
    clean, noisy = (rights(pairs(flip)) for flip in (0.0, 0.25))
    differ = np.asarray(pairs(0.0).differ)
    assert_array_equal(differ, clean[:, 0] != clean[:, 1])
    # The other completion is a demonstration, and the policy guesses.
    assert 0.3 < differ.mean() < 0.7
    assert clean[differ, 0].all()
    assert_allclose(noisy[np.asarray(pairs(0.25).differ), 1].mean(), 0.25, atol=0.08)


def test_pairs_use_training_prompts_at_the_temperature():
    """About half of the pairs do not contain a demonstration.

    Near temperature 0 the two samples of a pair are equal.
    """
    prompts = np.asarray(pairs(0.0).inputs.tokens)[:, 0, :-BUDGET]
    texts = [TASK.tokenizer.decode(row.tolist(), pad=" ").strip("= ") for row in prompts]
    operands = np.array([sorted(map(int, text.split("+"))) for text in texts], np.uint32)
    assert not rows_held_out(jnp.asarray(operands)).any()
    same = [
        float((tokens[:, 0] == tokens[:, 1]).all(axis=-1).mean())
        for tokens in (compared()(0.0, x).inputs.tokens for x in (1.0, 1e-3))
    ]
    assert same[0] < 0.1
    assert 0.4 < same[1] < 0.6


def test_a_fit_reads_training_pairs_that_differ(monkeypatch):
    """Ties and fresh pairs prefer the opposite token: a fit that used them would learn the opposite
    preference."""
    monkeypatch.setattr(reward_model, "FRESH", 16)
    asked = []

    def compare(task, policy, params, key, num_pairs, *, flip, **options):
        asked.append((num_pairs, options))
        fresh, differ = flip == 0.0, jnp.arange(num_pairs) < 2
        # The tokens are 3 and 4; training pairs that differ prefer token 3.
        better = jnp.where(differ & ~fresh, 3, 4)
        pair = jnp.stack([better, 7 - better], axis=1)[:, :, None]
        tokens = jnp.concatenate([jnp.full_like(pair, 5 + fresh), pair], axis=2)
        mask = jnp.ones_like(pair, bool)
        pad = jnp.zeros(mask.shape[:2], jnp.int32)
        return reward_model.Comparisons(Sequences(tokens, pad), mask, differ | fresh)

    monkeypatch.setattr(reward_model, "compare", compare)
    settings = language.Preferences(
        comparisons=8, batch_size=8, epochs=64, flip=0.1, demonstrations=0.375, learning_rate=1e-2
    )

    @jax.jit
    def run(key):
        options = {"settings": settings, "max_new_tokens": BUDGET, "temperature": 0.5}
        judge = reward_model.fit(JUDGE, TASK, POLICY, ActorCritic(None), key, **options)
        pairs = compare(None, None, None, key, 8, flip=0.1)
        return judge, reward_model.rate_pairs(JUDGE, judge.params, pairs)

    judge, output = run(jax.random.key(0))
    assert asked[0] == (8, {"demonstrations": 0.375, "max_new_tokens": BUDGET, "temperature": 0.5})
    assert float(judge.accuracy) == 0.0
    assert_allclose([judge.mean, judge.std], [output.mean(), output.std()], rtol=1e-4)


def test_ties_do_not_move_a_fit(monkeypatch):
    """A second batch of ties does not change the result of the first batch, even with momentum."""
    monkeypatch.setattr(reward_model, "FRESH", 8)
    first = jax.random.split(jax.random.split(jax.random.key(0))[1], 1)[0]

    def compare(task, policy, params, key, num_pairs, **options):
        tokens = jnp.broadcast_to(jnp.array([[3], [4]]), (num_pairs, 2, 1))
        inputs = Sequences(tokens, jnp.zeros(tokens.shape[:2], jnp.int32))
        differ = (jax.random.key_data(key) == jax.random.key_data(first)).all()
        return reward_model.Comparisons(
            inputs, jnp.ones(tokens.shape, bool), jnp.full(num_pairs, differ)
        )

    monkeypatch.setattr(reward_model, "compare", compare)

    def fitted_to(batches):
        settings = language.Preferences(comparisons=8 * batches, batch_size=8, epochs=1)
        run = functools.partial(
            reward_model.fit, JUDGE, TASK, POLICY, ActorCritic(None), settings=settings
        )
        return jax.jit(run)(jax.random.key(0)).params

    once, with_ties = fitted_to(1), fitted_to(2)
    chex.assert_trees_all_close(once, with_ties, rtol=1e-6, atol=1e-7)
    empty = jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32)
    start = JUDGE.init(jax.random.split(jax.random.key(0))[0], *empty)
    assert not np.array_equal(*(jax.tree.leaves(each)[0] for each in (once, start)))


def test_masks_of_pairs_end_with_eos():
    tokens, mask = np.asarray(pairs(0.0).inputs.tokens)[..., -BUDGET:], np.asarray(pairs(0.0).mask)
    first = np.where(
        (tokens == TASK.tokenizer.eos).any(-1),
        (tokens == TASK.tokenizer.eos).argmax(-1) + 1,
        BUDGET,
    )
    assert_array_equal(mask.sum(-1), first)
    assert_array_equal(mask, np.arange(BUDGET) < first[..., None])


def test_reward_is_on_the_last_token_only():
    """At EOS, or at the budget's last token, the reward is the model's score of the text so far."""
    collector, batch, _ = collected()
    judge, length = collector.replicated["reward_model"], batch.mask.sum(1)
    assert len(set(length)) > 1
    assert batch.truncated.any()
    apply = jax.jit(JUDGE.apply)
    for row in range(len(length)):
        # Rows keep their length: padding on the left replaces the columns that are cut off.
        cut = BUDGET - length[row]
        prefix = np.roll(batch.inputs.tokens[row : row + 1], cut, axis=1)
        output, _ = apply(judge.params, prefix, batch.inputs.pad[row : row + 1] + cut)
        want = np.zeros(BUDGET)
        want[length[row] - 1] = (output[0, -1, 0] - judge.mean) / judge.std
        assert_allclose(batch.reward[row], want, rtol=1e-4, atol=1e-5)
    assert_allclose(batch.metrics["reward_model"].value(), batch.reward.sum(1).mean(), rtol=1e-5)


def test_score_stays_that_of_the_verifier():
    _, batch, verified = collected()
    assert_array_equal(batch.score, verified.score)
    assert_array_equal(batch.inputs.tokens, verified.inputs.tokens)
    chex.assert_trees_all_equal(batch.metrics["accuracy"], verified.metrics["accuracy"])


def test_init_fits_to_initial_policy_or_takes_fitted():
    settings = language.Preferences(comparisons=16, batch_size=8, epochs=1)
    seen = []

    def fit_and_tell(params, key):
        seen.append(params)
        return fit(params, key, settings)

    problem = language.learned_reward(language_problem(), TASK, JUDGE, fit_and_tell)
    params, collector = jax.eval_shape(problem.init, jax.random.key(5))
    assert jax.tree.structure(seen[0].policy) == jax.tree.structure(params.policy)
    assert jax.tree.structure(collector.replicated["reward_model"]) == jax.tree.structure(fitted())
    chex.assert_trees_all_equal(collected()[0].replicated["reward_model"], fitted())


def test_bad_models_are_named():
    problem = language.make_problem(TASK, POLICY, num_prompts=2, group_size=1)
    with pytest.raises(
        ConfigError, match="reward_model: vocabulary must be 14, as in 2-digit addition, got 15"
    ):
        language.learned_reward(problem, TASK, SIZES.build(15, outputs=1), None)
    with pytest.raises(ConfigError, match="reward_model: must have outputs = 1, got 0"):
        language.learned_reward(problem, TASK, POLICY, None)
    other, found = SIZES.build(TASK.tokenizer.size, outputs=1), fitted()
    with pytest.raises(ConfigError, match="reward_model: must be parameters of the model"):
        jax.eval_shape(
            language.learned_reward(problem, TASK, other, lambda params, key: found).init,
            jax.random.key(0),
        )
