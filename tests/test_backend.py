"""Tests programs for a target: a GPU's program has few operations and gives the results of a CPU's
program."""

import chex
import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tables import cases
from traced import equations

from jaxrl_po import advantages, backend, config, control, language, masked, optimizers, updates
from jaxrl_po.algorithms import grpo, ppo, trpo
from jaxrl_po.backend import Target
from jaxrl_po.control import hoisting, recurrence, statistics

GPU = Target("gpu", devices=1, cores=8)


def test_target_defaults_to_this_process():
    assert backend.here() == ("cpu", jax.local_device_count(), backend.cores())
    problem = control.make_problem(gymnax.make("CartPole-v1")[0], num_envs=2, num_steps=2)
    assert problem.target == backend.here()
    assert (
        problem.with_target(GPU).target == problem.with_target(GPU).with_target(None).target == GPU
    )


@cases("devices, cores, expected", (2, 2, True), (8, 2, True), (1, 2, False), (2, 4, False))
def test_a_device_may_be_one_core(devices, cores, expected):
    assert Target("cpu", devices, cores).one_core_each is expected
    assert not Target("gpu", devices, cores).one_core_each


def iterations(target):
    """Returns parameters and returns after five iterations of PPO on CartPole."""
    problem = control.make_problem(
        gymnax.make("CartPole-v1")[0],
        num_envs=4,
        num_steps=5,
        scale_rewards=True,
        network=control.NetworkSettings(width=8, depth=1),
        target=target,
    )
    learner = ppo.make(config.as_arrays(ppo.Config(num_epochs=1, num_minibatches=2)), problem)

    def train(key):
        def step(state, _):
            return learner.step(state)

        state, metrics = jax.lax.scan(step, learner.init(key), None, length=5)
        return state.params, metrics["episode_return"].value()

    return jax.jit(train)(jax.random.key(1))


def test_run_is_the_same_as_on_cpu():
    want, of_cpu = iterations(None)
    got, of_gpu = iterations(GPU)
    chex.assert_trees_all_close(got, want, atol=1e-5)
    np.testing.assert_array_equal(of_gpu, of_cpu)


def loops(function, *arguments):
    program = jax.make_jaxpr(function)(*arguments)
    return [each for each in equations(program.jaxpr) if each.primitive.name == "scan"]


def scans(function, *arguments):
    """Returns the number of steps that each loop of a program takes at a time."""
    return [each.params["unroll"] for each in loops(function, *arguments)]


def test_short_loops_take_several_steps_at_a_time():
    def generalised(x):
        zeros = jnp.zeros(40, bool)
        return advantages.gae(x, x, x, zeros, zeros, gamma=0.9, lambda_=0.8, unroll=16)

    assert scans(generalised, jnp.ones(40)) == [16]

    def walk(equations):
        @jax.jit
        def inner(x):
            for _ in range(equations - 1):  # the call itself is an equation too
                x = jnp.sin(x)
            return x

        return lambda x: hoisting.scan(lambda x, _: 2 * (inner(x),), x, jnp.arange(40), unroll=8)

    assert scans(walk(hoisting.SHORT), 1.0) == [8]
    assert scans(walk(hoisting.SHORT + 1), 1.0) == [1]


def test_steps_with_long_inner_loops_run_in_sequence():
    def step(x, _):
        def inner(x, _):
            for _ in range(hoisting.SHORT):
                x = jnp.sin(x)
            return x, None

        return 2 * (jax.lax.scan(inner, x, None, length=2)[0],)

    assert scans(lambda x: hoisting.scan(step, x, jnp.arange(40), unroll=8), 1.0) == [1, 1]


def test_memories_and_returns_unroll_several_steps():
    cell = nn.GRUCell(3)
    memory, features, begins = jnp.zeros((2, 3)), jnp.ones((40, 2, 3)), jnp.zeros((40, 2), bool)
    params = cell.init(jax.random.key(0), memory, features[0])["params"]

    def total(params):
        return recurrence.run_gru(params, memory, features, begins, 8).sum()

    assert scans(total, params) == [8]
    assert scans(jax.grad(total), params) == [8, 8]

    def rolling(reward):
        return statistics._rolling_return(jnp.zeros(2), reward, jnp.zeros((2, 40), bool), 0.9, 16)

    assert scans(rolling, jnp.ones((2, 40))) == [16]


@cases("length", 0, 1, 7, 8, 17)
def test_loops_of_any_length_unroll_several_steps(length):
    xs = jnp.arange(1.0, length + 1.0)
    last, sums = hoisting.scan(lambda total, x: (total + x, total + x), 0.0, xs, unroll=8)
    np.testing.assert_array_equal(sums, np.cumsum(xs))
    assert last == sum(range(length + 1))


