"""Tests a user's surrogate, whose result is checked while it is traced."""

import functools
import importlib

import chex
import gymnax
import jax
import jax.numpy as jnp
import pytest
from tables import cases

from jaxrl_po import control, language, losses, minibatches, updates
from jaxrl_po.algorithms import (
    a2c,
    group_policy,
    grpo,
    npg,
    ppo,
    ppo_penalty,
    reinforce,
    surrogates,
    trpo,
)
from jaxrl_po.backend import Target
from jaxrl_po.config import ConfigError
from jaxrl_po.distributions import DiagonalGaussian
from jaxrl_po.language import unembedding
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic, FastPaths, Problem, Samples


def path():
    return control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=8, num_steps=16)


def groups():
    env = gymnax.make("CartPole-v1")[0]
    return control.make_groups(env, num_prompts=8, group_size=2, num_steps=24)


ELEMENTS = (
    r"^surrogate: must return \(elements to minimise, dict of elements to log\), each of the "
)
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
            group_advantage=group_policy.relative_to_group(config),
            surrogate=surrogate,
            aggregate=losses.sequence_mean,
            target=target,
        )
    module = {"ppo": ppo, "ppo_penalty": ppo_penalty, "a2c": a2c, "reinforce": reinforce}[method]
    if method.startswith("ppo"):
        changes["num_minibatches"] = 1
    return module.make(module.Config(**changes), path(), surrogate=surrogate, target=target)


def trace(learner):
    return jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))[1]


@pytest.mark.parametrize("name", UNFIT_SURROGATES)
@cases("method", "ppo", "ppo_penalty", "groups")
def test_a_surrogate_of_another_form_is_named(method, name):
    surrogate, got = UNFIT_SURROGATES[name]
    with pytest.raises(ConfigError, match=ELEMENTS + r"shape \[\d.*\] of log_prob, got .*" + got):
        trace(make(method, surrogate))


@cases("module", npg, trpo)
@cases(
    "surrogate, got",
    (lambda d, samples: d.log_prob(samples.action).mean(), r"array \[\]\s"),
    (lambda d, samples: d.log_prob(samples.action), r"array \[128\]\s"),
    (
        lambda d, samples: Mean(d.log_prob(samples.action), samples.mask),
        r"Mean of array \[128\] and array \[128\]\s",
    ),
)
def test_surrogate_of_natural_step_is_a_mean(module, surrogate, got):
    learner = module.make(module.Config(), path(), surrogate=surrogate)
    with pytest.raises(ConfigError, match=r"^surrogate: must return a Mean of two .*, got " + got):
        jax.eval_shape(learner.step, jax.eval_shape(learner.init, jax.random.key(0)))


def weighted(log_prob, samples, *, weight):
    return -weight * jnp.exp(log_prob - samples.log_prob) * samples.advantage, {}


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
    """Returns the slots of a row in each update that is built, on devices of one core, whose cache
    holds 50 slots: 128 are computed in two parts."""
    seen, update = [], updates.gradient_update

    def recorded(*args, slots, **options):
        if "num_microbatches" in options:  # the fit of a critic does not count
            seen.append(slots)
        return update(*args, slots=slots, **options)

    monkeypatch.setattr(updates, "gradient_update", recorded)
    monkeypatch.setattr(minibatches, "AT_A_TIME", 50)
    return seen


METHODS = {"ppo": 1, "ppo_penalty": 1, "a2c": 1, "reinforce": 1, "groups": 24}  # slots of a row


@pytest.mark.parametrize("method", METHODS)
def test_surrogate_reading_its_minibatch_gets_it_whole(method, slots):
    with pytest.warns(UserWarning, match="other rows of its minibatch, which is therefore"):
        trace(make(method, centred, ONE_CORE_EACH))
    with pytest.raises(ConfigError, match=r"^num_microbatches: must be 1 with this surrogate"):
        trace(make(method, centred, ONE_CORE_EACH, num_microbatches=2))
    trace(make(method, functools.partial(weighted, weight=2.0), ONE_CORE_EACH))
    trace(make(method, surrogates.row_wise(centred), ONE_CORE_EACH, num_microbatches=2))
    assert slots == [None, METHODS[method], METHODS[method]]


def none_far(log_prob, samples):
    elements, _ = weighted(log_prob, samples, weight=1.0)
    return jnp.where((jnp.abs(log_prob - samples.log_prob) > 1).any(), 0.0, elements), {}


def over_count(log_prob, samples):
    return weighted(log_prob, samples, weight=1.0)[0] / samples.mask.sum(), {}


def logs_mean(log_prob, samples):
    elements, _ = weighted(log_prob, samples, weight=1.0)
    return elements, {"mean_ratio": jnp.full_like(elements, elements.mean())}


SORTED = object()  # sums by length, which this test does not call


def gaussian(params, inputs):
    return DiagonalGaussian(inputs, jnp.zeros_like(inputs)), None


