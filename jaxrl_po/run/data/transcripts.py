"""Examples of a policy's completions, and their text format for reading `samples.jsonl`."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from jaxrl_po.run.store import metrics
from jaxrl_po.types import PyTree, Row

KNOWN = {
    *("iteration", "step", "seed", "decoding", "prompt", "completion", "turns", "score"),
    *("length", "ended", "expected", "note"),
}


class Examples(NamedTuple):
    """Sample outputs of the policy at an evaluation, for people to read.

    Attributes:
      describe: `(state) -> arrays`, computes the outputs with a fixed PRNG key; compiled, unless
        the function comes from `Rollouts`.
      render: `(arrays) -> rows`, converts the arrays, on the host, to rows of `samples.jsonl`.
    """

    describe: Callable[..., PyTree]
    render: Callable[[PyTree], list[Row]]


def transcript(row: Row) -> str:
    """Formats the completion of a row, or its dialogue: a line per message and per reply.

    A message is followed by the reward of its turn, unless the reward is 0, and in a group also by
    the advantage of the turn.
    """
    if "turns" not in row:
        return str(row["completion"])
    lines = []
    for turn in row["turns"]:
        earned = [f"reward {show(turn['reward'])}"] if turn["reward"] != 0 else []
        earned += [f"advantage {show(turn['advantage'], '+.2f')}"] if "advantage" in turn else []
        lines.append(_line("policy", turn["message"], f"    ({', '.join(earned)})" * bool(earned)))
        lines += [_line("reply", turn["reply"])] if turn["reply"] else []
    return "\n".join(lines)


def show(value: float | None, form: str = "g") -> str:
    """Formats a number of a row; None stands for a value that no reward function scored."""
    return "none" if value is None else f"{value:{form}}"


def read(path: Path, *, every: bool) -> str:
    """Returns the samples of the last evaluation as text; empty if the file has no rows.

    Args:
      path: File `samples.jsonl` of a run.
      every: Whether to return the samples of all evaluations, prompt by prompt.
    """
    rows = metrics.read(path, "run")
    if every:
        prompts = [row["prompt"] for row in rows]
        rows.sort(key=lambda row: prompts.index(row["prompt"]))
    else:
        rows = [row for row in rows if row["iteration"] == rows[-1]["iteration"]]
    return "\n\n".join(map(_whole, rows))


def _whole(row: Row) -> str:
    measures = [f"{name} {show(value)}" for name, value in row.items() if name not in KNOWN]
    head = [f"step {row['step']:,}", row["decoding"], f"score {show(row['score'])}", *measures]
    said = transcript(row) if "turns" in row else _line("policy", row["completion"])
    right = [_line("right", row["expected"])] if row.get("expected") else []
    note = [_line("note", row["note"])] if row.get("note") else []
    return "\n".join([", ".join(head), _line("prompt", row["prompt"]), said, *right, *note])


def _line(who: str, text: str, after: str = "") -> str:
    """Formats a speaker and the text; continuation lines of the text are indented."""
    return f"{who:<8}" + text.replace("\n", "\n" + " " * 8) + after
