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
from jaxrl_po.language.unembedding import AT_ONCE, HELD
from jaxrl_po.run.devices import processes, room, topology
from jaxrl_po.run.devices.parallel import Placement
from jaxrl_po.run.errors import RunError
from jaxrl_po.run.experiment.assembly import Setup
from jaxrl_po.run.loop import programs
from jaxrl_po.types import PyTree, TrainState

FLAG = "config.num_microbatches"
SHARE = 0.9  # of the memory that is free, of which other programs take some too


class Need(NamedTuple):
    """Memory of one device, counted from shapes.

    Attributes:
      held: bytes of an update whatever the number of microbatches: state, gradients, logits.
      kept: bytes that a backward pass over a minibatch keeps, if it is one microbatch.
      choices: the numbers of microbatches that divide a minibatch, ascending.
      sampling: bytes while it samples: state, the copy of the policy that is read, its cache.
    """

    held: int
    kept: int
    choices: tuple[int, ...]
    sampling: int = 0

    def needs(self, number: int) -> int:
        """Bytes of an update with that number of microbatches."""
        return self.held + math.ceil(self.kept / number)

    def peak(self, number: int) -> int:
        """Bytes of an iteration with that number of microbatches."""
        return max(self.needs(number), self.sampling)

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
          Need(held=100, kept=1200, choices=(4, 8), sampling=0)
        """
        kept = max(self.kept, (peak - self.held) * number)
        choices = tuple(each for each in self.choices if each > number)
        return Need(self.held, kept, choices, self.sampling)


class Fit(NamedTuple):
    """A run with a number of microbatches.

    Attributes:
      records: prefix to record, with that number.
      job: of them.
      need: of a device.
      devices: of this process that are in use.
      job_of: settings of the method to the job.
      there: bytes of a device that is described; None to look for those of this process.
    """

    records: Mapping[str, Any]
    job: programs.Job
    need: Need
    devices: int
    job_of: Callable[[Any], programs.Job]
    there: int | None = None

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
        there = self.there or space(self.devices)
        if there is None or peak <= there:
            return None
        need = self.need.corrected(self.number, peak)
        # Sampling knows no microbatches.
        if need.choices and need.sampling * SHARE <= there:
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
    *,
    chosen: bool,
) -> Fit | None:
    """The run with the number that fits as counted; None where it cannot be chosen.

    Args:
      records: prefix to record.
      job: of `setup`.
      setup: with the number of `records`.
      placement: on devices.
      make_job: `job` of such a setup.
      chosen: whether the number is given: then it is only counted, for devices that are described.
    """
    learner_of, need, described = setup.learner_of, setup.need, placement.described
    if learner_of is None or need is None or (chosen and not described):
        return None
    needed: Need = need(jax.eval_shape(job.learner.init, job.start))
    devices = placement.num_devices // jax.process_count()
    there = _of_chip(described) if described else space(devices)
    found = Fit(
        records,
        job,
        needed,
        devices,
        lambda method: make_job(setup._replace(learner=learner_of(method))),
        there if described else None,
    )
    return found if chosen or there is None else found.with_number(needed.choose(there))


def _of_chip(described: Sequence[Any]) -> int | None:
    """As `space`, of one of the devices that are described."""
    chip = topology.chip_of(described[0])
    return None if chip is None else int(SHARE * chip.memory)


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
      models: the policy, and a critic, which shares no prompts.
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
    seeds = placement.num_seeds // placement.seed_devices
    tokens, unshared = whole * (prompt + group * completion), whole * group * (prompt + completion)
    each = [activations(model, prompt + completion, placement.model_devices) for model in models]
    kept = seeds * (tokens * each[0] + unshared * sum(each[1:]))
    choices = tuple(n for n in range(1, whole + 1) if whole % n == 0)
    held = (frozen + of_seeds) // shards + seeds * unembedding(models[0], tokens, placement)
    own = (frozen + (_bytes(state) - frozen) // placement.seed_devices) // shards
    rows_here = seeds * rows // placement.data_devices
    read = sampling(models[0], state, placement, rows_here, prompt + completion)
    return Need(held, kept, choices, own + read)


def _bytes(tree: PyTree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def unembedding(policy: Transformer, tokens: int, placement: Placement) -> int:
    """Bytes of the logits of a large vocabulary, and of the gathered matrix and its gradient.

    Of the logits at a time: themselves, their softmax and their gradient.
    """
    if policy.vocabulary <= HELD:
        return 0
    logits = 3 * min(AT_ONCE, tokens * policy.vocabulary)
    gathered = 2 * policy.vocabulary * policy.width if placement.shard_params else 0
    return 4 * (logits + gathered) // placement.model_devices


def sampling(
    policy: Transformer, state: TrainState, placement: Placement, rows: int, columns: int
) -> int:
    """Bytes that sampling `rows` rows takes on a device, on top of the state.

    These are the gathered parameters, with blocks cast to the compute dtype, the KV cache, and
    three arrays of logits. A gathered embedding also has a transposed copy and one in bfloat16.
    """
    dtype, copy = jnp.dtype(policy.dtype), 0
    paths = jax.tree_util.tree_leaves_with_path((state.params.policy, state.params.frozen))
    for path, leaf in paths:
        of_block = "blocks" in jax.tree_util.keystr(path) and leaf.ndim > 2
        size = min(dtype.itemsize, leaf.dtype.itemsize) if of_block else leaf.dtype.itemsize
        if placement.shard_params or size < leaf.dtype.itemsize:
            copy += leaf.size * size if of_block else leaf.size * size * 5 // 2
    cache = 2 * policy.layers * (policy.kv_heads or policy.heads) * policy.size * columns
    rows_of = rows * (cache * dtype.itemsize + 3 * 4 * policy.vocabulary)
    return (copy // placement.seed_devices + rows_of) // placement.model_devices


def activations(model: Transformer, columns: int, shards: int = 1) -> int:
    """Bytes of one token that the backward pass reads: of each block, or with `remat` of one.

    Of a block, eight vectors of the stream and what adapters of the products read; queries, keys
    and values, each before and after its rotation; scores and their softmax, unless a kernel
    holds them; three of the MLP. All but the stream is over so many tensor-parallel shards.
    """
    heads, kv_heads = model.heads, model.kv_heads or model.heads
    scores = 0 if model.fused_attention else 2 * heads * columns
    attention = 2 * (heads + kv_heads) * model.size + scores
    of_block = attention + 3 * (model.mlp_width or 4 * model.width)
    of_block = 8 * model.width + of_block // shards
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
    rows = records["problem"].num_prompts
    most = int(rows * (there - state) / max(peak - state, 1))
    fewer = next((n for n in range(min(most, rows - 1), 0, -1) if rows % n == 0), 0)
    hint = f"--problem.num_prompts={fewer} would fit" if fewer else "a smaller model is needed"
    return RunError(
        f"this run needs {filesize.decimal(peak)} on a device, and {filesize.decimal(there)} are "
        f"free, with --{FLAG}={records['config'].num_microbatches}: {hint}"
    )
