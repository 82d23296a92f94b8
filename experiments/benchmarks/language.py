"""Measures time, compile time and memory of one GRPO iteration: sampling, scoring and updates.

`python experiments/benchmarks/language.py` measures every row of the benchmark's table, three-digit
addition with 512 completions, each in its own process; the flag `--width` measures a single row.
The flag `--shape` measures random prompts and random weights at the shape of a pretrained model.
The flag `--json` prints one JSON object as the last line. The training loss is DAPO's. Sampling
(with scoring) and the complete iteration are timed; the time of training is the difference. The
flag `--profile` shows, on one core, the time of each kind of operation.
"""

import dataclasses
import math
import os
import re
import resource
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import timing
import xla_profile
from xla_profile import Operation

from jaxrl_po import config, language, types
from jaxrl_po.algorithms import dapo
from jaxrl_po.config import COUNT, ConfigError, static
from jaxrl_po.language.lora import Lora
from jaxrl_po.language.mismatch import DTYPES
from jaxrl_po.language.pretrained import architectures
from jaxrl_po.language.pretrained.shapes import SHAPES
from jaxrl_po.language.transformer import ONE_HOT
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.experiment import flags
from jaxrl_po.types import TrainState

# Width, number of blocks and of new tokens at which the peer reports its time.
TABLE = ((64, 2, 5), (128, 4, 64))


@config.record
class Options:
    """Settings of the benchmark."""

    width: int = static(
        0, "width of the transformer; 0 measures the whole table", within=config.NON_NEGATIVE
    )
    layers: int = static(2, "blocks of the transformer", within=COUNT)
    heads: int = static(4, "heads of the transformer", within=COUNT)
    shape: str = static(
        "none",
        "shape of a pretrained model, in place of the sizes above",
        choices=("none", *SHAPES),
    )
    prompt_tokens: int = static(64, "length of a prompt, with --shape", unit="tokens", within=COUNT)
    new_tokens: int = static(5, "token budget of a completion", unit="tokens", within=COUNT)
    lengths: str = static(
        "sampled",
        "lengths of completions: sampled by an untrained model; geometric:0.2, with a mean of a "
        "fifth of the budget; equal, all as long as the budget",
    )
    num_prompts: int = static(64, "prompts of an iteration of each seed", within=COUNT)
    group_size: int = static(8, "completions of each prompt", within=COUNT)
    seeds: int = static(1, "parallel seeds", within=COUNT)
    updates: int = static(2, "gradient steps of an iteration", within=COUNT)
    num_microbatches: int = static(
        0,
        "microbatches whose gradients are accumulated; 0 takes 1, with --shape one per prompt",
        within=config.NON_NEGATIVE,
    )
    remat: bool = static(False, "recompute activations in the backward pass to save memory")
    dtype: str = static("float32", "type of the matrix products", choices=tuple(DTYPES))
    iterations: int = static(
        0,
        "timed iterations, after one for warm-up; 0 takes 10, with --shape 3",
        within=config.NON_NEGATIVE,
    )
    devices: str = static("auto", "devices; auto on a CPU: one per core, with --shape one")
    profile: bool = static(False, "show where the time goes instead, on one core of a CPU")
    count: bool = static(False, "count the kernels (on a CPU the operations) of a sampled token")
    json: bool = static(False, "print one JSON object as the last line")


@config.record
class Adapters:
    """Settings of low-rank adapters, which replace full training."""

    rank: int = static(0, "rank of adapters, with --shape; 0 for none", within=config.NON_NEGATIVE)


SECTIONS = {"": Options, "lora": Adapters}  # sections of the command's flags

Measured = tuple[language.Task, language.Transformer, types.Problem]


