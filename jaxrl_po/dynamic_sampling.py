"""DAPO's dynamic sampling as a combinator: any problem in groups becomes one whose groups all carry a signal.

It stays inside the program: a bounded loop collects again until a buffer of fixed size is full of
informative groups, or gives up and leaves the rest of the buffer masked.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.advantages import informative
from jaxrl_po.config import COUNT, NON_NEGATIVE, ConfigError
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Metrics, Problem

# Entries of the collector's state, see `CollectorState`; none where no surplus is carried.
SURPLUS = (
    "surplus"  # sharded: a batch of `[P, …]` groups, of which the first over all devices are kept
)
SURPLUS_COUNT = "surplus_count"  # replicated: `[]`, int32, how many


class Fill(NamedTuple):
    """The loop: the groups gathered so far."""

    collector: CollectorState
    buffer: Any
    filled: jax.Array
    rounds: jax.Array
    accepted: Mean
    metrics: Metrics


def dynamic_sampling(
    problem: Problem,
    max_generation_batches: int,
    *,
    carry_surplus: bool = False,
    num_groups: int = 0,
    accept: Callable[[jax.Array], jax.Array] = informative,
    axis_name: str | None = None,
) -> Problem:
    """The same problem, but `collect` gathers informative groups only, over as many batches of it as that takes.

    The raw score decides, never a shaped reward. Groups keep the order in which they were
    generated, whatever the number of devices. Slots that stay empty after `max_generation_batches`
    are masked, and have score 0. The batch has no strata: groups that were chosen by their scores
    are no fair sample of a prompt's outcomes.

    Args:
      problem: in groups of at least 2.
      max_generation_batches: batches that one `collect` generates at most, ≥ 1.
      carry_surplus: keep what this iteration generated too many for the next one, which fills up
        with it after its own first batch, before it generates a second. It is then one update old
        and keeps the log-probabilities under which it was sampled; what the next iteration has no
        room for either is dropped. Off, all surplus is dropped, as in the paper.
      num_groups: groups of the batch that is trained on, over all devices; 0 takes as many as
        `problem` generates.
      accept: raw scores `[P, G]` to bool `[P]`.
      axis_name: device axis over which rows are sharded, or None. Under it each batch is gathered
        from all devices.

    Returns:
      The `Problem`. Metrics are those of `problem` over everything generated, and `filled` (share
      of the slots), `acceptance` (accepted among the generated groups), `generation_batches` (in
      one `collect`, at least 1), and `sample_age` with a surplus (updates, mean over the groups
      trained on; at most 1). Source: Yu et al. 2025 (arXiv:2503.14476), section 3.2 and algorithm
      1.

    Raises:
      ConfigError: names the argument that cannot work.

    Example:
      >>> from jaxrl_po import control
      >>> import gymnax
      >>> episodes = control.make_groups(gymnax.make("CartPole-v1")[0], num_prompts=2, group_size=2, num_steps=16)
      >>> problem = dynamic_sampling(episodes, 4, num_groups=3)
      >>> _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
      >>> batch.score.shape, bool((batch.score[:, 0] != batch.score[:, 1]).all())
      ((3, 2), True)
    """
    if max_generation_batches not in COUNT:
        raise ConfigError(
            f"max_generation_batches must be at least 1, got {max_generation_batches}"
        )
    if num_groups not in NON_NEGATIVE:
        raise ConfigError(
            f"num_groups must be at least 1, or 0 for as many as are generated, got {num_groups}"
        )

    def like(params: ActorCritic, collector: CollectorState, key: jax.Array) -> Batch:
        """Shapes of one batch of the problem inside, one device's share of it where rows are sharded."""
        batch = jax.eval_shape(problem.collect, params, collector, key)[1]
        if batch.reward is None:
            raise ConfigError(
                "dynamic_sampling must not refill groups of a problem that is scored "
                "outside the program: a group is kept or replaced by its scores, while the "
                "program runs; reweight keeps only the informative ones as well"
            )
        if not (
            hasattr(batch.score, "ndim") and batch.score.ndim == 2 and batch.score.shape[1] > 1
        ):
            raise ConfigError(
                "group_size must be at least 2 for dynamic sampling: it compares the raw "
                "scores [P, G] of a group"
            )
        return batch

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        params, collector = problem.init(key)
        if not carry_surplus:
            return params, collector
        # Collect may pool over devices, which init knows nothing of: a device axis of one stands in
        # for them.
        alone = jax.vmap(
            lambda _: problem.collect(params, collector, key),
            axis_size=1,
            axis_name=axis_name or "data",
        )
        groups = _by_group(
            _with_age(jax.eval_shape(lambda: jax.tree.map(lambda x: x[0], alone(jnp.zeros(1)))[1]))
        )
        surplus = _zeros(groups, groups.score.shape[0])
        return params, collector.add(
            sharded={SURPLUS: surplus}, replicated={SURPLUS_COUNT: jnp.int32(0)}
        )

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        inner = collector.remove(SURPLUS, SURPLUS_COUNT)
        shapes = like(params, inner, key)
        if carry_surplus:
            shapes = _with_age(shapes)
        devices = 1 if axis_name is None else jax.lax.axis_size(axis_name)
        generated = shapes.score.shape[0]  # on this device
        wanted = num_groups or generated * devices
        if wanted % devices:
            raise ConfigError(
                f"num_groups = {wanted} must be a multiple of the {devices} devices over "
                "which groups are sharded"
            )
        own, first = wanted // devices, 0 if axis_name is None else jax.lax.axis_index(axis_name)

        def insert(
            buffer: Any, filled: jax.Array, groups: Any, accepted: jax.Array
        ) -> tuple[Any, jax.Array]:
            """Puts accepted groups behind those that are there: into this device's share, or into its share of the surplus."""
            groups, accepted = jax.tree.map(lambda x: _gather(x, axis_name), (groups, accepted))
            slot = filled + jnp.cumsum(accepted) - 1
            trained, spare = slot - first * own, slot - wanted - first * generated
            here = jnp.where(
                slot < wanted,
                jnp.where((trained >= 0) & (trained < own), trained, own + generated),
                jnp.where((spare >= 0) & (spare < generated), own + spare, own + generated),
            )
            here = jnp.where(accepted, here, own + generated)
            buffer = jax.tree.map(
                lambda all, new: all.at[here].set(new, mode="drop"), buffer, groups
            )
            return buffer, filled + accepted.sum(dtype=jnp.int32)

        def unfilled(fill: Fill) -> jax.Array:
            return (fill.filled < wanted) & (fill.rounds < max_generation_batches)

        def generate(fill: Fill) -> Fill:
            inside, batch = problem.collect(
                params, fill.collector, jax.random.fold_in(key, fill.rounds)
            )
            accepted = accept(batch.score)
            chex.assert_shape(accepted, (generated,))
            if carry_surplus:
                batch = _with_age(batch)
            buffer, filled = insert(fill.buffer, fill.filled, _by_group(batch), accepted)
            if carry_surplus:
                # What is fresh comes first; of the surplus as much as there is room for, once.
                number = first * generated + jnp.arange(generated)
                room = jnp.where(fill.rounds == 0, wanted - filled, 0)
                usable = number < jnp.minimum(room, collector.replicated[SURPLUS_COUNT])
                buffer, filled = insert(buffer, filled, collector.sharded[SURPLUS], usable)
            return Fill(
                collector=inside,
                buffer=buffer,
                filled=filled,
                rounds=fill.rounds + 1,
                accepted=fill.accepted + masked.total(accepted),
                metrics={name: fill.metrics[name] + mean for name, mean in batch.metrics.items()},
            )

        groups = _by_group(shapes)
        nothing = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes.metrics)
        none = Mean(jnp.float32(0.0), jnp.float32(0.0))
        empty = Fill(
            inner, _zeros(groups, own + generated), jnp.int32(0), jnp.int32(0), none, nothing
        )
        fill = jax.lax.while_loop(unfilled, generate, empty)

        rows = jax.tree.map(lambda x: x[:own], fill.buffer)
        valid = first * own + jnp.arange(own) < fill.filled
        metrics = {
            **fill.metrics,
            "filled": masked.total(valid),
            "acceptance": fill.accepted,
            "generation_batches": Mean(fill.rounds.astype(jnp.float32), jnp.float32(1.0)),
        }
        if carry_surplus:
            metrics["sample_age"] = masked.total(rows.age[:, 0], valid)
        batch = _by_row(rows)
        batch = batch._replace(
            mask=batch.mask & jnp.repeat(valid, shapes.score.shape[1])[:, None], metrics=metrics
        )
        if not carry_surplus:
            return fill.collector, batch
        spare = jax.tree.map(lambda x: x[own:], fill.buffer)
        spare = spare._replace(age=spare.age + 1)
        count = jnp.clip(fill.filled - wanted, 0, generated * devices)
        return fill.collector.add(
            sharded={SURPLUS: spare}, replicated={SURPLUS_COUNT: count}
        ), batch

    return problem._replace(init=init, collect=collect, strata=0)


