"""Examples of what a policy writes, and how a person reads them in `samples.jsonl`."""

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
      describe: training state to arrays; compiled, unless it is that of `Rollouts`. It must use a
        fixed key of its own.
      render: those arrays, on the host, to rows of `samples.jsonl`.
    """

    describe: Callable[..., PyTree]
    render: Callable[[PyTree], list[Row]]


def transcript(row: Row) -> str:
    """The completion of a row, or its dialogue: a line for each message and each reply.

    Behind a message stands what its turn earned: the reward if it is not 0, and in a group the
    advantage.
    """
    if "turns" not in row:
        return str(row["completion"])
    lines = []
    for turn in row["turns"]:
        earned = [f"reward {number(turn['reward'])}"] if turn["reward"] != 0 else []
        earned += [f"advantage {number(turn['advantage'], '+.2f')}"] if "advantage" in turn else []
        lines.append(_line("policy", turn["message"], f"    ({', '.join(earned)})" * bool(earned)))
        lines += [_line("reply", turn["reply"])] if turn["reply"] else []
    return "\n".join(lines)


def number(value: float | None, form: str = "g") -> str:
    """A number of a row; None is what no function judged."""
    return "none" if value is None else f"{value:{form}}"


def latest(path: Path) -> str:
    """All that was written at the last evaluation; empty if nothing was."""
    rows = metrics.read(path, "run")
    return "\n\n".join(_whole(row) for row in rows if row["iteration"] == rows[-1]["iteration"])


def _whole(row: Row) -> str:
    measures = [f"{name} {number(value)}" for name, value in row.items() if name not in KNOWN]
    head = [f"step {row['step']:,}", row["decoding"], f"score {number(row['score'])}", *measures]
    said = transcript(row) if "turns" in row else _line("policy", row["completion"])
    right = [_line("right", row["expected"])] if row.get("expected") else []
    note = [_line("note", row["note"])] if row.get("note") else []
    return "\n".join([", ".join(head), _line("prompt", row["prompt"]), said, *right, *note])


def _line(who: str, text: str, after: str = "") -> str:
    """Who said it, and the text; further lines of it are indented."""
    return f"{who:<8}" + text.replace("\n", "\n" + " " * 8) + after
