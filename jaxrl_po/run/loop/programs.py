"""The job that a run carries out, and its compiled programs: init, chunk, evaluation.

A chunk is one program; two with scoring on the host in between; or one for each iteration, with
rollouts on the host before it.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_po.config import Json
from jaxrl_po.run.data.scoring import Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import processes
from jaxrl_po.run.devices.compilation import Program, compiled, is_light, side_by_side
from jaxrl_po.run.devices.memory import Memory, memory_of, refusal
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop.supervised import Warm
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, Row, TrainState

Tree = TypeVar("Tree")
SECONDS_OF_CALL = 5.0  # costs nothing that can be measured; one second costs up to 4 %


class Rollouts(Protocol):
    """What happens on the host in an iteration, of which `sample` then makes its batch."""

    def recording(self) -> PyTree:
        """Shapes and dtypes of the recording of an iteration."""

    def compile(self, like: TrainState) -> None:
        """Compiles what acts; `like` are the shapes of the state."""

    def record(self, state: TrainState, report: Callable[[str], None]) -> tuple[TrainState, PyTree]:
        """Plays one iteration; raises PoolError where that is no longer possible."""

    def with_recording(self, state: TrainState, recording: PyTree) -> TrainState:
        """The state with what the next `collect` takes its batch from."""

    def metrics(self, seconds: float) -> Metrics:
        """Metrics `[S]` of the iteration that was recorded last and took that long."""

    def evaluate(self, state: TrainState, later_seed: int | None = None) -> Json:
        """Name to `[S, n]`; `later_seed` is that of a later evaluation."""

    @property
    def examples(self) -> Examples | None:
        """Computed on the host."""

    def close(self) -> None:
        """Frees what is held."""


class Host(Protocol):
    """What a run on the host is made of, for one seed."""

    def open(self, base_seed: int, seeds: Sequence[int]) -> Rollouts:
        """Its rollouts; `seeds` is the index of the seed of each row of the state."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, as data.

    Attributes:
      learner: over stacked seeds: `init(keys [S])`; leaves of the state and of each metric lead
        with `[S]`.
      keys: what `init` takes of each seed: typed keys `[S]`, or these and settings `[S]`.
      given: what all seeds begin with, see `assembly.Setup`; None for nothing.
      iterations: total number of iterations.
      steps_per_iteration: environment steps (or completions) of one iteration of one seed.
      log_every: iterations per chunk; each chunk makes one line of metrics.
      eval_every: chunks between evaluations; the first and the last state are always evaluated.
      checkpoint_every: chunks between checkpoints; the last state is always saved.
      patience: consecutive iterations in which all updates of a seed were skipped, after which the
        run stops with an error.
      idle_patience: consecutive iterations without a learning signal in any seed (metric `signal`,
        if the learner reports it), after which the run ends.
      rollouts: in environments of the host, which `sample` makes its batch of, and which evaluate;
        None if the environments are part of the program.
      rewarded: computes the reward on the host, between `learner.sample` and `learner.update`; None
        if the program does.
      evaluate: `state -> {name: [S]}`, or None. It must use a fixed key of its own.
      judge: on the host, from what `evaluate` returns to `{name: [S]}`; None where it is that.
      score: the evaluated quantity that selects the best checkpoint by its highest mean over seeds;
        empty for none.
      examples: shown at each evaluation, or None.
      iterate: `(step, state) -> (state, metrics)`, user-defined iteration, which calls `step` once;
        None for `step` itself.
      explain: rows of examples to lines that are shown where the score of every seed is 0 before
        training; None for no lines.
      where: the placement on devices, in words.
      replicated: with several processes, the sharding of arrays that the host reads (a copy on each
        device); else None.
      warm: the parts of `learner.init` if it holds a warm start; else None.
      smaller_steps: what to do about an update that is too large, as a request; empty if the
        settings of the learner are unknown.
      cheap_init: whether `init` is compiled at little effort if the state is small. False for a
        learner of the user, whose `init` may hold a warm start.
      rebuild: `(num_microbatches) -> Job`, the job with more microbatches, or None if that number
        does not divide its rows. None if the number of microbatches is given.
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
    rollouts: Rollouts | None = None
    rewarded: Scorer | None = None
    evaluate: Callable[[TrainState], dict[str, jax.Array]] | None = None
    score: str = ""
    examples: Examples | None = None
    where: str = ""
    replicated: jax.sharding.Sharding | None = None
    warm: Warm | None = None
    given: PyTree = None
    judge: Callable[[PyTree], dict[str, Any]] | None = None
    explain: Callable[[list[Row]], list[str]] | None = None
    iterate: "Iterate | None" = None
    smaller_steps: str = ""
    cheap_init: bool = False
    rebuild: "Callable[[int], Job | None] | None" = None

    @property
    def start(self) -> PyTree:
        """The argument of `learner.init`."""
        return self.keys if self.given is None else (self.keys, self.given)

    @property
    def num_seeds(self) -> int:
        """The number of seeds, S."""
        return len(jax.tree.leaves(self.keys)[0])

    def boundary(self, iteration: int) -> int:
        """The iteration at which the chunk that begins at `iteration` ends."""
        return min((iteration // self.log_every + 1) * self.log_every, self.iterations)

    def due(self, iteration: int, every: int) -> bool:
        """Whether an action due every `every` chunks, and at the end, is due at `iteration`."""
        return iteration == self.iterations or iteration % (self.log_every * every) == 0


class Programs(NamedTuple):
    """Compiled programs; `evaluate` and `describe` may be None.

    Attributes:
      init: keys to state; with a warm start, keys and its parameters to state.
      warm: with `begin` and `advance`, which donates its fit; None without a warm start.
      chunk: `(state, n, report, stop) -> (state, metrics, count)` runs n iterations, or fewer once
        the event `stop` is set, but at least one; metrics `[count, S]`. The state is donated.
      evaluate: state to a dict of `[S]`.
      describe: state to the arrays that `Examples.render` reads.
      like: shapes, dtypes and shardings of the state.
      memory: memory of one device while it trains.
      evaluation: memory of one device while it evaluates; None if the host does, or nothing.
    """

    init: Program[TrainState]
    warm: Warm | None
    chunk: "Chunk | None"
    evaluate: "Evaluate | None"
    describe: Callable[[TrainState], Any] | None
    like: TrainState
    memory: Memory
    evaluation: Memory | None = None

    @property
    def largest(self) -> Memory:
        """Of training and evaluation, what needs more."""
        both = [self.memory, *filter(None, [self.evaluation])]
        return max(both, key=lambda each: each.peak or 0)


def check(job: Job) -> None:
    """Traces one iteration without compiling it, so that bad sizes fail early.

    Raises:
      ConfigError: sizes that do not fit together.
    """
    state: TrainState = jax.eval_shape(job.learner.init, job.start)
    if job.rollouts is not None:
        state = job.rollouts.with_recording(state, job.rollouts.recording())
    if job.rewarded is None:
        jax.eval_shape(job.learner.step, state)  # as its program will: then it is traced once
        return
    state, batch = jax.eval_shape(job.learner.sample, state)
    jax.eval_shape(job.learner.update, state, with_reward(batch))


def with_reward(batch: Batch) -> Batch:
    """The shapes of a batch after it was given its reward, `[B, T]` like `log_prob`."""
    return batch._replace(reward=batch.log_prob)


Step = Callable[[TrainState], tuple[TrainState, Metrics]]
Chunk = Callable[
    [TrainState, np.int32, Callable[[str], None], threading.Event], tuple[TrainState, Metrics, int]
]
Iterate = Callable[[Step, TrainState], tuple[TrainState, Metrics]]
Evaluate = Callable[[TrainState], Mapping[str, Any]]


def compile_programs(job: Job) -> Programs:
    """Compiles all programs of the run, ahead of time; the largest one begins first."""
    init, warm = compile_init(job)
    shapes: TrainState = jax.eval_shape(job.learner.init, job.start)
    # Every program takes and returns the state in these shardings.
    placed = init.output_shardings
    like = with_shardings(shapes, placed)
    (chunk, memory), (evaluate, of_evaluation), describe = side_by_side(
        lambda: compile_if_it_fits(job, like, placed),
        lambda: compile_evaluate(job, like),
        lambda: job.examples and compile_describe(job, job.examples, like),
    )
    return Programs(init, warm, chunk, evaluate, describe, like, memory, of_evaluation)


def with_microbatches(programs: Programs, job: Job) -> Programs:
    """Compiles the chunk of a job that differs in `num_microbatches`; the rest stays."""
    placed = jax.tree.map(lambda x: x.sharding, programs.like)
    chunk, memory = compile_if_it_fits(job, programs.like, placed)
    return programs._replace(chunk=chunk, memory=memory)


def compile_if_it_fits(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk | None, Memory]:
    """Compiles the chunk; None if the compiler rejects it and more microbatches may help."""
    try:
        return compile_kind(job, like, placed)
    except jax.errors.JaxRuntimeError as error:
        refused = refusal(error)
        if job.rebuild is None or refused is None:
            raise
        return None, refused


def compile_kind(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk, Memory]:
    """The chunk of a run, of the kind that suits it, and its memory."""
    if (own := job.iterate) is not None:
        placed = placed, job.replicated
        step = compiled(job.learner.step, like, donate_argnums=0, out_shardings=placed)
        return one_by_one(lambda state, report: own(step, state)), memory_of(step, like)
    if job.rollouts is not None:
        return compile_with_rollouts(job, job.rollouts, like, placed)
    if job.rewarded is not None:
        return compile_with_score(job, like, placed)
    return compile_chunk(job, like, placed)


def compile_evaluate(job: Job, like: TrainState) -> tuple["Evaluate | None", Memory | None]:
    """The evaluation of a run, and its memory; None without one, or on the host."""
    if job.evaluate is None or job.rollouts is not None:
        return job.evaluate, None
    measured, judge = compiled(job.evaluate, like, out_shardings=job.replicated), job.judge
    evaluate = measured if judge is None else lambda state: judge(measured(state))
    return evaluate, memory_of(measured, like)


def compile_describe(job: Job, examples: Examples, like: TrainState) -> Callable[[TrainState], Any]:
    """What describes examples, which has few rows."""
    if job.rollouts is not None:
        return examples.describe
    return compiled(examples.describe, like, light=is_light(like), out_shardings=job.replicated)


def compile_init(job: Job) -> tuple[Program[TrainState], Warm | None]:
    """The init, and the warm start that comes before it, if there is one."""
    light = init_is_light(job)
    if job.warm is None:
        return compiled(job.learner.init, job.start, light=light), None
    begin = compiled(job.warm.begin, job.start, light=light)
    placed = begin.output_shardings
    fit = with_shardings(jax.eval_shape(job.warm.begin, job.start), placed)
    advance = compiled(
        job.warm.advance, fit, np.int32(0), job.given, donate_argnums=0, out_shardings=placed
    )
    init = compiled(job.warm.init, (job.start, fit.params), light=light)
    return init, job.warm._replace(begin=begin, advance=advance)


def init_is_light(job: Job) -> bool:
    """Whether `init` is compiled at little effort: it is small, and holds no warm start."""
    apart = job.warm is not None or job.cheap_init
    return apart and is_light(jax.eval_shape(job.learner.init, job.start))


def with_shardings(shapes: Tree, shardings: PyTree) -> Tree:
    """Returns shapes and dtypes with the shardings of a program."""

    def place(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed: Tree = jax.tree.map(place, shapes, shardings)
    return placed


def chunk_of(job: Job) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
    """A chunk as one function, `(state, n) -> (state, metrics)`; only n rows of these are valid."""

    def chunk(state: TrainState, n: jax.Array) -> tuple[TrainState, Metrics]:
        def body(i: jax.Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, rows = carry
            state, row = job.learner.step(state)
            return state, jax.tree.map(lambda all, one: all.at[i].set(one), rows, row)

        buffer = jax.eval_shape(job.learner.step, state)[1]
        # A loop with a traced count: a shorter chunk is the same program.
        rows = jax.tree.map(lambda x: jnp.zeros((job.log_every, *x.shape), x.dtype), buffer)
        return jax.lax.fori_loop(0, n, body, (state, rows))

    return chunk


def compile_chunk(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk, Memory]:
    """A chunk as one program, and its memory."""
    program = compiled(
        chunk_of(job), like, np.int32(0), donate_argnums=0, out_shardings=(placed, job.replicated)
    )
    return in_calls(program), memory_of(program, like)


def in_calls(program: Program[tuple[TrainState, Metrics]]) -> Chunk:
    """A chunk as calls of its program, of some seconds each: between two it can be stopped.

    And where each device is one core, XLA keeps 2.4 KB of most matrix products until the call ends:
    up to 18 MB a second.

    Args:
      program: `(state, n) -> (state, metrics)`, of which only the first n entries are valid.
    """
    size = 1  # iterations of a call, until one was timed

    def chunk(
        state: TrainState, n: np.int32, report: Callable[[str], None], stop: threading.Event
    ) -> tuple[TrainState, Metrics, int]:
        nonlocal size
        begun, done, rows = time.perf_counter(), 0, list[Metrics]()
        while done < n:
            now = min(size, int(n) - done)
            state, row = program(state, np.int32(now))
            jax.block_until_ready((state, row))
            rows.append(jax.tree.map(lambda x, now=now: np.asarray(x)[:now], row))
            done += now
            if done == n or processes.any_of(stop.is_set()):
                break
            took = max(time.perf_counter() - begun, 1e-9)  # a clock may jump
            size = min(processes.gather(max(1, int(SECONDS_OF_CALL * done / took))))
        return state, jax.tree.map(lambda *each: np.concatenate(each), *rows), done

    return chunk


def compile_with_score(job: Job, like: TrainState, placed: PyTree) -> tuple[Chunk, Memory]:
    """A chunk as two programs with scoring in between, and the memory of the larger one."""
    learner, give = job.learner, job.rewarded
    assert give is not None
    sample = compiled(learner.sample, like, donate_argnums=0, out_shardings=(placed, None))
    batch = with_reward(
        with_shardings(jax.eval_shape(learner.sample, like)[1], sample.output_shardings[1])
    )
    update = compiled(
        learner.update, like, batch, donate_argnums=0, out_shardings=(placed, job.replicated)
    )

    def sample_score_update(
        state: TrainState, report: Callable[[str], None]
    ) -> tuple[TrainState, Metrics]:
        first = not np.max(state.step)
        state, batch = sample(state)
        batch, of_score = give.score_batch(batch, first=first, report=report)
        # Two programs with collectives on CPU devices can deadlock if they run at once.
        state, row = update(state, batch)
        jax.block_until_ready((state, row))
        return state, {**row, **of_score}

    memory = memory_of(update, like).beside(memory_of(sample, like))
    return one_by_one(sample_score_update), memory


class RolloutsFailed(Exception):
    """An environment of the host failed within a chunk.

    Args:
      error: what it raised.
      state: after the last whole iteration.
      rows: the metrics of each whole iteration of the chunk.
    """

    def __init__(self, error: PoolError, state: TrainState, rows: Sequence[Metrics]):
        super().__init__(str(error))
        self.error, self.state, self.rows = error, state, rows


def compile_with_rollouts(
    job: Job, rollouts: Rollouts, like: TrainState, placed: PyTree
) -> tuple[Chunk, Memory]:
    """A chunk as rollouts on the host and one program for the rest of each iteration."""

    def iterate(state: TrainState, recording: PyTree) -> tuple[TrainState, Metrics]:
        return job.learner.step(rollouts.with_recording(state, recording))

    recording, placed = rollouts.recording(), (placed, job.replicated)
    program = compiled(iterate, like, recording, donate_argnums=0, out_shardings=placed)
    rollouts.compile(like)

    def record_and_iterate(
        state: TrainState, report: Callable[[str], None]
    ) -> tuple[TrainState, Metrics]:
        begun = time.perf_counter()
        state, recording = rollouts.record(state, report)
        state, row = program(state, recording)
        jax.block_until_ready((state, row))
        return state, {**row, **rollouts.metrics(time.perf_counter() - begun)}

    return one_by_one(record_and_iterate), memory_of(program, like)


def one_by_one(
    iterate: Callable[[TrainState, Callable[[str], None]], tuple[TrainState, Metrics]],
) -> Chunk:
    """A chunk as iterations with work on the host: between two it can be stopped."""

    def chunk(
        state: TrainState, n: np.int32, report: Callable[[str], None], stop: threading.Event
    ) -> tuple[TrainState, Metrics, int]:
        rows = list[Metrics]()
        for i in range(n):
            if i and processes.any_of(stop.is_set()):
                break
            try:
                state, row = iterate(state, report)
            except PoolError as error:
                raise RolloutsFailed(error, state, rows) from error
            rows.append(row)
        return state, stacked(rows), len(rows)

    return chunk


def stacked(rows: Sequence[Metrics]) -> Metrics:
    """Metrics of n ≥ 1 iterations, one after another, leaves `[n, …]`."""
    return jax.tree.map(lambda *each: np.stack(each), *rows)


def with_frozen(state: TrainState, job: Job) -> TrainState:
    """A checkpoint's state with the frozen parameters, which `init` makes again."""
    if not jax.tree.leaves(jax.eval_shape(job.learner.init, job.start).params.frozen):
        return state
    # Compiled as the init of the run was: other effort may round otherwise.
    light = init_is_light(job)
    frozen = compiled(lambda start: job.learner.init(start).params.frozen, job.start, light=light)
    return state.with_frozen(frozen(job.start))
