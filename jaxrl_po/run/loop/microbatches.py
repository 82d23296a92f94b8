"""Choice of `num_microbatches` by the memory that the compiler reports."""

from collections.abc import Callable

from rich import filesize

from jaxrl_po.run.devices.memory import Memory
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.loop.job import TrainJob
from jaxrl_po.run.loop.programs import Programs, in_microbatches, with_microbatches

FLAG = "config.num_microbatches"
COMPILATIONS = 3


def fit(job: TrainJob, programs: Programs, space: int | None) -> tuple[int, Programs]:
    """Compiles the chunk again until it fits; returns the number of microbatches and programs.

    Args:
      job: job of one microbatch, with `rebuild`.
      programs: its programs.
      space: bytes of a device that programs may take; None if unknown.

    Raises:
      RunError: nothing fits, or the compiler refuses a program and the space is unknown.
    """
    require_evaluation(programs.evaluation, space)

    def compile_again(other: TrainJob, _: int) -> Memory:
        nonlocal programs
        programs = with_microbatches(programs, other)
        return programs.memory

    number = choose_microbatches(job, programs.memory, compile_again, space)
    return number, programs


def choose_microbatches(
    job: TrainJob,
    memory: Memory,
    compile_again: Callable[[TrainJob, int], Memory],
    space: int | None,
) -> int:
    """Finds the smallest number of microbatches with which an update fits in memory.

    The peak of an update in n microbatches is about a + b/n. At first, a is the part that no n
    reduces; then both follow from the last two compilations, unless no number fits by them: two
    numbers may have the same peak. The number jumps to the next one that the line predicts to fit,
    and there are at most `COMPILATIONS`. Sampling must fit, too, but is no part of the line. A
    program that the compiler refused does not fit; if the size in its message does, or there is no
    size, the number doubles.

    Args:
      job: compiled job of one microbatch, with `rebuild`.
      memory: memory of its programs.
      compile_again: `(job, number) -> Memory`, compiles the job of another number.
      space: bytes of a device that programs may take; None if unknown.

    Returns:
      The number of the job that was compiled last.

    Raises:
      RunError: nothing fits, or not within `COMPILATIONS`.
    """
    number, points = 1, [(0.0, memory.fixed)]  # (1/n, bytes)
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
    """Returns the next number whose peak on the line fits, and its job; None if none fits."""
    (x0, y0), (x1, y1) = line
    slope = (y1 - y0) / (x1 - x0)
    for number in range(after + 1, job.length.steps_per_iteration + 1):
        if y1 + slope * (1 / number - x1) <= space:
            other = in_microbatches(job, number)
            if other is not None:
                return number, other
    return None


def _too_large(memory: Memory, number: int, space: int | None) -> RunError:
    """Returns the error for an update that fits with no number."""
    needs = "more than the compiler gives it"
    if memory.peak is not None and space is not None and memory.peak > space:
        of = filesize.decimal(max(space, 0))
        needs = f"{filesize.decimal(memory.peak)} of a device, which has {of}"
    said = f"; the compiler says: {memory.refused}" if memory.refused else ""
    return RunError(
        f"training needs {needs}, with {FLAG} = {number}: lower problem.num_prompts or seeds, "
        f"or take a smaller model{said}"
    )


def require_evaluation(memory: Memory | None, space: int | None) -> None:
    """Raises RunError for an evaluation, which has no microbatches, that does not fit."""
    if memory is not None and space is not None and not memory.fits(space):
        raise RunError(
            f"evaluation needs {filesize.decimal(memory.peak or 0)} of a device, which has "
            f"{filesize.decimal(max(space, 0))}: lower eval_prompts"
        )
