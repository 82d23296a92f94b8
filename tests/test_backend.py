"""Programs for a GPU have few operations; they compute what those for a CPU do."""

import chex
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from traced import equations

from jaxrl_po import advantages, backend, config, control, masked, optimizers, updates
from jaxrl_po.algorithms import ppo
from jaxrl_po.control import hoisting, networks, recurrence, statistics


@pytest.fixture
def gpu(monkeypatch):
    """Programs are built as for a GPU."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")


def test_a_cpu_takes_one_step_of_a_loop_at_a_time():
    assert backend.on_cpu()
    assert backend.unroll(16) == 1


@pytest.mark.parametrize(
    ("devices", "cores", "expected"), [(2, 2, True), (8, 2, True), (1, 2, False), (2, 4, False)]
)
def test_a_device_may_be_one_core(devices, cores, expected, monkeypatch):
    monkeypatch.setattr(backend, "cores", lambda: cores)
    monkeypatch.setattr(jax, "local_device_count", lambda: devices)
    assert backend.one_core_each() is expected
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert not backend.one_core_each()


def iterations(memory):
    """Parameters and returns after five iterations of PPO on CartPole."""
    problem = control.from_settings(
        gymnax.make("CartPole-v1")[0],
        control.Settings(num_envs=4, num_steps=5, scale_rewards=True),
        control.NetworkSettings(width=8, depth=1, memory=memory),
    )
    learner = ppo.make(config.as_arrays(ppo.Config(num_epochs=1, num_minibatches=2)), problem)

    def train(key):
        def step(state, _):
            return learner.step(state)

        state, metrics = jax.lax.scan(step, learner.init(key), None, length=5)
        return state.params, metrics["episode_return"].value()

    return jax.jit(train)(jax.random.key(1))


@pytest.mark.parametrize("memory", ["none", pytest.param("gru", marks=pytest.mark.slow)])
def test_a_run_is_the_same_as_on_a_cpu(memory, request):
    want, of_cpu = iterations(memory)
    request.getfixturevalue("gpu")
    got, of_gpu = iterations(memory)
    chex.assert_trees_all_close(got, want, atol=1e-5)
    np.testing.assert_array_equal(of_gpu, of_cpu)


def loops(function, *arguments):
    program = jax.make_jaxpr(function)(*arguments)
    return [each for each in equations(program.jaxpr) if each.primitive.name == "scan"]


def scans(function, *arguments):
    """How many steps each loop of a program takes at a time."""
    return [each.params["unroll"] for each in loops(function, *arguments)]


def test_short_loops_take_several_steps_at_a_time(gpu):
    def generalised(x):
        zeros = jnp.zeros(40, bool)
        return advantages.gae(x, x, x, zeros, zeros, gamma=0.9, lambda_=0.8)

    assert scans(generalised, jnp.ones(40)) == [16]

    def walk(equations):
        @jax.jit
        def inner(x):
            for _ in range(equations - 1):  # the call is one itself
                x = jnp.sin(x)
            return x

        return lambda x: hoisting.scan(lambda x, _: 2 * (inner(x),), x, jnp.arange(40))

    assert scans(walk(hoisting.SHORT), 1.0) == [8]
    assert scans(walk(hoisting.SHORT + 1), 1.0) == [1]


def test_steps_with_long_loops_inside_are_taken_one_at_a_time(gpu):
    def step(x, _):
        def inner(x, _):
            for _ in range(hoisting.SHORT):
                x = jnp.sin(x)
            return x, None

        return 2 * (jax.lax.scan(inner, x, None, length=2)[0],)

    assert scans(lambda x: hoisting.scan(step, x, jnp.arange(40)), 1.0) == [1, 1]


def test_memories_and_rolling_returns_take_several_steps_at_a_time(gpu):
    cell = nn.GRUCell(3)
    memory, features, begins = jnp.zeros((2, 3)), jnp.ones((40, 2, 3)), jnp.zeros((40, 2), bool)
    params = cell.init(jax.random.key(0), memory, features[0])["params"]

    def total(params):
        return recurrence.gru(params, memory, features, begins).sum()

    assert scans(total, params) == [8]
    assert scans(jax.grad(total), params) == [8, 8]

    def rolling(reward):
        return statistics._rolling_return(jnp.zeros(2), reward, jnp.zeros((2, 40), bool), 0.9)

    assert scans(rolling, jnp.ones((2, 40))) == [16]


@pytest.mark.parametrize("length", [0, 1, 7, 8, 17])
def test_loops_of_any_length_take_several_steps_at_a_time(gpu, length):
    xs = jnp.arange(1.0, length + 1.0)
    last, sums = hoisting.scan(lambda total, x: (total + x, total + x), 0.0, xs)
    np.testing.assert_array_equal(sums, np.cumsum(xs))
    assert last == sum(range(length + 1))


def carried(params):
    """Shapes of the parameters that a loop of gradient steps hands on."""

    def loss(params, rows):
        error = masked.total(jnp.square(rows @ params["w"]), jnp.ones(rows.shape[0], bool))
        return (error,), {"loss": error}

    optimizer = optax.sgd(0.1)
    update = updates.gradient_update(loss, optimizer, num_minibatches=2)
    arguments = params, optimizer.init(params), jnp.ones((4, 3)), jax.random.key(0)
    (loop,) = loops(update, *arguments)
    fixed, moving = loop.params["num_consts"], loop.params["num_carry"]
    return [
        x.aval.shape for x in loop.invars[fixed : fixed + moving] if x.aval.dtype == jnp.float32
    ]


def test_gradient_steps_hand_on_one_vector(monkeypatch):
    params = {"w": jnp.ones(3), "b": jnp.ones((2, 2))}
    assert carried(params) == [(2, 2), (3,)]
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert carried(params) == [(7,)]


def test_a_small_tree_of_one_type_is_one_vector(gpu):
    tree = {"a": jnp.ones((2, 3)), "b": jnp.arange(4.0)}
    flat = optimizers.flattening(tree)
    assert flat.ravel(tree).shape == (10,)
    chex.assert_trees_all_equal(flat.unravel(flat.ravel(tree)), tree)
    assert flat.ravel({"a": 2.0 * tree["a"], "b": tree["b"]})[0] == 2.0


@pytest.mark.parametrize(
    "tree",
    [
        {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)},
        {"a": jax.ShapeDtypeStruct((optimizers.FLAT_UP_TO + 1,), jnp.float32)},
    ],
)
def test_other_trees_stay_as_they_are(gpu, tree):
    flat = optimizers.flattening(tree)
    assert flat.ravel(tree) is tree
    assert flat.unravel(tree) is tree


def test_a_product_is_the_plain_one(gpu):
    program = jax.make_jaxpr(networks.product)(jnp.ones((64, 16)), jnp.ones((16, 2)))
    assert [equation.primitive.name for equation in program.eqns] == ["dot_general"]
