"""Data and signatures shared by all layers.

The axes in both domains are B rows (environments, or P prompts × G completions, group-major) and T
steps (environment steps, or generated tokens). States hold arrays only: a function inside a state
would break tree equality and cause recompilation.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, TypedDict, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_po import backend
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError, with_field_docs
from jaxrl_po.masked import Mean

PyTree = Any
Metrics = dict[str, Mean]
Optimizer: TypeAlias = optax.GradientTransformation | None
"""Any optax transformation with its own learning rate; None stands for the method's default."""
Row = dict[str, Any]
"""Metrics of one line, see `run.store.metrics`."""


class Distribution(Protocol):
    """Distribution that a policy returns, with batch shape `E*`.

    An action may have event axes as well.
    """

    def sample(self, key: jax.Array) -> jax.Array:
        """Samples one action per batch element; consumes `key`."""

    def mode(self) -> jax.Array:
        """Returns the most likely action per batch element."""

    def log_prob(self, action: jax.Array) -> jax.Array:
        """Computes the log-probability (or density) of `action`, `E*`, in nats."""

    def entropy(self) -> jax.Array:
        """Computes the entropy `E*`, in nats (differential for densities)."""

    def kl(self, other: "Distribution") -> jax.Array:
        """Returns the exact KL(self ‖ other) `E*`, in nats."""


class _Text(str):
    """Text whose `repr` has no quotes."""

    __repr__ = str.__str__


def short_repr(tree: PyTree) -> str:
    """Returns the text of a tree, with dtypes and shapes in place of its arrays.

    A tree of more than eight leaves is summarised by their number; a record with this `__repr__`
    shows a text for each of its fields except functions.

    Example:
      >>> short_repr({"weight": jnp.zeros((4, 2)), "name": "a", "scale": 1.5})
      "{'name': 'a', 'scale': 1.5, 'weight': float32[4, 2]}"
      >>> short_repr({"weights": [jnp.zeros((4, 2))] * 9})
      '<9 leaves, 72 numbers>'
    """
    if type(tree).__repr__ is short_repr:
        shown = {
            name: value for name, value in tree._asdict().items() if not inspect.isroutine(value)
        }
        fields = (f"{name}={short_repr(value)}" for name, value in shown.items())
        return f"{type(tree).__name__}({', '.join(fields)})"
    leaves = jax.tree.leaves(tree)
    if len(leaves) <= 8:
        with contextlib.suppress(Exception):  # raised by a node that checks its leaves
            return repr(jax.tree.map(_text_of, tree))
    return f"<{len(leaves)} leaves, {sum(map(np.size, leaves)):,} numbers>"


def _text_of(leaf: Any) -> Any:
    array = hasattr(leaf, "dtype") and hasattr(leaf, "shape")
    return _Text(f"{leaf.dtype}{[*leaf.shape]}") if array else leaf


@with_field_docs
class ActorCritic(NamedTuple):
    """Parameters by role; a method selects by field the subtree that it trains.

    Attributes:
      policy: parameters of the policy.
      value: parameters of the critic, or None without a critic.
      frozen: arrays that the problem reads and no method trains (a pretrained base under adapters,
        the prompts of a file), or None. Frozen arrays are excluded from gradients, optimizers and
        checkpoints, and all seeds share one copy; they must not depend on the key.
      constants: `{"policy": {collection: …}, "value": …}`, the variables of a user's networks that
        are not parameters, or None. Each seed has its own constants, which are saved and never
        trained.
    """

    policy: PyTree
    value: PyTree = None
    frozen: PyTree = None
    constants: PyTree = None

    def without_frozen(self) -> "ActorCritic":
        """Returns the parameters without frozen parameters and constants."""
        return self._replace(frozen=None, constants=None)

    def variables(self, role: str) -> PyTree:
        """Returns the variables to apply a network to: the network's parameters and constants.

        Args:
          role: role of the network, `policy` or `value`.
        """
        own, constants = getattr(self, role), (self.constants or {}).get(role)
        return own if own is None or constants is None else {**own, **constants}


