"""Trains on a control environment: `jaxrl-po control --env=CartPole-v1 --out=runs/first`."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_po import config, control, losses
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.control.evaluation import Evaluate
from jaxrl_po.control.memory import MEMORIES
from jaxrl_po.masked import Mean
from jaxrl_po.run.data import recordings
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import assembly, earlier, methods, suites, user_code
from jaxrl_po.run.experiment.assembly import Script
from jaxrl_po.run.experiment.options import Options as RunOptions
from jaxrl_po.run.experiment.options import option
from jaxrl_po.run.figures.plotting import Series
from jaxrl_po.run.host import vector_envs
from jaxrl_po.run.host.rollouts import HostProblem
from jaxrl_po.run.store import sources
from jaxrl_po.types import Distribution, Learner, Problem, Samples

CONFIGS = Path(__file__).parent / "configs"


class Sampling(NamedTuple):
    """A way to collect rollouts.

    Attributes:
      settings: record of `--problem.*`.
      build: `(env, **settings, network=…, axis_name=…, policy=…, critic=…) -> Problem`; only
        trajectories pool statistics over devices and have a critic.
      rows: settings to the number of rows that are sharded over devices.
      steps: settings and the number of discrete actions to the environment steps of one iteration,
        counting every simulated step.
    """

    settings: type
    build: Callable[..., Problem]
    rows: Callable[[Any], int]
    steps: Callable[[Any, int], int]


SAMPLINGS = {
    "trajectories": Sampling(
        control.Settings,
        control.make_problem,
        lambda s: s.num_envs,
        lambda s, _: s.num_envs * s.num_steps,
    ),
    "groups": Sampling(
        control.GroupSettings,
        lambda env, *, axis_name, critic, **own: control.make_groups(env, **own),
        lambda s: s.num_prompts,
        lambda s, _: s.num_prompts * s.group_size * s.num_steps,
    ),
    "vine": Sampling(
        control.VineSettings,
        lambda env, *, axis_name, critic, **own: control.make_vine(env, **own),
        lambda s: s.num_envs,
        control.VineSettings.steps,
    ),
}

VINE_DOES_WITHOUT = {
    *("gamma", "lambda_", "estimator", "n_steps"),
    *("value_learning_rate", "value_epochs", "value_minibatches", "value_coefficient"),
}


@config.record
class Options(RunOptions):
    """The run as a whole."""

    env: str = option(
        "CartPole-v1",
        "a registered gymnax environment, a class of your own as file.py:Name, one of another "
        f"suite in JAX ({', '.join(f'{suite}:Name' for suite in suites.SUITES)}), or one that runs "
        "on the host: envpool:Name, gymnasium:Name",
        common=True,
    )
    env_params: str = option(
        "",
        "arguments of the environment, a JSON object: fields of the default parameters of one of "
        "gymnax or of your own, or arguments of jaxrl_po.control.adapters, envpool.make or "
        "gymnasium.make_vec",
    )
    policy: str = option(
        "",
        "a Flax module of your own as file.py:Name, in place of the policy of --network",
        common=True,
    )
    critic: str = option("", "likewise, in place of the critic")
    init_from: str = option(
        "",
        "folder of an earlier run of this script (the latest parameters of its first seed), with "
        "which every seed begins; empty for none",
        common=True,
    )
    demonstrations: str = option(
        "",
        "recorded episodes for --algorithm=sft, an .npz file of observation, action, terminated "
        "and truncated, as jaxrl-po evaluate --record writes it",
    )
    sampling: str = option(
        "auto",
        "rollouts that continue in the next iteration (trajectories), groups of episodes from one "
        "initial state (groups), or branches from visited states (vine); auto is groups "
        "for the methods without a critic, else trajectories",
        choices=("auto", *SAMPLINGS),
        were=(("path", "trajectories"),),
    )
    eval_episodes: int = option(
        32, "greedy episodes per evaluation and seed", unit="episodes", within=COUNT
    )

    def validate(self) -> None:
        """Raises ConfigError for a field out of its range or without effect."""
        super().validate()
        if bool(self.demonstrations) != (self.algorithm in methods.SUPERVISED):
            raise ConfigError(
                "demonstrations",
                "must name an .npz file with algorithm = sft and be left out with any other, got "
                f"{self.demonstrations!r}",
            )
        if self.demonstrations and vector_envs.is_host(self.env):
            raise ConfigError(
                "demonstrations", f"must be left out with env = {self.env}, which is not in JAX"
            )
        for name in ("distributed", "deterministic"):
            if getattr(self, name) and vector_envs.is_host(self.env):
                raise ConfigError(
                    name, f"must be off with env = {self.env}: its states cannot be saved"
                )


def default_sampling(options: Options) -> str:
    """How the method collects rollouts unless told otherwise."""
    return "groups" if options.algorithm in methods.IN_GROUPS else "trajectories"


def sampling(options: Options) -> Sampling:
    """The way to collect rollouts that the options ask for."""
    chosen = default_sampling(options) if options.sampling == "auto" else options.sampling
    if options.critic and chosen != "trajectories":
        raise ConfigError("critic", f"must be left out: sampling = {chosen} has no critic")
    if vector_envs.is_host(options.env) and chosen in ("groups", "vine"):
        raise ConfigError(
            "env",
            f"{options.env} cannot return to a state, as sampling = {chosen} does: choose "
            f"sampling = trajectories and one of {', '.join(methods.WITH_CRITIC)}, or an "
            "environment of gymnax",
        )
    return SAMPLINGS[chosen]


def tuned(options: Options, given: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """Returns flag name to value: settings by a sweep, and those that suit the given memory.

    With a memory that needs it, a method that can stop early does. The stop bounds no single step
    of the optimizer: step sizes of 1e-3 and more can still lose half the return, and then mostly
    recover.
    """
    fields = methods.ALGORITHMS[options.algorithm].Config.__dataclass_fields__
    unstable = [name for name, kind in MEMORIES.items() if kind and kind.needs_early_stop]
    stops = given.get("network.memory") in unstable and "early_stop" in fields
    return {**found_by_sweep(options, given), **({"config.early_stop": True} if stops else {})}


def found_by_sweep(options: Options, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns flag name to the value that a sweep found for method and environment; or empty."""
    path = tuned_file(options)
    # What was found for one way to sample does not apply to another.
    if (
        sources.is_source(options.env)
        or options.sampling not in ("auto", default_sampling(options))
        or not os.path.exists(path)  # `Path.exists` raises where a name is too long
    ):
        return {}
    flags_of_sweep: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["flags"]
    # What was found for other networks does not apply.
    if options.policy or options.critic or given.get("network.shared_torso"):
        return {k: v for k, v in flags_of_sweep.items() if not k.startswith("network.")}
    return flags_of_sweep


