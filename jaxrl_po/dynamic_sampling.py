"""Wraps problems in groups with DAPO's dynamic sampling: only informative groups are used.

Dynamic sampling is rejection sampling with a bounded number of batches, inside the jitted program:
a loop collects until a buffer of fixed size is full of informative groups, or the bound is reached
and the rest of the buffer stays masked.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.advantages import informative
from jaxrl_po.config import NON_NEGATIVE, ConfigError, check_size, static_value
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Metrics, Problem

# Entries of `CollectorState` if a surplus of groups is carried to the next iteration.
SURPLUS = "surplus"  # sharded entry: groups `[P, …]`; the first `SURPLUS_COUNT` groups are valid
SURPLUS_COUNT = "surplus_count"  # replicated entry: `[]`, int32, number of groups over all devices


class FillState(NamedTuple):
    """Carry of the collecting loop: this device's share of the groups accepted so far."""

    collector: CollectorState
    buffer: Any
    filled: jax.Array
    rounds: jax.Array
    accepted: Mean
    metrics: Metrics


class Slots(NamedTuple):
    """Positions of accepted groups.

    A device holds its share of the batch, then its share of the surplus.

    Attributes:
      wanted: number of groups of the batch, over all devices.
      share: number of the batch's groups on this device.
      generated: number of groups of a generated batch on this device, also the number of slots for
        the device's surplus.
      devices: number of devices.
      device: index of this device.
      axis_name: name of the device axis, or None.
    """

    wanted: int
    share: int
    generated: int
    devices: int
    device: jax.Array | int
    axis_name: str | None


def dynamic_sampling(
    problem: Problem,
    max_generation_batches: int,
    *,
    carry_surplus: bool = False,
    num_groups: int = 0,
    accept: Callable[[jax.Array], jax.Array] = informative,
    axis_name: str | None = None,
    name: str = "num_groups",
) -> Problem:
    """Wraps a problem: `collect` generates batches until it has enough informative groups.

    The raw score decides whether a group is informative, never a shaped reward. Groups keep the
    order in which they were generated, for any number of devices. Slots that are still empty after
    `max_generation_batches` are masked and have score 0. The wrapped problem has no strata: groups
    selected by their scores are a biased sample of a prompt's outcomes.

    Args:
      problem: problem whose groups have at least 2 members.
      max_generation_batches: largest number of batches that one `collect` generates, at least 1.
      carry_surplus: True stores the accepted groups that did not fit for the next iteration. The
        next iteration takes stored groups after its own first batch, before its second batch;
        stored groups are then one update old and keep the log-probabilities from their sampling.
        Stored groups that do not fit again are dropped. With False all surplus groups are dropped,
        as in the paper.
      num_groups: number of groups per training batch, over all devices; 0 for the number that
        `problem` generates.
      accept: `(raw scores [P, G]) -> bool [P]`, True for informative groups.
      axis_name: device axis that rows are sharded over, or None. With a device axis, each batch is
        all-gathered.
      name: name of the setting that sets `num_groups`, for messages.

    Returns:
      Wrapped `Problem`. The wrapped problem has the metrics of `problem` over all generated groups,
      and `filled` (share of the slots), `acceptance` (share of the generated groups),
      `generation_batches` (per `collect`, at least 1) and, with a surplus, `sample_age` (in
      updates, at most 1, averaged over the groups trained on). Yu et al. 2025 (arXiv:2503.14476),
      section 3.2 and algorithm 1.

    Raises:
      ConfigError: an argument is invalid; the error names the argument.

    Example:
      >>> from jaxrl_po import control
      >>> import gymnax
      >>> cartpole = gymnax.make("CartPole-v1")[0]
      >>> episodes = control.make_groups(cartpole, num_prompts=2, group_size=2, num_steps=16)
      >>> problem = dynamic_sampling(episodes, 4, num_groups=3)
      >>> _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
      >>> batch.score.shape, bool((batch.score[:, 0] != batch.score[:, 1]).all())
      ((3, 2), True)
    """
    max_generation_batches = check_size("max_generation_batches", max_generation_batches)
    num_groups = check_size(name, num_groups, NON_NEGATIVE)
    carry_surplus = static_value("carry_surplus", carry_surplus, bool)
    require_one_age(problem, carry_surplus)

    def generate(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        collector, batch = problem.collect(params, collector, key)
        require_scored_groups(batch)
        return collector, _with_age(batch) if carry_surplus else batch

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        if not carry_surplus:
            return params, collector
        # The function `collect` may contain collectives, but `init` runs outside the sharded
        # program. Only the shapes of the groups are needed, so a vmapped axis of size 1 provides
        # the axis name.
        one_device = jax.vmap(
            lambda _: _by_group(generate(params, collector, key)[1]),
            axis_size=1,
            axis_name=axis_name or "data",
        )
        groups = jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], one_device(jnp.zeros(1))))
        return params, collector.add(
            sharded={SURPLUS: _zeros(groups, groups.score.shape[0])},
            replicated={SURPLUS_COUNT: jnp.int32(0)},
        )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        inner = collector.remove(SURPLUS, SURPLUS_COUNT)
        shapes = jax.eval_shape(generate, params, inner, key)[1]
        slots = slots_of(num_groups, shapes.score.shape[0], axis_name, name)
        fill = _fill(
            functools.partial(generate, params),
            slots,
            _empty(inner, shapes, slots),
            key,
            accept=accept,
            max_generation_batches=max_generation_batches,
            surplus=collector.sharded.get(SURPLUS),
            count=collector.replicated.get(SURPLUS_COUNT),
        )
        batch = _trained_on(fill, slots)
        if not carry_surplus:
            return fill.collector, batch
        spare, count = _left_over(fill, slots)
        return fill.collector.add(
            sharded={SURPLUS: spare}, replicated={SURPLUS_COUNT: count}
        ), batch

    return problem._replace(init=init, collect=collect, strata=0)


