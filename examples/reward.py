"""A reward of one's own: the share of the answer's characters that stand where they should, and one for plain digits."""


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
