"""The other side of dialogues on the host: who begins them, answers messages, and rewards."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from jaxrl_po.masked import Mean

Reporter = Callable[[str], None]


class Episode(NamedTuple):
    """A dialogue to be held.

    Attributes:
      row: of the prompts.
      seeds: of Python's random numbers, before the environment is reset and after.
    """

    row: int
    seeds: tuple[int, int]


class Outcome(NamedTuple):
    """How N dialogues ended.

    Attributes:
      reward: `[N]`, float32.
      score: `[N]`, float32, the raw outcome.
      ended: `[N]`, bool, whether they ended by themselves.
      measures: name to what is pooled, `[N]` each.
    """

    reward: npt.NDArray[np.float32]
    score: npt.NDArray[np.float32]
    ended: npt.NDArray[np.bool_]
    measures: dict[str, Mean]


class Partner(Protocol):
    """Answers the messages of N rows, S seeds one after another; None for a row without a dialogue.

    Attributes:
      names: of the measures of an `Outcome`.
    """

    names: tuple[str, ...]

    def begin(self, episodes: Sequence[Episode | None], num_seeds: int) -> list[list[int]]:
        """Ids of each prompt."""

    def answer(self, messages: Sequence[Sequence[int] | None]) -> list[list[int] | None]:
        """Ids of each reply; None where a dialogue has ended."""

    def finish(self, *, first: bool, report: Reporter) -> Outcome:
        """How they ended; a failure is an error in the `first` ones."""

    def close(self) -> None:
        """Frees what is held."""