@with_field_docs
class CollectorState(NamedTuple):
    """Named entries that `collect` carries from one iteration to the next iteration.

    A wrapper of a problem adds entries and leaves other entries in place, so that a reader of an
    entry (an evaluator, say) finds the entry in any wrapped problem. A feature that is off does not
    have an entry. The fields `sharded` and `replicated` state how entries are placed on devices.

    Attributes:
      sharded: entries with leaves `[B, …]` or `[P, …]`; each device has a slice of the rows
        (environment states, running returns, row numbers).
      replicated: entries with leaves of any shape, equal on every device (observation statistics, a
        frozen reward model's parameters).

    Example:
      >>> outer = CollectorState({"row": 1}).add(replicated={"reward_model": 2})
      >>> outer.remove("reward_model")
      CollectorState(sharded={'row': 1}, replicated={})
    """

    sharded: dict[str, PyTree]
    replicated: dict[str, PyTree] = {}  # noqa: RUF012  never changed in place

    def add(
        self,
        *,
        sharded: Mapping[str, PyTree] | None = None,
        replicated: Mapping[str, PyTree] | None = None,
    ) -> "CollectorState":
        """Returns the state with further entries.

        Raises:
          ConfigError: an entry of that name exists, because the same wrapper was applied twice.
        """
        for name in (*(sharded or {}), *(replicated or {})):
            if name in self.sharded or name in self.replicated:
                raise ConfigError(name, "must be carried once: a wrapper wraps a problem once")
        return CollectorState(
            {**self.sharded, **(sharded or {})}, {**self.replicated, **(replicated or {})}
        )

    def remove(self, *names: str) -> "CollectorState":
        """Returns the state without the entries of some names."""
        halves = (
            {name: entry for name, entry in half.items() if name not in names} for half in self
        )
        return CollectorState(*halves)


class Columns(TypedDict, total=False):
    """Columns that only some batches have; a problem may add others under its own names.

    A column `[B]` has a value per row. A column `[B, T]` has a value per slot: zero where masked,
    and cut with the slots.

    Attributes:
      stratum: `[B]`, int32 below `Problem.strata`: rows of one stratum (one prompt of a finite set,
        or one difficulty) may be compared across groups.
      age: `[B]`, int32, number of parameter updates since the row was sampled; by default all rows
        are fresh.
      sampler_log_prob: `[B, T]`, nats, log-probability of the action under the distribution μ that
        sampled the action, if it differs from `log_prob`: the sampler computes in another precision
        than `apply`, or a proposal sampled the action.
      step_end: `[B, T]`, bool, True for slots that receive a reward, for process rewards; by
        default all slots do.
      teacher_log_prob: `[B, T]`, nats, log-probability of the action under a frozen teacher.
      penalized: `[B, T]`, bool, True for slots with an extra penalty in the loss; only in
        `Samples`.
    """

    stratum: jax.Array
    age: jax.Array
    sampler_log_prob: jax.Array
    step_end: jax.Array
    teacher_log_prob: jax.Array
    penalized: jax.Array


@with_field_docs
class Batch(NamedTuple):
    """The result of `collect`: one rollout per row, leaves `[B, T, …]` in both domains.

    Attributes:
      inputs: inputs of `Problem.apply`: observations `[B, T, …]`, or token sequences whose leaves
        lead with `[B]`.
      action: `[B, T, …]`, actions as sampled (never clipped).
      log_prob: `[B, T]`, nats, log-probability of `action` under the old policy, the denominator of
        a ratio.
      reward: `[B, T]`, reward units; None if the reward is computed outside the jitted program,
        between `Learner.sample` and `Learner.update`.
      value: `[B, T]`, V(s_t) by the critic; zeros without a critic.
      next_value: `[B, T]`, V of the *true* next observation, which is the final observation where
        an episode ended.
      terminated: `[B, T]`, bool, True where the episode ends: the return ends too, and no value is
        bootstrapped.
      truncated: `[B, T]`, bool, True where a limit cut the episode. A control episode that is only
        truncated bootstraps; a completion that is cut at its token budget is terminated (its reward
        is final) and also truncated (so that it can be filtered).
      mask: `[B, T]`, bool; False in slots that hold no sample (after the end of a completion).
      score: `[P, G]`, raw outcome of each row before any shaping; its shape defines the groups (B =
        P·G). The scores are 0 while the reward is None.
      metrics: measurements of `collect`, by name.
      columns: columns that only some batches have, see `Columns`.
    """

    inputs: PyTree
    action: jax.Array
    log_prob: jax.Array
    reward: Any
    value: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    mask: jax.Array
    score: jax.Array
    metrics: Metrics
    columns: Columns = {}  # noqa: RUF012  never changed in place

    def fresh(self) -> jax.Array:
        """Returns `mask` without the rows that an earlier policy sampled."""
        age = self.columns.get("age")
        return self.mask if age is None else self.mask & (age == 0)[:, None]

    def per_step_columns(self) -> Columns:
        """Returns the columns `[B, T]`, which `Samples` can hold."""
        return cast(Columns, {k: x for k, x in cast(Any, self.columns).items() if x.ndim > 1})


