"""Memory per device and communication of GRPO with a reference, from the table of logical axes.

`python experiments/benchmarks/scale.py --out=runs/scale` writes `scale.md` and `scale.json`.
Nothing is allocated: parameters are shapes. `--compile` also asks the compiler for its own figures,
on as many CPU devices as the mesh has. Weak scaling: the number of prompts is per device.
"""

import dataclasses
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jaxrl_po import config, language
from jaxrl_po.algorithms import grpo
from jaxrl_po.config import COUNT, static
from jaxrl_po.language import ModelSettings
from jaxrl_po.language.transformer import LOGICAL_AXES
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment import flags
from jaxrl_po.run.experiment.flags import UsageError
from jaxrl_po.run.store import folder
from jaxrl_po.types import Learner, PyTree, TrainState

SIZES = {
    "10M": ModelSettings(width=256, layers=10, heads=4, kv_heads=4, mlp_width=1024),
    "100M": ModelSettings(width=768, layers=11, heads=12, kv_heads=12, mlp_width=3072),
    "1B": ModelSettings(width=2048, layers=15, heads=32, kv_heads=32, mlp_width=8192),
}
BYTES = 4  # float32 throughout
KINDS = ("params", "optimizer", "reference", "gradients", "gathered", "cache", "activations")
COLUMNS = {
    **{kind: kind for kind in KINDS},
    "cache": "KV cache",
    "remat": "with remat",
    "peak": "peak",
}
METHODS = ("paper", "compiled")


@config.record
class Options:
    """What is estimated."""

    out: str = static("", "folder for scale.md and scale.json")
    sizes: str = static(",".join(SIZES), f"transformers, of {', '.join(SIZES)}")
    devices: tuple[int, ...] = static((8, 64, 256), "device counts")
    model: tuple[int, ...] = static(
        (1, 4), "devices of the model axis (tensor parallel); the rest are data (fully sharded)"
    )
    compile: str = static(
        "10M:8:1,10M:8:4", "cases to compile as well, as size:devices:model,…; empty for none"
    )
    prompts: int = static(
        2, "prompts of an iteration for each device of the data axis", within=COUNT
    )
    group_size: int = static(8, "completions of each prompt", within=COUNT)
    new_tokens: int = static(256, "token budget of a completion", unit="tokens", within=COUNT)


