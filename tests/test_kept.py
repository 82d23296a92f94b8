"""Tests that the sampler is the trainer: the policy is restricted to the tokens that the sampler
kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import probes
import pytest
from test_sampling import kept
from traced import equations

from jaxrl_po import language
from jaxrl_po.algorithms import grpo, trpo
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.language import unembedding
from jaxrl_po.language.unembedding import AT_ONCE, HELD, LISTED, restricted
from jaxrl_po.run.experiment.language import filtered
from jaxrl_po.types import ActorCritic, CollectorState

TASK = language.tasks.addition(1, zero_pad=False)
SIZE, TEMPERATURE = TASK.tokenizer.size, 0.7
FILTERS = {"top_k": 7, "top_p": 0.9, "min_p": 0.05}
MODEL = language.Transformer(SIZE, width=16, layers=1, heads=2, mlp_width=16, gated=False)
PROMPTS, GROUP = 4, 4


def drawn(seed):
    return probes.drawn(MODEL.parameter_shapes(), 0.5, (1,), seed)


def make(model=MODEL, **options):
    return language.make_problem(
        TASK,
        model,
        **(
            {"num_prompts": PROMPTS, "group_size": GROUP, "temperature": TEMPERATURE}
            | {"process_reward": True, "max_new_tokens": 5, **FILTERS, **options}
        ),
    )


COLLECTOR = CollectorState({"prompt_number": jnp.arange(PROMPTS, dtype=jnp.int32)})


def as_mask(inputs):
    """Returns the stored sets of tokens as a mask `[B, T, V]`, in whatever form they are stored."""
    if inputs.kept.dtype == bool:
        return inputs.kept
    return jax.nn.one_hot(inputs.kept, SIZE, dtype=bool).any(axis=-2)


def logits_of(policy, inputs):
    steps = inputs.kept.shape[1]
    logits = MODEL.apply(policy, inputs.tokens[:, :-1], inputs.pad, last=steps)[0]
    return logits / TEMPERATURE


def dense(logits, among):
    """Computes log-probabilities `[B, T, V]` of π 1[S] / π(S); 0 outside of S."""
    total = jnp.log(jnp.sum(jnp.where(among, jnp.exp(logits), 0.0), axis=-1, keepdims=True))
    return jnp.where(among, logits - total, 0.0)


@functools.cache
def measured(held):
    """Returns a batch, `apply` at every token, and a loss of all quantities with its gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unembedding, "HELD", held)
        problem = make()

        def weighted(log_prob, entropy, kl, mask):
            weight = jnp.cos(jnp.arange(mask.size)).reshape(mask.shape)
            return jnp.sum(jnp.where(mask, weight * (log_prob + 0.3 * entropy) + kl, 0.0))

        @jax.jit
        def run(policy, other, key):
            batch = problem.collect(ActorCritic(policy), COLLECTOR, key)[1]
            inputs, among = batch.inputs, as_mask(batch.inputs)

            def by_apply(policy):
                old, new = (problem.apply(ActorCritic(p), inputs)[0] for p in (other, policy))
                return weighted(new.log_prob(batch.action), new.entropy(), old.kl(new), batch.mask)

            def by_hand(policy):
                old, new = (dense(logits_of(p, inputs), among) for p in (other, policy))
                p, q = (jnp.where(among, jnp.exp(x), 0.0) for x in (old, new))
                log_prob = jnp.take_along_axis(new, batch.action[..., None], -1)[..., 0]
                return weighted(
                    log_prob, -jnp.sum(q * new, -1), jnp.sum(p * (old - new), -1), batch.mask
                )

            distribution = problem.apply(ActorCritic(policy), inputs)[0]
            every = jax.vmap(lambda a: distribution.log_prob(jnp.full_like(batch.action, a)))(
                jnp.arange(SIZE)
            )
            losses = [jax.value_and_grad(f)(policy) for f in (by_apply, by_hand)]
            return batch, logits_of(policy, inputs), jnp.moveaxis(every, 0, -1), losses

        return jax.device_get(run(drawn(3), drawn(1), jax.random.key(4)))