def demonstration_batch(inputs: PyTree, action: jax.Array, mask: jax.Array) -> Batch:
    """Builds the batch of demonstrated actions; all other fields are 0 or False."""
    zero, no = jnp.zeros(mask.shape), jnp.zeros(mask.shape, bool)
    score = jnp.zeros((mask.shape[0], 1))
    return Batch(inputs, action, zero, zero, zero, zero, no, no, mask, score, metrics={})


@with_field_docs
class Samples(NamedTuple):
    """Input of `improve`; leaves `[B, T, …]`, or `[B·T, …]` after `Problem.rows`.

    Fields that a method does not use are None.

    Attributes:
      inputs: inputs of `Problem.apply`, documented in `Batch`.
      action: actions as sampled, documented in `Batch`.
      log_prob: nats, log-probability of the action under the old policy.
      advantage: advantage of the action, in reward units or normalised.
      mask: bool, False where the slot does not hold a sample.
      target: regression target of the critic, reward units, or None without a critic.
      value: critic's value during collection, reward units, or None.
      reference_log_prob: nats, log-probability of the action under the reference policy, or None.
      columns: columns `[B, T]`, documented in `Columns`.
      measured: rows on which an update's KL is measured, as `Samples`; None for all rows. The mask
        of `measured` is True where the old policy sampled: also in slots that the loss excludes,
        but not in rows that an earlier policy sampled.
    """

    inputs: PyTree
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    mask: jax.Array
    target: Any = None
    value: Any = None
    reference_log_prob: Any = None
    columns: Columns = {}  # noqa: RUF012  never changed in place
    measured: Any = None


@with_field_docs
class TrainState(NamedTuple):
    """The training state of every method.

    Attributes:
      params: parameters, `ActorCritic`.
      opt_state: optimizer state of the subtree that the method trains by gradient.
      reference_params: frozen parameters of the reference policy, or None.
      kl_coefficient: `[]`, float32, β of an adaptive penalty; 0 without an adaptive penalty.
      collector: state that `collect` carries.
      key: PRNG key, typed `[]` or raw `uint32`, in the form that `init` got.
      step: `[]`, int32, number of completed iterations.
    """

    params: ActorCritic
    opt_state: PyTree
    reference_params: PyTree
    kl_coefficient: jax.Array
    collector: CollectorState
    key: jax.Array
    step: jax.Array

    def with_frozen(self, frozen: PyTree) -> "TrainState":
        """Returns the state with other frozen parameters; None removes the frozen parameters.

        Raises:
          ConfigError: the parameters were donated to a program, which deleted them.
        """
        return self._replace(params=self.params._replace(frozen=undonated(frozen)))


def undonated(frozen: PyTree) -> PyTree:
    """Returns its argument.

    Raises ConfigError if a donation has deleted one of the argument's arrays.
    """
    arrays = (x for x in jax.tree.leaves(frozen) if isinstance(x, jax.Array))
    if any(not isinstance(x, jax.core.Tracer) and x.is_deleted() for x in arrays):
        raise ConfigError(
            "frozen",
            "parameters were donated: load them again, donate state.with_frozen(None), and pass "
            "state.params.frozen beside it",
        )
    return frozen


@with_field_docs
class Learner(NamedTuple):
    """Method on a problem as three pure functions, to be jitted, vmapped, scanned and sharded.

    `sample` and `update` each split the state's key and store the next one, so no key is used
    twice. A reward that only Python can compute is put into the batch between `sample` and
    `update`, which are then jitted separately.

    Attributes:
      init: `init(key) -> TrainState`; consumes `key`. Under `jax.jit` the call takes a third of the
        time, but `jax.jit` would make a pretrained model's parameters constants of the program. The
        state may be donated: the state shares no array with the problem or the user, except for a
        frozen base or teacher, which is never copied: donate `state.with_frozen(None)`, see
        `docs/pretrained.md`.
      sample: `sample(state) -> (state, batch)`: collects; masked slots are zeroed and metrics
        pooled over devices.
      update: `update(state, batch) -> (state, metrics)`: estimates and improves.
    """

    init: Callable[[jax.Array], TrainState]
    sample: Callable[[TrainState], tuple[TrainState, Batch]]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

    @property
    def step(self) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
        """Returns one iteration, `step(state) -> (state, metrics)`: `update(*sample(state))`.

        The same function is returned each time, so that `jax.jit(learner.step)` compiles once.
        """
        return _composed(self.sample, self.update)

    @property
    def problem(self) -> "Problem | None":
        """Returns the problem that `make` built the learner for; None if it is unknown.

        `init` carries the problem as an attribute, so that a learner keeps three fields. A wrapper
        of `init` by `functools.wraps` or `jax.jit` carries it too.
        """
        return getattr(self.init, "problem", None)