def carried(params, target):
    """Returns shapes of the parameters that a loop of gradient steps carries."""

    def loss(params, rows):
        error = masked.total(jnp.square(rows @ params["w"]), jnp.ones(rows.shape[0], bool))
        return (error,), {"loss": error}

    optimizer = optax.sgd(0.1)
    update = updates.gradient_update(loss, optimizer, num_minibatches=2, target=target)
    arguments = params, optimizer.init(params), jnp.ones((4, 3)), jax.random.key(0)
    (loop,) = loops(update, *arguments)
    fixed, moving = loop.params["num_consts"], loop.params["num_carry"]
    return [
        x.aval.shape for x in loop.invars[fixed : fixed + moving] if x.aval.dtype == jnp.float32
    ]


def test_gradient_steps_hand_on_one_vector():
    params = {"w": jnp.ones(3), "b": jnp.ones((2, 2))}
    assert carried(params, None) == carried(params, backend.here()) == [(2, 2), (3,)]
    assert carried(params, GPU) == [(7,)]


@cases(
    "tree",
    {"a": jnp.ones(2), "b": jnp.ones(2, jnp.bfloat16)},
    {"a": jax.ShapeDtypeStruct((optimizers.FLAT_UP_TO + 1,), jnp.float32)},
)
def test_other_trees_stay_as_they_are(tree):
    flat = optimizers.flattening(tree, GPU)
    assert flat.ravel(tree) is tree
    assert flat.unravel(tree) is tree


def on_cartpole(algorithm, config, target):
    problem = control.make_problem(
        gymnax.make("CartPole-v1")[0],
        num_envs=4,
        num_steps=256,
        scale_rewards=True,
        network=control.NetworkSettings(width=8, depth=1),
        target=target,
    )
    return algorithm.make(config, problem, target=target), problem


def on_sums(algorithm, config, target):
    task = language.tasks.addition(1)
    model = language.Transformer(task.tokenizer.size, width=8, layers=5, heads=2)
    problem = language.make_problem(task, model, num_prompts=4, group_size=8, target=target)
    return algorithm.make(config, problem, target=target), problem


def choices(make, algorithm, config, target, monkeypatch):
    """Returns the choices by platform that a traced program shows.

    The choices are: the steps that short loops take at a time, whether a loop carries all trained
    parameters as one vector, whether products are the CPU's own, and whether a minibatch is
    computed in parts.
    """
    with monkeypatch.context() as patched:
        patched.setattr(backend, "here", lambda: pytest.fail("the target was given"))
        learner, problem = make(algorithm, config, target)
        start = learner.init, jax.random.key(0)
        program = jax.make_jaxpr(learner.step)(jax.eval_shape(*start))
    trained = jax.eval_shape(*start).params.without_frozen()
    sizes = {sum(x.size for x in jax.tree.leaves(part)) for part in trained if part}
    every = list(equations(program.jaxpr))
    names = [each.primitive.name for each in every]
    inner = [each for each in every if each.primitive.name == "scan"]
    carried = [[x.aval.shape for x in each.invars] for each in inner]
    return {
        "at a time": {each.params["unroll"] for each in inner},
        # Adam's two moments are vectors on every platform
        "one vector": any(x.count((n,)) > 2 for x in carried for n in {*sizes, sum(sizes)}),
        "own products": "optimization_barrier" in names or "custom_jvp_call" in names,
        "in parts": any(each.params["length"] == 4 for each in inner),
        "exact": problem.log_prob_matches_sampler,
    }


@cases(
    "make, algorithm, config",
    (on_cartpole, ppo, ppo.Config(num_minibatches=1, num_epochs=2)),
    (on_cartpole, trpo, trpo.Config(value_minibatches=1, value_epochs=2)),
    (on_sums, grpo, grpo.Config()),
)
def test_a_program_for_another_platform_is_traced_here(make, algorithm, config, monkeypatch):
    case = make, algorithm, config
    cpu = choices(*case, Target("cpu", devices=2, cores=2), monkeypatch)
    tpu = choices(*case, Target("tpu", devices=4, cores=2), monkeypatch)
    of_control = make is on_cartpole
    assert cpu == {
        "at a time": {1},
        "one vector": False,
        "own products": True,
        "in parts": of_control,  # the number of tokens is small
        "exact": True,
    }
    assert tpu == {
        "at a time": {1, 8, 16} if of_control else {1},
        "one vector": True,
        "own products": False,
        "in parts": False,
        "exact": of_control,  # float32 products are not exact on the other platform
    }


def test_method_may_target_another_platform_than_its_problem():
    learner = ppo.make(ppo.Config(), on_cartpole(ppo, ppo.Config(), None)[1], target=GPU)
    state = jax.eval_shape(learner.init, jax.random.key(0))
    unrolled = {each.params["unroll"] for each in loops(learner.step, state)}
    assert unrolled == {1, 16}  # the rollout's loops belong to the problem
