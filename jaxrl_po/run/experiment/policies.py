"""`load`: the policy of a run, to act in an environment or to answer prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, with_field_docs
from jaxrl_po.control.acting import Acting
from jaxrl_po.language import lora, sampling
from jaxrl_po.language.dialogue import TaskLike
from jaxrl_po.language.pretrained.text import TextTokenizer
from jaxrl_po.language.stopping import ends_of
from jaxrl_po.language.tokenizer import AnyTokenizer
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import select_seed
from jaxrl_po.run.experiment import control, earlier, flags, language, models
from jaxrl_po.run.experiment.control_config import ControlConfig
from jaxrl_po.run.experiment.experiment import DOMAINS, with_names
from jaxrl_po.run.experiment.language_config import LanguageConfig
from jaxrl_po.run.experiment.search_space import BEST
from jaxrl_po.run.loop.job import Evaluation, Layout, Length, build_job
from jaxrl_po.run.store import sources
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.run.store.folder import CONFIG, read_settings
from jaxrl_po.types import ActorCritic, Learner, TrainState, short_repr


@with_field_docs
class ControlPolicy(NamedTuple):
    """The policy of a run of `jaxrl-po control`.

    A policy pickles; unpickling needs the files that the settings name, but not the run's folder.

    Attributes:
      settings: Values of the run's settings, by flag name.
      iteration: Iteration of the checkpoint.
      params: `ActorCritic` of one seed.
      act: `act(observation, key=None) -> action`, jitted; maps an observation of the environment
        `[*shape]`, or a batch of observations `[B, *shape]`, to actions in the environment's own
        units and bounds. The action is the mode of the policy or, with a key (consumed), a sample.
        Observations are normalised as in training. An observation of another shape raises
        ConfigError, as does a policy with memory; see `step`.
      start: Memory at the start of an episode; () for a policy without memory.
      step: `step(memory, observation, key=None) -> (memory, action)`, acts with any policy.
      save: `save("policy.npz")`, writes parameters, statistics of observations and bounds of
        actions as arrays, see `control.acting.Acting.save`.
    """

    settings: dict[str, Any]
    iteration: int
    params: ActorCritic
    act: Callable[..., jax.Array]
    start: Any
    step: Callable[..., tuple[Any, jax.Array]]
    save: Callable[[str | Path], None]

    def __repr__(self) -> str:
        return describe_policy(self)


@with_field_docs
class LanguagePolicy(NamedTuple):
    """The policy of a run of `jaxrl-po language`; see `ControlPolicy` on pickling.

    Attributes:
      settings: Values of the run's settings, by flag name.
      iteration: Iteration of the checkpoint.
      params: `ActorCritic` of one seed.
      generate: `generate(prompts, key=None) -> completions`, lists of texts; completes greedily or,
        with a key (consumed), by sampling at the run's temperature. A prompt must consist of the
        task's characters or, with a pretrained model, be the output of the model's chat template;
        and must not be longer than the prompts of the task.
    """

    settings: dict[str, Any]
    iteration: int
    params: ActorCritic
    generate: Callable[..., list[str]]

    def __repr__(self) -> str:
        return describe_policy(self)


@with_field_docs
class LearnerState(NamedTuple):
    """State of one seed of a run of `run.train` with a user-defined learner.

    Attributes:
      settings: Values of the arguments of `run.train`, by name.
      iteration: Iteration of the checkpoint.
      params: `ActorCritic` of one seed.
      state: `TrainState` of one seed. An evaluation also needs `state.collector`, which holds the
        statistics of observations.
      act: function as in `ControlPolicy`, if the learner was built by a method's `make` on a
        control problem; `act`, `start` and `step` are lost when the record is pickled.
      start: Memory at the start of an episode; () for a policy without memory.
      step: function as in `ControlPolicy`.
      save: function as in `ControlPolicy`.
    """

    settings: dict[str, Any]
    iteration: int
    params: ActorCritic
    state: TrainState
    act: Callable[..., jax.Array]
    start: Any
    step: Callable[..., tuple[Any, jax.Array]]
    save: Callable[[str | Path], None]


LearnerState.__repr__ = short_repr  # type: ignore[method-assign]


def describe_policy(policy: ControlPolicy | LanguagePolicy) -> str:
    """Returns a line with the method, iteration and number of parameters of a policy."""
    what = policy.settings.get("env") or policy.settings.get("task")
    size = sum(leaf.size for leaf in jax.tree.leaves(policy.params.without_frozen()))
    return (
        f"{type(policy).__name__}({policy.settings['algorithm']} on {what}, iteration "
        f"{policy.iteration}, {size:,} parameters)"
    )


@overload
def load(  # noqa: D418
    folder: str | Path, *, checkpoint: str = "best", seed_index: int = 0, learner: Learner
) -> LearnerState:
    """Returns the state of one seed of a run with a user-defined learner."""


@overload
def load(  # noqa: D418
    folder: str | Path, *, checkpoint: str = "best", seed_index: int = 0, **own: Any
) -> ControlPolicy | LanguagePolicy:
    """Returns the policy of one seed of a run."""


def load(
    folder: str | Path,
    *,
    checkpoint: str = "best",
    seed_index: int = 0,
    learner: Learner | None = None,
    **own: Any,
) -> ControlPolicy | LanguagePolicy | LearnerState:
    """Returns the policy of one seed of a run.

    Args:
      folder: Folder of a run of `run.train`, `jaxrl-po control` or `jaxrl-po language`; or of a
        sweep with `exploit_every`, whose best member is loaded.
      checkpoint: "best" (the highest mean score over seeds, the later of equals), which is the
        latest checkpoint if the run has no score; or "latest". The result's `iteration` tells which
        checkpoint was read.
      seed_index: Index of one of the run's seeds, from 0.
      learner: Learner of a run of `run.train(learner, …)`, since the run's folder does not hold it.
      own: Flags of contents that the folder lacks: Python objects, such as `env`, and new paths of
        files and folders that were moved, whose content must be the same.

    Returns:
      The policy, with `act` or `generate`; or a `LearnerState` for a user-defined learner.

    Raises:
      ConfigError: The run, checkpoint or seed does not exist, or does not suit this version of the
        library.
    """
    if checkpoint not in earlier.CHECKPOINTS:
        raise ConfigError(
            "checkpoint", f"must be one of {', '.join(earlier.CHECKPOINTS)}, got {checkpoint!r}"
        )
    for name in own.keys() - {*sources.FLAGS, *sources.PATHS}:
        known = ", ".join(("checkpoint", "seed_index", "learner", *sources.FLAGS, *sources.PATHS))
        raise ConfigError(name, f"is not an argument of load: {known}")
    if learner is None and (Path(folder) / BEST / CONFIG).exists():  # a population
        folder = Path(folder) / BEST
    if learner is not None:
        return _of_learner(learner, str(folder), checkpoint, seed_index)
    domain, config = earlier.read_any(DOMAINS.values(), "folder", str(folder), with_names(own))
    earlier.require_seed("seed_index", seed_index, config.run.seeds, "folder", str(folder))
    _, iteration, stacked = earlier.state(domain, config, "folder", str(folder), checkpoint)
    state, settings = select_seed(stacked, seed_index), flags.flatten(config.sections())
    if isinstance(config, ControlConfig):
        acting = acting_of(config, state)
        functions = acting.act, acting.start, acting.step, acting.save
        return ControlPolicy(settings, iteration, state.params, *functions)
    assert isinstance(config, LanguageConfig)
    generate = _Generating(config, state.params).generate
    return LanguagePolicy(settings, iteration, state.params, generate)


def _of_learner(learner: Learner, run: str, kind: str, seed_index: int) -> LearnerState:
    """Reads the folder of a user-defined learner's run; raises ConfigError for any other run."""
    settings = read_settings(Path(run), "folder", "run.train")
    if (made := settings.get("script")) != earlier.TRAIN:
        raise ConfigError("learner", f"must be left out: {run} holds a run of {made}")
    layout = Layout(Placement(settings["seeds"], 1, 1))
    earlier.require_seed("seed_index", seed_index, settings["seeds"], "folder", run)
    evaluation = Evaluation(None, score=settings.get("score", ""))
    job = build_job(learner, layout, Length(0, 1), seed=settings["seed"], evaluation=evaluation)
    try:
        iteration, stacked = earlier.state_of(job, "folder", run, kind)
    except CheckpointError as error:
        raise ConfigError("learner", f"must be the learner of the run in {run}: {error}") from None
    state = select_seed(stacked, seed_index)
    acting = Acting(learner.problem, state, settings=settings)
    functions = acting.act, acting.start, acting.step, acting.save
    return LearnerState(settings, iteration, state.params, state, *functions)


