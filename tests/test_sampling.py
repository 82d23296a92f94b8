"""Tests sampling: shared prompts, keys, temperature, and the end of a completion."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from numpy.testing import assert_allclose, assert_array_equal
from tables import cases

from jaxrl_po.language import Transformer, unembedding
from jaxrl_po.language.sampling import Decoding, generate, kept_tokens, truncate_logits

HELD = unembedding.HELD
VOCABULARY, PAD, EOS, BUDGET = 10, 0, 1, 5
MODEL = Transformer(VOCABULARY, width=16, layers=1, heads=4, kv_heads=2, mlp_width=16)
PROMPT = jnp.array([[0, 0, 2, 3], [4, 5, 2, 2], [0, 3, 4, 5], [3, 2, 4, 4]], jnp.int32)
PADDING = jnp.array([2, 0, 1, 0])
KEYS = jax.random.split(jax.random.key(5), 4)


class Script:
    """Stand-in for a transformer: the logits of the next token are `table[token]`.

    The stand-in records the shapes of its arguments.
    """

    def __init__(self, table):
        self.table, self.shapes, self.calls = jnp.asarray(table, jnp.float32), [], []

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, length))

    def apply(self, params, tokens, pad, cache, start, *, last=0):
        self.shapes.append(tokens.shape)
        jax.debug.callback(self.calls.append, start)
        return self.table[tokens][:, -last:], cache


def countdown():
    """Builds a model that says k − 1 after k, and EOS = 1 after 2, with certainty."""
    return Script(
        np.where(np.arange(VOCABULARY)[:, None] - 1 == np.arange(VOCABULARY), 0.0, -np.inf)
    )


def ending(*tokens):
    """Returns prompts of three tokens that end with specified tokens."""
    return jnp.array([[5, 5, token] for token in tokens]), jnp.zeros(len(tokens), jnp.int32)


@functools.cache
def parameters():
    generator = np.random.default_rng(0)
    shapes = jax.eval_shape(MODEL.init, jax.random.key(0), PROMPT, PADDING)
    return jax.tree.map(
        lambda leaf: jnp.asarray(
            2 * generator.normal(size=leaf.shape) / leaf.shape[0] ** 0.5, leaf.dtype
        ),
        shapes,
    )


@functools.cache
def sampler(model=MODEL, **options):
    given = {name: options.pop(name) for name in Decoding._fields if name in options}
    decoding = Decoding(**{"max_new_tokens": BUDGET, **given})
    options = {"group_size": 1, "eos": EOS, "pad_token": PAD} | options
    return jax.jit(functools.partial(generate, model, decoding=decoding, **options))


def test_golden_end_of_completions():
    """EOS counts, only PAD follows EOS, and a row without EOS in its budget has not ended."""
    completions = sampler(countdown())((), *ending(2, 4, 6, 9), KEYS)
    assert completions.tokens.tolist() == [
        [1, 0, 0, 0, 0],
        [3, 2, 1, 0, 0],
        [5, 4, 3, 2, 1],
        [8, 7, 6, 5, 4],
    ]
    assert completions.length.tolist() == [1, 3, 5, 5]
    assert completions.ended.tolist() == [True, True, True, False]
    # The log-probability is 0: the model is certain before the end, and slots after the end are
    # zeroed.
    assert_array_equal(completions.log_prob, np.zeros((4, BUDGET)))


def test_generated_pad_is_a_token_not_the_end():
    """A PAD that the policy draws is a token: it has a log-probability and counts in the length."""
    table = np.full((VOCABULARY, VOCABULARY), -np.inf)
    table[3, PAD], table[PAD, 2], table[2, EOS], table[EOS, EOS] = 0.0, 0.0, 0.0, 0.0
    completions = sampler(Script(table))((), *ending(3), KEYS[:1])
    assert completions.tokens.tolist() == [[0, 2, 1, 0, 0]]
    assert completions.length.tolist() == [3]


def test_tokens_after_the_end_are_not_kept():
    """While another row still generates, the policy would generate 7, 6, 5 … after EOS."""
    table = np.array(countdown().table)
    table[EOS] = np.where(np.arange(VOCABULARY) == 7, 0.0, -np.inf)
    completions = sampler(Script(table))((), *ending(3, 9), KEYS[:2])
    assert completions.tokens.tolist() == [[2, 1, 0, 0, 0], [8, 7, 6, 5, 4]]
    assert completions.length.tolist() == [2, 5]


def test_prompt_is_read_once_and_loop_ends_early():
    model = countdown()
    completions = sampler(model, group_size=3)((), *ending(2, 4), KEYS[:2])
    jax.effects_barrier()
    assert completions.tokens.shape == (6, BUDGET)
    # Two prompts of three tokens are processed once, then six rows step by step.
    assert model.shapes == [(2, 3), (6, 1)]
    assert sorted(map(int, model.calls)) == [
        0,
        3,
        4,
    ]  # the longest completion has three tokens: two steps after the prompt


def test_vmap_keeps_what_has_ended():
    """Under vmap every lane runs until the slowest lane ends."""
    one, two = ending(2, 3), ending(4, 9)
    run = functools.partial(sampler(countdown()), ())
    together = jax.vmap(run, in_axes=(0, 0, None))(
        *map(jnp.stack, zip(one, two, strict=True)), KEYS[:2]
    )
    for lane, prompts in enumerate((one, two)):
        alone = run(*prompts, KEYS[:2])
        jax.tree.map(
            assert_array_equal, jax.tree.map(lambda x, lane=lane: x[lane], together), alone
        )


def reference(prompt, pad, key, member, *, temperature=1.0, greedy=False, **filters):
    """Computes one completion by passes over the bare prompt: without cache, group or padding."""
    tokens, log_probs = prompt[int(pad) :].tolist(), []
    key = jax.random.fold_in(key, member)
    for t in range(BUDGET):
        # Padding on the right keeps one compiled shape; no token attends to later positions.
        filled = np.array([tokens + [PAD] * (PROMPT.shape[1] + BUDGET - len(tokens))])
        logits = np.asarray(whole_pass(filled))[0, len(tokens) - 1] / np.float32(temperature)
        allowed = kept(np.exp(logits) / np.exp(logits).sum(), **filters)
        logits = np.where(np.isin(np.arange(VOCABULARY), allowed), logits, -np.inf)
        token = int(logits.argmax() if greedy else draw(key, t, logits))
        tokens.append(token)
        log_probs.append(float(logits[token] - np.log(np.exp(logits).sum())))
        if token == EOS:
            break
    length = len(log_probs)
    return (
        tokens[-length:] + [PAD] * (BUDGET - length),
        log_probs + [0.0] * (BUDGET - length),
        length,
    )


@jax.jit
def draw(key, t, logits):
    return jax.random.categorical(jax.random.fold_in(key, t), logits)


@jax.jit
def whole_pass(tokens):
    return MODEL.apply(parameters(), tokens, jnp.zeros(1, jnp.int32))[0]


@cases(
    "options",
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"greedy": True},
    {"top_p": 0.7, "top_k": 4},
)
def test_shared_prompt_and_cache_equal_whole_passes(options):
    """Prompts are ragged, and queries are grouped. The test also fixes which key draws which
    token."""
    completions = sampler(group_size=3, **options)(parameters(), PROMPT, PADDING, KEYS)
    lengths = set()
    for row in range(12):
        group, member = divmod(row, 3)
        want = reference(PROMPT[group], PADDING[group], KEYS[group], member, **options)
        assert completions.tokens[row].tolist() == want[0]
        assert_allclose(completions.log_prob[row], want[1], atol=1e-4)
        assert int(completions.length[row]) == want[2]
        lengths.add(want[2])
    # Some sampled completions end before the budget.
    assert "greedy" in options or len(lengths) > 1


def kept(probabilities, *, top_k=0, top_p=1.0, min_p=0.0):
    """Returns the kept tokens, added one at a time from the most likely down, in float64."""
    order = sorted(range(len(probabilities)), key=lambda token: (-probabilities[token], token))[
        : top_k or None
    ]
    order = [token for token in order if probabilities[token] >= min_p * max(probabilities)]
    mass, chosen = sum(probabilities[token] for token in order), []
    for token in order:
        chosen.append(token)
        if top_p < 1.0 and sum(probabilities[token] for token in chosen) >= top_p * mass:
            break
    return chosen


@cases("top_k", 0, 1, 3, VOCABULARY)
@cases("top_p", 1e-6, 0.3, 0.77, 0.999, 1.0)
@cases("min_p", 0.0, 0.2)
def test_truncation_equals_a_plain_reference(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(size=(20, VOCABULARY)).astype(np.float32) * 2
    logits[5:10, 3] = logits[5:10, 7]
    logits[10:15] = 0.0
    logits[15:, :4] = -np.inf
    filters = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    result = np.asarray(jax.jit(functools.partial(truncate_logits, **filters))(logits))
    for row, got in zip(logits.astype(np.float64), result, strict=True):
        chosen = [
            token
            for token in kept(np.exp(row) / np.exp(row).sum(), **filters)
            if np.isfinite(row[token])
        ]
        assert np.flatnonzero(np.isfinite(got)).tolist() == sorted(chosen)
        assert_array_equal(got[chosen], row[chosen].astype(np.float32))
        assert np.isfinite(got[row.argmax()])


@cases("held", HELD, 1)
@cases("dtype", "float32", "bfloat16")
def test_ties_of_signed_zeros_keep_the_lower_indices(dtype, held, monkeypatch):
    """Rows are random with few values, some of them subnormal, whose bits sort differently."""
    monkeypatch.setattr(unembedding, "HELD", held)
    values = np.array([-0.0, 0.0, 1e-40, -1e-40, -np.inf, 1.0])
    rows = np.random.default_rng(3).choice(values, (300, VOCABULARY), p=[0.3, 0.3, *[0.1] * 4])
    rows[0] = [-0.0] * 5 + [0.0] * 5
    rows[1:, 0] = -0.0  # at least one token of each row is possible
    logits = jnp.asarray(rows, dtype)
    # The device decides whether subnormal numbers are equal to 0.
    compared = np.where(logits == 0, 0.0, np.asarray(logits, np.float64))
    for filters in [{"top_k": 1}, {"top_k": 4}, {"top_k": 7}, {"top_p": 0.45}, {"min_p": 0.9}]:
        found = np.asarray(jax.jit(lambda x, f=filters: kept_tokens(x, Decoding(**f)))(logits))
        for row, chosen in zip(compared, found, strict=True):
            chosen = np.flatnonzero(chosen) if found.dtype == bool else chosen[chosen >= 0]
            probabilities = np.exp(row) / np.exp(row).sum()
            expected = [token for token in kept(probabilities, **filters) if row[token] > -np.inf]
            assert sorted(chosen) == sorted(expected), (row, filters)


@cases("held", HELD, 1)
@cases(
    "options",
    {"top_k": 3},
    {"top_p": 0.6},
    {"min_p": 0.15},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.01, "temperature": 1.3},
)
def test_samples_sets_and_log_probs_share_one_distribution(options, held, monkeypatch):
    """The distribution is μ = π 1[S] / π(S) for first and later tokens; S is stored as a mask or a
    list."""
    monkeypatch.setattr(unembedding, "HELD", held)
    filters = {name: x for name, x in options.items() if name != "temperature"}
    table = np.random.default_rng(1).normal(size=(VOCABULARY, VOCABULARY)) * 2
    table[:, EOS] = -np.inf
    completions = sampler(
        Script(table), group_size=4000, max_new_tokens=2, with_kept=True, **options
    )((), *ending(5), KEYS[:1])
    tokens, sets = np.asarray(completions.tokens), np.asarray(completions.kept)
    logits = table / options.get("temperature", 1.0)
    policy = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    for before, rows, t in [
        (5, slice(None), 0),
        *((token, tokens[:, 0] == token, 1) for token in np.unique(tokens[:, 0])),
    ]:
        chosen, after = kept(policy[before], **filters), tokens[rows, t]
        mu = np.zeros(VOCABULARY)
        mu[chosen] = policy[before, chosen] / policy[before, chosen].sum()
        assert_allclose(completions.log_prob[rows, t], np.log(mu[after]), rtol=1e-5, atol=1e-6)
        for found in sets[rows, t]:
            assert sorted(
                np.flatnonzero(found) if found.dtype == bool else found[found >= 0]
            ) == sorted(chosen)
        for token in range(VOCABULARY):
            p = mu[token]
            assert abs((after == token).mean() - p) < 5 * (p * (1 - p) / len(after)) ** 0.5 + 1e-9


def test_switched_off_nothing_is_sorted():
    def sorts(**options):
        program = str(
            jax.make_jaxpr(functools.partial(truncate_logits, **options))(jnp.zeros((2, 5)))
        )
        return "sort" in program or "top_k" in program

    assert not sorts()
    assert not sorts(min_p=0.1)
    assert sorts(top_k=2)
    assert sorts(top_p=0.5)
