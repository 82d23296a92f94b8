"""Mastermind as an environment in Python: 3 symbols of 4, found in eight guesses at most."""

import itertools

CODES = ["".join(symbols) for symbols in itertools.product("0123", repeat=3)]
QUESTION = "Find the code."
TURNS = 8


class Mastermind:
    """Environment whose code is the column `secret`; the library's task has the same reward."""

    def reset(self, secret: str, **columns: object) -> None:
        """Begins a game."""
        self.secret, self.guesses, self.won = secret, 0, False

    def guess(self, code: str) -> str:
        """Guesses the code.

        Args:
            code: three symbols from 0 to 3

        Returns:
            How many symbols are right and in place, and how many are right but misplaced.
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
