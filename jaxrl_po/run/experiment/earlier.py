"""Settings and states of earlier runs, with errors that name the flag of an unsuitable run."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_po.config import ConfigError
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import assembly, flags, methods, plan, user_code
from jaxrl_po.run.experiment.assembly import Script
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.experiment.user_code import UserCodeError
from jaxrl_po.run.loop import runner
from jaxrl_po.run.store import checkpoint, folder, provenance
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.types import TrainState

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
    script, stored = maker(scripts, flag, run)
    with blame(flag, run):
        return script, plan.parse(script, [], stored)


def maker(scripts: Sequence[Script], flag: str, run: str) -> tuple[Script, dict[str, Any]]:
    """The script among several that made an earlier run, and its settings as stored; see `read`."""
    makers = " or ".join(f"jaxrl-po {script.name}" for script in scripts)
    if not run:
        raise UsageError(
            f"--{flag} must name the folder of a run of {makers}, e.g. --{flag}=runs/first"
        )
    wanted = f"--{flag}={run} must be the folder of a run of {makers}"
    try:
        stored = folder.read_settings(Path(run))
    except OSError:
        raise UsageError(f"{wanted}; it holds no {folder.CONFIG}") from None
    except ValueError:
        raise UsageError(f"--{flag}={run} holds a {folder.CONFIG} that is damaged") from None
    folder.require_links(f"--{flag}={run}", Path(run))
    for script in scripts:
        if stored.get("script") == script.name:
            return script, stored
    if "script" not in stored:
        raise UsageError(f"{wanted}; its {folder.CONFIG} is that of something else")
    raise UsageError(f"{wanted}, not of jaxrl-po {stored['script']}")


def state(
    script: Script, records: Mapping[str, Any], flag: str, run: str, kind: str
) -> tuple[assembly.Setup, int, TrainState]:
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
    settings = flags.flatten(records)
    data = [Path(settings[name]) for name in user_code.DATA if settings.get(name)]
    for file in [*user_code.files(vars(options)), *data]:
        if not file.is_file():
            raise UsageError(
                f"--{flag}={run} was made with {file}, which must be there again, "
                "or unchanged in the current folder"
            )
    parallel.device_count()
    one_device = Placement(options.seeds, 1, 1)
    with blame(flag, run):
        experiment = script.build(records, methods.ALGORITHMS[options.algorithm], one_device)
        job = assembly.make_job(
            experiment, options, one_device, iterations=1, steps_per_iteration=1, log_every=1
        )
        like = runner.without_frozen(jax.eval_shape(job.learner.init, job.start))
        found = checkpoint.peek(Path(run) / "checkpoints" / kind, like)
    require_base(experiment.base, flag, run)
    if found is None:
        raise UsageError(
            f"--checkpoint={kind}: --{flag}={run} holds no intact checkpoint of that kind; "
            "wait for one or choose the other kind"
        )
    return experiment, found[0], runner.with_frozen(found[1], job)


def require_base(digest: str, flag: str, run: str) -> None:
    """Raises UsageError unless the adapters of a run were trained over the base with this digest.

    Args:
      digest: of the base as it is now; empty where the run has no adapters.
      flag: name of the flag that names the run, for messages.
      run: its folder.
    """
    stored = json.loads((Path(run) / folder.CONFIG).read_text(encoding="utf-8"))
    provenance.require_data(provenance.BASE, digest, stored.get("resolved", {}), f"--{flag}={run}")


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