class Case:
    """One transformer on one mesh.

    Args:
      name: of the size.
      settings: of the transformer.
      placement: one seed, parameters sharded.
      options: how much is sampled.
    """

    def __init__(self, name: str, settings: ModelSettings, placement: Placement, options: Options):
        if settings.kv_heads % placement.model_devices or settings.width % placement.data_devices:
            raise UsageError(
                f"--devices and --model: {placement.model_devices} devices must divide the "
                f"{settings.kv_heads} heads of {name}, and {placement.data_devices} "
                f"its width {settings.width}"
            )
        self.name, self.settings, self.placement, self.options = name, settings, placement, options
        self.task = language.tasks.addition(3)
        self.rows = options.prompts * options.group_size  # of one device of the data axis

    @property
    def label(self) -> str:
        """As in `--compile`."""
        return f"{self.name}:{self.placement.num_devices}:{self.placement.model_devices}"

    def learner(self) -> Learner:
        """GRPO with a reference, over stacked seeds and the mesh."""
        model = self.settings.build(self.task.tokenizer.size).clone(
            constrain=parallel.rows_over_data(self.placement)
        )
        problem = language.make_problem(
            self.task,
            model,
            num_prompts=self.options.prompts * self.placement.data_devices,
            group_size=self.options.group_size,
            max_new_tokens=self.options.new_tokens,
        )
        return parallel.over_mesh(
            grpo.make(config.as_arrays(grpo.Config()), problem), self.placement, LOGICAL_AXES
        )

    def state(self, learner: Learner) -> TrainState:
        """Shapes and shardings of the state."""
        shapes = jax.eval_shape(
            learner.init, jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
        )
        mesh, rules = parallel.make_mesh(self.placement), parallel.rules_of(self.placement)
        placed = parallel.shardings(shapes, mesh, LOGICAL_AXES, rules)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, placed
        )

    def memory(self, state: TrainState) -> dict[str, int]:
        """Bytes per device by purpose; `peak` is the larger of sampling and training.

        Activations are what the backward pass reads of each block: input and normalised input of
        attention and of the MLP, queries, keys, values and outputs of the heads, attention weights
        before and after normalisation, five arrays of the gated MLP. With `--model.remat` they are
        the inputs of both halves of every block, and everything of one block. The last block is
        counted like the others, although it computes little beyond keys and values of the prompt.
        """
        settings, share = self.settings, self.placement.model_devices
        length = self.task.prompt_length + self.options.new_tokens - 1
        narrow = self.rows * length * settings.width
        wide = self.rows * length * settings.mlp_width // share
        weights = self.rows * settings.heads * length**2 // share
        block = BYTES * (4 * narrow + 4 * narrow // share + 2 * weights + 5 * wide)
        sizes = {
            "params": held(state.params),
            "optimizer": held(state.opt_state),
            "reference": held(state.reference_params),
            "gradients": held(state.params),
            "gathered": self.gathered(state),
            "cache": 2 * BYTES * settings.layers * narrow // share,
            "activations": settings.layers * block,
            "remat": settings.layers * BYTES * 4 * narrow + block,
        }
        always = sizes["params"] + sizes["optimizer"] + sizes["reference"]
        training = sizes["gradients"] + sizes["activations"]
        return {**sizes, "peak": always + sizes["gathered"] + max(sizes["cache"], training)}

    def gathered(self, state: TrainState) -> int:
        """Bytes of the policy gathered over the data axis, as the sampler holds it."""
        mesh = parallel.make_mesh(self.placement)
        placed = parallel.shardings(state, mesh, LOGICAL_AXES, parallel.TENSOR_PARALLEL)
        return held(
            jax.tree.map(
                lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
                state.params,
                placed.params,
            )
        )

    def communication(self, state: TrainState) -> dict[str, int]:
        """Bytes that one device receives in one iteration of one update, with ring collectives.

        The policy is gathered for the prompts, for all further tokens, for the forward and backward
        pass, and for the KL of the update; the reference once; the gradient is reduce-scattered
        once. With tensor parallelism, each block all-reduces activations twice in the forward pass
        and twice in the backward pass.
        """
        settings, model = self.settings, self.placement.model_devices
        received = self.gathered(state) - held(state.params)
        sampled = self.options.prompts * self.task.prompt_length + self.rows * (
            self.options.new_tokens - 1
        )
        trained = self.rows * (self.task.prompt_length + self.options.new_tokens - 1)
        summed = 2 * BYTES * settings.layers * settings.width * (sampled + 4 * trained)
        return {
            "all_gather": 5 * received,
            "reduce_scatter": received,
            "all_reduce": 2 * summed * (model - 1) // model,
        }

    def compiled(self, learner: Learner, state: TrainState) -> dict[str, Any]:
        """The compiler's figures for the same program."""
        begun, data = time.perf_counter(), self.placement.data_devices
        program = jax.jit(learner.step, donate_argnums=0).lower(state).compile()
        analysis, text = program.memory_analysis(), program.as_text()
        if analysis is None or text is None:
            raise RuntimeError("this backend reports neither memory nor program")
        return {
            "state": analysis.argument_size_in_bytes,
            "temporary": analysis.temp_size_in_bytes,
            "all_gather": gathered_bytes(text) * (data - 1) // data,
            "seconds": round(time.perf_counter() - begun, 1),
        }


def held(tree: PyTree) -> int:
    """Bytes per device of shapes with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * BYTES for leaf in jax.tree.leaves(tree)
    )


def gathered_bytes(program: str) -> int:
    """Bytes of the results of all matrix all-gathers in a compiled program, each counted once.

    Example:
      >>> gathered_bytes("%a = f32[8,4]{1,0} all-gather(%b), dimensions={0}")
      128
    """
    return sum(
        BYTES * int(rows) * int(columns)
        for rows, columns in re.findall(r"= f32\[(\d+),(\d+)\]\S* all-gather\(", program)
    )


def cases_of(options: Options) -> list[Case]:
    """Every transformer on every mesh."""
    names = options.sizes.split(",")
    return [
        Case(
            name,
            flags.lookup("sizes", name, SIZES),
            Placement(1, 1, devices // model, model, shard_params=True),
            options,
        )
        for name in names
        for devices in options.devices
        for model in options.model
    ]


def put(case: Case, *, compiles: bool) -> dict[str, Any]:
    """One row of the table, in bytes."""
    learner = case.learner()
    state = case.state(learner)
    return {
        "size": case.name,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        "devices": case.placement.num_devices,
        "data": case.placement.data_devices,
        "model": case.placement.model_devices,
        "memory": case.memory(state),
        "communication": case.communication(state),
        "compiled": case.compiled(learner, state) if compiles else None,
    }


def table(rows: Sequence[Mapping[str, Any]], options: Options) -> str:
    """The rows as Markdown, in MB."""
    names = ("size", "data × model")
    header = [*names, *COLUMNS.values(), "all-gather", "reduce-scatter", "all-reduce"]
    compared = [f"{of}, {by}" for of in ("state", "temporary", "all-gather") for by in METHODS]
    compiled = [*names, *compared, "compile s"]
    plain, checked = [], []
    for row in rows:
        memory, traffic, seen = row["memory"], row["communication"], row["compiled"]
        mesh = [row["size"], f"{row['data']} × {row['model']}"]
        plain.append(
            [*mesh, *(mb(memory[name]) for name in COLUMNS), *(mb(x) for x in traffic.values())]
        )
        if seen is not None:
            state = memory["params"] + memory["optimizer"] + memory["reference"]
            pairs = [state, seen["state"], memory["peak"] - state, seen["temporary"]]
            pairs += [traffic["all_gather"], seen["all_gather"]]
            checked.append([*mesh, *map(mb, pairs), str(seen["seconds"])])
    work = (
        f"{options.prompts} prompts × {options.group_size} completions "
        f"of {options.new_tokens} tokens"
    )
    text = f"GRPO with a reference, float32. On each device of the data axis {work}. "
    text += f"MB of one device.\n\n{markdown(header, plain)}"
    said = "\nOn paper and as the compiler reports it:\n\n"
    return text + (f"{said}{markdown(compiled, checked)}" if checked else "")


def mb(size: int) -> str:
    """Bytes as MB, to three figures.

    Example:
      >>> mb(1_234_567), mb(123_456_789), mb(0)
      ('1.23', '123', '0')
    """
    return f"{size / 1e6:,.{max(0, 2 - int(math.log10(max(size, 1e6) / 1e6)))}f}" if size else "0"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * 2 + ["---:"] * (len(header) - 2), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Memory and communication of larger transformers, from the table of axes."
    options = flags.ask(argv, "scale.py", summary, Options)
    if options is None:
        return 0
    folder.inspect(options.out, resume=False, overwrite=True)
    for devices in options.devices:
        for model in options.model:
            if min(devices, model) < 1 or devices % model:
                raise UsageError(f"--model={model} must divide --devices={devices}")
    # As many devices as requested, on which nothing is allocated.
    jax.config.update("jax_platforms", "cpu")
    with flags.blame({"": Options}):
        parallel.choose(max(options.devices), num_seeds=1, num_rows=max(options.devices))
    cases = cases_of(options)
    wanted = {label for label in options.compile.split(",") if label}
    for label in wanted - {case.label for case in cases}:
        raise UsageError(f"--compile={label} is none of {', '.join(case.label for case in cases)}")
    with folder.claim(options.out, overwrite=False) as out:
        rows = []
        for case in cases:
            rows.append(put(case, compiles=case.label in wanted))
            print(f"{case.label}: {mb(rows[-1]['memory']['peak'])} MB of each device", flush=True)
        folder.write_json(
            out / "scale.json", {"options": dataclasses.asdict(options), "rows": rows}
        )
        (out / "scale.md").write_text(table(rows, options), encoding="utf-8")
    print(table(rows, options), end="")
    return 0


if __name__ == "__main__":
    flags.entry(main)
