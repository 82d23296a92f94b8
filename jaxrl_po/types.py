"""Data and signatures that every layer shares. No functions inside data: they would break tree equality and retrace.

Axes, in both domains: B rows (environments, or P prompts × G completions, group-major), T steps (environment steps, or
generated tokens).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxrl_po.masked import Mean

PyTree = Any
Metrics = dict[str, Mean]


class ActorCritic(NamedTuple):
    """Parameters by role, so that a trust region picks its subtree by structure and never by name.

    Attributes:
      policy: parameters of the policy.
      value: parameters of the critic, or `()` where there is none.
    """

    policy: PyTree
    value: PyTree = ()


class Actor(NamedTuple):
    """What `collect` carries from one iteration to the next.

    The two halves say how the state lies on devices: sharding needs no knowledge of what is inside.

    Attributes:
      local: leaves `[B, …]` or `[P, …]`, a slice of the rows on each device (environment states, running returns, row ids).
      shared: leaves of any shape, equal on every device (observation statistics, a frozen reward model's parameters).
    """

    local: PyTree
    shared: PyTree = ()


class Batch(NamedTuple):
    """What `collect` gathers under the collecting parameters; leaves `[B, T, …]` in both domains.

    Attributes:
      inputs: what `Problem.apply` reads: observations `[B, T, …]`, or token sequences whose leaves lead with `[B]`.
      action: `[B, T, …]`, as sampled (never clipped).
      log_prob: `[B, T]`, nats, of `action` under the policy that sampled it.
      reward: `[B, T]`, reward units; `()` where it is still to be given, outside the program, see `Step`.
      value: `[B, T]`, the critic at the input; zeros without a critic.
      next_value: `[B, T]`, the critic at the *true* next observation: the final one where an episode ended.
      terminated: `[B, T]`, bool; the return ends here, nothing is bootstrapped.
      truncated: `[B, T]`, bool; the episode was cut here by a limit. A control episode that is only truncated bootstraps; a
        completion cut at its token budget is both terminated (its reward is final) and truncated (so that it can be filtered).
      mask: `[B, T]`, bool; False in slots that hold no sample (after the end of a completion).
      score: `[P, G]`, the raw outcome of each row before any shaping; its shape *is* the group axis (B = P·G). 0 as long as the
        reward is `()`.
      metrics: what `collect` measured.
      stratum: `[B]`, int32 below `Problem.strata`: which prompts a row's outcome may be compared with beyond its own group
        (those of one number in a finite set, or of one difficulty), or `()` where the problem does not tell.
    """

    inputs: PyTree
    action: jax.Array
    log_prob: jax.Array
    reward: jax.Array
    value: jax.Array
    next_value: jax.Array
    terminated: jax.Array
    truncated: jax.Array
    mask: jax.Array
    score: jax.Array
    metrics: Metrics
    stratum: Any = ()


class Samples(NamedTuple):
    """What `improve` consumes; leaves `[B, T, …]`, or `[B·T, …]` after `Problem.rows`. A field that is off is `()`.

    Attributes:
      inputs: see `Batch`.
      action: see `Batch`.
      log_prob: nats, under the collecting parameters.
      advantage: reward units, or normalised.
      target: regression target of the critic, reward units, or `()` without one.
      value: the critic under the collecting parameters, reward units, or `()` where the loss does not read it.
      reference_log_prob: nats, under the reference policy, or `()`.
      mask: bool, False where the slot holds no sample.
    """

    inputs: PyTree
    action: jax.Array
    log_prob: jax.Array
    advantage: jax.Array
    target: Any
    value: Any
    reference_log_prob: Any
    mask: jax.Array


class TrainState(NamedTuple):
    """The one training state, shared by all methods: data only.

    Attributes:
      params: `ActorCritic`.
      opt_state: state of the optimizer, over the subtree that the algorithm optimises by gradient.
      reference_params: frozen policy parameters, or `()`.
      kl_coefficient: `[]`, float32, β of an adaptive penalty; 0 where none is used.
      actor: `Actor`, whatever `collect` carries.
      key: typed PRNG key, `[]`.
      step: `[]`, int32, iterations done.
    """

    params: ActorCritic
    opt_state: PyTree
    reference_params: PyTree
    kl_coefficient: jax.Array
    actor: Actor
    key: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Step:
    """One iteration, `step(state) -> (state, metrics)`: the composition of two pure functions.

    What only Python can compute (a reward) is put into the batch between the two, each jitted by itself.

    Attributes:
      sample: `sample(state) -> (state, batch)`: collect, with masked slots zeroed and metrics pooled over devices.
      update: `update(state, batch) -> (state, metrics)`: estimate and improve.
    """

    sample: Callable[[TrainState], tuple[TrainState, Batch]]
    update: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

    def __call__(self, state: TrainState) -> tuple[TrainState, Metrics]:
        """One iteration as one function."""
        return self.update(*self.sample(state))


class Learner(NamedTuple):
    """A method on a problem: two pure functions, to be jitted, vmapped, scanned and sharded at will.

    Attributes:
      init: `init(key) -> TrainState`; consumes `key`.
      step: `step(state) -> (state, metrics)`: one iteration of collect, estimate, improve; keys come from the state. Those that
        `learner.make` builds are a `Step`, whose halves can be had apart.
    """

    init: Callable[[jax.Array], TrainState]
    step: Callable[[TrainState], tuple[TrainState, Metrics]]


class Problem(NamedTuple):
    """Where samples come from: the one place in which control and language differ.

    Attributes:
      init: `init(key) -> (params, actor)`; consumes `key`.
      collect: `collect(params, actor, key) -> (actor, Batch)`; consumes `key`.
      apply: `apply(params, inputs) -> (distribution, value)`; with critic parameters `()` the value is zeros.
      rows: `rows(samples)` merges the leading axes that `apply` does not mix: `[B, T] → [B·T]` for control, the identity for
        sequences.
      strata: how many strata `Batch.stratum` tells apart; 0 for none.
    """

    init: Callable[[jax.Array], tuple[ActorCritic, Actor]]
    collect: Callable[[ActorCritic, Actor, jax.Array], tuple[Actor, Batch]]
    apply: Callable[[ActorCritic, Any], tuple[Any, jax.Array]]
    rows: Callable[[Samples], Samples]
    strata: int = 0
