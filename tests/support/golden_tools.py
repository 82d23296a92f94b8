"""Tools for `golden_schemas.json`, which transformers 5.23.0 made with `get_json_schema`."""

import enum
from typing import Any, Literal, Optional, Union


class Size(enum.Enum):
    """Sizes."""

    SMALL = "s"
    LARGE = 2


def everything(
    text: str,
    count: int,
    share: float,
    flag: bool,
    names: list[str],
    rows: list[list[int]],
    table: dict[str, float],
    plain: dict,
    bare: list,
    size: Size,
    way: Literal["up", "down"],
    pair: tuple[int, str],
    either: int | str,
    mixed: list[int] | str,
    anything: Any,
    maybe: Optional[str] = None,  # noqa: UP045
    word: Union[int, None] = 3,  # noqa: UP007
    drink: str = "tea",
) -> dict[str, int]:
    """Takes all there is.

    And says so, in
    two lines.

    Args:
        text: a text
        count: how many, and
            more about it: with a colon
        share: a share
        flag: whether
        names: names
        rows: rows
        table: a table
        plain: a plain one
        bare: a bare one
        size: a size
        way: up or down
        pair: a pair
        either: one of two
        mixed: one of two kinds
        anything: whatever
        maybe: perhaps
        word: perhaps a number
        drink: what to drink (choices: ["tea", "coffee"])

    Returns:
        What was
        taken.

    Raises:
        ValueError: never.
    """
    return {}


def silent() -> None:
    """Does nothing."""


class Object:
    """Any object."""


def odd(x: int) -> Object:
    """Returns what JSON does not have.

    Args:
        x: a number
    """
