"""The compiled programs of a run: warm start, `init`, chunk and evaluation.

A chunk is one program; or two programs with scoring on the host in between; or one program per
iteration, with rollouts on the host before it. The number of microbatches is chosen so that a chunk
fits in memory.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from rich import filesize

from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer, lora, warm_start
from jaxrl_po.language.dialogue import Dialogue, TaskLike
from jaxrl_po.language.tasks.types import reading
from jaxrl_po.language.warm_start import BETWEEN, WarmStart, WarmStartState
from jaxrl_po.run.data.scoring import Scorer
from jaxrl_po.run.data.transcripts import Examples
from jaxrl_po.run.devices import processes
from jaxrl_po.run.devices.compilation import Program, compiled, is_cheap, side_by_side
from jaxrl_po.run.devices.memory import DeviceMemory, measure_memory, refusal
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.host.vector_envs import PoolError
from jaxrl_po.run.loop.job import Rollouts, TrainJob, WarmStartProgram
from jaxrl_po.run.loop.progress import clock
from jaxrl_po.types import Batch, Learner, Metrics, PyTree, TrainState

Tree = TypeVar("Tree")
MICROBATCHES = "config.num_microbatches"
COMPILATIONS = 3  # maximal number of compilations to find the number of microbatches
SECONDS_OF_CALL = 5.0  # seconds of one call; 5 cost nothing measurable, 1 costs up to 4 %


class Programs(NamedTuple):
    """Compiled programs of a run; `evaluate` and `describe` may be None.

    Attributes:
      init: `(keys) -> state`; with a warm start, `((keys, params)) -> state`.
      warm: Warm start with compiled `begin` and `advance`, which donates its argument `fit`; None
        without a warm start.
      chunk: `(state, n, report, stop) -> (state, metrics, count, failure)`, runs n iterations and
        returns metrics `[count, S]`; the state is donated. The count is below n if the event `stop`
        is set, but at least 1, or if an environment of the host fails.
      evaluate: `(state) -> {name: [S]}`, evaluates all seeds.
      describe: `(state) -> arrays`, computes the arrays that `Examples.render` reads.
      like: shapes, dtypes and shardings of the training state.
      memory: memory of one device during training.
      evaluation: memory of one device during an evaluation; None if devices evaluate nothing.
    """

    init: Program[TrainState]
    warm: WarmStartProgram | None
    chunk: "Chunk | None"
    evaluate: "Evaluate | None"
    describe: Callable[[TrainState], Any] | None
    like: TrainState
    memory: DeviceMemory
    evaluation: DeviceMemory | None = None

    @property
    def largest(self) -> DeviceMemory:
        """Returns the larger of the memory of training and the memory of evaluation."""
        both = [self.memory, *filter(None, [self.evaluation])]
        return max(both, key=lambda each: each.peak or 0)


def check_job(job: TrainJob) -> None:
    """Traces one iteration without compiling it, so that inconsistent sizes fail early.

    Raises:
      ConfigError: sizes in the settings are inconsistent.
    """
    state: TrainState = jax.eval_shape(job.learner.init, job.start)
    rollouts = job.host.rollouts
    if rollouts is not None:
        state = rollouts.with_recording(state, rollouts.recording())
    if job.host.scorer is None or rollouts is not None:
        jax.eval_shape(job.learner.step, state)  # the compiled program reuses this trace
        return
    state, batch = jax.eval_shape(job.learner.sample, state)
    jax.eval_shape(job.learner.update, state, with_reward(batch))


def in_microbatches(job: TrainJob, number: int) -> TrainJob | None:
    """Returns the job with `number` microbatches; None if `number` does not divide the rows."""
    assert job.rebuild is not None
    learner = job.rebuild(number)
    if learner is None:
        return None
    job = dataclasses.replace(job, learner=learner)
    try:
        check_job(job)
    except ConfigError:  # a method that learns from a part of the completions may reject the number
        return None
    return job


def fit_in_memory(job: TrainJob, programs: Programs, space: int | None) -> tuple[int, Programs]:
    """Compiles the chunk again until it fits in memory; returns microbatches and programs.

    Args:
      job: job with one microbatch and with `rebuild`.
      programs: compiled programs of the job.
      space: bytes of a device's memory that programs may use; None if unknown.

    Raises:
      RunError: no number of microbatches fits, or the compiler refuses a program and `space` is
        None.
    """
    require_evaluation(programs.evaluation, space)

    def compile_again(other: TrainJob, _: int) -> DeviceMemory:
        nonlocal programs
        programs = with_microbatches(programs, other)
        return programs.memory

    number = choose_microbatches(job, programs.memory, compile_again, space)
    return number, programs


def choose_microbatches(
    job: TrainJob,
    memory: DeviceMemory,
    compile_again: Callable[[TrainJob, int], DeviceMemory],
    space: int | None,
) -> int:
    """Finds the smallest number of microbatches that lets an update fit in memory.

    The peak of an update in n microbatches is about a + b/n bytes. At first, a is the part that
    more microbatches do not reduce; later, a and b follow from the last two compilations, unless no
    number fits by this line, since two numbers may have the same peak. The search jumps to the next
    number that the line predicts to fit, at most `COMPILATIONS` times. The memory of sampling must
    fit too, but does not follow the line. A program that the compiler refused does not fit; if the
    size in the compiler's message would fit, or the message has no size, the number doubles.

    Args:
      job: compiled job with one microbatch and with `rebuild`.
      memory: memory of the programs of the job.
      compile_again: `(job, number) -> Memory`, compiles the job with `number` microbatches.
      space: bytes of a device's memory that programs may use; None if unknown.

    Returns:
      The number of microbatches of the job that was compiled last.

    Raises:
      RunError: no number of microbatches fits, or none was found within `COMPILATIONS`.
    """
    number, points = 1, [(0.0, memory.fixed)]  # points (1/n, bytes) on the line
    for left in reversed(range(COMPILATIONS)):
        if memory.fits(space):
            break
        found = None
        points[0] = (0.0, max(points[0][1], memory.fixed))
        if space is not None and left and max(memory.fixed, memory.floor) <= space:
            if memory.peak is not None and memory.peak > space:
                points.append((1 / number, memory.peak))
                found = _next_job(job, points[-2:], number, space)
                found = found or _next_job(job, [points[0], points[-1]], number, space)
            else:
                found = _next_job(job, [(0.0, space), (1.0, space)], 2 * number - 1, space)
        if found is None:
            raise _too_large(memory, number, space)
        number, job = found
        memory = compile_again(job, number)
    return number


def _next_job(
    job: TrainJob, line: list[tuple[float, int]], after: int, space: int
) -> tuple[int, TrainJob] | None:
    """Returns the next number of microbatches whose predicted peak fits, and its job; or None."""
    (x0, y0), (x1, y1) = line
    slope = (y1 - y0) / (x1 - x0)
    for number in range(after + 1, job.length.steps_per_iteration + 1):
        if y1 + slope * (1 / number - x1) <= space:
            other = in_microbatches(job, number)
            if other is not None:
                return number, other
    return None


def _too_large(memory: DeviceMemory, number: int, space: int | None) -> RunError:
    """Returns the error for an update that does not fit with any number of microbatches."""
    needs = "more than the compiler gives it"
    if memory.peak is not None and space is not None and memory.peak > space:
        of = filesize.decimal(max(space, 0))
        needs = f"{filesize.decimal(memory.peak)} of a device, which has {of}"
    said = f"; the compiler says: {memory.refused}" if memory.refused else ""
    return RunError(
        f"training needs {needs}, with {MICROBATCHES} = {number}: lower problem.num_prompts or "
        f"seeds, or take a smaller model{said}"
    )


def require_evaluation(memory: DeviceMemory | None, space: int | None) -> None:
    """Raises RunError if an evaluation, which has no microbatches, does not fit."""
    if memory is not None and space is not None and not memory.fits(space):
        raise RunError(
            f"evaluation needs {filesize.decimal(memory.peak or 0)} of a device, which has "
            f"{filesize.decimal(max(space, 0))}: lower eval_prompts"
        )


def with_reward(batch: Batch) -> Batch:
    """Returns the shapes of a batch with its reward, which has shape `[B, T]` like `log_prob`."""
    return batch._replace(reward=batch.log_prob)


Report = Callable[[str], None]
ChunkResult = tuple[TrainState, Metrics, int, PoolError | None]
Chunk = Callable[[TrainState, np.int32, Report, threading.Event], ChunkResult]
Evaluate = Callable[[TrainState], Mapping[str, Any]]


def compile_programs(job: TrainJob) -> Programs:
    """Compiles all programs of the run, ahead of time; the largest program starts first."""
    init, warm = compile_init(job)
    shapes: TrainState = jax.eval_shape(job.learner.init, job.start)
    # Every program takes and returns the training state in the shardings that `init` produces.
    placed = init.output_shardings
    like = with_shardings(shapes, placed)
    (chunk, memory), (evaluate, of_evaluation), describe = side_by_side(
        lambda: compile_if_it_fits(job, like, placed),
        lambda: compile_evaluate(job, like),
        lambda: job.examples and compile_describe(job, job.examples, like),
    )
    return Programs(init, warm, chunk, evaluate, describe, like, memory, of_evaluation)


def with_microbatches(programs: Programs, job: TrainJob) -> Programs:
    """Compiles the chunk of a job with another number of microbatches; keeps the other programs."""
    placed = jax.tree.map(lambda x: x.sharding, programs.like)
    chunk, memory = compile_if_it_fits(job, programs.like, placed)
    return programs._replace(chunk=chunk, memory=memory)


def compile_if_it_fits(
    job: TrainJob, like: TrainState, placed: PyTree
) -> tuple[Chunk | None, DeviceMemory]:
    """Compiles the chunk; returns None if the compiler refuses it and microbatches may help."""
    try:
        return compile_kind(job, like, placed)
    except jax.errors.JaxRuntimeError as error:
        refused = refusal(error)
        if job.rebuild is None or refused is None:
            raise
        return None, refused


def compile_kind(job: TrainJob, like: TrainState, placed: PyTree) -> tuple[Chunk, DeviceMemory]:
    """Compiles the chunk of a run, as its rewards and rollouts require; also returns its memory."""
    host, learner = job.host, job.learner
    options: dict[str, Any] = {
        "donate_argnums": 0,
        "out_shardings": (placed, job.layout.replicated),
    }
    if host.iterate is not None:
        own, step = host.iterate, compiled(learner.step, like, **options)
        return run_per_iteration(lambda state, report: own(step, state)), measure_memory(step, like)
    if host.rollouts is not None:
        return compile_with_rollouts(learner, host.rollouts, like, options)
    if host.scorer is not None:
        return compile_with_score(learner, host.scorer, like, options)
    program = compiled(chunk_of(job), like, np.int32(0), **options)
    return run_in_timed_calls(program), measure_memory(program, like)


def compile_evaluate(
    job: TrainJob, like: TrainState
) -> tuple["Evaluate | None", DeviceMemory | None]:
    """Compiles the evaluation; returns program and memory, None if devices evaluate nothing."""
    if job.host.rollouts is not None:
        return job.evaluate, None
    if job.evaluation.measure is None:
        return None, None
    score = job.evaluation.score_evaluation
    function = job.evaluate if score is None else job.measure
    measured: Any = compiled(function, like, out_shardings=job.layout.replicated)
    memory = measure_memory(measured, like)
    if score is None:
        return measured, memory
    return lambda state: job.means(score(jax.device_get(measured(state)))), memory


def compile_describe(
    job: TrainJob, examples: Examples, like: TrainState
) -> Callable[[TrainState], Any]:
    """Returns the compiled function that describes examples; the examples have few rows."""
    if job.host.rollouts is not None:
        return examples.describe
    return compiled(
        examples.describe, like, light=is_cheap(like), out_shardings=job.layout.replicated
    )


def compile_init(job: TrainJob) -> tuple[Program[TrainState], WarmStartProgram | None]:
    """Compiles `init`, and the warm start that comes before it if the job has a warm start."""
    light = init_is_cheap(job)
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


def init_is_cheap(job: TrainJob) -> bool:
    """Returns whether `init` is compiled unoptimised: its state is small and no warm start runs."""
    apart = job.warm is not None or job.cheap_init
    return apart and is_cheap(jax.eval_shape(job.learner.init, job.start))


def with_shardings(shapes: Tree, shardings: PyTree) -> Tree:
    """Returns shapes and dtypes with the shardings of a program."""

    def place(x: jax.ShapeDtypeStruct, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    placed: Tree = jax.tree.map(place, shapes, shardings)
    return placed


def chunk_of(job: TrainJob) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
    """Returns a chunk as one function, `(state, n) -> (state, metrics of n rows)`."""

    def chunk(state: TrainState, n: jax.Array) -> tuple[TrainState, Metrics]:
        def body(i: jax.Array, carry: tuple[TrainState, Metrics]) -> tuple[TrainState, Metrics]:
            state, rows = carry
            state, row = job.learner.step(state)
            return state, jax.tree.map(lambda all, one: all.at[i].set(one), rows, row)

        buffer = jax.eval_shape(job.learner.step, state)[1]
        # The loop count is traced, so that a shorter chunk is the same program.
        rows = jax.tree.map(lambda x: jnp.zeros((job.length.log_every, *x.shape), x.dtype), buffer)
        return jax.lax.fori_loop(0, n, body, (state, rows))

    return chunk


def run_in_timed_calls(program: Program[tuple[TrainState, Metrics]]) -> Chunk:
    """Returns a chunk that calls its program for some seconds at a time, and can stop in between.

    Short calls also bound memory: where each device is one core, XLA keeps 2.4 KB of most matrix
    products until the call ends, up to 18 MB per second.

    Args:
      program: `(state, n) -> (state, metrics)`; only the first n entries of metrics are valid.
    """
    size = 1  # number of iterations in one call, until a call has been timed

    def chunk(state: TrainState, n: np.int32, _: Report, stop: threading.Event) -> ChunkResult:
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
            took = max(time.perf_counter() - begun, 1e-9)  # the clock may jump
            size = min(processes.gather_values(max(1, int(SECONDS_OF_CALL * done / took))))
        return state, jax.tree.map(lambda *each: np.concatenate(each), *rows), done, None

    return chunk


def compile_with_score(
    learner: Learner, scorer: Scorer, like: TrainState, options: dict[str, Any]
) -> tuple[Chunk, DeviceMemory]:
    """Compiles a chunk as two programs with scoring in between; also returns the larger memory."""
    of_sample = options | {"out_shardings": (options["out_shardings"][0], None)}
    sample = compiled(learner.sample, like, **of_sample)
    shapes: Batch = jax.eval_shape(learner.sample, like)[1]
    batch = with_reward(with_shardings(shapes, sample.output_shardings[1]))
    update = compiled(learner.update, like, batch, **options)

    def sample_score_update(state: TrainState, report: Report) -> tuple[TrainState, Metrics]:
        first = not np.max(state.step)
        state, batch = sample(state)
        batch, of_score = scorer.score_batch(batch, first=first, report=report)
        # Two programs with collectives on CPU devices can deadlock if they run at the same time.
        state, row = update(state, batch)
        jax.block_until_ready((state, row))
        return state, {**row, **of_score}

    memory = measure_memory(update, like).beside(measure_memory(sample, like))
    return run_per_iteration(sample_score_update), memory


def compile_with_rollouts(
    learner: Learner, rollouts: Rollouts, like: TrainState, options: dict[str, Any]
) -> tuple[Chunk, DeviceMemory]:
    """Compiles a chunk as rollouts on the host and one program for the rest of each iteration."""

    def iterate(state: TrainState, recording: PyTree) -> tuple[TrainState, Metrics]:
        return learner.step(rollouts.with_recording(state, recording))

    program = compiled(iterate, like, rollouts.recording(), **options)
    rollouts.compile(like)

    def record_and_iterate(state: TrainState, report: Report) -> tuple[TrainState, Metrics]:
        begun = time.perf_counter()
        state, recording = rollouts.record(state, report)
        state, row = program(state, recording)
        jax.block_until_ready((state, row))
        return state, {**row, **rollouts.metrics(time.perf_counter() - begun)}

    return run_per_iteration(record_and_iterate), measure_memory(program, like)


def run_per_iteration(iterate: Callable[[TrainState, Report], tuple[TrainState, Metrics]]) -> Chunk:
    """Returns a chunk of iterations with work on the host, which can be stopped in between.

    The first environment that fails ends the chunk after the last complete iteration.
    """

    def chunk(state: TrainState, n: np.int32, report: Report, stop: threading.Event) -> ChunkResult:
        rows, failure = list[Metrics](), None
        for i in range(n):
            if i and processes.any_of(stop.is_set()):
                break
            try:
                state, row = iterate(state, report)
            except PoolError as error:
                failure = error
                break
            rows.append(row)
        metrics = jax.tree.map(lambda *each: np.stack(each), *rows) if rows else {}
        return state, metrics, len(rows), failure

    return chunk


def with_frozen(state: TrainState, job: TrainJob) -> TrainState:
    """Returns a checkpoint's state with the frozen parameters, which `init` computes again."""
    if not jax.tree.leaves(jax.eval_shape(job.learner.init, job.start).params.frozen):
        return state
    # Compiled with the optimisation of the run's init: another level may round differently.
    light = init_is_cheap(job)
    frozen = compiled(lambda start: job.learner.init(start).params.frozen, job.start, light=light)
    return state.with_frozen(frozen(job.start))


