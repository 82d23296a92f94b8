"""The control family on probes with known answers, and what each method promises."""

import dataclasses
import functools

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from probes import AlwaysTruncated, CueReward, MatchCue, MatchCueContinuous, NanReward

from jaxrl_po import control, losses
from jaxrl_po.algorithms import a2c, actor_critic, dapo, grpo, npg, ppo, reinforce, trpo
from jaxrl_po.config import ConfigError, as_arrays
from jaxrl_po.types import ActorCritic

CART_POLE = gymnax.make("CartPole-v1")[0]
FIT = {"value_epochs": 4, "value_minibatches": 1, "value_learning_rate": 1e-2}


NATURAL = [pytest.param(npg, marks=pytest.mark.slow), trpo]  # both share one step function


@functools.cache
def program(module, problem, iterations):
    """Numbers of a config are traced: configs that differ only in numbers share a program."""

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
    """Share of the two cues that the policy's mode names."""
    distribution, _ = problem.apply(params, jnp.array([[-1.0], [1.0]]))
    return float((distribution.mode() == jnp.array([0, 1])).mean()), float(
        distribution.log_prob(jnp.array([0, 1])).min()
    )


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (reinforce, reinforce.Config(**FIT)),
        (reinforce, reinforce.Config(**FIT, baseline="none")),
        (reinforce, reinforce.Config(**FIT, baseline="batch_mean")),
        (a2c, a2c.Config(learning_rate=1e-2)),
        (npg, npg.Config(**FIT)),
        (trpo, trpo.Config(**FIT)),
        (
            ppo,
            ppo.Config(
                clip=False, penalty="adaptive", learning_rate=1e-2, num_epochs=4, num_minibatches=1
            ),
        ),
        (
            ppo,
            ppo.Config(
                clip=False, penalty="satisfied", learning_rate=1e-2, num_epochs=4, num_minibatches=1
            ),
        ),
    ],
    ids=[
        "reinforce",
        "no-baseline",
        "batch-mean",
        "a2c",
        "npg",
        "trpo",
        "ppo-adaptive",
        "ppo-satisfied",
    ],
)
def test_policy_learns_to_name_the_cue(module, config):
    problem = control.make_problem(MatchCue(), num_envs=16, num_steps=20)
    state, metrics, _ = train(module, config, problem, 40)
    assert accuracy(problem, state.params)[0] == 1.0
    assert np.isfinite(metrics["kl"].metric()).all()
    assert float(metrics["skipped"].value().max()) == 0.0


@pytest.mark.parametrize("module", NATURAL)
def test_natural_steps_move_a_gaussian(module):
    problem = control.make_problem(MatchCueContinuous(), num_envs=32, num_steps=16)
    state, _, _ = train(module, module.Config(**FIT, max_kl=0.05), problem, 60)
    mean = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    np.testing.assert_allclose(mean, [-0.5, 0.5], atol=0.2)


@pytest.mark.parametrize(
    ("module", "config"),
    [
        (reinforce, reinforce.Config(**FIT)),
        (trpo, trpo.Config(**FIT)),
        (a2c, a2c.Config(learning_rate=1e-2, gamma=0.8, entropy_coefficient=0.0)),
    ],
)
def test_critics_learn_what_they_should(module, config):
    problem = control.make_problem(CueReward(), num_envs=16, num_steps=20)
    state, _, _ = train(module, config, problem, 100)
    value = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[1]
    np.testing.assert_allclose(value, [-1.0, 1.0], atol=0.15)


def test_separate_critic_bootstraps_at_the_time_limit():
    """Reward 1 for ever, cut every 5 steps: V = 1 / (1 − .8) = 5."""
    problem = control.make_problem(AlwaysTruncated(), num_envs=16, num_steps=20)
    state, _, _ = train(reinforce, reinforce.Config(**FIT, gamma=0.8), problem, 100)
    np.testing.assert_allclose(
        problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[1], 5.0, atol=0.4
    )


def exact_kl(problem, before, after, observations):
    old, new = (problem.apply(ActorCritic(params), observations)[0] for params in (before, after))
    return old.kl(new).mean()


