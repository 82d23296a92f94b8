"""Trains on a control environment: `jaxrl-po control --env=CartPole-v1 --out=runs/first`."""

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import config as config_lib
from jaxrl_po import control, losses
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, Values
from jaxrl_po.control.evaluation import Evaluate
from jaxrl_po.control.memory import MEMORIES, kind_of
from jaxrl_po.masked import Mean
from jaxrl_po.run.data import recordings
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import earlier, suites, user_code
from jaxrl_po.run.experiment.control_config import (
    GROUPS,
    TRAJECTORIES,
    VINE,
    ControlConfig,
    ControlOptions,
)
from jaxrl_po.run.experiment.options import AUTO, NEW_MODEL, InitialModel
from jaxrl_po.run.experiment.registry import METHODS, MethodConfig
from jaxrl_po.run.experiment.settings import length_of
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.host import vector_envs
from jaxrl_po.run.host.rollouts import PoolProblem
from jaxrl_po.run.loop.job import Display, Evaluation, Layout, TrainJob, build_job
from jaxrl_po.run.store import provenance, sources
from jaxrl_po.types import Distribution, Learner, Problem, Samples

NAME, UNIT = "control", "environment steps"
SUMMARY = "Trains a method of policy optimisation on a control environment."
OPTIONS, CONFIG = ControlOptions, ControlConfig
CURVES: Sequence[Series] = (Series("episode_return", "training"), Series("greedy_return", "greedy"))
Y_LABEL = "return (reward units)"
DOMAIN: Any = sys.modules[__name__]
CONFIGS = Path(__file__).parent / "configs"


class Sampling(NamedTuple):
    """A way to collect rollouts in a control environment.

    Attributes:
      settings: Record class of the flags `--problem.*`.
      build: `(env, **settings, network=…, axis_name=…, policy=…, …) -> Problem`, builds a problem;
        only trajectories pool statistics over devices and have a critic.
      rows: `(settings) -> int`, number of batch rows that are sharded over devices.
      steps: `(settings, num_actions) -> int`, environment steps of one iteration, counting every
        simulated step.
    """

    settings: type
    build: Callable[..., Problem]
    rows: Callable[[Any], int]
    steps: Callable[[Any, int], int]


SAMPLINGS = {
    TRAJECTORIES: Sampling(
        control.ControlSettings,
        control.make_problem,
        lambda s: s.num_envs,
        lambda s, _: s.num_envs * s.num_steps,
    ),
    GROUPS: Sampling(
        control.GroupSettings,
        lambda env, *, axis_name, critic, actor_critic, **own: control.make_groups(env, **own),
        lambda s: s.num_prompts,
        lambda s, _: s.num_prompts * s.group_size * s.num_steps,
    ),
    VINE: Sampling(
        control.VineSettings,
        lambda env, *, axis_name, critic, actor_critic, **own: control.make_vine(env, **own),
        lambda s: s.num_envs,
        control.VineSettings.steps,
    ),
}

NETWORKS = ("policy", "critic", "actor_critic")  # options whose value is a Flax module
VINE_DOES_WITHOUT = {
    *("gamma", "lambda_", "estimator", "n_steps"),
    *("value_learning_rate", "value_epochs", "value_minibatches", "value_coefficient"),
}


def initial_model(options: ControlOptions) -> InitialModel:
    """Returns a new model: no control run starts from a pretrained model."""
    del options
    return NEW_MODEL


def require_known(options: ControlOptions, given: Values, initial: InitialModel) -> None:
    """Accepts any flags, since `flags.convert` rejects unknown flags."""


def presets(options: ControlOptions, values: Values, initial: InitialModel) -> Values:
    """Returns the presets of the method, by flag name."""
    del values, initial
    return options.entry.control


def sections(options: ControlOptions, initial: InitialModel) -> dict[str, type]:
    """Returns the record class of each section by its prefix, except the record of the method."""
    del initial
    return {"problem": sampling(options).settings, "network": control.NetworkSettings}


def rows(config: ControlConfig) -> int:
    """Returns the number of batch rows of one seed that are sharded over devices."""
    return sampling(config.run).rows(config.problem)


def title(config: ControlConfig) -> str:
    """Returns a title with the method and the environment."""
    return " on ".join(map(sources.short, (config.run.algorithm, config.run.env)))


def default_sampling(options: ControlOptions) -> str:
    """Returns the name of the method's default way to collect rollouts."""
    return GROUPS if options.entry.compares_groups else TRAJECTORIES


