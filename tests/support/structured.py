"""Defines environments with structured observations, legal actions and several choices at once."""

import types

import gymnax.environments.spaces as spaces_of_gymnax
import jax.numpy as jnp
import numpy as np
from probes import AlwaysTerminated, AlwaysTruncated, Probe

from jaxrl_po import control

SMALL = control.NetworkSettings(width=8, depth=1)
Box, Dict, Discrete = spaces_of_gymnax.Box, spaces_of_gymnax.Dict, spaces_of_gymnax.Discrete


class Structured(AlwaysTruncated):
    """Environment with a byte image, a vector, a critic-only part, and one legal action of four.

    The legal action depends on the state alone, through the sign of the cue and the parity of the
    time, so that a policy that ignores the mask plays a legal action one time in four.
    """

    num_actions = 4

    def observation(self, state):
        legal = 2 * (state.time % 2) + (state.cue > 0)
        return {
            "image": jnp.full((5, 5, 2), 100, jnp.uint8),
            "vector": state.cue[None] * 3.0,
            "privileged_state": jnp.stack([state.cue, 5.0 * state.time]),
            "action_mask": jnp.arange(4) == legal,
        }

    def reward(self, state, action):
        legal = 2 * (state.time % 2) + (state.cue > 0)
        return (action == legal).astype(jnp.float32)

    def action_space(self, params=None):
        return Discrete(4)

    def observation_space(self, params=None):
        return Dict(
            {
                "image": Box(0, 255, (5, 5, 2), jnp.uint8),
                "vector": Box(-3.0, 3.0, (1,)),
                "privileged_state": Box(-1.0, 9.0, (2,)),
                "action_mask": Box(0, 1, (4,), jnp.bool_),
            }
        )


class NoneLegal(Structured):
    """Environment without a legal action at the second step of an episode."""

    def observation(self, state):
        seen = super().observation(state)
        return seen | {"action_mask": seen["action_mask"] & (state.time != 1)}


class TwoChoices(AlwaysTerminated):
    """Environment that rewards the cue as the first choice and its opposite as the second."""

    def reward(self, state, action):
        cue = state.cue > 0
        right = jnp.stack([action[0] == cue, action[1] == 2 * ~cue])
        return right.mean(dtype=jnp.float32)

    def action_space(self, params=None):
        return types.SimpleNamespace(nvec=np.array([2, 3]), shape=(2,))


class Everything(Probe):
    """Environment with structured observations, legal actions, two choices and additional
    observations for the critic.

    The reward is 1 for each choice that names the cue, which is shown only at the start; the second
    of three options is never legal.
    """

    def observation(self, state):
        first = jnp.asarray(state.time) == 0
        return {
            "cue": jnp.where(first, state.cue, 0.0)[None],
            "board": jnp.full((4, 4, 1), 51 * (1 + state.time), jnp.uint8),
            "privileged_state": jnp.stack([state.cue, state.time + 0.0]),
            "action_mask": jnp.array([True, True, True, False, True]),
        }

    def reward(self, state, action):
        cue = state.cue > 0
        right = jnp.stack([action[0] == cue, action[1] == 2 * cue])
        return right.sum(dtype=jnp.float32)

    def action_space(self, params=None):
        return types.SimpleNamespace(nvec=np.array([2, 3]), shape=(2,))

    def observation_space(self, params=None):
        return spaces_of_gymnax.Dict(
            {
                "cue": spaces_of_gymnax.Box(-1.0, 1.0, (1,)),
                "board": spaces_of_gymnax.Box(0, 255, (4, 4, 1), jnp.uint8),
                "privileged_state": spaces_of_gymnax.Box(-1.0, 5.0, (2,)),
                "action_mask": spaces_of_gymnax.Box(0, 1, (5,), jnp.bool_),
            }
        )


def problem_of(env, network=SMALL, **settings):
    sizes = {"num_envs": 8, "num_steps": 8} | settings
    return control.make_problem(env, **sizes, network=network)
