"""Defines the interface of a tokenizer, and a tokenizer of single characters, PAD and EOS."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, with_field_docs

PAD = "□"


class AnyTokenizer(Protocol):
    """Interface of a task's tokenizer: this module's `Tokenizer`, or a pretrained model's."""

    @property
    def size(self) -> int:
        """Size of the vocabulary of the model."""

    @property
    def pad(self) -> int:
        """Id that fills rows, which is never `eos`, but possibly another id of `ends`."""

    @property
    def eos(self) -> int:
        """Id that ends a demonstration, one of `ends`."""

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that each end a completion."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text, without EOS."""

    def decode(self, tokens: list[int], *, pad: str = "") -> str:
        """Returns the text before the first end, with `pad` in place of each PAD."""

    def decode_rows(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[str]:
        """Returns the texts of all rows, `[B, T]`: their unmasked tokens without ends."""


@with_field_docs
class Tokenizer(NamedTuple):
    """Tokenizer of single characters; PAD is 0, EOS is 1, and the alphabet follows in its order.

    Attributes:
      characters: characters of the alphabet, each once.
    """

    characters: str

    @property
    def pad(self) -> int:
        """Id of the padding token."""
        return 0

    @property
    def eos(self) -> int:
        """Id of the end-of-sequence token."""
        return 1

    @property
    def size(self) -> int:
        """Size of the vocabulary, PAD and EOS included."""
        return len(self.characters) + 2

    @property
    def ends(self) -> tuple[int, ...]:
        """Ids that end a completion: only EOS."""
        return (self.eos,)

    @property
    def ids(self) -> dict[str, int]:
        """Id of each character."""
        return {character: i for i, character in enumerate(self.characters, start=2)}

    def encode(self, text: str) -> list[int]:
        """Returns the ids of `text`, without EOS.

        Raises:
          ConfigError: a character is not in the alphabet; the message names the first such
            character.
        """
        ids = self.ids
        for character in text:
            if character not in ids:
                raise ConfigError(
                    "text", f"character {character!r} of {text!r} is not among {self.characters!r}"
                )
        return [ids[character] for character in text]

    def decode(self, tokens: list[int], *, pad: str = "") -> str:
        """Returns the text before the first EOS, with `pad` in place of each PAD."""
        characters = {i: character for character, i in self.ids.items()}
        end = tokens.index(self.eos) if self.eos in tokens else len(tokens)
        return "".join(
            pad if token == self.pad else characters[int(token)] for token in tokens[:end]
        )

    def decode_rows(self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_]) -> list[str]:
        """Decodes all rows at once: their unmasked tokens without EOS, with `□` for each PAD.

        Args:
          tokens: ids of the rows, `[B, T]`.
          mask: True for the tokens to decode, `[B, T]`.

        Example:
          >>> tokens = np.array([[2, 0, 3, 1], [0, 0, 3, 2]])
          >>> mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]], bool)
          >>> make_tokenizer("ab").decode_rows(tokens, mask)
          ['a□b', 'ba']
        """
        alphabet = np.full(self.size, PAD)
        for character, i in self.ids.items():
            alphabet[i] = character
        kept = mask & (tokens != self.eos)
        return ["".join(row[keep]) for row, keep in zip(alphabet[tokens], kept, strict=True)]


def make_tokenizer(characters: str) -> Tokenizer:
    """Checks an alphabet and builds its tokenizer.

    Args:
      characters: characters of the alphabet, each once.

    Raises:
      ConfigError: a character occurs twice.

    Example:
      >>> tokenizer = make_tokenizer("01+=")
      >>> tokenizer.encode("1+0="), tokenizer.decode([3, 4, 2, 5, 1, 0])
      ([3, 4, 2, 5], '1+0=')
    """
    if len(set(characters)) != len(characters):
        raise ConfigError("characters", f"must be distinct, got {characters!r}")
    return Tokenizer(characters)
