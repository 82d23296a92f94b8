"""The flags that every training command shares."""

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, SEED, ConfigError, Interval, static
from jaxrl_po.run.experiment.methods import ALGORITHMS

AUTO = "auto"
LINES = 50  # of metrics.jsonl, where --log_every is left to choose


@config.record
class Options:
    """The run as a whole."""

    algorithm: str = static("ppo", f"one of {', '.join(ALGORITHMS)}")
    out: str = static("", "folder for the results; new or empty, or see --resume and --overwrite")
    seeds: int = static(
        16, "runs side by side, each with its own random numbers", unit="seeds", within=COUNT
    )
    seed: int = static(0, "base seed; the keys of all runs are derived from it", within=SEED)
    total_steps: int = static(
        500_000,
        "length of each run, per seed: environment steps, or completions; 0 only makes and "
        "saves the initial policy",
        within=NON_NEGATIVE,
    )
    devices: str = static(
        "auto", "devices to shard seeds (or rows) over; on a CPU, auto makes one per core"
    )
    mesh: str = static(
        "",
        "devices per axis, as in seed:2,data:4, which shards seeds over 2 and rows over 4; "
        "model:M shards a transformer's blocks",
    )
    log_every: int = static(
        0,
        f"iterations pooled into one line of metrics; 0 makes about {LINES} lines",
        unit="iterations",
        within=NON_NEGATIVE,
    )
    eval_every: int = static(5, "lines between evaluations", unit="lines", within=COUNT)
    checkpoint_every: int = static(1, "lines between checkpoints", unit="lines", within=COUNT)
    deterministic: bool = static(
        False,
        "use deterministic GPU kernels, and resume only where the run equals an uninterrupted "
        "one bit for bit: on the same machine and devices, with the same versions and code; "
        "on a CPU, kernels are always deterministic",
    )
    compilation_cache: str = static(
        AUTO,
        "folder where compiled programs are kept for the next run; auto is one in the user's "
        "cache, empty keeps none",
    )
    tensorboard: bool = static(
        False, "also write event files for TensorBoard, to --out/tensorboard"
    )
    wandb: str = static("", "project of Weights & Biases to also log to; empty for none")
    resume: bool = static(
        False, "resume the run in --out; flags that are not given keep their values"
    )
    overwrite: bool = static(False, "replace the run in --out")
    compile_for: str = static(
        "",
        "compile the programs of an iteration for a machine that need not be attached, print the "
        "memory of each, train nothing: tpu:v5e:2x4 (also v5p, v6e), cpu:8, or gpu if attached",
    )
    json: bool = static(False, "with --compile_for, one JSON object for each program")
    distributed: bool = static(
        False, "be one of several processes, all started with the same flags except --process_id"
    )
    coordinator: str = static(
        "",
        "host:port where process 0 listens; empty to ask the cluster (SLURM, Kubernetes, TPU pod)",
    )
    num_processes: int = static(
        0, "processes of the run; 0 to ask the cluster", within=NON_NEGATIVE
    )
    process_id: int = static(
        -1, "number of this process, from 0; -1 to ask the cluster", within=Interval(-1)
    )
    coordinator_timeout: int = static(
        120,
        "time limit for all processes to join, and later for a heartbeat of each",
        unit="seconds",
        within=COUNT,
    )

    def validate(self) -> None:
        """Refuses settings without effect."""
        for name in ("coordinator", "num_processes", "process_id", "coordinator_timeout"):
            config.require_effect(self, name, self.distributed, "distributed is given")
        config.require_effect(self, "json", bool(self.compile_for), "compile_for is given")
        if self.compile_for and (self.distributed or self.devices != AUTO):
            raise ConfigError(
                "distributed" if self.distributed else "devices",
                "must be left out with compile_for, which names all devices",
            )