def test_trpo_stays_within_its_region_and_gains():
    problem = control.make_problem(CART_POLE, num_envs=8, num_steps=64)
    _, metrics, history = train(trpo, trpo.Config(max_kl=0.02, **FIT), problem, 30)
    accepted = np.asarray(metrics["accepted"].value()) > 0
    assert accepted.mean() > 0.8
    assert (np.asarray(metrics["exact_kl"].value())[accepted] <= 0.02).all()
    assert (np.asarray(metrics["gain"].value())[accepted] > 0).all()
    assert (np.asarray(metrics["predicted_gain"].value())[accepted] > 0).all()
    # The reported KL is that of the policies before and after, on the states of the batch.
    moved = [
        not np.array_equal(*(jax.tree.leaves(history.policy)[0][i : i + 2])) for i in range(29)
    ]
    np.testing.assert_array_equal(moved, accepted[:29])


def test_natural_policy_gradient_takes_the_step_that_trpo_checks():
    """With a line search that accepts at once, both are the same step."""
    problem = control.make_problem(CART_POLE, num_envs=8, num_steps=64)
    shared = {**FIT, "max_kl": 1e-4}
    (one, natural, _), (other, searched, _) = (
        train(module, module.Config(**shared), problem, 1) for module in (npg, trpo)
    )
    assert float(searched["backtracks"].value()[0]) == 0.0
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(other.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    # The quadratic model of the KL is accurate for a step this small.
    np.testing.assert_allclose(natural["exact_kl"].value(), 1e-4, rtol=0.3)


def test_impossible_steps_leave_the_policy_bit_exact():
    class Constant(CueReward):
        """Every action earns the same, always: no gradient."""

        def reward(self, state, action):
            return jnp.float32(1.0)

    base = control.make_problem(Constant(), num_envs=8, num_steps=8)

    def collect(params, collector, key):
        """With an exact critic, so that the advantage is 0 everywhere."""
        collector, batch = base.collect(params, collector, key)
        return collector, batch._replace(value=jnp.ones_like(batch.value))

    problem = base._replace(collect=collect)
    config = trpo.Config(value_learning_rate=1e-30, normalize_advantage=False, gamma=0.0)
    state, metrics, history = train(trpo, config, problem, 2)
    assert metrics["accepted"].value().tolist() == [0.0, 0.0]
    assert metrics["exact_kl"].value().tolist() == [0.0, 0.0]
    for first, last in zip(
        jax.tree.leaves(history.policy), jax.tree.leaves(state.params.policy), strict=True
    ):
        np.testing.assert_array_equal(first[0], last)


@pytest.mark.parametrize("module", [reinforce, *NATURAL, a2c, grpo])
def test_rewards_that_are_not_numbers_move_nothing(module):
    config = module.Config(num_epochs=1) if module is grpo else module.Config()
    problem = (
        control.make_groups(NanReward(), num_prompts=2, group_size=2, num_steps=6)
        if module is grpo
        else control.make_problem(NanReward(), num_envs=4, num_steps=16)
    )
    state, metrics, history = train(module, config, problem, 2)
    assert (np.asarray(metrics["skipped"].total) > 0).all()
    for first, last in zip(
        jax.tree.leaves(history.policy), jax.tree.leaves(state.params.policy), strict=True
    ):
        np.testing.assert_array_equal(first[0], last)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_shared_parameters_are_refused_where_they_cannot_work():
    shared = control.from_settings(
        CART_POLE, control.Settings(num_envs=4, num_steps=8, shared_torso=True)
    )
    for module in (reinforce, npg, trpo):
        learner = module.make(module.Config(value_minibatches=1), shared)
        with pytest.raises(ConfigError, match="shared_torso must be off"):
            jax.eval_shape(
                lambda key, learner=learner: learner.step(learner.init(key)), jax.random.key(0)
            )
    state, _, _ = train(ppo, ppo.Config(), shared, 1)
    assert state.params.value == ()
    learner = a2c.make(a2c.Config(), shared)
    assert (
        jax.eval_shape(
            lambda key: learner.step(learner.init(key))[0], jax.random.key(0)
        ).params.value
        == ()
    )


def kl_problem():
    return control.make_problem(CART_POLE, num_envs=8, num_steps=32)


def test_fixed_penalty_holds_the_policy_back():
    problem = kl_problem()
    far, near = (
        train(
            ppo,
            ppo.Config(clip=False, penalty="fixed", kl_coefficient=beta, learning_rate=1e-2),
            problem,
            1,
        )[1]
        for beta in (0.0, 100.0)
    )
    assert float(near["exact_kl"].value()[0]) < 0.3 * float(far["exact_kl"].value()[0])
    assert near["kl_coefficient"].value().tolist() == [100.0]


@pytest.mark.parametrize("direction", ["old_new", pytest.param("new_old", marks=pytest.mark.slow)])
def test_adaptive_penalty_doubles_and_halves(direction):
    config = ppo.Config(
        clip=False,
        penalty="adaptive",
        kl_direction=direction,
        learning_rate=1e-2,
        num_epochs=4,
        target_kl=0.01,
    )
    _, metrics, _ = train(ppo, config, kl_problem(), 12)
    beta, kl = (np.asarray(metrics[name].value()) for name in ("kl_coefficient", "exact_kl"))
    expected = np.where(kl > 0.015, 2.0, np.where(kl < 0.01 / 1.5, 0.5, 1.0))
    np.testing.assert_allclose(beta[1:] / beta[:-1], expected[:-1])
    assert len(set(expected.tolist())) > 1


def test_penalty_is_adapted_until_satisfied_or_the_cap():
    config = ppo.Config(
        clip=False,
        penalty="satisfied",
        learning_rate=1e-2,
        num_epochs=4,
        target_kl=0.01,
        satisfied_rounds=4,
    )
    _, metrics, _ = train(ppo, config, kl_problem(), 12)
    rounds, kl = (np.asarray(metrics[name].value()) for name in ("rounds", "exact_kl"))
    assert rounds.min() >= 1
    assert rounds.max() <= 4
    assert len(set(rounds.tolist())) > 1
    inside = (kl <= 0.015) & (kl >= 0.01 / 1.5)
    assert inside[rounds < 4].all()


def test_group_advantages_reach_every_step_of_an_episode():
    problem = control.make_groups(CART_POLE, num_prompts=3, group_size=4, num_steps=50)
    params, collector = problem.init(jax.random.key(0))
    _, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    # One initial state for each group, another for each prompt.
    start = np.asarray(batch.inputs[:, 0]).reshape(3, 4, -1)
    assert (start == start[:, :1]).all()
    assert len(np.unique(start[:, 0, 0])) == 3
    # An episode is the slots up to its end; CartPole pays 1 a step.
    length = np.asarray(batch.mask.sum(1))
    np.testing.assert_array_equal(batch.score.reshape(-1), length)
    assert len(np.unique(length)) > 2
    ended = np.asarray(batch.terminated | batch.truncated)
    for row in range(12):
        assert ended[row, length[row] - 1]
        assert not ended[row, : length[row] - 1].any()
    np.testing.assert_allclose(batch.metrics["episode_return"].value(), length.mean())


def test_episodes_that_reach_the_budget_are_truncated():
    problem = control.make_groups(CART_POLE, num_prompts=2, group_size=2, num_steps=4)
    _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
    assert batch.mask.all()
    assert batch.truncated[:, -1].all()
    assert not batch.terminated.any()


def test_grpo_learns_from_groups_of_episodes():
    problem = control.make_groups(MatchCue(), num_prompts=8, group_size=8, num_steps=2)
    state, metrics, _ = train(
        grpo, grpo.Config(learning_rate=1e-2, use_reference=False), problem, 60
    )
    assert accuracy(problem, state.params)[0] == 1.0
    assert float(metrics["episode_return"].value()[-1]) > 0.8


def test_grpo_is_held_by_its_reference():
    problem = control.make_groups(MatchCue(), num_prompts=8, group_size=8, num_steps=2)
    free, held = (
        train(grpo, grpo.Config(learning_rate=1e-2, kl_coefficient=beta), problem, 40)
        for beta in (0.0, 10.0)
    )
    assert accuracy(problem, held[0].params)[1] < accuracy(problem, free[0].params)[1] - 0.1
    assert float(held[1]["reference_kl"].value()[-1]) < float(free[1]["reference_kl"].value()[-1])


def test_groups_of_one_are_refused():
    problem = control.make_groups(MatchCue(), num_prompts=8, group_size=1, num_steps=2)
    learner = grpo.make(grpo.Config(), problem)
    with pytest.raises(ConfigError, match="group_size must be at least 2"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))


