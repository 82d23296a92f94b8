"""Audit hook that refuses `eval` and `exec` of text while a reward function runs."""

import re
import sys
import sysconfig
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

LIBRARY = sysconfig.get_path("stdlib")
GAP = r"(?:\s|\\|#.*\n)*"
# Matches called names, calls of other expressions, decorators, imports and classes.
DEEDS = re.compile(
    rf"(?<!def )\b[^\W\d]\w*(?={GAP}\()|[)\]](?={GAP}\()|@|\b(?:import|class)\b{GAP}\w+"
)


class Guard:
    """Audit hook that refuses to run text as code, except for text from the data set.

    The standard library, installed packages and modules that are being imported may compile text,
    unless the text calls, imports or defines a name that a completion also calls, imports or
    defines. A refusal is recorded even if the reward function catches the exception.

    Args:
      harmless: `(text, file) -> bool`, whether a file may compile a text that is otherwise refused;
        for a reward function of this package that handles refusals itself. None to allow no text.
    """

    def __init__(self, harmless: Callable[[str, str], bool] | None = None) -> None:
        self._harmless, self.refused = harmless, False
        self._given: frozenset[str] | None = None
        self._deeds, self._untrusted = set[str](), set[str | None]()
        sys.addaudithook(self._hear)

    def call(self, run: Callable[[], Any], given: Iterable[str], written: Iterable[str]) -> Any:
        """Returns `run()`, which may run the `given` texts as code, but never `written` texts."""
        self._deeds = {deed for text in written for deed in deeds(text)}
        self._given, self.refused = frozenset(given), False
        self._untrusted.clear()
        try:
            return run()
        finally:
            self._given = None

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        # `eval` triggers `compile` with the text or a tree, and `exec` with the code and its file.
        if self._given is None:
            return
        if event == "compile":
            source, filename = args
            text = source.decode(errors="replace") if isinstance(source, bytes) else source
            if text not in self._given and not self._trusts(text, sys._getframe(1)):
                self._untrusted.add(filename and str(filename))
        elif event == "exec" and self._untrusted & {args[0].co_filename, None}:
            self.refused = self._harmless is None
            raise PermissionError("a reward function must not run text as code")

    def _trusts(self, text: object, frame: FrameType) -> bool:
        """Returns whether a frame may compile a text, or the syntax tree of an earlier text."""
        file, outer = frame.f_code.co_filename, frame
        while outer.f_code is not Guard.call.__code__ and outer.f_back:
            if outer.f_code.co_filename.startswith("<frozen importlib"):
                return True  # a module under import was written before any completion
            outer = outer.f_back
        installed = "site-packages" in file or "dist-packages" in file
        library = file.startswith(LIBRARY) and not installed
        if self._harmless is not None and not library:
            return isinstance(text, str) and self._harmless(text, file)
        own = self._deeds.isdisjoint(deeds(text)) if isinstance(text, str) else not self._untrusted
        return (library or installed) and own


def deeds(text: str) -> set[str]:
    r"""Returns the names that a text, if it is code, calls, imports and defines.

    >>> sorted(deeds("import os\ndef f(x): return len (x)")), sorted(deeds("x**2 + 2*x"))
    (['import os', 'len'], [])
    """
    return {" ".join(re.findall(r"\w+", found)) or found for found in DEEDS.findall(text)}
