"""A custom reward: the share of correct characters of the answer, and 1 for plain digits."""


def nearly(completions, answer, **columns):
    """Share of the right characters, in [0, 1]."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        same = sum(a == b for a, b in zip(text, right, strict=False))
        scores.append(same / max(len(text), len(right)))
    return scores


def digits(completions, **columns):
    """1 for a completion of digits only."""
    return [float(text.isdecimal()) for text in completions]