REPRESENTATIONS = pytest.mark.parametrize("held", [HELD, 1], ids=["mask", "list"])


@REPRESENTATIONS
def test_scored_tokens_are_the_sampled_tokens(held):
    """Every token of the vocabulary is compared with the filters, applied one after another in
    float64."""
    batch, logits, log_probs, _ = measured(held)
    sizes = set()
    for row, column in np.argwhere(batch.mask):
        policy = np.exp(logits[row, column].astype(np.float64))
        chosen = kept(policy / policy.sum(), **FILTERS)
        mu = np.zeros(SIZE)
        mu[chosen] = policy[chosen] / policy[chosen].sum()
        np.testing.assert_allclose(np.exp(log_probs[row, column]), mu, rtol=1e-5, atol=1e-7)
        assert batch.action[row, column] in chosen
        sizes.add(len(chosen))
    assert len(sizes) > 2
    own = np.take_along_axis(log_probs, batch.action[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.exp(own - batch.log_prob)[batch.mask], 1.0, atol=1e-5)


@REPRESENTATIONS
def test_gradients_are_those_of_the_dense_formula(held):
    """The test checks log-probabilities, entropies and the KL to another policy, over the same
    sets."""
    _, _, _, ((value, gradient), (want, its)) = measured(held)
    np.testing.assert_allclose(value, want, rtol=1e-5)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(its)) > 0.1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient, its)


def test_masked_slots_are_empty_and_finite():
    batch, _, log_probs, _ = measured(HELD)
    assert not batch.mask.all()
    np.testing.assert_array_equal(batch.inputs.kept.any(axis=-1), batch.mask)
    assert np.isfinite(log_probs[~batch.mask]).all()


def test_set_of_one_token_learns_nothing():
    logits = jnp.array([[0.3, -1.0, 2.0], [0.1, 0.2, 0.4]])

    def measured(logits, among):
        policy = restricted(logits, among)
        token = policy.sample(jax.random.key(0))
        quantities = policy.log_prob(token), policy.entropy(), policy.kl(restricted(-logits, among))
        return sum(jnp.sum(x) for x in quantities), (token, *quantities)

    for among in (logits == jnp.array([[-1.0], [0.4]]), jnp.array([[1, -1], [-1, 2]])):
        gradient, (token, *quantities) = jax.grad(measured, has_aux=True)(logits, among)
        assert token.tolist() == [1, 2]
        np.testing.assert_array_equal(quantities, 0.0)
        np.testing.assert_array_equal(gradient, 0.0)
        outside = restricted(logits, among).log_prob(jnp.array([0, 0]))
        np.testing.assert_array_equal(outside, -jnp.inf)


def first_step(problem, config):
    """Returns the batch and the metrics of the first update, and `apply` at the batch's actions."""
    learner = grpo.make(as_arrays(config), problem)

    @jax.jit
    def run(policy):
        state = learner.init(jax.random.key(0))
        state = state._replace(params=ActorCritic(policy))
        if config.use_reference:
            state = state._replace(reference_params=policy)
        state, batch = learner.sample(state)
        log_prob = problem.apply(state.params, batch.inputs)[0].log_prob(batch.action)
        return batch, log_prob, learner.update(state, batch)[1]

    return jax.device_get(run(drawn(0)))


def test_the_first_policy_and_the_reference_are_one():
    """The estimated KL between policy and reference is 0 at every token, and the ratio is 1."""
    batch, log_prob, metrics = first_step(make(), grpo.Config())
    assert abs(float(metrics["reference_kl"].value())) < 1e-9
    np.testing.assert_allclose(np.exp(log_prob - batch.log_prob)[batch.mask], 1.0, atol=1e-5)


