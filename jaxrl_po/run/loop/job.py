"""`TrainJob`: all parts of a run, over all seeds and devices, as data."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Json, Values
from jaxrl_po.language.warm_start import WarmStart, WarmStartState
from jaxrl_po.run.data.scoring import Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import STATE_AXES, map_stacked, select_seed
from jaxrl_po.run.devices.sharding import LogicalAxes
from jaxrl_po.run.store.exporters import Exporter
from jaxrl_po.types import ActorCritic, CollectorState, Learner, Metrics, PyTree, Row, TrainState

Step = Callable[[TrainState], tuple[TrainState, Metrics]]
Iterate = Callable[[Step, TrainState], tuple[TrainState, Metrics]]
Measure = Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, Any]]


class Rollouts(Protocol):
    """Host side of an iteration, which records the batch that `sample` returns."""

    def recording(self) -> PyTree:
        """Returns the shapes and dtypes of the recording of an iteration."""

    def compile(self, like: TrainState) -> None:
        """Compiles the programs that act; `like` has the shapes of the training state."""

    def record(self, state: TrainState, report: Callable[[str], None]) -> tuple[TrainState, PyTree]:
        """Plays one iteration; raises PoolError if an environment failed."""

    def with_recording(self, state: TrainState, recording: PyTree) -> TrainState:
        """Returns the state with the recording that becomes the batch of the next `collect`."""

    def metrics(self, seconds: float) -> Metrics:
        """Returns metrics `[S]` of the last recorded iteration, which took `seconds` seconds."""

    def evaluate(self, state: TrainState, later_seed: int | None = None) -> Json:
        """Returns values `{name: [S, n]}`; evaluations after the run give their `later_seed`."""

    @property
    def examples(self) -> Examples | None:
        """Returns the examples that the host computes, or None."""

    def close(self) -> None:
        """Frees the environments and their processes."""


class HostProblem(Protocol):
    """Problem of one seed whose environments run on the host."""

    def open(self, base_seed: int, seeds: Sequence[int]) -> Rollouts:
        """Returns rollouts; `seeds` holds the seed index of each row of the training state."""


class WarmStartProgram(NamedTuple):
    """Warm start in a learner's `init`, in parts, so that the host can show and interrupt it.

    Attributes:
      settings: Settings of the warm start.
      begin: `start -> fit`, called before the first step; `start` is the argument of
        `Learner.init`. In a sweep, `fit` has only the S seeds of the first setting.
      advance: `(fit, done, given) -> fit`, see `warm_start.advance`; `given` is `TrainJob.given`.
      init: `((start, params)) -> state`, returns the training state that `Learner.init` makes from
        `start` if the warm start ends with the parameters `params`.
    """

    settings: WarmStart
    begin: Callable[[Any], WarmStartState]
    advance: Callable[..., WarmStartState]
    init: Callable[[Any], TrainState]


class Length(NamedTuple):
    """Length of a run, and the intervals between its lines, evaluations and checkpoints.

    Attributes:
      iterations: Total number of iterations.
      steps_per_iteration: Environment steps (or completions) of one seed in one iteration.
      log_every: Iterations per chunk; each chunk makes one line of metrics.
      eval_every: Chunks between evaluations; the first and the last state are always evaluated.
      checkpoint_every: Chunks between checkpoints; the last state is always saved.
    """

    iterations: int
    steps_per_iteration: int
    log_every: int = 1
    eval_every: int = 1
    checkpoint_every: int = 1

    def steps(self, iteration: int) -> int:
        """Returns the number of steps of one seed after `iteration` iterations."""
        return iteration * self.steps_per_iteration

    def boundary(self, iteration: int) -> int:
        """Returns the iteration at which the chunk that begins at `iteration` ends."""
        return min((iteration // self.log_every + 1) * self.log_every, self.iterations)

    def due(self, iteration: int, every: int) -> bool:
        """Returns whether an action is due that runs every `every` chunks, and at the end."""
        return iteration == self.iterations or iteration % (self.log_every * every) == 0


class Patience(NamedTuple):
    """Numbers of consecutive iterations without progress that end a run.

    Attributes:
      skipped: Iterations in which all updates of a seed were skipped; reaching this number is an
        error.
      idle: Iterations without a learning signal in any seed (metric `signal`, if the learner
        reports that metric); reaching this number ends the run early.
    """

    skipped: int = 10
    idle: int = 100


class Evaluation(NamedTuple):
    """Evaluation of one seed, and the examples that are shown with each evaluation.

    Attributes:
      measure: `(params, collector, key) -> {name: array}`; the log has the mean of each array. None
        if no evaluation is computed on devices.
      test: Function like `measure` for evaluations after the run, on data that never selected a
        checkpoint; None if `measure` serves both purposes, with different keys.
      score_evaluation: `(values) -> {name: [S, n]}`, computes scores on the host from the values
        of `measure`, leaves `[S, …]`; None if the values of `measure` are the scores.
      score: Name of the evaluated score that marks the best checkpoint; empty to keep only the
        latest checkpoint.
      initial: Name of the initial policy's score in `summary.json`; empty to leave that score out.
      examples: Examples that are shown at each evaluation. `Examples.describe` takes the stacked
        state; if `build_job` gets this record, `describe` takes the arguments of `measure`.
      explain: `(rows of examples) -> lines`, lines to show if the score of every seed is 0 before
        training.
      key: PRNG key that each evaluation uses for every seed.
    """

    measure: Measure | None = None
    test: Measure | None = None
    score_evaluation: Callable[[Any], Json] | None = None
    score: str = ""
    initial: str = ""
    examples: Examples | None = None
    explain: Callable[[list[Row]], list[str]] | None = None
    key: Any = None


class Host(NamedTuple):
    """Work on the host in each iteration of a run.

    Attributes:
      rollouts: Rollouts in environments of the host, which also evaluate; None if the environments
        are part of the compiled program.
      scorer: Reward computed between `learner.sample` and `learner.update`, or called by
        `rollouts`; None if the compiled program computes the reward.
      iterate: `(step, state) -> (state, metrics)`, user-defined iteration, which calls `step` once;
        None to call `step` alone.
    """

    rollouts: Rollouts | None = None
    scorer: Scorer | None = None
    iterate: Iterate | None = None


class Layout(NamedTuple):
    """Placement of seeds, batch rows and parameters of a run.

    Attributes:
      placement: Placement of seeds, batch rows and parameters on devices.
      axes: Logical axes of the parameters; None if the parameters cannot be sharded.
    """

    placement: Placement
    axes: LogicalAxes | None = None

    @property
    def replicated(self) -> jax.sharding.Sharding | None:
        """Returns the sharding of arrays that the host reads: copies if processes are several."""
        return parallel.replicated(self.placement) if processes.is_multi_process() else None


class Display(NamedTuple):
    """Texts that present a run to the user.

    Attributes:
      title: Title of the run.
      unit: Plural name of a step, such as `steps` or `completions`.
      curves: Metrics to draw, with their labels; also shown while the run trains.
      y_label: Label of the y axis of the curves.
      notes: Lines that are shown before the run starts.
      smaller_steps: Advice on making updates smaller; empty if the method is unknown.
    """

    title: str = ""
    unit: str = "steps"
    curves: Sequence[Any] = ()
    y_label: str = ""
    notes: Sequence[str] = ()
    smaller_steps: str = ""


NO_EVALUATION, NO_DISPLAY = Evaluation(), Display()


class Output(NamedTuple):
    """Destinations of the results of a run.

    Attributes:
      settings: Content of `config.json`. The loop sets the entry of a number of microbatches that
        is left open, which is None before.
      folder: Folder of the run; empty to write no files.
      resume: Whether to resume the run in the folder.
      overwrite: Whether to replace the run in the folder.
      exporters: Exporters that receive each line of metrics.
    """

    settings: Json
    folder: str = ""
    resume: bool = False
    overwrite: bool = False
    exporters: Sequence[Exporter] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TrainJob:
    """A run, as data that the training loop reads.

    Attributes:
      learner: Learner over stacked seeds: leaves of the state and of each metric lead with `[S]`.
      keys: Argument of `init` for each seed: typed keys `[S]`, or a pair of keys `[S]` and settings
        `[S]`.
      length: Length of the run, in iterations, lines and steps.
      patience: Numbers of iterations without progress that end the run.
      evaluation: Evaluation of one seed.
      host: Work on the host in each iteration.
      given: Parameters and prompts that all seeds begin with; `init` then takes `(keys, given)`, so
        that these arrays are not constants of the compiled program. None if `init` takes only keys.
      warm: Parts of `learner.init` if `init` contains a warm start; otherwise None.
      cheap_init: Whether `init` is compiled with little optimisation if the state is small. False
        if `init` may contain a warm start, as in a user-defined learner.
      layout: Placement of the run on devices.
      rebuild: `(num_microbatches) -> Learner`, returns the learner with `num_microbatches`
        microbatches, or None if that number does not divide the rows of a minibatch. `rebuild` is
        None if the number of microbatches is not chosen to fit in memory.
      display: Texts that present the run to the user.
      digests: Digests of data that the run depends on, by their entry in `config.json`.
      output: Destinations of the results of the run.
    """

    learner: Learner
    keys: PyTree
    length: Length
    patience: Patience
    evaluation: Evaluation
    host: Host
    given: PyTree
    warm: WarmStartProgram | None
    cheap_init: bool
    layout: Layout
    rebuild: Callable[[int], Learner | None] | None
    display: Display
    digests: Mapping[str, str]
    output: Output

    @property
    def start(self) -> PyTree:
        """Returns the argument of `learner.init`."""
        return self.keys if self.given is None else (self.keys, self.given)

    @property
    def num_seeds(self) -> int:
        """Returns the number S of seeds."""
        return len(jax.tree.leaves(self.keys)[0])

    @property
    def examples(self) -> Examples | None:
        """Returns the examples that are shown at each evaluation, or None."""
        rollouts = self.host.rollouts
        return self.evaluation.examples if rollouts is None else rollouts.examples

    def measure(self, state: TrainState, key: Any = None) -> Values:
        """Returns the values of an evaluation, leaves `[S, …]`; only later ones get a `key`."""
        own, measure = self.evaluation, self.evaluation.measure
        if key is None:
            key = own.key
        else:
            measure = own.test or measure
        assert measure is not None
        each = jax.vmap(
            lambda state: measure(state.params, state.collector, key), in_axes=(STATE_AXES,)
        )
        values: Values = parallel.spread(
            each, self.layout.placement, (parallel.whole_state_spec(),)
        )(state)
        return values

    def evaluate(self, state: TrainState) -> Json:
        """Returns the means `[S]` of the values of an evaluation that needs no `judge`."""
        rollouts = self.host.rollouts
        return self.means(self.measure(state) if rollouts is None else rollouts.evaluate(state))

    def means(self, values: Values) -> Json:
        """Averages each evaluated array over its elements, separately for each seed, `[S]`."""
        seeds = self.num_seeds
        return {name: value.reshape(seeds, -1).mean(axis=1) for name, value in values.items()}


@functools.cache
def _fold_in(sharding: jax.sharding.Sharding | None) -> Callable[..., jax.Array]:
    return jax.jit(jax.vmap(jax.random.fold_in, in_axes=(None, 0)), out_shardings=sharding)


def build_job(
    learner: Learner,
    layout: Layout,
    length: Length,
    *,
    seed: int,
    dtype: Any = None,
    method: Any = None,
    methods: Sequence[Any] = (),
    learner_of: Callable[[Any], Learner] | None = None,
    evaluation: Evaluation = NO_EVALUATION,
    given: PyTree = None,
    warm: WarmStartProgram | None = None,
    host: HostProblem | None = None,
    scorer: Scorer | None = None,
    learned: tuple[int, int] | None = None,
    display: Display = NO_DISPLAY,
    digests: Mapping[str, str] = {},
) -> TrainJob:
    """Builds the job of all seeds and devices from the parts of one seed.

    Args:
      learner: Learner of one seed.
      layout: Placement of all seeds on devices.
      length: Length of the run.
      seed: Base seed of the run.
      dtype: Type of the products of sharded parameters, see `sharding.over_mesh`.
      method: Config of the method; None if the method is unknown.
      methods: C Configs of the method that differ only in numbers, for C·S runs, the S seeds of the
        first Config first; empty to train `learner`.
      learner_of: `(method) -> Learner`, returns a learner that differs from `learner` only in
        numbers or in `num_microbatches`; None if no such function is known.
      evaluation: Evaluation of one seed.
      given: Parameters and prompts that all seeds begin with, see `TrainJob.given`.
      warm: Functions of the warm start of one seed, see `WarmStartProgram`. The settings of a seed
        share its warm start, which reads no numbers of the method.
      host: Environments of one seed on the host; None if the compiled program contains them.
      scorer: Reward that is computed on the host; None if the compiled program computes it.
      learned: Number of rows in a minibatch on one data device, and number of consecutive rows with
        the same prompt; None if the number of microbatches is not chosen to fit in memory.
      display: Texts that present the run to the user.
      digests: Digests of data that the run depends on, see `TrainJob.digests`.
    """
    # The evaluation key is the same at every evaluation and for every seed.
    training_key, evaluation_key = jax.random.split(jax.random.key(seed))
    shown = evaluation.examples and select_first_seed(evaluation.examples, evaluation_key)
    evaluation = evaluation._replace(key=evaluation_key, examples=None if methods else shown)
    placement, times = layout.placement, max(1, len(methods))
    alone = placement.of_seeds(placement.num_seeds // times)
    indices = list(range(alone.num_seeds)) * times
    start: Any = 0 if given is None else (0, None)
    over = functools.partial(
        parallel.over_devices, placement=placement, axes=layout.axes, dtype=dtype
    )
    keys: PyTree = _fold_in(layout.replicated)(training_key, jnp.array(indices))
    if methods:
        each = [config.as_arrays(x) for x in methods for _ in range(alone.num_seeds)]
        keys = keys, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)

    def stacked(learner: Learner) -> Learner:
        init, sample, update = over(learner, start=start)
        jitted = Learner(jax.jit(init), jax.jit(sample), jax.jit(update))
        jitted.init.problem = learner.problem  # type: ignore[attr-defined]
        return jitted

    def rebuild(rows: int, members: int, number: int) -> Learner | None:
        # A microbatch consists of some prompts with all their completions, or of some completions
        # of one prompt: otherwise a prompt's completions cannot share the prompt's activations.
        prompts = rows // members
        if rows % number or (prompts % number and number % prompts):
            return None
        assert learner_of is not None
        return stacked(learner_of(dataclasses.replace(method, num_microbatches=number)))

    if methods:
        assert learner_of is not None
        learner = with_settings(learner_of, alone=given is None)
    if warm is not None:
        each_seed = functools.partial(parallel.each_seed, placement=alone, axes=layout.axes)
        begin = each_seed(warm.begin, in_axes=(start,))
        advance = each_seed(warm.advance, in_axes=(0, None, None))
        init = over(learner._replace(init=warm.init), start=(start, 0)).init
        warm = WarmStartProgram(warm.settings, begin, advance, init)
        warm = share_warm_start(warm, start, times) if methods else warm
    return TrainJob(
        learner=stacked(learner),
        keys=keys,
        length=length,
        patience=Patience(),
        evaluation=evaluation,
        host=Host(None if host is None else host.open(seed, indices), scorer),
        given=given,
        warm=warm,
        cheap_init=method is not None,
        layout=layout,
        rebuild=functools.partial(rebuild, *learned) if learned and not methods else None,
        display=display._replace(smaller_steps=smaller_steps(method)),
        digests=digests,
        output=Output({}),
    )


def share_warm_start(warm: WarmStartProgram, axes: PyTree, times: int) -> WarmStartProgram:
    """Returns the warm start of `times` settings that begin with the same fitted parameters.

    Args:
      warm: Warm start whose `begin` takes the first setting, and whose `init` takes all settings.
      axes: Prefix tree of the argument of `Learner.init`: 0 if leaves lead with the seeds.
      times: Number of settings.
    """

    def begin(start: PyTree) -> WarmStartState:
        return warm.begin(map_stacked(axes, lambda x: x[: len(x) // times], start))

    def init(pair: tuple[PyTree, PyTree]) -> TrainState:
        start, params = pair
        return warm.init((start, jax.tree.map(lambda x: jnp.concatenate([x] * times), params)))

    return warm._replace(begin=begin, init=init)


def select_first_seed(examples: Examples, key: jax.Array) -> Examples:
    """Returns the examples of the first seed of a stacked training state."""

    def describe(state: TrainState) -> PyTree:
        first = select_seed(state)
        return examples.describe(first.params, first.collector, key)

    return Examples(
        describe, lambda arrays: [{"seed": 0, **row} for row in examples.render(arrays)]
    )


def smaller_steps(method: object) -> str:
    """Returns advice on making the updates of a method smaller, or an empty text.

    The advice depends on the fields of the method's Config.
    """
    if getattr(method, "early_stop", None) is False:
        return "set --config.early_stop, which ends an update at a KL of --config.target_kl"
    bounds = (name for name in ("max_kl", "learning_rate") if hasattr(method, name))
    return next((f"lower --config.{name}" for name in bounds), "")


def with_settings(learner_of: Callable[[Any], Learner], *, alone: bool) -> Learner:
    """Returns a learner of one seed whose settings are data of the state, for `jax.vmap`.

    The learner's `init` takes `(key, settings)`, and with `alone` false also `TrainJob.given`. The
    settings are stored in `opt_state`.
    """

    def init(start: PyTree) -> TrainState:
        own, given = (start, None) if alone else start
        key, settings = own
        of_key: Any = key if alone else (key, given)
        state = learner_of(settings).init(of_key)
        return state._replace(opt_state=(settings, state.opt_state))

    def inside(function: str) -> Callable[..., PyTree]:
        def call(state: TrainState, *batch: Any) -> tuple[TrainState, PyTree]:
            settings, own = state.opt_state
            of_state = getattr(learner_of(settings), function)
            after, out = of_state(state._replace(opt_state=own), *batch)
            return after._replace(opt_state=(settings, after.opt_state)), out

        return call

    return Learner(init, inside("sample"), inside("update"))
