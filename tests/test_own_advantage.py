"""Tests a user-defined advantage in place of a method's own: `make(…, advantage=…)`."""

import importlib.util
import re
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tables import cases

from jaxrl_po import advantages, control
from jaxrl_po.algorithms import a2c, actor_critic, npg, ppo, ppo_penalty, reinforce, trpo
from jaxrl_po.algorithms.actor_critic import Trajectory
from jaxrl_po.config import ConfigError
from jaxrl_po.types import Batch

STEPS = 6
PROBLEM = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=4, num_steps=STEPS)
SPEC = importlib.util.spec_from_file_location(
    "v_trace", Path(__file__).parent.parent / "examples" / "v_trace.py"
)
example = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(example)


def ends(steps):
    return steps.terminated, steps.truncated


def gae(steps):
    stream = steps.reward, steps.value, steps.next_value, *ends(steps)
    advantage = advantages.gae(*stream, gamma=0.99, lambda_=0.95)
    return advantage, advantage + steps.value


def monte_carlo(steps):
    target = advantages.discounted_returns(steps.reward, steps.next_value, *ends(steps), gamma=0.99)
    return target - steps.value, target


def n_step(steps):
    target = advantages.n_step_returns(
        steps.reward, steps.next_value, *ends(steps), gamma=0.99, n=5
    )
    return target - steps.value, target


SMALL = {"num_epochs": 1, "num_minibatches": 2}
FIT = {"value_epochs": 1, "value_minibatches": 2}
METHODS = {
    ppo: (gae, SMALL),
    ppo_penalty: (gae, SMALL),
    trpo: (gae, FIT),
    npg: (gae, FIT),
    reinforce: (monte_carlo, FIT),
    a2c: (n_step, {}),
}


def shown(module):
    return module.__name__.split(".")[-1]


def program(module, config, **given):
    learner = module.make(config, PROBLEM, **given)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    return jax.jit(learner.step).lower(state).as_text()


@pytest.mark.parametrize("module", METHODS, ids=shown)
def test_methods_advantage_written_out_is_the_same_program(module):
    own, sizes = METHODS[module]
    config = module.Config(**sizes)
    stock = program(module, config)
    assert program(module, config, advantage=own) == stock
    halved = program(module, config, advantage=lambda steps: (0.5 * own(steps)[0], own(steps)[1]))
    assert halved != stock


@pytest.mark.parametrize("module", METHODS, ids=shown)
def test_settings_of_replaced_advantage_are_refused(module):
    own, sizes = METHODS[module]
    given = {
        "gamma": 0.9,
        "lambda_": 0.5,
        "estimator": "n_step",
        "discount_per": "turn",
        "n_steps": 3,
    }
    if module is a2c:
        given |= {"estimator": "gae"}
    if module is reinforce:
        given |= {"baseline": "none"}
    for name, value in given.items():
        needs = {"lambda_": {"estimator": "gae"}, "n_steps": {"estimator": "n_step"}}.get(name, {})
        config = module.Config(**sizes, **needs | {name: value})
        with pytest.raises(ConfigError, match=r"has no effect unless the advantage is the method"):
            module.make(config, PROBLEM, advantage=own)


@cases(
    "own, got",
    (lambda steps: (steps.reward, steps.reward[:-1]), "(array [6], array [5])"),
    (lambda steps: (steps.reward.sum(), steps.reward), "(array [], array [6])"),
    (lambda steps: (steps.reward[:, None], steps.reward), "(array [6, 1], array [6])"),
    (lambda steps: (steps.reward, steps.reward[:, None]), "(array [6], array [6, 1])"),
    (lambda steps: (steps.reward, 0.0), "(array [6], float)"),
    (lambda steps: steps.reward, "array [6]"),
    ids=["shorter", "one number", "column", "column as target", "float as target", "no pair"],
)
def test_another_form_of_result_is_named(own, got):
    learner = ppo.make(ppo.Config(**SMALL), PROBLEM, advantage=own)
    start = jax.eval_shape(learner.init, jax.random.key(0))
    wanted = f"advantage: must return (advantage, target), each [6], as its reward, got {got}"
    with pytest.raises(ConfigError, match=f"^{re.escape(wanted)}"):
        jax.eval_shape(learner.step, start)