def test_vine_tries_every_action_from_one_state():
    """MatchCue pays 1 for the action that names the cue and ends: Q is 0 or 1, by enumeration."""
    problem = control.make_vine(MatchCue(), num_envs=4, num_steps=6, num_states=3, horizon=5)
    params, collector = problem.init(jax.random.key(0))
    collector, batch = jax.jit(problem.collect)(params, collector, jax.random.key(1))
    cue = np.asarray(batch.inputs).reshape(12, 2)
    np.testing.assert_array_equal(cue[:, 0], cue[:, 1])
    np.testing.assert_array_equal(batch.score, np.stack([cue[:, 0] < 0, cue[:, 0] > 0], axis=1))
    np.testing.assert_array_equal(batch.action.reshape(12, 2), np.tile([0, 1], (12, 1)))
    np.testing.assert_allclose(batch.sampler_log_prob, -np.log(2.0), rtol=1e-6)
    distribution = problem.apply(params, batch.inputs)[0]
    np.testing.assert_allclose(batch.log_prob, distribution.log_prob(batch.action), rtol=1e-5)
    np.testing.assert_allclose(batch.value, 0.5, atol=0.02)  # a policy that is nearly uniform
    assert batch.terminated.all()


def test_branches_share_their_random_numbers():
    """AlwaysTruncated pays 1 a step: all branches are the same, the return is a geometric sum."""
    problem = control.make_vine(
        AlwaysTruncated(),
        num_envs=2,
        num_steps=20,
        num_states=10,
        num_branches=3,
        horizon=4,
        discount=0.5,
    )
    _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
    # The limit of 5 steps cuts a branch from time t after 5 − t steps; the horizon after 4.
    sums = [1.0, 1.5, 1.75, 1.875]
    assert set(np.unique(batch.score).tolist()) <= set(sums)
    assert len(np.unique(batch.score)) > 1
    score = np.asarray(batch.score)
    np.testing.assert_array_equal(score, np.repeat(score[:, :1], 3, axis=1))
    # The mean over branches.
    np.testing.assert_array_equal(batch.value.reshape(-1), score.reshape(-1))
    long = control.make_vine(
        CART_POLE, num_envs=4, num_steps=8, num_states=4, num_branches=4, horizon=40
    )
    params, collector = long.init(jax.random.key(0))
    _, batch = jax.jit(long.collect)(params, collector, jax.random.key(1))
    score, action = np.asarray(batch.score), np.asarray(batch.action).reshape(-1, 4)
    for returns, actions in zip(score, action, strict=True):
        for a in (0, 1):  # branches that begin with the same action are the same branch
            assert len(set(returns[actions == a].tolist())) <= 1


