"""Custom rewards: share of correct characters, and 1 for plain digits."""


def nearly(completions, answer, **columns):
    """Returns the share of right characters, in [0, 1]."""
    scores = []
    for text, right in zip(completions, answer, strict=True):
        same = sum(a == b for a, b in zip(text, right, strict=False))
        scores.append(same / max(len(text), len(right)))
    return scores


def digits(completions, **columns):
    """Returns 1 for a completion of digits."""
    return [float(text.isdecimal()) for text in completions]
