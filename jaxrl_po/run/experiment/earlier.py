"""Settings and states of earlier runs, with errors that name the flag of an unsuitable run."""

import dataclasses
import os
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import jax

from jaxrl_po import variables
from jaxrl_po.config import ConfigError, Json
from jaxrl_po.control import statistics
from jaxrl_po.run import errors
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.errors import UserCodeError
from jaxrl_po.run.experiment import flags, settings
from jaxrl_po.run.experiment.language_config import LanguageConfig
from jaxrl_po.run.experiment.options import RunConfig
from jaxrl_po.run.experiment.settings import Config, Domain
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.store import checkpoint, folder, provenance, sources
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.types import ActorCritic, CollectorState, Problem, PyTree, TrainState

TRAIN = "train"  # stored command name of a run with a user-defined learner
CHECKPOINTS = ("best", "latest")
WHICH = (
    "a checkpoint holds all seeds at one iteration, and the best checkpoint has the highest mean "
    "score over seeds"
)


class NoCheckpoint(ConfigError):
    """The folder of a run holds no intact checkpoint of the wanted kind."""


def read_config(domain: Domain[Config], flag: str, run: str) -> Config:
    """Returns the config of an earlier run of a command.

    Args:
      domain: Domain of the run.
      flag: Name of the flag that names the run's folder, for messages.
      run: Folder of the run.

    Raises:
      ConfigError: The folder holds no run of that domain, or a run of another version of the
        library; the error names the flag.
    """
    return cast(Config, read_any([domain], flag, run)[1])


def read_any(
    domains: Collection[Domain[Any]], flag: str, run: str, own: Mapping[str, object] = {}
) -> tuple[Domain[Any], RunConfig[Any]]:
    """Returns the domain, one of `domains`, and the config of an earlier run; see `read_config`.

    `own` holds objects of Python that the user passes again, and new paths of files, by flag.
    """
    domain, stored = maker(domains, flag, run)
    stored = flags.current(stored, {"": domain.OPTIONS})
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    of_files = {x for x in code if sources.in_file(stored.get(x, ""))}
    anew = {x: path for x, path in sources.absolute(own).items() if x in of_files}
    folder.require_same(anew, stored, {}, run)
    try:
        values = {**stored, **own, **sources.absolute(own)}
        return domain, settings.merge_settings(domain, {}, stored=values).config
    except ConfigError as error:
        raise unsuitable(flag, run, error) from None


def maker(domains: Collection[Domain[Any]], flag: str, run: str) -> tuple[Domain[Any], Json]:
    """Returns the domain, one of `domains`, and the stored settings of an earlier run."""
    makers = " or ".join(f"jaxrl-po {domain.NAME}" for domain in domains)
    if not run:
        raise ConfigError(flag, f"must name the folder of a run of {makers}, e.g. runs/first")
    found = folder.read_settings(Path(run), flag, makers)
    made = found.get("script", "something else")
    for domain in domains:
        if made == domain.NAME:
            return domain, found
    if made == TRAIN:
        raise ConfigError(
            flag,
            f"{run} holds a run of run.train, whose learner is not stored: in Python, "
            "run.load(folder, learner=…) gives its parameters",
        )
    raise ConfigError(flag, f"must be the folder of a run of {makers}, got {run} of {made}")


