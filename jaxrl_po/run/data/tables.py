"""Tasks from tables of prompts: a JSONL file, or the items of a reasoning-gym data set."""

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_po import config, language
from jaxrl_po.config import COUNT, NON_NEGATIVE, SEED, ConfigError, Interval, common, number, static
from jaxrl_po.language.pretrained.shapes import SHAPES
from jaxrl_po.language.tasks.random_prompts import RandomPromptsSettings
from jaxrl_po.run import errors
from jaxrl_po.run.data import prompts

FRACTION = Interval(0.0, 1.0, open_low=True, open_high=True)


@config.record
class Prompts:
    """Format of prompts, and the share of the prompts to hold out."""

    template: str = common.static(
        "",
        "text with {prompt} around each prompt; or chat, to make each prompt a user's message in "
        "the model's chat template; empty to leave prompts unchanged",
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
        512, "maximal length of a prompt; 0 for no maximum", unit="tokens", within=NON_NEGATIVE
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
        "characters of the vocabulary; empty for the characters in the files, or with a pretrained "
        "model, whose vocabulary is fixed",
    )

    def validate(self) -> None:
        """Raises ConfigError if no file is named."""
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


@config.record
class NoSettings:
    """Settings of a user-defined task, which has no flags."""


class TableReading(NamedTuple):
    """Options for the conversion of a table's prompt rows to a task.

    Attributes:
      text: Conversion of prompts for a pretrained model; None for training without such a model.
      answers: Whether each prompt needs an answer.
      whole: Whether prompts may repeat; see `prompts.make_task_from_rows`.
      supervised: Whether answers come from `prompts.Row.demonstrations`.
      shape: Name of a published model whose vocabulary a new model has; empty if unspecified.
    """

    text: prompts.PromptEncoder | None = None
    answers: bool = True
    whole: bool = False
    supervised: bool = False
    shape: str = ""


def from_file(settings: File, reading: TableReading) -> language.Task:
    """Makes the task of `--task=file`; see `prompts.make_task_from_rows` and `prompts.read_jsonl`.

    Raises:
      ConfigError: A file is unusable; the message names the flag, the file and the line.
    """
    if reading.text is not None and settings.characters:
        raise ConfigError("task.characters", "has no effect with a pretrained model's tokenizer")
    whole, supervised = reading.whole or reading.supervised, reading.supervised
    parts = read_rows(settings, answers=reading.answers, whole=whole, texts=supervised)
    if supervised:
        parts = read_demonstrations(parts)
    return _as_task(settings, settings.train, parts, reading.text, settings.characters, whole)


def read_demonstrations(parts: Sequence[Sequence[prompts.Row]]) -> list[list[prompts.Row]]:
    """Returns the demonstrations of each part that no earlier part contains.

    The training part and the test part can contain equal demonstrations: different conversations
    may start with the same messages.

    Raises:
      ConfigError: all demonstrations of a held-out part are training demonstrations as well.
    """
    found, seen = list[list[prompts.Row]](), set[str]()
    for part in parts:
        shown = [each for row in part for each in row.demonstrations()]
        found.append([each for each in shown if each.identity(True) not in seen])
        seen |= {each.identity(True) for each in shown}
        if part and not found[-1]:
            raise part[0].error("every held-out demonstration is a training demonstration as well")
    return found


def _as_task(
    settings: Prompts,
    name: str,
    parts: Sequence[Sequence[prompts.Row]],
    text: prompts.PromptEncoder | None,
    characters: str = "",
    whole: bool = False,
) -> language.Task:
    """Formats the prompts of training, validation and test rows and makes a task from them.

    Raises:
      ConfigError: Arguments are set for an unused chat template, or the rows form no valid task.
    """
    rows = [[row.worded(settings.template, settings.system) for row in part] for part in parts]
    arguments = errors.json_object("task.template_arguments", settings.template_arguments)
    if arguments and (text is None or prompts.MESSAGES not in rows[0][0].columns):
        raise ConfigError(
            "task.template_arguments",
            "has no effect unless a pretrained model reads messages or task.template = chat",
        )
    train, validation, test = rows
    return prompts.make_task_from_rows(
        name,
        train,
        test,
        validation=validation,
        characters=characters,
        max_prompt_length=settings.max_prompt_length,
        text=text and text._replace(arguments=arguments),
        whole=whole,
    )


def read_rows(
    settings: File, *, answers: bool, whole: bool, texts: bool = False
) -> list[list[prompts.Row]]:
    """Reads the training, validation and test rows of `--task=file`, in the order of the task.

    Raises:
      ConfigError: A file is unusable; the message names the flag, the file and the line.
    """
    read = functools.partial(prompts.read_jsonl, answers=answers, texts=texts)
    rows = read(settings.train)
    tests = [read(settings.test, flag="task.test")] if settings.test else []
    return prompts.hash_split(rows, settings.test_fraction, 1 if tests else 2, whole=whole) + tests


def from_reasoning_gym(settings: ReasoningGym, reading: TableReading) -> language.Task:
    """Makes the task of `--task=reasoning_gym`; items with the same question share a split.

    All items of a reasoning-gym data set have answers.

    Raises:
      ConfigError: The extra `language` is missing, or a flag is invalid; the message names it.
    """
    errors.require("task", "reasoning_gym", "language")
    from jaxrl_po.run.data import reasoning

    dataset, size = settings.dataset, settings.size
    errors.lookup("task.dataset", dataset, dict.fromkeys(reasoning.NAMES))
    options = errors.json_object("task.options", settings.options)
    try:
        items = reasoning.items(dataset, seed=settings.seed, size=size, options=options)
    except ValueError as error:
        raise ConfigError("task.dataset", str(error)) from None
    places = (f"item {i} of {dataset}" for i in range(size))
    rows = list(map(prompts.Row, items, places, itertools.repeat("task.dataset")))
    parts = prompts.hash_split(rows, settings.test_fraction, 2)
    return _as_task(settings, dataset, parts, reading.text)


def make_random_prompts(settings: RandomPromptsSettings, reading: TableReading) -> language.Task:
    """Makes the task of `--task=random`; raises ConfigError unless the model's shape is known."""
    if reading.shape not in SHAPES:
        raise ConfigError("task", "random needs a model.shape, which gives its vocabulary")
    return language.tasks.random_prompts(SHAPES[reading.shape]["vocab_size"], **vars(settings))