def test_trpo_learns_from_a_vine():
    problem = control.make_vine(MatchCue(), num_envs=8, num_steps=8, num_states=4, horizon=2)
    state, metrics, _ = train(trpo, trpo.Config(max_kl=0.05), problem, 30)
    assert accuracy(problem, state.params)[0] == 1.0
    assert state.params.value == ()
    assert (np.asarray(metrics["exact_kl"].value()) <= 0.05).all()


def test_vine_with_continuous_actions_is_self_normalised():
    problem = control.make_vine(
        MatchCueContinuous(), num_envs=8, num_steps=8, num_states=4, num_branches=8, horizon=2
    )

    def surrogate(distribution, samples):
        rows = distribution.log_prob(samples.action), samples.log_prob, samples.advantage
        of_states = jax.vmap(losses.self_normalized_surrogate)(*(x.reshape(-1, 8) for x in rows))
        return losses.token_mean(of_states, jnp.ones(of_states.shape, bool))

    learner = trpo.make(as_arrays(trpo.Config(max_kl=0.05)), problem, surrogate=surrogate)
    state, _ = jax.jit(
        lambda key: jax.lax.scan(lambda s, _: learner.step(s), learner.init(key), None, length=60)
    )(jax.random.key(0))
    mean = problem.apply(state.params, jnp.array([[-1.0], [1.0]]))[0].mode()[:, 0]
    np.testing.assert_allclose(mean, [-0.5, 0.5], atol=0.2)


@pytest.mark.parametrize(
    ("env", "options", "match"),
    [
        (CART_POLE, {"num_branches": 1}, "num_branches must be at least 2"),
        (MatchCueContinuous(), {}, "num_branches must be at least 2 where actions are continuous"),
        (CART_POLE, {"num_states": 9}, "num_states must be at most num_steps = 8"),
        (CART_POLE, {"horizon": 0}, "horizon"),
        (CART_POLE, {"discount": 1.5}, "discount"),
    ],
)
def test_bad_vines_are_named(env, options, match):
    with pytest.raises(ConfigError, match=match):
        control.make_vine(env, **({"num_envs": 2, "num_steps": 8, "num_states": 2} | options))