def tuned_file(options: Options) -> Path:
    """Where those are kept; the environments of MuJoCo share one file."""
    name = vector_envs.family(options.env) if vector_envs.is_host(options.env) else options.env
    return CONFIGS / options.algorithm / f"{name.replace(':', '-')}.json"


def defaults(options: Options, given: Mapping[str, Any] = {}) -> Mapping[str, Any]:
    """The flags that a sweep found; for DAPO, also without its treatment of overlong answers.

    An episode that lasts to its time limit is not too long.
    """
    overlong = {"config.overlong_filtering": False, "config.soft_overlong": False}
    return {**(overlong if options.algorithm == "dapo" else {}), **tuned(options, given)}


def self_normalized(branches: int, distribution: Distribution, samples: Samples) -> Mean:
    """The surrogate of TRPO eq. 18 over the K branches of each of N states; rows `[N·K]`."""
    rows = distribution.log_prob(samples.action), samples.log_prob, samples.advantage
    of_states = jax.vmap(losses.self_normalized_surrogate)(*(x.reshape(-1, branches) for x in rows))
    return losses.token_mean(of_states, jnp.ones(of_states.shape, bool))


class Built(NamedTuple):
    """The problem of a run.

    Attributes:
      problem: see `Problem`.
      spaces: what its policy sees and may do.
      env: its environment, or None where it runs on the host.
      source: of its environments on the host, or None.
    """

    problem: Problem
    spaces: control.Spaces
    env: Any
    source: vector_envs.Source | None


