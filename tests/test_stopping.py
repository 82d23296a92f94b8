"""Tests stop strings: a row ends with the token that completes one, wherever tokens begin and
end."""

import functools
import json

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxrl_po import language
from jaxrl_po.config import ConfigError
from jaxrl_po.language import conversation, dialogues, pretrained, sampling
from jaxrl_po.language.pretrained.files import read_folder
from jaxrl_po.language.pretrained.text import read_tokenizer, token_texts, write_tokenizer
from jaxrl_po.language.sampling import Decoding
from jaxrl_po.language.stopping import Ends, ends_of, make_stops

TEXTS = ["", "a", "b", "ab", "ba", "aab", "c", "bca", "é", "\n"]
ENCODED = [text.encode() for text in TEXTS]
EOS = len(TEXTS)


def first_end(ends, rows):
    """Returns the number of tokens of each row up to its end, or its length + 1 without an end."""
    ended = np.asarray(jax.jit(ends.mark)(jnp.asarray(rows)))
    return np.where(ended.any(axis=1), ended.argmax(axis=1) + 1, ended.shape[1] + 1)


def expected(strings, row):
    for n in range(1, len(row) + 1):
        text = "".join(TEXTS[token] for token in row[:n] if token != EOS)
        if row[n - 1] == EOS or any(text.find(string) >= 0 for string in strings):
            return n
    return len(row) + 1


@pytest.mark.parametrize(
    "strings",
    [["ab"], ["aab"], ["abab", "ba"], ["aba", "bab"], ["aa", "c"], ["é\n", "aé"], ["abcab"], ["a"]],
    ids=repr,
)
def test_rows_end_where_text_first_holds_a_string(strings):
    """The string `aab` in `aaab` needs the automaton to fall back; `aba` and `bab` overlap."""
    ends = Ends((EOS,), make_stops(strings, [*ENCODED, b"<end>"]))
    rows = np.random.default_rng(0).integers(0, EOS + 1, (200, 9))
    assert first_end(ends, rows).tolist() == [expected(strings, row) for row in rows]


CHARACTERS = language.make_tokenizer("abc")
MODEL = language.Transformer(CHARACTERS.size, width=8, layers=1, heads=2, mlp_width=8)
CHARACTER_TEXTS = [b"_", b"|", b"a", b"b", b"c"]


class Stopping(language.Tokenizer):
    """Tokenizer of characters that has stop strings."""

    stops = make_stops(["ab", "cc"], CHARACTER_TEXTS)


@functools.cache
def completions(eos):
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    prompt = jnp.array([[2, 3], [4, 2]])
    return jax.device_get(
        jax.jit(
            lambda: sampling.generate(
                *(MODEL, params, prompt, jnp.zeros(2, jnp.int32)),
                jax.random.split(jax.random.key(1), 2),
                group_size=16,
                decoding=Decoding(8),
                eos=eos,
                pad_token=0,
            )
        )()
    )


def test_rows_stop_at_string_and_otherwise_stay_unchanged():
    """The prompt, which ends with `c` or `a`, is not part of the text that is searched."""
    whole, cut = completions((1,)), completions(ends_of(Stopping(*CHARACTERS)))
    assert (cut.length < whole.length).sum() > 5
    for tokens, length, ended, log_prob, before, before_length, before_ended in zip(
        *(cut.tokens, cut.length, cut.ended, cut.log_prob),
        *(whole.tokens, whole.length, whole.ended),
        strict=True,
    ):
        text = "".join("_|abc"[token] for token in before[:before_length])
        found = [text.find(string) + 2 for string in ("ab", "cc") if string in text]
        assert length == min([*found, before_length])
        assert ended == (bool(found) or before_ended)
        np.testing.assert_array_equal(tokens[:length], before[:length])
        assert not tokens[length:].any()
        assert not log_prob[length:].any()


def test_messages_of_a_dialogue_end_with_the_string():
    """Each message is searched from its own beginning: earlier messages do not count."""
    budget = 4

    def reset(key, held_out):
        said, lengths = jnp.zeros((3, budget), jnp.int32), jnp.zeros(3, jnp.int32)
        return language.tasks.Prompt(jnp.array([2, 2]), jnp.int32(0)), (said, lengths, jnp.int32(0))

    def respond(state, message, written, key):
        said, lengths, turn = state
        reply = language.dialogues.Reply(jnp.array([2], jnp.int32), jnp.int32(1))
        state = said.at[turn].set(message), lengths.at[turn].set(written), turn + 1
        return state, reply, jnp.float32(0), jnp.bool_(False)

    dialogue = dialogues.Dialogue(
        name="said",
        tokenizer=Stopping(*CHARACTERS),
        prompt_length=2,
        message_length=budget,
        reply_length=1,
        max_turns=3,
        reset=reset,
        respond=respond,
        accuracy=lambda state: jnp.float32(0),
    )
    params = MODEL.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32))
    prompt, state = jax.vmap(lambda key: reset(key, False))(jax.random.split(jax.random.key(2), 2))
    held = jax.jit(
        lambda: conversation.converse(
            *(MODEL, params, dialogue, prompt, state, jax.random.split(jax.random.key(3), 2)),
            group_size=12,
            decoding=Decoding(budget),
        )
    )()
    kinds = set()
    said, lengths, _ = jax.device_get(held.state)
    for message, length in zip(said.reshape(-1, budget), lengths.reshape(-1), strict=True):
        text = "".join("_|abc"[token] for token in message[:length])
        ends = [n for n in range(1, length + 1) if text[:n].endswith(("|", "ab", "cc"))]
        assert length == (ends[0] if ends else budget)
        kinds |= {text[-2:]} & {"ab", "cc"}
    assert kinds == {"ab", "cc"}


