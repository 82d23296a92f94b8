"""What programs need of TPUs, compiled for them on a CPU: the table of docs/scaling.md.

`python experiments/benchmarks/tpu.py --out=runs/tpu` compiles one program after another, each in a
process of its own, and resumes where it was stopped. It needs `jaxrl_po[tpu-compile]`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich import filesize

from jaxrl_po import config
from jaxrl_po.config import COUNT, ConfigError, static
from jaxrl_po.run.ahead.report import amount
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.store import folder


class Row(NamedTuple):
    """A program.

    Attributes:
      name: in the table.
      machine: as in `--compile_for`.
      flags: of `jaxrl-po`.
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
    """Every program of the table."""
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
    """What is compiled."""

    out: str = static("", "folder for tpu.jsonl and tpu.md")
    only: str = static("", "rows whose name or machine holds this; empty for all")
    seconds: int = static(1800, "time limit of a program", unit="seconds", within=COUNT)


def measure(row: Row, seconds: int) -> dict[str, Any]:
    """The report of one program, or why there is none."""
    command = [sys.executable, "-m", "jaxrl_po", *row.flags]
    command += [f"--compile_for={row.machine}", "--json"]
    found: dict[str, Any] = {"name": row.name, "machine": row.machine, "command": command[1:]}
    try:
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return found | {"error": f"not compiled in {seconds} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not lines:
        return found | {"error": (done.stderr.strip().splitlines() or ["no report"])[-1]}
    return found | json.loads(lines[-1])


def line(row: Mapping[str, Any]) -> str:
    """A row of the table."""
    head = f"| {row['name']} | {row['machine'].removeprefix('tpu:')} |"
    memory = row.get("memory", {})
    if "state" not in memory:
        return f"{head} {row.get('error') or row['why']} | | | | |\n"
    held = [memory[name] for name in ("state", "peak", "counted") if name in memory]
    head += f" {' / '.join(map(filesize.decimal, held))} |"
    if not row["counts"]:
        return f"{head} {row['why']} | | | |\n"
    counts = row["counts"]
    padding = 1 - counts["flops"] / (counts["padded"] or 1)
    sent = sum(transfer["sent"] for transfer in counts["collectives"].values())
    limit = max(row["seconds"], key=row["seconds"].get)
    return (
        f"{head} {amount(counts['flops'])}FLOP, {padding:.0%} | "
        f"{filesize.decimal(int(counts['bytes']))} | {filesize.decimal(int(sent))} | "
        f"{1e3 * row['seconds'][limit]:,.1f} ms, {limit} |\n"
    )


HEADER = (
    "| program | machine | state / peak / by shapes | products, padding | to and from memory | "
    "sent | about |\n|---|---|---:|---:|---:|---:|---:|\n"
)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "What programs need of TPUs, compiled for them on a CPU."
    options = flags.ask(argv, "tpu.py", summary, Options)
    if options is None:
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
    asked = [row for row in rows() if options.only in f"{row.name} {row.machine}"]
    if not asked:
        raise ConfigError("only", f"is in no row, such as {next(rows()).name}, got {options.only}")
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
    flags.entry(main)
