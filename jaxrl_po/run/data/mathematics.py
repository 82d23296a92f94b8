r"""The reward `math`: whether an answer in `\boxed{}`, or after `####`, is the right one.

The library `math-verify` (extra `math`) compares both as mathematics: ½, 0.5 and \frac{1}{2} are
one. It runs in the worker process of `scoring`, so it imports only what that needs.
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
# A number alone, where the text has no braces: \boxed 1/2 would be a box of 1.
BARE = re.compile(r"\\boxed\s*(-?(?:\d[\d,]*\d|\d)?(?:\.\d+)?)(?=[$\s)]|[.,;!?](?!\d)|$)")
# Without the extraction of expressions outside LaTeX, which sympy reads by `eval`.
LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
# Longer ones are no answers; neither are towers of powers, which take for ever.
LONGEST = 256
TOWER = re.compile(r"\^.{0,8}\^|\^\{?\d{4,}|!\s*!|\d{4,}\s*!")
# One number whose digits are in groups, as 1,234 or 1\,234 or 1{,}234: no list of numbers.
SEPARATOR = r"(?:,|\{,\}|\\[,!: ]|[ ~\u00a0\u2009\u202f])"
THOUSANDS = re.compile(rf"-?\d{{1,3}}(?:{SEPARATOR}\d{{3}})+(?:\.\d+)?(?:\\?%)?")
MIXED = re.compile(r"(-?)(\d+)\s+(\d+)\s*/\s*(\d+)")  # 3 1/2
EXPONENT = re.compile(r"(-?(?:\d+\.?\d*|\.\d+))[eE]([+-]?\d{1,3})")  # 1.5e3
MINUS = re.compile(r"[\u2010-\u2015\u2212\ufe58\ufe63\uff0d]")
LIMIT = 2.0  # seconds of one completion
# What sympy compiles of its own: its names, and literals of numbers and symbols.
NAMES = re.compile(
    r"from sympy import \*|(Integer|Float|Rational|Symbol) ?\( ?'?[\w.]*'? ?\) ?|\w+ ?"
)

logging.getLogger("math_verify").setLevel(logging.ERROR)


def harmless(text: str, file: str) -> bool:
    """Whether a text that a file compiles while an answer is read is sympy's own.

    Example:
      >>> harmless("Integer (12 )", ""), harmless("__import__('os').system('ls')", "")
      (True, False)
    """
    return NAMES.fullmatch(text) is not None or "/sympy/polys/" in file.replace("\\", "/")


def correct(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion whose answer equals that of its row, else 0.

    0 without an answer, and for one that takes longer than `LIMIT`, as the value of 9^(9·10⁹) does.
    """
    pairs = list(zip(answer, completions, strict=True))
    scores: list[float] = []
    while len(scores) < len(pairs):
        scores += _compare(pairs[len(scores) :])
    return scores


def _compare(pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Scores in order, by a child: all of them, or up to one that hangs or ends it, which has 0."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for right, text in pairs:
                same = False
                signal.setitimer(signal.ITIMER_REAL, LIMIT)  # ends it, whatever it computes
                with contextlib.suppress(Exception):  # a parser's error is a wrong answer
                    same = equal(right, text)
                os.write(there, b"1" if same else b"0")
        finally:
            os._exit(0)  # whatever happens, it must not go on as the worker
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        scores = [float(each == ord("1")) for each in pipe.read()]
    os.waitpid(child, 0)
    return scores if len(scores) == len(pairs) else [*scores, 0.0]


def final(text: str) -> str:
    r"""Returns the answer of a text: the last `\boxed{}`, or the rest of the last line with `####`.

    Example:
      >>> final(r"so \boxed{\frac{1}{2}}."), final("2 + 2 = 4\n#### 4"), final(r"\boxed 4")
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
    r"""Whether a text ends with the right answer.

    Args:
      right: the answer alone, or a text that ends with it.
      text: of a completion.

    Example:
      >>> equal("0.5", r"\boxed{\frac{1}{2}}"), equal("x #### 1,234", "#### 1234"), equal("4", "4")
      (True, True, False)
    """
    found, wanted = final(text), final(right) or right.strip()
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
