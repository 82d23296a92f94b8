"""Implements PPO on CartPole in one file: training is one jitted function, vmapped over seeds.

    Run: python examples/ppo_single_file.py

The script needs only jax, flax, optax and gymnax (and six, which gymnax does not install): read the
file from top to bottom and change anything in it. Source: Schulman et al. 2017 (arXiv:1707.06347).
"""

from collections import namedtuple

import flax.linen as nn
import gymnax
import jax
import jax.numpy as jnp
import optax

NUM_ENVS, NUM_STEPS = 16, 128  # B environments, T steps of each environment per rollout
NUM_EPOCHS, NUM_MINIBATCHES = 4, 4
GAMMA, LAMBDA, EPSILON = 0.99, 0.95, 0.2  # the ratio is clipped to 1 ± EPSILON
VALUE_COEFFICIENT, ENTROPY_COEFFICIENT = 0.5, 0.01
LEARNING_RATE, MAX_NORM = 1e-3, 0.5

env, env_params = gymnax.make("CartPole-v1")


class ActorCritic(nn.Module):
    """Actor and critic with separate hidden layers."""

    @nn.compact
    def __call__(self, observation):
        """Maps observations `[..., D]` to logits of the actions `[..., A]` and values `[...]`."""
        # Not orthogonal: several QR factorisations, vmapped over seeds, can hang on a CPU.
        x = nn.tanh(nn.Dense(64)(observation))
        x = nn.tanh(nn.Dense(64)(x))
        logits = nn.Dense(env.num_actions, kernel_init=nn.initializers.normal(0.01))(x)
        x = nn.tanh(nn.Dense(64)(observation))
        x = nn.tanh(nn.Dense(64)(x))
        return logits, nn.Dense(1)(x)[..., 0]


network = ActorCritic()
optimizer = optax.chain(optax.clip_by_global_norm(MAX_NORM), optax.adam(LEARNING_RATE, eps=1e-5))
Batch = namedtuple(  # leaves [T, B, ...]
    "Batch", "observation action log_prob reward next_observation terminated truncated"
)


def log_prob_of(action, logits):
    """Computes the log-probabilities of the actions, `[...]`."""
    return -optax.softmax_cross_entropy_with_integer_labels(logits, action)


def rollout(params, envs, keys):
    """Takes T steps with `keys` `[T, B, 2]`; `envs` holds state, observation and return so far."""

    def step(envs, keys):
        state, observation, so_far = envs
        logits, _ = network.apply(params, observation)
        action = jax.vmap(jax.random.categorical)(keys[:, 0], logits)
        answer = jax.vmap(env.step, (0, 0, 0, None))(keys[:, 1], state, action, env_params)
        following, state, reward, terminated, truncated, info = answer
        # At an episode's end gymnax resets by itself: `following` is then the first observation of
        # the next episode, and only `info` has the last observation of the old episode.
        log_prob, final = log_prob_of(action, logits), info["final_observation"]
        batch = Batch(observation, action, log_prob, reward, final, terminated, truncated)
        so_far, ended = so_far + reward, terminated | truncated
        return (state, following, so_far * ~ended), (batch, (so_far * ended, ended))

    return jax.lax.scan(step, envs, keys)


def gae(reward, value, next_value, terminated, truncated):
    """Computes generalised advantages, `[T, B]` (Schulman et al. 2016, arXiv:1506.02438)."""
    # The return after a termination is 0; after a truncation the critic's value replaces it.
    delta = reward + GAMMA * jnp.where(terminated, 0.0, next_value) - value
    decay = GAMMA * LAMBDA * (1.0 - (terminated | truncated))

    def step(advantage, delta_and_decay):
        delta, decay = delta_and_decay
        advantage = delta + decay * advantage
        return advantage, advantage

    return jax.lax.scan(step, jnp.zeros_like(delta[0]), (delta, decay), reverse=True)[1]


def ppo_loss(params, observation, action, old_log_prob, advantage, target):
    """Sums clipped surrogate, error of the critic and entropy bonus into a scalar to minimise."""
    logits, value = network.apply(params, observation)
    ratio = jnp.exp(log_prob_of(action, logits) - old_log_prob)
    clipped = jnp.clip(ratio, 1.0 - EPSILON, 1.0 + EPSILON)
    policy_loss = -jnp.minimum(ratio * advantage, clipped * advantage).mean()
    value_loss = 0.5 * jnp.square(value - target).mean()
    entropy = -jnp.sum(jax.nn.softmax(logits) * jax.nn.log_softmax(logits), axis=-1).mean()
    return policy_loss + VALUE_COEFFICIENT * value_loss - ENTROPY_COEFFICIENT * entropy


def update(params, opt_state, batch, orders):
    """Takes a step for each row of `orders`, the indices of a minibatch among the T * B samples."""
    _, value = network.apply(params, batch.observation)
    _, next_value = network.apply(params, batch.next_observation)
    advantage = gae(batch.reward, value, next_value, batch.terminated, batch.truncated)
    target = advantage + value
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    samples = (batch.observation, batch.action, batch.log_prob, advantage, target)
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)

    def step(carry, order):
        params, opt_state = carry
        gradient = jax.grad(ppo_loss)(params, *jax.tree.map(lambda x: x[order], samples))
        change, opt_state = optimizer.update(gradient, opt_state)
        return (optax.apply_updates(params, change), opt_state), None

    return jax.lax.scan(step, (params, opt_state), orders)[0]


def train(key, iterations):
    """Trains one seed; returns its parameters, and sum and number of its episode returns."""
    key, params_key, env_key = jax.random.split(key, 3)
    env_keys = jax.random.split(env_key, NUM_ENVS)
    observation, state = jax.vmap(env.reset, (0, None))(env_keys, env_params)
    params = network.init(params_key, observation)

    def iteration(carry, key):
        params, opt_state, envs = carry
        rollout_key, shuffle_key = jax.random.split(key)
        keys = jax.random.split(rollout_key, (NUM_STEPS, NUM_ENVS, 2))
        envs, (batch, episodes) = rollout(params, envs, keys)
        rows = jnp.tile(jnp.arange(NUM_STEPS * NUM_ENVS), (NUM_EPOCHS, 1))
        orders = jax.random.permutation(shuffle_key, rows, axis=1, independent=True)
        orders = orders.reshape(NUM_EPOCHS * NUM_MINIBATCHES, -1)
        params, opt_state = update(params, opt_state, batch, orders)
        return (params, opt_state, envs), jax.tree.map(jnp.sum, episodes)

    carry = params, optimizer.init(params), (state, observation, jnp.zeros(NUM_ENVS))
    (params, _, _), episodes = jax.lax.scan(iteration, carry, jax.random.split(key, iterations))
    return params, episodes


def main(total_steps=250_000, seeds=4):
    """Trains the seeds in parallel, then prints the mean return of each seed during training."""
    iterations = total_steps // (NUM_STEPS * NUM_ENVS)
    keys = jax.random.split(jax.random.key(0), seeds)
    _, (total, count) = jax.jit(jax.vmap(lambda key: train(key, iterations)))(keys)
    for part in jnp.array_split(jnp.arange(iterations), min(10, iterations)):
        mean = "  ".join(f"{x:5.1f}" for x in total[:, part].sum(1) / count[:, part].sum(1))
        print(f"step {(part[-1] + 1) * NUM_STEPS * NUM_ENVS:6d}: mean return of each seed {mean}")


if __name__ == "__main__":
    main()