def acting_of(config: ControlConfig, state: TrainState) -> Acting:
    """Builds the functions of a `ControlPolicy`, which pickle as these arguments.

    Args:
      config: Settings of the run.
      state: State of one seed; only the parameters and the statistics of observations are read.
    """
    problem = control.build_problem(config, control.open_world(config))
    collector = state.collector._replace(sharded={})  # drops environments, which `act` ignores
    state = state._replace(collector=collector, reference_params=None)
    return Acting(
        problem,
        state,
        name=config.run.env,
        settings=flags.flatten(config.sections()),
        rebuild=(acting_of, (config, state)),
    )


class _Generating:
    """Builds the field `generate` of a `LanguagePolicy`, which pickles as the arguments."""

    def __init__(self, config: LanguageConfig, params: ActorCritic):
        self._arguments = config, params
        base = models.read_base(config.initial.pretrained, config.model)
        task = models.make_task(config, base, answers=False)
        model = models.bare_model(config, base, task).clone(lora=config.lora.lora)
        settings = language.problem_settings(config, task, base)
        budget = settings.max_new_tokens or task.answer_length

        @jax.jit
        def complete(
            prompt: jax.Array, pad: jax.Array, key: jax.Array | None
        ) -> sampling.Completions:
            return sampling.generate(
                lora.over(model, params.frozen),
                params.variables("policy"),
                prompt,
                pad,
                jax.random.split(jax.random.key(0) if key is None else key, prompt.shape[0]),
                group_size=1,
                decoding=settings.decoding._replace(max_new_tokens=budget),
                eos=ends_of(task.tokenizer),
                pad_token=task.tokenizer.pad,
                greedy=key is None,
            )

        self._complete, self._task, self._budget = complete, task, budget

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments

    def generate(self, prompts: Sequence[str], key: jax.Array | None = None) -> list[str]:
        tokens, pad = _left_padded(prompts, self._task)
        completions = self._complete(jnp.asarray(tokens), jnp.asarray(pad), key)
        within = np.arange(self._budget) < np.asarray(completions.length)[:, None]
        within &= ~np.isin(completions.tokens, self._task.tokenizer.ends)
        return self._task.tokenizer.decode_rows(np.asarray(completions.tokens), within)


