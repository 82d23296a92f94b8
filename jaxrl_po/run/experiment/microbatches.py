"""The number of microbatches with which a run fits the memory that there is."""

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from rich import filesize

from jaxrl_po import backend
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer
from jaxrl_po.run.devices import processes, room
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.experiment.assembly import Setup
from jaxrl_po.run.experiment.flags import RunError
from jaxrl_po.run.loop import programs
from jaxrl_po.types import PyTree, TrainState

FLAG = "config.num_microbatches"
SHARE = 0.9  # of the memory that is free, of which other programs take some too


class Need(NamedTuple):
    """Memory of one device, counted from shapes.

    Attributes:
      held: bytes whatever the number of microbatches: state and gradients.
      kept: bytes that a backward pass over a minibatch keeps, if it is one microbatch.
      choices: the numbers of microbatches that divide a minibatch, ascending.
    """

    held: int
    kept: int
    choices: tuple[int, ...]

    def needs(self, number: int) -> int:
        """Bytes with that number of microbatches."""
        return self.held + math.ceil(self.kept / number)

    def choose(self, space: int) -> int:
        """The smallest number with which `space` bytes suffice, or else the largest.

        Example:
          >>> need = Need(held=100, kept=800, choices=(1, 2, 4, 8))
          >>> [need.choose(space) for space in (900, 899, 300, 50)]
          [1, 2, 4, 8]
        """
        fits = (each for each in self.choices if self.needs(each) <= space)
        return next(fits, self.choices[-1])

    def corrected(self, number: int, peak: int) -> "Need":
        """The need that gives a program's `peak`, with choices above its `number` alone.

        Example:
          >>> Need(held=100, kept=800, choices=(1, 2, 4, 8)).corrected(2, 700)
          Need(held=100, kept=1200, choices=(4, 8))
        """
        kept = max(self.kept, (peak - self.held) * number)
        return Need(self.held, kept, tuple(each for each in self.choices if each > number))


class Fit(NamedTuple):
    """A run with a number of microbatches.

    Attributes:
      records: prefix to record, with that number.
      job: of them.
      need: of a device.
      devices: of this process that are in use.
      job_of: settings of the method to the job.
    """

    records: Mapping[str, Any]
    job: programs.Job
    need: Need
    devices: int
    job_of: Callable[[Any], programs.Job]

    @property
    def number(self) -> int:
        """The number of microbatches."""
        return int(self.records["config"].num_microbatches)

    def note(self) -> str:
        """The line shown before the run; empty for one microbatch."""
        return f"--{FLAG}={self.number}, to fit the memory that is free" if self.number > 1 else ""

    def smaller(self, peak: int) -> "Fit | None":
        """With a larger number where the program's `peak` does not fit; None where it does.

        Raises:
          RunError: it fits with no number.
        """
        there = space(self.devices)
        if there is None or peak <= there:
            return None
        need = self.need.corrected(self.number, peak)
        if need.choices:
            found = self._replace(need=need).with_number(need.choose(there))
            if found.number > self.number:
                return found
        if peak * SHARE <= there:
            return None
        raise too_little(self.records, self.need.held, peak, int(there / SHARE))

    def with_number(self, number: int) -> "Fit":
        """With that number or the next that divides; as it is where none may be chosen."""
        if number == self.number:
            return self
        for each in (n for n in self.need.choices if n >= number):
            method = dataclasses.replace(self.records["config"], num_microbatches=each)
            job = self.job_of(method)
            with contextlib.suppress(ConfigError):
                programs.check(job)
                return self._replace(records={**self.records, "config": method}, job=job)
        return self


def fit(
    records: Mapping[str, Any],
    job: programs.Job,
    setup: Setup,
    placement: Placement,
    make_job: Callable[[Setup], programs.Job],
) -> Fit | None:
    """The run with the number that fits as counted; None where it cannot be chosen.

    Args:
      records: prefix to record.
      job: of `setup`.
      setup: with the number of `records`.
      placement: on devices.
      make_job: `job` of such a setup.
    """
    learner_of, need = setup.learner_of, setup.need
    if learner_of is None or need is None:
        return None
    needed: Need = need(jax.eval_shape(job.learner.init, job.start))
    devices = placement.num_devices // jax.process_count()
    found = Fit(
        records,
        job,
        needed,
        devices,
        lambda method: make_job(setup._replace(learner=learner_of(method))),
    )
    there = space(devices)
    return found if there is None else found.with_number(needed.choose(there))


def space(devices: int) -> int | None:
    """Bytes of one device that programs may take, the same in all processes; None if unknown.

    Args:
      devices: of this process that are in use.
    """
    known = [each for each in processes.gather(room.free()) if each is not None]
    return int(SHARE * min(known) / (devices if backend.here().on_cpu else 1)) if known else None


def counted(
    models: Sequence[Transformer],
    state: TrainState,
    placement: Placement,
    *,
    rows: int,
    columns: tuple[int, int],
    num_minibatches: int,
    group: int,
) -> Need:
    """What one device needs, counted from shapes.

    Args:
      models: the transformers that read each row.
      state: shapes of the training state of all seeds.
      placement: on devices.
      rows: of a batch of one seed, over all devices.
      columns: of a prompt and of a completion.
      num_minibatches: of a batch.
      group: rows that share their prompt's activations; 1 where each row reads it.
    """
    shards = placement.model_devices * (placement.data_devices if placement.shard_params else 1)
    frozen, trained = _bytes(state.params.frozen), _bytes(state.params.trained())
    of_seeds = (_bytes(state) - frozen + trained) // placement.seed_devices  # gradients too
    of_minibatch = rows // placement.data_devices // num_minibatches
    whole = max(1, of_minibatch // group)  # what microbatches divide
    prompt, completion = columns
    tokens = whole * (prompt + group * completion)
    each = sum(activations(model, prompt + completion) for model in models)
    seeds = placement.num_seeds // placement.seed_devices
    choices = tuple(n for n in range(1, whole + 1) if whole % n == 0)
    return Need((frozen + of_seeds) // shards, seeds * tokens * each, choices)


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def activations(model: Transformer, columns: int) -> int:
    """Bytes of one token that the backward pass reads: of each block, or with `remat` of one.

    Of a block, eight vectors of the stream and what adapters of the products read; queries, keys
    and values, each before and after its rotation; scores and their softmax, unless a kernel
    holds them; three of the MLP.
    """
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    scores = 0 if model.fused_attention else 2 * heads * columns
    attention = 2 * (heads + kv_heads) * model.size + scores
    of_block = 8 * model.width + attention + 3 * (model.mlp_width or 4 * model.width)
    blocks = of_block + model.layers * model.width if model.remat else model.layers * of_block
    return blocks * jnp.dtype(model.dtype).itemsize


def too_little(records: Mapping[str, Any], state: int, peak: int, there: int) -> RunError:
    """The error for a run that does not fit with any number of microbatches.

    Args:
      records: prefix to record.
      state: bytes of a device's share of the state.
      peak: bytes of its programs.
      there: bytes that there are.
    """
    prompts = records["problem"].num_prompts
    most = int(prompts * (there - state) / max(peak - state, 1))
    fewer = next((n for n in range(min(most, prompts - 1), 0, -1) if prompts % n == 0), 0)
    hint = f"--problem.num_prompts={fewer} would fit" if fewer else "a smaller model is needed"
    return RunError(
        f"this run needs {filesize.decimal(peak)} on a device, and {filesize.decimal(there)} are "
        f"free, with --{FLAG}={records['config'].num_microbatches}: {hint}"
    )
