"""A surrogate of one's own: what it must return is said while it is traced."""

import gymnax
import jax
import pytest

from jaxrl_po import control, losses
from jaxrl_po.algorithms import group_policy, grpo, npg, ppo, ppo_penalty, trpo
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


@pytest.mark.parametrize("name", UNFIT_SURROGATES)
@pytest.mark.parametrize("method", ["ppo", "ppo_penalty", "groups"])
def test_a_surrogate_of_another_form_is_named(method, name):
    surrogate, got = UNFIT_SURROGATES[name]
    if method == "groups":
        config = grpo.Config(use_reference=False)
        learner = group_policy.make(
            config,
            groups(),
            advantage=group_policy.group_relative(config),
            surrogate=surrogate,
            aggregate=losses.sequence_mean,
        )
    else:
        module = {"ppo": ppo, "ppo_penalty": ppo_penalty}[method]
        learner = module.make(module.Config(), path(), surrogate=surrogate)
    with pytest.raises(ConfigError, match=ELEMENTS + r"shape \[\d.*\] of log_prob, got .*" + got):
        jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))


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