def _gather(x: jax.Array, axis_name: str | None) -> jax.Array:
    return x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)


def _with_age(batch: Any) -> Any:
    """The batch with the age of its rows, 0 where the problem inside knows of none. Takes shapes as well."""
    if batch.age is not None:
        return batch
    rows = batch.mask.shape[:1]
    fresh = (
        jnp.zeros(rows, jnp.int32)
        if isinstance(batch.mask, jax.Array)
        else jax.ShapeDtypeStruct(rows, jnp.int32)
    )
    return batch._replace(age=fresh)


def _by_group(batch: Any) -> Any:
    """Leaves `[P·G, …]` as `[P, G, …]`; `score` has that shape already; metrics and strata are left out. Takes shapes as well."""
    shape = batch.score.shape

    def split(leaf: Any) -> Any:
        whole = (*shape, *leaf.shape[1:])
        return (
            leaf.reshape(whole)
            if isinstance(leaf, jax.Array)
            else jax.ShapeDtypeStruct(whole, leaf.dtype)
        )

    return jax.tree.map(split, batch._replace(score=None, metrics={}, stratum=None))._replace(
        score=batch.score
    )


def _by_row(groups: Any) -> Batch:
    """Leaves `[P, G, …]` as `[P·G, …]`, but for `score`."""
    merged = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups._replace(score=None))
    return merged._replace(score=groups.score)


def _zeros(groups: Any, count: int) -> Any:
    """A buffer of `count` groups."""
    return jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), groups)
