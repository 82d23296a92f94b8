"""Tests the examples in one file: short, without an import from this package, equal to the library.

Random numbers of the examples are arguments: `rollout` and `sample` take a key for each action,
`update` takes the permutations. Example and library therefore start from the same parameters, and
all later numbers must be equal.
"""

import ast
import importlib.util
import subprocess
import sys
from pathlib import Path

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxrl_po import control, language, minibatches
from jaxrl_po.algorithms import grpo, ppo
from jaxrl_po.config import as_arrays
from jaxrl_po.control.problem import ENVIRONMENTS
from jaxrl_po.control.unroll import row_keys
from jaxrl_po.language.tasks import addition

EXAMPLES = Path(__file__).parent.parent / "examples"
FILES = ("ppo_single_file", "grpo_single_file")
ALLOWED = {"collections", "flax", "gymnax", "jax", "optax"}
UPDATES = 3
CLOSE = 1e-5  # largest difference of a parameter, float32


def load(name):
    """Loads a file as a separate module, whose constants a test may change."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def iteration_of(learner):
    """Returns the library's complete iteration as a program: state to state, batch, metrics."""

    def iterate(state):
        state, batch = learner.sample(state)
        state, metrics = learner.update(state, batch)
        return state, batch, metrics

    return jax.jit(iterate)


def library_keys(key):
    """Returns the keys for collecting and shuffling, as the library derives them."""
    following, collect_key = jax.random.split(key)
    return collect_key, jax.random.split(following)[1]


def library_orders(key, rows, config):
    """Returns the library's minibatches as row indices, `[steps, rows of a minibatch]`."""
    keys = jax.random.split(key, config.num_epochs)
    orders = jax.vmap(lambda key: minibatches.shuffle(key, rows, config.num_minibatches))(keys)
    return orders.reshape(config.num_epochs * config.num_minibatches, -1)


def add(history):
    """Adds the metrics of several iterations before their division."""
    return {
        name: float(sum((metrics[name] for metrics in history[1:]), mean).value())
        for name, mean in history[0].items()
    }


def assert_close(tree, other):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=CLOSE), tree, other)


@pytest.mark.parametrize("name", FILES)
def test_it_is_short_and_imports_nothing_of_ours(name):
    text = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add("" if node.level else node.module.split(".")[0])
    assert imported <= ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_it_runs_as_its_first_lines_say(name):
    subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], check=True, timeout=280)


def test_ppo_equals_the_library():
    """The test compares complete iterations; a time limit of 12 steps truncates episodes."""
    example = load("ppo_single_file")
    num_envs, num_steps, example.EPSILON = 4, 32, 0.01  # a small ε, so that ratios are clipped
    example.env_params = example.env_params.replace(max_steps_in_episode=12)
    env, _ = gymnax.make("CartPole-v1")
    problem = control.make_problem(
        env, num_envs=num_envs, num_steps=num_steps, env_params=example.env_params
    )
    config = ppo.Config(
        gamma=example.GAMMA,
        lambda_=example.LAMBDA,
        epsilon_low=example.EPSILON,
        epsilon_high=example.EPSILON,
        value_coefficient=example.VALUE_COEFFICIENT,
        entropy_coefficient=example.ENTROPY_COEFFICIENT,
        learning_rate=example.LEARNING_RATE,
        max_grad_norm=example.MAX_NORM,
        num_epochs=example.NUM_EPOCHS,
        num_minibatches=example.NUM_MINIBATCHES,
    )
    learner = ppo.make(as_arrays(config), problem)
    iterate = iteration_of(learner)
    state = jax.jit(learner.init)(jax.random.key(0))
    state = state._replace(params=decided(state.params))
    start = state.collector.sharded[ENVIRONMENTS]
    params, envs = (
        in_one_network(state.params),
        (start.state, start.observation, start.episode_return),
    )
    opt_state = example.optimizer.init(params)

    def keys_of_steps(key):
        def of_step(t):
            keys = row_keys(key, start.number)
            return jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, t)))(keys)

        return jax.vmap(of_step)(jnp.arange(num_steps))

    @jax.jit
    def iterate_example(params, opt_state, envs, key):
        collect_key, improve_key = library_keys(key)
        envs, (mine, _) = example.rollout(params, envs, keys_of_steps(collect_key))
        # The rows of the library are ordered by environments, then by steps.
        orders = library_orders(improve_key, num_envs * num_steps, config)
        orders = orders % num_steps * num_envs + orders // num_steps
        return *example.update(params, opt_state, mine, orders), envs, mine

    history = []
    for _ in range(UPDATES):
        params, opt_state, envs, mine = iterate_example(params, opt_state, envs, state.key)
        state, batch, metrics = iterate(state)
        assert_close(mine.observation, batch.inputs.swapaxes(0, 1))
        for name in ("action", "log_prob", "reward", "terminated", "truncated"):
            assert_close(getattr(mine, name) * 1.0, getattr(batch, name).T * 1.0)
        assert_close(params, in_one_network(state.params))
        history.append(metrics)
        assert batch.terminated.any()
        assert (batch.truncated & ~batch.terminated).any()
    # The cases in which a mistake would be visible do occur.
    pooled = add(history)
    assert pooled["clip_fraction_low"] > 0
    assert pooled["clip_fraction_high"] > 0
    assert pooled["grad_norm"] > example.MAX_NORM


