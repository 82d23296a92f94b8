"""Tests structured observations, masks, several choices and squashed actions, in complete
problems."""

import gymnasium
import gymnax.environments.spaces as spaces_of_gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shapes
import tiny
from probes import AlwaysTruncated, MatchCueContinuous
from structured import NoneLegal, Structured, TwoChoices, problem_of
from tables import cases, slow

from jaxrl_po import control
from jaxrl_po.algorithms import ppo, trpo
from jaxrl_po.backend import here
from jaxrl_po.cli import launch, sweep
from jaxrl_po.config import ConfigError
from jaxrl_po.control import networks
from jaxrl_po.control.normalizer import Normalizer
from jaxrl_po.control.spaces import box_actions, read_spaces
from jaxrl_po.control.statistics import OBSERVATION_STATISTICS, Statistics, normalize
from jaxrl_po.distributions import MultiCategorical
from jaxrl_po.run.host import vector_envs
from jaxrl_po.types import CollectorState

Box = spaces_of_gymnax.Box


def trained(module, problem, iterations, **config):
    learner = module.make(module.Config(**config), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    sample, update = jax.jit(learner.sample), jax.jit(learner.update)
    for _ in range(iterations):
        state, batch = sample(state)
        state, metrics = update(state, batch)
    assert sample._cache_size() == update._cache_size() == 1
    return state, metrics, batch


def collected(problem):
    """Returns parameters, the collector after a batch, and the batch."""
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    return params, *jax.jit(problem.collect)(params, collector, jax.random.key(1))


def test_a_dictionary_is_read_by_its_meaning():
    seen = control.adapt(Structured()).spaces.observation
    assert isinstance(seen, control.Observation)
    assert sorted(seen.policy) == ["image", "vector"]
    assert sorted(seen.critic) == ["image", "privileged_state", "vector"]
    assert seen.policy["image"].dtype == jnp.uint8
    assert seen.legal.shape == (4,)
    assert seen.legal.dtype == bool


def test_flags_are_observed_as_numbers():
    flags = read_spaces("flags", gymnasium.spaces.MultiBinary(3), gymnasium.spaces.Discrete(2))
    assert flags.observe(np.array([1, 0, 1])).tolist() == [1.0, 0.0, 1.0]


def test_observation_without_a_part_is_refused():
    pair = gymnasium.spaces.Tuple([gymnasium.spaces.Box(0.0, 1.0, (2,))] * 2)
    observe = read_spaces("pair", pair, gymnasium.spaces.Discrete(2)).observe
    with pytest.raises(ValueError, match="shorter"):
        observe((np.zeros(2),))


def test_bounds_of_a_matrix_of_actions_are_paired():
    """Each lower bound is below the upper bound of its own component alone."""
    bounds = [[5.0, 0.0], [3.0, 1.0]], [[6.0, 1.0], [4.0, 2.0]]
    actions = box_actions("matrix", *bounds, (2, 2))
    np.testing.assert_allclose(actions.to_action(jnp.zeros(4)), [[5.5, 0.5], [3.5, 1.5]])
    np.testing.assert_allclose(actions.to_action(jnp.full(4, 0.5)), [[5.75, 0.75], [3.75, 1.75]])


@cases("module", ppo, slow(trpo))
def test_every_method_keeps_to_the_legal_actions(module):
    config = {"num_minibatches": 2} if module is ppo else {}
    problem = problem_of(Structured(), normalize_observations=True)
    _, metrics, batch = trained(module, problem, 3, **config)
    assert all(np.isfinite(x.metric()).all() for x in metrics.values() if float(x.count))
    assert np.all(batch.reward == 1.0)  # the legal action was taken in every step
    np.testing.assert_allclose(batch.log_prob, 0.0, atol=1e-6)  # the legal action had probability 1
    assert float(metrics["frac_no_action"].metric()) == 0.0
    if module is trpo:
        # A single legal action leaves no decision: no step is taken, and 0 · log 0 gives no NaN.
        assert float(metrics["exact_kl"].metric()) == 0.0


def test_statistics_cover_numbers_and_frames_not_maps_masks():
    _, collector, batch = collected(problem_of(Structured(), normalize_observations=True))
    policy, critic = collector.replicated["observation_statistics"]
    assert policy["image"] == ()
    assert critic["privileged_state"].mean[1] == pytest.approx(10.0 * 12 / 16, rel=0.2)
    seen = normalize(collector, jax.tree.map(lambda x: x[0, 0], batch.inputs))
    assert seen.policy["image"].dtype == jnp.uint8
    assert batch.inputs.legal.dtype == bool
    frame = jnp.full((40, 40, 4), 255, jnp.uint8)
    statistics = Statistics(True, scale_rewards=False, discount=0.99, target=here())
    empty = statistics.init(frame, 2)
    # Before any data, the statistics scale a frame as a network scales its bytes.
    np.testing.assert_allclose(normalize(empty, frame), 1.0, rtol=2e-4)
    half = Normalizer(jnp.int32(9), jnp.full(frame.shape, 0.5), jnp.full(frame.shape, 0.04))
    known = CollectorState({}, {OBSERVATION_STATISTICS: half})
    np.testing.assert_allclose(normalize(known, frame), 0.5 / (0.2 + 1e-4), rtol=1e-5)
    off = jnp.zeros((2, 3), bool)
    known, _ = statistics.update(empty, jnp.stack([frame[None].repeat(3, 0)] * 2), off * 1.0, off)
    np.testing.assert_allclose(known.replicated[OBSERVATION_STATISTICS].mean, 1.0)


def test_the_critic_alone_reads_what_is_privileged():
    problem = problem_of(Structured())

    @jax.jit
    def outputs(key):
        params, collector = problem.init(key)
        seen = collector.sharded["environments"].observation
        changed = seen._replace(critic=seen.critic | {"privileged_state": jnp.full((8, 2), 7.0)})
        moved = changed._replace(policy=seen.policy | {"vector": jnp.full((8, 1), 7.0)})
        return [problem.apply(params, inputs) for inputs in (seen, changed, moved)]

    (before, value), (after, other), (_, last) = outputs(jax.random.key(0))
    np.testing.assert_array_equal(before.logits, after.logits)
    assert not np.allclose(value, other)
    np.testing.assert_array_equal(other, last)


@pytest.mark.usefixtures("trace_only")
def test_state_without_legal_action_ends_the_run(tmp_path, capsys, monkeypatch):
    zeros = shapes.zeros

    def ones(shape):
        made = zeros(shape)
        return made if jnp.issubdtype(made.dtype, jax.dtypes.prng_key) else jnp.ones_like(made)

    monkeypatch.setattr(shapes, "zeros", ones)  # states without a legal action are then counted too
    (tmp_path / "stuck.py").write_text("from structured import NoneLegal\n")
    arguments = [*tiny.CONTROL, f"--env={tmp_path}/stuck.py:NoneLegal"]
    assert launch.control([*arguments, f"--out={tmp_path}/run"]) != 0
    assert "seed 0: no action was legal in some state of iteration 1 " in capsys.readouterr().err
    swept = [*tiny.SWEPT, f"--env={tmp_path}/stuck.py:NoneLegal", "--evaluations=1"]
    swept += ["--config.learning_rate=1e-3,1e-2", f"--out={tmp_path}/sweep"]
    assert sweep.main(swept) == 1
    assert "seed 0: no action was legal in some state of iteration" in capsys.readouterr().err


def test_groups_and_vines_take_masks():
    remembering = control.NetworkSettings(width=8, depth=1, memory="gru")
    groups = control.make_groups(
        Structured(), num_prompts=2, group_size=2, num_steps=6, network=remembering
    )
    params, _, batch = collected(groups)
    assert batch.score.tolist() == [[5.0, 5.0], [5.0, 5.0]]
    replayed, _ = jax.jit(groups.apply)(params, batch.inputs)
    np.testing.assert_allclose(replayed.entropy()[batch.mask], 0.0, atol=1e-6)
    assert float(batch.metrics["frac_no_action"].metric()) == 0.0
    sizes = {"num_envs": 2, "num_steps": 5, "num_states": 2, "num_branches": 2, "horizon": 3}
    *_, batch = collected(control.make_vine(NoneLegal(), **sizes))
    some = np.asarray(batch.inputs.legal).any(axis=-1)
    assert some.any()
    np.testing.assert_allclose(batch.log_prob[some], 0.0, atol=1e-6)
    assert float(batch.metrics["frac_no_action"].metric()) == pytest.approx(1 / 5)


def test_two_choices_at_once_are_played():
    problem = problem_of(TwoChoices())
    params, _, batch = collected(problem)
    action, cue = np.asarray(batch.action), np.asarray(batch.inputs[..., 0]) > 0
    right = np.stack([action[..., 0] == cue, action[..., 1] == 2 * ~cue])
    assert 0.0 < right.mean() < 1.0
    np.testing.assert_array_equal(batch.reward, right.mean(axis=0))
    assert isinstance(jax.jit(problem.apply)(params, batch.inputs)[0], MultiCategorical)


def test_squashed_policy_is_evaluated_by_greedy_action():
    network = control.NetworkSettings(width=8, depth=1, tanh_squash=True)
    env = MatchCueContinuous()
    problem = problem_of(env, network)
    params, collector = jax.jit(problem.init)(jax.random.key(0))
    # The policy has a mean of 2 before tanh, for every cue.
    head = params.policy["params"]["head"]["Dense_0"]
    head["kernel"], head["bias"] = jnp.zeros_like(head["kernel"]), jnp.full(1, 2.0)
    evaluate = control.make_evaluate(env, problem, num_episodes=64, max_steps=5)
    result = jax.jit(evaluate)(params, collector, jax.random.key(0))
    expected = {-((np.tanh(2.0) - cue) ** 2) for cue in (-0.5, 0.5)}
    np.testing.assert_allclose(
        sorted(set(np.round(result["return"], 5).tolist())), sorted(expected), atol=1e-4
    )
    # Samples are squashed as well.
    batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))[1]
    played, cue = np.tanh(batch.action[..., 0]), batch.inputs[..., 0]
    np.testing.assert_allclose(batch.reward, -((played - 0.5 * cue) ** 2), rtol=1e-4, atol=1e-5)