def build_problem(
    records: Mapping[str, Any], axis_name: str | None, target: Target | None = None
) -> Built:
    """The environment, and the problem made of it."""
    options, settings, way = records[""], records["problem"], sampling(records[""])
    network = records["network"]
    own = {
        name: user_code.network(name, source) if source else None
        for name, source in (("policy", options.policy), ("critic", options.critic))
    }
    if vector_envs.is_host(options.env):
        source = vector_envs.find(options.env, options.env_params)
        if source.max_steps is None:
            raise ConfigError(
                "env",
                f"{options.env} must bound its episodes for an evaluation: give env_params = "
                '{"max_episode_steps": 1000}, say',
            )
        problem = control.recorded_from_settings(
            source.spaces, settings, network, axis_name=axis_name, target=target, **own
        )
        return Built(problem, source.spaces, None, source)
    env = suites.make_env(options.env, options.env_params)
    problem = way.build(
        env, **vars(settings), network=network, axis_name=axis_name, target=target, **own
    )
    if options.demonstrations:
        steps = recordings.read(options.demonstrations, control.adapt(env).spaces)
        if options.sampling not in ("auto", "trajectories"):
            raise ConfigError("sampling", "must be trajectories with demonstrations")
        if settings.normalize_observations:
            raise ConfigError("problem.normalize_observations", "must be off with demonstrations")
        problem = control.demonstrated(problem, *steps, num_steps=settings.num_steps)
    return Built(problem, control.adapt(env).spaces, env, None)


def steps(records: Mapping[str, Any]) -> int:
    """Environment steps of one iteration of one seed."""
    options, num_actions = records[""], 0
    if not vector_envs.is_host(options.env):
        env = suites.make_env(options.env, options.env_params)
        num_actions = control.adapt(env).spaces.num_actions
    return sampling(options).steps(records["problem"], num_actions)


def greedy(evaluate: Evaluate) -> Evaluate:
    """The same evaluation, with `greedy_` before the names of its metrics."""
    return lambda params, collector, key: {
        f"greedy_{name}": value for name, value in evaluate(params, collector, key).items()
    }


def build(records: Mapping[str, Any], algorithm: Any, placement: Placement) -> assembly.Setup:
    """The experiment: the method on the environment."""
    options, settings = records[""], records["problem"]
    for name in ("overlong_filtering", "soft_overlong"):
        if vars(records["config"]).get(name):
            raise ConfigError(f"config.{name}", "must be false in control: no episode is too long")
    make = algorithm.make
    if options.sampling == "vine":
        for name in sorted(VINE_DOES_WITHOUT & vars(records["config"]).keys()):
            if config.changed(records["config"], name):
                raise ConfigError(
                    f"config.{name}",
                    "has no effect with sampling = vine, which has no critic and discounts by "
                    "problem.discount",
                )
        if options.algorithm in ("npg", "trpo") and settings.num_branches:
            surrogate = functools.partial(self_normalized, settings.num_branches)
            make = functools.partial(make, surrogate=surrogate)
    built = build_problem(records, placement.axis_name, placement.target)
    if options.init_from:
        begun = earlier.begun(SCRIPT, built.problem, options.init_from)
        built = built._replace(problem=begun)

    def learner_of(method: Any) -> Learner:
        learner: Learner = make(
            dataclasses.replace(method, axis_name=placement.axis_name), built.problem
        )
        return learner

    learner = learner_of(records["config"])
    if built.source is not None:
        sizes = settings.num_envs, settings.num_steps, options.eval_episodes
        host = HostProblem(built.source, built.problem, *sizes)
        return assembly.Setup(
            learner, evaluate=None, score="greedy_return", host=host, learner_of=learner_of
        )
    evaluate = control.make_evaluate(built.env, built.problem, num_episodes=options.eval_episodes)
    environment, notes = control.adapt(built.env), tuple[str, ...]()
    if environment.refresh is not None:
        notes = (
            f"starting states are drawn every {environment.reset_interval} steps where they were "
            'used, and where needed, not in each step (--env_params={"reset_interval": 1})',
        )
    return assembly.Setup(
        learner,
        greedy(evaluate),
        score="greedy_return",
        notes=notes,
        learner_of=learner_of,
        prompts=sources.digest(options.demonstrations) if options.demonstrations else "",
    )


SCRIPT = Script(
    name="control",
    summary="Trains a method of policy optimisation on a control environment.",
    options=Options,
    defaults=defaults,
    tuned=tuned,
    sections=lambda options: {
        "problem": sampling(options).settings,
        "network": control.NetworkSettings,
    },
    rows=lambda records: sampling(records[""]).rows(records["problem"]),
    steps=steps,
    shards_params=lambda options: False,
    build=build,
    title=lambda records: f"{records[''].algorithm} on {sources.short(records[''].env)}",
    unit="environment steps",
    curves=(Series("episode_return", "training"), Series("greedy_return", "greedy")),
    y_label="return (reward units)",
    continued=lambda records: {**records, "": dataclasses.replace(records[""], init_from="")},
)
