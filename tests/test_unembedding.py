"""Tests that the distribution over a large vocabulary equals the plain distribution, and stores few
logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from jaxrl_po import language
from jaxrl_po.algorithms import grpo, ppo_penalty
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import Categorical, log_prob_and_entropy
from jaxrl_po.language import Transformer, lora, unembedding
from jaxrl_po.language.unembedding import Unembedded
from jaxrl_po.trust_region import fisher

ROWS, WIDTH, VOCABULARY = (3, 7), 5, 11
# Parts of 4 rows, 1 row and all 21 rows.
AT_ONCE = [4 * VOCABULARY, VOCABULARY - 1, 100 * VOCABULARY]


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


HIDDEN, MATRIX = drawn(*ROWS, WIDTH), drawn(WIDTH, VOCABULARY, seed=1)
OTHER = drawn(*ROWS, WIDTH, seed=2), drawn(WIDTH, VOCABULARY, seed=3)
ACTION = jnp.asarray(np.random.default_rng(4).integers(VOCABULARY, size=ROWS), jnp.int32)
WEIGHT = drawn(*ROWS, seed=5)
QUANTITIES = {
    "log_prob": lambda distribution, other: distribution.log_prob(ACTION),
    "entropy": lambda distribution, other: distribution.entropy(),
    "both": lambda distribution, other: jnp.add(
        *(
            scale * quantity
            for scale, quantity in zip(
                (2.0, -3.0), log_prob_and_entropy(distribution, ACTION), strict=True
            )
        )
    ),
    "kl": lambda distribution, other: distribution.kl(other),
    "kl to it": lambda distribution, other: other.kl(distribution),
}


@pytest.mark.parametrize("at_once", AT_ONCE)
@pytest.mark.parametrize("name", QUANTITIES)
def test_values_and_gradients_equal_the_plain_computation(name, at_once):
    def total(build, hidden, matrix, other):
        return jnp.sum(WEIGHT * QUANTITIES[name](build(hidden, matrix), build(*other)))

    def plain(hidden, matrix):
        return Categorical(hidden @ matrix)

    def few(hidden, matrix):
        return Unembedded(hidden, matrix, at_once)

    found, expected = (
        jax.jit(jax.value_and_grad(lambda *a, build=build: total(build, *a), argnums=(0, 1, 2)))(
            HIDDEN, MATRIX, OTHER
        )
        for build in (few, plain)
    )
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_logits_of_any_size_are_scored():
    few = Unembedded(1e5 * HIDDEN, MATRIX, 4 * VOCABULARY)
    plain = Categorical(few.logits)
    expected = plain.log_prob(ACTION), plain.entropy()
    for found, value in zip(log_prob_and_entropy(few, ACTION), expected, strict=True):
        assert jnp.isfinite(value).all()
        assert_allclose(found, value, rtol=1e-5, atol=1e-5)


def test_tokens_are_drawn_and_the_mode_found():
    few = Unembedded(HIDDEN, MATRIX, 4 * VOCABULARY)
    assert_array_equal(few.mode(), Categorical(few.logits).mode())
    many = jax.vmap(few.sample)(jax.random.split(jax.random.key(0), 4000))
    share = jax.nn.one_hot(many, VOCABULARY).mean(axis=0)
    assert_allclose(share, jax.nn.softmax(few.logits), atol=0.05)


def test_fisher_products_are_those_of_the_plain_one():
    weight = jnp.full(ROWS, 1 / 21)
    vector = drawn(WIDTH, WIDTH, seed=6)
    found, expected = (
        fisher(lambda change, build=build: build(HIDDEN @ change), jnp.eye(WIDTH), weight)(vector)
        for build in (
            lambda hidden: Unembedded(hidden, MATRIX, 4 * VOCABULARY),
            lambda hidden: Categorical(hidden @ MATRIX),
        )
    )
    assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_logits_of_all_rows_are_never_held():
    rows, vocabulary = 64, 700

    def loss(hidden, matrix):
        distribution = Unembedded(hidden, matrix, 8 * vocabulary)
        return jnp.sum(distribution.log_prob(jnp.zeros(rows, jnp.int32)) + distribution.entropy())

    arguments = drawn(rows, WIDTH), drawn(WIDTH, vocabulary)
    program = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arguments).compile().as_text()
    for shape in (f"[{rows},{vocabulary}]", f"[8,8,{vocabulary}]"):
        assert shape not in program
    assert f"[8,{vocabulary}]" in program


@pytest.mark.parametrize(("at_once", "products"), [(8, 3), (7, 4)])
def test_what_is_held_at_once_is_computed_once(at_once, products):
    """Logits and two gradients take one product each; a backward pass in parts takes one more
    product."""

    def loss(hidden, matrix):
        distribution = Unembedded(hidden, matrix, at_once * VOCABULARY)
        return jnp.sum(distribution.log_prob(jnp.zeros(8, jnp.int32)))

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    text = jax.jit(gradient).lower(drawn(8, WIDTH), drawn(WIDTH, VOCABULARY)).as_text()
    parts = 1 if at_once == 8 else 2  # seven rows, and the remaining row
    assert text.count("dot_general") == products * parts


TASK = language.tasks.addition(1)
PAIR = jnp.array([[2, 3, 4, 5, 6, 7, 8]]), jnp.array([1])


def test_a_large_vocabulary_trains_like_a_small_one(monkeypatch):
    model = Transformer(TASK.tokenizer.size, width=16, layers=1, heads=2, tied=True, gated=False)
    kinds = []

    def stepped(held):
        monkeypatch.setattr(unembedding, "HELD", held)

        @jax.jit
        def run(key):
            problem = language.make_problem(
                TASK,
                model,
                num_prompts=4,
                group_size=4,
                temperature=0.7,
                process_reward=True,
                warm=language.WarmStart(steps=3, batch_size=8),
            )
            config = grpo.Config(num_minibatches=2, entropy_coefficient=0.01, use_reference=False)
            learner = grpo.make(config, problem)
            state, batch = learner.sample(learner.init(key))
            kinds.append(type(problem.apply(state.params, batch.inputs)[0]))
            return learner.update(state, batch)[0].params.policy

        return run(jax.random.key(0))

    expected, found = stepped(100), stepped(1)
    assert kinds == [Categorical, Unembedded]
    jax.tree.map(lambda a, b: assert_allclose(a, b, atol=2e-5), found, expected)


def test_adapters_over_large_vocabulary_get_same_gradient(monkeypatch):
    model = Transformer(TASK.tokenizer.size, width=16, layers=1, heads=2, mlp_width=24)
    model = model.clone(lora=lora.Lora(2))
    params = jax.tree.map(lambda x: 0.5 * drawn(*x.shape), model.parameter_shapes())
    over, adapters = lora.over(model, {"params": params["params"]}), {"lora": params["lora"]}

    def gradient(held):
        monkeypatch.setattr(unembedding, "HELD", held)

        def loss(adapters):
            found = unembedding.next_tokens(over, adapters, *PAIR, last=3, temperature=0.7)
            kinds.append(type(found))
            return jnp.sum(found.log_prob(jnp.array([[4, 5, 6]])))

        return jax.jit(jax.grad(loss))(adapters)

    kinds = []
    expected, found = gradient(100), gradient(1)
    assert kinds == [Categorical, Unembedded]
    assert max(float(np.abs(x).max()) for x in jax.tree.leaves(found)) > 1e-2
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected)


def test_penalty_on_every_token_refuses_large_vocabulary(monkeypatch):
    monkeypatch.setattr(unembedding, "HELD", 1)
    model = Transformer(TASK.tokenizer.size, width=16, layers=1, heads=2, mlp_width=24)
    problem = language.make_problem(TASK, model, num_prompts=4, group_size=4)
    learner = ppo_penalty.make(ppo_penalty.Config(num_minibatches=2), problem)
    with pytest.raises(ConfigError, match="every token, for a vocabulary of this size: take ppo"):
        jax.eval_shape(learner.step, jax.eval_shape(learner.init, KEY))


KEY = jax.random.key(1)
