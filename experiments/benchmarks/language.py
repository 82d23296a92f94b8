"""Time of one GRPO iteration on three-digit addition: sampling, scoring and two updates.

`python experiments/benchmarks/language.py` measures the table, one process per row; with `--width`
it measures one row, and `--json` prints that as the last line. An iteration has 512 completions and
the DAPO loss. Sampling (with scoring) and the whole iteration are timed; the rest is training.
"""

import resource
import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import config, language
from jaxrl_po.algorithms import dapo
from jaxrl_po.config import COUNT, static
from jaxrl_po.language.problem import DTYPES
from jaxrl_po.run import comparison, flags, parallel
from jaxrl_po.types import TrainState

# Width, blocks and new tokens for which the peer reports its time.
TABLE = ((64, 2, 5), (128, 4, 64))
UPDATES = 2


@config.record
class Options:
    """What is measured."""

    width: int = static(
        0, "width of the transformer; 0 measures the whole table", within=config.NON_NEGATIVE
    )
    layers: int = static(2, "its blocks", within=COUNT)
    heads: int = static(4, "its heads", within=COUNT)
    new_tokens: int = static(5, "token budget of a completion", unit="tokens", within=COUNT)
    num_prompts: int = static(64, "prompts of an iteration of each seed", within=COUNT)
    group_size: int = static(8, "completions of each prompt", within=COUNT)
    seeds: int = static(1, "parallel seeds", within=COUNT)
    num_microbatches: int = static(1, "microbatches whose gradients are accumulated", within=COUNT)
    remat: bool = static(False, "recompute activations in the backward pass to save memory")
    dtype: str = static("float32", "type of the matrix products", choices=tuple(DTYPES))
    iterations: int = static(10, "timed iterations, after one for warm-up", within=COUNT)
    devices: str = static("auto", "devices; auto on a CPU: one per core")
    json: bool = static(False, "print one JSON object as the last line")


def measure(options: Options) -> dict[str, Any]:
    """Times sampling alone and the whole iteration; medians over iterations.

    The model is untrained: one token in 14 ends a completion.
    """
    placement = parallel.choose(
        options.devices, num_seeds=options.seeds, num_rows=options.num_prompts
    )
    task = language.tasks.addition(3)
    model = language.ModelSettings(
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        mlp_width=4 * options.width,
        remat=options.remat,
        dtype=options.dtype,
    ).build(task.tokenizer.size)
    problem = language.make_problem(
        task,
        model,
        num_prompts=options.num_prompts,
        group_size=options.group_size,
        max_new_tokens=options.new_tokens,
    )
    settings = dapo.Config(
        num_epochs=UPDATES,
        num_microbatches=options.num_microbatches,
        dynamic_sampling="off",
        soft_overlong=False,
        overlong_filtering=False,
        axis_name=placement.axis_name,
    )
    learner = dapo.make(config.as_arrays(settings), problem)

    keys = jax.random.split(jax.random.key(0), options.seeds)
    whole = parallel.over_devices(learner, placement)

    def sample(state: TrainState) -> tuple[jax.Array, jax.Array]:
        """Collects and counts tokens; the score keeps the compiler from dropping the verifier."""
        _, batch = whole.sample(state)
        return batch.mask.sum(), batch.score.sum()

    state = jax.jit(whole.init)(keys)
    start = time.perf_counter()
    step = jax.jit(whole.step).lower(state).compile()
    compile_seconds = time.perf_counter() - start
    collect = jax.jit(sample).lower(state).compile()
    iteration, tokens, sampling = [], [], []
    for _ in range(options.iterations + 1):
        took, (generated, _) = comparison.clock(collect, state)
        sampling.append(took)
        tokens.append(float(generated))
        took, (state, _) = comparison.clock(step, state)
        iteration.append(took)
    seconds, sampled = median(iteration[1:]), median(sampling[1:])
    generated = sum(tokens[1:]) / options.iterations
    parameters = sum(x.size for x in jax.tree.leaves(state.params.policy)) // options.seeds
    trained = 6 * products(model, task.prompt_length, options.new_tokens) * UPDATES
    trained *= options.seeds * options.num_prompts * options.group_size
    peak = matrix_peak(DTYPES[options.dtype]) * (
        1 if jax.default_backend() == "cpu" else placement.num_devices
    )
    return {
        "width": options.width,
        "layers": options.layers,
        "new_tokens": options.new_tokens,
        "seeds": options.seeds,
        "parameters": parameters,
        "placement": placement.describe(),
        "seconds_per_iteration": round(seconds, 4),
        "sampling_seconds": round(sampled, 4),
        "training_seconds": round(seconds - sampled, 4),
        "sampled_tokens_per_second": round(generated / sampled),
        "trained_tokens_per_second": round(generated * UPDATES / (seconds - sampled)),
        "tokens_per_second": round(generated / seconds),
        "training_share_of_matrix_peak": round(trained / (seconds - sampled) / peak, 4),
        "matrix_peak_gflops": round(peak / 1e9),
        "compile_seconds": round(compile_seconds, 2),
        "peak_memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "device": jax.devices()[0].device_kind,
    }


def products(model: language.Transformer, prompt_length: int, new_tokens: int) -> int:
    """Weights × positions of the matrix products of one completion, without attention.

    2 operations each in the forward pass, 4 in the backward pass. At positions before the first
    output that is read, the last block computes only keys and values.
    """
    width, hidden, table = model.width, model.mlp_width, model.vocabulary * model.width
    keys_and_values = 2 * width * model.kv_heads * (width // model.heads)
    rest = 2 * width**2 + 3 * width * hidden
    positions = prompt_length + new_tokens - 1
    everywhere = table + model.layers * keys_and_values + (model.layers - 1) * rest
    return positions * everywhere + new_tokens * (rest + table)


def matrix_peak(dtype: Any, size: int = 0) -> float:
    """Operations per second of one large matrix product: the peak that utilisation refers to."""
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a).lower(a).compile()
    return 2 * size**3 / min(comparison.clock(product, a)[0] for _ in range(5))


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    options = flags.ask(
        argv,
        "benchmarks/language.py",
        "Times sampling and training of GRPO on three-digit addition.",
        Options,
    )
    if options is None:
        return 0
    if options.width:
        with flags.blame({"": Options}):
            row = measure(options)
        comparison.show(row, as_json=options.json)
        return 0
    print(
        f"{'width':>6} {'layers':>7} {'new tokens':>11} {'s / iteration':>14} "
        f"{'sampling s':>11} {'compile s':>10}  placement"
    )
    for width, layers, new_tokens in TABLE:
        numbers = [
            f"--width={width}",
            f"--layers={layers}",
            f"--new_tokens={new_tokens}",
            f"--devices={options.devices}",
        ]
        row = comparison.measure_apart(__file__, [*numbers, f"--iterations={options.iterations}"])
        print(
            f"{width:>6} {layers:>7} {new_tokens:>11} {row['seconds_per_iteration']:>14} "
            f"{row['sampling_seconds']:>11} {row['compile_seconds']:>10}  {row['placement']}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    flags.entry(main)
