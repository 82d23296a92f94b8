"""Tests that narrower decode loops give every row the result of one loop over all rows."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from traced import equations

from jaxrl_po import language
from jaxrl_po.language import conversation, dialogues, lora, sampling
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.stopping import Ends, make_stops

ROWS, BUDGET, NARROW = 64, 32, [64, 16, 4]
PAD, EOS = 0, 1
ENDS = Ends((EOS,), make_stops(["ab", "ca"], [b"", b"", b"a", b"b", b"c", b"d", b"e"]))
MODEL = language.Transformer(
    7, width=8, layers=1, heads=2, mlp_width=8, gated=False, dtype=jnp.dtype("float64")
)
PROMPTS = 16  # prompts come in groups of four


class Countdown:
    """Model that says k − 1 after k, with certainty, and EOS = 1 after 2.

    The model counts steps by the number of their rows.
    """

    def __init__(self):
        self.steps = collections.Counter()

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, length))

    def apply(self, params, tokens, pad, cache, start, *, last=0):
        width = tokens.shape[0]
        jax.debug.callback(lambda: self.steps.update([width]))
        return jnp.log(jax.nn.one_hot(tokens - 1, 50))[:, -last:], cache


def test_widths():
    assert sampling.widths_of(512, 64) == [512, 128, 32]
    assert sampling.widths_of(64, 32) == [64, 16]
    assert sampling.widths_of(63, 64) == [63]
    assert sampling.widths_of(512, 31) == [512]


def test_steps_are_as_wide_as_living_rows_need():
    """Decoding is greedy; lengths range from 1 to beyond the budget: all counts are known by
    hand."""
    model = Countdown()

    @jax.jit
    def run(said):
        prompt = jnp.stack([said, said], axis=1)
        keys = jax.random.split(jax.random.key(0), ROWS)
        return sampling.generate(
            *(model, (), prompt, jnp.zeros(ROWS, jnp.int32), keys),
            group_size=1,
            decoding=Decoding(BUDGET),
            eos=EOS,
            pad_token=PAD,
            greedy=True,
        )

    short = np.full(ROWS, 5)
    one, last, many, mixed = (short.copy() for _ in range(4))
    one[40], last[63], many[::4] = 11, 49, 8
    mixed[:] = np.random.default_rng(0).permutation(2 + np.arange(ROWS) % 45)
    # The model takes no step after token 0. A row ends with token `said − 2`.
    for said, wanted in (
        (np.full(ROWS, 2), {}),  # all rows end together, with the first token
        (short, {64: 3}),  # all rows end together
        (np.full(ROWS, 49), {64: 31}),  # none
        (one, {64: 3, 16: 6}),
        (last, {64: 3, 16: 28}),
        (many, {64: 3, 16: 3}),
        (mixed, None),
    ):
        model.steps.clear()
        completions = jax.device_get(run(jnp.asarray(said)))
        jax.effects_barrier()
        model.steps.subtract({ROWS: 1})  # steps that process the prompts
        assert wanted is None or +model.steps == wanted
        length = np.minimum(said - 1, BUDGET)
        np.testing.assert_array_equal(completions.length, length)
        np.testing.assert_array_equal(completions.ended, said - 1 <= BUDGET)
        at = np.arange(BUDGET)[None]
        tokens = np.where(at < length[:, None], said[:, None] - 1 - at, PAD)
        np.testing.assert_array_equal(completions.tokens, tokens)


def sample(params, prompt, pad, keys):
    return sampling.generate(
        *(MODEL, params, prompt, pad, keys),
        group_size=4,
        decoding=Decoding(BUDGET, temperature=1.3, top_p=0.95),
        eos=ENDS,
        pad_token=PAD,
        with_kept=True,
    )


def ragged():
    """Builds a dialogue that answers by message and chance; an `e`, or five messages, end the
    dialogue."""

    def reset(key, held_out):
        said = jax.random.randint(key, (2,), 2, 7, jnp.int32)
        return language.tasks.Prompt(said, jnp.int32(0)), jnp.float32(0.0)

    def respond(state, message, written, key):
        heard = jax.random.randint(key, (3,), 2, 7, jnp.int32)
        reward = message[0].astype(jnp.float32) + 0.1 * heard[0]
        reply = dialogues.Reply(heard, jnp.int32(message[0] % 4))
        return state + reward, reply, reward, (message == 6).any()

    class Letters:
        size, pad, eos, ends, stops = 7, PAD, EOS, (EOS,), ENDS.stops

    return dialogues.Dialogue("ragged", Letters(), 2, 4, 3, 5, reset, respond, lambda state: state)


def talk(params, prompt, pad, keys):
    dialogue = ragged()
    _, state = jax.vmap(lambda key: dialogue.reset(key, False))(keys)
    return conversation.converse(
        *(MODEL, params, dialogue, language.tasks.Prompt(prompt, pad, None), state, keys),
        group_size=4,
        decoding=Decoding(4, top_k=5),
        with_kept=True,
    )


def arguments(seed):
    """Returns parameters under which some seeds end early and others late, and prompts."""
    generator = np.random.default_rng(seed)
    params = jax.tree.map(
        lambda x: jnp.asarray((x.ndim == 1) + 0.4 * generator.normal(size=x.shape)),
        MODEL.parameter_shapes(),
    )
    prompt = jnp.asarray(generator.integers(2, 7, (PROMPTS, 3)), jnp.int32)
    keys = jax.random.split(jax.random.key(seed), PROMPTS)
    return params, prompt, jnp.asarray(generator.integers(0, 3, PROMPTS), jnp.int32), keys


def with_widths(monkeypatch, widths, function):
    """Returns a new, untraced copy of a function, whose decode loops have specified widths."""

    def made(*given):
        with monkeypatch.context() as patch:
            patch.setattr(sampling, "widths_of", lambda rows, steps: widths)
            return function(*given)

    return made


def same(ours, plain):
    assert jax.tree.structure(ours) == jax.tree.structure(plain)
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        if one.dtype == np.float64:
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)
        else:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("function", [sample, talk])
def test_every_row_equals_that_of_one_loop(function, monkeypatch):
    """The function runs under `vmap` over seeds, of which some end earlier, and under
    `shard_map`."""
    narrow = with_widths(monkeypatch, NARROW, function)
    with jax.enable_x64(True):
        seeds = [arguments(seed) for seed in range(3)]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *seeds)
        alone = jax.jit(with_widths(monkeypatch, [ROWS], function))
        plain = jax.device_get([alone(*given) for given in seeds])
        together = jax.device_get(jax.jit(jax.vmap(narrow))(*stacked))
        for number, wanted in enumerate(plain):
            same(jax.tree.map(lambda x, number=number: x[number], together), wanted)
        if function is talk:
            assert (plain[0].mask.sum(axis=1) > 4).any()
            return
        assert (
            len({int((each.length > 6).sum()) > 16 for each in plain}) == 2
        )  # the seed with the most rows decides the width
        sharded = jax.shard_map(
            lambda *given: jax.tree.map(
                lambda x: x[None], narrow(*jax.tree.map(lambda x: x[0], given))
            ),
            mesh=jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)),
            in_specs=P("data"),
            out_specs=P("data"),
            check_vma=False,
        )
        split = jax.device_get(jax.jit(sharded)(*jax.tree.map(lambda x: x[:2], stacked)))
        for number, wanted in enumerate(plain[:2]):
            same(jax.tree.map(lambda x, number=number: x[number], split), wanted)


def conditions(function, *given):
    """Counts the conditionals of a program; a conditional with a mapped predicate becomes a
    select."""
    # JAX traces the copied function again
    jaxpr = jax.make_jaxpr(lambda *given: function(*given))(*given).jaxpr
    return sum(equation.primitive.name == "cond" for equation in equations(jaxpr))


def test_seeds_step_down_together():
    """One predicate per seed would run both branches in every step, followed by a select."""
    with jax.enable_x64(True):
        given = arguments(0)
        stacked = jax.tree.map(lambda x: jnp.stack([x, x]), given)
        assert conditions(jax.vmap(sample), *stacked) == conditions(sample, *given) == 1


def test_rows_that_compiler_places_on_devices_stay(monkeypatch):
    """If rows moved between devices, they would be gathered on all devices."""
    with jax.enable_x64(True):
        base, *given = arguments(0)
        for model, narrower in ((MODEL, 1), (MODEL.clone(constrain=lambda x: x), 0)):
            monkeypatch.setitem(globals(), "MODEL", lora.over(model, base))
            assert conditions(sample, {}, *given) == narrower