def test_vine_needs_a_state_to_go_back_to():
    class Hidden(MatchCue):
        def reset(self, key, params=None):
            return jnp.zeros(1), ()

    with pytest.raises(ConfigError, match="goes back to visited states"):
        control.make_vine(Hidden())


def test_monte_carlo_is_gae_with_lambda_one():
    """The estimator is a choice of its own: λ = 1 and Monte Carlo are the same advantage."""
    problem = control.make_problem(CART_POLE, num_envs=2, num_steps=16)
    _, batch = jax.jit(problem.collect)(*problem.init(jax.random.key(0)), jax.random.key(1))
    gae, monte_carlo, n_step = (
        actor_critic.estimate(ppo.Config(**changes), batch)
        for changes in (
            {"lambda_": 1.0},
            {"estimator": "monte_carlo"},
            {"estimator": "n_step", "n": 16},
        )
    )
    for other in (monte_carlo, n_step):
        np.testing.assert_allclose(gae[0], other[0], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(gae[1], other[1], rtol=1e-4, atol=1e-4)


LEARNING = [
    (reinforce, reinforce.Config(), 25),
    (a2c, a2c.Config(learning_rate=2e-3, normalize_advantage=True), 100),
    (npg, npg.Config(max_kl=0.03), 12),
    (trpo, trpo.Config(max_kl=0.03), 12),
]


@pytest.mark.parametrize(
    ("module", "config", "iterations"), LEARNING, ids=["reinforce", "a2c", "npg", "trpo"]
)
def test_cart_pole_improves(module, config, iterations):
    problem = control.make_problem(CART_POLE, num_envs=16, num_steps=128)
    state, _, _ = train(module, dataclasses.replace(config), problem, iterations)
    evaluate = jax.jit(control.make_evaluate(CART_POLE, problem, num_episodes=16))
    assert (
        float(evaluate(state.params, state.collector, jax.random.key(1))["return"].mean()) > 150.0
    )


def test_without_a_baseline_returns_are_divided_by_their_std_and_not_shifted():
    """`(G − m) / s + m` would make the constant part of the returns s times too large."""
    problem = control.make_problem(CART_POLE, num_envs=4, num_steps=16)
    shared = {"baseline": "none", **FIT}
    configs = (reinforce.Config(normalize_advantage=on, **shared) for on in (False, True))
    raw, scaled = (train(PlainGradient, config, problem, 1)[0].params.policy for config in configs)
    start = problem.init(jax.random.split(jax.random.key(0))[0])[0].policy
    learner = reinforce.make(as_arrays(reinforce.Config(**shared)), problem)
    batch = learner.step.sample(learner.init(jax.random.key(0)))[1]
    returns = actor_critic.estimate(reinforce.Config(), batch)[1]
    change = [jax.tree.map(jnp.subtract, after, start) for after in (raw, scaled)]
    for one, other in zip(*map(jax.tree.leaves, change), strict=True):
        np.testing.assert_allclose(other, one / np.std(returns), rtol=1e-3, atol=1e-6)


class PlainGradient:
    """REINFORCE whose step is the gradient."""

    @staticmethod
    def make(config, problem):
        return reinforce.make(config, problem, optax.sgd(1.0))


def test_a_constant_return_without_a_baseline_is_scaled_by_its_mean():
    problem = control.make_problem(AlwaysTruncated(), num_envs=4, num_steps=16)
    config = reinforce.Config(baseline="none", gamma=0.0, entropy_coefficient=0.0, **FIT)
    _, metrics, _ = train(reinforce, config, problem, 1)
    assert float(metrics["skipped"].value()[0]) == 0.0
    assert abs(float(metrics["policy_loss"].value()[0])) < 10.0  # −log π · 10, and not · 1e8


def test_a_jitted_policy_and_critic_of_their_own_are_no_shared_body():
    problem = control.make_problem(CART_POLE, num_envs=4, num_steps=8)
    jitted = problem._replace(apply=jax.jit(problem.apply))
    for module in (reinforce, npg, trpo):
        state, _, _ = train(module, module.Config(value_minibatches=1, value_epochs=1), jitted, 1)
        want, _, _ = train(module, module.Config(value_minibatches=1, value_epochs=1), problem, 1)
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(want.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    shared = control.from_settings(
        CART_POLE, control.Settings(num_envs=4, num_steps=8, shared_torso=True)
    )
    learner = trpo.make(
        trpo.Config(value_minibatches=1), shared._replace(apply=jax.jit(shared.apply))
    )
    with pytest.raises(ConfigError, match="shared_torso must be off"):
        jax.eval_shape(lambda key: learner.step(learner.init(key)), jax.random.key(0))


@pytest.mark.parametrize("module", [reinforce, a2c, ppo, grpo])
def test_actions_of_a_proposal_are_refused_where_nothing_weighs_them(module):
    """Trying each action once is uniform, not the policy: −log π · A has another gradient."""
    enumerated, sampled = (
        control.make_vine(
            MatchCue(), num_envs=2, num_steps=8, num_states=2, horizon=2, num_branches=k
        )
        for k in (0, 2)
    )
    with pytest.raises(
        ConfigError, match=r"sampling must be from the policy itself for this method.*num_branches"
    ):
        module.make(module.Config(), enumerated)
    module.make(module.Config(), sampled)


def test_kl_of_a_vine_is_that_of_the_policy_and_not_of_the_proposal():
    problem = control.make_vine(MatchCue(), num_envs=8, num_steps=8, num_states=4, horizon=2)
    learner = trpo.make(as_arrays(trpo.Config(max_kl=0.05)), problem)
    state = jax.jit(learner.init)(jax.random.key(0))
    # Far from uniform, so that the KL from the proposal would show.
    state = state._replace(
        params=state.params._replace(policy=jax.tree.map(lambda x: 3.0 * x, state.params.policy))
    )
    _, metrics = jax.jit(learner.step)(state)
    assert float(metrics["accepted"].value()) == 1.0
    # With all actions weighted by their probability, the k3 estimate is the exact KL.
    np.testing.assert_allclose(metrics["kl"].value(), metrics["exact_kl"].value(), rtol=1e-3)


def test_dapo_on_control_keeps_the_episodes_that_reach_the_limit():
    """On CartPole these are the best: without them there is nothing to learn from."""
    problem = control.make_groups(CART_POLE, num_prompts=4, group_size=4, num_steps=12)
    _, metrics, _ = train(dapo, dapo.Config(dynamic_sampling="off"), problem, 1)
    assert float(metrics["truncated"].value()[0]) > 0.2
    everything = float(metrics["episode_length"].total[0])
    assert float(metrics["signal"].count[0]) == everything
    with pytest.raises(ConfigError, match="overlong_cache has no effect unless"):
        dapo.make(dapo.Config(overlong_cache=3), problem)


def test_the_surrogate_of_a_vine_is_an_expectation_over_all_actions():
    """TRPO eq. 17: `mean_n Σ_k π(a_k|s_n) A_nk` for any policy.

    Weighted by π / π_old, it would be twice as far off.
    """
    problem = control.make_vine(MatchCue(), num_envs=4, num_steps=6, num_states=3, horizon=2)
    params, collector = problem.init(jax.random.key(0))
    policy = jax.tree.map(lambda x: 3.0 * x, params.policy)
    _, batch = jax.jit(problem.collect)(
        params._replace(policy=policy), collector, jax.random.key(1)
    )
    estimate = actor_critic.make_estimate(
        trpo.Config(normalize_advantage=False), keep_proposal=True
    )
    samples = problem.rows(estimate(None, batch))
    later = jax.tree.map(lambda x: 2.0 * x, policy)
    distribution = problem.apply(ActorCritic(later), samples.inputs)[0]
    probability = np.exp(distribution.log_prob(samples.action)).reshape(-1, 2)
    want = np.mean(np.sum(probability * np.asarray(samples.advantage).reshape(-1, 2), axis=1))
    np.testing.assert_allclose(
        npg.proposal_surrogate(distribution, samples).value(), -want, rtol=1e-4, atol=1e-6
    )
    _, metrics, _ = train(npg, npg.Config(normalize_advantage=False), problem, 1)
    params, collector = problem.init(jax.random.split(jax.random.key(0))[0])
    key = jax.random.split(jax.random.split(jax.random.key(0))[1], 3)[1]
    batch = jax.jit(problem.collect)(params, collector, key)[1]
    # At π_old itself the expectation of A is 0 in every state.
    np.testing.assert_allclose(metrics["policy_loss"].value()[0], 0.0, atol=1e-5)
    assert float(jnp.abs(batch.reward - batch.value).mean()) > 0.1