def chosen_sampling(options: ControlOptions) -> str:
    """Returns the name of the way to collect rollouts that the options choose."""
    return default_sampling(options) if options.sampling == AUTO else options.sampling


def sampling(options: ControlOptions) -> Sampling:
    """Returns the way to collect rollouts that the options choose."""
    chosen = chosen_sampling(options)
    for name in ("critic", "actor_critic") if chosen != TRAJECTORIES else ():
        if vars(options)[name]:
            raise ConfigError(name, f"must be left out: sampling = {chosen} has no critic")
    if vector_envs.is_host(options.env):
        _require_trajectories(options, chosen)
    return SAMPLINGS[chosen]


def _require_trajectories(options: ControlOptions, chosen: str) -> None:
    """Raises ConfigError if rollouts return to earlier states, which the host cannot."""
    if chosen != TRAJECTORIES:
        critics = ", ".join(name for name, entry in METHODS.items() if entry.has_critic)
        raise ConfigError(
            "env",
            f"{options.env} cannot return to a state, as sampling = {chosen} does: choose "
            f"sampling = {TRAJECTORIES} and one of {critics}, or an environment of gymnax",
        )


def tuned(
    options: ControlOptions,
    values: Values = MappingProxyType({}),
    initial: InitialModel = NEW_MODEL,
) -> Values:
    """Returns settings by flag name: settings that a sweep found, or that the memory cell needs.

    If a memory cell needs early stopping, a method that can stop an update early does so. The stop
    bounds no single step of the optimizer: step sizes of 1e-3 and more can still lose half the
    return, and then mostly recover.

    Args:
      options: Options of the run; the result is empty if the option `tuned` is off.
      values: Values of the flags that are given or stored, by flag name.
      initial: Not used; every domain has this argument.
    """
    del initial
    if not options.tuned:
        return {}
    memory = user_code.find_object("network.memory", values.get("network.memory", "none"))
    kind = kind_of(memory) if memory in MEMORIES or sources.is_source(memory) else None
    fields = options.entry.Config.__dataclass_fields__
    stops = kind is not None and kind.needs_early_stop and "early_stop" in fields
    found: dict[str, Any] = {"config.early_stop": True} if stops else {}
    path = tuned_file(options)
    # Settings that were tuned for one way to sample do not apply to another way.
    if (
        sources.is_source(options.env)
        or sources.is_source(options.algorithm)
        or options.sampling not in (AUTO, default_sampling(options))
        or not os.path.exists(path)  # `Path.exists` raises an error if a name is too long
    ):
        return found
    found = json.loads(path.read_text(encoding="utf-8"))["flags"] | found
    # Settings that were tuned for built-in networks do not apply to other networks.
    if any(vars(options)[name] for name in NETWORKS) or values.get("network.shared_torso"):
        found = {k: v for k, v in found.items() if not k.startswith("network.")}
    return user_code.without_replaced(vars(options), found)


def tuned_file(options: ControlOptions) -> Path:
    """Returns the file of tuned settings; the environments of MuJoCo share one file."""
    name = vector_envs.family(options.env) if vector_envs.is_host(options.env) else options.env
    return CONFIGS / options.algorithm / f"{name.replace(':', '-')}.json"


def self_normalized(branches: int, distribution: Distribution, samples: Samples) -> Mean:
    """Computes TRPO eq. 18 over the K branches of each of N states, from rows `[N·K]`."""
    rows = distribution.log_prob(samples.action), samples.log_prob, samples.advantage
    of_states = jax.vmap(losses.self_normalized_surrogate)(*(x.reshape(-1, branches) for x in rows))
    return losses.token_mean(of_states, jnp.ones(of_states.shape, bool))


class World(NamedTuple):
    """Environment of a run, in JAX or on the host.

    Attributes:
      spaces: Spaces of observations and actions of a policy.
      env: Environment in JAX; None if the environment runs on the host.
      source: Source of environments on the host; None if the environment is in JAX.
    """

    spaces: control.Spaces
    env: Any
    source: vector_envs.Source | None


def open_world(config: ControlConfig) -> World:
    """Makes the environment that the options of a run name."""
    options = config.run
    find = vector_envs.find_source if vector_envs.is_host(options.env) else suites.make_env
    source: Any = find(options.env, options.env_params)
    if not isinstance(source, vector_envs.Source):
        env = control.adapt(source)
        return World(env.spaces, env, None)
    options.require_host()
    _require_trajectories(options, chosen_sampling(options))
    if source.max_steps is None:
        raise ConfigError(
            "env",
            f"{options.env} must bound its episodes for an evaluation: give env_params, such as "
            '{"max_episode_steps": 1000}',
        )
    return World(source.spaces, None, source)


