"""Settings and states of earlier runs, with errors that name the flag of an unsuitable run."""

import dataclasses
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import cast

import jax

from jaxrl_po import variables
from jaxrl_po.config import ConfigError, Json
from jaxrl_po.control import statistics
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import of_seed
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.experiment import assembly, flags, settings, user_code
from jaxrl_po.run.experiment.assembly import Command, Config, OptionsOf, Script, World
from jaxrl_po.run.experiment.language_config import LanguageConfig
from jaxrl_po.run.experiment.options import Options, RunConfig
from jaxrl_po.run.loop import programs
from jaxrl_po.run.store import checkpoint, folder, provenance, sources
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.types import ActorCritic, CollectorState, Problem, PyTree, TrainState

TRAIN = "train"  # what made the run of a learner of the user's own
CHECKPOINTS = ("best", "latest")
WHICH = (
    "each holds all seeds at one iteration, and best is the one with the highest mean score "
    "over seeds"
)


class NoCheckpoint(ConfigError):
    """The folder of a run holds no checkpoint of a kind."""


def read(script: Script[OptionsOf, Config, World], flag: str, run: str) -> Config:
    """Returns the config of an earlier run of a command.

    Args:
      script: Command that made the run.
      flag: name of the flag that names its folder, for messages.
      run: the folder.

    Raises:
      ConfigError: not a run of that script, or one of another version of the library; names the
        flag.
    """
    return cast(Config, read_any([script], flag, run)[1])


def read_any(
    scripts: Collection[Command], flag: str, run: str, own: Mapping[str, object] = {}
) -> tuple[Command, RunConfig]:
    """Returns the command among several that made an earlier run, and its config; see `read`.

    `own` are objects of Python that are given again, and new paths of files and folders, by flag.
    """
    script, stored = maker(scripts, flag, run)
    stored = flags.current(stored, {"": script.options})
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    of_files = {x for x in code if sources.in_file(stored.get(x, ""))}
    anew = {x: path for x, path in sources.absolute(own).items() if x in of_files}
    folder.require_same(anew, stored, {}, run)
    try:
        return script, settings.read(
            script, {}, stored={**stored, **own, **sources.absolute(own)}
        ).config
    except ConfigError as error:
        raise unsuitable(flag, run, error) from None


def maker(scripts: Collection[Command], flag: str, run: str) -> tuple[Command, Json]:
    """Returns the script among several that made an earlier run, and its settings as stored."""
    makers = " or ".join(f"jaxrl-po {script.name}" for script in scripts)
    if not run:
        raise ConfigError(flag, f"must name the folder of a run of {makers}, e.g. runs/first")
    found = folder.read_settings(Path(run), flag, makers)
    made = found.get("script", "something else")
    for script in scripts:
        if made == script.name:
            return script, found
    if made == TRAIN:
        raise ConfigError(
            flag,
            f"{run} holds a run of run.train, whose learner is not stored: in Python, "
            "run.load(folder, learner=…) gives its parameters",
        )
    raise ConfigError(flag, f"must be the folder of a run of {makers}, got {run} of {made}")


def state(
    script: Command, config: RunConfig, flag: str, run: str, kind: str
) -> tuple[assembly.Setup, int, TrainState]:
    """The experiment of a run and its newest intact checkpoint of a kind, on one device.

    The optimizer state, which only training needs, is not restored.

    Args:
      script: Command that made the run.
      config: Settings of the run, see `read`.
      flag: name of the flag that names its folder, for messages.
      run: the folder.
      kind: see `CHECKPOINTS`.

    Returns:
      `(experiment, iteration, state)`; leaves of the state `[S, …]`, but for what is frozen.

    Raises:
      ConfigError: no such checkpoint, one of another version of the library, a file of the user
        that is gone, or another base or, at a new path, other prompts than the run had.
    """
    no_loss: Json = dict.fromkeys(user_code.LOSS, "")  # only training needs it
    options = dataclasses.replace(config.run, **no_loss)
    config = dataclasses.replace(config, run=options)
    values = flags.flatten(config.sections())
    for file in sources.files(values):
        if not os.path.isfile(file):
            raise ConfigError(
                flag,
                f"{run} was made with {file}, which must be there again; if it was moved, resume "
                "the run once with its new path, or give that to run.load",
            )
    parallel.device_count()
    try:
        placement = Placement(options.seeds, 1, 1)
        config = script.continued(config)
        if isinstance(config, LanguageConfig):  # kernels are for training, and may not be here
            model = dataclasses.replace(config.model, fused_attention=False)
            config = dataclasses.replace(config, model=model)
        experiment = script.build(config, placement, script.open_world(config))
        require_base(experiment.base, flag, run)
        stored = folder.read_settings(Path(run), flag)
        # Elsewhere a file may change, and the text of a chat template with today's date does.
        if any(values.get(name, "") != stored.get(name, "") for name in sources.DATA):
            before = stored.get("resolved", {})
            provenance.require_data(provenance.PROMPTS, experiment.prompts, before, flag, run)
        of_run = dataclasses.replace(options, out=run)
        return experiment, *state_of(experiment, of_run, flag, kind, optimizer=False)
    except (CheckpointError, ConfigError) as error:
        # Those two functions name the run.
        if isinstance(error, NoCheckpoint) or getattr(error, "field", "") == flag:
            raise
        raise unsuitable(flag, run, error) from None


