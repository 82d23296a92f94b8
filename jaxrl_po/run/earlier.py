"""Settings and states of earlier runs, with errors that name the flag of an unsuitable run."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_po.config import ConfigError
from jaxrl_po.language import Task, Transformer
from jaxrl_po.run import (
    checkpoint,
    flags,
    folder,
    jobs,
    launch,
    methods,
    runner,
    tasks,
    user_code,
)
from jaxrl_po.run.checkpoint import CheckpointError
from jaxrl_po.run.flags import UsageError
from jaxrl_po.run.parallel import Placement
from jaxrl_po.run.script import Script
from jaxrl_po.run.user_code import UserCodeError
from jaxrl_po.types import PyTree, TrainState

CHECKPOINTS = ("best", "latest")
WHICH = (
    "each holds all seeds at one iteration, and best is the one with the highest mean score "
    "over seeds"
)


def read(script: Script, flag: str, run: str) -> dict[str, Any]:
    """The settings of an earlier run of a script, prefix to record.

    Args:
      script: the script that made the run.
      flag: name of the flag that names its folder, for messages.
      run: the folder.

    Raises:
      UsageError: not a run of that script, or one of another version of the library; names the
        flag.
    """
    return read_any([script], flag, run)[1]


def read_any(scripts: Sequence[Script], flag: str, run: str) -> tuple[Script, dict[str, Any]]:
    """The script among several that made an earlier run, and the run's settings; see `read`."""
    makers = " or ".join(f"jaxrl-po {script.name}" for script in scripts)
    if not run:
        raise UsageError(
            f"--{flag} must name the folder of a run of {makers}, e.g. --{flag}=runs/first"
        )
    wanted = f"--{flag}={run} must be the folder of a run of {makers}"
    try:
        stored = dict(json.loads((Path(run) / folder.CONFIG).read_text(encoding="utf-8")))
    except OSError:
        raise UsageError(f"{wanted}; it holds no {folder.CONFIG}") from None
    except (TypeError, ValueError):
        raise UsageError(f"--{flag}={run} holds a {folder.CONFIG} that is damaged") from None
    for script in scripts:
        if stored.get("script") == script.name:
            with blame(flag, run):
                return script, launch.parse(script, [], stored)
    if "script" not in stored:
        raise UsageError(f"{wanted}; its {folder.CONFIG} is that of something else")
    raise UsageError(f"{wanted}, not of jaxrl-po {stored['script']}")


def state(
    script: Script, records: Mapping[str, Any], flag: str, run: str, kind: str
) -> tuple[jobs.Experiment, int, TrainState]:
    """The experiment of a run and its newest intact checkpoint of a kind, on one device.

    Args:
      script: the script that made the run.
      records: its settings, see `read`.
      flag: name of the flag that names its folder, for messages.
      run: the folder.
      kind: see `CHECKPOINTS`.

    Returns:
      `(experiment, iteration, state)`; leaves of the state `[S, …]`, but for what is frozen.

    Raises:
      UsageError: no such checkpoint, one of another version of the library, or a file of the
        user's own that is gone.
    """
    options = records[""]
    for file in user_code.files(vars(options)):
        if not file.is_file():
            raise UsageError(f"--{flag}={run} was made with {file}, which must be there again")
    one_device = Placement(options.seeds, 1, 1)
    with blame(flag, run):
        experiment = script.build(records, methods.ALGORITHMS[options.algorithm], one_device)
        job = jobs.make_job(
            experiment, options, one_device, iterations=1, steps_per_iteration=1, log_every=1
        )
        like = runner.without_frozen(jax.eval_shape(job.learner.init, job.keys))
        found = checkpoint.peek(Path(run) / "checkpoints" / kind, like)
    if found is None:
        raise UsageError(
            f"--checkpoint={kind}: --{flag}={run} holds no intact checkpoint of that kind; "
            "wait for one or choose the other kind"
        )
    return experiment, found[0], runner.with_frozen(found[1], job)


def initial_policy(
    script: Script, records: Mapping[str, Any], task: Task, policy: Transformer
) -> PyTree:
    """The policy parameters of the run that `--init_from` names.

    Args:
      script: `language`.
      records: prefix to record, of the run that begins.
      task: of that run.
      policy: its model.

    Raises:
      UsageError: its vocabulary or model differs, or it has no intact checkpoint.
    """
    run = records[""].init_from
    settings = read(script, "init_from", run)
    tokenizer = tasks.entry(settings[""].task).make(**vars(settings["task"])).tokenizer
    if tokenizer != task.tokenizer:
        raise UsageError(
            f"--init_from={run} must have the vocabulary of --task={records[''].task}, "
            f"{task.tokenizer}; it was trained on {settings[''].task}, {tokenizer}"
        )
    for name, mine in vars(records["model"]).items():
        its = vars(settings["model"])[name]
        # These two change how the model is computed, not its parameters.
        if mine != its and name not in ("dtype", "remat"):
            raise UsageError(
                f"--model.{name}={mine} must be {flags.shown(its)}, as in --init_from={run}"
            )
    with blame("init_from", run):
        found = checkpoint.peek_policy(
            Path(run) / "checkpoints" / "latest", policy.parameter_shapes(), seed_index=0
        )
    if found is None:
        raise UsageError(
            f"--init_from={run} holds no intact checkpoint; wait for one or choose another run"
        )
    return found


@contextlib.contextmanager
def blame(flag: str, run: str) -> Iterator[None]:
    """Inside, errors about stored settings or states become a `UsageError` that names the flag."""
    try:
        yield
    except UserCodeError as error:
        raise UsageError(f"--{flag}={run}: {error}") from None
    except (CheckpointError, ConfigError, UsageError) as error:
        raise UsageError(
            f"--{flag}={run} does not suit this version of the library: {error}"
        ) from None
