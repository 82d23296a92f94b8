"""Texts of an environment, put into messages and cut to a number of tokens."""

from collections.abc import Callable, Sequence

from jaxrl_po.language.pretrained.tools import USER, Message, Tools


def with_observation(messages: Sequence[Message], said: str) -> list[Message]:
    """The messages with a text added to the last one of the user.

    Example:
      >>> with_observation([{"role": "user", "content": "Go."}], " Left or right?")
      [{'role': 'user', 'content': 'Go. Left or right?'}]
    """
    last = max(i for i, message in enumerate(messages) if message["role"] == USER)
    added = {**messages[last], "content": messages[last]["content"] + said}
    return [*messages[:last], added, *messages[last + 1 :]]


def fit(
    written: Callable[[list[str]], list[int]], texts: Sequence[str], limit: int, tools: Tools
) -> tuple[list[int], bool]:
    """Ids of at most `limit` tokens where texts can be cut so far, and whether they were cut.

    `?` stands for a token that the model does not have, as an environment may say anything.

    Args:
      written: texts to the ids of all that is read.
      texts: may be cut at their ends, the longest one first.
      limit: tokens.
      tools: whose tokenizer is used.
    """
    texts = list(texts)
    for token in tools.foreign:
        texts = [text.replace(token, "?") for text in texts]
    ids, cut = written(texts), False
    while len(ids) > limit and any(texts):
        longest = max(range(len(texts)), key=lambda i: len(texts[i]))
        ends = [end for _, end in tools.tokenizer.rules.encode(texts[longest]).offsets]
        kept = max(len(ends) - -(-(len(ids) - limit) // len(texts)), 0)
        end = ends[kept - 1] if kept else 0
        texts[longest] = texts[longest][: min(end, len(texts[longest]) - 1)]
        ids, cut = written(texts), True
    return ids, cut
