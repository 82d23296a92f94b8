"""An environment with a tool, as TRL's GRPOTrainer takes it: a number is to be guessed."""


class Guessing:
    """A number from 0 to 15, to be found in as few guesses as possible."""

    def reset(self, secret, **columns):
        """Begins a game; what it returns is added to the prompt."""
        self.secret, self.guesses, self.found = secret, 0, False
        return " It is one from 0 to 15."

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: the guess

        Returns:
            Whether the number is higher or lower.
        """
        self.guesses += 1
        self.found = number == self.secret
        if self.found:
            return "right"
        return "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        """(9 − guesses) / 8 where the number was found."""
        return (9 - self.guesses) / 8 if self.found else 0.0