class Ending(language.Transformer):
    """Transformer that ends a completion with the same probability in every decoding step.

    Attributes:
      end: id of the token that ends a completion.
      probability: probability of the end token, in [0, 1).
    """

    end: int = 0
    probability: float = 0.0

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Applies `Transformer`.

        Sets the end's probability in decoding, which is recognised by its cache.
        """
        logits, cache = super().__call__(*arguments, **options)
        if cache is None:
            return logits, cache
        rest = jax.nn.logsumexp(logits.at[..., self.end].set(-jnp.inf), axis=-1)
        odds = jnp.float32(self.probability / (1.0 - self.probability))
        return logits.at[..., self.end].set(rest + jnp.log(odds)), cache


def probability_of(lengths: str, budget: int) -> float:
    """Returns the probability of the end token in each step, from the requested mean length."""
    mean = re.fullmatch(r"geometric:(\d*\.\d+)", lengths)
    tokens = float(mean[1]) * budget if mean else math.inf if lengths == "equal" else 0.0
    if tokens <= 1.0:
        valid = "sampled, equal, or geometric:0.2, a share of more than one token"
        raise ConfigError("lengths", f"must be {valid}, got {lengths}")
    return 1.0 / tokens


def ending(options: Options, model: language.Transformer, end: int) -> language.Transformer:
    """Returns the model, wrapped so that completions have the requested lengths."""
    if options.lengths == "sampled":
        return model
    fields = [field.name for field in dataclasses.fields(model) if field.name != "name"]
    return Ending(
        **{name: getattr(model, name) for name in fields},
        end=end,
        probability=probability_of(options.lengths, options.new_tokens),
    )


def of(options: Options, adapters: Adapters) -> Measured:
    """Builds the model and the problem that the options request."""
    return of_addition(options) if options.shape == "none" else of_shape(options, adapters)


def of_addition(options: Options) -> Measured:
    """Builds the problem of three-digit addition with a model of the requested sizes."""
    task = language.tasks.addition(3)
    sizes = language.ModelSettings(
        width=options.width,
        layers=options.layers,
        heads=options.heads,
        kv_heads=options.heads,
        mlp_width=4 * options.width,
        remat=options.remat,
        dtype=options.dtype,
    )
    model = ending(options, sizes.build(task.tokenizer.size), task.tokenizer.eos)
    return task, model, problem_of(options, task, model)


def of_shape(options: Options, adapters: Adapters) -> Measured:
    """Builds random prompts, and a model with random weights of a pretrained model's spread."""
    model = architectures.read(SHAPES[options.shape], dtype=options.dtype, remat=options.remat)
    task = language.tasks.random_prompts(
        model.vocabulary, options.prompt_tokens, options.new_tokens
    )
    model = ending(options, model, task.tokenizer.eos)
    if not adapters.rank:
        return task, model, problem_of(options, task, model, warm=lambda params, _: spread(params))
    base = jax.jit(lambda key: spread(model.init(key, jnp.zeros((1, 1), int), jnp.zeros(1, int))))(
        jax.random.key(1)
    )
    model = model.clone(lora=Lora(adapters.rank, 2.0 * adapters.rank))
    return task, model, problem_of(options, task, model, initial=base)


def problem_of(
    options: Options, task: language.Task, model: language.Transformer, **initial: Any
) -> types.Problem:
    """Builds the problem of a task and a model with the requested sizes."""
    return language.make_problem(
        task,
        model,
        num_prompts=options.num_prompts,
        group_size=options.group_size,
        max_new_tokens=options.new_tokens,
        **initial,
    )


def spread(params: Any) -> Any:
    """Scales the embedding to a standard deviation of 0.02, as in pretrained models."""
    own = params["params"]
    return {"params": own | {"embedding": 0.02 * own["embedding"]}}


def settings_of(options: Options, axis_name: str | None) -> dapo.Config:
    """Returns the config of DAPO's loss on every group, with the requested number of updates."""
    microbatches = options.num_prompts if options.shape != "none" else 1
    return dapo.Config(
        num_epochs=options.updates,
        num_microbatches=options.num_microbatches or microbatches,
        dynamic_sampling="off",
        soft_overlong=False,
        overlong_filtering=False,
        axis_name=axis_name,
    )


