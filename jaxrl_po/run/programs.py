"""What a run compiles: the job as it is described, and its programs: start, chunk, evaluation.

A chunk is one program, or two with a score on the host between them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.run import memory
from jaxrl_po.run.memory import Memory
from jaxrl_po.run.metrics import Row
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, TrainState


class Score(Protocol):
    """Gives a batch its reward on the host, between `sample` and `update`."""

    def __call__(
        self, batch: Batch, *, first: bool, tell: Callable[[str], None]
    ) -> tuple[Batch, Metrics]:
        """Stacked batch to the batch with `score` and `reward`, and metrics `[S]`.

        Args:
          batch: stacked, its reward None.
          first: whether it is the first batch of the run, so that what is wrong may end it.
          tell: is given lines for a person.
        """


class Examples(NamedTuple):
    """What the policy does at an evaluation, to be read rather than counted.

    Attributes:
      describe: training state to arrays; compiled, and its random numbers must be its own and
        fixed.
      render: those arrays, on the host, to the rows that are kept.
    """

    describe: Callable[..., PyTree]
    render: Callable[[PyTree], list[Row]]


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be run.

    Attributes:
      learner: over stacked seeds: `init(keys [S])`; leaves of the state and of each metric lead
        with `[S]`.
      keys: `[S]`, typed, one a seed.
      iterations: iterations in total.
      steps_per_iteration: environment steps (or completions) of one iteration of one seed.
      log_every: iterations of a chunk, which makes one line.
      eval_every: chunks between evaluations; the first and the last state are always evaluated.
      checkpoint_every: chunks between checkpoints; the last state is always saved.
      patience: iterations in a row in which all updates of a seed are skipped, before the run
        stops.
      idle_patience: iterations in a row in which no sample of any seed carried a signal (metric
        `signal`, where the learner tells it), before the run ends.
      rewarded: what gives batches their reward on the host, between `learner.sample` and
        `learner.update`; None where a step is one program.
      evaluate: `state -> {name: [S]}`, or None; its random numbers must be its own and fixed.
      score: the evaluated quantity whose mean over seeds, when it grows, marks the best checkpoint;
        empty for none.
      examples: shown at each evaluation, or None.
      where: what lies on which device, in words.
      replicated: where arrays that the host reads are put, if devices belong to several processes:
        a copy on each; or None.
    """

    learner: Learner
    keys: jax.Array
    iterations: int
    steps_per_iteration: int
    log_every: int = 1
    eval_every: int = 1
    checkpoint_every: int = 1
    patience: int = 10
    idle_patience: int = 100
    rewarded: Score | None = None
    evaluate: Callable[[TrainState], dict[str, jax.Array]] | None = None
    score: str = ""
    examples: Examples | None = None
    where: str = ""
    replicated: jax.sharding.Sharding | None = None

    @property
    def num_seeds(self) -> int:
        """S."""
        return len(self.keys)

    def boundary(self, iteration: int) -> int:
        """Where the chunk that begins at `iteration` ends."""
        return min((iteration // self.log_every + 1) * self.log_every, self.iterations)

    def due(self, iteration: int, every: int) -> bool:
        """Whether what happens every `every` chunks happens at the end of this one."""
        return iteration == self.iterations or iteration % (self.log_every * every) == 0


class Programs(NamedTuple):
    """Compiled programs; `evaluate` and `describe` may be None.

    Attributes:
      init: keys to state.
      chunk: `(state, n, tell) -> (state, metrics)` of n iterations, the first n entries of
        `[log_every, S]` metrics; the state is donated.
      evaluate: state to a dict of `[S]`.
      describe: state to what `Examples.render` reads.
      like: shapes and placement of the state.
      memory: what a device holds.
    """

    init: Any
    chunk: Any
    evaluate: Any
    describe: Any
    like: TrainState
    memory: Memory


def check(job: Job) -> None:
    """Traces one iteration without compiling it.

    Raises:
      ConfigError: sizes that do not fit each other.
    """
    state = jax.eval_shape(job.learner.init, job.keys)
    state, batch = jax.eval_shape(job.learner.sample, state)
    if job.rewarded is not None:
        batch = _with_reward(batch)
    jax.eval_shape(job.learner.update, state, batch)


def _with_reward(batch: Batch) -> Batch:
    """Shapes of a batch, to those after it got its reward."""
    return batch._replace(reward=batch.log_prob)


Chunk = Callable[[TrainState, Any, Callable[[str], None]], tuple[TrainState, Metrics]]


def compile_programs(job: Job) -> Programs:
    """Compiles everything that the run needs, ahead of time."""
    init = jax.jit(job.learner.init).lower(job.keys).compile()
    shapes = jax.eval_shape(job.learner.init, job.keys)
    placed = init.output_shardings
    like = _placed(shapes, placed)
    chunk, held = (compile_chunk if job.rewarded is None else compile_with_score)(job, like, placed)
    out = job.replicated
    return Programs(
        init=init,
        chunk=chunk,
        evaluate=job.evaluate and jax.jit(job.evaluate, out_shardings=out).lower(like).compile(),
        describe=job.examples
        and jax.jit(job.examples.describe, out_shardings=out).lower(like).compile(),
        like=like,
        memory=held,
    )


def _placed(shapes: PyTree, shardings: PyTree) -> PyTree:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def compile_chunk(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk, Memory]:
    """A chunk as one program, and what it holds."""
    buffer = jax.eval_shape(job.learner.step, like)[1]

    def chunk(state: TrainState, n: jax.Array) -> tuple[TrainState, Metrics]:
        def body(i: jax.Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, rows = carry
            state, row = job.learner.step(state)
            return state, jax.tree.map(lambda all, one: all.at[i].set(one), rows, row)

        rows = jax.tree.map(lambda x: jnp.zeros((job.log_every, *x.shape), x.dtype), buffer)
        return jax.lax.fori_loop(0, n, body, (state, rows))

    compiled = (
        jax.jit(chunk, donate_argnums=0, out_shardings=(placed, job.replicated))
        .lower(like, np.int32(0))
        .compile()
    )
    return lambda state, n, tell: compiled(state, n), memory.measure(compiled, like)


def compile_with_score(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk, Memory]:
    """A chunk as two programs with the reward between them, and what the larger one holds."""
    learner, give = job.learner, job.rewarded
    assert give is not None
    sample = (
        jax.jit(learner.sample, donate_argnums=0, out_shardings=(placed, None))
        .lower(like)
        .compile()
    )
    batch = _with_reward(
        _placed(jax.eval_shape(learner.sample, like)[1], sample.output_shardings[1])
    )
    update = (
        jax.jit(learner.update, donate_argnums=0, out_shardings=(placed, job.replicated))
        .lower(like, batch)
        .compile()
    )

    def chunk(state: TrainState, n: Any, tell: Callable[[str], None]) -> tuple[TrainState, Metrics]:
        begun, rows = int(np.max(state.step)), []
        for i in range(n):
            state, batch = sample(state)
            batch, told = give(batch, first=begun + i == 0, tell=tell)
            state, row = update(state, batch)
            rows.append({**row, **told})
        return state, jax.tree.map(lambda *each: np.stack(each), *rows)

    peaks = [memory.measure(program, like) for program in (sample, update)]
    return chunk, max(peaks, key=lambda held: held.peak or 0)
