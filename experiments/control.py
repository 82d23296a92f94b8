"""Trains a method on a gymnax environment: `python experiments/control.py --env=CartPole-v1 --out=runs/first`."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import common

from jaxrl_po import config, control, flags
from jaxrl_po.config import COUNT, static
from jaxrl_po.plotting import Series


@config.record
class Options(common.Options):
    """The run as a whole."""

    env: str = static("CartPole-v1", "a registered gymnax environment")
    eval_episodes: int = static(32, "greedy episodes of one evaluation of one seed", unit="episodes", within=COUNT)


def build(records: Mapping[str, Any], algorithm: Any, axis_name: str | None) -> common.Experiment:
    """The method on the environment."""
    import gymnax  # here, because it starts the backend, whose devices are chosen first

    options, settings = records[""], records["problem"]
    flags.lookup("env", options.env, dict.fromkeys(gymnax.registered_envs))
    env, _ = gymnax.make(options.env)
    problem = control.from_settings(env, settings, axis_name=axis_name)
    return common.Experiment(
        learner=algorithm.make(dataclasses.replace(records["config"], axis_name=axis_name), problem),
        evaluate=control.make_evaluate(env, problem, num_episodes=options.eval_episodes),
        score="return",
        steps_per_iteration=settings.num_envs * settings.num_steps,
    )


SCRIPT = common.Script(
    name="control",
    summary="Trains a method of policy optimisation on a gymnax environment.",
    options=Options,
    defaults={},
    sections=lambda options: {"problem": control.Settings},
    rows=lambda records: records["problem"].num_envs,
    build=build,
    title=lambda records: f"{records[''].algorithm} on {records[''].env}",
    unit="environment steps",
    curves=(Series("episode_return", "training"), Series("greedy_return", "greedy")),
    y_label="return",
)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    return common.main(SCRIPT, argv)


if __name__ == "__main__":
    flags.entry(main)