def judged(surrogate, rows=12, shape=(), dtype=jnp.float32):
    """Returns slots of a row where minibatches are computed in parts."""
    return parts(surrogate, rows, shape, dtype).slots


def parts(surrogate, rows=12, shape=(), dtype=jnp.float32, axis_name=None):
    def array(dtype, *more):
        return jax.ShapeDtypeStruct((rows, *shape, *more), dtype)

    float_columns = "sampler_log_prob", "teacher_log_prob"
    samples = Samples(
        inputs=array(jnp.float32, 4),
        action=array(jnp.float32, 3),
        log_prob=array(dtype),
        advantage=array(dtype),
        mask=array(bool),
        columns={name: array(dtype) for name in float_columns} | {"penalized": array(bool)},
    )
    speedups = FastPaths(by_length=SORTED)
    problem = Problem(None, None, gaussian, None, fast_paths=speedups, target=ONE_CORE_EACH)
    return surrogates.parts(
        surrogates.checked(surrogate),
        samples,
        problem,
        ActorCritic(None),
        ppo.Config(num_microbatches=1 if axis_name else 2, axis_name=axis_name),
    )


MIXING = none_far, over_count, logs_mean


@cases("rows", 12, 13, 43, 73)
@pytest.mark.parametrize("surrogate", [*MIXING, among_eight])
def test_reading_other_rows_is_seen(surrogate, rows):
    with pytest.raises(ConfigError, match=r"surrogates\.row_wise"):
        judged(surrogate, 8 * rows if surrogate is among_eight else rows)
    assert judged(surrogates.row_wise(surrogate), rows) == 1


GROUP_METHODS = "cispo dapo distillation dppo dr_grpo gmpo grpo gspo kl_cov pkpo rloo sapo"


@pytest.mark.parametrize("name", [*GROUP_METHODS.split(), "reinforce_pp"])
def test_our_methods_read_their_own_rows(name, monkeypatch):
    module = importlib.import_module(f"jaxrl_po.algorithms.{name}")
    made = []
    monkeypatch.setattr(group_policy, "make", lambda *_, surrogate, **__: made.append(surrogate))
    module.make(module.Config(), groups())
    with jax.enable_x64(True):
        wide = judged(made[0], shape=(5,), dtype=jnp.float64)
    assert wide == judged(made[0], shape=(5,)) == judged(made[0], 2, (5,), jnp.bfloat16) == 5
    assert parts(made[0], shape=(5,)).by_length is SORTED


def over_slots(log_prob, samples):
    return weighted(log_prob, samples, weight=1.0)[0] / log_prob.shape[1], {}


def over_mean(log_prob, samples):
    ratio = jnp.exp((log_prob - samples.log_prob).mean(1, keepdims=True))
    return -ratio * samples.advantage, {}


@cases("surrogate", over_slots, over_mean)
def test_rows_of_what_reads_their_length_stay_whole(surrogate):
    assert parts(surrogate, shape=(5,)) == (5, None)
    assert parts(surrogates.row_wise(surrogate), shape=(5,)) == (5, SORTED)
    assert parts(functools.partial(weighted, weight=1.0), shape=(5,)) == (5, SORTED)


@jax.custom_vjp
def of_unit_gradient(x):
    return x


@jax.custom_jvp
def of_centred_gradient(x):
    return x


of_unit_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))
of_centred_gradient.defjvp(lambda x, t: (x[0], t[0] - t[0].mean()))


@cases("function", of_unit_gradient, of_centred_gradient)
def test_gradients_that_mix_rows_are_seen(function):
    with pytest.raises(ConfigError, match="other rows"):
        judged(lambda log_prob, samples: (function(log_prob) * samples.advantage, {}))


def test_a_device_alone_is_reported_unless_reduced():
    def on_devices(surrogate):
        def call(x):
            return x + (parts(surrogate, axis_name="data").slots or 0)

        return jax.vmap(call, axis_name="data")(jnp.zeros(2)).tolist()

    def reducing(log_prob, samples):
        return -log_prob * jax.lax.pmean(log_prob.mean(), "data"), {}

    assert on_devices(functools.partial(weighted, weight=1.0)) == [1.0, 1.0]
    assert on_devices(reducing) == [0.0, 0.0]
    with pytest.warns(UserWarning, match="of which a device has its own alone"):
        assert on_devices(centred) == [0.0, 0.0]


def with_entropy(log_prob, samples, distribution):
    entropy = distribution.entropy()
    return -log_prob * samples.advantage - 0.1 * entropy, {"own": entropy}


@pytest.mark.parametrize("method", METHODS)
def test_a_distribution_is_passed_by_name(method):
    given = []

    def surrogate(log_prob, samples, *, distribution):
        given.append(distribution.log_prob(samples.action).shape == log_prob.shape)
        return -log_prob, {}

    trace(make(method, surrogate, num_microbatches=2))
    assert given
    assert all(given)