def test_a_mask_must_fit_the_actions():
    class Short(Structured):
        def observation(self, state):
            return super().observation(state) | {"action_mask": jnp.ones(3, bool)}

    with pytest.raises(ConfigError, match=r"action_mask must have the shape \[4\]"):
        control.adapt(Short())


def test_masks_and_privileged_values_are_observation_entries():
    box = gymnasium.spaces.Box(0.0, 1.0, (2,))
    for inner in ("action_mask", "privileged_state"):
        nested = gymnasium.spaces.Dict({"agent": gymnasium.spaces.Dict({"o": box, inner: box})})
        with pytest.raises(ConfigError, match="must be entries of the observation itself"):
            read_spaces("nested", nested, gymnasium.spaces.Discrete(2))


class Spoiled(Structured):
    """Environment whose reward after an illegal action is NaN."""

    def reward(self, state, action):
        return jnp.where(super().reward(state, action) > 0, 1.0, jnp.nan)


def test_vine_tries_illegal_actions_with_finite_kl():
    vine = {"num_envs": 2, "num_steps": 4, "num_states": 2, "horizon": 3}
    _, metrics, _ = trained(trpo, control.make_vine(Spoiled(), **vine), 2)
    for name in ("kl", "exact_kl"):
        assert np.isfinite(metrics[name].metric())
    assert float(metrics["skipped"].value()) == 0.0


