"""Where an iteration of PPO on CartPole-v1 spends its time, against what the machine can do.

`python experiments/benchmarks/account.py` measures the sizes of `control.py` on one device;
`--envs --steps --seeds` takes one. The parts of an iteration are programs of their own, timed in
turns with matrix products, memory traffic and tiny operations: the roofline of the machine. What
XLA runs in an update is read from its own profile, operation by operation; operations are also
counted in the compiled iteration, on one device and on all cores.

Times are of the processor, over all threads: on a shared machine they are the more reliable ones.
"""

import collections
import dataclasses
import functools
from collections.abc import Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import timing
import xla_profile
from xla_profile import Program, program

from jaxrl_po import config, control, minibatches
from jaxrl_po.algorithms import actor_critic, ppo
from jaxrl_po.config import COUNT, static
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.devices.seeds import over_seeds, stack
from jaxrl_po.run.experiment import flags
from jaxrl_po.types import ActorCritic, Learner, Problem, PyTree

# Environments, steps, seeds.
SIZES = (
    *((4, 128, 1), (64, 128, 1), (2048, 10, 1)),
    *((4, 128, 8), (4, 128, 32), (4, 128, 128)),
)
# The settings of `control.py`; a test holds them together.
SETTINGS = ppo.Config(
    learning_rate=2.5e-4, entropy_coefficient=0.01, num_epochs=4, num_minibatches=4
)
EDGE, TINY = 1024, 4  # of a matrix, of a tiny one
CHAIN = 4096  # tiny products, one after another
MOVED = 2**28  # bytes that are read and written to measure bandwidth
KINDS = ("dot", "fusion", "copy", "sort", "while", "all-reduce")


@config.record
class Options:
    """What is measured."""

    envs: int = static(
        0,
        "environments; 0 measures six sizes, with their steps and seeds",
        within=config.NON_NEGATIVE,
    )
    steps: int = static(
        128, "steps of each environment in one iteration", unit="steps", within=COUNT
    )
    seeds: int = static(1, "parallel seeds", within=COUNT)
    rounds: int = static(7, "timed rounds of each part, in turns", unit="rounds", within=COUNT)
    json: bool = static(False, "print one JSON object as the last line")


def roofline(length: int) -> dict[str, Program]:
    """Programs that only multiply matrices, read and write numbers, or start operations.

    Args:
      length: of the vector that is read and written, so that it lies in the cache that would hold
        what is measured.
    """
    matrix, tiny = jnp.full((EDGE, EDGE), 1 / EDGE), jnp.eye(TINY)
    passes = MOVED // (8 * length)

    def chain(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, _: (x @ tiny, None), x, length=CHAIN, unroll=16)[0]

    return {
        "matrices": program(jnp.matmul, matrix, matrix),
        "memory": program(
            lambda x: jax.lax.fori_loop(0, passes, lambda _, x: x + 1.0, x), jnp.zeros(length)
        ),
        "starts": program(chain, tiny),
    }


def make(envs: int, steps: int, axis_name: str | None) -> tuple[Problem, Learner]:
    """The problem, and PPO on it."""
    import gymnax  # here, because it starts the backend, whose devices are chosen first

    problem = control.make_problem(
        gymnax.make("CartPole-v1")[0], num_envs=envs, num_steps=steps, axis_name=axis_name
    )
    settings = config.as_arrays(dataclasses.replace(SETTINGS, axis_name=axis_name))
    return problem, ppo.make(settings, problem)


