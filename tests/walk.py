"""Lists the files of the run layer that one run in control enters: `python tests/walk.py [FLAG …]`.

The list goes from the arguments to `curves.png`, in the order of first calls, with the function
that is called first in each file. Files whose code runs only during an import are left out.
"""

import inspect
import sys
import tempfile
import threading
from pathlib import Path

from jaxrl_po import __main__ as command_line
from jaxrl_po import run
from jaxrl_po.cli import launch  # noqa: F401  (what it imports does not run in the walk)

LAYER = Path(run.__file__).parent
SMALL = ("--env=CartPole-v1", "--seeds=2", "--total_steps=256", "--problem.num_envs=4")
SMALL += ("--problem.num_steps=16", "--config.num_minibatches=1", "--eval_episodes=2")


def walk(flags: list[str]) -> dict[str, str]:
    """Returns each file of the run layer that a run enters, and the file's first function."""
    first: dict[str, str] = {}

    def enter(frame, event, _):
        code = frame.f_code
        # The frame is not the body of a module or class.
        if event == "call" and code.co_flags & inspect.CO_OPTIMIZED:
            path = Path(code.co_filename)
            if LAYER in path.parents:
                first.setdefault(str(path.relative_to(LAYER)), code.co_qualname)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            command_line.main(["control", *SMALL, *flags, f"--out={scratch}/run"])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return first


if __name__ == "__main__":
    found = walk(sys.argv[1:])
    for file, function in found.items():
        print(f"{file:36} {function}")
    print(f"{len(found)} files")
