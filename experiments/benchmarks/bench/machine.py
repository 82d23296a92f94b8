"""The processors of this machine, and a check that it was quiet during a measurement."""

import os
import resource
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

STAT = Path("/proc/stat")
SPREAD = 1.25  # largest ratio of a program's fastest to its slowest round; a larger ratio is noisy
# Largest share of processor time that other programs may take in a round; a larger share is noisy.
OTHERS = 0.05


class Clock(NamedTuple):
    """Processor time so far, in seconds.

    Attributes:
      available: seconds of all processors that this process may use.
      busy: seconds in which the processors worked, for any program or another virtual machine.
      own: seconds of this process and of those children that have ended.
    """

    available: float
    busy: float
    own: float


def clock(stat: Path = STAT) -> Clock | None:
    """Reads the processor time until now; returns None if the system does not report it."""
    try:
        lines = [line.split() for line in stat.read_text(encoding="utf-8").splitlines()]
        allowed = {f"cpu{i}" for i in os.sched_getaffinity(0)}
    except (OSError, AttributeError):
        return None
    ticks = [[int(word) for word in line[1:9]] for line in lines if line[0] in allowed]
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    # columns: user, nice, system, idle, iowait, irq, softirq, steal
    busy = sum(sum(each) - each[3] - each[4] for each in ticks) / os.sysconf("SC_CLK_TCK")
    own = sum(each.ru_utime + each.ru_stime for each in usage)
    return Clock(time.monotonic() * len(ticks), busy, own)


def others(before: Clock | None, after: Clock | None) -> float | None:
    """Returns the share of processor time that other programs took between two clocks.

    None if unknown.

    Example:
      >>> others(Clock(0.0, 0.0, 0.0), Clock(20.0, 15.0, 10.0))
      0.25
    """
    if before is None or after is None or after.available <= before.available:
        return None
    available, busy, own = (y - x for x, y in zip(before, after, strict=True))
    return max(0.0, (busy - own) / available)


def noise(rates: Mapping[str, Sequence[float]], shares: Sequence[float | None]) -> str:
    """Describes why measurements are doubtful; empty if the machine was quiet.

    Args:
      rates: speeds of each program, one speed per round.
      shares: share of processor time that other programs took in each round, see `others`.

    Example:
      >>> noise({"ours": [1.0, 1.1], "theirs": [2.0, 3.0]}, [0.0, 0.5])
      'others took 25 % of the processors; rounds of theirs differ by a factor of 1.50'
    """
    found = []
    told = [share for share in shares if share is not None]
    if told and sum(told) / len(told) > OTHERS:
        found.append(
            f"others took {sum(told) / len(told):.0%} of the processors".replace("%", " %")
        )
    for name, each in rates.items():
        if max(each) > SPREAD * min(each):
            found.append(f"rounds of {name} differ by a factor of {max(each) / min(each):.2f}")
    return "; ".join(found)