def state(
    domain: Domain[Any], config: RunConfig[Any], flag: str, run: str, kind: str
) -> tuple[TrainJob, int, TrainState]:
    """Returns the job of a run and its newest intact checkpoint of a kind, on one device.

    The optimizer state, which only training needs, is not restored.

    Args:
      domain: Domain of the run.
      config: Settings of the run, see `read_config`.
      flag: Name of the flag that names the run's folder, for messages.
      run: Folder of the run.
      kind: Name of the checkpoint, one of `CHECKPOINTS`.

    Returns:
      `(job, iteration, state)`; leaves of the state `[S, …]`, except frozen parameters.

    Raises:
      ConfigError: The run lacks the checkpoint; the checkpoint is from another version of the
        library; a file of the user is gone; or the base model, or the prompts at a new path, differ
        from the run's.
    """
    no_loss: Json = dict.fromkeys(sources.LOSS, "")  # only training needs the parts of the loss
    options = dataclasses.replace(config.run, **no_loss)
    config = dataclasses.replace(config, run=options)
    values = flags.flatten(config.sections())
    for file in sources.files(values):
        if not os.path.isfile(file):
            raise ConfigError(
                flag,
                f"{run} needs {file}, which is missing; if it was moved, resume the run once with "
                "its new path, or give that to run.load",
            )
    stored = folder.read_settings(Path(run), flag)
    code = stored.get("resolved", {}).get(sources.DIGESTS, {})
    read = sources.digests({**values, "reward": ""})  # only training calls the reward
    if changes := provenance.differences(read, code):
        print(f"note: {run} was made with other code: {'; '.join(changes)}", file=sys.stderr)
    parallel.device_count()
    try:
        config = config.continued()
        if isinstance(config, LanguageConfig):  # kernels serve training, and may be missing here
            model = dataclasses.replace(config.model, fused_attention=False)
            config = dataclasses.replace(config, model=model)
        placement = Placement(options.seeds, 1, 1)
        job = domain.build(config, placement, domain.open_world(config))
        # A file in its old place may change, as may the text of a chat template with today's date.
        moved = any(values.get(name, "") != stored.get(name, "") for name in sources.DATA)
        for entry, digest in job.digests.items():
            if entry == provenance.BASE or moved:
                provenance.require_data(entry, digest, stored.get("resolved", {}), flag, run)
        return job, *state_of(job, flag, run, kind, optimizer=False)
    except (CheckpointError, ConfigError) as error:
        # `require_data` and `state_of` already name the run in their errors.
        if isinstance(error, NoCheckpoint) or getattr(error, "field", "") == flag:
            raise
        raise unsuitable(flag, run, error) from None


def state_of(
    job: TrainJob, flag: str, run: str, kind: str, *, optimizer: bool = True
) -> tuple[int, TrainState]:
    """Returns the iteration and the training state of the newest intact checkpoint of a kind.

    Args:
      job: Job of the run, on one device.
      flag: Name of the flag that names the run's folder, for messages.
      run: Folder of the run.
      kind: Name of the checkpoint, one of `CHECKPOINTS`; the best checkpoint of a run without a
        score is the latest.
      optimizer: Whether to restore the optimizer state, which is None otherwise.

    Raises:
      ConfigError: The run has no intact checkpoint of that kind.
      CheckpointError: The checkpoint belongs to another learner.
    """
    if not job.evaluation.score:  # no checkpoint is the best one
        kind = "latest"
    like = jax.eval_shape(job.learner.init, job.start).with_frozen(None)
    like, without = (like, "") if optimizer else (like._replace(opt_state=None), ".opt_state")
    found = checkpoint.peek(Path(run) / "checkpoints" / kind, like, without=without)
    if found is None:
        raise NoCheckpoint(
            "checkpoint",
            f"{flag} = {run} holds no intact {kind} checkpoint; wait for one or choose "
            "the other kind",
        )
    return found[0], programs.with_frozen(found[1], job)


def require_seed(name: str, index: int, seeds: int, flag: str, run: str) -> None:
    """Raises ConfigError unless `index`, the value of the flag `name`, is one of a run's seeds."""
    if not 0 <= index < seeds:
        raise ConfigError(name, f"must be below {seeds}, the seeds of {flag} = {run}, got {index}")


def require_base(digest: str, flag: str, run: str) -> None:
    """Raises ConfigError unless the adapters of a run were trained over the base with this digest.

    Args:
      digest: Digest of the present base model; empty for a run without adapters.
      flag: Name of the flag that names the run, for messages.
      run: Folder of the run.
    """
    stored = folder.read_settings(Path(run), flag)
    provenance.require_data(provenance.BASE, digest, stored.get("resolved", {}), flag, run)


def unsuitable(flag: str, run: str, error: Exception) -> ConfigError:
    """Returns the error for a run with unsuitable settings or an unsuitable state."""
    other_version = not isinstance(error, UserCodeError)
    why = " does not suit this version of the library" if other_version else ""
    return ConfigError(flag, f"{run}{why}: {error}")


def init_from_run(domain: Domain[Any], problem: Problem, run: str) -> Problem:
    """Returns a problem that starts with the parameters and statistics of an earlier run.

    The critic starts from new parameters if the earlier run has no critic of the same shapes.

    Args:
      domain: Domain of the earlier run.
      problem: Problem of the run that starts.
      run: Folder of the earlier run.

    Raises:
      ConfigError: The policy has other shapes, only one of the two runs normalises observations, or
        the earlier run has no intact checkpoint.
    """
    config = read_config(domain, "init_from", run)
    try:
        saved = select_seed(state(domain, config, "init_from", run, "latest")[2])
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
        was = errors.spell(kept in saved.collector.replicated)
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
