"""The flags that every training command shares."""

from jaxrl_po import config
from jaxrl_po.config import COUNT, NON_NEGATIVE, Interval, static
from jaxrl_po.run.methods import ALGORITHMS

AUTO = "auto"
LINES = 50  # of metrics.jsonl, where --log_every is left to choose


@config.record
class Options:
    """The run as a whole."""

    algorithm: str = static("ppo", f"one of {', '.join(ALGORITHMS)}")
    out: str = static("", "folder for the results, which must be new, empty or resumed")
    seeds: int = static(
        16, "runs side by side, each with its own random numbers", unit="seeds", within=COUNT
    )
    seed: int = static(0, "base seed, from which those of all runs follow", within=NON_NEGATIVE)
    total_steps: int = static(
        500_000,
        "length of each run, counted for one seed: environment steps, or completions; 0 "
        "only makes and saves the initial policy",
        within=NON_NEGATIVE,
    )
    devices: str = static(
        "auto", "devices to shard seeds (or rows) over; auto on a CPU is one for each core"
    )
    mesh: str = static(
        "",
        "devices by hand, as in seed:2,data:4: seeds over the one axis, rows over the "
        "other; model:M cuts a transformer's blocks",
    )
    log_every: int = static(
        0,
        f"iterations pooled into one line; 0 makes about {LINES} lines",
        unit="iterations",
        within=NON_NEGATIVE,
    )
    eval_every: int = static(5, "lines between evaluations", unit="lines", within=COUNT)
    checkpoint_every: int = static(1, "lines between checkpoints", unit="lines", within=COUNT)
    patience: int = static(
        10,
        "iterations in a row with non-finite updates only, after which the run stops",
        within=COUNT,
    )
    idle_patience: int = static(
        100,
        "iterations in a row in which no group of any seed is informative, after which the "
        "run ends",
        within=COUNT,
    )
    deterministic: bool = static(
        False,
        "have a GPU add in a fixed order, and go on (--resume) only where the run must "
        "equal one in one go to the last bit: on the same machine and devices, with the "
        "same versions and code; a CPU always adds in a fixed order",
    )
    compilation_cache: str = static(
        AUTO,
        "folder where compiled programs are kept for the next run; auto is one in the user's cache, "
        "empty keeps none",
    )
    tensorboard: bool = static(
        False, "write event files for TensorBoard as well, to --out/tensorboard"
    )
    wandb: str = static("", "project of Weights & Biases to log to as well; empty for none")
    resume: bool = static(
        False, "go on with the run in --out; flags that are not given are as they were"
    )
    overwrite: bool = static(False, "replace the run in --out")
    distributed: bool = static(
        False, "be one of several processes, all started with the same flags but for --process_id"
    )
    coordinator: str = static(
        "",
        "host:port where process 0 listens; empty to ask the cluster (SLURM, Kubernetes, TPU pod)",
    )
    num_processes: int = static(
        0, "processes of the run; 0 to ask the cluster", within=NON_NEGATIVE
    )
    process_id: int = static(
        -1, "of this process, from 0; -1 to ask the cluster", within=Interval(-1)
    )
    coordinator_timeout: int = static(
        120,
        "wait for all processes to meet, and later for a sign of life of each",
        unit="seconds",
        within=COUNT,
    )

    def validate(self) -> None:
        """Refuses what would have no effect."""
        for name in ("coordinator", "num_processes", "process_id", "coordinator_timeout"):
            config.require_effect(self, name, self.distributed, "--distributed is given")
