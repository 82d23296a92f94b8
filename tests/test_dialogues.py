"""Tests dialogues: one decode loop for all rows, the content of a batch, and the games."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from learners import dialogue_problem
from numpy.testing import assert_allclose, assert_array_equal
from parrot import MODEL, TOKENIZER, parrot
from tables import cases

from jaxrl_po import group_advantages, language, losses
from jaxrl_po.algorithms import grpo, ppo
from jaxrl_po.config import ConfigError
from jaxrl_po.language import conversation, dialogues, lora
from jaxrl_po.language.dialogue import Reply
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.tasks import Prompt
from jaxrl_po.types import ActorCritic, CollectorState

CRITIC = MODEL.clone(outputs=1)
PROMPTS, GROUP = 4, 3


def make(dialogue):
    return dialogues.make_problem(
        dialogue, MODEL, num_prompts=PROMPTS, group_size=GROUP, critic=CRITIC
    )


@pytest.fixture(scope="module")
def begun():
    """Returns initial parameters and collector state, shared by the tests of all dialogues."""
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray((x.ndim == 1) + 0.1 * generator.normal(size=x.shape), x.dtype),
        ActorCritic(MODEL.parameter_shapes(), CRITIC.parameter_shapes()),
    )
    return params, CollectorState({"prompt_number": jnp.arange(PROMPTS, dtype=jnp.int32)})


def collected(problem, begun):
    return problem.collect(*begun, jax.random.key(2))[1]


def test_dialogues_are_held_out_in_an_evaluation(begun):
    asked, dialogue = [], parrot(turns=2, budget=2)

    def reset(key, held_out):
        asked.append(held_out)
        return dialogue.reset(key, held_out)

    play = dialogues.make_evaluate(dialogue._replace(reset=reset), MODEL, num_samples=2)
    asked.clear()
    jax.eval_shape(play, *begun, jax.random.key(0))
    assert asked == [True, True]


def test_batch_holds_sampled_tokens_as_policy_saw_them(begun):
    def heard(turn, first):
        return (turn + first) % 4

    problem = make(parrot(turns=3, budget=4, reply_length=3, heard=heard))

    @jax.jit
    def both():
        batch = collected(problem, begun)
        distribution, value = problem.apply(begun[0], batch.inputs)
        return batch, distribution.log_prob(batch.action), value

    batch, *learned = both()
    lengths = set()
    assert batch.action.shape == (PROMPTS * GROUP, 12)
    assert batch.inputs.tokens.shape == (PROMPTS * GROUP, 3 + 3 * 4 + 2 * 3)
    batch = jax.tree.map(np.asarray, batch)
    for ours, sampled in zip(learned, (batch.log_prob, batch.value), strict=True):
        assert_allclose(np.where(batch.mask, ours - sampled, 0.0), 0.0, atol=1e-5)
    for row in range(PROMPTS * GROUP):
        count = int(batch.mask[row].sum())
        assert batch.mask[row, :count].all()
        tokens, position = batch.inputs.tokens[row], batch.inputs.position[row]
        assert_array_equal(tokens[3 + position[:count]], batch.action[row, :count])
        # The conversation is computed again, token by token: a message ends with EOS or its fourth
        # token, then the reply follows.
        at, turn, used, rewards, ends = 3, 1, [], [], []
        while turn <= 3:
            message = []
            while len(message) < 4 and TOKENIZER.eos not in message:
                used.append(at - 3)
                message.append(tokens[at])
                at += 1
            ends.append(len(used) - 1)
            rewards.append(float(turn))
            if turn < 3:
                lengths.add(heard(turn, message[0]))
                for _ in range(heard(turn, message[0])):
                    assert tokens[at] == 2 + turn
                    at += 1
            turn += 1
        assert used == position[:count].tolist()
        assert np.flatnonzero(batch.columns["step_end"][row]).tolist() == ends
        assert batch.reward[row][ends].tolist() == rewards
        assert float(batch.reward[row].sum()) == 6.0
        assert (tokens[at:] == TOKENIZER.pad).all()
        assert np.flatnonzero(batch.terminated[row]).tolist() == [count - 1]
        # The value is V of the state before the next sampled token, whatever tokens a reply added
        # in between.
        assert_array_equal(batch.next_value[row, :count], np.append(batch.value[row, 1:count], 0.0))
    assert lengths == {0, 1, 2, 3}


def test_what_stands_behind_a_reply_changes_nothing(begun):
    @jax.jit
    def batch(garbage):
        return collected(make(parrot(turns=3, budget=3, reply_length=4, garbage=garbage)), begun)

    clean, dirty = batch(0), batch(7)
    jax.tree.map(assert_array_equal, clean, dirty)


class Talker:
    """Policy whose next token is `choose(column, last tokens)`, with certainty."""

    vocabulary = TOKENIZER.size

    def __init__(self, choose):
        self.choose = choose

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, 1))

    def apply(self, params, tokens, pad, cache, start, *, last=0):
        chosen = self.choose(start + tokens.shape[1], tokens[:, -1:])
        return jnp.log(jax.nn.one_hot(chosen, TOKENIZER.size)), cache


def test_no_row_waits_for_another():
    """The loop runs as long as the longest row, not as long as the longest turns added up."""
    calls = []

    def choose(column, last):
        jax.debug.callback(calls.append, column)
        return jnp.where(last == 5, TOKENIZER.eos, 5)

    def respond(state, message, written, key):
        # Even rows receive four tokens in the first turn, odd rows in the second turn.
        turn = state[1] + 1
        length = jnp.where(state[0] == turn % 2, 4, 0)
        reply = Reply(jnp.full(4, 6, jnp.int32), length.astype(jnp.int32))
        return (state[0], turn), reply, jnp.float32(0.0), jnp.bool_(False)

    dialogue = parrot(turns=3, budget=2, reply_length=4)._replace(respond=respond)
    prompt = Prompt(jnp.full((2, 3), 4, jnp.int32), jnp.zeros(2, jnp.int32))
    held = jax.jit(
        lambda: conversation.converse(
            Talker(choose),
            None,
            dialogue,
            prompt,
            (jnp.array([0, 1]), jnp.zeros(2, jnp.int32)),
            jax.random.split(jax.random.key(0), 2),
            group_size=1,
            decoding=Decoding(2),
            greedy=True,
        )
    )()
    jax.block_until_ready(held)
    jax.effects_barrier()
    used = (np.asarray(held.tokens) != TOKENIZER.pad).sum(axis=1)
    assert used.tolist() == [3 * 2 + 4, 3 * 2 + 4]
    assert len(calls) == used.max()  # a barrier after each turn would take 3 · 2 + 2 · 4 steps


def test_environment_gets_its_state_message_and_own_key():
    def choose(column, last):
        """Chooses 5 everywhere, except for EOS in columns 6 and 8."""
        return jnp.where((column == 6) | (column == 8), TOKENIZER.eos, jnp.full_like(last, 5))

    def respond(state, message, written, key):
        number, turn, messages, keys = state
        messages, keys = messages.at[turn].set(message), keys.at[turn].set(jax.random.key_data(key))
        reply = Reply(jnp.full(1, 6, jnp.int32), jnp.int32(1))
        return (number, turn + 1, messages, keys), reply, jnp.float32(0.0), jnp.bool_(False)

    dialogue = parrot(turns=2, budget=4, reply_length=1)._replace(respond=respond)
    prompt = Prompt(jnp.full((2, 3), 4, jnp.int32), jnp.zeros(2, jnp.int32))
    keys = jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def held():
        empty = (jnp.zeros((2, 2, 4), jnp.int32), jnp.zeros((2, 2, 2), jnp.uint32))
        state = (jnp.array([7, 9]), jnp.zeros(2, jnp.int32), *empty)
        options = {"group_size": 2, "decoding": Decoding(4), "greedy": True}
        said = conversation.converse(Talker(choose), None, dialogue, prompt, state, keys, **options)
        # The messages end with tokens 3 and 5 of at most 2 · 4 + 1 tokens.
        wanted = [
            [jax.random.fold_in(jax.random.fold_in(keys[p], g), 9 + t) for t in (3, 5)]
            for p in range(2)
            for g in range(2)
        ]
        return said.state, jax.random.key_data(jnp.stack([jnp.stack(row) for row in wanted]))

    (number, turn, messages, given), wanted = held()
    assert number.tolist() == [7, 7, 9, 9]
    assert turn.tolist() == [2] * 4
    eos, pad = TOKENIZER.eos, TOKENIZER.pad
    assert messages.tolist() == [[[5, 5, 5, eos], [eos, pad, pad, pad]]] * 4
    assert_array_equal(given, wanted)


def test_dialogues_are_held_as_the_settings_say(monkeypatch, begun):
    given = {}

    def converse(model, params, dialogue, prompt, state, keys, **options):
        given.update(options, model=model)
        raise InterruptedError

    monkeypatch.setattr(conversation, "converse", converse)
    settings = {"max_new_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.75, "min_p": 0.1}
    sampler = language.Sampler(dtype="bfloat16", noise=0.25, staleness=2)
    problem = dialogues.make_problem(
        parrot(turns=2, budget=2), MODEL, num_prompts=PROMPTS, sampler=sampler, **settings
    )
    assert problem.staleness == 2
    adapted = begun[0]._replace(frozen={lora.BASE: jnp.zeros(())})
    with pytest.raises(InterruptedError):
        problem.collect(adapted, begun[1], jax.random.key(0))
    assert given == {
        "group_size": 8,
        "decoding": Decoding(3, 0.5, 4, 0.75, 0.1),
        "noise": 0.25,
        "with_kept": True,
        "model": lora.over(MODEL.clone(dtype=jnp.dtype("bfloat16")), adapted.frozen),
    }


def test_unfinished_dialogue_is_truncated_but_finished_is_not(begun):
    @jax.jit
    def ended(ends_at):
        return collected(make(parrot(turns=3, budget=2, reply_length=1, ends_at=ends_at)), begun)

    for ends_at, turns in ((2, 2), (9, 3)):
        batch = jax.tree.map(np.asarray, ended(ends_at))
        assert float(batch.metrics["turns"].value()) == turns
        assert float(batch.metrics["truncated"].value()) == (ends_at > 3)
        assert (batch.truncated.any(axis=1) == (ends_at > 3)).all()
        assert (batch.terminated.sum(axis=1) == 1).all()
        assert (batch.columns["step_end"].sum(axis=1) == turns).all()


def test_rewards_to_go_are_compared_turn_by_turn():
    generator = np.random.default_rng(0)
    group, slots = 5, 9
    mask, end = np.zeros((group, slots), bool), np.zeros((group, slots), bool)
    to_go = [[] for _ in range(group)]
    reward = generator.normal(size=(group, slots))
    turns = [generator.integers(1, 4, size=n) for n in (3, 2, 3, 1, 3)]
    for i, lengths in enumerate(turns):
        last = np.cumsum(lengths) - 1
        mask[i, : lengths.sum()], end[i, last] = True, True
        parts = np.split(reward[i, : lengths.sum()], last[:-1] + 1)
        to_go[i] = [sum(part.sum() for part in parts[k:]) for k in range(len(parts))]
    relative = jax.jit(functools.partial(group_advantages.turn_relative, epsilon=0.0))
    found = np.asarray(relative(reward, mask, end))
    for k in range(3):
        members = [i for i in range(group) if len(turns[i]) > k]
        values = np.array([to_go[i][k] for i in members])
        expected = (values - values.mean()) / values.std()
        for i, value in zip(members, expected, strict=True):
            first = turns[i][:k].sum()
            own = found[i, first : first + turns[i][k]]
            assert_allclose(own, value, rtol=1e-4)
    assert (found[~mask] == 0).all()
    alone = np.asarray(relative(reward[:2], mask[:2], end[:2]))
    third = turns[0][:2].sum()
    assert (alone[0, third:] == 0).all()  # no other row has a third turn


@cases("module, field", (grpo, "supervision"), (ppo, "discount_per"))
def test_turns_are_asked_for_where_there_are_some(module, field):
    task = language.tasks.addition(1)
    model = language.Transformer(task.tokenizer.size, width=8, layers=1, heads=2)
    problem = language.make_problem(task, model, critic=model.clone(outputs=1))
    with pytest.raises(ConfigError, match=f"{field}: must be .*only dialogues have turns"):
        module.make(module.Config(**{field: "turn"}), problem)


def test_a_demonstration_without_an_end_is_whole():
    dialogue = parrot(turns=2, budget=3)._replace(
        demonstrate=lambda state, key: jnp.array([4, 5, 6], jnp.int32)
    )
    keys = jax.random.split(jax.random.key(0), 2)
    _, tokens, mask = conversation.play_demonstrations(dialogue, keys)
    assert tokens.tolist() == [[4, 5, 6] * 2] * 2
    assert mask.all()


@cases(
    "supervision, credit",
    ("process", group_advantages.process_relative),
    ("turn", group_advantages.turn_relative),
)
def test_grpo_steps_along_the_credit_of_its_supervision(supervision, credit):
    """One step of plain gradient descent is compared with the gradient written out."""
    problem = dialogue_problem()
    config = grpo.Config(supervision=supervision, use_reference=False, std_epsilon=0.0)
    learner = grpo.make(config, problem, optax.sgd(1.0))

    @jax.jit
    def step_and_gradient(key):
        state, batch = learner.sample(learner.init(key))
        streams = batch.reward, batch.mask, batch.columns["step_end"]
        groups = [x.reshape(*batch.score.shape, -1) for x in streams]
        advantage = jax.vmap(functools.partial(credit, epsilon=0.0))(*groups)

        def loss(policy):
            log_prob = problem.apply(ActorCritic(policy), batch.inputs)[0].log_prob(batch.action)
            gain = jnp.exp(log_prob - batch.log_prob) * advantage.reshape(batch.mask.shape)
            return losses.sequence_mean(-gain, batch.mask).value()

        before = state.params.policy
        return before, learner.update(state, batch)[0].params.policy, jax.grad(loss)(before)

    jax.tree.map(
        lambda before, after, slope: assert_allclose(after, before - slope, rtol=1e-4, atol=1e-5),
        *step_and_gradient(jax.random.key(3)),
    )


def test_reset_and_step_make_a_dialogue():
    """The dialogue asks the policy to say the displayed digit, three times."""
    eos = TOKENIZER.eos

    def reset(key):
        digit = jax.random.randint(key, (), 0, 10)
        return digit, (digit, jnp.int32(0))

    def step(key, state, action):
        digit = jax.random.randint(key, (), 0, 10)
        count = state[1] + 1
        return digit, (digit, count), (action == state[0]).astype(jnp.float32), count >= 3

    def write(digit):
        return Reply(jnp.stack([jnp.int32(12), 2 + digit, 0]), jnp.int32(2))

    dialogue = dialogues.game(
        "echo",
        TOKENIZER,
        reset,
        step,
        write=write,
        read=lambda message, length: message[0] - 2,
        observation_length=3,
        message_length=2,
        max_turns=4,
        accuracy=lambda state, total: total / 3,
        demonstrate=lambda state, key: jnp.stack([2 + state[0], jnp.int32(eos)]),
    )
    demonstrations = jax.jit(functools.partial(conversation.play_demonstrations, dialogue))
    prompt, tokens, mask = jax.tree.map(
        np.asarray, demonstrations(jax.random.split(jax.random.key(0), 3))
    )
    assert prompt.pad.tolist() == [1] * 3
    assert (prompt.tokens[:, :2] == [0, 12]).all()
    assert mask.sum(axis=1).tolist() == [6] * 3
    shown = [prompt.tokens[:, 2], tokens[:, 3], tokens[:, 7]]
    for digit, at in zip(shown, (0, 4, 8), strict=True):
        assert_array_equal(digit, tokens[:, at])
