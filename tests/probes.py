"""Environments whose values are known by hand, in gymnax's own interface."""

import jax
import jax.numpy as jnp
from flax import struct
from gymnax.environments import environment, spaces


@struct.dataclass
class State(environment.EnvState):
    time: int
    cue: jax.Array


@struct.dataclass
class Params(environment.EnvParams):
    max_steps_in_episode: int = 5


class Probe(environment.Environment):
    """One cue in {−1, +1}, redrawn at each reset; reward and termination are given by the subclass."""

    num_actions = 2

    @property
    def default_params(self):
        return Params()

    def reset_env(self, key, params):
        cue = jnp.where(jax.random.bernoulli(key), 1.0, -1.0)
        state = State(time=0, cue=cue)
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
    """Reward 1 for ever, cut every 5 steps: V = 1 / (1 − γ), which only bootstrapping at the limit can find."""


class AlwaysTerminated(Probe):
    """Reward 1, over after one step: V = 1; the limit never matters."""

    def terminated(self, state):
        return jnp.bool_(True)


class CueReward(AlwaysTerminated):
    """The reward is the cue: V(cue) = cue."""

    def reward(self, state, action):
        return state.cue


class MatchCue(AlwaysTerminated):
    """Reward 1 for the action that names the cue: the best return is 1, chance gets ½."""

    def reward(self, state, action):
        return (action == (state.cue > 0)).astype(jnp.float32)


class MatchCueContinuous(AlwaysTerminated):
    """Reward −(a − cue / 2)², with a box of half range 1: the best mean action is half the cue."""

    num_actions = 1

    def reward(self, state, action):
        return -jnp.square(action[0] - 0.5 * state.cue)

    def action_space(self, params=None):
        return spaces.Box(-1.0, 1.0, (1,))


class NanReward(Probe):
    """Rewards that are not numbers: every update must be skipped."""

    def reward(self, state, action):
        return jnp.float32(jnp.nan)
