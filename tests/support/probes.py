"""Defines environments with known values in gymnax's interface, and trains on them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from gymnax.environments import environment, spaces

from jaxrl_po import masked
from jaxrl_po.algorithms.teacher import with_teacher
from jaxrl_po.config import as_arrays
from jaxrl_po.distributions import Categorical
from jaxrl_po.types import ActorCritic, Batch, CollectorState, Learner, Problem


@struct.dataclass
class State(environment.EnvState):
    time: int
    cue: jax.Array


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 5


class Probe(environment.Environment):
    """Environment with one cue in {−1, +1}, redrawn at each reset; subclasses define reward and
    termination."""

    num_actions = 2

    @property
    def default_params(self):
        return Params()

    def reset_env(self, key, params):
        state = State(time=0, cue=jnp.where(jax.random.bernoulli(key), 1.0, -1.0))
        return self.observation(state), state

    def observation(self, state):
        return state.cue[None]

    def step_env(self, key, state, action, params):
        reward = self.reward(state, action)
        state = state.replace(time=state.time + 1)
        return self.observation(state), state, reward, self.terminated(state), {}

    def reward(self, state, action):
        return jnp.float32(1.0)

    def terminated(self, state):
        return jnp.bool_(False)

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))


class AlwaysTruncated(Probe):
    """Environment with reward 1 forever, truncated every 5 steps: V = 1 / (1 − γ), found only by
    bootstrapping."""


class AlwaysTerminated(Probe):
    """Environment with reward 1 whose episodes terminate after one step: V = 1; the time limit has
    no effect."""

    def terminated(self, state):
        return jnp.bool_(True)


class CueReward(AlwaysTerminated):
    """Environment whose reward is the cue: V(cue) = cue."""

    def reward(self, state, action):
        return state.cue


class MatchCue(AlwaysTerminated):
    """Environment with reward 1 for the action that names the cue: the best return is 1, a random
    policy gets ½."""

    def reward(self, state, action):
        return (action == (state.cue > 0)).astype(jnp.float32)


class MatchCueContinuous(AlwaysTerminated):
    """Environment with reward −(a − cue / 2)² and a box of half range 1: the best mean action is
    half the cue."""

    num_actions = 1

    def reward(self, state, action):
        return -jnp.square(action[0] - 0.5 * state.cue)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))


class NanReward(Probe):
    """Environment whose rewards are NaN: every update must be skipped."""

    def reward(self, state, action):
        return jnp.float32(jnp.nan)


def tabular_problem(*, num_prompts=4, group_size=1, num_steps=8, dense=True):
    """Builds a problem without an environment, for tests of the layers above: its program compiles
    in a second.

    The state at step t is (context + t) mod 6, independent of the actions; action 0 ends the row,
    and a row without action 0 is truncated. A row's raw score is 1 if it has at least three steps.
    The reward is a fixed table of state and action (dense), or the row's score at the end. The
    strata are the contexts. Policy and value are small networks on fixed features.
    """
    states, actions, width = 6, 4, 5
    table_key, feature_key = jax.random.split(jax.random.key(42))
    table = jax.random.normal(table_key, (states, actions))
    features = jax.random.normal(feature_key, (states, width))

    def init(key):
        first, second, value = jax.random.split(key, 3)
        policy = {
            "hidden": 0.5 * jax.random.normal(first, (width, width)),
            "head": 0.3 * jax.random.normal(second, (width, actions)),
        }
        params = ActorCritic(policy, 0.5 * jax.random.normal(value, (width,)))
        return params, CollectorState({"row": jnp.arange(num_prompts, dtype=jnp.int32)})

    def apply(params, inputs):
        x = features[inputs]
        logits = jnp.tanh(x @ params.policy["hidden"]) @ params.policy["head"]
        value = jnp.zeros(inputs.shape) if params.value is None else x @ params.value
        return Categorical(logits), value

    def collect(params, collector, key):
        keys = jax.vmap(lambda number: jax.random.split(jax.random.fold_in(key, number)))(
            collector.sharded["row"]
        )
        context = jax.vmap(lambda key: jax.random.randint(key, (), 0, states))(keys[:, 0])
        inputs = (jnp.repeat(context, group_size)[:, None] + jnp.arange(num_steps)[None]) % states
        distribution, value = apply(params, inputs)
        members = jax.vmap(lambda key: jax.random.split(key, group_size))(keys[:, 1]).reshape(-1)
        action = jax.vmap(lambda row, key: row.sample(key))(distribution, members)
        mask = jnp.cumsum(jnp.cumsum(action == 0, axis=1), axis=1) <= 1
        last = (jnp.arange(num_steps) == num_steps - 1)[None, :]
        terminated = (action == 0) & mask
        truncated = (mask & last) & ~terminated
        score = (mask.sum(axis=1) >= 3).astype(float)
        reward = (
            table[inputs, action]
            if dense
            else jnp.where(terminated | truncated, score[:, None], 0.0)
        )
        _, next_value = apply(params, (inputs + 1) % states)
        return collector, Batch(
            inputs=inputs,
            action=action,
            log_prob=distribution.log_prob(action),
            reward=reward,
            value=value,
            next_value=next_value,
            terminated=terminated,
            truncated=truncated,
            mask=mask,
            score=score.reshape(-1, group_size),
            metrics={"accuracy": masked.total(score)},
            columns={"stratum": jnp.repeat(context, group_size)},
        )

    def rows(samples):
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

    return Problem(init, collect, apply, rows, strata=states)


def imprecise(problem, size=0.3, staleness=0):
    """Returns the problem with log-probabilities that differ from the sampler's by up to `size`;
    actions are unchanged."""

    def collect(params, collector, key):
        collector, batch = problem.collect(params, collector, key)
        off = size * jnp.sin(1e4 * batch.log_prob + jnp.arange(batch.mask.shape[1])[None])
        columns = {**batch.columns, "sampler_log_prob": batch.log_prob + off}
        return collector, batch._replace(columns=columns)

    return problem._replace(collect=collect, log_prob_matches_sampler=False, staleness=staleness)


def taught(problem):
    """Returns the problem with another initial policy as its teacher."""
    return with_teacher(problem, problem.init(jax.random.key(9))[0]._replace(value=None))


def one_piece(init, step):
    """Returns a learner whose iteration cannot be split: `sample` gives an empty batch."""
    empty = Batch(**dict.fromkeys(Batch._fields))._replace(metrics={})
    return Learner(init, lambda state: (state, empty), lambda state, batch: step(state))


@functools.cache
def program(module, problem, iterations):
    """Returns a program in which a config's numbers are traced: configs that differ only in numbers
    share the program."""

    @jax.jit
    def run(config, key):
        learner = module.make(config, problem)

        def step(state, _):
            after, metrics = learner.step(state)
            return after, (metrics, state.params)

        return jax.lax.scan(step, learner.init(key), None, length=iterations)

    return run


def train(module, config, problem, iterations):
    state, (metrics, history) = program(module, problem, iterations)(
        as_arrays(config), jax.random.key(0)
    )
    return state, metrics, history


def accuracy(problem, params):
    """Returns the share of cues that the policy's mode names, and the lowest log-probability of a
    right action."""
    distribution, _ = problem.apply(params, jnp.array([[-1.0], [1.0]]))
    return float((distribution.mode() == jnp.array([0, 1])).mean()), float(
        distribution.log_prob(jnp.array([0, 1])).min()
    )


def drawn(shapes, scale, ones=(), seed=0):
    """Returns a tree of normal numbers times `scale`, around 1 in arrays of `ones` dimensions."""
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray((x.ndim in ones) + scale * generator.normal(size=x.shape), x.dtype),
        shapes,
    )


def norm(tree):
    """Returns the Euclidean norm of all arrays of a tree, in 64 bits."""
    return np.sqrt(
        sum(np.square(np.asarray(leaf, np.float64)).sum() for leaf in jax.tree.leaves(tree))
    )
