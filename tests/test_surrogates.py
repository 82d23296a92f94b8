"""A surrogate of one's own: what it must return is said while it is traced."""

import functools

import gymnax
import jax
import jax.numpy as jnp
import pytest

from jaxrl_po import control, losses, minibatches, updates
from jaxrl_po.algorithms import group_policy, grpo, npg, ppo, ppo_penalty, trpo
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.masked import Mean


def path():
    return control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=8, num_steps=16)


def groups():
    env = gymnax.make("CartPole-v1")[0]
    return control.make_groups(env, num_prompts=8, group_size=2, num_steps=24)


ELEMENTS = r"^surrogate must return \(elements to minimise, dict of elements to log\), each of the "
UNFIT_SURROGATES = {
    "bare array": (lambda log_prob, samples: -log_prob, "array "),
    "scalar": (lambda log_prob, samples: (-log_prob.sum(), {}), r"\(array \[\], {}\)"),
    "no dict": (lambda log_prob, samples: (-log_prob, log_prob), r"\(array "),
    "mean logged": (
        lambda log_prob, samples: (-log_prob, {"ratio": log_prob.mean()}),
        r"{ratio: array \[\]}",
    ),
    "nothing": (lambda log_prob, samples: None, "NoneType; log nothing"),
}


def make(method, surrogate, target=None, **changes):
    if method == "groups":
        config = grpo.Config(use_reference=False, **changes)
        return group_policy.make(
            config,
            groups(),
            group_advantage=group_policy.group_relative(config),
            surrogate=surrogate,
            aggregate=losses.sequence_mean,
            target=target,
        )
    module = {"ppo": ppo, "ppo_penalty": ppo_penalty}[method]
    config = module.Config(num_minibatches=1, **changes)
    return module.make(config, path(), surrogate=surrogate, target=target)


def trace(learner):
    return jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))


@pytest.mark.parametrize("name", UNFIT_SURROGATES)
@pytest.mark.parametrize("method", ["ppo", "ppo_penalty", "groups"])
def test_a_surrogate_of_another_form_is_named(method, name):
    surrogate, got = UNFIT_SURROGATES[name]
    with pytest.raises(ConfigError, match=ELEMENTS + r"shape \[\d.*\] of log_prob, got .*" + got):
        trace(make(method, surrogate))


@pytest.mark.parametrize("module", [npg, trpo])
@pytest.mark.parametrize(
    ("surrogate", "got"),
    [
        (lambda d, samples: d.log_prob(samples.action).mean(), r"array \[\]\s"),
        (lambda d, samples: d.log_prob(samples.action), r"array \[128\]\s"),
        (
            lambda d, samples: Mean(d.log_prob(samples.action), samples.mask),
            r"Mean of array \[128\] and array \[128\]\s",
        ),
    ],
)
def test_a_surrogate_of_a_natural_step_is_a_mean(module, surrogate, got):
    learner = module.make(module.Config(), path(), surrogate=surrogate)
    with pytest.raises(ConfigError, match=r"^surrogate must return a Mean of two .*, got " + got):
        jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))


def weighted(log_prob, samples, *, weight):
    return -weight * jnp.exp(log_prob - samples.log_prob) * samples.advantage, {}


def by_quantile(log_prob, samples):
    elements, _ = weighted(log_prob, samples, weight=1.0)
    return elements * (log_prob < jnp.quantile(log_prob, 0.5)), {}


def centred(log_prob, samples):
    advantage = samples.advantage - losses.token_mean(samples.advantage, samples.mask).value()
    return -jnp.exp(log_prob - samples.log_prob) * advantage, {}


def among_eight(log_prob, samples):
    eights = samples.advantage.reshape(-1, 8)
    centre = jnp.repeat(eights.mean(1), 8).reshape(log_prob.shape)
    return -log_prob * (samples.advantage - centre), {}


ONE_CORE_EACH = Target("cpu", devices=2, cores=2)


@pytest.fixture
def slots(monkeypatch):
    """The slots of a row in each update that is made, on devices of one core and a small cache."""
    seen, update = [], updates.gradient_update

    def recorded(*args, slots, **options):
        seen.append(slots)
        return update(*args, slots=slots, **options)

    monkeypatch.setattr(updates, "gradient_update", recorded)
    monkeypatch.setattr(minibatches, "AT_A_TIME", 8)
    return seen


METHODS = {"ppo": 1, "ppo_penalty": 1, "groups": 24}  # slots of a row


@pytest.mark.parametrize("method", METHODS)
def test_a_surrogate_that_reads_its_minibatch_gets_it_whole(method, slots):
    whole = [by_quantile, centred, *([] if method == "groups" else [among_eight])]
    for surrogate in whole:
        with pytest.warns(UserWarning, match="other rows of its minibatch, which is therefore"):
            trace(make(method, surrogate, ONE_CORE_EACH))
        with pytest.raises(ConfigError, match=r"^num_microbatches must be 1 with this surrogate"):
            trace(make(method, surrogate, ONE_CORE_EACH, num_microbatches=2))
    trace(make(method, functools.partial(weighted, weight=2.0), ONE_CORE_EACH))
    trace(make(method, functools.partial(weighted, weight=2.0), ONE_CORE_EACH, num_microbatches=2))
    assert set(slots[:-2]) == {None}
    assert slots[-2:] == [METHODS[method]] * 2


def test_a_surrogate_may_close_over_the_numbers_of_a_sweep(slots):
    def trained(weight):
        trace(make("ppo", functools.partial(weighted, weight=weight)))
        return weight

    jax.vmap(trained)(jnp.ones(2))
    assert slots == [1]