def account(options: Options, adapters: Adapters) -> dict[str, Any]:
    """Measures the time of sampling and training in matrix products and in other operations.

    Raises:
      ConfigError: the platform is not a CPU, or there are several seeds or devices.
    """
    if options.seeds != 1 or options.devices != "auto":
        raise ConfigError("profile", "takes one seed, on one device")
    if jax.default_backend() != "cpu":
        raise ConfigError("profile", "reads the profile of a CPU: set JAX_PLATFORMS=cpu")
    _, model, problem = of(options, adapters)
    learner = dapo.make(config.as_arrays(settings_of(options, None)), problem)
    state = (learner.init if adapters.rank else jax.jit(learner.init))(jax.random.key(0))
    # Does not return the state: a training run updates the state in place, but a returned state
    # would be copied.
    sampling = xla_profile.program(lambda state: learner.sample(state)[1], state)
    batch = sampling.compiled(state)
    peak = matrix_peak(DTYPES[options.dtype])
    row: dict[str, Any] = {"matrix_peak_gflops": round(peak / 1e9)}
    for name, program in (
        ("sampling", sampling),
        ("training", xla_profile.program(learner.update, state, batch)),
    ):
        run = xla_profile.executed(program)
        seconds = min(program.run() for _ in range(options.iterations or 3))
        row |= {
            f"{name}_ms": round(1e3 * seconds, 1),
            f"{name}_products_at_peak_ms": round(
                1e3 * sum(each.runs * each.flops for each in run) / peak, 3
            ),
        }
        for category, total in xla_profile.totals(run, categories(model.vocabulary)).items():
            share = f", {total.flops / total.seconds / peak:.2f} of the peak" * bool(total.flops)
            row[f"{name}: {category}"] = f"{total.number} in {1e3 * total.seconds:.1f} ms{share}"
    return row


def categories(vocabulary: int) -> Callable[[Operation], str]:
    """Returns a function that maps an operation to a category.

    It reads products, XLA kind and JAX function.
    """
    moved = ("copy", "transpose", "concatenate", "pad", "slice")
    indexed = ("gather", "scatter", "dynamic-slice", "dynamic-update-slice")

    def category(operation: Operation) -> str:
        if operation.products:
            sizes = [[n for n in sizes if n > 1] for sizes in operation.products]
            if any(len(each) > 3 for each in sizes):
                return "products of attention"
            if any(vocabulary in each for each in sizes):
                return "products with the embedding"
            return "products with other kernels"
        if operation.seconds < xla_profile.SMALL:
            return "operations below 1 µs"
        if "random" in operation.path or "threefry" in operation.path:
            return "random numbers"
        if operation.kind in moved or operation.path.endswith(moved):
            return "copies"
        if operation.kind in indexed or operation.path.endswith(indexed):
            return "reading and writing rows"
        return "sorting" if operation.kind == "sort" else "elementwise and sums"

    return category


def measure(options: Options, adapters: Adapters) -> dict[str, Any]:
    """Times sampling alone and the complete iteration; reports medians over iterations.

    The model is untrained, so one token in 14 ends a completion in addition.
    """
    shaped = options.shape != "none"
    placement = parallel.choose(
        "1" if shaped and options.devices == "auto" else options.devices,
        num_seeds=options.seeds,
        num_rows=options.num_prompts,
    )
    task, model, problem = of(options, adapters)
    settings = settings_of(options, placement.axis_name)
    learner = dapo.make(config.as_arrays(settings), problem)

    keys = jax.random.split(jax.random.key(0), options.seeds)
    whole = parallel.over_devices(learner, placement)

    def sample(state: TrainState) -> tuple[jax.Array, jax.Array]:
        """Collects completions and counts their tokens.

        Returns the score too, or the compiler would drop the verifier.
        """
        _, batch = whole.sample(state)
        return batch.mask.sum(), batch.score.sum()

    # Under jit, the base model of the adapters would be copied.
    state = whole.init(keys) if adapters.rank else jax.jit(whole.init)(keys)
    start = time.perf_counter()
    step = compiled(whole.step, state, donate_argnums=0)
    compile_seconds = time.perf_counter() - start
    collect = compiled(sample, state)
    iteration, tokens, sampling = [], [], []
    iterations = options.iterations or (3 if shaped else 10)
    for _ in range(iterations + 1):
        took, (generated, _) = timing.clock(collect, state)
        sampling.append(took)
        tokens.append(float(generated))
        took, (state, _) = timing.clock(step, state)
        iteration.append(took)
    seconds, sampled = median(iteration[1:]), median(sampling[1:])
    generated = sum(tokens[1:]) / iterations
    parameters = sum(x.size for x in jax.tree.leaves(state.params.policy)) // options.seeds
    # Scanned blocks compute each prompt once per group if groups are complete.
    whole_groups = model.scanned and options.num_prompts % settings.num_microbatches == 0
    readers = options.group_size if whole_groups else 1
    completions = options.seeds * options.num_prompts * options.group_size
    # Counts sampled tokens, not the token budget: padding is not work, even if it is computed.
    trained = 6 * products(model, task.prompt_length, generated / completions, readers)
    trained *= options.updates * completions
    peak = matrix_peak(DTYPES[options.dtype]) * (
        1 if jax.default_backend() == "cpu" else placement.num_devices
    )
    counted = {}
    if options.count:  # a decoding step samples one token of each row
        calls = xla_profile.kernels(xla_profile.Program(collect, (state,), 1))
        counted = {"kernels_a_token": round(calls / options.new_tokens)}
    return {
        "shape": options.shape,
        "lengths": options.lengths,
        **counted,
        "width": model.width,
        "layers": model.layers,
        "lora_rank": adapters.rank,
        "new_tokens": options.new_tokens,
        "seeds": options.seeds,
        "parameters": parameters,
        "placement": placement.describe(),
        "seconds_per_iteration": round(seconds, 4),
        "sampling_seconds": round(sampled, 4),
        "training_seconds": round(seconds - sampled, 4),
        "sampled_tokens_per_second": round(generated / sampled),
        "trained_tokens_per_second": round(generated * options.updates / (seconds - sampled)),
        "tokens_per_second": round(generated / seconds),
        "training_share_of_matrix_peak": round(trained / (seconds - sampled) / peak, 4),
        "matrix_peak_gflops": round(peak / 1e9),
        "compile_seconds": round(compile_seconds, 2),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "device": jax.devices()[0].device_kind,
    }


