"""Tests contracts of a user's environment and networks: accepted results, and mistakes that an
error names."""

from typing import ClassVar

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import struct
from gymnax.environments import spaces
from probes import MatchCue, Params
from tables import cases

from jaxrl_po import control
from jaxrl_po.algorithms import ppo
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import Categorical

FIELDS = ("observation", "state", "reward", "terminated", "truncated", "info")


@struct.dataclass
class State:
    time: jax.Array
    kind: str = struct.field(pytree_node=False, default="start")


class Plain:
    """Environment with two discrete actions and a vector observation; `changes` alter the results
    of `step`."""

    default_params = Params()
    seen = np.zeros(3, np.float32)
    space = spaces.Box(0.0, 1.0, (3,))

    def __init__(self, **changes):
        self.changes = changes

    def reset(self, key, params=None):
        results = self.seen, State(jnp.int32(0))
        return self.changes["reset"](*results) if "reset" in self.changes else results

    def step(self, key, state, action, params=None):
        state = state.replace(time=state.time + 1)
        info = {"final_observation": self.seen}
        results = (self.seen, state, 1.0, state.time >= 4, jnp.bool_(False), info)
        return tuple(
            self.changes.get(field, lambda x: x)(x)
            for field, x in zip(FIELDS, results, strict=True)
        )

    def action_space(self, params=None):
        return spaces.Discrete(2)

    def observation_space(self, params=None):
        return self.space


class Parts(Plain):
    seen: ClassVar = {"a": np.zeros(3, np.float32), "b": np.int32(1)}
    space = spaces.Dict({"a": spaces.Box(0.0, 1.0, (3,)), "b": spaces.Discrete(4)})


class Image(Plain):
    seen = np.zeros((4, 4, 1), np.uint8)
    space = gymnasium.spaces.Box(0, 255, (4, 4, 1), np.uint8)


def without_b(seen):
    return {"a": seen["a"]}


def final(change):
    return lambda info: {"final_observation": change(info["final_observation"])}


BROKEN = [
    (Plain(terminated=lambda x: x[None]), r"terminated of step must be of shape \[\], got \[1\]"),
    (Plain(terminated=lambda _: None), "terminated must be bool, got nothing"),
    (Plain(reward=lambda _: jnp.ones(2)), r"reward of step must be of shape \[\], got \[2\]"),
    (Plain(reward=lambda _: {"paid": 1.0}), r"reward must be float, got {'paid': 'float'}"),
    (
        Plain(state=lambda x: State(x.time * 1.0)),
        r"state.time of step must be int32\[\], as from reset, got float32\[\]",
    ),
    (Plain(state=lambda x: x.replace(kind="end")), r"state of step must be .*start.*got .*end"),
    (Plain(state=lambda x: (x.time,)), r"state.time of step must be int32\[\], .* got nothing"),
    (Plain(state=lambda _: "over"), "state of step must be a pytree of arrays, got str"),
    (
        Parts(observation=without_b),
        r"observation of step must be .*'b': .* got {'a': 'float32\[3\]'}",
    ),
    (
        Parts(info=final(without_b)),
        r"final_observation must be .*'b': .* got {'a': 'float32\[3\]'}",
    ),
    (Parts(reset=lambda x, s: (without_b(x), s)), "observation of reset must be .*'b': "),
    (Plain(observation=lambda x: {"a": x}), r"observation of step must be float32\[3\], .*'a'"),
    (
        Parts(observation=lambda x: x | {"a": jnp.zeros(4)}),
        r"observation\['a'\] of step must be float32\[3\], as from reset, got float32\[4\]",
    ),
    (
        Image(observation=lambda x: x / 255),
        r"observation of step must be uint8\[4, 4, 1\], as from reset, got float32\[4, 4, 1\]",
    ),
    (Plain(info=lambda _: None), "info of step must hold final_observation"),
    (Plain(reset=lambda x, s: (x, s, {})), r"reset must return \(observation, state\) .*got 3"),
]


@pytest.mark.parametrize(("env", "message"), BROKEN)
def test_slips_are_named_before_anything_compiles(env, message):
    with pytest.raises(ConfigError, match=f"^env: {type(env).__name__}: {message}"):
        control.make_problem(env, num_envs=2, num_steps=2)


def collected(make):
    """Returns the shapes of a collected batch."""
    problem = make()
    return jax.eval_shape(lambda key: problem.collect(*problem.init(key), key), jax.random.key(0))


def factories(env):
    """Returns traced programs that step the environment."""
    vine = {"num_states": 2, "horizon": 2}
    sizes = {"num_envs": 2, "num_steps": 2}
    start = control.make_problem(Plain(), **sizes)

    def played(make, **options):
        play = make(env, start, num_episodes=2, max_steps=3, **options)
        return jax.eval_shape(lambda key: play(*start.init(key), key), jax.random.key(0))

    return {
        "problem": lambda: collected(lambda: control.make_problem(env, **sizes)),
        "groups": lambda: collected(
            lambda: control.make_groups(env, num_prompts=2, group_size=2, num_steps=2)
        ),
        "vine": lambda: collected(lambda: control.make_vine(env, **sizes, **vine)),
        "evaluate": lambda: played(control.make_evaluate),
        "record": lambda: played(control.make_record),
    }


@cases("factory", "problem", "groups", "vine", "evaluate", "record")
def test_every_factory_names_a_slip(factory):
    for env in (Plain(terminated=lambda x: x[None]), spoilt(terminated=jnp.zeros(1, bool))):
        with pytest.raises(ConfigError, match=r"^env: \w+: terminated of step .* got \[1\]"):
            factories(env)[factory]()


