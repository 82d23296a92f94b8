"""Tasks of reasoning-gym (extra `language`): items as prompts, and their scores as rewards.

The worker process of `scoring` also imports this module, which therefore imports only packages that
scoring needs.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from jaxrl_po.run.data.workers import Json

NAMES = tuple(sorted(DATASETS))
CHECKED = 16  # number of items whose reference answers are scored when the task is made


def items(name: str, *, seed: int, size: int, options: Mapping[str, object]) -> list[Json]:
    """Returns the items of a data set as rows, with the columns that `score_answer` takes.

    Args:
      name: name of the data set, one of `NAMES`.
      seed: seed of the data set.
      size: number of items.
      options: further fields of the data set's config.

    Raises:
      ValueError: the data set does not accept an option, an item has no reference answer, or an
        item can no longer be scored after a round trip through JSON.
    """
    try:
        dataset = reasoning_gym.create_dataset(name, seed=seed, size=size, **options)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} does not admit these options: {error}") from None
    rows = []
    for i in range(size):
        item = dataset[i]
        if not (isinstance(item["answer"], str) and item["question"]):
            raise ValueError(f"item {i} of {name} has no answer to learn from: {item['answer']!r}")
        metadata = json.loads(json.dumps(item["metadata"]))
        rows.append(
            {
                "prompt": item["question"],
                "question": item["question"],  # separate, since a template may surround the prompt
                "answer": item["answer"],
                "dataset": name,
                "options": json.dumps(options),
                "metadata": metadata,
            }
        )
        if i < CHECKED and dataset.score_answer(item["answer"], rows[-1]) < 1.0:
            raise ValueError(
                f"item {i} of {name} cannot be scored again: its own answer "
                f"{item['answer']!r} is not right"
            )
    return rows


def score_answer(
    completions: Sequence[str],
    question: Sequence[str],
    answer: Sequence[str],
    dataset: Sequence[str],
    options: Sequence[str],
    metadata: Sequence[object],
    **columns: Any,
) -> list[float]:
    """Returns reasoning-gym's score per completion, in [0, 1]; 0 if its answer parser raises."""
    scores = []
    rows = zip(completions, dataset, options, question, answer, metadata, strict=True)
    for completion, name, given, *parts in rows:
        item = dict(zip(("question", "answer", "metadata"), parts, strict=True))
        try:
            scores.append(float(_dataset(name, given).score_answer(completion, item)))
        except Exception:
            scores.append(0.0)
    return scores


@functools.cache
def _dataset(name: str, options: str) -> Any:
    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(options))
