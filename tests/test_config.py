"""Tests records of settings: leaves and structure, ranges and messages."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import config
from jaxrl_po.config import (
    COUNT,
    NON_NEGATIVE,
    POSITIVE,
    UNIT,
    ConfigError,
    Interval,
    number,
    static,
)


@config.record
class Settings:
    rate: float = number(0.1, "a rate", within=POSITIVE, unit="per step")
    gamma: float = number(0.9, "a discount", within=UNIT)
    free: float = number(0.0, "any finite number")
    size: int = static(4, "a size", within=COUNT)
    scale: str = static("std", "a name", choices=("std", "none"))
    switch: bool = static(False, "a switch")
    name: str | None = static(None, "no type to hold to")


def test_new_sizes_recompile_but_new_numbers_do_not():
    traces = []

    @jax.jit
    def run(settings):
        traces.append(settings.size)
        return settings.rate * settings.size

    for settings in (
        Settings(),
        Settings(rate=1),
        Settings(rate=np.float32(2.0)),
        Settings(rate=jnp.float32(3.0)),
    ):
        run(config.as_arrays(settings))
    assert traces == [4]
    assert float(run(config.as_arrays(Settings(rate=2, size=8)))) == 16.0
    assert traces == [4, 8]


def test_records_are_frozen_and_take_keywords_only():
    with pytest.raises(AttributeError):
        Settings().rate = 1.0
    with pytest.raises(TypeError):
        Settings(0.5)


@cases(
    "change, message",
    ({"rate": 0.0}, r"^rate: must lie in \(0, inf\) per step, got 0$"),
    ({"rate": math.nan}, r"^rate: must lie in .*, got nan$"),
    ({"free": math.nan}, r"^free: must lie in \(-inf, inf\), got nan$"),
    ({"gamma": 1.01}, r"^gamma: must lie in \[0, 1\], got 1.01$"),
    ({"gamma": "high"}, r"^gamma: must be a number, got 'high'$"),
    ({"gamma": [0.5]}, r"^gamma: must be a number, got \[0.5\]$"),
    ({"gamma": jnp.array([0.5, 2.0])}, r"^gamma: must lie in \[0, 1\], got 2$"),
    ({"size": 0}, r"^size: must lie in \[1, inf\), got 0$"),
    ({"size": 2.5}, r"^size: must be of type int, got 2.5$"),
    ({"switch": "on"}, r"^switch: must be of type bool, got 'on'$"),
    ({"scale": "mean"}, r"^scale: must be one of std, none, got 'mean'$"),
)
def test_check_names_the_field_and_the_range(change, message):
    with pytest.raises(ConfigError, match=message):
        config.check(Settings(**change))


@cases(
    "interval, inside, outside, text",
    (UNIT, [0.0, 0.5, 1.0], [-1e-9, 1.1, math.nan], "[0, 1]"),
    (POSITIVE, [1e-9, 1e9], [0.0, -1.0, math.inf], "(0, inf)"),
    (NON_NEGATIVE, [0.0, 1e9], [-1e-9, math.inf], "[0, inf)"),
    (Interval(0.0, 1.0, True, True), [0.5], [0.0, 1.0], "(0, 1)"),
    (Interval(), [-1e30, 1e30], [math.inf, -math.inf, math.nan], "(-inf, inf)"),
)
def test_intervals(interval, inside, outside, text):
    assert all(x in interval for x in inside)
    assert not any(x in interval for x in outside)
    assert str(interval) == text


def test_changed():
    assert not config.changed(Settings(), "rate")
    # A default in float32 counts as the default.
    assert not config.changed(Settings(rate=jnp.float32(0.1)), "rate")
    assert config.changed(Settings(rate=0.2), "rate")
    assert config.changed(Settings(rate=jnp.array([0.1, 0.2])), "rate")
    assert not jax.jit(lambda rate: jnp.bool_(config.changed(Settings(rate=rate), "rate")))(0.2)
