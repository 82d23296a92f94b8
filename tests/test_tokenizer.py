"""Characters to ids and back."""

import pytest

from jaxrl_po.config import ConfigError
from jaxrl_po.language import make_tokenizer

ALPHABET = "0123456789+="


@pytest.mark.parametrize(("pad", "eos"), [(0, 1), (5, 0), (13, 12)])
def test_round_trip(pad, eos):
    tokenizer = make_tokenizer(ALPHABET, pad=pad, eos=eos)
    tokens = tokenizer.encode("034+058=")
    assert tokenizer.decode(tokens) == "034+058="
    assert not {pad, eos} & set(tokens)


def test_every_id_has_one_meaning():
    tokenizer = make_tokenizer(ALPHABET, pad=3, eos=7)
    assert (
        sorted([*tokenizer.encode(ALPHABET), 3, 7])
        == list(range(tokenizer.size))
        == list(range(14))
    )


def test_decode_stops_at_the_first_eos_and_leaves_padding_out():
    tokenizer = make_tokenizer(ALPHABET)
    one, two = tokenizer.encode("12")
    assert tokenizer.decode([0, 0, one, two, 1, one, 1, two]) == "12"
    assert tokenizer.decode([0, one, 0, two, 1, 0], pad="□") == "□1□2"
    assert tokenizer.decode([1, one]) == ""
    assert tokenizer.decode([]) == tokenizer.decode([0, 0]) == ""


def test_unknown_character_is_named():
    with pytest.raises(ConfigError, match="character 'x' of '1x2'"):
        make_tokenizer(ALPHABET).encode("1x2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pad": 1, "eos": 1}, "pad and eos must be different ids, both are 1"),
        ({"eos": 14}, r"pad and eos must lie in \[0, 14\)"),
        ({"pad": -1}, r"pad and eos must lie in \[0, 14\)"),
        ({"characters": "010"}, "characters must be distinct"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(ConfigError, match=message):
        make_tokenizer(**({"characters": ALPHABET} | arguments))
