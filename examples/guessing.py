"""Environment with a tool, a number-guessing game, in the form that TRL's GRPOTrainer takes."""


class Guessing:
    """Game with a number from 0 to 15 that the policy must find in as few guesses as possible."""

    def reset(self, secret, **columns):
        """Begins a game; returns a text that is appended to the prompt."""
        self.secret, self.guesses, self.found = secret, 0, False
        return " It is one from 0 to 15."

    def guess(self, number: int) -> str:
        """Compares a guess with the number.

        Args:
            number: number that the policy guesses

        Returns:
            Text that states whether the number is higher or lower than the guess.
        """
        self.guesses += 1
        self.found = number == self.secret
        if self.found:
            return "right"
        return "higher" if self.secret > number else "lower"

    def get_reward(self) -> float:
        """Returns (9 − guesses) / 8 for a found number, else 0."""
        return (9 - self.guesses) / 8 if self.found else 0.0