def decided(params):
    """Returns a policy that is no longer uniform, so that its entropy has a gradient."""
    policy = params.policy["params"]
    head = jax.tree.map(lambda x: 100.0 * x, policy["head"])
    return params._replace(policy={"params": policy | {"head": head}})


def in_one_network(params):
    """Returns the library's actor and critic as parameters of the example's network."""
    policy, critic = params.policy["params"], params.value["params"]
    layers = [
        *(policy["torso"]["Dense_0"], policy["torso"]["Dense_1"], policy["head"]["Dense_0"]),
        *(critic["torso"]["Dense_0"], critic["torso"]["Dense_1"]),
        critic["ValueHead_0"]["Dense_0"],
    ]
    return {"params": {f"Dense_{i}": layer for i, layer in enumerate(layers)}}


class Speaking:
    """The example's transformer with the interface of the library's sampler.

    The transformer's cache consists of tokens.
    """

    def __init__(self, example, params):
        self.network, self.params, self.vocabulary = example.network, params, example.VOCABULARY

    def init(self, key, tokens, pad):
        del key, tokens, pad
        return self.params

    def empty_cache(self, batch, length):
        return jnp.zeros((batch, length), jnp.int32)

    def apply(self, params, tokens, pad, cache=None, start=0, *, last=0):
        del pad  # all prompts have one length
        new = tokens.shape[1]
        if cache is None:
            return self.network.apply(params, tokens)[:, -last:], None
        cache = jax.lax.dynamic_update_slice_in_dim(cache, tokens, start, axis=1)
        logits = jax.lax.dynamic_slice_in_dim(self.network.apply(params, cache), start, new, axis=1)
        return logits[:, -last:], cache


def test_grpo_equals_the_library():
    """The test compares complete iterations, from a policy that is right now and then."""
    example = load("grpo_single_file")
    example.NUM_PROMPTS, example.GROUP_SIZE, example.LAYERS, example.EPSILON = 8, 4, 1, 0.05
    # Example and library use a larger ε than the default: Adam would otherwise turn gradients of
    # pure rounding into steps.
    optimizer = optax.adam(example.LEARNING_RATE, eps=1e-5)
    example.optimizer = optax.chain(optax.clip_by_global_norm(example.MAX_NORM), optimizer)
    prompts = example.write_prompts(*jnp.divmod(jnp.arange(100), 10))
    tokens = jnp.concatenate([prompts, example.right_answers(prompts)], axis=1)
    params = jax.jit(example.network.init)(jax.random.key(0), tokens)
    carry = params, example.optimizer.init(params)
    imitate = jax.jit(lambda carry: example.adam(example.supervised_loss, *carry, tokens))
    for _ in range(60):
        carry = imitate(carry)
    params = reference_params = carry[0]

    group_size = example.GROUP_SIZE
    rows = example.NUM_PROMPTS * group_size
    problem = language.make_problem(
        addition(1, reverse=False),
        Speaking(example, params),
        num_prompts=example.NUM_PROMPTS,
        group_size=group_size,
    )
    config = grpo.Config(
        epsilon_low=example.EPSILON,
        epsilon_high=example.EPSILON,
        kl_coefficient=example.BETA,
        num_epochs=4,
        num_minibatches=example.NUM_MINIBATCHES,
    )
    learner = grpo.make(as_arrays(config), problem, example.optimizer)
    iterate = iteration_of(learner)
    state = jax.jit(learner.init)(jax.random.key(0))
    opt_state = example.optimizer.init(params)

    def keys_of_tokens(key):
        prompt_keys = row_keys(key, jnp.arange(example.NUM_PROMPTS))
        keys = jax.vmap(lambda key: jax.random.split(key)[1])(prompt_keys)
        keys = jax.vmap(lambda key: row_keys(key, jnp.arange(group_size)))(keys).reshape(rows)
        fold_in = jax.vmap(jax.random.fold_in, (0, None))
        return jax.vmap(fold_in, (None, 0))(keys, jnp.arange(example.ANSWER))

    @jax.jit
    def iterate_example(params, opt_state, prompts, key):
        collect_key, improve_key = library_keys(key)
        mine = example.sample(params, prompts, keys_of_tokens(collect_key))
        orders = library_orders(improve_key, rows, config)
        return *example.update(params, opt_state, reference_params, mine, orders), mine

    history = []
    for _ in range(UPDATES):
        key = state.key
        state, batch, metrics = iterate(state)
        prompts = np.asarray(batch.inputs.tokens)[:, : example.PROMPT]
        params, opt_state, mine = iterate_example(params, opt_state, prompts, key)
        assert_close(mine.tokens, batch.inputs.tokens)
        assert_close(mine.mask * 1.0, batch.mask * 1.0)
        assert_close(mine.log_prob * mine.mask, batch.log_prob)
        assert_close(mine.reward, batch.score.ravel())
        assert_close(params, state.params.policy)
        history.append(metrics)
    # The cases in which a mistake would be visible do occur.
    pooled = add(history)
    assert 0 < pooled["dead_groups"] < 1
    assert pooled["frac_masked"] > 0
    assert pooled["reference_kl"] > 0.01
    assert pooled["clip_fraction_low"] > 0
    assert pooled["clip_fraction_high"] > 0
    assert pooled["grad_norm"] > example.MAX_NORM