def test_tanh_is_refused_for_unbounded_spaces():
    class Free(MatchCueContinuous):
        def action_space(self, params=None):
            return Box(-jnp.inf, jnp.inf, (1,))

    with pytest.raises(ConfigError, match="tanh_squash: must be off where actions are unbounded"):
        problem_of(Free(), control.NetworkSettings(tanh_squash=True))


@cases(
    "spaces, message",
    ({"num_actions": 0}, "^env: spaces must have one of num_actions"),
    ({"observation": None}, "^env: spaces.observation must be the shapes and dtypes"),
)
def test_an_environment_must_be_what_its_spaces_say(spaces, message):
    environment = control.adapt(AlwaysTruncated())
    broken = environment._replace(spaces=environment.spaces._replace(**spaces))
    with pytest.raises(ConfigError, match=message):
        control.adapt(broken)


def test_reset_must_return_what_the_spaces_say():
    environment = control.adapt(AlwaysTruncated())
    nine = environment.spaces._replace(observation=jax.ShapeDtypeStruct((9,), jnp.float32))
    problem = control.make_problem(environment._replace(spaces=nine), num_envs=2, num_steps=2)
    with pytest.raises(ConfigError, match=r"^env: spaces.* that reset returns, \[1\], got \[9\]"):
        jax.eval_shape(problem.init, jax.random.key(0))


@cases(
    "low, high, shape, scaled",
    (0, 255, (4, 4), True),
    (0, 255, (4, 4, 3), True),
    (0, 255, (8,), False),
    (0, 1, (8,), False),
    (0, 1, (4, 4), False),
    (1, 255, (4, 4), False),
)
def test_bytes_are_images_by_bounds_and_axes(low, high, shape, scaled):
    box = gymnasium.spaces.Box(low, high, shape, np.uint8)
    spaces = read_spaces("bytes", box, gymnasium.spaces.Discrete(2))
    kept = np.uint8 if scaled else np.float32
    assert spaces.observation.dtype == vector_envs._dtype(box) == kept
    ones = spaces.observe(np.ones(shape, np.uint8))
    torso = networks.Torso(hidden=(), observation_rank=len(shape))
    want = np.ones(np.prod(shape)) / (255 if scaled else 1)
    np.testing.assert_allclose(torso.apply({}, ones), want)
    statistics = Statistics(True, scale_rewards=False, discount=0.99, target=here())
    if scaled:
        with pytest.raises(ConfigError, match="normalize_observations: must be off"):
            statistics.init(spaces.observation, 2)
    else:
        kept = statistics.init(spaces.observation, 2).replicated[OBSERVATION_STATISTICS]
        assert kept.mean.shape == shape
