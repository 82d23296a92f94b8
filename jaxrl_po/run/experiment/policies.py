"""`load`: the policy of a run, to act in an environment or to answer prompts."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_po.config import ConfigError, with_field_docs
from jaxrl_po.control import environment
from jaxrl_po.control.actor import actor_of, play
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
from jaxrl_po.run.loop.job import Layout, Length, build_job
from jaxrl_po.run.store import sources
from jaxrl_po.run.store.checkpoint import CheckpointError
from jaxrl_po.run.store.folder import read_settings
from jaxrl_po.types import ActorCritic, CollectorState, Learner, PyTree, TrainState, short_repr


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
        units. The action is the mode of the policy or, with a key (consumed), a sample.
        Observations are normalised as in training. An observation of another shape raises
        ConfigError, as does a policy with memory; see `step`.
      start: Memory at the start of an episode; () for a policy without memory.
      step: `step(memory, observation, key=None) -> (memory, action)`, acts with any policy.
    """

    settings: dict[str, Any]
    iteration: int
    params: ActorCritic
    act: Callable[..., jax.Array]
    start: Any
    step: Callable[..., tuple[Any, jax.Array]]

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
      state: `TrainState` of one seed. Acting and evaluating also need `state.collector`, which
        holds the statistics of observations.
    """

    settings: dict[str, Any]
    iteration: int
    params: ActorCritic
    state: TrainState


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
      folder: Folder of a run of `run.train`, `jaxrl-po control` or `jaxrl-po language`.
      checkpoint: "best" (the highest mean score over seeds, the later of equals) or "latest".
      seed_index: Index of one of the run's seeds, from 0.
      learner: Learner of a run of `run.train(learner, …)`, since the run's folder does not hold it.
      own: Flags of contents that the folder lacks: Python objects, such as `env`, and new paths of
        files and folders that were moved, whose content must be the same.

    Returns:
      The policy, with `act` or `generate`; or a `LearnerState` for a user-defined learner.

    Raises:
      ConfigError: The run, checkpoint or seed does not exist, or another version of the library
        made the run.
    """
    if checkpoint not in earlier.CHECKPOINTS:
        raise ConfigError(
            "checkpoint", f"must be one of {', '.join(earlier.CHECKPOINTS)}, got {checkpoint!r}"
        )
    for name in own.keys() - {*sources.FLAGS, *sources.PATHS}:
        known = ", ".join(("checkpoint", "seed_index", "learner", *sources.FLAGS, *sources.PATHS))
        raise ConfigError(name, f"is not an argument of load: {known}")
    if learner is not None:
        return _of_learner(learner, str(folder), checkpoint, seed_index)
    domain, config = earlier.read_any(DOMAINS.values(), "folder", str(folder), with_names(own))
    earlier.require_seed("seed_index", seed_index, config.run.seeds, "folder", str(folder))
    _, iteration, stacked = earlier.state(domain, config, "folder", str(folder), checkpoint)
    state, settings = select_seed(stacked, seed_index), flags.flatten(config.sections())
    if isinstance(config, ControlConfig):
        collector = state.collector._replace(sharded={})  # drops environments, which `act` ignores
        actor = _Acting(config, state.params, collector)
        return ControlPolicy(settings, iteration, state.params, actor.act, actor.start, actor.step)
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
    job = build_job(learner, layout, Length(0, 1), seed=settings["seed"])
    try:
        iteration, stacked = earlier.state_of(job, "folder", run, kind)
    except CheckpointError as error:
        raise ConfigError("learner", f"must be the learner of the run in {run}: {error}") from None
    state = select_seed(stacked, seed_index)
    return LearnerState(settings, iteration, state.params, state)


class _Rebuilt:
    """Functions of a policy, which pickle as the arguments that the functions are built from."""

    _arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self._arguments


class _Acting(_Rebuilt):
    """Builds the fields `act`, `start` and `step` of a `ControlPolicy`.

    Args:
      config: Settings of the run.
      params: `ActorCritic` of one seed.
      collector: `CollectorState` with the statistics of observations.
    """

    def __init__(self, config: ControlConfig, params: ActorCritic, collector: CollectorState):
        self._arguments = config, params, collector
        world = control.open_world(config)
        problem, spaces = control.build_problem(config, world), world.spaces
        actor = actor_of(problem)

        @jax.jit
        def choose(memory: Any, observation: Any, key: jax.Array | None) -> tuple[Any, jax.Array]:
            row = jax.tree.map(lambda x: x[None], (memory, spaces.observe(observation)))
            after, distribution = actor.act(params, collector, *row)
            action = distribution.mode() if key is None else distribution.sample(key)
            one = jax.tree.map(lambda x: x[0], (after, play(distribution, action)))
            return one[0], spaces.to_action(one[1])

        self._choose, self._spaces, self._env = choose, spaces, config.run.env
        self.start = jax.tree.map(lambda x: x[0], actor.start(1))

    def _shapes_of(self, observation: PyTree) -> PyTree:
        # A discrete observation is a number, which the policy reads as a one-hot vector.
        return environment.shapes(jax.eval_shape(self._spaces.observe, observation))

    def step(
        self, memory: PyTree, observation: PyTree, key: jax.Array | None = None
    ) -> tuple[PyTree, jax.Array]:
        seen = self._shapes_of(observation)
        expected = environment.shapes(self._spaces.observation)
        if seen != expected:
            given = environment.shapes(jax.tree.map(np.asarray, observation))
            if isinstance(expected, list) and isinstance(given, list):
                expected = expected[: len(expected) - (len(seen) - len(given))]
            raise ConfigError(
                "observation",
                f"must have the shape {expected} of one observation of {self._env}, or for act of "
                f"a batch of them, got {given}",
            )
        return self._choose(memory, observation, key)

    def _is_batch(self, observation: PyTree) -> bool:
        if self._shapes_of(observation) == environment.shapes(self._spaces.observation):
            return False
        if not all(map(np.ndim, jax.tree.leaves(observation))):
            return False
        first = jax.eval_shape(lambda each: jax.tree.map(lambda x: x[0], each), observation)
        return self._shapes_of(first) == environment.shapes(self._spaces.observation)

    def act(self, observation: PyTree, key: jax.Array | None = None) -> jax.Array:
        if jax.tree.leaves(self.start):
            raise ConfigError(
                "act",
                "must be replaced by step for a policy with memory: memory, action = "
                "policy.step(memory, observation), from policy.start",
            )
        if not self._is_batch(observation):
            return self.step(self.start, observation, key)[1]
        keys = None if key is None else jax.random.split(key, len(jax.tree.leaves(observation)[0]))
        axes = (None, 0, None if key is None else 0)
        return jax.vmap(self._choose, in_axes=axes)(self.start, observation, keys)[1]


class _Generating(_Rebuilt):
    """Builds the field `generate` of a `LanguagePolicy`; see `_Acting`."""

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