@functools.lru_cache(maxsize=64)
def _composed(
    sample: Callable[[TrainState], tuple[TrainState, Batch]],
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]],
) -> Callable[[TrainState], tuple[TrainState, Metrics]]:
    def step(state: TrainState) -> tuple[TrainState, Metrics]:
        return update(*sample(state))

    return step


SumInParts = Callable[..., Any]
"""`(function, samples, num_parts) -> sum`, sums a function over parts of the samples, see
`minibatches`."""


@with_field_docs
class FastPaths(NamedTuple):
    """Faster ways to compute `Problem.apply`.

    A field is None if the problem does not have that way.

    Attributes:
      by_length: `minibatches.sum_in_parts` for rows of unequal length, in less time, see `lengths`.
      grouped: `grouped(inputs)`, for rows group by group, stores once the part of the inputs that
        members of a group share; `apply` accepts the result in place of `inputs`.
    """

    by_length: SumInParts | None = None
    grouped: Callable[[Any], Any] | None = None


@with_field_docs
class Problem(NamedTuple):
    """Source of samples: the only record in which control and language differ.

    A user-defined problem gives the four functions `init`, `collect`, `apply` and `rows`. The
    defaults of the other fields describe fresh samples of the policy itself.

    Attributes:
      init: `init(key) -> (params, collector)`; consumes `key`.
      collect: `collect(params, collector, key) -> (collector, Batch)`; consumes `key`.
      apply: `apply(params, inputs) -> (distribution, value)`, for any rows of a batch; with critic
        parameters None the value is zeros.
      rows: `rows(samples)` merges the leading axes that `apply` does not mix: `[B, T] → [B·T]` for
        control, the identity for sequences.
      strata: number of strata in the column `stratum`; 0 without that column.
      on_policy: True if the policy itself sampled the actions. False means that a proposal μ
        sampled them, with a column `sampler_log_prob`; only methods with a surrogate weighted by π
        / μ are then available.
      log_prob_matches_sampler: True if `Batch.log_prob` equals the result of `apply`, up to float32
        rounding. False means that the sampler computes in lower precision, and the learner
        recomputes the old log-probabilities.
      truncated_is_overlong: True if a truncated row is a response that was too long, subject to
        DAPO's rules for overlong responses. False means that a truncated row is an episode that
        reached its time limit, which may be a success.
      has_turns: True if an episode is a dialogue; its column `step_end` marks the ends of turns.
      staleness: age in iterations of the parameters that `collect` samples with.
      linearizable: True if `apply` has a forward derivative, which natural steps need.
      hidden_matrices: `params -> ActorCritic`, True for each leaf that maps hidden units to hidden
        units, which Muon orthogonalises, and False for each other leaf; None if a network does not
        state them.
      fast_paths: faster ways to compute `apply`, documented in `FastPaths`.
      actor: policy with memory as a function that acts in an environment step by step, see
        `control.Actor`; None for a policy without memory, which acts through `apply`.
      target: `Target` that the program is compiled for, or None if the problem leaves it open.
      spaces: `control.Spaces` of the environment of a control problem; None for other problems.
      steps: number of units of one iteration, over all rows.
      unit: plural name of what `steps` counts, such as `environment steps` or `completions`.
    """

    init: Callable[[jax.Array], tuple[ActorCritic, CollectorState]]
    collect: Callable[[ActorCritic, CollectorState, jax.Array], tuple[CollectorState, Batch]]
    apply: Callable[[ActorCritic, Any], tuple[Any, jax.Array]]
    rows: Callable[[Samples], Samples]
    strata: int = 0
    on_policy: bool = True
    log_prob_matches_sampler: bool = True
    truncated_is_overlong: bool = True
    has_turns: bool = False
    staleness: int = 0
    linearizable: bool = True
    hidden_matrices: Callable[[ActorCritic], ActorCritic] | None = None
    fast_paths: FastPaths = FastPaths()
    actor: Any = None
    target: Any = None
    spaces: Any = None
    steps: int = 1
    unit: str = "iterations"

    def with_target(self, target: Target | None) -> "Problem":
        """Returns the problem as the source of a method for a target.

        None keeps the problem's own target.
        """
        return self._replace(target=target or self.target or backend.here())


for _record in (ActorCritic, CollectorState, Batch, Samples, TrainState):
    _record.__repr__ = short_repr  # type: ignore[method-assign]
