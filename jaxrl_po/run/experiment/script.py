"""What distinguishes one training command from another."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment.assembly import Setup
from jaxrl_po.run.figures import plotting


class Script(NamedTuple):
    """What distinguishes one training command from another.

    Attributes:
      name: of the script.
      summary: first line of `--help`.
      options: record of the flags without a prefix, an extension of `Options`.
      defaults: options to flags and their defaults, where those of the records do not suit.
      tuned: options to those of the defaults that a sweep found.
      sections: options to prefix and record, beside `config`, which is the algorithm's.
      rows: records to the rows (environments or prompts) of one seed.
      steps: records to the environment steps (or completions) of one iteration of one seed.
      shards_params: options to whether parameters are sharded over the data devices.
      build: `(records, algorithm, placement) -> Setup`; raises ConfigError or UsageError.
      title: records to a title: algorithm and environment or task.
      unit: name of a step, plural.
      curves: metrics to draw, with their labels.
      y_label: of the curves.
    """

    name: str
    summary: str
    options: type
    defaults: Callable[[Any], Mapping[str, Any]]
    tuned: Callable[[Any], Mapping[str, Any]]
    sections: Callable[[Any], Mapping[str, type]]
    rows: Callable[[Mapping[str, Any]], int]
    steps: Callable[[Mapping[str, Any]], int]
    shards_params: Callable[[Any], bool]
    build: Callable[[Mapping[str, Any], Any, Placement], Setup]
    title: Callable[[Mapping[str, Any]], str]
    unit: str
    curves: tuple[plotting.Series, ...]
    y_label: str