def test_half_precision_learner_scores_sets_of_sampler():
    """Sampler and learner round differently; over equal shapes the learner's ratio to itself is
    1."""
    problem = make(MODEL.clone(dtype=jnp.dtype("bfloat16")))
    assert not problem.log_prob_matches_sampler
    batch, log_prob, metrics = first_step(problem, grpo.Config(use_reference=False))
    np.testing.assert_allclose(np.exp(log_prob - batch.log_prob)[batch.mask], 1.0, atol=1e-5)
    assert float(metrics["sampler_max_ratio"].value()) < 1.2


def test_the_trust_region_is_over_the_sets(monkeypatch):
    monkeypatch.setattr(unembedding, "HELD", 1)
    learner = trpo.make(as_arrays(trpo.Config(max_kl=0.01)), make())

    @jax.jit
    def run(policy):
        state = learner.init(jax.random.key(0))._replace(params=ActorCritic(policy))
        state, batch = learner.sample(state)
        after, metrics = learner.update(state, batch)
        among = as_mask(batch.inputs)
        old, new = (dense(logits_of(s.params.policy, batch.inputs), among) for s in (state, after))
        kl = jnp.sum(jnp.where(among, jnp.exp(old) * (old - new), 0.0), axis=-1)
        return metrics, jnp.sum(jnp.where(batch.mask, kl, 0.0)) / batch.mask.sum()

    metrics, kl = jax.device_get(run(drawn(0)))
    assert float(metrics["accepted"].value()) == 1.0
    assert 0.003 < kl <= 0.01
    assert float(metrics["exact_kl"].value()) == pytest.approx(float(kl), rel=1e-3)


class Wide:
    """Tokenizer of the task, with a large vocabulary."""

    size, pad, eos, ends = 50_000, TASK.tokenizer.pad, TASK.tokenizer.eos, TASK.tokenizer.ends
    vocabulary = size


def wide(**options):
    task = TASK._replace(tokenizer=Wide())
    model = language.Transformer(Wide.size, width=64, layers=1, heads=2)
    return language.make_problem(task, model, num_prompts=32, group_size=8, **options)


def test_large_vocabulary_is_not_stored_for_all_tokens(monkeypatch):
    """No array in the program of an iteration has as many numbers as the kept ids times four.

    The logits of all tokens would have a hundred times as many numbers, and so would the rows of
    the matrix for the kept ids.
    """
    steps, rows, ids = 128, 256, LISTED

    def largest(problem):
        learner = grpo.make(as_arrays(grpo.Config()), problem)
        state = jax.eval_shape(learner.init, jax.random.key(0))
        batch = jax.eval_shape(learner.sample, state)[1]
        jaxpr = jax.make_jaxpr(learner.step)(state).jaxpr
        shapes = (x.aval for eq in equations(jaxpr) for x in eq.outvars if hasattr(x, "aval"))
        return batch, max(x.size for x in shapes)

    problem = wide(top_p=0.9, max_new_tokens=steps)
    batch, size = largest(problem)
    assert batch.inputs.kept.shape == (rows, steps, ids)
    assert rows * steps * ids <= size < 4 * max(rows * steps * ids, AT_ONCE)
    assert min(Wide.size, ids * 64) * rows * steps > 50 * size
    monkeypatch.setattr(unembedding, "HELD", Wide.size)
    assert largest(problem)[1] >= rows * steps * Wide.size


def test_what_cannot_be_held_is_named():
    with pytest.raises(
        ConfigError, match=r"top_k: must be at most 512 with a vocabulary of 50000, got 513"
    ):
        wide(top_k=LISTED + 1)
    wide(top_k=LISTED)


def test_filter_of_large_vocabulary_logs_its_share():
    """Every task's `LanguageSettings` of a run has the filter."""
    settings = language.LanguageSettings(top_p=0.9)
    (said,) = filtered(settings, Wide())
    assert "at most 512 of the 50,000 tokens" in said
    assert not filtered(settings, MODEL)
    assert not filtered(language.LanguageSettings(top_p=0.9, top_k=20), Wide())
    assert not filtered(language.LanguageSettings(), Wide())
