"""Defines environments for tests, in the form that TRL takes; each environment runs in its own
process."""

import os
import random
import signal
import subprocess
import time


class Guess:
    """Guess a number below 3; the reward is 1 − 0.25 · wrong guesses, if it was found."""

    def reset(self, secret, **columns):
        self.secret, self.wrong, self.found = secret, 0, False

    def guess(self, number: int) -> str:
        """Guesses the number.

        Args:
            number: the guess
        """
        self.found = self.found or number == self.secret
        self.wrong += number != self.secret
        return "right" if number == self.secret else "low" if number < self.secret else "high"

    def raises(self):
        """Raises an error."""
        raise ValueError("high")

    def get_reward(self) -> float:
        return self.found * max(1.0 - 0.25 * self.wrong, 0.0)


class Echo:
    """Environment without tools, whose reward is the number that `random` draws at the reset."""

    def reset(self, **columns):
        self.drawn = random.random()
        return " w" + "123"[int(3 * self.drawn)]

    def get_reward(self):
        return self.drawn


class Rough(Guess):
    """Environment whose tool hangs, kills its process, or blocks interrupts, depending on the
    secret."""

    def raises(self):
        """Hangs, kills its process, or cannot be interrupted."""
        if self.secret == 0:
            time.sleep(60)
        if self.secret == 1:
            os._exit(3)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)


class Odd:
    """Environment that draws when created, starts programs, and has parameters of any name."""

    def __init__(self):
        self.made = random.random()

    def reset(self, limit, *args, **columns):
        self.drawn, self.limit = random.random(), limit

    def draws(self):
        """Says what was drawn."""
        return f"{self.made} {self.drawn}"

    def search(self, limit: int, function: str):
        """Says what it was given.

        Args:
            limit: a number
            function: a text
        """
        return f"{self.limit} {limit} {function}"

    def ends_what_it_starts(self):
        """Says how a program ended."""
        started = subprocess.Popen(["sleep", "60"])
        started.terminate()
        return started.wait()

    def pid(self):
        """Says which process this is."""
        return os.getpid()

    def sleeps(self):
        """Hangs."""
        time.sleep(60)


class Broken(Guess):
    """Environment whose reward raises an error."""

    def get_reward(self):
        raise ValueError("no reward")


class Blind:
    """Environment without tools and without a reward."""

    def reset(self, **columns):
        pass