def state_of(
    setup: assembly.Setup, options: Options, flag: str, kind: str, *, optimizer: bool = True
) -> tuple[int, TrainState]:
    """The iteration and the state of the newest intact checkpoint of a kind, on one device.

    Args:
      setup: of the run.
      options: of the run, whose `out` is its folder.
      flag: name of the flag that names its folder, for messages.
      kind: see `CHECKPOINTS`.
      optimizer: whether to restore the optimizer state, which is None otherwise.

    Raises:
      ConfigError: no such checkpoint.
      CheckpointError: it is that of another learner.
    """
    job = assembly.make_job(setup, options, Placement(options.seeds, 1, 1))
    like = jax.eval_shape(job.learner.init, job.start).with_frozen(None)
    like, without = (like, "") if optimizer else (like._replace(opt_state=None), ".opt_state")
    found = checkpoint.peek(Path(options.out) / "checkpoints" / kind, like, without=without)
    if found is None:
        raise NoCheckpoint(
            "checkpoint",
            f"{flag} = {options.out} holds no intact {kind} checkpoint; wait for one or choose "
            "the other kind",
        )
    return found[0], programs.with_frozen(found[1], job)


def require_seed(name: str, index: int, seeds: int, flag: str, run: str) -> None:
    """Raises ConfigError unless the flag `name` is the index of one of a run's seeds."""
    if not 0 <= index < seeds:
        raise ConfigError(name, f"must be below {seeds}, the seeds of {flag} = {run}, got {index}")


def require_base(digest: str, flag: str, run: str) -> None:
    """Raises ConfigError unless the adapters of a run were trained over the base with this digest.

    Args:
      digest: of the base as it is now; empty where the run has no adapters.
      flag: name of the flag that names the run, for messages.
      run: its folder.
    """
    stored = folder.read_settings(Path(run), flag)
    provenance.require_data(provenance.BASE, digest, stored.get("resolved", {}), flag, run)


def unsuitable(flag: str, run: str, error: Exception) -> ConfigError:
    """Returns the error for a run with unsuitable settings or an unsuitable state."""
    other_version = not isinstance(error, UserCodeError)
    why = " does not suit this version of the library" if other_version else ""
    return ConfigError(flag, f"{run}{why}: {error}")


def begun(script: Command, problem: Problem, run: str) -> Problem:
    """The problem whose parameters, and statistics of observations, are those a run ended with.

    A critic of other shapes, or where that run has none, begins afresh.

    Args:
      script: that made the run.
      problem: of the run that begins.
      run: the folder.

    Raises:
      ConfigError: the policy has other shapes, only one of them normalises observations, or the
        run has no intact checkpoint.
    """
    config = read(script, "init_from", run)
    try:
        saved = of_seed(state(script, config, "init_from", run, "latest")[2])
    except NoCheckpoint:
        raise ConfigError(
            "init_from", f"{run} holds no intact checkpoint; wait for one, or choose another run"
        ) from None
    fresh, collector = jax.eval_shape(problem.init, jax.random.key(0))
    its, ours = (_shapes(params.variables("policy")) for params in (saved.params, fresh))
    for name in sorted(its.keys() | ours.keys()):
        if its.get(name) != ours.get(name):
            raise ConfigError(
                "init_from",
                f"the policy of {run} has {its.get(name, 'nothing')} at {name}, and this one "
                f"{ours.get(name, 'nothing')}: give env and network of that run",
            )
    kept = statistics.OBSERVATION_STATISTICS
    if (kept in saved.collector.replicated) != (kept in collector.replicated):
        was = errors.shown(kept in saved.collector.replicated)
        raise ConfigError(
            "problem.normalize_observations", f"must be {was}, as in init_from = {run}"
        )
    of_run = {kept: saved.collector.replicated[kept]} if kept in collector.replicated else {}
    same_critic = _shapes(saved.params.variables("value")) == _shapes(fresh.variables("value"))

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        critic = saved.params._replace(frozen=params.frozen) if same_critic else params
        begins = variables.with_critic(saved.params, critic)
        return begins, collector._replace(replicated={**collector.replicated, **of_run})

    return problem._replace(init=init)


def _shapes(params: PyTree) -> dict[str, list[int]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in leaves}
