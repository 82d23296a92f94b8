"""Rewards that find an answer in free text: `last_number`, `contains` and `regex:…`.

They run in the worker process of `scoring`, so this imports only what that needs.
"""

import decimal
import re
from collections.abc import Sequence
from typing import Any

# A minus between numbers or words is none of theirs.
NUMBER = re.compile(r"(?:(?<![\w.)])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)")


def same(found: str, answer: str) -> bool:
    """Whether two texts are equal but for space around them, or are the same number.

    Example:
      >>> same("1,200.0", "1200"), same(" Paris", "Paris"), same("1e3", "1000")
      (True, True, False)
    """
    pair = found.strip(), answer.strip()
    if all(NUMBER.fullmatch(each) for each in pair):
        a, b = (decimal.Decimal(each.replace(",", "")) for each in pair)
        return a == b
    return pair[0] == pair[1]


def last_number(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion whose last number is the answer, else 0.

    Example:
      >>> last_number(["2 + 3 is 5.", "5, or 6"], ["5", "5"])
      [1.0, 0.0]
    """
    numbers = [NUMBER.findall(text) for text in completions]
    return [
        float(bool(found) and same(found[-1], right))
        for found, right in zip(numbers, answer, strict=True)
    ]


def contains(completions: Sequence[str], answer: Sequence[str], **columns: Any) -> list[float]:
    """1 for a completion in which the answer stands as words or numbers of its own, else 0.

    Example:
      >>> contains(["It is Paris.", "15"], ["Paris", "5"])
      [1.0, 0.0]
    """
    words = [re.escape(right.strip()) for right in answer]
    return [
        float(bool(word and re.search(rf"(?<![\w.-]){word}(?!\w|\.\d)", text)))
        for text, word in zip(completions, words, strict=True)
    ]


def regex(
    completions: Sequence[str], answer: Sequence[str], *, pattern: str, **columns: Any
) -> list[float]:
    r"""1 where the last match of a pattern, or its first group, is the answer, else 0.

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
