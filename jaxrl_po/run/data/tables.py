"""Tasks from tables of prompts: a JSONL file, or the items of a reasoning-gym data set."""

import contextlib
from collections.abc import Iterator, Sequence

from jaxrl_po import config, language
from jaxrl_po.config import COUNT, NON_NEGATIVE, SEED, ConfigError, Interval, number, static
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts
from jaxrl_po.run.errors import UsageError

FRACTION = Interval(0.0, 1.0, open_low=True, open_high=True)


@config.record
class Prompts:
    """How prompts are written and held out."""

    template: str = static(
        "",
        "chat: a prompt is a user's message in the model's chat template; or a text with {prompt}; "
        "empty: a prompt as it is",
    )
    system: str = static("", "system message before a user's message or the row's messages")
    template_arguments: str = static(
        "{}",
        "arguments of the chat template of a pretrained model, as JSON, e.g. "
        '{"enable_thinking": false}',
    )
    test_fraction: float = number(
        0.1,
        "share of the prompts to hold out, by a hash of the prompt: half select the best "
        "checkpoint, half are for jaxrl-po evaluate; with a test file all select",
        within=FRACTION,
    )
    max_prompt_length: int = static(
        512, "a longer prompt is an error; 0 allows any", unit="tokens", within=NON_NEGATIVE
    )

    def validate(self) -> None:
        """Raises ConfigError for a template without a place for the prompt."""
        if self.template not in ("", prompts.CHAT) and "{prompt}" not in self.template:
            raise ConfigError(
                f"template must be {prompts.CHAT} or a text with {{prompt}}, got {self.template!r}"
            )


@config.record
class File(Prompts):
    """Settings of `--task=file`."""

    train: str = static(
        "",
        "JSONL file of prompts: each line has a prompt or messages, an answer and any further "
        "columns; for --algorithm=sft a prompt and a completion, messages, or a text",
    )
    test: str = static(
        "", "file of prompts for jaxrl-po evaluate; empty to hold out more of the train file"
    )
    characters: str = static(
        "",
        "the alphabet; empty takes the characters of the files, and a pretrained model has its own",
    )

    def validate(self) -> None:
        """Refuses a missing file."""
        super().validate()
        if not self.train:
            raise ConfigError("train must name a file of prompts, e.g. --task.train=prompts.jsonl")


@config.record
class ReasoningGym(Prompts):
    """Settings of `--task=reasoning_gym`."""

    dataset: str = static("chain_sum", "name of the data set in reasoning-gym")
    size: int = static(1000, "number of items, including held-out ones", within=COUNT)
    seed: int = static(0, "seed of the data set", within=SEED)
    options: str = static("{}", 'further settings of the data set, as JSON, e.g. {"max_digits": 1}')


def from_file(
    *,
    train: str,
    test: str,
    test_fraction: float,
    characters: str,
    max_prompt_length: int,
    text: prompts.Text | None = None,
    answers: bool = True,
    whole: bool = False,
    supervised: bool = False,
    **wording: str,
) -> language.Task:
    """The task of `--task=file`; see `prompts.make_task` and `prompts.read_jsonl`.

    With `supervised` its answers are those of `prompts.Row.demonstrations`.

    Raises:
      UsageError: names the flag, the file and the line.
    """
    if text is not None and characters:
        raise UsageError("--task.characters has no effect with the tokenizer of a pretrained model")
    whole |= supervised
    parts = read_rows(train, test, test_fraction, answers=answers, whole=whole, texts=supervised)
    try:
        if supervised:
            parts = demonstrated(parts)
        (rows, validation, held_out), text = worded(parts, text, **wording)
        return prompts.make_task(
            train,
            rows,
            held_out,
            validation=validation,
            characters=characters,
            max_prompt_length=max_prompt_length,
            text=text,
            whole=whole,
        )
    except ConfigError as error:
        # It begins with the place of the row.
        side = "test" if test and str(error).startswith(test) else "train"
        raise UsageError(f"--task.{side}: {error}") from None


def demonstrated(parts: Sequence[Sequence[prompts.Row]]) -> list[list[prompts.Row]]:
    """What the rows of each part demonstrate; no part has what an earlier one has.

    Conversations that differ may begin alike.

    Raises:
      ConfigError: nothing is left to hold out.
    """
    found, seen = list[list[prompts.Row]](), set[str]()
    for part in parts:
        shown = [each for row in part for each in row.demonstrations()]
        found.append([each for each in shown if each.identity(True) not in seen])
        seen |= {each.identity(True) for each in shown}
        if part and not found[-1]:
            raise ConfigError(f"{part[0].place}: all that is held out is trained on as well")
    return found


def worded(
    parts: Sequence[Sequence[prompts.Row]],
    text: prompts.Text | None,
    *,
    template: str,
    system: str,
    template_arguments: str,
) -> tuple[list[list[prompts.Row]], prompts.Text | None]:
    """Rows as `Prompts` has them, and how they are read.

    Raises:
      UsageError: arguments of a template that is not used.
    """
    written = [[row.worded(template, system) for row in part] for part in parts]
    arguments = errors.json_object("task.template_arguments", template_arguments)
    if arguments and (text is None or prompts.MESSAGES not in written[0][0].columns):
        raise UsageError(
            "--task.template_arguments has no effect unless a pretrained model reads messages: "
            "rows with messages, or --task.template=chat"
        )
    return written, text and text._replace(arguments=arguments)


def read_rows(
    train: str, test: str, test_fraction: float, *, answers: bool, whole: bool, texts: bool = False
) -> list[list[prompts.Row]]:
    """Training, validation and test rows of `--task=file`, in the order of its task.

    Raises:
      UsageError: names the flag, the file and the line.
    """
    with naming("task.train"):
        rows = prompts.read_jsonl(train, answers=answers, texts=texts)
    with naming("task.test"):
        tests = [prompts.read_jsonl(test, answers=answers, texts=texts)] if test else []
    with naming("task.train"):
        return prompts.split(rows, test_fraction, 1 if test else 2, whole=whole) + tests


@contextlib.contextmanager
def naming(flag: str) -> Iterator[None]:
    """Inside, a ConfigError becomes a UsageError that names the flag."""
    try:
        yield
    except ConfigError as error:
        raise UsageError(f"--{flag}: {error}") from None


def from_reasoning_gym(
    *,
    dataset: str,
    size: int,
    seed: int,
    options: str,
    test_fraction: float,
    max_prompt_length: int,
    text: prompts.Text | None = None,
    answers: bool = True,
    **wording: str,
) -> language.Task:
    """The task of `--task=reasoning_gym`; items with the same question are in the same split.

    All items have answers, whether `answers` are needed or not.

    Raises:
      UsageError: the extra is not installed, or a flag is invalid; names it.
    """
    errors.require("task=reasoning_gym", "reasoning_gym", "language")
    from jaxrl_po.run.data import reasoning

    errors.lookup("task.dataset", dataset, dict.fromkeys(reasoning.NAMES))
    further = errors.json_object("task.options", options)
    try:
        items = reasoning.items(dataset, seed=seed, size=size, options=further)
        rows = [prompts.Row(item, f"item {i} of {dataset}") for i, item in enumerate(items)]
        parts, text = worded(prompts.split(rows, test_fraction, 2), text, **wording)
        train, validation, test = parts
        return prompts.make_task(
            dataset,
            train,
            test,
            validation=validation,
            max_prompt_length=max_prompt_length,
            text=text,
        )
    except ValueError as error:  # ConfigError is a subclass
        raise UsageError(f"--task.dataset={dataset}: {error}") from None
