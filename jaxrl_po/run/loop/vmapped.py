"""Runs side by side in one program, which differ in their keys and in numbers of the method."""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import PartitionSpec as P

from jaxrl_po import config
from jaxrl_po.run.devices import parallel
from jaxrl_po.run.devices.compilation import compiled
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.devices.seeds import STATE_AXES
from jaxrl_po.run.loop import programs
from jaxrl_po.types import Learner, Metrics, PyTree, TrainState

Curves = Mapping[str, npt.NDArray[np.float64]]
"""Name to `[N, E]`: N runs, E evaluations."""


class Training(NamedTuple):
    """What one program trains.

    Attributes:
      learner: settings of one run to its learner.
      placement: on devices.
      iterations: of each run.
      evaluations: E, as evenly spaced as they can be, the last one after all iterations.
    """

    learner: Callable[[Any], Learner]
    placement: Placement
    iterations: int
    evaluations: int

    @property
    def ends(self) -> list[int]:
        """The iterations after which runs are evaluated, `[E]`.

        Example:
          >>> Training(None, None, 7, 3).ends, Training(None, None, 2, 3).ends
          ([2, 4, 7], [1, 2])
        """
        count = min(self.evaluations, self.iterations)
        return [self.iterations * (i + 1) // count for i in range(count)]


class Trained(NamedTuple):
    """What became of the runs.

    Attributes:
      curves: evaluated quantities and, where the program knows them, metrics of training since the
        evaluation before; NaN where there was no sample.
      seconds: without those of compiling.
      compile_seconds: on the host, with the first iteration.
    """

    curves: Curves
    seconds: float
    compile_seconds: float


def configs(settings: Sequence[Any], num_seeds: int) -> Any:
    """Settings of C·S runs, leaves `[C·S]`: the seeds of the first come first."""
    return jax.tree.map(
        lambda *leaves: jnp.repeat(jnp.stack(leaves), num_seeds, axis=0),
        *(config.as_arrays(each) for each in settings),
    )


def keys(base_seed: int, num_seeds: int, num_settings: int) -> tuple[jax.Array, jax.Array]:
    """Keys of C·S runs, the same S for each setting (common random numbers), and of evaluations."""
    training, evaluation = jax.random.split(jax.random.key(base_seed))
    each = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(training, jnp.arange(num_seeds))
    return jnp.tile(each, num_settings), evaluation


Measure = Callable[..., Mapping[str, jax.Array]]
"""As `Setup.evaluate`."""


def compile_program(
    training: Training, measure: Measure, configs: Any, keys: jax.Array, *, given: PyTree = None
) -> tuple[Callable[..., Any], float]:
    """Compiles the training of all runs, as two programs.

    One makes the initial states, the other trains until the next evaluation: memory grows while a
    program runs, see `programs.in_calls`.

    Args:
      training: what is trained.
      measure: evaluates one run.
      configs: leaves `[N]`.
      keys: `[N]`.
      given: see `Setup.given`.

    Returns:
      `(configs, keys, evaluation_key) -> {name: [N, E]}`, and the seconds of compiling.
    """

    def begin(settings: Any, key: jax.Array) -> TrainState:
        start: Any = key if given is None else (key, given)
        return training.learner(settings).init(start)

    def stretch(
        settings: Any, state: TrainState, key: jax.Array, length: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        method = training.learner(settings)

        def iterate(_: jax.Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, row = method.step(carry[0])
            return state, {name: carry[1][name] + mean for name, mean in row.items()}

        none = jax.tree.map(
            lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(method.step, state)[1]
        )
        state, row = jax.lax.fori_loop(0, length, iterate, (state, none))
        scores = measure(state.params, state.collector, key)
        means = {name: mean.metric() for name, mean in row.items()}
        return state, means | {name: value.mean() for name, value in scores.items()}

    begun = time.perf_counter()
    over = functools.partial(parallel.spread, placement=training.placement)
    seeds, states = parallel.SEEDS, parallel.whole_state_spec()
    begin_all = over(jax.vmap(begin, out_axes=STATE_AXES), out_specs=states)
    stretch_all = over(
        jax.vmap(stretch, (0, STATE_AXES, None, None), (STATE_AXES, 0)),
        in_specs=(seeds, states, P(), P()),
        out_specs=(states, seeds),
    )
    init = compiled(begin_all, configs, keys)
    placed = init.output_shardings
    like = programs.with_shardings(jax.eval_shape(begin_all, configs, keys), placed)
    advance = compiled(
        stretch_all,
        configs,
        like,
        keys[0],
        np.int32(0),
        donate_argnums=1,
        out_shardings=(placed, None),
    )

    def train(configs: Any, keys: jax.Array, key: jax.Array) -> Curves:
        state, rows = init(configs, keys), []
        for length in np.diff(training.ends, prepend=0):
            state, row = jax.block_until_ready(advance(configs, state, key, np.int32(length)))
            rows.append(row)
        return jax.tree.map(lambda *each: np.stack(each, axis=1), *rows)

    return train, time.perf_counter() - begun


def train_in_program(
    training: Training, measure: Measure, configs: Any, keys: jax.Array, key: jax.Array
) -> Trained:
    """Trains all runs in one program; `key` is that of every evaluation."""
    program, compile_seconds = compile_program(training, measure, configs, keys)
    begun = time.perf_counter()
    return Trained(program(configs, keys, key), time.perf_counter() - begun, compile_seconds)


def train_on_host(
    training: Training,
    host: programs.Host,
    configs: Any,
    keys: jax.Array,
    *,
    base_seed: int,
    num_seeds: int,
) -> Trained:
    """Trains all runs in one pool; each setting has the same environments."""
    over = functools.partial(parallel.spread, placement=training.placement)
    init = jax.jit(over(jax.vmap(lambda settings, key: training.learner(settings).init(key))))
    step = over(jax.vmap(lambda settings, state: training.learner(settings).step(state)[0]))

    @functools.partial(jax.jit, donate_argnums=1)
    def iterate(configs: Any, state: TrainState, recording: PyTree) -> TrainState:
        following: TrainState = step(configs, rollouts.with_recording(state, recording))
        return following

    begun = time.perf_counter()
    first, rows = 0.0, []
    seeds = list(range(num_seeds)) * (len(keys) // num_seeds)
    with contextlib.closing(host.open(base_seed, seeds)) as rollouts:
        state = init(configs, keys)
        for iteration in range(1, training.iterations + 1):
            state = jax.block_until_ready(iterate(configs, *rollouts.record(state, print)))
            first = first or time.perf_counter() - begun
            if iteration in training.ends:
                rows.append(
                    {name: value.mean(axis=1) for name, value in rollouts.evaluate(state).items()}
                )
    curves = jax.tree.map(lambda *each: np.stack(each, axis=1), *rows)
    return Trained(curves, time.perf_counter() - begun - first, first)
