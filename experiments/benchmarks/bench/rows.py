"""The comparisons: the same work, done by jaxrl_po and by another library."""

from typing import NamedTuple

from jaxrl_po import backend
from jaxrl_po.config import ConfigError


class Row(NamedTuple):
    """One comparison.

    Attributes:
      name: name of the row for `--only`.
      peer: key of `libraries.PEERS`.
      work: description of the work that both libraries do, for the table.
      script: script in `experiments/benchmarks/` that runs jaxrl_po.
      sizes: arguments that both scripts get.
      small: further arguments with `--tiny`.
      ours: further arguments of jaxrl_po's script.
      theirs: further arguments of the peer's script.
      choices: ways to run the peer, each a list of further arguments; the fastest way counts.
      optional: True if the row is measured only when `--only` gives its complete name.
    """

    name: str
    peer: str
    work: str
    script: str
    sizes: tuple[str, ...]
    small: tuple[str, ...]
    ours: tuple[str, ...] = ()
    theirs: tuple[str, ...] = ()
    choices: tuple[tuple[str, ...], ...] = ((),)
    optional: bool = False


def cartpole(
    name: str, envs: int, steps: int, seeds: int, total_steps: int, optional: bool = False
) -> Row:
    """Builds the row that compares PPO on CartPole-v1."""
    sizes = (f"--envs={envs}", f"--steps={steps}", f"--seeds={seeds}")
    count = "one seed" if seeds == 1 else f"{seeds} seeds"
    return Row(
        name,
        name.partition("-")[0],
        f"PPO on CartPole-v1, {envs} × {steps}, {count}",
        "control.py",
        (*sizes, f"--total_steps={total_steps}"),
        (f"--total_steps={2 * envs * steps}",),
        optional=optional,
    )


def threads(*further: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Lists ways to run PyTorch: on one, half or all processors.

    Each way is combined with each item of `further`.
    """
    cores = backend.cores()
    counts = sorted({1, max(1, cores // 2), cores})
    return tuple((f"--threads={n}", *each) for n in counts for each in further or ((),))


def smollm2(
    name: str, num_prompts: int, tokens: int, *, rank: int = 0, num_microbatches: int = 0
) -> Row:
    """Builds a row of GRPO at SmolLM2-135M's shape: 4 completions per prompt of equal length.

    The argument `num_microbatches` applies to jaxrl_po; 0 stands for one microbatch per prompt.
    """
    under = f" under adapters of rank {rank}" * bool(rank)
    return Row(
        name,
        "trl",
        f"GRPO at SmolLM2-135M's shape{under}, {4 * num_prompts} completions of {tokens} + "
        f"{tokens} tokens, one update",
        "language.py",
        (
            *(f"--num_prompts={num_prompts}", "--group_size=4", f"--prompt_tokens={tokens}"),
            *(f"--new_tokens={tokens}", "--updates=1", "--iterations=3"),
        ),
        ("--num_prompts=4", "--group_size=2", "--prompt_tokens=2", "--new_tokens=2"),
        ours=(
            *("--shape=smollm2-135m", f"--lora.rank={rank}"),
            f"--num_microbatches={num_microbatches}",
        ),
        theirs=(
            *("--width=576", "--layers=30", "--heads=9", "--kv_heads=3", "--mlp_width=1536"),
            *("--vocabulary=49152", f"--lora_rank={rank}"),
        ),
        choices=threads((), (f"--num_microbatches={num_prompts}",)),
        optional=True,
    )


TINY_MODEL = ("--width=16", "--layers=1", "--new_tokens=5", "--num_prompts=8", "--iterations=2")
ROWS = (
    cartpole("rejax-4x128", 4, 128, 1, 500_000),
    cartpole("rejax-64x128", 64, 128, 1, 1_000_000),
    cartpole("rejax-2048x10", 2048, 10, 1, 1_000_000),
    cartpole("rejax-32-seeds", 4, 128, 32, 50_000),
    cartpole("rejax-128-seeds", 4, 128, 128, 20_000),
    cartpole("rejax-1024-seeds", 4, 128, 1024, 20_000, optional=True),
    cartpole("purejaxrl-4x128", 4, 128, 1, 500_000),
    cartpole("purejaxrl-64x128", 64, 128, 1, 1_000_000),
    Row(
        "brax-inverted_pendulum",
        "brax",
        "PPO on inverted_pendulum (spring), 64 × 32",
        "control.py",
        ("--env=brax:inverted_pendulum", "--envs=64", "--steps=32", "--total_steps=500000"),
        ("--envs=8", "--steps=8", "--total_steps=640"),
        ours=("--normalize_observations",),
    ),
    Row(
        "trl-width-64",
        "trl",
        "GRPO, width 64, 2 layers, 512 completions of at most 5 tokens, 2 updates",
        "language.py",
        ("--width=64", "--layers=2", "--new_tokens=5", "--iterations=10"),
        TINY_MODEL,
        choices=threads(),
    ),
    Row(
        "trl-width-128",
        "trl",
        "GRPO, width 128, 4 layers, 512 completions of at most 64 tokens, 2 updates",
        "language.py",
        ("--width=128", "--layers=4", "--new_tokens=64", "--iterations=5"),
        TINY_MODEL,
        ours=("--num_microbatches=8",),
        choices=threads((), ("--num_microbatches=8",)),
    ),
    smollm2("trl-smollm2-135m", 8, 64),
    smollm2("trl-smollm2-135m-short", 2, 32, num_microbatches=1),
    smollm2("trl-smollm2-135m-adapters", 8, 64, rank=8),
)


def chosen(only: str) -> list[Row]:
    """Returns the rows that `--only` selects."""
    words = only.split(",")
    rows = [
        row
        for row in ROWS
        if row.name in words or (not row.optional and any(word in row.name for word in words))
    ]
    if not rows:
        names = ", ".join(row.name for row in ROWS)
        raise ConfigError("only", f"must hold a word of {names}, got {only}")
    return rows