def split_warm_start(
    make: Callable[[PyTree], Learner], settings: WarmStart, task: TaskLike, policy: Transformer
) -> WarmStartProgram | None:
    """Returns the warm start in the `init` of one seed's learner; None without a warm start.

    Args:
      make: `(warm) -> Learner`, returns the learner whose problem has the argument `warm`, see
        `make_problem`.
      settings: Settings of the warm start.
      task: Task that demonstrations come from.
      policy: Transformer of the policy.
    """
    if not settings.steps:
        return None

    def begin(start: PyTree) -> WarmStartState:
        fits = []

        def hold(params: PyTree, key: jax.Array) -> PyTree:
            fits.append(warm_start.begin_warm_start(settings, params, key))
            return params

        # `init` is traced for the arguments of the warm start; the compiler drops other results.
        make(hold).init(start)
        return fits[0]

    def init(pair: tuple[PyTree, PyTree]) -> TrainState:
        start, params = pair
        return make(lambda *_: params).init(start)

    def advance(fit: WarmStartState, done: jax.Array, given: PyTree) -> WarmStartState:
        model = policy if policy.lora is None else lora.over(policy, given)
        source = task if isinstance(task, Dialogue) else reading(task, given)
        return warm_start.advance(model, source, settings, fit, done)

    return WarmStartProgram(settings, begin, advance, init)