def iteration(envs: int, steps: int, seeds: int) -> tuple[dict[str, Program], ActorCritic]:
    """An iteration of all seeds and its parts, each a program on one device; and the parameters."""
    problem, learner = make(envs, steps, None)
    learner = over_seeds(learner, seeds)
    each = functools.partial(stack, num_seeds=seeds, out_axes=0)
    keys = jax.random.split(jax.random.key(0), seeds)
    state, batch = jax.jit(learner.sample)(jax.jit(learner.init)(keys))
    epochs, per_epoch = SETTINGS.num_epochs, SETTINGS.num_minibatches
    estimate = each(actor_critic.make_estimate(SETTINGS, problem), in_axes=(0, 0))
    rows = each(problem.rows, in_axes=(0,))(jax.jit(estimate)(state, batch))

    def shuffle(key: jax.Array) -> jax.Array:
        one = functools.partial(minibatches.shuffle, rows=envs * steps, num_minibatches=per_epoch)
        return jax.vmap(one)(jax.random.split(key, epochs)).reshape(epochs * per_epoch, -1)

    def gather(rows: PyTree, orders: jax.Array) -> list[jax.Array]:
        matrices, _ = minibatches.pack(rows)
        # The sums stand for reading what was gathered.
        return jax.lax.map(lambda order: [x[order].sum(0) for x in matrices], orders)

    shuffle_each, gather_each = each(shuffle, in_axes=(0,)), each(gather, in_axes=(0, 0))

    def kl(params: ActorCritic, rows: PyTree) -> Any:
        return actor_critic.update_kl(problem, params, rows, num_parts=SETTINGS.num_parts)

    timed = functools.partial(program, calls=max(1, 16384 // (envs * steps * seeds)))
    return {
        "iteration": timed(learner.step, state),
        "collecting": timed(learner.sample, state),
        "update": timed(learner.update, state, batch),
        "advantages": timed(estimate, state, batch),
        "shuffling": timed(shuffle_each, keys),
        "gathering": timed(gather_each, rows, jax.jit(shuffle_each)(keys)),
        "kl": timed(each(kl, in_axes=(0, 0)), state.params, rows),
    }, state.params


def operations(program: Any) -> dict[str, int]:
    """How often each of `KINDS` stands in a compiled program; a loop's body counts once."""
    found = collections.Counter(
        each.kind for each in xla_profile.operations(program.as_text()).values()
    )
    return {kind: found[kind] for kind in KINDS}


def on_all_cores(envs: int, steps: int, seeds: int) -> dict[str, int]:
    """`operations` of an iteration on all cores, seeds or rows sharded over them."""
    placement = parallel.choose("auto", num_seeds=seeds, num_rows=envs)
    learner = parallel.over_devices(make(envs, steps, placement.axis_name)[1], placement)
    state = jax.eval_shape(learner.init, jax.random.split(jax.random.key(0), seeds))
    return operations(compiled(learner.step, state))


def account(envs: int, steps: int, seeds: int, timed_rounds: int) -> dict[str, Any]:
    """Where the time of an iteration goes, and what the arithmetic alone would take."""
    programs, params = iteration(envs, steps, seeds)
    gradient_steps = SETTINGS.num_epochs * SETTINGS.num_minibatches
    rows = envs * steps // SETTINGS.num_minibatches
    # Of all seeds: `[seeds, inputs, outputs]`.
    kernels = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim == 3]
    activations = rows * seeds * sum(kernel.shape[-1] for kernel in kernels)
    timed = programs | roofline(activations)
    took = timing.in_turns({name: program.run for name, program in timed.items()}, timed_rounds)
    ms = {name: 1e3 * median(seconds) for name, seconds in took.items()}
    flops, moved = 2 * EDGE**3 / ms["matrices"], MOVED / ms["memory"]  # per millisecond
    # Forwards, to the inputs and to the kernels: three products with each kernel.
    arithmetic = 3 * 2 * rows * sum(kernel.size for kernel in kernels) / flops
    # Each activation and its gradient is written once and read twice.
    memory = 2 * 3 * 4 * activations / moved
    in_steps = ms["update"] - ms["advantages"] - ms["shuffling"] - ms["kl"]
    run = xla_profile.totals(xla_profile.executed(programs["update"]), xla_profile.kind)
    return {
        "matrix_peak_gflop_per_second": round(flops / 1e6),
        "memory_gb_per_second": round(moved / 1e6, 1),
        "tiny_product_us": round(1e3 * ms["starts"] / CHAIN, 2),
        "ms": {
            **{name: round(ms[name], 3) for name in programs if name != "update"},
            "gradient_steps": round(in_steps, 3),
        },
        "us_of_a_gradient_step": {
            "all": round(1e3 * in_steps / gradient_steps, 1),
            "arithmetic_at_peak": round(1e3 * arithmetic, 1),
            "reading_and_writing": round(1e3 * memory, 1),
            "small_operations": round(1e6 * run["small"].seconds / gradient_steps, 1),
        },
        "update_by_kind": {
            kind: f"{total.number} in {1e3 * total.seconds:.3f} ms" for kind, total in run.items()
        },
        "compiled": operations(programs["iteration"].compiled),
        "compiled_for_all_cores": on_all_cores(envs, steps, seeds),
    }


def measure(options: Options) -> dict[str, Any]:
    """The account of each size."""
    parallel.choose("auto", num_seeds=1, num_rows=1)  # first: a device for each core
    one = (options.envs, options.steps, options.seeds)
    return {
        f"{envs} × {steps}, seeds {seeds}": account(envs, steps, seeds, options.rounds)
        for envs, steps, seeds in ((one,) if options.envs else SIZES)
    }


def main(argv: Sequence[str]) -> int:
    """Runs from arguments; returns the exit status."""
    summary = "Shows where an iteration of PPO on CartPole-v1 spends its time."
    return timing.measured(argv, "benchmarks/account.py", summary, Options, measure)


if __name__ == "__main__":
    flags.entry(main)
