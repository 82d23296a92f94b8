"""The table of tasks by name, each with the record of its flags."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxrl_po import config, language
from jaxrl_po.config import COUNT, ConfigError, Interval, static
from jaxrl_po.language.dialogue import AnyTask
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts, tables
from jaxrl_po.run.experiment import flags, user_code
from jaxrl_po.run.store import sources


@config.record
class Addition:
    """Settings of `--task=addition`."""

    num_digits: int = static(
        3,
        "digits of an operand",
        unit="digits",
        within=Interval(1, language.tasks.MAX_DIGITS),
        common=True,
    )
    zero_pad: bool = static(
        True,
        "pad operands and sum with zeros to their full width; otherwise prompts and answers "
        "vary in length",
    )
    reverse: bool = static(True, "answer with the lowest digit first, the order of the carries")


@config.record
class Multiplication:
    """Settings of `--task=multiplication`."""

    num_digits: int = static(
        2,
        "digits of an operand",
        unit="digits",
        within=Interval(1, language.tasks.MAX_FACTOR_DIGITS),
        common=True,
    )


@config.record
class Sorting:
    """Settings of `--task=sorting`."""

    length: int = static(
        6,
        "digits of a list",
        unit="digits",
        within=Interval(2, language.tasks.MAX_LENGTH),
        common=True,
    )
    symbols: int = static(10, "digits to choose from", within=Interval(2, 10))


@config.record
class Countdown:
    """Settings of `--task=countdown`."""

    num_numbers: int = static(
        3, "given numbers, each to be used once", within=Interval(2, language.tasks.MAX_NUMBERS)
    )
    max_number: int = static(
        9, "largest given number; max_number ** num_numbers below 2 ** 31", within=Interval(2)
    )


@config.record
class RunningSum:
    """Settings of `--task=running_sum`."""

    length: int = static(
        6,
        "digits of a list",
        unit="digits",
        within=Interval(2, language.tasks.MAX_LENGTH),
        common=True,
    )
    modulus: int = static(10, "modulus of the sums", within=Interval(2, 10))
    max_filler: int = static(
        8,
        "maximum number of filler tokens in a demonstration",
        unit="tokens",
        within=Interval(0, language.tasks.MAX_FILLER),
    )


@config.record
class RandomPrompts:
    """Settings of `--task=random`."""

    prompt_tokens: int = static(64, "length of a prompt", unit="tokens", within=COUNT)
    answer_tokens: int = static(
        64, "longest completion, unless --problem.max_new_tokens says otherwise", within=COUNT
    )


@config.record
class Mastermind:
    """Settings of `--task=mastermind`."""

    length: int = static(3, "symbols of a code", within=Interval(1, 6), common=True)
    symbols: int = static(
        4, "symbols to choose from; symbols ** length at most 4096", within=Interval(2, 10)
    )
    max_turns: int = static(
        8, "guesses; a lost game counts as one more", within=Interval(1, 64), common=True
    )


@config.record
class HigherLower:
    """Settings of `--task=higher_lower`."""

    numbers: int = static(64, "numbers to choose from", within=Interval(2, 100))
    max_turns: int = static(
        10, "guesses; a lost game counts as one more", within=Interval(1, 100), common=True
    )


@config.record
class Calculator:
    """Settings of `--task=calculator`."""

    num_digits: int = static(
        6, "digits of a number", unit="digits", within=Interval(1, 8), common=True
    )
    tool: bool = static(True, "reply with the values of expressions; off, to see their worth")
    max_turns: int = static(3, "messages, the answer included", within=Interval(1, 64), common=True)


FILE, RANDOM = "file", "random"


class TaskEntry(NamedTuple):
    """A row of the table.

    Attributes:
      settings: record of `--task.*`.
      make: from the settings, as keyword arguments, to the task.
      reward: source of the task's reward function in Python; empty if the program verifies.
      in_text: whether `make` takes `text`, see `prompts.Text`, and `answers`, whether they are
        needed.
    """

    settings: type
    make: Callable[..., AnyTask]
    reward: str = ""
    in_text: bool = False


@config.record
class NoSettings:
    """A task of the user's own has no flags."""


