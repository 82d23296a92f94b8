"""Searches hyperparameters: a grid or random draws, vmapped with seeds into one program.

`jaxrl-po sweep --algorithm=ppo --env=Pendulum-v1 --seeds=4 --config.learning_rate=3e-4,1e-3
--config.gamma=0.9,0.95`

A `--config.*`, `--problem.*` or `--network.*` flag of `jaxrl-po control` with several
comma-separated values is swept; several swept flags form the grid of all combinations of their
values. A flag with a distribution, such as `log_uniform(1e-5,1e-2)`, is drawn `--draws` times.
A flag with `@config.gamma` has the value of that flag. Combinations that differ only in numeric
settings of the method share a program. The command writes `sweep.json`, `sweep.csv`, `table.txt`
and `sweep.png` to `--out`, and prints the flags of the best combination. `--confirm=8` compares the
best combination with the default on 8 fresh seeds.
`sweep.json` is updated after each program: an interrupted sweep resumes with `--out=… --resume`
alone. Sweeps found the settings in the files of `jaxrl_po/run/experiment/configs/`.
"""

import sys
from collections.abc import Sequence

from jaxrl_po.run.experiment import control, flags, search_space, settings, sweeping, training


def main(argv: Sequence[str]) -> int:
    """Runs the command `sweep`; returns the exit status, which is 1 if an environment failed."""
    asks, words = flags.help_of(argv)
    record = search_space.RECORDS[control.NAME]
    given = flags.tokenize(words, {"": record})
    if asks:
        single = {name: text for name, text in given.items() if "." not in name}
        everything, command = flags.EVERYTHING in argv, ("sweep", search_space.SUMMARY, record)
        print(settings.format_usage(control, single, everything=everything, command=command))
        return 0
    try:
        swept = sweeping.run_sweep(control, given, leave_early=True)
    except training.FAILURES as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(sweeping.format_table(swept.rows), end="")
    print("best:", *flags.written(swept.best))
    return 0