def products(
    model: language.Transformer, prompt_length: int, new_tokens: float, readers: int = 1
) -> float:
    """Counts weights × positions of the matrix products of one completion, without attention.

    Each multiplication stands for 2 operations in the forward pass and 4 in the backward pass.
    Before the first position whose output is used, the last block computes only keys and values,
    unless blocks are scanned. A large vocabulary is embedded by a lookup, without a matrix product.
    If one prompt is computed once for several completions, `readers`, each completion counts its
    share of the prompt.
    """
    width, hidden, table = model.width, model.mlp_width, model.vocabulary * model.width
    keys_and_values = 2 * width * model.kv_heads * (width // model.heads)
    rest = 2 * width**2 + 3 * width * hidden
    positions = prompt_length // readers + new_tokens - 1
    everywhere = model.layers * keys_and_values + (model.layers - 1) * rest
    if model.vocabulary <= ONE_HOT:
        everywhere += table
    whole = positions if model.scanned else new_tokens
    return positions * everywhere + whole * rest + new_tokens * table


def matrix_peak(dtype: Any, size: int = 0) -> float:
    """Measures the operations per second of a large matrix product, as the machine's peak."""
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    a = jnp.ones((size, size), dtype)
    product = jax.jit(lambda a: a @ a).lower(a).compile()
    return 2 * size**3 / min(timing.clock(product, a)[0] for _ in range(5))


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark from command-line arguments; returns the exit status."""
    if {"--help", "-h"} & set(argv):
        summary = "Times sampling and training of GRPO."
        print(flags.format_help("benchmarks/language.py", summary, SECTIONS))
        return 0
    options, adapters = flags.parse_records(argv, SECTIONS).values()
    if options.profile and not (options.width or options.shape != "none"):
        raise ConfigError("profile", "needs width or shape: it shows one model")
    if options.width or options.shape != "none":
        # On one core, times of operations add up; must be set before JAX starts.
        if options.profile:
            if not hasattr(os, "sched_setaffinity"):
                raise ConfigError("profile", "keeps to one core, which only Linux lets it do")
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        try:
            row = (account if options.profile else measure)(options, adapters)
        except ConfigError as error:
            raise flags.flag_error(error, SECTIONS) from None
        timing.show(row, as_json=options.json)
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
        row = timing.measure_apart(__file__, [*numbers, f"--iterations={options.iterations}"])
        print(
            f"{width:>6} {layers:>7} {new_tokens:>11} {row['seconds_per_iteration']:>14} "
            f"{row['sampling_seconds']:>11} {row['compile_seconds']:>10}  {row['placement']}",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    flags.run_script(main)
