"""An environment with a tool, in the form that TRL's GRPOTrainer takes: guess a number."""


class Guessing:
    """A number from 0 to 15 that the policy must find in as few guesses as possible."""

    def reset(self, secret, **columns):
        """Begins a game and returns a text that is added to the prompt."""
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
        """Returns (9 − guesses) / 8 if the number was found, else 0."""
        return (9 - self.guesses) / 8 if self.found else 0.0