# Results of `vtrace_td_error_and_advantage` of rlax 0.1.9 on each of three pieces, γ = .9,
# thresholds 1: one episode terminates, one is truncated, and the end of the rollout cuts one.
REWARD = [1.0, -0.5, 2.0, 0.25, 0.0, 3.0, 1.5]
VALUE = [0.5, 1.0, -1.0, 2.0, 0.75, -0.25, 1.25]
NEXT_VALUE = [1.0, -1.0, 9.0, 0.75, 1.75, 1.25, 0.6]
RHO = [0.5, 2.0, 1.2, 0.8, 0.9, 1.6, 0.7]
TARGET = [1.335, 1.3, 2.0, 1.6746, 1.4925, 4.6227, 1.803]
ADVANTAGE = [0.835, 0.3, 3.0, -0.3254, 0.7425, 4.8727, 0.553]


def test_v_trace_is_that_of_rlax():
    step = jnp.arange(7)
    advantage, target = example.v_trace(
        Trajectory(
            *map(jnp.array, (REWARD, VALUE, NEXT_VALUE)),
            terminated=step == 2,
            truncated=step == 4,
            mask=step >= 0,
            step_end=step >= 0,
            log_prob=jnp.log(jnp.array(RHO)) - 1.0,
            sampler_log_prob=jnp.full(7, -1.0),
        ),
        gamma=0.9,
    )
    np.testing.assert_allclose(target, TARGET, rtol=1e-5)
    np.testing.assert_allclose(advantage, ADVANTAGE, rtol=2e-5)


def test_a_trajectory_is_a_row_of_the_batch():
    step = jnp.arange(3)
    rows = {
        name: jnp.stack([step + 10.0 * i, step - 10.0 * i])
        for i, name in enumerate(("reward", "value", "next_value", "log_prob"))
    }
    ending = {
        "terminated": jnp.stack([step == 2, step == 1]),
        "truncated": jnp.stack([step == 1, step == 2]),
        "mask": jnp.stack([step < 3, step < 2]),
    }
    batch = Batch(None, None, score=None, metrics={}, **rows, **ending)
    own = {"step_end": ending["truncated"], "sampler_log_prob": 2.0 * rows["log_prob"]}
    without = {"step_end": jnp.ones((2, 3), bool), "sampler_log_prob": rows["log_prob"]}
    for given, expected in (({}, without), (own, own)):
        for name, want in {**rows, **ending, **expected}.items():
            got, _ = actor_critic.estimate(
                lambda steps, name=name: (getattr(steps, name), steps.value),
                batch._replace(columns=given),
            )
            np.testing.assert_array_equal(got, want)


def test_v_trace_on_older_completions_matches_its_equation():
    """Eq. 1 holds term by term for the batch that a language method passes to its advantage."""
    learner = example.make()

    @jax.jit
    def run(key):
        state = jax.lax.scan(lambda s, _: learner.step(s), learner.init(key), length=3)[0]
        batch = learner.sample(state)[1]
        return batch, *actor_critic.estimate(example.v_trace, batch)

    batch, advantage, target = jax.tree.map(np.asarray, run(jax.random.key(0)))
    mask = batch.mask
    ratio = np.exp(batch.log_prob - batch.columns["sampler_log_prob"])
    assert np.abs(ratio[mask] - 1.0).max() > 1e-3
    assert not mask.all()
    np.testing.assert_array_equal(ratio[~mask], 1.0)
    for row, length in enumerate(mask.sum(axis=1)):
        assert batch.terminated[row].nonzero()[0].tolist() == [length - 1]
        reward, value, rho = (x[row, :length] for x in (batch.reward, batch.value, ratio))
        rho, following = np.minimum(rho, 1.0), np.append(value[1:], 0.0)
        delta = rho * (reward + following - value)
        expected = [
            value[s] + sum(np.prod(rho[s:t]) * delta[t] for t in range(s, length))
            for s in range(length)
        ]
        later = np.append(expected[1:], 0.0)
        close = {"rtol": 1e-4, "atol": 1e-5}
        np.testing.assert_allclose(target[row, :length], expected, **close)
        np.testing.assert_allclose(advantage[row, :length], rho * (reward + later - value), **close)