def run_warm_start(
    warm: WarmStartProgram,
    start: PyTree,
    wait_for: Callable[..., tuple[PyTree, float]],
    show: Callable[[str, str, str], None],
    leave_if_interrupted: Callable[[], None],
    *,
    given: PyTree = None,
) -> PyTree:
    """Runs the warm start; returns the parameters of the policy.

    Args:
      warm: Compiled parts of the warm start.
      start: Argument of `learner.init`, see `TrainJob.start`.
      wait_for: `(function, *arguments) -> (result, seconds)`, calls a function.
      show: `(phase, detail, left) -> None`, shows progress; see `Reporter.phase`.
      leave_if_interrupted: `() -> None`, called after every `BETWEEN` steps.
      given: Parameters and prompts that all seeds begin with, see `TrainJob.given`.
    """
    settings, done, begun = warm.settings, 0, time.perf_counter()
    fit, _ = wait_for(warm.begin, start)
    accuracy = processes.gather_array(fit.accuracy)
    while warm_start.unfinished(settings, done, accuracy).any():
        fit, _ = wait_for(warm.advance, fit, np.int32(done), given)
        leave_if_interrupted()
        done, accuracy = min(done + BETWEEN, settings.steps), processes.gather_array(fit.accuracy)
        each = max(time.perf_counter() - begun, 0.0) / done  # the clock may jump
        detail, left = f"step {done:,}/{settings.steps:,}", clock(each * (settings.steps - done))
        if settings.accuracy < 1.0:
            # The accuracy is the mean over seeds; the warm start may end before its last step.
            detail, left = f"{detail}, accuracy {accuracy.mean():.2f}", f"< {left}"
        show("warm start", detail, f"{left} left")
    return fit.params
