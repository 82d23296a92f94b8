"""Named wrong programs: mistakes that pass for the real thing until a test asks. `tests/mutants.py --wrong` runs them.

Each is one replacement in the text of one module. The text before must stand there exactly once, so that a program which is
written otherwise breaks this table and no mistake drops out of it unseen.
"""

from typing import NamedTuple


class Wrong(NamedTuple):
    """One wrong program.

    Attributes:
      name: what is wrong.
      module: of `jaxrl_po`.
      before: text of the module, which stands in it once.
      after: what stands there in the wrong program.
      tests: files or tests in this folder, each of which must notice.
    """

    name: str
    module: str
    before: str
    after: str
    tests: tuple[str, ...]

    def source(self, text: str) -> str:
        """The module's text with the mistake.

        Raises:
          ValueError: the text before does not stand there exactly once.

        Example:
          >>> Wrong("sign", "losses", "a - b", "a + b", ()).source("return a - b")
          'return a + b'
        """
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} stands {text.count(self.before)} times in {self.module}, not once")
        return text.replace(self.before, self.after)


WRONG = [
    Wrong(
        "joint_loss: entropy with the other sign",
        "algorithms.actor_critic",
        '"entropy": -config.entropy_coefficient',
        '"entropy": config.entropy_coefficient',
        ("test_coefficients.py",),
    ),
]
