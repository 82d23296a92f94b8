"""Computes the table of docs/scaling.md: memory, work and times of programs compiled for TPUs.

`python experiments/benchmarks/tpu.py --out=runs/tpu` compiles one program after another, each in a
new process, and resumes where an earlier call was stopped. The script needs
`jaxrl_po[tpu-compile]`.
"""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hlo_counts
import jax
from rich import filesize

from jaxrl_po import config, run
from jaxrl_po.config import COUNT, ConfigError, static
from jaxrl_po.run import errors
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.experiment import DOMAINS, Experiment
from jaxrl_po.run.store import folder


class Speed(NamedTuple):
    """Public figures of one chip, from its page at cloud.google.com/tpu/docs.

    Attributes:
      peak: FLOP/s of bfloat16 products.
      bandwidth: Bytes/s between HBM and the chip.
      links: Bytes/s to other chips, in one direction.
      unit: Number of rows and columns that a matrix unit multiplies at once.
      clock: Cycles/s: the peak divided by the operations of all units in a cycle.
    """

    peak: float
    bandwidth: float
    links: float
    unit: int
    clock: float


SPEEDS = {
    "v5e": Speed(197e12, 819e9, 200e9, 128, 1.50e9),
    "v5p": Speed(459e12, 2765e9, 600e9, 128, 1.75e9),
    "v6e": Speed(918e12, 1638e9, 400e9, 256, 1.75e9),
}


class Row(NamedTuple):
    """A row of the table: one program.

    Attributes:
      name: Name of the row in the table.
      machine: Name of the machine for `--compile_for`.
      flags: Arguments of `jaxrl-po`.
    """

    name: str
    machine: str
    flags: tuple[str, ...]


SIZES = ("--problem.num_envs=64", "--problem.num_steps=128")
LANGUAGE = (
    *("language", "--task=random", "--seeds=1", "--task.prompt_tokens=256", "--model.remat"),
    *("--problem.max_new_tokens=256", "--problem.group_size=8", "--model.dtype=bfloat16"),
    "--problem.num_prompts=64",
)
CONTROL = {
    ("CartPole-v1", "ppo"): (256, 4096),
    ("CartPole-v1", "trpo"): (256, 4096),
    ("craftax:Craftax-Symbolic-v1", "ppo"): (64, 256),
}
ALL, ADAPTERS = "all parameters", "adapters"
HOST, POD, CUBE = "tpu:v5e:2x4", "tpu:v5e:16x16", "tpu:v5p:4x4x4"
MESHES = {HOST: "data:8", POD: "data:64,model:4", CUBE: "data:16,model:4"}
MODELS = (
    ("grpo", "smollm2-135m", ADAPTERS, HOST),
    ("grpo", "smollm2-135m", ALL, HOST),
    ("ppo", "smollm2-135m", ADAPTERS, HOST),
    ("grpo", "qwen2.5-0.5b", ADAPTERS, HOST),
    ("grpo", "llama3.1-8b", ALL, POD),
    ("grpo", "llama3.1-8b", ALL, CUBE),
)


def rows() -> Iterator[Row]:
    """Yields every program of the table."""
    for (env, algorithm), numbers in CONTROL.items():
        for seeds in numbers:
            name = f"{algorithm} {env.partition(':')[2] or env}, {seeds:,} seeds"
            chosen = (f"--algorithm={algorithm}", f"--env={env}", *SIZES, f"--seeds={seeds}")
            yield Row(name, HOST, ("control", *chosen))
    for algorithm, shape, trained, machine in MODELS:
        chosen = (
            *(f"--algorithm={algorithm}", f"--model.shape={shape}", f"--mesh={MESHES[machine]}"),
            *(("--lora.rank=16",) if trained == ADAPTERS else ()),
            *(("--shard_params",) if machine != HOST else ()),
        )
        yield Row(f"{algorithm} {shape}, {trained}", machine, (*LANGUAGE, *chosen))


@config.record
class Options:
    """Settings of the table."""

    out: str = static("", "folder for tpu.jsonl and tpu.md", when=("json", False))
    only: str = static("", "part of the names and machines of the chosen rows; empty for all")
    seconds: int = static(1800, "time limit of a program", unit="seconds", within=COUNT)
    json: bool = static(
        False, "compile the chosen rows in this process, print each as JSON and write nothing"
    )


