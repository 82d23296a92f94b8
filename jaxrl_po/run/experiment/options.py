"""Settings that every training command shares."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Generic, NamedTuple, Self, TypeVar

from jaxrl_po import config
from jaxrl_po.config import COUNT, GIVEN, NON_NEGATIVE, SEED, ConfigError, Interval, static
from jaxrl_po.run.experiment import user_code
from jaxrl_po.run.experiment.registry import METHODS, MethodConfig, MethodEntry, Record

AUTO = "auto"
# All `option`s have one value in a sweep; a `start_option` is not stored.
option = functools.partial(static, sweep="same")
common_option = functools.partial(option, common=True)
start_option = functools.partial(option, stored=False)
process_option = functools.partial(start_option, when=("distributed", True))
TUNED = "with settings that suit it, which given ones replace"  # precedes them in a line
LINES = 50  # approximate number of lines in metrics.jsonl if `--log_every` is 0


@config.record
class RunOptions:
    """Options that every training command has."""

    algorithm: str = common_option(
        "ppo", f"one of {', '.join(METHODS)}, or an entry of your own as file.py:name"
    )
    out: str = common_option(
        "",
        "folder for the results; new or empty, or see --resume and --overwrite",
        resume="any",
        compared=False,
    )
    surrogate: str = option(
        "", "function that replaces the surrogate of the method, as file.py:name"
    )
    advantage: str = option(
        "",
        "function of a trajectory that replaces the advantage of a method with a critic, as "
        "file.py:name",
    )
    optimizer: str = option(
        "",
        "function that makes an optax transformation to replace the optimizer, as file.py:name; "
        "--config.optimizer takes a name",
    )
    seeds: int = common_option(
        16, "runs side by side, each with its own random numbers", unit="seeds", within=COUNT
    )
    seed: int = common_option(0, "base seed; the keys of all runs are derived from it", within=SEED)
    total_steps: int = common_option(
        500_000,
        "length of each run, per seed: environment steps, or completions; 0 only makes and "
        "saves the initial policy",
        within=NON_NEGATIVE,
        resume="grows",
    )
    devices: str = common_option(
        "auto",
        "devices to shard seeds (or rows) over; on a CPU, auto makes one per core",
        resume="any",
    )
    mesh: str = option(
        "",
        "devices per axis, as in seed:2,data:4, which shards seeds over 2 and rows over 4; "
        "model:M shards a transformer's blocks",
        resume="any",
    )
    log_every: int = option(
        0,
        f"iterations pooled into one line of metrics; 0 makes about {LINES} lines",
        unit="iterations",
        within=NON_NEGATIVE,
        sweep="absent",
    )
    eval_every: int = option(
        5, "lines between evaluations", unit="lines", within=COUNT, sweep="absent"
    )
    checkpoint_every: int = option(
        1, "lines between checkpoints", unit="lines", within=COUNT, sweep="absent"
    )
    deterministic: bool = option(
        False,
        "use deterministic GPU kernels, and resume only where the run equals an uninterrupted "
        "one bit for bit: on the same machine and devices, with the same versions and code; "
        "on a CPU, kernels are always deterministic",
        sweep="absent",
    )
    compilation_cache: str = option(
        AUTO,
        "folder where compiled programs are kept for the next run; auto is one in the user's "
        "cache, empty keeps none",
        resume="any",
    )
    tensorboard: bool = common_option(
        False,
        "also write event files for TensorBoard, to --out/tensorboard",
        resume="any",
        sweep="absent",
    )
    wandb: str = common_option(
        "",
        "project of Weights & Biases to also log to; empty for none",
        resume="any",
        sweep="absent",
    )
    exporter: str = option(
        "",
        "class of your own that gets each line of metrics, as file.py:Name; see run.Exporter",
        resume="any",
        sweep="absent",
    )
    resume: bool = start_option(
        False, "resume the run in --out; flags that are not given keep their values", common=True
    )
    overwrite: bool = start_option(False, "replace the run in --out", common=True)
    compile_for: str = start_option(
        "",
        "compile the programs of an iteration for a machine that need not be attached, print the "
        "memory of each, train nothing: tpu:v5e:2x4 (also v5p, v6e), cpu:8, or gpu if attached",
    )
    json: bool = start_option(
        False, "with --compile_for, one JSON object for each program", when=("compile_for", GIVEN)
    )
    distributed: bool = start_option(
        False,
        "be one of several processes, all started with the same flags except --process_id",
        sweep="absent",
    )
    coordinator: str = process_option(
        "",
        "host:port where process 0 listens; empty to ask the cluster (SLURM, Kubernetes, TPU pod)",
        compared=False,
    )
    num_processes: int = process_option(
        0, "processes of the run; 0 to ask the cluster", within=NON_NEGATIVE
    )
    process_id: int = process_option(
        -1,
        "number of this process, from 0; -1 to ask the cluster",
        within=Interval(-1),
        compared=False,
    )
    coordinator_timeout: int = process_option(
        120,
        "time limit for all processes to join, and later for a heartbeat of each",
        unit="seconds",
        within=COUNT,
    )

    def validate(self) -> None:
        """Raises ConfigError for `devices` or `distributed` together with `compile_for`."""
        if self.compile_for and (self.distributed or self.devices != AUTO):
            raise ConfigError(
                "distributed" if self.distributed else "devices",
                "must be left out with compile_for, which names all devices",
            )

    @property
    def entry(self) -> MethodEntry[Any]:
        """Returns the entry of the method."""
        return user_code.find("algorithm", self.algorithm, METHODS)

    @property
    def shards_params(self) -> bool:
        """Returns whether parameters are sharded over the devices of the data axis."""
        return False


OptionsOf = TypeVar("OptionsOf", bound=RunOptions)
PREFIXES = {  # prefix of a section's flags, if the prefix differs from the section's name
    "run": "",
    "method": "config",
}


class InitialModel(NamedTuple):
    """Model that a run starts from, according to the files of `--init_from`.

    Attributes:
      pretrained: Absolute path of the pretrained model's folder or GGUF file, which `--init_from`
        names or leads to through earlier runs; empty without a pretrained model.
      by_run: Whether `--init_from` names an earlier run.
    """

    pretrained: str = ""
    by_run: bool = False


NEW_MODEL = InitialModel()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig(Generic[OptionsOf]):
    """All settings of a run.

    Attributes:
      run: Options of the run, without prefix.
      method: Hyperparameters of the method, an `algorithms.<name>.Config`.
      initial: Model that the run starts from; not a section of flags.
    """

    run: OptionsOf
    method: MethodConfig
    initial: InitialModel = NEW_MODEL

    @classmethod
    def of_sections(cls, sections: Mapping[str, Record], initial: InitialModel = NEW_MODEL) -> Self:
        """Makes the config from a mapping of the prefix of flags to the record of these flags."""
        names = {x.name: PREFIXES.get(x.name, x.name) for x in dataclasses.fields(cls)}
        found: dict[str, Any] = {x: sections[y] for x, y in names.items() if y in sections}
        return cls(**found, initial=initial)

    def continued(self) -> Self:
        """Returns the config that resuming or loading the run uses.

        The config lacks the earlier run of `init_from` if the checkpoints hold its parameters.
        """
        return self

    def sections(self) -> dict[str, Record]:
        """Returns the records by the prefix of their flags; a field may be a tuple of records."""
        found: dict[str, Any] = {}
        for name, x in vars(self).items():
            found |= x._asdict() if hasattr(x, "_asdict") else {PREFIXES.get(name, name): x}
        return {prefix: x for prefix, x in found.items() if isinstance(x, Record)}
