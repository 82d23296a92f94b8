"""Tests that conversations step by step equal the conversations of the single program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from probes import drawn

from jaxrl_po import language
from jaxrl_po.language import dialogues, sampling
from jaxrl_po.language.dialogues.recorded import RECORDING, recorded_problem
from jaxrl_po.language.networks import prompt_keys
from jaxrl_po.language.settings import SamplingSettings
from jaxrl_po.run.host.dialogues.engine import (
    DialogueEpisode,
    DialogueOutcomes,
    HostDialogues,
)
from jaxrl_po.types import ActorCritic, CollectorState

TOKENIZER = language.make_tokenizer("0123456789?")
ZERO, EOS = TOKENIZER.ids["0"], TOKENIZER.eos
MODEL = language.Transformer(TOKENIZER.size, width=16, layers=1, heads=2, mlp_width=16, gated=False)
PROMPTS, GROUP, BUDGET, TURNS, REPLY = 3, 3, 3, 3, 4
SIZES = SamplingSettings(
    num_prompts=PROMPTS, group_size=GROUP, max_new_tokens=BUDGET, temperature=1.3, top_k=11
)


def ragged():
    """Builds a dialogue that repeats a message or a part of the message; a message that begins with
    5 ends the dialogue."""

    def write(said):
        message, written = said
        return dialogues.Reply(message, written)

    def step(key, state, action):
        message, written = action
        shown = jnp.full(REPLY, ZERO, jnp.int32).at[:BUDGET].set(message)
        heard = jnp.where(message[0] % 2 == 0, REPLY, written % 3)
        length = jnp.where(message[0] == EOS, 0, heard).astype(jnp.int32)
        right = (message[0] == ZERO + 5).astype(jnp.float32)
        return (shown, length), state + 1, right, right > 0

    def reset(key):
        shown = ZERO + jax.random.randint(key, (REPLY,), 0, 10)
        return (shown, jax.random.randint(key, (), 1, REPLY + 1)), jnp.int32(0)

    return dialogues.game(
        "ragged",
        TOKENIZER,
        reset,
        step,
        write=write,
        read=lambda message, length: (message, length),
        observation_length=REPLY,
        message_length=BUDGET,
        max_turns=TURNS,
        accuracy=lambda state, total: total,
    )


class Game:
    """Dialogue of the compiled program, as an environment on the host."""

    names = ("return",)

    def __init__(self, dialogue, prompts, states):
        self.dialogue, self.prompts, self.states = dialogue, prompts, states
        self.respond = jax.jit(dialogue.respond)

    def begin(self, episodes, num_seeds):
        count = len(episodes)
        self.total, self.done = np.zeros(count, np.float32), np.zeros(count, bool)
        return [
            np.asarray(tokens)[int(pad) :].tolist()
            for tokens, pad in zip(self.prompts.tokens, self.prompts.pad, strict=True)
        ]

    def answer(self, messages):
        replies = []
        for row, message in enumerate(messages):
            if message is None:
                replies.append(None)
                continue
            padded = np.full(BUDGET, TOKENIZER.pad, np.int32)
            padded[: len(message)] = message
            self.states[row], reply, reward, done = self.respond(
                self.states[row], padded, np.int32(len(message)), jax.random.key(0)
            )
            self.total[row] += float(reward)
            self.done[row] = bool(done)
            heard = np.asarray(reply.tokens)[: int(reply.length)].tolist()
            replies.append(None if done else heard)
        return replies

    def finish(self, *, first, report):
        count = np.ones_like(self.total)
        measures = {"return": language.dialogues.recorded.Mean(self.total, count)}
        return DialogueOutcomes(self.total, self.total, self.done, measures)

    def close(self):
        pass


@pytest.fixture(scope="module")
def both():
    """Returns the single program's batch, the batch of the steps, and the log-probabilities of the
    steps."""
    dialogue, critic = ragged(), MODEL.clone(outputs=1)
    whole = dialogues.make_problem(dialogue, MODEL, critic=critic, **vars(SIZES))
    key = jax.random.key(7)

    params, collector = (
        ActorCritic(*(drawn(each.parameter_shapes(), 0.1, (1,)) for each in (MODEL, critic))),
        CollectorState({"prompt_number": np.arange(PROMPTS, dtype=np.int32)}),
    )

    @jax.jit
    def begun():
        keys = prompt_keys(collector, key)
        reset = jax.vmap(lambda key: dialogue.reset(key, False))(keys[:, 0])
        _, expected = whole.collect(params, collector, key)
        return keys, reset, expected

    keys, reset, expected = begun()
    prompts, states = jax.tree.map(lambda x: np.repeat(x, GROUP, axis=0), reset)
    each = [jax.tree.map(lambda x, i=i: x[i], states) for i in range(PROMPTS * GROUP)]
    partner = Game(dialogue, prompts, each)
    # A prompt has more columns than a reply, and the steps need all columns; the policy does not
    # see padding.
    host = HostDialogues(dialogue, MODEL, partner, SIZES, TURNS, REPLY + 2, REPLY)
    engine = host.open(0, [0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "widths_of", lambda rows, steps: [rows, 4])
        recording, outside = engine.hold(
            jax.tree.map(lambda x: x[None], params._replace(value=None)),
            [DialogueEpisode(0, (0, 0))] * (PROMPTS * GROUP),
            sampling.member_keys(keys[:, 1], GROUP)[None],
            greedy=False,
            report=print,
        )
    assert outside > 0.0
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), recording)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), engine.recording())
    problem = recorded_problem(dialogue, MODEL, SIZES, columns=host.columns, critic=critic)
    given = collector.add(sharded={RECORDING: jax.tree.map(lambda x: x[0], recording)})

    @jax.jit
    def recorded():
        after, batch = problem.collect(params, given, key)
        return after, batch, problem.apply(params, batch.inputs)[0].log_prob(batch.action)

    after, batch, log_prob = recorded()
    assert after.sharded.keys() == collector.sharded.keys()
    return jax.tree.map(np.asarray, (expected, batch, log_prob))


def test_steps_give_the_batch_of_one_program(both):
    expected, batch, _ = both
    replied = expected.inputs.position[:, 1:] - expected.inputs.position[:, :-1] > 1
    assert (replied & expected.mask[:, 1:]).any()  # the dialogues have replies between messages
    assert expected.truncated.any()
    assert (expected.terminated & ~expected.truncated).any()
    assert (expected.reward.any(axis=1) & (expected.columns["step_end"].sum(axis=1) > 1)).any()
    assert_array_equal(batch.columns["step_end"], expected.columns["step_end"])
    for name in ("action", "mask", "reward", "terminated", "truncated", "score"):
        assert_array_equal(getattr(batch, name), getattr(expected, name), err_msg=name)
    for name in ("log_prob", "value", "next_value"):
        assert_allclose(
            np.where(batch.mask, getattr(batch, name), 0.0),
            np.where(batch.mask, getattr(expected, name), 0.0),
            atol=2e-5,
            err_msg=name,
        )
    assert_array_equal(
        np.where(batch.mask, batch.inputs.position, 0),
        np.where(batch.mask, expected.inputs.position, 0),
    )
    assert_array_equal(batch.inputs.kept, expected.inputs.kept)
    assert_array_equal(batch.inputs.kept.sum(axis=2), 11 * batch.mask)
    assert_array_equal(batch.inputs.tokens[:, REPLY + 2 :], expected.inputs.tokens[:, REPLY:])
    assert batch.metrics.keys() == expected.metrics.keys()
    for name, mean in batch.metrics.items():
        assert_allclose(mean.value(), expected.metrics[name].value(), err_msg=name)


def test_the_ratio_of_the_first_update_is_1(both):
    _, batch, log_prob = both
    assert_allclose(np.where(batch.mask, log_prob - batch.log_prob, 0.0), 0.0, atol=2e-5)