def spoilt(after=lambda state: state, **changes):
    """Returns an `Environment` whose step returns another result."""
    sound = control.adapt(Plain())

    def step(key, state, action):
        state, transition = sound.step(key, state, action)
        return after(state), transition._replace(**changes)

    return sound._replace(step=step)


@cases(
    "env, message",
    (spoilt(lambda x: State(x.time * 1.0)), r"state.time of step must be int32\[\], .* float32"),
    (spoilt(observation=jnp.zeros(4)), r"observation of step must be float32\[3\], .*\[4\]"),
    (spoilt(final_observation={}), r"final_observation of step must be float32\[3\], .* nothing"),
    (spoilt(reward=jnp.zeros(1)), r"reward of step must be of shape \[\], got \[1\]"),
)
def test_functions_of_ones_own_are_checked_alike(env, message):
    with pytest.raises(ConfigError, match=f"^env: Environment: {message}"):
        factories(env)["problem"]()


@cases(
    "env",
    Plain(reward=lambda _: True),
    Plain(reward=lambda _: 1),
    Plain(reward=lambda _: jnp.ones(1, jnp.int32)),
    Plain(terminated=lambda x: x.astype(jnp.int32), truncated=lambda _: False),
    Plain(state=lambda x: x, reset=lambda x, s: (x, State(0))),
    Plain(info=lambda x: x | {"name": "plain", "text": object()}),
    Plain(observation=lambda x: x.astype(np.float16)),
    Parts(observation=lambda x: x | {"c": jnp.zeros(2)}),
    Image(),
    spoilt(reward=1),
    spoilt(final_observation=jnp.zeros(3, jnp.int32)),
    control.adapt(Plain())._replace(  # a weak type that the loop converts
        reset=lambda key: (jnp.zeros(3), 0),
        step=lambda key, state, action: (
            state + jnp.float32(1.0),
            control.Transition(jnp.zeros(3), 1, False, False, jnp.zeros(3)),
        ),
    ),
)
def test_harmless_types_stay_accepted(env):
    _, batch = factories(env)["problem"]()
    assert batch.reward.dtype == jnp.float32 or isinstance(env, control.Environment)
    assert batch.terminated.shape == (2, 2)


def test_a_state_may_hold_a_raw_key():
    """PureJaxRL uses raw keys: a run with raw keys passes raw keys to its environment."""

    class Keyed(Plain):
        def reset(self, key, params=None):
            return self.seen, jax.random.PRNGKey(0)

        def step(self, key, state, action, params=None):
            info = {"final_observation": self.seen}
            return self.seen, key, 1.0, jnp.bool_(False), jnp.bool_(False), info

    problem = control.make_problem(Keyed(), num_envs=2, num_steps=2)

    def collect(key):
        return problem.collect(*problem.init(key), key)[1]

    assert jax.eval_shape(collect, jax.random.PRNGKey(0)).reward.shape == (2, 2)
    with pytest.raises(ConfigError, match=r"state of step must be uint32\[2\], as from reset"):
        jax.eval_shape(collect, jax.random.key(0))


def test_results_of_a_step_may_be_any_sequence():
    class Listed(Plain):
        def step(self, *given):
            return iter(super().step(*given))

    assert control.adapt(Listed()).spaces.num_actions == 2


class Outputs(nn.Module):
    """Network whose output is logits, a column of values, or a policy with a column of values."""

    kind: str

    @nn.compact
    def __call__(self, observation):
        logits, column = nn.Dense(2)(observation), nn.Dense(1)(observation)
        both = Categorical(logits), column
        return {"logits": logits, "column": column, "both": both}[self.kind]


@cases(
    "env, modules, message",
    (gymnax.make("CartPole-v1"), {}, r"as in gymnax.make\(name\)\[0\]"),
    (object(), {}, "env: must have the interface of gymnax >= 1.0; object lacks reset, step"),
    (
        MatchCue(),
        {"policy": Outputs("logits")},
        r"wrap logits as jaxrl_po.distributions.Categorical",
    ),
    (
        MatchCue(),
        {"critic": Outputs("column")},
        r"one value for each observation.*drop a last axis of 1",
    ),
    (MatchCue(), {"actor_critic": Outputs("both")}, r"one value for each observation"),
)
def test_errors_of_a_contract_name_the_remedy(env, modules, message):
    def trace():
        problem = control.make_problem(env, num_envs=2, num_steps=4, **modules)
        learner = ppo.make(ppo.Config(num_minibatches=1), problem)
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))

    with pytest.raises(ConfigError, match=message):
        trace()


class Endless:
    """Environment without a bound on its episodes; its step is wrong in some tests."""

    default_params = None

    def __init__(self, values=6):
        self.values = values

    def reset(self, key, params=None):
        return jnp.zeros(1), jnp.int32(0)

    def step(self, key, state, action, params=None):
        info = {"final_observation": jnp.zeros(1)}
        return (jnp.zeros(1), state, 1.0, False, False, info)[: self.values]

    def action_space(self, params=None):
        return MatchCue().action_space()

    def observation_space(self, params=None):
        return MatchCue().observation_space()


@cases("values, message", (6, "add max_steps_in_episode"), (5, "got 5 values"))
def test_evaluation_needs_step_limit_after_valid_step(values, message):
    problem = control.make_problem(Endless(), num_envs=2, num_steps=2)
    with pytest.raises(ConfigError, match=message):
        control.make_evaluate(Endless(values), problem)