def require_one_age(problem: Problem, carry_surplus: bool) -> None:
    """Raises ConfigError if a surplus is carried and the problem's rows already have ages."""
    if carry_surplus and problem.staleness:
        raise ConfigError("carry_surplus", f"must be off with staleness = {problem.staleness}")


def require_scored_groups(batch: Batch) -> None:
    """Raises ConfigError unless a batch has scores `[P, G]` inside the program."""
    if batch.reward is None:
        raise ConfigError(
            "dynamic_sampling", "must be off or reweight where groups are scored in Python"
        )
    if not (hasattr(batch.score, "ndim") and batch.score.ndim == 2 and batch.score.shape[1] > 1):
        raise ConfigError("group_size", "must be at least 2 for dynamic sampling")


def slots_of(num_groups: int, generated: int, axis_name: str | None, name: str) -> Slots:
    """Returns the slots of this device; raises ConfigError if groups do not divide over devices."""
    devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
    wanted = num_groups or generated * devices
    if wanted % devices:
        raise ConfigError(name, f"must be a multiple of the {devices} devices, got {wanted}")
    device = 0 if axis_name is None else jax.lax.axis_index(axis_name)
    return Slots(wanted, wanted // devices, generated, devices, device, axis_name)


def _insert(
    slots: Slots, buffer: Any, filled: jax.Array, groups: Any, accepted: jax.Array
) -> tuple[Any, jax.Array]:
    """Appends the accepted groups of all devices; each device stores its part of the buffer."""
    groups, accepted = jax.tree.map(lambda x: _gather(x, slots.axis_name), (groups, accepted))
    wanted, share, generated, _, device, _ = slots
    size = share + generated
    slot = filled + jnp.cumsum(accepted) - 1  # the positions count over all devices
    trained, spare = slot - device * share, slot - wanted - device * generated
    # An index equal to `size` is out of bounds: the write is dropped.
    index = jnp.where(
        slot < wanted,
        jnp.where((trained >= 0) & (trained < share), trained, size),
        jnp.where((spare >= 0) & (spare < generated), share + spare, size),
    )
    index = jnp.where(accepted, index, size)
    buffer = jax.tree.map(lambda kept, new: kept.at[index].set(new, mode="drop"), buffer, groups)
    return buffer, filled + accepted.sum(dtype=jnp.int32)


def _empty(collector: CollectorState, shapes: Any, slots: Slots) -> FillState:
    return FillState(
        collector=collector,
        buffer=_zeros(jax.eval_shape(_by_group, shapes), slots.share + slots.generated),
        filled=jnp.int32(0),
        rounds=jnp.int32(0),
        accepted=Mean(jnp.float32(0.0), jnp.float32(0.0)),
        metrics=jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes.metrics),
    )


