"""Settings of a run in a control environment."""

import dataclasses
from typing import Self

from jaxrl_po import config, control
from jaxrl_po.config import COUNT, ConfigError
from jaxrl_po.run.experiment.options import RunConfig, RunOptions, common_option, option
from jaxrl_po.run.experiment.registry import METHODS, SUITES
from jaxrl_po.run.host import vector_envs

TRAJECTORIES, GROUPS, VINE = SAMPLINGS = ("trajectories", "groups", "vine")


@config.record
class ControlOptions(RunOptions):
    """Options of a run in a control environment."""

    env: str = common_option(
        "CartPole-v1",
        "a registered gymnax environment, a class of your own as file.py:Name, one of another "
        f"suite in JAX ({', '.join(f'{suite}:Name' for suite in SUITES)}, or of a suite of your "
        "own as file.py:suite:Name), or one that runs on the host: envpool:Name, gymnasium:Name",
    )
    env_params: str = option(
        "",
        "arguments of the environment, a JSON object: fields of the default parameters of one of "
        "gymnax or of your own, or arguments of jaxrl_po.control.adapters, envpool.make or "
        "gymnasium.make_vec",
    )
    policy: str = common_option(
        "", "a Flax module of your own as file.py:Name, in place of the policy of --network"
    )
    critic: str = option(
        "", "Flax module of your own as file.py:Name, in place of the critic of --network"
    )
    actor_critic: str = option(
        "", "Flax module as file.py:Name that replaces both: observation to (distribution, value)"
    )
    init_from: str = common_option(
        "",
        "folder of an earlier run of this script (the latest parameters of its first seed), with "
        "which every seed begins; empty for none",
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
        were=(("path", TRAJECTORIES),),
    )
    tuned: bool = option(
        True,
        "use the settings that a sweep found for this method and environment, if there are any, in "
        "place of the defaults shown here",
        common=True,
    )
    eval_episodes: int = option(
        32, "greedy episodes per evaluation and seed", unit="episodes", within=COUNT
    )

    def validate(self) -> None:
        """Raises ConfigError for a field that is out of its range or has no effect."""
        super().validate()
        if bool(self.demonstrations) != self.entry.supervised:
            supervised = " or ".join(name for name, entry in METHODS.items() if entry.supervised)
            raise ConfigError(
                "demonstrations",
                f"must name an .npz file with algorithm = {supervised} and be left out with any "
                f"other, got {self.demonstrations!r}",
            )
        if vector_envs.is_host(self.env):
            self.require_host()

    def require_host(self) -> None:
        """Raises ConfigError for an option that environments on the host do not have."""
        if self.demonstrations:
            raise ConfigError(
                "demonstrations", f"must be left out with env = {self.env}, which is not in JAX"
            )
        for name in ("distributed", "deterministic"):
            if getattr(self, name):
                raise ConfigError(
                    name, f"must be off with env = {self.env}: its states cannot be saved"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlConfig(RunConfig[ControlOptions]):
    """All settings of a run in a control environment.

    Attributes:
      problem: Sizes of an iteration, by the way to collect rollouts.
      network: Settings of the networks of policy and critic.
    """

    problem: control.ControlSettings | control.GroupSettings | control.VineSettings
    network: control.NetworkSettings

    def continued(self) -> Self:
        """Returns the config without `init_from`, since checkpoints hold these parameters."""
        return dataclasses.replace(self, run=dataclasses.replace(self.run, init_from=""))
