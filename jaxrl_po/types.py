"""Data and signatures that every layer shares. No functions inside data: they would break tree equality and retrace.

Axes, in both domains: B rows (environments, or P prompts × G completions, group-major), T steps
(environment steps, or generated tokens).
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean

PyTree = Any
Metrics = dict[str, Mean]


class ActorCritic(NamedTuple):
    """Parameters by role, so that a trust region picks its subtree by structure, never by name.

    Attributes:
      policy: parameters of the policy.
      value: parameters of the critic, or None where there is none.
      frozen: parameters that `Problem.apply` reads and nothing trains (a pretrained base under
        adapters), or None. They are outside gradients, optimizers and checkpoints, and all seeds
        share one copy.
    """

    policy: PyTree
    value: PyTree = None
    frozen: PyTree = None

    def trained(self) -> "ActorCritic":
        """The parameters without those that are frozen."""
        return self._replace(frozen=None)


class CollectorState(NamedTuple):
    """What `collect` carries from one iteration to the next: entries side by side, each under a name that says what it holds.

    A wrapper of a problem adds entries of its own and leaves the others where they are, so that
    whoever reads an entry (an evaluator, say) finds it whatever the problem is wrapped in. A switch
    that is off has no entry. The two halves say how the state lies on devices: sharding needs no
    knowledge of what is inside.

    Attributes:
      sharded: leaves `[B, …]` or `[P, …]`, a slice of the rows on each device (environment states,
        running returns, row numbers).
      replicated: leaves of any shape, equal on every device (observation statistics, a frozen
        reward model's parameters).

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
        """The state with further entries.

        Raises:
          ConfigError: an entry of that name is there already: the same wrapper twice.
        """
        for name in (*(sharded or {}), *(replicated or {})):
            if name in self.sharded or name in self.replicated:
                raise ConfigError(
                    f"{name} must be carried once: a problem is not wrapped twice by the "
                    "same wrapper"
                )
        return CollectorState(
            {**self.sharded, **(sharded or {})}, {**self.replicated, **(replicated or {})}
        )

    def remove(self, *names: str) -> "CollectorState":
        """The state without the entries of these names."""
        halves = (
            {name: entry for name, entry in half.items() if name not in names} for half in self
        )
        return CollectorState(*halves)


class Batch(NamedTuple):
    """What `collect` gathers under the collecting parameters; leaves `[B, T, …]` in both domains.

    Attributes:
      inputs: what `Problem.apply` reads: observations `[B, T, …]`, or token sequences whose leaves
        lead with `[B]`.
      action: `[B, T, …]`, as sampled (never clipped).
      log_prob: `[B, T]`, nats, of `action` under the policy that collected, the old policy of a
        ratio.
      reward: `[B, T]`, reward units; None where it is still to be given, outside the program,
        between `Learner.sample` and `Learner.update`.
      value: `[B, T]`, the critic at the input; zeros without a critic.
      next_value: `[B, T]`, the critic at the *true* next observation: the final one where an
        episode ended.
      terminated: `[B, T]`, bool; the return ends here, nothing is bootstrapped.
      truncated: `[B, T]`, bool; the episode was cut here by a limit. A control episode that is only
        truncated bootstraps; a completion cut at its token budget is both terminated (its reward is
        final) and truncated (so that it can be filtered).
      mask: `[B, T]`, bool; False in slots that hold no sample (after the end of a completion).
      score: `[P, G]`, the raw outcome of each row before any shaping; its shape *is* the group axis
        (B = P·G). 0 as long as the reward is None.
      metrics: what `collect` measured.
      stratum: `[B]`, int32 below `Problem.strata`: which prompts a row's outcome may be compared
        with beyond its own group (those of one number in a finite set, or of one difficulty), or
        None where the problem does not tell.
      sampler_log_prob: `[B, T]`, nats, of `action` under μ, what drew it (before top-k or top-p
        truncated it); None where that is `log_prob`. It differs where a sampler computes in another
        precision than `apply`, and where a proposal drew the action.
      step_end: `[B, T]`, bool, the slots at which a reward is due, where rewards stand along a row;
        None for all slots.
      age: `[B]`, int32, updates of the parameters since the row was sampled; None where every row
        is fresh.
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
    stratum: Any = None
    sampler_log_prob: Any = None
    step_end: Any = None
    age: Any = None


class Samples(NamedTuple):
    """What `improve` consumes; leaves `[B, T, …]`, or `[B·T, …]` after `Problem.rows`.

    What a method does not read is None.

    Attributes:
      inputs: see `Batch`.
      action: see `Batch`.
      log_prob: nats, under the collecting parameters.
      advantage: reward units, or normalised.
      mask: bool, False where the slot holds no sample.
      target: regression target of the critic, reward units, or None without one.
      value: the critic under the collecting parameters, reward units, or None where the loss does
        not read it.
      reference_log_prob: nats, under the reference policy, or None.
      sampler_log_prob: see `Batch`; None where the loss does not read it.
      sampled: bool, the slots that the old policy sampled, over which the KL of an update is
        measured; None where that is `mask`. A method may leave slots out of its loss, and rows that
        are older were sampled by an earlier policy.
    """

    inputs: PyTree
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    mask: jax.Array
    target: Any = None
    value: Any = None
    reference_log_prob: Any = None
    sampler_log_prob: Any = None
    sampled: Any = None


class TrainState(NamedTuple):
    """The one training state, shared by all methods: data only.

    Attributes:
      params: `ActorCritic`.
      opt_state: state of the optimizer, over the subtree that the algorithm optimises by gradient.
      reference_params: frozen policy parameters, or None.
      kl_coefficient: `[]`, float32, β of an adaptive penalty; 0 where none is used.
      collector: whatever `collect` carries.
      key: typed PRNG key, `[]`.
      step: `[]`, int32, iterations done.
    """

    params: ActorCritic
    opt_state: PyTree
    reference_params: PyTree
    kl_coefficient: jax.Array
    collector: CollectorState
    key: jax.Array
    step: jax.Array


class Learner(NamedTuple):
    """A method on a problem: three pure functions, to be jitted, vmapped, scanned and sharded at will.

    Attributes:
      init: `init(key) -> TrainState`; consumes `key`.
      sample: `sample(state) -> (state, batch)`: collect, with masked slots zeroed and metrics pooled
        over devices.
      update: `update(state, batch) -> (state, metrics)`: estimate and improve. What only Python can
        compute (a reward) is put into the batch before it, each function then jitted by itself.

    Both take a key from the state and leave the next one there, so that sampling twice differs.
    """

    init: Callable[[jax.Array], TrainState]
    sample: Callable[[TrainState], tuple[TrainState, Batch]]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

    def step(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One iteration, `update(*sample(state))`."""
        return self.update(*self.sample(state))


class Problem(NamedTuple):
    """Where samples come from: the one place in which control and language differ.

    Attributes:
      init: `init(key) -> (params, collector)`; consumes `key`.
      collect: `collect(params, collector, key) -> (collector, Batch)`; consumes `key`.
      apply: `apply(params, inputs) -> (distribution, value)`; with critic parameters None the value
        is zeros.
      rows: `rows(samples)` merges the leading axes that `apply` does not mix: `[B, T] → [B·T]` for
        control, the identity for sequences.
      strata: how many strata `Batch.stratum` tells apart; 0 for none.
      on_policy: the policy itself drew the actions. False: a proposal did, whose log-probability is
        `Batch.sampler_log_prob`, and only a method whose surrogate is weighted by π / μ may learn
        from it.
      exact_sampler: `Batch.log_prob` is what `apply` gives, to the rounding of float32. False: the
        sampler computes in lower precision, and the learner computes the log-probabilities of the
        old policy itself.
      truncated_is_overlong: a truncated row is a response that was too long, on which DAPO's rules
        for overlong responses act. False: it is an episode that reached its time limit, which may
        be a success.
    """

    init: Callable[[jax.Array], tuple[ActorCritic, CollectorState]]
    collect: Callable[[ActorCritic, CollectorState, jax.Array], tuple[CollectorState, Batch]]
    apply: Callable[[ActorCritic, Any], tuple[Any, jax.Array]]
    rows: Callable[[Samples], Samples]
    strata: int = 0
    on_policy: bool = True
    exact_sampler: bool = True
    truncated_is_overlong: bool = True
