"""Compares the games of `dialogues` with independent code on the host."""

import functools
import itertools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_po.language import conversation, dialogues


@functools.cache
def feedback(code, guess):
    """Computes the feedback of Mastermind by counting symbols."""
    at_place = sum(a == b for a, b in zip(code, guess, strict=True))
    return at_place, sum((Counter(code) & Counter(guess)).values()) - at_place


KEY = jax.random.key(0)


def played(dialogue, state, text):
    tokens = [*dialogue.tokenizer.encode(text), dialogue.tokenizer.eos]
    tokens = tokens[: dialogue.message_length]
    padded = tokens + [0] * (dialogue.message_length - len(tokens))
    state, reply, reward, done = jax.jit(dialogue.respond)(
        state, np.asarray(padded, np.int32), np.int32(len(tokens)), KEY
    )
    said = dialogue.tokenizer.decode(reply.tokens.tolist()[: int(reply.length)])
    return state, said, float(reward), bool(done)


def test_mastermind_says_what_is_right():
    dialogue = dialogues.mastermind(2, symbols=3)
    _, start = dialogue.reset(jax.random.key(0), False)
    codes = list(itertools.product(range(3), repeat=2))
    for number, code in enumerate(codes):
        for guess in codes:
            state, said, reward, done = played(
                dialogue, start._replace(code=jnp.int32(number)), "".join(map(str, guess))
            )
            assert said == "{}{}".format(*feedback(code, guess))
            assert (done, reward) == (code == guess, 1.0 if code == guess else 0.0)
            fits = [feedback(each, guess) == feedback(code, guess) for each in codes]
            assert state.possible.tolist() == fits
    state, said, reward, done = played(dialogue, start, "03")
    assert (said, reward, done) == ("!!", 0.0, False)
    assert state.possible.all()
    assert float(dialogue.measures["malformed"](state)) == 1
    for _ in range(7):
        state, _, reward, done = played(dialogue, state, "0")
    assert (done, reward) == (True, 0.0)
    assert float(dialogue.measures["guesses"](state)) == 9


def test_replies_lead_a_binary_search_to_the_number():
    dialogue = dialogues.higher_lower(64)
    _, start = dialogue.reset(jax.random.key(0), False)
    for number in range(0, 64, 7):
        state, low, high, done = start._replace(number=jnp.int32(number)), 0, 63, False
        guesses = 0
        while not done:
            guess = (low + high) // 2
            state, said, reward, done = played(dialogue, state, f"{guess:02}")
            guesses += 1
            assert done == (guess == number)
            assert done or said == (">" if number > guess else "<")
            low, high = (guess + 1, high) if number > guess else (low, guess - 1)
        assert int(state.guesses) == guesses
        assert reward == pytest.approx((11 - guesses) / 10)


@pytest.mark.parametrize(
    ("message", "reply"),
    [("12+34", "046"), ("99+99", "198"), ("7", "007"), ("1+2+3", "!"), ("12+", "!"), ("?", "!")],
)
def test_the_calculator_adds(message, reply):
    dialogue = dialogues.calculator(2)
    prompt, state = dialogue.reset(jax.random.key(3), False)
    a, b = map(int, dialogue.tokenizer.decode(prompt.tokens.tolist())[:-1].split("+"))
    assert state.terms.tolist() == [a, b]
    last, _, _, done = played(dialogue, state._replace(turns=jnp.int32(2)), message)
    assert done
    assert not last.used  # the dialogue has no later turn that could use the value
    state, said, reward, done = played(dialogue, state, message)
    assert (said, reward, done) == (reply, 0.0, False)
    assert bool(state.used) == (reply != "!")
    right, _, reward, done = played(dialogue, state, f"={a + b:03}")
    assert (reward, done, float(dialogue.accuracy(right))) == (1.0, True, 1.0)
    _, _, reward, done = played(dialogue, state, f"={a + b + 1:03}")
    assert (reward, done) == (0.0, True)
    without = dialogues.calculator(2, tool=False)
    assert played(without, without.reset(jax.random.key(3), False)[1], message)[1] == "!"


@pytest.mark.parametrize(
    "dialogue",
    [
        dialogues.mastermind(),
        dialogues.higher_lower(16),
        dialogues.calculator(3),
        dialogues.calculator(3, tool=False),
    ],
    ids=lambda dialogue: dialogue.name,
)
def test_demonstrations_win_and_show_what_the_policy_sees(dialogue):
    keys = jax.random.split(jax.random.key(0), 64)
    _, tokens, mask = jax.jit(functools.partial(conversation.play_demonstrations, dialogue))(keys)
    of_rows = jax.vmap(lambda key: dialogue.reset(jax.random.split(key)[0], False)[1])
    states = jax.tree.map(np.asarray, jax.jit(of_rows)(keys))
    for row in range(64):
        state = jax.tree.map(lambda x, row=row: x[row], states)
        said = np.asarray(tokens[row])
        done = False
        for first, last in runs(np.asarray(mask[row])):
            for end in np.flatnonzero(said[first:last] == dialogue.tokenizer.eos) + first + 1:
                text = dialogue.tokenizer.decode(said[first:end].tolist())
                state, reply, _, done = played(dialogue, state, text)
                if not done:
                    heard = dialogue.tokenizer.decode(said[end : end + len(reply)].tolist())
                    assert heard == reply
                first = end
        assert done
        assert float(dialogue.accuracy(state)) == 1.0


def runs(mask):
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    return list(zip(edges[::2], edges[1::2], strict=True))
