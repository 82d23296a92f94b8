"""Tests the conversion of characters to ids and back."""

import pytest

from jaxrl_po.config import ConfigError
from jaxrl_po.language import make_tokenizer

ALPHABET = "0123456789+="


def test_decode_stops_at_first_eos_and_drops_padding():
    tokenizer = make_tokenizer(ALPHABET)
    one, two = tokenizer.encode("12")
    assert tokenizer.decode([0, 0, one, two, 1, one, 1, two]) == "12"
    assert tokenizer.decode([0, one, 0, two, 1, 0], pad="□") == "□1□2"
    assert tokenizer.decode([1, one]) == ""
    assert tokenizer.decode([]) == tokenizer.decode([0, 0]) == ""


def test_unknown_character_is_named():
    with pytest.raises(ConfigError, match="character 'x' of '1x2'"):
        make_tokenizer(ALPHABET).encode("1x2")


def test_a_character_that_occurs_twice_is_refused():
    with pytest.raises(ConfigError, match="characters: must be distinct"):
        make_tokenizer("010")
