"""Rewards that find an answer in free text: `last_number`, `contains` and `regex:…`.

The rewards run in the worker process of `scoring`, so this module imports only the standard
library.
"""

import decimal
import re
from collections.abc import Sequence
from typing import Any

# A minus between numbers or words is not a sign; 1,500 is one number, and 1e3 is a thousand.
DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+|(?=\.\d))(?:\.\d+)?"
NUMBER = re.compile(rf"(?:(?<![\w.)])-)?(?:(?<!\w){DIGITS}[eE][+-]?\d{{1,6}}(?!\w)|{DIGITS})")
# Unicode's minus signs, and hyphens and dashes of Unicode unless they may form a range or compound.
MINUS = re.compile(r"[\u2212\ufe63\uff0d](?=\.?\d)|(?<![^\s(=\[{])[\u2010-\u2015](?=\.?\d)")


def ascii_minus(text: str) -> str:
    """Replaces the minus signs of numbers in a text by the minus sign of ASCII.

    Example:
      >>> ascii_minus("a – b is −5")
      'a – b is -5'
    """
    return MINUS.sub("-", text)


def same(found: str, answer: str) -> bool:
    """Returns whether two texts are the same number, or equal except for surrounding spaces.

    Example:
      >>> same("1,200.0", "1200"), same(" Paris", "Paris"), same("1e3", "1000"), same("−5", "-5")
      (True, True, True, True)
    """
    pair = ascii_minus(found).strip(), ascii_minus(answer).strip()
    if all(NUMBER.fullmatch(each) for each in pair):
        a, b = (decimal.Decimal(each.replace(",", "")) for each in pair)
        return a == b
    return pair[0] == pair[1]


def last_number(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Scores 1 for a completion whose last number is the answer, else 0.

    "1,500" and "2e3" are one number each; "−5" with Unicode's minus sign is −5; "3–5" is a range.

    Example:
      >>> last_number(["2 + 3 is 5.", "5, or 6"], ["5", "5"])
      [1.0, 0.0]
    """
    numbers = [NUMBER.findall(ascii_minus(text)) for text in completions]
    return [
        float(bool(found) and same(found[-1], right))
        for found, right in zip(numbers, answer, strict=True)
    ]


def contains(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """Scores 1 for a completion that contains the answer as separate words or numbers, else 0.

    Example:
      >>> contains(["It is Paris.", "15", "1,500"], ["Paris", "5", "500"])
      [1.0, 0.0, 0.0]
    """
    scores = []
    for text, right in zip(map(ascii_minus, completions), map(ascii_minus, answer), strict=True):
        word = right.strip()
        if NUMBER.fullmatch(word):  # the number 1,500 does not contain 500
            places = (found.span() for found in NUMBER.finditer(text) if found[0] == word)
        else:
            places = (found.span() for found in re.finditer(re.escape(word), text) if word)
        scores.append(float(any(_stands_alone(text, *place) for place in places)))
    return scores


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Returns whether a part of a text stands alone, not within a longer word or number."""
    before, after = text[max(start - 1, 0) : start], text[end : end + 2]
    joined = re.match(r"\w|\.\d", after)
    return not (re.match(r"[\w.-]", before) or joined)


def regex(
    completions: Sequence[str], answer: Sequence[str], *, pattern: str, **columns: Any
) -> list[float]:
    r"""Scores 1 if the last match of a pattern, or its first group, is the answer, else 0.

    Example:
      >>> regex(["Answer: 4. Answer: 5."], ["5"], pattern=r"Answer: (\d+)")
      [1.0]
    """
    scores = []
    for text, right in zip(completions, answer, strict=True):
        matches = list(re.finditer(pattern, text))
        found = matches[-1].group(min(matches[-1].re.groups, 1)) if matches else None
        scores.append(float(found is not None and same(found, right)))
    return scores
