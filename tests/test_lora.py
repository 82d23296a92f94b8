"""Tests adapters: their function, their training over a fixed base, and one base for all seeds."""

import functools

import families
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from probes import drawn
from tables import cases, slow

from jaxrl_po import language
from jaxrl_po.algorithms import grpo, trpo
from jaxrl_po.config import ConfigError
from jaxrl_po.language import Transformer
from jaxrl_po.language.lora import Lora, merge_adapters
from jaxrl_po.language.pretrained import architectures
from jaxrl_po.run.devices.seeds import over_seeds

TASK = language.tasks.addition(1)
SMALL = Transformer(TASK.tokenizer.size, width=16, layers=1, heads=2, mlp_width=24)
LORA = Lora(rank=3, alpha=6.0)


def split(model):
    """Returns base and adapters, both with parameters of order one."""
    shapes = model.parameter_shapes()
    base = {"params": drawn(shapes["params"], 0.3)}
    return base, {"lora": drawn(shapes["lora"], 0.3)}


TOKENS = jnp.asarray(np.random.default_rng(1).integers(2, 12, size=(2, 7)), jnp.int32)
PAD = jnp.array([0, 2])


@functools.cache
def applied(model):
    return jax.jit(model.apply)


def logits(model, params):
    return applied(model)(params, TOKENS, PAD)[0]


@cases("name", "qwen2", "gemma3")
def test_adapters_equal_the_merged_matrices(name):
    model = architectures.read(families.CONFIGS[name]).clone(lora=LORA)
    base, adapters = split(model)
    whole = logits(model, {**base, **adapters})
    found = logits(model.clone(lora=None), merge_adapters(model, base, adapters))
    np.testing.assert_allclose(whole, found, rtol=1e-4, atol=2e-4)
    without = logits(model.clone(lora=None), base)
    assert np.abs(whole - without).max() > 0.1
    again = logits(model.clone(remat=True), {**base, **adapters})
    np.testing.assert_allclose(again, whole, atol=1e-5)
    bare = jax.tree.map(jnp.zeros_like, adapters)
    np.testing.assert_allclose(logits(model, {**base, **bare}), without, atol=1e-6)


def test_scale_is_alpha_over_rank():
    model = SMALL.clone(lora=LORA)
    base, adapters = split(model)
    merged = merge_adapters(model, base, adapters)
    before, after = (x["params"]["blocks"]["mlp"]["up"]["kernel"] for x in (base, merged))
    pair = adapters["lora"]["blocks"]["mlp"]["up"]
    np.testing.assert_allclose(after - before, 2.0 * pair["a"] @ pair["b"], rtol=1e-4, atol=1e-5)


def problem_of(*, critic=False, **options):
    base = {"params": drawn(SMALL.parameter_shapes()["params"], 0.3)}
    return language.make_problem(
        TASK,
        SMALL.clone(lora=LORA),
        num_prompts=4,
        group_size=1 if critic else 4,
        initial=base,
        critic=SMALL.clone(outputs=1) if critic else None,
        **options,
    ), base


METHODS = {
    "grpo": lambda problem: grpo.make(grpo.Config(kl_coefficient=0.1), problem),
    "trpo": lambda problem: trpo.make(trpo.Config(value_minibatches=2, value_epochs=1), problem),
}


@functools.cache
def learner_of(name):
    """Returns a learner, its base, and its compiled `init` and `step`."""
    problem, base = problem_of(critic=name != "grpo", process_reward=True)
    learner = METHODS[name](problem)
    return learner, base, jax.jit(learner.init), jax.jit(learner.step)


@cases("name", "grpo", slow("trpo"))
def test_only_adapters_are_trained(name):
    _, base, init, step = learner_of(name)
    state = init(jax.random.key(0))
    assert set(state.params.policy) == {"lora"}
    after, metrics = step(state)
    assert np.isfinite(metrics["entropy"].value())
    jax.tree.map(np.testing.assert_array_equal, after.params.frozen, base)
    moved = jax.tree.map(lambda a, b: a != b, after.params.policy, state.params.policy)
    assert any(np.any(leaf) for leaf in jax.tree.leaves(moved))
    assert float(metrics["skipped"].value()) == 0.0
    # Only adapters and the critic's parameters have Adam moments; no matrix of the base has one.
    count = sum(x.size for x in jax.tree.leaves(state.params.without_frozen()))
    assert sum(x.size for x in jax.tree.leaves(state.opt_state)) <= 2 * count + 8
    if state.reference_params is not None:
        assert set(state.reference_params) == {"lora"}


KEY = jax.random.key(0)


def test_the_first_policy_is_the_base():
    problem, base = problem_of()

    @jax.jit
    def first(key):
        params, collector = problem.init(key)
        _, batch = problem.collect(params, collector, KEY)
        tokens, pad = batch.inputs.tokens[:, :-1], batch.inputs.pad
        alone = SMALL.apply(base, tokens, pad, last=3)[0]
        distribution = problem.apply(params, batch.inputs)[0]
        return batch, distribution.logits, distribution.log_prob(batch.action), alone

    batch, logits, log_prob, alone = first(jax.random.key(3))
    np.testing.assert_allclose(logits, alone[:, -logits.shape[1] :], rtol=1e-6)
    np.testing.assert_allclose(
        np.where(batch.mask, log_prob, 0.0), np.where(batch.mask, batch.log_prob, 0.0), atol=1e-5
    )


def test_seeds_share_the_base():
    learner, base, init, step = learner_of("grpo")
    many = over_seeds(learner, 3)
    after, _ = jax.jit(lambda keys: many.step(many.init(keys)))(jax.random.split(KEY, 3))
    kernel = base["params"]["blocks"]["mlp"]["up"]["kernel"]
    assert after.params.frozen["params"]["blocks"]["mlp"]["up"]["kernel"].shape == kernel.shape
    pair = after.params.policy["lora"]["blocks"]["mlp"]["up"]
    assert pair["a"].shape == (3, *kernel.shape[:2], 3)
    alone, _ = step(init(jax.random.split(KEY, 3)[1]))
    np.testing.assert_allclose(
        pair["b"][1], alone.params.policy["lora"]["blocks"]["mlp"]["up"]["b"], atol=2e-5
    )


@cases(
    "settings, message",
    ({"rank": 0}, r"rank: must be a whole number in \[1, inf\), got 0"),
    ({"alpha": 0.0}, "alpha: must lie in"),
    ({"targets": ("embedding",)}, "targets: must be some of query, .* got embedding"),
    ({"targets": ()}, "targets: must be some of query, .* got nothing"),
)
def test_bad_adapters_are_named(settings, message):
    with pytest.raises(ConfigError, match=message):
        language.make_problem(TASK, SMALL.clone(lora=Lora(**settings)), initial={"params": {}})


def test_adapters_need_a_base():
    with pytest.raises(ConfigError, match="initial: must be given where the model has adapters"):
        language.make_problem(TASK, SMALL.clone(lora=LORA))
