"""The vine of TRPO: from states of a trunk of rollouts, several actions each, followed up under common random numbers."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_po import masked
from jaxrl_po.config import COUNT, NON_NEGATIVE, UNIT, ConfigError, check, record, static
from jaxrl_po.control import unroll
from jaxrl_po.control.environment import adapt
from jaxrl_po.control.problem import (
    ENVIRONMENTS,
    NetworkSettings,
    build_networks,
    default_modules,
    merge_time,
)
from jaxrl_po.control.unroll import EnvState
from jaxrl_po.distributions import Distribution
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Problem


@record
class VineSettings(NetworkSettings):
    """Sizes of a vine."""

    num_envs: int = static(16, "trunks that run side by side, over all devices", within=COUNT)
    num_steps: int = static(64, "steps of each trunk in one iteration", unit="steps", within=COUNT)
    num_states: int = static(
        4, "states of each trunk that are branched from", unit="states", within=COUNT
    )
    num_branches: int = static(
        0,
        "actions that are tried in each of them; 0 takes every action once (discrete only)",
        within=NON_NEGATIVE,
    )
    horizon: int = static(
        64, "steps of a branch at most; what would follow counts 0", unit="steps", within=COUNT
    )
    discount: float = static(0.99, "γ of the return of a branch", within=UNIT)

    def steps(self, num_actions: int) -> int:
        """Environment steps of one iteration, trunks and branches, where `num_actions` can be tried."""
        return self.num_envs * (
            self.num_steps + self.num_states * (self.num_branches or num_actions) * self.horizon
        )


def vine_from_settings(
    env: Any, settings: VineSettings, *, axis_name: str | None = None
) -> Problem:
    """`make_vine` with everything taken from a record."""
    settings.validate()
    return make_vine(
        env,
        num_envs=settings.num_envs,
        num_steps=settings.num_steps,
        num_states=settings.num_states,
        num_branches=settings.num_branches,
        horizon=settings.horizon,
        discount=settings.discount,
        policy=default_modules(adapt(env), settings)["policy"],
        axis_name=axis_name,
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
    axis_name: str | None = None,
) -> Problem:
    """A control problem that estimates `Q̂(s, a)` by going back to visited states and trying K actions in each.

    The K branches of a state share all their random numbers, so that their difference is the
    actions' doing. A row is one branch and one step long: its reward is Q̂, the discounted return
    of the branch, and its value the state's mean of Q̂ under the policy, so that any estimator
    gives `Q̂ − V̂`. There is no critic.

    With every action tried once, the proposal is the uniform choice (`sampler_log_prob`,
    `on_policy=False`): `mean(π / μ · A)` is `mean_n Σ_k π(a_k|s_n) A_nk`, the paper's eq. 17, which
    TRPO and NPG maximise; methods without that ratio refuse it. Sampled actions are the policy's
    own, for eq. 18 (`losses.self_normalized_surrogate`) or any method.

    Args:
      env: a gymnax ≥ 1.0 environment or one that speaks its interface, whose state is a pytree.
      num_envs: trunks, over all devices.
      num_steps: steps of each trunk in one iteration.
      num_states: states of each trunk, drawn without replacement, that are branched from.
      num_branches: K, actions sampled from the policy in each of them; 0 takes every action once
        (discrete actions only).
      horizon: steps of a branch, its first action included; a branch that is longer is cut and
        nothing is bootstrapped.
      discount: γ of the return of a branch, in [0, 1].
      env_params: parameters of the environment; None takes its defaults.
      policy: Flax module, observation to a distribution; None builds a 64 × 64 tanh perceptron.
      axis_name: accepted for symmetry with `make_problem`; nothing is pooled here.

    Returns:
      The `Problem`; `score` `[num_envs · num_states, K]` is Q̂. Metrics are those of the trunks.
      Source: Schulman et al. 2015 (TRPO), section 5.2.

    Raises:
      ConfigError: counts out of range, a single branch, or an environment without a state to go
        back to.

    Example:
      >>> import gymnax
      >>> problem = make_vine(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=8, num_states=3)
      >>> _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
      >>> batch.inputs.shape, batch.score.shape
      ((12, 1, 4), (6, 2))
    """
    check(
        VineSettings(
            num_envs=num_envs,
            num_steps=num_steps,
            num_states=num_states,
            num_branches=num_branches,
            horizon=horizon,
            discount=discount,
        )
    )
    del axis_name
    if num_states > num_steps:
        raise ConfigError(
            f"num_states must be at most num_steps = {num_steps}, the states of a trunk, "
            f"got {num_states}"
        )
    environment = adapt(env, env_params)
    enumerated = num_branches == 0
    if enumerated and not environment.num_actions:
        raise ConfigError(
            "num_branches must be at least 2 where actions are continuous: they cannot all be tried"
        )
    branches = environment.num_actions if enumerated else num_branches
    if branches < 2:
        raise ConfigError(
            f"num_branches must be at least 2, so that actions can be compared, got {branches}"
        )
    if not jax.tree.leaves(jax.eval_shape(environment.reset, jax.random.key(0))[1]):
        raise ConfigError(
            "a vine goes back to visited states: env must keep its state in the pytree "
            "that step returns"
        )
    if policy is None:
        policy = default_modules(environment, NetworkSettings())["policy"]
    nets = build_networks({"policy": policy, "critic": None}, len(environment.observation_shape))

    def init(key: jax.Array) -> tuple[ActorCritic, CollectorState]:
        network_key, env_key = jax.random.split(key)
        envs = unroll.start(environment, env_key, jnp.arange(num_envs, dtype=jnp.int32))
        return nets.init(network_key, envs.observation[0]), CollectorState({ENVIRONMENTS: envs})

    def apply(params: ActorCritic, inputs: jax.Array) -> tuple[Distribution, jax.Array]:
        return nets.policy(params, inputs), nets.value(params, inputs)

    def collect(
        params: ActorCritic, collector: CollectorState, key: jax.Array
    ) -> tuple[CollectorState, Batch]:
        trunk_key, state_key, action_key, branch_key = jax.random.split(key, 4)

        def act(observation: jax.Array) -> Distribution:
            return nets.policy(params, observation)

        envs, trunk = unroll.unroll(
            environment,
            act,
            collector.sharded[ENVIRONMENTS],
            trunk_key,
            num_steps=num_steps,
            keep_states=True,
        )
        choose = jax.vmap(
            lambda key: jax.random.choice(key, num_steps, (num_states,), replace=False)
        )
        at = choose(unroll.row_keys(state_key, envs.number))

        def repeat(x: jax.Array) -> jax.Array:
            """`[B, T, …]` to `[B · num_states · K, …]`: the chosen states, each once for each branch."""
            chosen = jax.vmap(lambda row, at: row[at])(x, at)
            return jnp.repeat(chosen.reshape(-1, *x.shape[2:]), branches, axis=0)

        states, observation, distribution = jax.tree.map(
            repeat, (trunk.state, trunk.observation, trunk.distribution)
        )
        # Of the state and not of the branch: whatever is drawn with it is common to all branches of
        # a state.
        number = jnp.repeat(
            (
                envs.number[:, None] * num_states + jnp.arange(num_states, dtype=jnp.int32)[None, :]
            ).reshape(-1),
            branches,
        )
        which = jnp.tile(jnp.arange(branches, dtype=jnp.int32), number.shape[0] // branches)
        proposal: jax.Array | None = None
        if enumerated:
            action, proposal = which, jnp.full((which.shape[0], 1), -jnp.log(branches))
        else:
            keys = jax.vmap(jax.random.fold_in)(unroll.row_keys(action_key, number), which)
            action = jax.vmap(lambda distribution, key: distribution.sample(key))(
                distribution, keys
            )
        log_prob = distribution.log_prob(action)
        first_key, rest_key = jax.random.split(branch_key)
        state, first = jax.vmap(environment.step)(
            unroll.row_keys(first_key, number), states, action
        )
        zeros = jnp.zeros(number.shape)
        _, rest = unroll.unroll(
            environment,
            act,
            EnvState(number, state, first.observation, zeros, zeros),
            rest_key,
            num_steps=horizon - 1,
        )
        ended = jnp.concatenate(
            [
                (first.terminated | first.truncated)[:, None],
                rest.transition.terminated | rest.transition.truncated,
            ],
            axis=1,
        )
        reward = jnp.concatenate([first.reward[:, None], rest.transition.reward], axis=1)
        q = jnp.sum(
            reward * discount ** jnp.arange(horizon)[None, :] * unroll.until_first(ended), axis=1
        )
        score = q.reshape(-1, branches)
        if enumerated:
            weight = jnp.exp(log_prob).reshape(-1, branches)
            baseline = jnp.sum(weight * score, axis=1)
        else:
            baseline = score.mean(axis=1)
        yes = jnp.ones((q.shape[0], 1), bool)
        trunk_ended = trunk.transition.terminated | trunk.transition.truncated
        batch = Batch(
            inputs=observation[:, None],
            action=action[:, None],
            log_prob=log_prob[:, None],
            reward=q[:, None],
            value=jnp.repeat(baseline, branches)[:, None],
            next_value=jnp.zeros((q.shape[0], 1)),
            terminated=yes,
            truncated=~yes,
            mask=yes,
            score=score,
            metrics={
                "episode_return": masked.total(trunk.episode_return, trunk_ended),
                "episode_length": masked.total(trunk.episode_length, trunk_ended),
            },
            sampler_log_prob=proposal,
        )
        return CollectorState({ENVIRONMENTS: envs}), batch

    return Problem(
        init, collect, apply, merge_time, on_policy=not enumerated, truncated_is_overlong=False
    )