def _encode(tokenizer: AnyTokenizer, prompt: str) -> list[int]:
    """Returns token ids, with tokens that a pretrained tokenizer adds to any text, such as BOS.

    The tokens are not added twice to a prompt that a chat template has written with them.
    """
    if isinstance(tokenizer, TextTokenizer):
        return tokenizer.encode(prompt, special=True)
    return tokenizer.encode(prompt)


def _left_padded(
    prompts: Sequence[str], task: TaskLike
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Returns tokens `[P, L]` and the numbers of padding tokens on the left `[P]`."""
    if isinstance(prompts, str):
        raise ConfigError("prompts", "must be a list of texts, got one text: put it into a list")
    rows = [_encode(task.tokenizer, prompt) for prompt in prompts]
    longest = task.prompt_length
    for prompt, row in zip(prompts, rows, strict=True):
        if len(row) > longest:
            raise ConfigError(
                "prompts",
                f"must have at most {longest} tokens, as those of the run's task, got {len(row)}, "
                f"{prompt!r}; train on longer prompts to raise this",
            )
    pad = np.array([longest - len(row) for row in rows], np.int32)
    filled = [[task.tokenizer.pad] * (longest - len(row)) + row for row in rows]
    return np.array(filled, np.int32).reshape(len(rows), longest), pad
