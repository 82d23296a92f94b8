"""Reads the named wrong programs: plausible mistakes that a test must notice, `make gate`.

Each wrong program is one replacement in the text of one module. The text `before` must occur
exactly once, so that a change of the module breaks the table and no mistake drops out of the table
unnoticed. The tables are the files of `tests/wrong/`.
"""

import re
from pathlib import Path
from typing import NamedTuple


class Wrong(NamedTuple):
    """Wrong program made by one replacement.

    Attributes:
      name: Description of the mistake.
      module: Name of a module in `jaxrl_po`, or full name of a module in `experiments`.
      before: Text that occurs exactly once in the module.
      after: Text that replaces `before` in the wrong program.
      tests: Test files or tests in `tests/`; each of them must notice the mistake.
    """

    name: str
    module: str
    before: str
    after: str
    tests: tuple[str, ...]

    def source(self, text: str) -> str:
        """Returns the module's text with the mistake; line breaks do not matter.

        Raises:
          ValueError: `before` does not occur exactly once.

        Example:
          >>> wrong = Wrong("sign", "losses", "f(a - b, c)", "f(a + b, c)", ())
          >>> wrong.source("return f(\\n  a - b,\\n  c,\\n)")
          'return f(a + b, c)'
        """
        found = list(pattern(self.before).finditer(text))
        if len(found) != 1:
            raise ValueError(
                f"{self.name}: {self.before!r} occurs {len(found)} times in {self.module}, not once"
            )
        return text[: found[0].start()] + self.after + text[found[0].end() :]


def pattern(code: str) -> re.Pattern[str]:
    """Builds a pattern that matches code, however its lines are broken.

    White space at the ends of the code counts.
    """
    inner = code.strip()
    start, end = code[: len(code) - len(code.lstrip())], code[len(code.rstrip()) :]
    parts = []
    for token in re.findall(r"\s+|\w+|[^\w\s]", inner):
        if token.isspace():
            parts.append(r"\s+")
        elif token in "([{":
            parts.append(re.escape(token) + r"\s*")
        elif token in ")]}":
            parts.append(r",?\s*" + re.escape(token))
        else:
            parts.append(re.escape(token))
    return re.compile(re.escape(start) + "".join(parts) + re.escape(end))


def table(text: str) -> list[Wrong]:
    """Reads wrong programs from a text.

    The first line of an entry is its name. The other lines of an entry are indented by two spaces:
    the module, a colon and the tests; then `before`, each line after "- "; then `after`, each line
    after "+ ". The sign "␠" is a space at the end of a line. A line that begins with "#" is a
    heading.

    Example:
      >>> [wrong] = table("sign\\n  losses: test_losses.py\\n  - a - b\\n  + a + b")
      >>> wrong.module, wrong.before, wrong.after, wrong.tests
      ('losses', 'a - b', 'a + b', ('test_losses.py',))
    """
    found = []
    for entry in re.findall(r"^[^\s#].*(?:\n  .*)*", text, re.MULTILINE):
        name, *lines = entry.split("\n")
        code = {s: [x[4:].replace("␠", " ") for x in lines if x[2] == s] for s in "-+"}
        module, tests = " ".join(x for x in lines if x[2] not in code).split(":", 1)
        tests = re.split(r"\s+(?=test_)", tests.strip())  # the id of a test may contain spaces
        before, after = map("\n".join, code.values())
        found.append(Wrong(name, module.strip(), before, after, tuple(tests)))
    return found


FOLDER = Path(__file__).parent.parent / "wrong"
WRONG = [wrong for file in sorted(FOLDER.glob("*.txt")) for wrong in table(file.read_text("utf-8"))]
