"""Tasks from tables of prompts: a JSONL file, or the items of a reasoning-gym data set."""

import itertools
from collections.abc import Sequence

from jaxrl_po import config, language
from jaxrl_po.config import COUNT, NON_NEGATIVE, SEED, ConfigError, Interval, common, number, static
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts

FRACTION = Interval(0.0, 1.0, open_low=True, open_high=True)


@config.record
class Prompts:
    """How prompts are written and held out."""

    template: str = common.static(
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
                "template",
                f"must be {prompts.CHAT} or a text with {{prompt}}, got {self.template!r}",
            )


@config.record
class File(Prompts):
    """Settings of `--task=file`."""

    train: str = common.static(
        "",
        "JSONL file of prompts: each line has a prompt or messages, an answer and any further "
        "columns; for --algorithm=sft a prompt and a completion, messages, or a text",
    )
    test: str = common.static(
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
            raise ConfigError("train", "must name a file of prompts, e.g. prompts.jsonl")


@config.record
class ReasoningGym(Prompts):
    """Settings of `--task=reasoning_gym`."""

    dataset: str = static("chain_sum", "name of the data set in reasoning-gym")
    size: int = static(1000, "number of items, including held-out ones", within=COUNT)
    seed: int = common.static(0, "seed of the data set", within=SEED)
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
      ConfigError: names the flag, the file and the line.
    """
    if text is not None and characters:
        raise ConfigError("task.characters", "has no effect with a pretrained model's tokenizer")
    whole |= supervised
    parts = read_rows(train, test, test_fraction, answers=answers, whole=whole, texts=supervised)
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
            raise part[0].error("every held-out demonstration is a training demonstration as well")
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
      ConfigError: arguments of a template that is not used.
    """
    written = [[row.worded(template, system) for row in part] for part in parts]
    arguments = errors.json_object("task.template_arguments", template_arguments)
    if arguments and (text is None or prompts.MESSAGES not in written[0][0].columns):
        raise ConfigError(
            "task.template_arguments",
            "has no effect unless a pretrained model reads messages or task.template = chat",
        )
    return written, text and text._replace(arguments=arguments)


def read_rows(
    train: str, test: str, test_fraction: float, *, answers: bool, whole: bool, texts: bool = False
) -> list[list[prompts.Row]]:
    """Training, validation and test rows of `--task=file`, in the order of its task.

    Raises:
      ConfigError: names the flag, the file and the line.
    """
    rows = prompts.read_jsonl(train, answers=answers, texts=texts)
    tests = (
        [prompts.read_jsonl(test, answers=answers, texts=texts, flag="task.test")] if test else []
    )
    return prompts.split(rows, test_fraction, 1 if test else 2, whole=whole) + tests


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
      ConfigError: the extra is not installed, or a flag is invalid; names it.
    """
    errors.require("task", "reasoning_gym", "language")
    from jaxrl_po.run.data import reasoning

    errors.lookup("task.dataset", dataset, dict.fromkeys(reasoning.NAMES))
    further = errors.json_object("task.options", options)
    try:
        items = reasoning.items(dataset, seed=seed, size=size, options=further)
    except ValueError as error:
        raise ConfigError("task.dataset", str(error)) from None
    places = (f"item {i} of {dataset}" for i in range(size))
    rows = list(map(prompts.Row, items, places, itertools.repeat("task.dataset")))
    parts, text = worded(prompts.split(rows, test_fraction, 2), text, **wording)
    train, validation, test = parts
    return prompts.make_task(
        dataset, train, test, validation=validation, max_prompt_length=max_prompt_length, text=text
    )