# Made and verified inside the program.
GENERATED = {
    "addition": TaskEntry(Addition, language.tasks.addition),
    "multiplication": TaskEntry(Multiplication, language.tasks.multiplication),
    "sorting": TaskEntry(Sorting, language.tasks.sorting),
    "countdown": TaskEntry(Countdown, language.tasks.countdown),
    "running_sum": TaskEntry(RunningSum, language.tasks.running_sum),
}
# Of several turns.
DIALOGUES = {
    "mastermind": TaskEntry(Mastermind, language.dialogues.mastermind),
    "higher_lower": TaskEntry(HigherLower, language.dialogues.higher_lower),
    "calculator": TaskEntry(Calculator, language.dialogues.calculator),
}
SCORE = "jaxrl_po.run.data.reasoning:score_answer"
TASKS = {
    **GENERATED,
    **DIALOGUES,
    RANDOM: TaskEntry(RandomPrompts, language.tasks.random_prompts),
    FILE: TaskEntry(tables.File, tables.from_file, in_text=True),
    "reasoning_gym": TaskEntry(tables.ReasoningGym, tables.from_reasoning_gym, SCORE, in_text=True),
}


def make(
    name: str,
    settings: Any,
    *,
    text: prompts.Text | None = None,
    answers: bool = True,
    whole: bool = False,
    supervised: bool = False,
    vocabulary: int = 0,
) -> AnyTask:
    """The task of a name.

    Args:
      name: of a task, or `file.py:name`.
      settings: record of `--task.*`.
      text: how a pretrained model reads prompts; None without one.
      answers: whether each prompt needs an answer.
      whole: see `prompts.make_task`; for `file` only.
      supervised: see `tables.from_file`; for `file` only.
      vocabulary: of the model, for `random` only, which takes any.

    Raises:
      ConfigError: settings that cannot be used, or a task that has a vocabulary of its own where
        there is a pretrained model.
    """
    row = entry(name)
    if name == RANDOM:
        if not vocabulary:
            raise ConfigError("task", "random needs a model.shape, which gives its vocabulary")
        return row.make(vocabulary, **vars(settings))
    if row.in_text:
        of_file = {"whole": whole, "supervised": supervised}
        further = {field: True for field, value in of_file.items() if value and name == FILE}
        return row.make(**vars(settings), text=text, answers=answers, **further)
    if text is not None and not sources.is_source(name):
        raise ConfigError(
            "task",
            f"{name} has its own vocabulary: choose file, reasoning_gym or a task of your own for "
            "a pretrained model",
        )
    return row.make(**vars(settings))


def entry(name: str) -> TaskEntry:
    """The task of a name, or that of `file.py:name`, a function without arguments that makes it.

    Raises:
      ConfigError: the name is unknown, or the file cannot be used.
    """
    if sources.is_source(name):
        return TaskEntry(NoSettings, lambda: _own(name))
    found: TaskEntry = errors.lookup("task", name, TASKS)
    return found


def require_flags(name: str, names: Iterable[str]) -> None:
    """Raises ConfigError for a flag that this task has not and others have, which are named.

    Example:
      >>> require_flags("addition", ["task.train"])
      Traceback (most recent call last):
      jaxrl_po...ConfigError: task.train: is not a setting of task = addition, but of task = file
    """
    own = {field.name for field in flags.settable(entry(name).settings)}
    for flag in names:
        field = flag.removeprefix("task.")
        others = [
            task
            for task, row in TASKS.items()
            if field in {each.name for each in flags.settable(row.settings)}
        ]
        if flag.startswith("task.") and field not in own and others:
            raise ConfigError(
                flag, f"is not a setting of task = {name}, but of task = {' or '.join(others)}"
            )


def epochs(task: language.Task, total_steps: int) -> tuple[str, ...]:
    """The line shown about an epoch before supervised training; none for endless rows."""
    held_out = [part.start for part in (task.test, task.validation) if part]
    if task.row is None or not held_out:
        return ()
    rows = min(held_out)  # which follow those to learn from
    return (
        f"an epoch is {rows:,} completions, so that --total_steps={total_steps} makes "
        f"{total_steps / rows:.3g}",
    )


def _own(name: str) -> AnyTask:
    task = user_code.make("task", name)
    if not isinstance(task, AnyTask):
        raise ConfigError(
            "task", f"must be a jaxrl_po.language.Task or Dialogue, got {type(task).__name__}"
        )
    if isinstance(task, language.Task) and len(task.test) > 1 and not task.validation:
        task = task._replace(test=task.test[1::2], validation=task.test[::2])
    return task


def is_dialogue(name: str) -> bool:
    """Whether that task is a dialogue."""
    if sources.is_source(name):
        return isinstance(_own(name), language.Dialogue)
    return name in DIALOGUES
