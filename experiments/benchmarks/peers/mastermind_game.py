"""Mastermind as an environment in Python: a code of 3 symbols out of 4, at most eight guesses."""

import itertools

CODES = ["".join(symbols) for symbols in itertools.product("0123", repeat=3)]
QUESTION = "Find the code."
TURNS = 8


class Mastermind:
    """Environment whose secret code is the dataset column `secret`.

    The library's own task has the same reward.
    """

    def reset(self, secret: str, **columns: object) -> None:
        """Begins a game with the code in the column `secret`."""
        self.secret, self.guesses, self.won = secret, 0, False

    def guess(self, code: str) -> str:
        """Compares a guess with the secret code.

        Args:
            code: guess of three symbols from 0 to 3

        Returns:
            Number of symbols that are right and in place, and number that are right but misplaced.
        """
        if code not in CODES:
            raise ValueError("no code")
        if not self.won:
            self.guesses += 1
            self.won = code == self.secret
        at_place = sum(a == b for a, b in zip(code, self.secret, strict=True))
        shared = sum(min(code.count(symbol), self.secret.count(symbol)) for symbol in "0123")
        return f"{at_place} {shared - at_place}"

    def get_reward(self) -> float:
        """Returns (9 − guesses) / 8 for a game that was won, else 0."""
        return max(TURNS + 1 - self.guesses, 0) / TURNS if self.won else 0.0