def test_a_distribution_is_that_of_the_policy():
    learner = make("ppo", with_entropy, num_epochs=1, num_microbatches=2)
    _, metrics = jax.jit(learner.step)(learner.init(jax.random.key(0)))
    chex.assert_trees_all_close(metrics["own"], metrics["entropy"], rtol=1e-6)


def printing(log_prob, samples):
    jax.debug.print("{}", log_prob.mean())
    return -log_prob * samples.advantage, {}


def with_default(log_prob, samples, policy=2.0):
    return -policy * log_prob, {}


def times(log_prob, samples, distribution):
    return -distribution * log_prob, {}


MARKED = surrogates.row_wise(lambda x, _, c: (x * c * x.mean(), {}))
OWN_ROWS = {
    "marked before it is partial": functools.partial(MARKED, c=2.0),
    "printing a mean": printing,
    "a third parameter of another name": with_default,
    "a distribution that is bound": functools.partial(times, distribution=2.0),
    "an entropy": with_entropy,
}


@pytest.mark.parametrize("name", OWN_ROWS)
def test_surrogates_read_their_own_rows(name):
    assert judged(OWN_ROWS[name]) == 1


def test_a_surrogate_takes_log_prob_and_samples():
    with pytest.raises(ConfigError, match=r"^surrogate: must take \(log_prob, samples\)"):
        surrogates.checked(lambda distribution, samples: (distribution, samples))


def test_a_distribution_may_mix_rows_as_well():
    def surrogate(log_prob, samples, distribution):
        return -log_prob * distribution.entropy().mean(), {}

    with pytest.raises(ConfigError, match="other rows"):
        judged(surrogate)


def test_a_large_vocabulary_has_a_distribution_too(monkeypatch):
    monkeypatch.setattr(unembedding, "HELD", 1)

    def surrogate(log_prob, samples, distribution):
        assert isinstance(distribution, unembedding.Unembedded)
        towards = distribution.kl(jax.lax.stop_gradient(distribution))
        return with_entropy(log_prob, samples, distribution)[0] + towards, {}

    task = language.tasks.addition(1)
    model = language.ModelSettings(width=8, layers=1).build(task.tokenizer.size)
    config = grpo.Config(use_reference=False, num_microbatches=2)
    learner = group_policy.make(
        config,
        language.make_problem(task, model, num_prompts=2, group_size=2),
        group_advantage=group_policy.relative_to_group(config),
        surrogate=surrogates.row_wise(surrogate),
        aggregate=losses.sequence_mean,
    )
    assert "policy_loss" in trace(learner)


RESERVED = {
    "ppo": "policy_loss grad_norm updates kl frac_masked episode_return",
    "ppo_penalty": "entropy approximate_kl exact_kl kl_coefficient",
    "a2c": "entropy value_loss kl",
    "reinforce": "policy_loss entropy value_loss kl skipped",
    "groups": "policy_loss entropy extreme_ratio kl dead_groups",
}
NAMES = [(m, name, "{}: must have another name") for m in RESERVED for name in RESERVED[m].split()]
NAMES += [("ppo", name, "surrogate: must log {} ") for name in ("iteration", "step", "signal")]


@pytest.mark.parametrize(("method", "name", "message"), NAMES)
def test_names_of_metrics_are_refused(method, name, message):
    with pytest.raises(ConfigError, match=f"^{message.format(name)}"):
        trace(make(method, logging(name)))


def logging(name):
    """Returns a surrogate that logs an element of a specified name."""

    def surrogate(log_prob, samples):
        return -log_prob, {name: jnp.zeros_like(log_prob)}

    return surrogate


@cases("method", "ppo", "groups")
def test_a_wrapped_surrogate_logs_what_it_did(method):
    clipped = surrogates.clipped(0.2, 0.2)
    logged = {"clip_fraction_low", "clip_fraction_high"}
    assert logged <= trace(make(method, lambda *given: clipped(*given))).keys()


@pytest.mark.parametrize("method", METHODS)
def test_integer_elements_are_refused(method):
    def surrogate(log_prob, samples):
        return (log_prob > -1.0).astype(jnp.int32), {}

    with pytest.raises(ConfigError, match=r"^surrogate: must return elements that are floats, got"):
        trace(make(method, surrogate))


def test_flags_and_counts_are_logged_as_floats():
    def surrogate(log_prob, samples):
        return -log_prob, {"flag": log_prob < 0, "count": jnp.ones_like(log_prob, jnp.int8)}

    _, logged = surrogates.checked(surrogate)(jnp.zeros(3), None, None)
    assert {x.dtype for x in logged.values()} == {jnp.dtype("float32")}


def test_surrogate_may_close_over_swept_numbers(slots):
    def trained(weight):
        trace(make("ppo", functools.partial(weighted, weight=weight)))
        return weight

    jax.vmap(trained)(jnp.ones(2))
    assert slots == [1]
