r"""The reward `math`: 1 if the answer in `\boxed{}`, or after `####`, is right.

The library `math-verify` (extra `math`) compares two answers as mathematics: ½, 0.5 and \frac{1}{2}
are equal. The worker process of `scoring` runs this module, which therefore imports only the
necessary packages.
"""

import contextlib
import logging
import os
import re
import signal
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

BOXED, HASHES = re.compile(r"\\boxed\s*(?=\{)"), "####"
# Matches a number without braces; \boxed 1/2 must not be read as a box of 1.
BARE = re.compile(r"\\boxed\s*(-?(?:\d[\d,]*\d|\d)?(?:\.\d+)?)(?=[$\s)]|[.,;!?](?!\d)|$)")
# Omits the extraction of expressions outside LaTeX, which sympy reads by `eval`.
LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
# Longer texts are not answers; nor are towers of powers, whose evaluation never ends.
LONGEST = 256
TOWER = re.compile(r"\^.{0,8}\^|\^\{?\d{4,}|!\s*!|\d{4,}\s*!")
# Matches one number with grouped digits, such as 1,234 or 1\,234 or 1{,}234, not a list of numbers.
SEPARATOR = r"(?:,|\{,\}|\\[,!: ]|[ ~\u00a0\u2009\u202f])"
THOUSANDS = re.compile(rf"-?\d{{1,3}}(?:{SEPARATOR}\d{{3}})+(?:\.\d+)?(?:\\?%)?")
MIXED = re.compile(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)")  # matches 3 1/2
EXPONENT = re.compile(r"(-?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})")  # matches 1.5e3
MINUS = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
LIMIT = 2.0  # seconds allowed for comparing one completion
# Matches text that sympy itself compiles: names of sympy, and literals of numbers and symbols.
NAMES = re.compile(
    r"from sympy import \*|(Integer|Float|Rational|Symbol) ?\( ?'?[\w.]*'? ?\) ?|\w+ ?"
)

logging.getLogger("math_verify").setLevel(logging.ERROR)


def harmless(text: str, file: str) -> bool:
    """Returns whether a text that is compiled while an answer is read comes from sympy itself.

    Example:
      >>> harmless("Integer (12 )", ""), harmless("__import__('os').system('ls')", "")
      (True, False)
    """
    return NAMES.fullmatch(text) is not None or "/sympy/polys/" in file.replace("\\", "/")


def correct(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Scores 1 for a completion whose answer equals the answer in the prompt's row, else 0.

    The score is 0 for a completion without an answer, and for a completion whose comparison takes
    longer than `LIMIT`, as the value of 9^(9·10⁹) does.
    """
    pairs = list(zip(answer, completions, strict=True))
    scores: list[float] = []
    while len(scores) < len(pairs):
        scores += _compare(pairs[len(scores) :])
    return scores


def _compare(pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Scores pairs of completion and answer in a child process, up to the first pair that ends it.

    A pair that hangs or crashes the process scores 0.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for right, text in pairs:
                same = False
                signal.setitimer(signal.ITIMER_REAL, LIMIT)  # ends the child even inside C code
                with contextlib.suppress(Exception):  # a parser's error is a wrong answer
                    same = equal(right, text)
                os.write(there, b"1" if same else b"0")
        finally:
            os._exit(0)  # a forked child must never continue to run the worker's code
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        scores = [float(each == ord("1")) for each in pipe.read()]
    os.waitpid(child, 0)
    return scores if len(scores) == len(pairs) else [*scores, 0.0]


def final_answer(text: str) -> str:
    r"""Returns a text's answer: the last `\boxed{}`, or the rest of the last line with `####`.

    Example:
      >>> texts = r"so \boxed{\frac{1}{2}}.", "2 + 2 = 4\n#### 4", r"\boxed 4"
      >>> tuple(map(final_answer, texts))
      ('\\frac{1}{2}', '4', '4')
    """
    text = MINUS.sub("-", text)
    boxes = list(BOXED.finditer(text))
    start, hashes = boxes[-1].end() if boxes else -1, text.rfind(HASHES)
    if hashes > start:
        return text[hashes + len(HASHES) :].strip().partition("\n")[0].strip()
    if start < 0:
        return (BARE.findall(text) or [""])[-1]
    depth = 0
    for end in range(start, len(text)):
        depth += (text[end] == "{") - (text[end] == "}")
        if depth == 0:
            return text[start + 1 : end].strip()
    return ""


def equal(right: str, text: str) -> bool:
    r"""Returns whether a text ends with the right answer.

    Args:
      right: answer alone, or a text that ends with the answer.
      text: text of a completion.

    Example:
      >>> equal("0.5", r"\boxed{\frac{1}{2}}"), equal("x #### 1,234", "#### 1234"), equal("4", "4")
      (True, True, False)
    """
    found, wanted = final_answer(text), final_answer(right) or right.strip()
    if not found or len(found) > LONGEST or TOWER.search(found):
        return False
    if found == wanted:
        return True
    gold, guess = _parsed(wanted), _parsed(found)
    return bool(gold and guess and verify(gold, guess, timeout_seconds=None))


def _parsed(text: str) -> list[object]:
    plain = MINUS.sub("-", text).strip("$ ").removesuffix(".")
    if THOUSANDS.fullmatch(plain):
        plain = re.sub(SEPARATOR, "", plain)
    elif mixed := MIXED.fullmatch(plain):
        plain = rf"{mixed[1]}({mixed[2]}+\frac{{{mixed[3]}}}{{{mixed[4]}}})"
    elif exponent := EXPONENT.fullmatch(plain):
        plain = rf"{exponent[1]}\cdot 10^{{{exponent[2]}}}"
    found: list[Any] = parse(
        rf"$\boxed{{{plain}}}$",
        extraction_config=LATEX,
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    return found
