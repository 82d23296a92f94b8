"""TRPO's vine: several actions from each of some visited states, under common random numbers."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import backend, masked
from jaxrl_po.backend import Target
from jaxrl_po.config import COUNT, NON_NEGATIVE, UNIT, ConfigError, check, common, record, static
from jaxrl_po.control import unroll
from jaxrl_po.control.actor import as_problem, build_networks, has_memory, play, require_fit
from jaxrl_po.control.environment import Environment, adapt
from jaxrl_po.control.modules import NetworkSettings, policy_module
from jaxrl_po.control.problem import ENVIRONMENTS, frac_broken
from jaxrl_po.control.unroll import EnvState
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Columns, Problem


@record
class VineSettings:
    """Sizes of a vine."""

    num_envs: int = common.static(16, "trunk rollouts in parallel, over all devices", within=COUNT)
    num_steps: int = common.static(
        64, "steps of each trunk per iteration", unit="steps", within=COUNT
    )
    num_states: int = static(
        4, "states of each trunk from which branches start", unit="states", within=COUNT
    )
    num_branches: int = static(
        0,
        "branches of each chosen state, one action each; 0 tries every action (discrete "
        "actions only)",
        within=NON_NEGATIVE,
    )
    horizon: int = static(
        64,
        "maximum steps of a branch; no value is bootstrapped after the last step",
        unit="steps",
        within=COUNT,
    )
    discount: float = static(0.99, "γ of the return of a branch", within=UNIT)

    def steps(self, num_actions: int) -> int:
        """Returns the number of environment steps per iteration, in trunks and branches."""
        return self.num_envs * (
            self.num_steps + self.num_states * (self.num_branches or num_actions) * self.horizon
        )


def make_vine(
    env: Any,
    *,
    num_envs: int = 16,
    num_steps: int = 64,
    num_states: int = 4,
    num_branches: int = 0,
    horizon: int = 64,
    discount: float = 0.99,
    env_params: Any = None,
    policy: Any = None,
    network: NetworkSettings | None = None,
    target: Target | None = None,
) -> Problem:
    """Builds a control problem that estimates `Q̂(s, a)` from K branches at some states.

    The K branches of a state differ in their first action and share all other random numbers. A
    row is one branch, as a single step: the row's reward is Q̂, the discounted return of the
    branch, and its value V̂, the mean of Q̂ over the state's actions under the policy, so that any
    estimator gives `Q̂ − V̂`. The problem has no critic.

    With every action tried once, the proposal μ is uniform and the problem not on-policy: `mean(π /
    μ · A)` is `mean_n Σ_k π(a_k|s_n) A_nk`, the paper's eq. 17, which TRPO and NPG maximise;
    methods without the ratio π / μ refuse the problem. Sampled actions are on-policy, for eq. 18
    (`losses.self_normalized_surrogate`) or any method.

    Args:
      env: gymnax ≥ 1.0 environment or an environment with the same interface, whose state is a
        pytree.
      num_envs: number of trunks, over all devices.
      num_steps: number of steps of each trunk per iteration.
      num_states: number of states of each trunk from which branches start, drawn without
        replacement.
      num_branches: number K of actions sampled from the policy in each state with branches; 0 takes
        every action once (discrete actions only).
      horizon: largest number of steps of a branch, including its first action; no value is
        bootstrapped after the horizon.
      discount: discount γ of a branch's return, in [0, 1].
      env_params: parameters of the environment; None stands for its defaults.
      policy: Flax module, observation to a distribution; None builds the module from `network`.
      network: size and kind of the policy that is built; None stands for a 64 × 64 tanh perceptron.
      target: platform and devices of the compiled program; None stands for `backend.here()`.

    Returns:
      `Problem` whose `score` `[num_envs · num_states, K]` is Q̂. The metrics are measured on the
      trunks.
      Source: Schulman et al. 2015 (TRPO), section 5.2.

    Raises:
      ConfigError: a count is out of range, a state has a single branch, or the environment has no
        state to branch from.

    Example:
      >>> import gymnax
      >>> problem = make_vine(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=8, num_states=3)
      >>> _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
      >>> batch.inputs.shape, batch.score.shape
      ((12, 1, 4), (6, 2))
    """
    sizes = VineSettings(
        num_envs=num_envs,
        num_steps=num_steps,
        num_states=num_states,
        num_branches=num_branches,
        horizon=horizon,
        discount=discount,
    )
    check(sizes)
    num_envs, num_branches = sizes.num_envs, sizes.num_branches
    if sizes.num_states > sizes.num_steps:
        raise ConfigError(
            "num_states", f"must be at most num_steps = {sizes.num_steps}, got {sizes.num_states}"
        )
    environment = adapt(env, env_params)
    branches = count_branches(environment.spaces.num_actions, num_branches)
    if not jax.tree.leaves(jax.eval_shape(environment.reset, jax.random.key(0))[1]):
        raise ConfigError(
            "env", "must keep its state in a pytree: a vine goes back to visited states"
        )
    target = target or backend.here()
    policy = policy_module(environment.spaces, network, policy, target=target)
    nets = build_networks({"policy": policy, "critic": None}, environment.spaces)
    require_fit(nets, environment.spaces)
    if has_memory(nets):
        raise ConfigError(
            "memory", "must be none in a vine, which branches in the middle of an episode"
        )

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        envs = unroll.start(environment, env_key, jnp.arange(num_envs, dtype=jnp.int32))
        first = jax.tree.map(lambda x: x[0], envs.observation)
        return nets.init(network_key, first), CollectorState({ENVIRONMENTS: envs})

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        act = functools.partial(nets.act, params)
        before = collector.sharded[ENVIRONMENTS]
        envs, batch = grow(environment, act, sizes, branches, before, key, target)
        sharded = {**collector.sharded, ENVIRONMENTS: envs}
        return collector._replace(sharded=sharded), batch

    steps, spaces = sizes.steps(branches), environment.spaces
    on_policy = num_branches > 0
    return as_problem(nets, init, collect, target, spaces=spaces, steps=steps, on_policy=on_policy)


def count_branches(num_actions: int, num_branches: int) -> int:
    """Returns the number of branches per state, `num_branches`, or one per action if that is 0.

    Raises:
      ConfigError: there are fewer than two branches, or `num_branches` is 0 for actions that cannot
        be listed.
    """
    if num_branches == 0 and not num_actions:
        raise ConfigError(
            "num_branches", "must be at least 2 where actions are not one discrete choice"
        )
    branches = num_branches or num_actions
    if branches < 2:
        raise ConfigError("num_branches", f"must be at least 2, to compare actions, got {branches}")
    return branches


def grow(
    environment: Environment,
    act: Callable[..., Any],
    sizes: VineSettings,
    branches: int,
    envs: EnvState,
    key: jax.Array,
    target: Target,
) -> tuple[EnvState, Batch]:
    """Runs the trunks and their branches; returns the trunks and a batch of the branches' returns.

    Args:
      environment: environment of trunks and branches.
      act: function that acts, see `unroll.unroll`.
      sizes: sizes of the vine.
      branches: number K of branches of a state.
      envs: states in which the trunks begin, `[B, …]`.
      key: PRNG key, consumed.
      target: platform and devices of the program.
    """
    trunk_key, state_key, action_key, branch_key = jax.random.split(key, 4)
    num_steps, num_states = sizes.num_steps, sizes.num_states
    envs, trunk = unroll.unroll(
        environment, act, envs, trunk_key, num_steps=num_steps, keep_states=True, target=target
    )
    choose = jax.vmap(lambda key: jax.random.choice(key, num_steps, (num_states,), replace=False))
    times = choose(unroll.row_keys(state_key, envs.number))

    def repeat(x: jax.Array) -> jax.Array:
        """Repeats each chosen step K times: `[B, T, …]` to `[B · num_states · K, …]`."""
        chosen = jax.vmap(lambda row, t: row[t])(x, times)
        return jnp.repeat(chosen.reshape(-1, *x.shape[2:]), branches, axis=0)

    states, observation, distribution = jax.tree.map(
        repeat, (trunk.state, trunk.observation, trunk.distribution)
    )
    # Keys belong to the state, not to the branch: branches of a state draw the same numbers.
    state_index = jnp.repeat(
        (
            envs.number[:, None] * num_states + jnp.arange(num_states, dtype=jnp.int32)[None, :]
        ).reshape(-1),
        branches,
    )
    branch = jnp.tile(jnp.arange(branches, dtype=jnp.int32), state_index.shape[0] // branches)
    columns: Columns = {}
    enumerated = sizes.num_branches == 0
    if enumerated:
        action = branch
        columns = {"sampler_log_prob": jnp.full((branch.shape[0], 1), -jnp.log(branches))}
    else:
        # only the first action is drawn independently in the branches of a state
        keys = jax.vmap(jax.random.fold_in)(unroll.row_keys(action_key, state_index), branch)
        action = unroll.choose_actions(distribution, keys, greedy=False)
    log_prob = distribution.log_prob(action)
    played = play(distribution, action)
    q = branch_returns(environment, act, sizes, state_index, states, played, branch_key, target)
    # A branch with probability 0 under the policy has weight 0, even if its return is NaN.
    q = jnp.where(log_prob == -jnp.inf, 0.0, q)
    score = q.reshape(-1, branches)
    if enumerated:
        weight = jnp.exp(log_prob).reshape(-1, branches)
        baseline = jnp.sum(weight * score, axis=1)
    else:
        baseline = score.mean(axis=1)
    all_true = jnp.ones((q.shape[0], 1), bool)
    trunk_ended = trunk.transition.terminated | trunk.transition.truncated
    return envs, Batch(
        inputs=jax.tree.map(lambda x: x[:, None], observation),
        action=action[:, None],
        log_prob=log_prob[:, None],
        reward=q[:, None],
        value=jnp.repeat(baseline, branches)[:, None],
        next_value=jnp.zeros((q.shape[0], 1)),
        terminated=all_true,
        truncated=~all_true,
        mask=all_true,
        score=score,
        metrics={
            "episode_return": masked.total(trunk.episode_return, trunk_ended),
            "episode_length": masked.total(trunk.episode_length, trunk_ended),
            "frac_one_step": masked.total(trunk_ended & (trunk.episode_length == 1.0)),
            **frac_broken(environment.spaces, trunk.observation),
        },
        columns=columns,
    )


def branch_returns(
    environment: Environment,
    act: Callable[..., Any],
    sizes: VineSettings,
    state_index: jax.Array,
    states: Any,
    action: jax.Array,
    key: jax.Array,
    target: Target,
) -> jax.Array:
    """Computes discounted returns `[N]` of branches, reward units, up to their end or the horizon.

    Args:
      environment: environment of the branches.
      act: function that chooses all actions after the first, see `unroll.unroll`.
      sizes: sizes of the vine.
      state_index: `[N]`, index of each branch's state; branches with one index draw the same random
        numbers.
      states: states of the environment, `[N, …]`.
      action: first action of each branch, `[N, …]`, in the environment's form.
      key: PRNG key, consumed.
      target: platform and devices of the program.
    """
    first_key, rest_key = jax.random.split(key)
    state, first = jax.vmap(environment.step)(
        unroll.row_keys(first_key, state_index), states, action
    )
    zeros = jnp.zeros(state_index.shape)
    _, rest = unroll.unroll(
        environment,
        act,
        EnvState(state_index, state, first.observation, zeros, zeros),
        rest_key,
        num_steps=sizes.horizon - 1,
        target=target,
    )
    ended = jnp.concatenate(
        [
            (first.terminated | first.truncated)[:, None],
            rest.transition.terminated | rest.transition.truncated,
        ],
        axis=1,
    )
    reward = jnp.concatenate([first.reward[:, None], rest.transition.reward], axis=1)
    reward = masked.zero(reward, unroll.until_first(ended))
    return jnp.sum(reward * sizes.discount ** jnp.arange(sizes.horizon)[None, :], axis=1)