def build_problem(
    config: ControlConfig, world: World, axis_name: str | None = None, target: Target | None = None
) -> Problem:
    """Builds the problem of a run in the run's environment."""
    options, settings = config.run, config.problem
    own = {
        name: user_code.network(name, source) if (source := vars(options)[name]) else None
        for name in NETWORKS
    }
    of_run: dict[str, Any] = {"axis_name": axis_name, "target": target, **own}
    # A config that was pickled contains only the text of the user's memory cell.
    memory = user_code.find_object("network.memory", config.network.memory)
    network = dataclasses.replace(config.network, memory=memory)
    if world.source is not None:
        assert isinstance(settings, control.ControlSettings)
        return control.recorded_from_settings(world.spaces, settings, network, **of_run)
    problem = sampling(options).build(world.env, **vars(settings), network=network, **of_run)
    if not options.demonstrations:
        return problem
    steps = recordings.read(options.demonstrations, world.spaces)
    if not isinstance(settings, control.ControlSettings):
        raise ConfigError("sampling", f"must be {TRAJECTORIES} with demonstrations")
    if settings.normalize_observations:
        raise ConfigError("problem.normalize_observations", "must be off with demonstrations")
    return control.with_demonstrations(problem, *steps, num_steps=settings.num_steps)


def steps(config: ControlConfig, world: World | None) -> int:
    """Returns the environment steps of one iteration; `world` may be None except for a vine."""
    num_actions = 0 if world is None else world.spaces.num_actions
    return sampling(config.run).steps(config.problem, num_actions)


def greedy(evaluate: Evaluate) -> Evaluate:
    """Returns the same evaluation, with `greedy_` before the names of its metrics."""
    return lambda params, collector, key: {
        f"greedy_{name}": value for name, value in evaluate(params, collector, key).items()
    }


def build(
    config: ControlConfig, placement: Placement, world: World, methods: Sequence[MethodConfig] = ()
) -> TrainJob:
    """Builds the job that trains the method on the environment."""
    options, settings, method = config.run, config.problem, config.method
    for name in ("overlong_filtering", "soft_overlong"):
        if vars(method).get(name):
            raise ConfigError(f"config.{name}", "must be false in control: no episode is too long")
    make = options.entry.make
    if isinstance(settings, control.VineSettings):
        for name in sorted(VINE_DOES_WITHOUT & vars(method).keys()):
            if any(config_lib.changed(each, name) for each in methods or [method]):
                raise ConfigError(
                    f"config.{name}",
                    "has no effect with sampling = vine, which has no critic and discounts by "
                    "problem.discount",
                )
        if options.entry.in_branches and settings.num_branches:
            surrogate = functools.partial(self_normalized, settings.num_branches)
            make = functools.partial(make, surrogate=surrogate)
    make = user_code.with_loss(make, vars(options))
    problem = build_problem(config, world, placement.axis_name, placement.target)
    if options.init_from:
        problem = earlier.init_from_run(DOMAIN, problem, options.init_from)

    def learner_of(method: MethodConfig) -> Learner:
        return make(dataclasses.replace(method, axis_name=placement.axis_name), problem)

    learner, *_ = map(learner_of, methods or [method])  # each checks its numbers
    host, measure, notes = None, None, tuple[str, ...]()
    if world.source is not None:
        assert isinstance(settings, control.ControlSettings)
        sizes = settings.num_envs, settings.num_steps, options.eval_episodes
        host = PoolProblem(world.source, problem, *sizes)
    else:
        episodes = options.eval_episodes
        measure = greedy(control.make_evaluate(world.env, problem, num_episodes=episodes))
        if world.env.refresh is not None:
            notes = (
                f"starting states are drawn every {world.env.reset_interval} steps where they were "
                'used, and where needed, not in each step (--env_params={"reset_interval": 1})',
            )
    recorded = options.demonstrations
    return build_job(
        learner,
        Layout(placement),
        length_of(options, steps(config, world)),
        seed=options.seed,
        method=method,
        methods=methods,
        learner_of=learner_of,
        host=host,
        evaluation=Evaluation(measure, score="greedy_return"),
        display=Display(title(config), UNIT, CURVES, Y_LABEL, notes),
        digests={provenance.PROMPTS: sources.digest_file(recorded)} if recorded else {},
    )
