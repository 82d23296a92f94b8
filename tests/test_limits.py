"""Tests limits of episodes, sizes of evaluations, and unusable spaces of actions."""

import math

import gymnasium
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from gymnax.environments import spaces
from probes import AlwaysTruncated, MatchCueContinuous, Params
from tables import cases

from jaxrl_po import control, language
from jaxrl_po.cli import launch
from jaxrl_po.config import ConfigError, check_size
from jaxrl_po.control.spaces import read_spaces
from jaxrl_po.dynamic_sampling import dynamic_sampling
from jaxrl_po.language import lora
from jaxrl_po.language.sampling import Decoding

ENV = AlwaysTruncated()
PROBLEM = control.make_problem(ENV, num_envs=2, num_steps=2)
ZERO = 0
NO_SIZE = [ZERO, -1, 2.5, 3.0, math.nan, math.inf, True, "3", np.zeros(2, int)]


@pytest.mark.parametrize("size", NO_SIZE, ids=repr)
def test_no_size_is_refused_wherever_it_is_given(size):
    task = language.tasks.addition(1)
    model = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8).build(
        task.tokenizer.size
    )
    groups = control.make_groups(ENV, num_prompts=2, group_size=2, num_steps=2)
    steps = jnp.zeros((5, 1)), jnp.zeros(5, jnp.int32)
    given = {
        "num_episodes": lambda **field: control.make_evaluate(ENV, PROBLEM, **field),
        "max_steps": lambda **field: control.make_evaluate(ENV, PROBLEM, **field),
        "max_steps ": lambda **field: control.make_record(ENV, PROBLEM, num_episodes=2, **field),
        "num_steps": lambda **field: control.with_demonstrations(PROBLEM, *steps, **field),
        "num_prompts": lambda **field: language.make_evaluate(task, model, **field),
        "num_samples": lambda **field: language.make_evaluate(task, model, **field),
        "max_generation_batches": lambda **field: dynamic_sampling(groups, **field),
        "k": lambda **field: language.evaluation.estimate_pass_at_k(jnp.array(2), 8, **field),
        "rank": lambda **field: lora.Lora(**field).validate(),
    }
    if size is ZERO:  # the setting ZERO requests only the greedy answers
        del given["num_samples"]
    for name, call in given.items():
        field = name.strip()
        with pytest.raises(ConfigError, match=rf"^{field}: must be a whole number in \["):
            call(**{field: size})


@cases("limit", 0, -1, 2.5, math.nan, -math.inf, ids=repr)
def test_an_episode_has_a_whole_number_of_steps(limit):
    message = r"max_steps_in_episode must be a whole number in \[1, inf\)"
    params = Params(max_steps_in_episode=limit)
    for make in (control.make_problem, control.make_groups, control.make_vine, control.adapt):
        with pytest.raises(ConfigError, match=f"^env: AlwaysTruncated: {message}"):
            make(ENV, env_params=params)
    with pytest.raises(ConfigError, match=r"^env: max_steps must be a whole number"):
        control.make_problem(control.adapt(ENV)._replace(max_steps=limit))


def test_limits_may_be_any_numbers_or_infinite():
    for limit in (7, 7.0, np.int64(7), np.float32(7.0), jnp.int32(7), jnp.float32(7.0)):
        assert control.adapt(ENV, Params(max_steps_in_episode=limit)).max_steps == 7
    endless = Params(max_steps_in_episode=math.inf)
    assert control.adapt(ENV, endless).max_steps is None
    with pytest.raises(ConfigError, match="env: must bound its episodes: add max_steps_in_episode"):
        control.make_evaluate(ENV, PROBLEM, env_params=endless)
    assert gymnax.make("BernoulliBandit-misc")[1].max_steps_in_episode == 100.0
    assert [check_size("n", n) for n in (3, np.int32(3))] == [3, 3]
    # A traced limit is used without a check.
    traced = jax.make_jaxpr(
        lambda limit: control.make_evaluate(
            ENV, PROBLEM, num_episodes=2, env_params=Params(max_steps_in_episode=limit)
        )(*PROBLEM.init(jax.random.key(0)), jax.random.key(1))
    )
    assert len(traced(5).out_avals) == 3


def test_warm_starts_and_budgets_are_checked():
    task = language.tasks.addition(1)
    model = language.ModelSettings(width=8, layers=1, heads=2, kv_heads=1, mlp_width=8).build(
        task.tokenizer.size
    )
    for field, value in (("steps", -1), ("batch_size", 0), ("steps", 2.5)):
        with pytest.raises(ConfigError, match=f"^{field}: must"):
            language.make_problem(task, model, warm=language.WarmStart(**{field: value}))
    for budget in (-1, 1, math.nan, 9.5):
        with pytest.raises(ConfigError, match=r"^max_new_tokens: must"):
            language.make_problem(task, model, max_new_tokens=budget)
        with pytest.raises(ConfigError, match=r"^max_new_tokens: must"):
            language.make_evaluate(task, model, decoding=Decoding(budget))


def test_the_limit_of_an_environment_is_one_line(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from probes import AlwaysTruncated, Params\n\n"
        "class Mine(AlwaysTruncated):\n"
        "    default_params = Params(max_steps_in_episode=0)\n"
    )
    command = [*tiny.CONTROL, f"--env={tmp_path}/mine.py:Mine", f"--out={tmp_path / 'run'}"]
    message = "env: Mine: max_steps_in_episode must be a whole number"
    with pytest.raises(ConfigError, match=message) as found:
        launch.control(command)
    assert "\n" not in str(found.value)
    assert not (tmp_path / "run").exists()