SENTENCE = "ab c\n\nfür 日本, <|x|> 'a' "


def byte_level():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: i for i, letter in enumerate(alphabet)} | {"ab": 256}
    rules = Tokenizer(models.BPE(vocab=ids, merges=[("a", "b")]))
    rules.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rules.decoder = decoders.ByteLevel()
    return rules


def with_byte_fallback():
    pieces = ["▁", "a", "b", "ab", "▁c", "c", "f", "r", ",", "<", "|", "x", ">", "'"]
    ids = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{i:02X}>" for i in range(256))])}
    rules = Tokenizer(models.BPE(ids, [("a", "b"), ("▁", "c")], byte_fallback=True))
    rules.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    rules.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return rules


@pytest.mark.parametrize("make", [byte_level, with_byte_fallback])
def test_the_texts_of_tokens_join_to_the_text(make):
    rules = make()
    rules.add_special_tokens(["<|x|>"])
    texts = token_texts(rules, rules.get_vocab_size() + 3)
    ids = rules.encode(SENTENCE).ids
    assert b"".join(texts[i] for i in ids) == SENTENCE.encode()
    assert texts[-3:] == [b""] * 3


@pytest.mark.parametrize("strings", [["w5 w6", "w9"], "w5 w6"], ids=["list", "text"])
def test_a_folder_gives_its_strings_and_keeps_them(tmp_path, strings):
    folder, again = tmp_path / "model", tmp_path / "again"
    folder.mkdir()
    families.write_tokenizer(folder)
    generation = {"eos_token_id": [1, 2], "stop_strings": strings}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    tokenizer, template = read_tokenizer(read_folder(folder), 97)
    again.mkdir()
    write_tokenizer(again, tokenizer, template)
    for each in (tokenizer, read_tokenizer(read_folder(again), 97)[0]):
        lengths = first_end(ends_of(each), np.array([[4, 5, 6, 4], [5, 4, 6, 4], [5, 4, 9, 2]]))
        assert lengths.tolist() == ([3, 5, 3] if isinstance(strings, list) else [3, 5, 4])
    (folder / "generation_config.json").write_text(json.dumps({"stop_strings": [""]}))
    with pytest.raises(
        ConfigError, match=r"generation_config\.json: stop_strings: must not be empty"
    ):
        read_tokenizer(read_folder(folder), 97)


def test_a_pretrained_model_stops_in_training_and_evaluation(tmp_path):
    folder = families.write(tmp_path / "model", "llama")
    plain = pretrained.load(folder)
    rows = [language.tasks.Example(f"w{i} w{i + 1}", "w4") for i in range(10, 30)]
    lengths = []
    for strings in ([], [f"w{i}" for i in range(4, 40)]):
        generation = {"eos_token_id": [1, 2]} | ({"stop_strings": strings} if strings else {})
        (folder / "generation_config.json").write_text(json.dumps(generation))
        tokenizer, _ = read_tokenizer(read_folder(folder), plain.model.vocabulary)
        task = language.tasks.table("words", tokenizer, rows[:10], rows[10:])
        sizes = {"num_prompts": 4, "group_size": 4, "max_new_tokens": 6}
        problem = language.make_problem(task, plain.model, **sizes, initial=plain.params)
        params, collector = problem.init(jax.random.key(0))
        _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
        describe = language.make_describe(
            task, plain.model, num_prompts=8, num_samples=0, decoding=Decoding(6)
        )
        answers = jax.jit(describe)(params, collector, jax.random.key(2))
        texts = [row["completion"].split() for row in language.render(task, answers)]
        lengths.append((float(batch.mask.sum()), sum(map(len, texts))))
        if strings:
            assert not any(set(text[:-1]) & set(strings) for text in texts)
            stopped = np.asarray(batch.action)[np.asarray(batch.terminated & ~batch.truncated)]
            assert len(stopped) > 4
    assert all(after < before for before, after in zip(*lengths, strict=True))
