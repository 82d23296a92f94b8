"""What a training command builds of its flags, and the job over all seeds and devices."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxrl_po import config
from jaxrl_po.config import Json, Values
from jaxrl_po.run.data.scoring import Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import parallel, processes
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import STATE_AXES, of_seed
from jaxrl_po.run.devices.sharding import LogicalAxes
from jaxrl_po.run.experiment.options import NEW_MODEL, InitialModel, Options, RunConfig
from jaxrl_po.run.experiment.registry import MethodConfig
from jaxrl_po.run.figures import plotting
from jaxrl_po.run.loop import programs
from jaxrl_po.run.loop.supervised import Warm
from jaxrl_po.types import ActorCritic, CollectorState, Learner, PyTree, TrainState


class Setup(NamedTuple):
    """What a script builds from its flags.

    Attributes:
      learner: of one seed.
      evaluate: `(params, collector, key) -> {name: array}` of one seed; each is logged as the mean
        over its array; None evaluates nothing.
      test: likewise, of what never selected a checkpoint, for later evaluations; None where that
        is what `evaluate` gets from another key.
      score: the evaluated name that marks the best checkpoint.
      initial: what `summary.json` calls the score of the initial policy; empty to leave it out.
      examples: of the first seed, shown at each evaluation; `describe(params, collector, key)` gets
        the key of the evaluation.
      axes: logical axes of the parameters, or None if they cannot be sharded.
      dtype: of their products, see `sharding.over_mesh`.
      host: what runs on the host in each iteration, or None; it evaluates, in place of `evaluate`,
        and has examples of its own.
      rewarded: scores on the host, batches or what `host` makes; None if the program does.
      warm: the warm start in the learner's `init`, in parts; None without one.
      given: the parameters and prompts that every seed begins with; `learner.init` then takes
        `(key, given)`, so that they are no constants of its program. None where `init` takes the
        key alone.
      base: digest of what adapters are trained over; empty without adapters.
      prompts: digest of the prompts and answers, where these are data of the task; else empty.
      judge: scores on the host what `evaluate` returns, leaves `[S, …]`, to `{name: [S, n]}`; None
        where that holds the scores.
      notes: lines that are shown before the run.
      explain: see `programs.Job`, as for `iterate`.
      curves: metrics to draw in place of the script's, with their labels.
      y_label: of these curves.
      learner_of: settings of the method to its learner, which differ from those of `learner` in
        numbers alone, or in `num_microbatches`; None where they are not known.
      learned: rows of a minibatch on one data device, and how many of one prompt stand together;
        None if `num_microbatches` is not chosen to fit in memory. Needs `learner_of`.
    """

    learner: Learner
    evaluate: Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, jax.Array]] | None
    score: str
    test: Callable[[ActorCritic, CollectorState, jax.Array], Mapping[str, jax.Array]] | None = None
    initial: str = ""
    examples: Examples | None = None
    axes: LogicalAxes | None = None
    dtype: Any = None
    host: programs.Host | None = None
    rewarded: Scorer | None = None
    warm: Warm | None = None
    given: PyTree = None
    base: str = ""
    prompts: str = ""
    judge: Callable[[Any], dict[str, Any]] | None = None
    notes: tuple[str, ...] = ()
    explain: Callable[[list[dict[str, Any]]], list[str]] | None = None
    iterate: programs.Iterate | None = None
    curves: tuple[plotting.Series, ...] = ()
    y_label: str = ""
    learner_of: Callable[[MethodConfig], Learner] | None = None
    learned: tuple[int, int] | None = None


OptionsOf = TypeVar("OptionsOf", bound=Options)
Config = TypeVar("Config", bound=RunConfig)
World = TypeVar("World")


class Script(NamedTuple, Generic[OptionsOf, Config, World]):
    """What distinguishes one training command from another.

    Attributes:
      name: Name of the command.
      summary: First line of `--help`.
      options: Record of the flags without a prefix, an extension of `Options`.
      config: Class of the config.
      require_known: `(options, given, initial)`, raises ConfigError for given flags of sections
        that this run lacks.
      presets: `(options, values, initial) -> {flag: default}`, defaults that replace those of the
        records.
      tuned: `(options, values, initial) -> {flag: default}`, defaults that are reported before the
        run.
      sections: `(options, initial) -> {prefix: record}`, sections beside `config`, which is the
        method's.
      open_world: `(config) -> world`, makes what the run acts in once, such as an environment.
      rows: `(config) -> int`, environments or prompts of one seed.
      steps: `(config, world) -> int`, environment steps or completions of one iteration of a seed.
      shards_params: `(options) -> bool`, whether parameters are sharded over the data devices.
      build: `(config, placement, world) -> Setup`, raises ConfigError.
      title: `(config) -> str`, method and environment or task.
      unit: Name of a step, plural.
      curves: Metrics to draw, with their labels.
      y_label: Label of the curves' axis.
      initial: `(options) -> InitialModel`, reads the files of `--init_from`.
      continued: `(config) -> config`, settings with which a run is resumed or loaded: without the
        run that it began from, if its checkpoints hold all of that.
    """

    name: str
    summary: str
    options: type[OptionsOf]
    config: type[Config]
    require_known: Callable[[OptionsOf, Mapping[str, Any], InitialModel], None]
    presets: Callable[[OptionsOf, Mapping[str, Any], InitialModel], Mapping[str, Any]]
    tuned: Callable[[OptionsOf, Mapping[str, Any], InitialModel], Mapping[str, Any]]
    sections: Callable[[OptionsOf, InitialModel], Mapping[str, type]]
    open_world: Callable[[Config], World]
    rows: Callable[[Config], int]
    steps: Callable[[Config, World], int]
    shards_params: Callable[[OptionsOf], bool]
    build: Callable[[Config, Placement, World], Setup]
    title: Callable[[Config], str]
    unit: str
    curves: tuple[plotting.Series, ...]
    y_label: str
    initial: Callable[[OptionsOf], InitialModel] = lambda options: NEW_MODEL
    continued: Callable[[Config], Config] = lambda config: config


Command = Script[Any, Any, Any]


def make_job(
    setup: Setup,
    options: Options,
    placement: Placement,
    *,
    iterations: int = 0,
    steps_per_iteration: int = 1,
    log_every: int = 1,
    cheap_init: bool = False,
    method: MethodConfig | None = None,
    settings: Sequence[MethodConfig] = (),
) -> programs.Job:
    """The setup over all seeds and devices.

    With C `settings` of the method, which differ in numbers alone, it is that over C·S runs, the S
    seeds of the first setting first. Warnings name fields of `method`, its Config, or of these.
    """
    # The evaluation key is the same at every evaluation and for every seed.
    training_key, evaluation_key = jax.random.split(jax.random.key(options.seed))
    runs = options.seeds * max(1, len(settings))
    if settings:
        assert setup.learner_of is not None
        setup = setup._replace(learner=with_settings(setup.learner_of, alone=setup.given is None))
    learner, warm = over_all(setup, placement)

    measure, judge = setup.evaluate, setup.judge or dict

    def evaluate(state: TrainState) -> dict[str, jax.Array]:
        assert measure is not None
        each = jax.vmap(
            lambda state: measure(state.params, state.collector, evaluation_key),
            in_axes=(STATE_AXES,),
        )
        values = parallel.spread(each, placement, (parallel.whole_state_spec(),))(state)
        return values if setup.judge is not None else of_seeds(values)

    def of_seeds(values: Values) -> Json:
        return {name: value.reshape(runs, -1).mean(axis=1) for name, value in values.items()}

    of_each = list(range(options.seeds)) * max(1, len(settings))
    rollouts = None if setup.host is None else setup.host.open(options.seed, of_each)
    examples = setup.examples and of_first_seed(setup.examples, evaluation_key)
    evaluated = None if measure is None else evaluate
    if rollouts is not None:
        evaluated, examples = lambda state: of_seeds(rollouts.evaluate(state)), rollouts.examples
    replicated = parallel.replicated(placement) if processes.several() else None
    keys: PyTree = jax.jit(
        jax.vmap(jax.random.fold_in, in_axes=(None, 0)), out_shardings=replicated
    )(training_key, jnp.array(of_each))
    if settings:
        each = [config.as_arrays(setting) for setting in settings for _ in range(options.seeds)]
        keys = keys, jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    return programs.Job(
        learner=Learner(jax.jit(learner.init), jax.jit(learner.sample), jax.jit(learner.update)),
        keys=keys,
        iterations=iterations,
        steps_per_iteration=steps_per_iteration,
        log_every=log_every,
        eval_every=options.eval_every,
        checkpoint_every=options.checkpoint_every,
        rollouts=rollouts,
        rewarded=setup.rewarded if rollouts is None else None,
        evaluate=evaluated,
        judge=setup.judge and (lambda values: of_seeds(judge(jax.device_get(values)))),
        score=setup.score,
        given=setup.given,
        examples=examples,
        cheap_init=cheap_init,
        where=placement.describe(),
        replicated=replicated,
        warm=warm,
        explain=setup.explain,
        iterate=setup.iterate,
        smaller_steps=smaller_steps(settings[0] if settings else method),
    )


def smaller_steps(method: object) -> str:
    """Returns what makes the updates of a method smaller, by the fields of its Config; or ""."""
    if getattr(method, "early_stop", None) is False:
        return "set --config.early_stop, which ends an update at a KL of --config.target_kl"
    bounds = (name for name in ("max_kl", "learning_rate") if hasattr(method, name))
    return next((f"lower --config.{name}" for name in bounds), "")


def with_settings(learner_of: Callable[[MethodConfig], Learner], *, alone: bool) -> Learner:
    """The learner of one seed whose settings are data of its state, so that they can be vmapped.

    Its `init` takes `(key, settings)`, and with `alone` false also what all seeds begin with, see
    `Setup.given`. They stand in `opt_state`.
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


def over_all(setup: Setup, placement: Placement) -> tuple[Learner, Warm | None]:
    """The learner and its warm start over all seeds and devices."""
    axes = setup.axes
    over = functools.partial(
        parallel.over_devices, placement=placement, axes=axes, dtype=setup.dtype
    )
    each = functools.partial(parallel.each_seed, placement=placement, axes=axes)
    learner, warm = setup.learner, setup.warm
    start: Any = 0 if setup.given is None else (0, None)
    if warm is not None:
        warm = warm._replace(
            begin=each(warm.begin, in_axes=(start,)),
            advance=each(warm.advance, in_axes=(0, None, None)),
            init=over(learner._replace(init=warm.init), start=(start, 0)).init,
        )
    return over(learner, start=start), warm


def of_first_seed(examples: Examples, key: jax.Array) -> Examples:
    """Examples of the first seed of a stacked state; `key` is the same at every evaluation."""

    def describe(state: TrainState) -> PyTree:
        first = of_seed(state)
        return examples.describe(first.params, first.collector, key)

    return Examples(
        describe, lambda arrays: [{"seed": 0, **row} for row in examples.render(arrays)]
    )