def spaced(action=None, observation=None):
    """Returns a probe whose spaces are replaced by other spaces."""

    class Spaced(MatchCueContinuous):
        def action_space(self, params=None):
            return super().action_space(params) if action is None else action

        def observation_space(self, params=None):
            return super().observation_space(params) if observation is None else observation

        def observation(self, state):
            shapes = control.spaces.example(self.observation_space())
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return Spaced()


def box(low, high, shape=(2,)):
    return spaces.Box(jnp.array(low, float), jnp.array(high, float), shape)


BOUNDS = "bounds of the action space Box must be numbers low <= high"


@cases(
    "action, message",
    (spaces.Box(1.0, -1.0, (1,)), f"{BOUNDS}, or infinite for none, got low 1 and high -1"),
    (box([-1.0, 2.0], [1.0, 1.0]), f"{BOUNDS}, .* got low 2 and high 1"),
    (spaces.Box(-1.0, math.nan, (1,)), f"{BOUNDS}, .* high nan"),
    (box([0.0, math.nan], [1.0, 1.0]), f"{BOUNDS}, .* low nan"),
    (box([0.0, math.inf], math.inf), f"{BOUNDS}, .* low inf and high inf"),
    (spaces.Box(-math.inf, -math.inf, (1,)), BOUNDS),
    (spaces.Box(-1.0, 1.0, (0,)), "components of the action space Box must be a whole number"),
    (spaces.Box(-1.0, 1.0, (3, 0)), "components of the action space Box must be .* got 0"),
    (spaces.Discrete(0), r"n of the action space Discrete must be .* in \[1, inf\), got 0"),
    (spaces.Discrete(2.5), "n of the action space Discrete must be a whole number"),
    ids=lambda x: "",
)
def test_a_space_without_an_action_is_refused(action, message):
    for make in (control.make_problem, control.make_groups, control.adapt):
        with pytest.raises(ConfigError, match=f"^env: Spaced: .*{message}"):
            make(spaced(action))


def test_choices_and_spaces_given_by_hand_hold_actions():
    seen, several = gymnasium.spaces.Box(0.0, 1.0, (1,)), gymnasium.spaces.MultiDiscrete([2, 3])
    several.nvec = np.array([2, 0])
    with pytest.raises(ConfigError, match="each n of nvec of the action space MultiDiscrete must"):
        read_spaces("host", seen, several)
    several.nvec = np.zeros(0, int)
    several._shape = (0,)
    with pytest.raises(ConfigError, match="the length of nvec of the action space MultiDiscrete"):
        read_spaces("host", seen, several)
    environment = control.adapt(ENV)
    for counts in ({"choices": (2, 0)}, {"action_size": -1}, {"num_actions": -1}):
        broken = environment.spaces._replace(**{"num_actions": 0} | counts)
        with pytest.raises(ConfigError, match=r"^env: counts of actions must be a whole"):
            control.make_problem(environment._replace(spaces=broken))


def test_infinite_bounds_and_single_actions_keep_their_meaning():
    found = control.adapt(spaced(box([-math.inf, 1.0], [math.inf, math.inf]))).spaces
    assert not found.bounded
    assert found.to_action(jnp.array([-5.0, -5.0])).tolist() == [-5.0, 1.0]
    fixed = control.adapt(spaced(box([-1.0, 3.0], [1.0, 3.0]))).spaces
    assert fixed.to_action(jnp.array([0.5, 0.5])).tolist() == [0.5, 3.0]
    assert control.adapt(spaced(spaces.Discrete(1))).spaces.num_actions == 1


@cases(
    "empty",
    spaces.Box(0.0, 1.0, (0,)),
    spaces.Box(0.0, 1.0, (4, 0)),
    spaces.Dict({}),
    spaces.Tuple(()),
    spaces.Dict({"a": spaces.Box(0.0, 1.0, (0,)), "b": spaces.Tuple(())}),
    spaces.Discrete(0),
    ids=["vector", "matrix", "dict", "tuple", "nested", "discrete"],
)
def test_an_observation_with_nothing_in_it_is_refused(empty):
    message = "observation must have at least one element|n of the observation space Discrete"
    with pytest.raises(ConfigError, match=f"^env: Spaced: .*({message})"):
        control.make_problem(spaced(observation=empty))
    some = spaces.Dict({"none": empty, "some": spaces.Box(0.0, 1.0, (1,))})
    if not isinstance(empty, spaces.Discrete):
        control.make_problem(spaced(observation=some))
    nothing = control.adapt(ENV).spaces._replace(observation=jnp.zeros((2, 0)))
    with pytest.raises(ConfigError, match="observation must have at least one element"):
        control.make_problem(control.adapt(ENV)._replace(spaces=nothing))


def test_bounds_of_observations_are_not_read():
    bandit = gymnax.make("SimpleBandit-bsuite")[0]
    seen = bandit.observation_space(bandit.default_params)
    assert np.all(np.asarray(seen.low) == np.asarray(seen.high))
    for env in (
        bandit,
        spaced(observation=spaces.Box(1.0, -1.0, (1,))),
        spaced(observation=spaces.Box(math.nan, math.nan, (1,))),
    ):
        problem = control.make_problem(env, num_envs=2, num_steps=2)
        jax.eval_shape(
            lambda key, problem=problem: problem.collect(*problem.init(key), key), jax.random.key(0)
        )
