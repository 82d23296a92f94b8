"""Tests the gradient update: denominators, shuffles, skips and stops."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tables import cases
from traced import equations

from jaxrl_po import masked, minibatches, updates
from jaxrl_po.backend import Target
from jaxrl_po.masked import Mean
from jaxrl_po.types import ActorCritic


def regression(params, samples):
    """Computes two means with different denominators, as in a policy loss and a value loss."""
    error = jnp.square(samples["x"] @ params["w"] - samples["y"])
    loss = masked.total(error, samples["mask"])
    return (
        loss,
        Mean(0.1 * jnp.sum(params["w"] ** 2) * error.shape[0], jnp.float32(error.shape[0])),
    ), {"loss": loss}


def make_samples(rows=32, seed=0):
    rng = np.random.default_rng(seed)
    mask = rng.random(rows) < 0.7
    # The mask is uneven: shards and microbatches have very different counts.
    mask[: rows // 4] = rng.random(rows // 4) < 0.2
    return {
        "x": rng.normal(size=(rows, 3)).astype(np.float32),
        "y": rng.normal(size=rows).astype(np.float32),
        "mask": mask,
    }


PARAMS = {"w": jnp.array([0.3, -0.2, 0.1])}


SGD, ADAM = optax.sgd(0.1), optax.adam(0.1)


@functools.cache
def program(optimizer, **options):
    return jax.jit(updates.gradient_update(regression, optimizer, **options))


def run(samples=None, params=PARAMS, optimizer=SGD, key=0, **options):
    return program(optimizer, **options)(
        params,
        optimizer.init(params),
        make_samples() if samples is None else samples,
        jax.random.key(key),
    )


def test_step_is_the_gradient_of_divided_sum():
    samples = make_samples()

    def objective(params):
        error = jnp.square(samples["x"] @ params["w"] - samples["y"])
        return jnp.sum(error * samples["mask"]) / samples["mask"].sum() + 0.1 * jnp.sum(
            params["w"] ** 2
        )

    gradient = jax.grad(objective)(PARAMS)
    params, _, metrics = run()
    np.testing.assert_allclose(params["w"], PARAMS["w"] - 0.1 * gradient["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"].value(), optax.tree.norm(gradient), rtol=1e-5)


def test_microbatches_do_not_change_the_update():
    whole, _, metrics = run(num_epochs=2, num_minibatches=2)
    split, _, split_metrics = run(num_epochs=2, num_minibatches=2, num_microbatches=4)
    chex.assert_trees_all_close(whole, split, rtol=1e-5)
    chex.assert_trees_all_close(metrics, split_metrics, rtol=1e-4)


def computed_rows(**options):
    """Returns the number of rows that the program multiplies with the parameters at a time."""
    optimizer = optax.sgd(0.1)
    update = updates.gradient_update(regression, optimizer, **options)
    arguments = PARAMS, optimizer.init(PARAMS), make_samples(rows=64), jax.random.key(0)
    program = jax.make_jaxpr(update)(*arguments)
    return {
        operation.invars[0].aval.shape[0]
        for operation in equations(program.jaxpr)
        if operation.primitive.name == "dot_general" and operation.outvars[0].aval.ndim == 1
    }


def test_parts_of_a_minibatch_give_same_update(monkeypatch):
    monkeypatch.setattr(minibatches, "AT_A_TIME", 8)
    one_each = Target("cpu", devices=2, cores=2)
    assert computed_rows() == {64}
    assert computed_rows(slots=1, target=one_each) == {8}
    assert computed_rows(slots=2, target=one_each) == {4}
    assert computed_rows(slots=1, target=one_each, num_microbatches=2) == {8}
    assert computed_rows(num_microbatches=2) == {32}
    whole, _, metrics = run(num_epochs=2, num_minibatches=2)
    parts, _, metrics_of_parts = run(num_epochs=2, num_minibatches=2, slots=2, target=one_each)
    chex.assert_trees_all_close(whole, parts, rtol=1e-5)
    chex.assert_trees_all_close(metrics, metrics_of_parts, rtol=1e-4)


@cases("options", {}, {"num_microbatches": 2}, {"stop": lambda _: jnp.bool_(False)})
def test_loss_is_traced_once_for_counts_and_gradient(options):
    traced = []

    def loss(params, samples):
        traced.append(samples)
        return regression(params, samples)

    optimizer = optax.sgd(0.1)
    update = updates.gradient_update(loss, optimizer, num_epochs=2, num_minibatches=2, **options)
    jax.make_jaxpr(update)(PARAMS, optimizer.init(PARAMS), make_samples(), jax.random.key(0))
    assert len(traced) == 2


@cases("devices", 2, 4, 8)
@cases("num_minibatches", 1, 4)
def test_devices_do_not_change_the_update(devices, num_minibatches):
    optimizer, samples = optax.sgd(0.1), make_samples(rows=256)
    options = {"num_epochs": 2, "num_minibatches": num_minibatches}
    alone = run(samples, **options)
    update = updates.gradient_update(regression, optimizer, axis_name="data", **options)
    mesh = Mesh(np.array(jax.devices()[:devices]), ("data",))

    def step(params, opt_state, samples, key):
        params, opt_state, metrics = update(params, opt_state, samples, key)
        return jax.tree.map(lambda x: x[None], params), masked.psum(metrics, "data")

    sharded = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P()),
        out_specs=(P("data"), P()),
        check_vma=False,
    )
    params, metrics = jax.jit(sharded)(PARAMS, optimizer.init(PARAMS), samples, jax.random.key(0))
    for device in range(devices):
        np.testing.assert_array_equal(params["w"][device], params["w"][0])
    np.testing.assert_allclose(params["w"][0], alone[0]["w"], rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"].value(), alone[2]["loss"].value(), rtol=1e-5)


def test_each_step_divides_by_its_minibatch_counts():
    samples, key = make_samples(), jax.random.key(3)
    params, _, _ = run(samples, key=3, num_minibatches=4)
    [epoch] = jax.random.split(key, 1)
    by_hand = PARAMS
    for order in np.asarray(minibatches.shuffle(epoch, 32, 4)):
        by_hand, _, _ = run(jax.tree.map(lambda x, order=order: x[order], samples), by_hand)
    np.testing.assert_allclose(params["w"], by_hand["w"], rtol=1e-5)


def test_empty_minibatch_changes_nothing_not_even_momentum():
    samples = make_samples() | {"mask": jnp.zeros(32, bool)}

    def only_masked(params, samples):
        means, metrics = regression(params, samples)
        return means[:1], metrics

    optimizer = optax.adam(0.1)
    state = optimizer.update(jax.tree.map(jnp.ones_like, PARAMS), optimizer.init(PARAMS))[1]
    update = jax.jit(updates.gradient_update(only_masked, optimizer, num_epochs=3))
    params, opt_state, metrics = update(PARAMS, state, samples, jax.random.key(0))
    chex.assert_trees_all_equal((params, opt_state), (PARAMS, state))
    assert float(metrics["updates"].value()) == 0.0
    assert float(metrics["skipped"].value()) == 0.0
    assert np.isfinite(metrics["grad_norm"].value())


def of_mask(samples):
    return samples["mask"]


@cases("num_microbatches", 1, 2)
def test_minibatches_are_empty_by_their_mask(num_microbatches):
    """The second mean of `regression` counts masked rows, as `losses.fixed_length_mean` does."""
    samples = make_samples() | {"mask": jnp.arange(32) == 5}
    state = ADAM.update(jax.tree.map(jnp.ones_like, PARAMS), ADAM.init(PARAMS))[1]
    options = {"mask_of": of_mask, "num_microbatches": num_microbatches}
    [epoch] = jax.random.split(jax.random.key(0), 1)
    order = next(rows for rows in np.asarray(minibatches.shuffle(epoch, 32, 4)) if 5 in rows)
    _, _, metrics = run(samples, optimizer=ADAM, num_minibatches=4, **options)
    assert float(metrics["updates"].value()) == 0.25
    some = program(ADAM, num_minibatches=4, **options)
    only = program(ADAM, **options)
    after, opt_state, _ = some(PARAMS, state, samples, jax.random.key(0))
    of_one = jax.tree.map(lambda x: x[order], samples)
    want, want_state, _ = only(PARAMS, state, of_one, jax.random.key(0))
    chex.assert_trees_all_close((after, opt_state), (want, want_state), rtol=1e-5)
    assert not np.array_equal(after["w"], PARAMS["w"])


@cases("unmasked", 0, 1)
def test_devices_agree_whether_a_minibatch_is_empty(unmasked):
    samples = make_samples(rows=64) | {"mask": jnp.arange(64) < unmasked}
    state = ADAM.update(jax.tree.map(jnp.ones_like, PARAMS), ADAM.init(PARAMS))[1]
    update = updates.gradient_update(regression, ADAM, mask_of=of_mask, axis_name="data")
    sharded = jax.shard_map(
        lambda samples: update(PARAMS, state, samples, jax.random.key(0))[0]["w"][None],
        mesh=Mesh(np.array(jax.devices()[:8]), ("data",)),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    for each in jax.jit(sharded)(samples):
        assert np.array_equal(each, PARAMS["w"]) == (unmasked == 0)


@cases("poison", jnp.nan, jnp.inf, 1e30)
def test_non_finite_step_is_skipped_and_counted(poison):
    samples = make_samples()
    samples["y"][samples["mask"].argmax()] = poison
    params, opt_state, metrics = run(samples, optimizer=ADAM, num_epochs=2, num_minibatches=4)
    chex.assert_tree_all_finite((params, opt_state))
    chex.assert_tree_all_finite(metrics)
    # one of the four minibatches of each epoch is not finite
    assert float(metrics["skipped"].value()) == pytest.approx(0.25)
    assert float(metrics["updates"].value()) == pytest.approx(0.75)
    assert not np.array_equal(params["w"], PARAMS["w"])


def test_stop_leaves_out_that_step_and_the_rest():
    def threshold(metrics):
        return metrics["loss"].value() < 1.0

    optimizer = optax.sgd(0.1)
    losses, params = [], PARAMS
    update = jax.jit(updates.gradient_update(regression, optimizer))
    while True:
        after, _, metrics = update(
            params, optimizer.init(params), make_samples(), jax.random.key(0)
        )
        losses.append(float(metrics["loss"].value()))
        if losses[-1] < 1.0:
            break
        params = after
    taken = len(losses) - 1
    assert 0 < taken < 20
    stopped, _, metrics = run(num_epochs=20, stop=threshold)
    chex.assert_trees_all_close(stopped, params, rtol=1e-6)
    assert float(metrics["updates"].value()) == pytest.approx(taken / 20)
    assert float(metrics["loss"].value()) == pytest.approx(np.mean(losses), rel=1e-5)


@cases(
    "options, parts",
    ({}, 1),
    ({"num_microbatches": 2}, 2),
    ({"stop": lambda _: jnp.bool_(False)}, 1),
)
@cases("jitted", False, True)
def test_a_loss_calls_back_once_per_step(options, parts, jitted):
    seen = []

    def printing(params, samples):
        jax.debug.callback(seen.append, samples["y"].sum())
        return regression(params, samples)

    loss = jax.jit(printing) if jitted else printing
    update = updates.gradient_update(loss, SGD, num_epochs=2, num_minibatches=4, **options)
    arguments = PARAMS, SGD.init(PARAMS), make_samples(), jax.random.key(0)
    whole = jax.block_until_ready(jax.jit(update)(*arguments))
    jax.effects_barrier()
    assert len(seen) == 2 * 4 * parts
    np.testing.assert_allclose(sum(seen), 2 * make_samples()["y"].sum(), rtol=1e-4)
    chex.assert_trees_all_equal(whole, run(num_epochs=2, num_minibatches=4, **options))


class Sequence(NamedTuple):
    x: jax.Array
    mask: jax.Array  # True in padded positions


def test_a_mask_of_own_samples_is_not_read():
    def loss(params, samples):
        return (Mean((params * samples.x).sum(), jnp.float32(samples.x.size)),), {}

    update = updates.gradient_update(loss, optax.sgd(0.1))
    rows = Sequence(jnp.ones(4), jnp.zeros(4, bool))
    after, _, metrics = update(jnp.float32(1.0), optax.sgd(0.1).init(1.0), rows, jax.random.key(0))
    assert (round(float(after), 6), float(metrics["updates"].value())) == (0.9, 1.0)


def test_own_methods_leave_constants_as_they_are():
    def loss(params, x):
        scale = params.variables("policy")["constants"] * params.frozen
        return (Mean((params.policy["params"] * scale * x).sum(), jnp.float32(x.size)),), {}

    params = ActorCritic(
        {"params": jnp.float32(1.0)}, None, jnp.float32(2.0), {"policy": {"constants": 3.0}}
    )
    optimizer = optax.adam(0.1)
    update = updates.gradient_update(loss, optimizer, num_epochs=2)
    after, _, _ = update(
        params, optimizer.init(params.without_frozen()), jnp.ones(4), jax.random.key(0)
    )
    assert float(after.policy["params"]) < 0.85
    assert (after.frozen, after.constants) == (params.frozen, params.constants)