def _fill(
    collect: Callable[[CollectorState, jax.Array], tuple[CollectorState, Batch]],
    slots: Slots,
    empty: FillState,
    key: jax.Array,
    *,
    accept: Callable[[jax.Array], jax.Array],
    max_generation_batches: int,
    surplus: Any,
    count: jax.Array | None,
) -> FillState:
    """Collects until the slots of the batch are filled or the bound on batches is reached.

    Args:
      collect: `(collector, key) -> (collector, batch)`.
      slots: positions of groups on this device, see `Slots`.
      empty: buffer without groups, see `_empty`.
      key: PRNG key, consumed.
      accept: `(raw scores [P, G]) -> bool [P]`, True for informative groups. `dynamic_sampling`
        documents this argument and `max_generation_batches`.
      surplus: groups that the last iteration stored, or None.
      count: number of stored groups over all devices, or None.
    """

    def unfilled(fill: FillState) -> jax.Array:
        return (fill.filled < slots.wanted) & (fill.rounds < max_generation_batches)

    def generate(fill: FillState) -> FillState:
        # The number of batches is not known in advance, so keys are folded with the batch number,
        # not split.
        collector, batch = collect(fill.collector, jax.random.fold_in(key, fill.rounds))
        accepted = accept(batch.score)
        chex.assert_shape(accepted, (slots.generated,))
        buffer, filled = _insert(slots, fill.buffer, fill.filled, _by_group(batch), accepted)
        if count is not None:
            # The stored surplus fills the slots that the first fresh batch leaves free.
            index = slots.device * slots.generated + jnp.arange(slots.generated)
            room = jnp.where(fill.rounds == 0, slots.wanted - filled, 0)
            usable = index < jnp.minimum(room, count)
            buffer, filled = _insert(slots, buffer, filled, surplus, usable)
        return FillState(
            collector=collector,
            buffer=buffer,
            filled=filled,
            rounds=fill.rounds + 1,
            accepted=fill.accepted + masked.total(accepted),
            metrics={name: fill.metrics[name] + mean for name, mean in batch.metrics.items()},
        )

    return jax.lax.while_loop(unfilled, generate, empty)


def _trained_on(fill: FillState, slots: Slots) -> Batch:
    """Returns the groups of the batch, as rows; slots without a group are masked."""
    kept = jax.tree.map(lambda x: x[: slots.share], fill.buffer)
    valid = slots.device * slots.share + jnp.arange(slots.share) < fill.filled
    metrics = {
        **fill.metrics,
        "filled": masked.total(valid),
        "acceptance": fill.accepted,
        "generation_batches": Mean(fill.rounds.astype(jnp.float32), jnp.float32(1.0)),
    }
    if "age" in kept.columns:
        metrics["sample_age"] = masked.total(kept.columns["age"][:, 0], valid)
    rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept._replace(score=None))
    mask = rows.mask & jnp.repeat(valid, kept.score.shape[1])[:, None]
    batch: Batch = rows._replace(score=kept.score, mask=mask, metrics=metrics)
    return batch


def _left_over(fill: FillState, slots: Slots) -> tuple[Any, jax.Array]:
    """Returns the surplus groups, now one update older, and their number over all devices."""
    spare = jax.tree.map(lambda x: x[slots.share :], fill.buffer)
    older = {**spare.columns, "age": spare.columns["age"] + 1}
    count = jnp.clip(fill.filled - slots.wanted, 0, slots.generated * slots.devices)
    return spare._replace(columns=older), count


def _gather(x: jax.Array, axis_name: str | None) -> jax.Array:
    return x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)


def _with_age(batch: Batch) -> Batch:
    """Returns the batch with ages; the ages are 0 if the wrapped problem has none."""
    fresh = jnp.zeros(batch.mask.shape[0], jnp.int32)
    return batch._replace(columns={"age": fresh, **batch.columns})


def _by_group(batch: Any) -> Any:
    """Reshapes leaves `[P·G, …]` to `[P, G, …]`, without metrics and strata.

    `score` has the shape `[P, G]` already.
    """
    columns = {name: x for name, x in batch.columns.items() if name != "stratum"}
    return jax.tree.map(
        lambda x: x.reshape(*batch.score.shape, *x.shape[1:]),
        batch._replace(score=None, metrics={}, columns=columns),
    )._replace(score=batch.score)


def _zeros(groups: Any, count: int) -> Any:
    """Returns a zeroed buffer of `count` groups."""
    return jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), groups)