def measure(row: Row, seconds: int) -> dict[str, Any]:
    """Returns the figures of a row, computed in a new process, or the reason why there are none."""
    command = [sys.executable, __file__, f"--only={row.name} {row.machine}", "--json"]
    found: dict[str, Any] = {"name": row.name, "machine": row.machine}
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return found | {"error": f"not compiled in {seconds} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return found | {"error": (done.stderr.strip().splitlines() or ["no figures"])[-1]}
    return json.loads(lines[-1])


def figures(row: Row) -> dict[str, Any]:
    """Compiles the last program of a row and counts its work; raises RunError without a program."""
    script, *arguments = row.flags
    experiment = Experiment.parse(DOMAINS[script], arguments)
    programs = list[run.CompiledProgram]()
    try:
        programs.extend(run.compile_for(experiment, row.machine))
    except errors.RunError:  # raised after several programs if none of the programs fits
        if not programs:
            raise
    program = programs[-1]
    speed = SPEEDS[row.machine.split(":")[1]]
    found = program.as_json() | {"name": row.name, "flags": row.flags}
    try:
        text = program.as_text()
    except jax.errors.JaxRuntimeError as error:  # jaxlib 0.10 cannot print programs for v5p
        text, found["reason"] = "", f"its program cannot be read: {str(error).splitlines()[0]}"
    if text:
        counted = hlo_counts.Program(text, speed.unit)
        counts = counted.counts()
        found["counts"], found["seconds"] = dataclasses.asdict(counts), times(counts, speed)
        found["state"] = counted.argument_bytes()
    return found


def times(counts: hlo_counts.Counts, speed: Speed) -> dict[str, float]:
    """Returns the seconds of one run by each hardware limit alone.

    A loop is assumed to run for its largest number of iterations.
    """
    sent = sum(transfer.sent for transfer in counts.collectives.values())
    found = {
        "products": counts.padded / speed.peak,
        "memory": counts.bytes / speed.bandwidth,
        "links": sent / speed.links,
    }
    return found | ({"operations": counts.cycles / speed.clock} if counts.cycles else {})


def line(row: Mapping[str, Any]) -> str:
    """Formats a row of the table."""
    head = f"| {row['name']} | {row['machine'].removeprefix('tpu:')} |"
    memory = row.get("memory", {})
    if "arguments" not in memory:
        return f"{head} {row.get('error') or row['reason']} | | | | |\n"
    state = row.get("state", memory["arguments"])
    head += f" {filesize.decimal(state)} / {filesize.decimal(memory['total'])} |"
    if "counts" not in row:
        return f"{head} {row['reason']} | | | |\n"
    counts = row["counts"]
    padding = 1 - counts["flops"] / (counts["padded"] or 1)
    sent = sum(transfer["sent"] for transfer in counts["collectives"].values())
    limit = max(row["seconds"], key=row["seconds"].get)
    return (
        f"{head} {amount(counts['flops'])}FLOP, {padding:.0%} | "
        f"{filesize.decimal(int(counts['bytes']))} | {filesize.decimal(int(sent))} | "
        f"{1e3 * row['seconds'][limit]:,.1f} ms, {limit} |\n"
    )


def amount(number: float) -> str:
    """Formats a number with a metric prefix.

    Example:
      >>> amount(0), amount(950), amount(1.234e10)
      ('0 ', '950 ', '12.3 G')
    """
    if number < 1000:
        return f"{number:.0f} "
    power = min(5, int(math.log10(number) // 3))
    return f"{number / 1000**power:.3g} {' kMGTP'[power]}"


HEADER = (
    "| program | machine | state / peak | products, padding | to and from memory | "
    "sent | about |\n|---|---|---:|---:|---:|---:|---:|\n"
)


def main(argv: Sequence[str]) -> int:
    """Runs the script from command-line arguments; returns the exit status."""
    summary = "Computes the table of docs/scaling.md: programs compiled for TPUs."
    options = flags.ask(argv, "tpu.py", summary, Options)
    if options is None:
        return 0
    asked = [row for row in rows() if options.only in f"{row.name} {row.machine}"]
    if not asked:
        raise ConfigError("only", f"is in no row, such as {next(rows()).name}, got {options.only}")
    if options.json:
        jax.config.update("jax_platforms", "cpu")
        for row in asked:
            print(json.dumps(figures(row)), flush=True)
        return 0
    folder.inspect(options.out, resume=False, overwrite=True)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results = out / "tpu.jsonl"
    results.touch()
    done = {
        (row["name"], row["machine"]): row
        for row in map(json.loads, results.read_text(encoding="utf-8").splitlines())
    }
    for row in asked:
        if (row.name, row.machine) not in done:
            done[row.name, row.machine] = found = measure(row, options.seconds)
            with results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
            print(line(found), end="", flush=True)
    table = HEADER + "".join(line(done[row.name, row.machine]) for row in asked)
    (out / "tpu.md").write_text(table, encoding="utf-8")
    return 0


if __name__ == "__main__":
    flags.run_script(main)
